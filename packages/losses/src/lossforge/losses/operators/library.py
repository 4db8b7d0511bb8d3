"""What the operators share: their library, and when the kernels compute a loss."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels import INTERPRETED, scale_

LIBRARY = torch.library.Library("lossforge", "DEF")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("CUDA", "CPU")  # on CPU the operators are reached only where the kernels are interpreted


_plain_torch = False


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute every loss called inside by its plain-torch reference: to compare with, or to differentiate more than twice."""
    global _plain_torch
    before, _plain_torch = _plain_torch, True
    try:
        yield
    finally:
        _plain_torch = before


def backend(x: Tensor) -> str:
    """What computes a loss of `x`: "triton", "triton-interpreted" or "torch" (the plain-torch reference)."""
    if x.dtype not in KERNEL_DTYPES or not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        return "torch"
    return "triton-interpreted" if INTERPRETED else "triton"


def kernels_apply(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels compute this call. They differentiate the logits; the reference does all else.

    That is: a floating argument other than the logits that requires grad, torch.func transforms, forward-mode derivatives,
    float64, devices without kernels, and tensors without elements.
    """
    if _plain_torch or backend(x) == "torch" or x.numel() == 0:
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in others):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0


def gradient_in_forward(mode: str | None, x: Tensor, reduction: str) -> bool:
    """Whether forward also writes the gradient.

    Never where nothing asks for one. By default where the result is a scalar, except for float16, whose gradients would be rounded
    before a gradient scaler can lift them above the smallest float16, and under torch.compile, whose graphs cannot hand out a
    buffer once and compute it anew the second time.
    """
    if mode == "backward" or reduction == "none" or not (x.requires_grad and torch.is_grad_enabled()):
        return False
    return mode == "forward" or (x.dtype != torch.float16 and not torch.compiler.is_compiling())


def define(name: str, schema: str) -> None:
    LIBRARY.define(f"{name}{schema}", tags=[torch.Tag.pt2_compliant_tag])


def register_autograd(name: str, setup: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """What torch.library.register_autograd does, without reading the schema at every call, which takes longer than a small loss.

    That reading puts back arguments that the dispatcher drops because they equal their defaults; our schemas have none.
    """
    operator = getattr(torch.ops.lossforge, name).default

    def below(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            result = below(keyset, *args)
            setup(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return None, *differentiate(ctx, *gradients)

    def implementation(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Differentiable.apply(keyset, *args)
        return below(keyset, *args)

    LIBRARY.impl(name, implementation, "Autograd", with_keyset=True)


def no_double_backward(name: str) -> None:
    """Make the backward operator refuse differentiation, rather than give a gradient without a graph in silence."""

    def backward(ctx, *gradients):
        raise RuntimeError(
            f"lossforge::{name} cannot be differentiated. Differentiate the loss twice with torch.autograd.grad(..., create_graph=True) "
            "outside of torch.compile, or call the loss under lossforge.losses.plain_torch()."
        )

    torch.library.register_autograd(f"lossforge::{name}", backward, lib=LIBRARY)


class Once:
    """A gradient written in forward, to be handed out once: whoever gets it may change it."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient.detach()

    def take(self, upstream: Tensor) -> Tensor | None:
        """The gradient times `upstream`, in its own memory; None the second time."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return None
        if type(gradient) is not Tensor:  # a graph is being traced, in which nothing may be overwritten
            return (gradient * upstream).to(gradient.dtype)
        scale_(gradient, upstream)
        return gradient


def save(ctx: Any, arguments: Sequence[Any], *results: Tensor) -> None:
    """Keep an operator's arguments for backward, tensors as autograd saves them, and some of its results."""
    ctx.places = [i for i, v in enumerate(arguments) if isinstance(v, Tensor)]
    ctx.arguments = [None if isinstance(v, Tensor) else v for v in arguments]
    ctx.save_for_backward(*results, *(arguments[i] for i in ctx.places))
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> tuple[list[Tensor], list[Any]]:
    """(results, arguments) that `save` kept."""
    arguments, tensors = list(ctx.arguments), list(ctx.saved_tensors)
    results = tensors[: len(tensors) - len(ctx.places)]
    for i, t in zip(ctx.places, tensors[len(results) :], strict=True):
        arguments[i] = t
    return results, arguments
