"""What operators share whose one differentiable result is a loss and whose one gradient is that of the logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.operators.library import Once, placeholders, plain, register, save, saved
from lossforge.losses.operators.numbers import backward_of

Gradient = Callable[[Any, Tensor | None], Tensor | None]
Direct = Callable[[Any, bool], Tensor]


def single(
    name: str,
    arguments: Any,
    kept: Sequence[str],
    forward: Callable[..., tuple[Any, ...]],
    backward: Callable[..., None],
    reference: Callable[[Any], Tensor],
    fake: Callable[..., tuple[Tensor, ...]],
    flags: int = 1,
) -> tuple[Gradient, Direct]:
    """Register the operator `name` and its backward.

    Args:
        arguments: a NamedTuple of the schema's arguments before its flags: whether to write the gradient and, with two, to keep statistics.
        kept: names of what forward returns beside the loss, which backward takes; a kept call of repeat.py has the divisor alone.
        forward: (arguments, written, keep, itself) → (loss, *kept), with the gradient in `written` where it is given; itself: one launch
            may do it all, and leave the divisor None.
        backward: (arguments, *kept, upstream, written), each kept None where it has to be computed again.

    Returns: (gradient, direct): for what a context saved and what arrives; and the loss without the dispatcher.
    """
    count = len(arguments._fields)

    def remember(ctx: Any, a: Any, results: Sequence[Tensor | None], written: Tensor | None) -> None:
        ctx.once = None if written is None else Once(written)
        save(ctx, a.loss, a.tensors, a[1 + len(a.tensors) :], *results)

    def gradient(ctx: Any, upstream: Tensor | None) -> Tensor | None:
        if upstream is None:
            return None
        if ctx.once is not None and not torch.is_grad_enabled():
            written = ctx.once.take(upstream)
            if written is not None:
                return written
        a, results = saved(ctx, arguments)
        if len(results) != len(kept):
            results = tuple([results[0] if each == "divisor" else None for each in kept])
        if torch.is_grad_enabled():
            return torch.autograd.grad(reference(a), a.x, upstream, create_graph=True)[0]
        if not plain(a.x, upstream):
            return backward_of(ctx, name)(*a, *results, upstream)
        return backwards(*a, *results, upstream)

    class Differentiable(torch.autograd.Function):
        """The operator without the dispatcher, for plain tensors."""

        @staticmethod
        def forward(ctx, x, a, in_forward):
            written = torch.empty_like(x) if in_forward else None
            loss, *results = forward(a, written, not in_forward, True)
            remember(ctx, a, results, written)
            return loss

        @staticmethod
        def backward(ctx, upstream):
            return gradient(ctx, upstream), None, None

    def direct(a: Any, in_forward: bool) -> Tensor:
        """The operator's loss, where library.plain holds for its tensors."""
        if a.x.requires_grad and torch.is_grad_enabled():
            return Differentiable.apply(a.x, a, in_forward)
        return forward(a, None, False, True)[0]

    def forwards(*args: Any) -> tuple[Tensor, ...]:
        a = arguments(*args[:count])
        written = torch.empty_like(a.x) if args[count] else None
        return placeholders(a.x, (*forward(a, written, args[-1], False), written))

    def backwards(*args: Any) -> Tensor:
        a = arguments(*args[:count])
        written = torch.empty_like(a.x)
        backward(a, *args[count:], written)
        return written

    def setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, *results, written = output
        remember(ctx, arguments(*inputs[:count]), results, written.detach() if inputs[count] else None)

    def differentiate(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return None, gradient(ctx, upstream), *(None,) * (count + flags - 2)

    register(name, forwards, backwards, fake, setup, differentiate)
    return gradient, direct


def unplanned(a: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """(tensors, divisor, written) → total by `compute` of the arguments with these tensors. It keeps none of a's."""
    kind, name, others = type(a), a.loss, a[1 + len(a.tensors) :]

    def total(tensors: Sequence[Any], divisor: Tensor | None, written: Tensor | None) -> Any:
        return compute(kind(name, *tensors, *others), divisor, written)

    return total
