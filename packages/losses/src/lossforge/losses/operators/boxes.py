"""lossforge::boxes: a loss of pairs of boxes, differentiated in both."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.lazy import kernels
from lossforge.losses.operators.library import Once, define, placeholders, plain, register, save, saved
from lossforge.losses.operators.numbers import backward_of
from lossforge.losses.operators.single import unplanned
from lossforge.losses.reference import boxes as reference


class Arguments(NamedTuple):
    """Arguments of the operator, for boxes (..., 4) and weights that broadcast to (...).

    The value is Σ (or, with reduction "none", each) loss · weight · scale / divisor, where the divisor is `normalizer`, else with reduction
    "mean" the number of pairs.
    """

    loss: str
    boxes1: Tensor
    boxes2: Tensor
    weight: Tensor | None
    normalizer: Tensor | None
    hyper: list[float]
    scale: float
    centered: bool
    reduction: str
    empty_is_zero: bool

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[1:5]

    @property
    def x(self) -> Tensor:
        """What other templates call the tensor of which repeated calls keep the gradient."""
        return self.boxes1


SCHEMA = (
    "str loss, Tensor boxes1, Tensor boxes2, Tensor? weight, Tensor? normalizer, float[] hyper, float scale, bool centered, "
    "str reduction, bool empty_is_zero"
)
define("boxes", f"({SCHEMA}, bool gradient1, bool gradient2) -> (Tensor value, Tensor gradient1, Tensor gradient2)")
define("boxes_backward", f"({SCHEMA}, Tensor upstream, bool gradient1, bool gradient2) -> (Tensor, Tensor)")

Pair = tuple[Tensor | None, Tensor | None]
"""Something of each box, None where it is not asked for."""


def counted(a: Arguments) -> bool:
    """No mean of boxes divides by what is counted on the device."""
    return False


def _scale(a: Arguments) -> float:
    mean = a.reduction == "mean" and a.normalizer is None
    return a.scale * 4 / a.boxes1.numel() if mean else a.scale


def _launch(a: Arguments, written: Pair, **outputs: Any) -> Tensor | None:
    return kernels.boxes(
        FORMULAS[a.loss].kernel,
        a.boxes1,
        a.boxes2,
        a.hyper,
        centered=a.centered,
        weight=a.weight,
        scale=_scale(a),
        divisor=a.normalizer,
        empty_is_zero=a.empty_is_zero,
        gradient1=written[0],
        gradient2=written[1],
        **outputs,
    )


def _new(a: Arguments, wanted: Sequence[bool]) -> Pair:
    return torch.empty_like(a.boxes1) if wanted[0] else None, torch.empty_like(a.boxes2) if wanted[1] else None


def forward(a: Arguments, written: Pair = (None, None)) -> Tensor:
    """The value, and the gradients into `written`."""
    value = _launch(a, written, value="each" if a.reduction == "none" else "sum")
    assert value is not None
    return value


def backward(a: Arguments, upstream: Tensor, wanted: Sequence[bool]) -> Pair:
    written = _new(a, wanted)
    _launch(a, written, value="nothing", upstream=upstream)
    return written


def prepared(a: Arguments, divisor: Tensor | None, written: Tensor | None) -> Callable[..., Tensor]:
    """(tensors, divisor, gradient) → total, as `forward` computes it, for tensors laid out as these and the same other arguments."""
    planned = kernels.planned_boxes(FORMULAS[a.loss].kernel, a.tensors, divisor, written, a.hyper, _scale(a), a.centered, a.empty_is_zero)
    if planned is not None:
        return planned
    return unplanned(a, lambda a, divisor, written: forward(a, (written, None)))


def _keep(ctx, a: Arguments, written: Pair) -> None:
    ctx.once = [None if g is None else Once(g) for g in written]
    save(ctx, a.loss, a.tensors, a[1 + len(a.tensors) :])


def _gradients(ctx, upstream: Tensor | None, wanted: Sequence[bool]) -> Pair:
    if upstream is None:
        return None, None
    take = not torch.is_grad_enabled()
    first, second = (once.take(upstream) if take and w and once is not None else None for once, w in zip(ctx.once, wanted, strict=True))
    missing = wanted[0] and first is None, wanted[1] and second is None
    if any(missing):
        third, fourth = _anew(ctx, upstream, missing)
        return third if missing[0] else first, fourth if missing[1] else second
    return first, second


def _anew(ctx, upstream: Tensor, wanted: Sequence[bool]) -> Pair:
    a, _ = saved(ctx, Arguments)
    if torch.is_grad_enabled():
        leaves = [b for b, w in zip((a.boxes1, a.boxes2), wanted, strict=True) if w]
        found = iter(torch.autograd.grad(reference(a), leaves, upstream, create_graph=True))
        return next(found) if wanted[0] else None, next(found) if wanted[1] else None
    if plain(a.boxes1, a.boxes2, upstream):
        return backward(a, upstream, wanted)
    first, second = backward_of(ctx, "boxes")(*a, upstream, *wanted)
    return first if wanted[0] else None, second if wanted[1] else None


def gradient(ctx, upstream: Tensor | None) -> Tensor | None:
    """Of a repeated call: the gradient of boxes1, computed anew."""
    return None if upstream is None else _anew(ctx, upstream, (True, False))[0]


class Direct(torch.autograd.Function):
    """The operator without the dispatcher, for plain tensors."""

    @staticmethod
    def forward(ctx, boxes1, boxes2, a, in_forward):
        written = _new(a, ctx.needs_input_grad[:2]) if in_forward else (None, None)
        value = forward(a, written)
        _keep(ctx, a, written)
        return value

    @staticmethod
    def backward(ctx, upstream):
        return *_gradients(ctx, upstream, ctx.needs_input_grad[:2]), None, None


def direct(a: Arguments, in_forward: bool) -> Tensor:
    """The operator's value, where library.plain holds for its tensors."""
    if torch.is_grad_enabled() and (a.boxes1.requires_grad or a.boxes2.requires_grad):
        return Direct.apply(a.boxes1, a.boxes2, a, in_forward)
    return forward(a)


def _forward(*args):
    *arguments, gradient1, gradient2 = args
    a = Arguments(*arguments)
    written = _new(a, (gradient1, gradient2))
    return placeholders(a.boxes1, (forward(a, written), *written))


def _backward(*args):
    *arguments, upstream, gradient1, gradient2 = args
    a = Arguments(*arguments)
    return placeholders(a.boxes1, backward(a, upstream, (gradient1, gradient2)))


def _fake(*args):
    *arguments, gradient1, gradient2 = args
    a = Arguments(*arguments)
    each = a.boxes1.new_empty(a.boxes1.shape[:-1], dtype=torch.float32)
    value = each if a.reduction == "none" else a.boxes1.new_empty((), dtype=torch.float32)
    return placeholders(a.boxes1, (value, *_new(a, (gradient1, gradient2))))


def _fake_backward(*args):
    *arguments, _, gradient1, gradient2 = args
    a = Arguments(*arguments)
    return placeholders(a.boxes1, _new(a, (gradient1, gradient2)))


def _setup(ctx, inputs, output):
    *arguments, gradient1, gradient2 = inputs
    _, first, second = output
    _keep(ctx, Arguments(*arguments), (first.detach() if gradient1 else None, second.detach() if gradient2 else None))


def _differentiate(ctx, upstream, *_):
    first = len(ctx.needs_input_grad) - len(Arguments._fields) - 1  # after the keys of the dispatcher, perhaps numbers, and the loss's name
    wanted = ctx.needs_input_grad[first : first + 2]
    return None, *_gradients(ctx, upstream, wanted), *(None,) * (len(Arguments._fields) - 1)


register("boxes", _forward, _backward, _fake, _setup, _differentiate, _fake_backward)
