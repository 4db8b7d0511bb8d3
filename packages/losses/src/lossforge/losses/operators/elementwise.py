"""lossforge::elementwise: a loss of which every element stands alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.lazy import kernels
from lossforge.losses.operators.library import define, present
from lossforge.losses.operators.single import single, unplanned
from lossforge.losses.reference import ROW_MEAN
from lossforge.losses.reference import elementwise as reference


class Arguments(NamedTuple):
    """Arguments of the operator; a class-index target has the shape of x without `dim`, as has `lam`, which without target_b is each
    row's score. Without a target it is 1 on the diagonal of a matrix, `offset` columns to the right.

    The value is Σ (or, with reduction "none", each) loss · weight · scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the number of elements not ignored, with ROW_MEAN that of rows.
    """

    loss: str
    x: Tensor
    target: Tensor | None
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
    offset: int
    reduction: str
    empty_is_zero: bool

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[1:10]

    @property
    def factor(self) -> float:
        """What the sum over the elements is multiplied by before it is divided by their number."""
        return self.scale * self.x.shape[self.dim] if self.reduction == ROW_MEAN and self.x.ndim else self.scale


SCHEMA = (
    "str loss, Tensor x, Tensor? target, Tensor? target_b, Tensor? lam, Tensor? weight, Tensor? group, Tensor? group_weight, "
    "Tensor? parameter, Tensor? normalizer, float[] hyper, float scale, int dim, int ignore_index, SymInt offset, str reduction, "
    "bool empty_is_zero"
)
define("elementwise", f"({SCHEMA}, bool gradient) -> (Tensor value, Tensor divisor, Tensor gradient)")
define("elementwise_backward", f"({SCHEMA}, Tensor? divisor, Tensor upstream) -> Tensor")


MEANS = ("mean", ROW_MEAN)


def _scale(a: Arguments, divisor: Tensor | None) -> float:
    return a.factor / a.x.numel() if a.reduction in MEANS and divisor is None and not counted(a) else a.factor


def _launch(a: Arguments, divisor: Tensor | None, **outputs) -> Tensor | None:
    return kernels.elementwise(
        FORMULAS[a.loss].kernels,
        a.x,
        a.target,
        a.hyper,
        target_b=a.target_b,
        lam=a.lam,
        ignore_index=a.ignore_index,
        offset=a.offset,
        class_dim=a.dim,
        weight=a.weight,
        group=a.group,
        group_weight=a.group_weight,
        parameter=a.parameter,
        scale=_scale(a, divisor),
        divisor=divisor,
        counted=divisor is None and counted(a),
        empty_is_zero=a.empty_is_zero,
        **outputs,
    )


def counted(a: Arguments) -> bool:
    """Whether a mean divides by what is counted on the device: the elements not ignored."""
    return a.reduction in MEANS and a.target is not None and not a.target.is_floating_point()


def find_divisor(a: Arguments) -> Tensor | None:
    if a.normalizer is not None or a.target is None or not counted(a):
        return a.normalizer
    classes = a.x.shape[a.dim]
    return kernels.count(a.target, classes, a.ignore_index, target_b=a.target_b, scale=float(classes))


def counts_itself(a: Arguments) -> bool:
    """Whether one launch finds the divisor, too."""
    return a.normalizer is None and a.target is not None and counted(a) and kernels.counts_itself(a.target, a.target_b)


def forward(a: Arguments, written: Tensor | None, keep: bool, itself: bool = False) -> tuple[Tensor, Tensor | None]:
    """(value, divisor where it was computed), and the gradient into `written` where it is given. itself: one launch may do it all."""
    by = None if itself and counts_itself(a) else find_divisor(a)
    value = _launch(a, by, value="each" if a.reduction == "none" else "sum", gradient=written)
    assert value is not None
    return value, None if a.normalizer is not None else by


def backward(a: Arguments, divisor: Tensor | None, upstream: Tensor, written: Tensor) -> None:
    by = divisor if present(divisor) is not None else find_divisor(a)
    _launch(a, by, value="nothing", gradient=written, upstream=upstream)


def prepared(a: Arguments, divisor: Tensor | None, written: Tensor | None) -> Callable[..., Tensor]:
    """(tensors, divisor, written) → total, as `forward` computes it, for tensors laid out as these and the same other arguments."""
    planned = kernels.planned_elementwise(
        FORMULAS[a.loss].kernels,
        a.tensors,
        divisor,
        written,
        a.hyper,
        _scale(a, divisor),
        a.ignore_index,
        a.offset,
        a.dim,
        a.empty_is_zero,
        divisor is None and counted(a),
    )
    if planned is not None:
        return planned
    return unplanned(a, lambda a, divisor, written: _launch(a, divisor, value="sum", gradient=written))


def _fake(*args):
    a, gradient = Arguments(*args[:-1]), args[-1]
    counts = a.normalizer is None and counted(a)
    return (
        torch.empty_like(a.x) if a.reduction == "none" else a.x.new_empty((), dtype=torch.float32),
        a.x.new_empty((), dtype=torch.float32) if counts else a.x.new_empty(0),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


gradient, direct = single("elementwise", Arguments, ("divisor",), forward, backward, reference, _fake)
