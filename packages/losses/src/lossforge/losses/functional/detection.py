"""Losses of dense detectors: classification whose targets say how good a box is, and sides of boxes as distributions."""

from typing import Any, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import DistributionCall, ElementCall, Formulas
from lossforge.losses import checks
from lossforge.losses.autograd import value
from lossforge.losses.formulas import FORMULAS, formula
from lossforge.losses.functional.binary import bce_with_logits_reference, lost
from lossforge.losses.reference import accurate, computes, reduced, weighted
from lossforge.losses.registry import loss
from lossforge.losses.templates.element import elementwise_loss
from lossforge.losses.templates.module import Module
from lossforge.losses.templates.options import BoxOptions, UnscoredOptions, check_options, with_options
from lossforge.losses.types import NonNegative, Reduction

__all__ = ["distribution_focal_loss", "quality_focal_loss", "varifocal_loss"]


def _quality_kernels(of: Any) -> Formulas:
    quality = of.quality
    binary = Formulas(quality.quality_hard, quality.quality_2_hard, quality.is_2)
    return Formulas(quality.quality, quality.quality_2, quality.is_2, binary)


@formula("quality_focal", _quality_kernels)
def quality_reference(x: Tensor, y: Tensor, beta: float) -> Tensor:
    distance = (x.sigmoid() * (1 - y) - (-x).sigmoid() * y).abs().clamp(min=torch.finfo(x.dtype).tiny)
    return lost(distance**beta * bce_with_logits_reference(x, y, 1.0), x)


@loss(
    "quality_focal",
    "elementwise",
    Module("QualityFocalLoss", "Quality focal loss as mmdetection's"),
    options=({"beta": 0.5}, {"beta": 0.0}, {"beta": 1.0}, {"beta": 3.5}),
    paper="arXiv 2006.04388",
)
def quality_focal_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    score: Tensor | None = None,  # as a class-index target
    beta: NonNegative = 2.0,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[UnscoredOptions],
) -> Tensor:
    """Quality focal loss on logits, as mmdetection's quality_focal_loss (Li et al. 2020, arXiv 2006.04388).

    L = w |y - p|^β [y softplus(-x) + (1 - y) softplus(x)], p = σ(x). The factor |y - p|^β is differentiated as well.

    Args:
        target: class indices, -1 background (mmdetection: the number of classes) and -2 ignored; or the qualities y in [0, 1] themselves,
            dense.
        score: of class indices: y of the row's class in [0, 1], such as the IoU of the box; without it 1.
        beta: β of at least 0. Below 1, saturated logits take the limit.
        reduction: "mean" sums over the classes and averages over the rows not ignored, as mmdetection does; "sum"; "none" gives the loss of
            each element (mmdetection: of each row).
        weight: broadcasts to input: one a row has shape (N, 1) for (N, C) logits.
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.
    """
    beta = checks.number("beta", beta, 0.0)
    call = ElementCall("quality_focal", input, target, weight=weight, hyper=[beta], reduction=reduction)
    return elementwise_loss(call, {**options, "score": score}, mean="rows")


def _varifocal_kernels(of: Any) -> Formulas:
    varifocal = of.varifocal
    binary = Formulas(varifocal.varifocal_hard, varifocal.varifocal_2_hard, varifocal.is_2)
    return Formulas(varifocal.varifocal, varifocal.varifocal_2, varifocal.is_2, binary)


@formula("varifocal", _varifocal_kernels)
def varifocal_reference(x: Tensor, y: Tensor, alpha: float, gamma: float, iou_weighted: float) -> Tensor:
    negative = alpha * x.sigmoid().clamp(min=torch.finfo(x.dtype).tiny) ** gamma
    w = torch.where(y > 0, y if iou_weighted else torch.ones_like(y), negative)
    return lost(w * bce_with_logits_reference(x, y, 1.0), x, y == 0)


@loss(
    "varifocal",
    "elementwise",
    Module("VarifocalLoss", "Varifocal loss as mmdetection's"),
    switches=("iou_weighted",),
    options=({"iou_weighted": False}, {"gamma": 0.5}, {"gamma": 0.0, "alpha": 0.3}, {"gamma": 3.5}),
    paper="arXiv 2008.13367",
)
def varifocal_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    score: Tensor | None = None,  # as a class-index target
    alpha: NonNegative = 0.75,
    gamma: NonNegative = 2.0,
    iou_weighted: bool = True,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[UnscoredOptions],
) -> Tensor:
    """Varifocal loss on logits, as mmdetection's varifocal_loss (Zhang et al. 2021, arXiv 2008.13367).

    L = w v [y softplus(-x) + (1 - y) softplus(x)] with v = y where y > 0 and v = α p^γ elsewhere, p = σ(x). The factor p^γ is
    differentiated as well.

    Args:
        target: class indices, -1 background and -2 ignored; or the IoU-aware targets y in [0, 1] themselves, dense.
        score: of class indices: y of the row's class in [0, 1]; 0 makes its class a negative, as in mmdetection.
        alpha: α of at least 0.
        gamma: γ of at least 0. Below 1, saturated logits take the limit.
        iou_weighted: False is v = 1 where y > 0.
        reduction: "mean" over all elements not ignored, "sum" or "none".
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.
    """
    alpha = checks.number("alpha", alpha, 0.0)
    gamma = checks.number("gamma", gamma, 0.0)
    hyper = [alpha, gamma, float(checks.flag("iou_weighted", iou_weighted))]
    call = ElementCall("varifocal", input, target, weight=weight, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, {**options, "score": score})


MOST_BINS = 4096
"""As many as a program holds in registers with room to spare."""


class DistributionOptions(BoxOptions, total=False):
    """weight: one a target, broadcasts to (...)."""

    inplace: bool


@computes(DistributionCall)
def distribution_reference(a: DistributionCall) -> Tensor:
    x = accurate(a.x)
    target, last = a.target.to(x.dtype), x.shape[-1] - 1
    valid = (target >= 0) & (target <= last)
    low = torch.where(valid, target.detach(), 0.0).floor().clamp(max=last - 1)
    z = -x.log_softmax(-1)
    values = torch.zeros_like(target)
    for bin, w in ((low, low + 1 - target), (low + 1, target - low)):
        of_bin = z.gather(-1, bin.long().unsqueeze(-1)).squeeze(-1)
        values = values + weighted(FORMULAS[a.loss].reference, a.hyper, of_bin, w)
    values = values * torch.where(valid, 1.0, torch.nan)
    if a.weight is not None:
        values = values * a.weight.to(x.dtype)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=x.device)
    return reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)


@loss(
    "distribution_focal",
    "distribution",
    Module("DistributionFocalLoss", "Distribution focal loss as mmdetection's"),
    formula="cross_entropy",
    targets="a position between bins",
    paper="arXiv 2006.04388",
)
def distribution_focal_loss(
    input: Tensor,  # (..., bins)
    target: Tensor,  # (...)
    reduction: Reduction = "mean",
    **options: Unpack[DistributionOptions],
) -> Tensor:
    """Distribution focal loss, as mmdetection's distribution_focal_loss (Li et al. 2020, arXiv 2006.04388).

    L = w Σⱼ max(0, 1 - |j - y|) (-ln pⱼ), p the softmax over the bins: between the bins i and i + 1, w [(i + 1 - y) (-ln pᵢ) +
    (y - i) (-ln pᵢ₊₁)]. It is the loss of YOLOv8's sides of boxes, and the two-hot cross entropy of distributional critics.

    Args:
        input: logits of 2 to 4096 bins, such as (N, 4, 16), one distribution a side of a box.
        target: the position y in [0, bins - 1], of any floating dtype (float16 and bfloat16 hold few positions), in the shape of input
            without the bins. Outside of that, or nan, it makes its own loss and gradient nan, on every device and whatever its weight, and
            harms no other.
        reduction: "mean" over the targets, "sum" or "none".
        weight: one a target, or what broadcasts to target, such as (N, 1) for (N, 4).
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.

    Returns:
        a scalar or as target, in float32 (float64 for float64).
    """
    checks.whole("input", input)
    checks.floating_beside("target", target, input)
    shape = input.shape[:-1]
    if not input.ndim or not 2 <= input.shape[-1] <= MOST_BINS:
        raise ValueError(f"input must have shape (..., bins) with 2 to {MOST_BINS} bins, got {tuple(input.shape)}")
    if target.shape != shape:
        raise ValueError(f"target must have the shape of input without its bins, {tuple(shape)}, got {tuple(target.shape)}")
    divisor, weight = check_options(input, reduction, options, DistributionOptions), options.get("weight")
    if weight is not None:
        checks.floating_beside("weight", weight, input)
        if not checks.expands(weight, shape):
            raise ValueError(f"weight must broadcast to the shape of target, {tuple(shape)}, got {tuple(weight.shape)}")
    call = DistributionCall("cross_entropy", input, target, weight, reduction=reduction)
    return value(with_options(call, options, divisor), options)
