"""What decides how a loss is computed: torch's modes and transforms, the tensors' kinds and devices, plain_torch()."""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels import INTERPRETED, TRITON
from lossforge.kernels.torch_internals import NO_MODES, in_forward_mode, modes, ordinary, transformed

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROCM = torch.version.hip is not None
"""Whether torch is built for AMD GPUs, whose tensors say `is_cuda` too. The kernels contain PTX, so plain PyTorch computes there."""

_depth: ContextVar[int] = ContextVar("depth of plain_torch", default=0)
_traced = threading.local()
"""The depth once more, for torch.compile: it traces and guards a thread's attributes, but no ContextVar."""
_traced.depth = 0  # a thread that has none is traced anew at its second call


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype in which autocast lets a layer compute on such devices; None where it is off, and for meta tensors."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no product on the device of x is rounded. torch has no autocast for meta tensors."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if autocast_dtype(kind) else contextlib.nullcontext()


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute every loss called inside by its plain-torch reference: to compare with, or to differentiate more than twice.

    It holds for the thread and the asyncio task that entered it; a thread that starts inside has to enter it anew.

    Returns:
        a context manager.

    Raises:
        RuntimeError: it is entered once more after it has ended, as any such context manager.

    Examples:
        >>> import torch
        >>> from lossforge.losses import cross_entropy, plain_torch
        >>> with plain_torch():
        ...     loss = cross_entropy(torch.randn(8, 10), torch.randint(10, (8,)))
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(step: int) -> None:
    """Count, because contexts may overlap without being nested: the one entered first may end first."""
    _traced.depth = getattr(_traced, "depth", 0) + step
    if not torch.compiler.is_compiling():
        _depth.set(_depth.get() + step)


def _in_plain_torch() -> bool:
    return (getattr(_traced, "depth", 0) if torch.compiler.is_compiling() else _depth.get()) > 0


def backend(x: Tensor) -> str:
    """Return what computes a loss of `x`.

    Args:
        x: logits, or whatever the loss takes first.

    Returns:
        "triton", "triton-interpreted", or "torch": the plain-torch reference, which without Triton computes always.

    Raises:
        AttributeError: x is not a tensor.

    Examples:
        >>> import torch
        >>> from lossforge.losses import backend
        >>> backend(torch.randn(8, 10, dtype=torch.float64))
        'torch'
    """
    runs = (x.is_cuda and not ROCM) or (INTERPRETED and x.device.type == "cpu")
    if not (TRITON and runs and x.dtype in KERNEL_DTYPES):
        return "torch"
    return "triton-interpreted" if INTERPRETED else "triton"


def state() -> tuple[Any, ...]:
    """Return what of torch's state decides: modes, transforms, tracing, forward mode; autograd; plain_torch."""
    return *modes(), torch.is_grad_enabled(), _depth.get() > 0


_PLAIN_STATES = [(*NO_MODES, grad, False) for grad in (True, False)]


def plain(*tensors: Tensor | None) -> bool:
    """Return whether the dispatcher would do no more with an operator on these tensors than differentiate it and start its kernels.

    Not for subclasses of Tensor (fake, distributed, a user's), tensors that torch.func wraps, conjugates and other lazy views; nor
    under a mode for functions or operators, a transform, a tracer, inference mode, or while compiling.
    """
    if torch.compiler.is_compiling() or state() not in _PLAIN_STATES:
        return False
    for t in tensors:  # noqa: SIM110  # a generator would take a frame for each
        if t is not None and not ordinary(t):
            return False
    return True


def kernels_apply(x: Tensor, *others: Tensor | None, fused: bool = False) -> bool:
    """Return whether the kernels compute a call. They differentiate the logits; the reference does all else.

    That is: a floating argument other than the logits that requires grad, torch.func transforms, forward-mode derivatives,
    float64, devices without kernels, and tensors without elements. fused: a call fused with its linear layer, which has a way of its own
    on every device and for every dtype.
    """
    if _in_plain_torch() or (backend(x) == "torch" and not fused) or x.numel() == 0:
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in others):
        return False
    if transformed(x, *others):
        return False
    return torch.compiler.is_compiling() or not in_forward_mode(x, *others)


def gradient_in_forward(mode: str | None, x: Tensor, reduction: str, in_graph: bool = False) -> bool:
    """Return whether forward also writes the gradient.

    Never where nothing asks for one. By default where the result is a scalar, except for float16, whose gradients would be rounded
    before a gradient scaler can lift them above the smallest float16.

    in_graph: whether that is so under torch.compile, too, whose graph keeps the gradient from forward to backward: where it saves a
        matrix product.
    """
    if mode == "backward" or reduction == "none" or not (x.requires_grad and torch.is_grad_enabled()):
        return False
    return mode == "forward" or (x.dtype != torch.float16 and (in_graph or not torch.compiler.is_compiling()))
