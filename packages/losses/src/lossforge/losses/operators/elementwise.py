"""lossforge::elementwise: a loss of which every element stands alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.operators.library import DEVICES, LIBRARY, Once, define, no_double_backward, register_autograd, save, saved
from lossforge.losses.reference import elementwise as reference


class Elementwise(NamedTuple):
    """Arguments of the operator; a class-index target has the shape of x without `dim`.

    The value is Σ (or, with reduction "none", each) loss · weight · scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the number of elements not ignored.
    """

    loss: str
    x: Tensor
    target: Tensor
    target_b: Tensor | None
    lam: Tensor | None
    weight: Tensor | None
    group: Tensor | None
    group_weight: Tensor | None
    parameter: Tensor | None
    normalizer: Tensor | None
    hyper: list[float]
    scale: float
    dim: int
    ignore_index: int
    reduction: str
    empty_is_zero: bool


SCHEMA = (
    "str loss, Tensor x, Tensor target, Tensor? target_b, Tensor? lam, Tensor? weight, Tensor? group, Tensor? group_weight, "
    "Tensor? parameter, Tensor? normalizer, float[] hyper, float scale, int dim, int ignore_index, str reduction, bool empty_is_zero"
)
define("elementwise", f"({SCHEMA}, bool gradient) -> (Tensor value, Tensor divisor, Tensor gradient)")
define("elementwise_backward", f"({SCHEMA}, Tensor divisor, Tensor upstream) -> Tensor")


def _launch(a: Elementwise, divisor: Tensor | None, **outputs) -> Tensor | None:
    shape, dim = a.x.shape, a.dim % max(a.x.ndim, 1)
    scale, indices = a.scale, not a.target.is_floating_point()
    if a.reduction == "mean" and divisor is None:
        scale /= a.x.numel()

    def per_row(t: Tensor | None) -> Tensor | None:
        return t if t is None else t.unsqueeze(dim).expand(shape)

    def whole(t: Tensor | None) -> Tensor | None:
        return t if t is None else t.expand(shape)

    return kernels.elementwise(
        FORMULAS[a.loss].kernel,
        a.x,
        a.target.unsqueeze(dim).expand(shape) if indices else a.target,
        a.hyper,
        target_b=per_row(a.target_b),
        lam=per_row(a.lam),
        ignore_index=a.ignore_index,
        class_dim=dim,
        weight=whole(a.weight),
        group=whole(a.group),
        group_weight=a.group_weight,
        parameter=whole(a.parameter),
        scale=scale,
        divisor=divisor,
        empty_is_zero=a.empty_is_zero,
        **outputs,
    )


def _divisor(a: Elementwise) -> Tensor | None:
    if a.normalizer is not None or a.reduction != "mean" or a.target.is_floating_point():
        return a.normalizer
    classes = a.x.shape[a.dim]
    return kernels.count(a.target, classes, a.ignore_index, target_b=a.target_b, scale=float(classes))


def forward(a: Elementwise, written: Tensor | None) -> tuple[Tensor, ...]:
    """(value, divisor), and the gradient into `written` where it is given."""
    divisor = _divisor(a)
    value = _launch(a, divisor, value="each" if a.reduction == "none" else "sum", gradient=written)
    own = None if divisor is a.normalizer else divisor
    return tuple(a.x.new_empty(0) if t is None else t for t in (value, own))


def backward(a: Elementwise, divisor: Tensor, upstream: Tensor, written: Tensor) -> None:
    divisor_or_none = a.normalizer if a.normalizer is not None else divisor if divisor.numel() else None
    _launch(a, divisor_or_none, value="nothing", gradient=written, upstream=upstream)


def _forward(*args):
    a = Elementwise(*args[:-1])
    written = torch.empty_like(a.x) if args[-1] else None
    return (*forward(a, written), a.x.new_empty(0) if written is None else written)


def _backward(*args):
    *arguments, divisor, upstream = args
    a = Elementwise(*arguments)
    written = torch.empty_like(a.x)
    backward(a, divisor, upstream, written)
    return written


def _fake_forward(*args):
    a, gradient = Elementwise(*args[:-1]), args[-1]
    counts = a.normalizer is None and a.reduction == "mean" and not a.target.is_floating_point()
    return (
        torch.empty_like(a.x) if a.reduction == "none" else a.x.new_empty((), dtype=torch.float32),
        a.x.new_empty((), dtype=torch.float32) if counts else a.x.new_empty(0),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


def _setup(ctx, inputs, output):
    *arguments, gradient = inputs
    _, divisor, written = output
    ctx.once = Once(written) if gradient else None
    save(ctx, arguments, divisor)


def _differentiate(ctx, upstream, *_):
    nothing = (None,) * len(Elementwise._fields)
    if upstream is None:
        return (*nothing, None)
    gradient = None
    if ctx.once is not None and not torch.is_grad_enabled():
        gradient = ctx.once.take(upstream)
    if gradient is None:
        (divisor,), arguments = saved(ctx)
        a = Elementwise(*arguments)
        if torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(reference(a), a.x, upstream, create_graph=True)
        else:
            gradient = torch.ops.lossforge.elementwise_backward(*a, divisor, upstream)
    return (None, gradient, *nothing[1:])


for device in DEVICES:
    LIBRARY.impl("elementwise", _forward, device)
    LIBRARY.impl("elementwise_backward", _backward, device)
torch.library.register_fake("lossforge::elementwise", _fake_forward, lib=LIBRARY)
torch.library.register_fake("lossforge::elementwise_backward", lambda *args: torch.empty_like(args[1]), lib=LIBRARY)
register_autograd("elementwise", _setup, _differentiate)
no_double_backward("elementwise_backward")
