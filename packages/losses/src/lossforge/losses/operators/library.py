"""What the operators share: their library, and when the kernels compute a loss."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.lazy import INTERPRETED, TRITON, kernels
from lossforge.losses.operators import numbers
from lossforge.losses.torch_internals import NO_MODES, in_forward_mode, modes, ordinary, register_autograd, transformed

LIBRARY = torch.library.Library("lossforge", "DEF")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("CUDA", "CPU")  # on CPU the operators are reached only where the kernels are interpreted


_depth: ContextVar[int] = ContextVar("depth of plain_torch", default=0)
_traced = threading.local()
"""The depth once more, for torch.compile: it traces and guards a thread's attributes, but no ContextVar."""
_traced.depth = 0  # a thread that has none is traced anew at its second call


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute every loss called inside by its plain-torch reference: to compare with, or to differentiate more than twice.

    It holds for the thread and the asyncio task that entered it; a thread that starts inside has to enter it anew.
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(step: int) -> None:
    """Counted, because contexts may overlap without being nested: the one entered first may end first."""
    _traced.depth = getattr(_traced, "depth", 0) + step
    if not torch.compiler.is_compiling():
        _depth.set(_depth.get() + step)


def _in_plain_torch() -> bool:
    return (getattr(_traced, "depth", 0) if torch.compiler.is_compiling() else _depth.get()) > 0


def backend(x: Tensor) -> str:
    """What computes a loss of `x`: "triton", "triton-interpreted" or "torch" (the plain-torch reference; without Triton always)."""
    if not TRITON or x.dtype not in KERNEL_DTYPES or not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        return "torch"
    return "triton-interpreted" if INTERPRETED else "triton"


def state() -> tuple[Any, ...]:
    """What of torch's state decides how a loss is computed: modes, transforms, tracing, forward mode; autograd; plain_torch."""
    return *modes(), torch.is_grad_enabled(), _depth.get() > 0


_PLAIN_STATES = [(*NO_MODES, grad, False) for grad in (True, False)]


def plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher would do no more with an operator on these tensors than differentiate it and start its kernels.

    Not for subclasses of Tensor (fake, distributed, a user's), tensors that torch.func wraps, conjugates and other lazy views; nor
    under a mode for functions or operators, a transform, a tracer, inference mode, or while compiling.
    """
    if torch.compiler.is_compiling() or state() not in _PLAIN_STATES:
        return False
    return all(t is None or ordinary(t) for t in tensors)


def direct(a: Any) -> bool:
    """`plain` for an operator's arguments."""
    # while compiling nothing reads a.tensors: dynamo of torch 2.9 cannot trace the property of a named tuple
    return not torch.compiler.is_compiling() and plain(*a.tensors)


def kernels_apply(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels compute this call. They differentiate the logits; the reference does all else.

    That is: a floating argument other than the logits that requires grad, torch.func transforms, forward-mode derivatives,
    float64, devices without kernels, and tensors without elements.
    """
    if _in_plain_torch() or backend(x) == "torch" or x.numel() == 0:
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in others):
        return False
    if transformed(x, *others):
        return False
    return torch.compiler.is_compiling() or not in_forward_mode(x, *others)


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
    """Define the operator, and its form for numbers that are tensors: see operators.numbers."""
    LIBRARY.define(f"{name}{schema}", tags=[torch.Tag.pt2_compliant_tag])
    LIBRARY.define(f"{name}_scheduled(Tensor numbers, {schema[1:]}", tags=[torch.Tag.pt2_compliant_tag])


def register(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None],
    differentiate: Callable[..., Any],
    fake_backward: Callable[..., Any] = lambda *args: torch.empty_like(args[1]),
) -> None:
    """Register the operator `name` and its backward, whose result, unless `fake_backward` says otherwise, is as the logits, the operators'
    second argument; and both in their form for numbers that are tensors."""

    def fill(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda given, *args: function(*numbers.filled(given, args))

    def setup_scheduled(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        given, *args = inputs
        known = plain(given)
        ctx.numbers = None if known else given
        setup(ctx, numbers.filled(given, args) if known else args, output)

    _register(name, forward, fake)
    _register(f"{name}_backward", backward, fake_backward)
    _register(f"{name}_scheduled", fill(forward), lambda _, *args: fake(*args))
    _register(f"{name}_backward_scheduled", fill(backward), lambda _, *args: fake_backward(*args))
    register_autograd(LIBRARY, name, setup, differentiate)
    register_autograd(LIBRARY, f"{name}_scheduled", setup_scheduled, lambda ctx, *gradients: (None, *differentiate(ctx, *gradients)))
    _no_double_backward(f"{name}_backward")
    _no_double_backward(f"{name}_backward_scheduled")


def _register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in DEVICES:
        LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"lossforge::{name}", fake, lib=LIBRARY)


LIBRARY.define("number(Tensor value, str name, float low, float high, bool exclusive) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
LIBRARY.impl("number", numbers.checked, "CPU")
torch.library.register_fake("lossforge::number", lambda value, *_: value.new_empty((), dtype=torch.float64), lib=LIBRARY)


def _no_double_backward(name: str) -> None:
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
        self.gradient: Tensor | None = gradient

    def take(self, upstream: Tensor) -> Tensor | None:
        """The gradient times `upstream`, in its own memory; None the second time."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return None
        if not (ordinary(gradient) and ordinary(upstream)):  # traced, where nothing may be overwritten, or many upstreams at once
            return (gradient.float() * upstream).to(gradient.dtype)
        kernels.scale_(gradient, upstream)
        return gradient


def save(ctx: Any, name: str, tensors: Sequence[Tensor | None], others: Sequence[Any], *results: Tensor | None) -> None:
    """Keep an operator's arguments for backward, tensors as autograd saves them, and some of its results."""
    ctx.others = name, others, len(results)
    ctx.save_for_backward(*results, *tensors)
    ctx.set_materialize_grads(False)


def saved(ctx: Any, arguments: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
    """(arguments, results) that `save` kept."""
    tensors = ctx.saved_tensors
    name, others, results = ctx.others
    return arguments(name, *tensors[results:], *others), tensors[:results]


def placeholders(x: Tensor, results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Results as operators must return them: an empty tensor where there is none."""
    return tuple([x.new_empty(0) if t is None else t for t in results])


def present(t: Tensor | None) -> Tensor | None:
    """None for a placeholder."""
    return None if t is None or t.numel() == 0 else t
