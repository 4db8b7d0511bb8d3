"""lossforge::overlap: a loss of how much predicted and true regions overlap, with or without a cross entropy beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.lazy import kernels
from lossforge.losses.operators.library import define, present
from lossforge.losses.operators.single import single, unplanned
from lossforge.losses.reference_overlap import overlap as reference


class Arguments(NamedTuple):
    """Arguments of the operator, for logits x (N, C, d…) and class indices (N, d…) or targets (N, C, d…).

    The value is Σ (or, with reduction "none", each) weight · loss · factor / divisor over images and classes, or classes where `batch`.
    The divisor is `normalizer` where given, else with reduction "mean" their number. lambda_ce: None without cross entropy.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None
    normalizer: Tensor | None
    hyper: list[float]
    activation: str | None
    ignore_index: int
    include_background: bool
    squared_pred: bool
    batch: bool
    present_only: bool
    factor: float
    lambda_ce: float | None
    reduction: str
    empty_is_zero: bool

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[1:5]

    @property
    def first(self) -> int:
        """The class index of channel 0: one channel that is not a softmax is class 1, and 0 is background."""
        return int(self.x.shape[1] == 1 and self.activation != "softmax")

    @property
    def skip(self) -> int:
        return int(not self.include_background)

    @property
    def regions(self) -> tuple[int, int]:
        return 1 if self.batch else self.x.shape[0], self.x.shape[1] - self.skip

    @property
    def counted_ce(self) -> bool:
        """Whether the cross entropy's mean divides by what is counted on the device."""
        return self.lambda_ce is not None and self.reduction == "mean" and not self.target.is_floating_point()


SCHEMA = (
    "str loss, Tensor x, Tensor target, Tensor? weight, Tensor? normalizer, float[] hyper, str? activation, int ignore_index, "
    "bool include_background, bool squared_pred, bool batch, bool present_only, float factor, float? lambda_ce, str reduction, "
    "bool empty_is_zero"
)
define("overlap", f"({SCHEMA}, bool gradient) -> (Tensor value, Tensor coefficients, Tensor gradient)")
define("overlap_backward", f"({SCHEMA}, Tensor? coefficients, Tensor upstream) -> Tensor")


def _spec(a: Arguments) -> "kernels.OverlapSpec":
    regions, classes = a.regions
    ce_scale = a.lambda_ce
    if ce_scale is not None and a.reduction == "mean" and not a.counted_ce:
        ce_scale /= a.x.numel() // a.x.shape[1] if a.activation == "softmax" else a.x.numel()
    return kernels.OverlapSpec(
        FORMULAS[a.loss].kernel,
        a.target,
        a.weight,
        a.normalizer,
        tuple(a.hyper),
        a.activation,
        a.ignore_index,
        a.first,
        a.skip,
        a.squared_pred,
        a.batch,
        a.present_only,
        a.factor / (regions * classes) if a.reduction == "mean" else a.factor,
        ce_scale,
        a.counted_ce,
        a.empty_is_zero,
    )


def counted(a: Arguments) -> bool:
    """Whether a launch of its own finds the divisor: it never does."""
    return False


def forward(a: Arguments, written: Tensor | None, keep: bool = True, itself: bool = False) -> tuple[Tensor, Tensor]:
    """(value, coefficients), and the gradient into `written` where it is given."""
    spec = _spec(a)
    value, coefficients = kernels.overlap(spec, a.x, each=a.reduction == "none")
    if written is not None:
        kernels.overlap_gradient(spec, a.x, coefficients, None, written)
    return value.squeeze(0) if a.reduction == "none" and a.batch else value, coefficients


def backward(a: Arguments, coefficients: Tensor | None, upstream: Tensor, written: Tensor) -> None:
    """Write the gradient. Without coefficients, forward is computed again for them."""
    spec = _spec(a)
    if present(coefficients) is None:
        coefficients = kernels.overlap(spec, a.x)[1]
    assert coefficients is not None
    kernels.overlap_gradient(spec, a.x, coefficients, upstream, written)


def prepared(a: Arguments, divisor: Tensor | None, written: Tensor | None) -> Callable[..., Tensor]:
    """(tensors, divisor, written) → total, as `forward` computes it, for tensors laid out as these and the same other arguments."""
    planned = kernels.planned_overlap(_spec(a), a.x, written)
    if planned is not None:
        return planned
    return unplanned(a, lambda a, divisor, written: forward(a, written)[0])


def _fake(*args):
    a, gradient = Arguments(*args[:-1]), args[-1]
    regions, classes = a.regions
    each = (classes,) if a.batch else (regions, classes)
    return (
        a.x.new_empty(each if a.reduction == "none" else (), dtype=torch.float32),
        a.x.new_empty((2 * regions + int(a.lambda_ce is not None)) * a.x.shape[1], dtype=torch.float32),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


gradient, direct = single("overlap", Arguments, ("coefficients",), forward, backward, reference, _fake)
