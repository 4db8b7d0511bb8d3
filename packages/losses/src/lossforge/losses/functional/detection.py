"""Classification losses of dense detectors, whose targets say how good a box is."""

from typing import Any, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import ElementCall, Formulas
from lossforge.losses import checks
from lossforge.losses.formulas import formula
from lossforge.losses.functional.binary import bce_with_logits_reference
from lossforge.losses.registry import loss
from lossforge.losses.templates.element import elementwise_loss
from lossforge.losses.templates.module import Module
from lossforge.losses.templates.options import UnscoredOptions
from lossforge.losses.types import NonNegative, Reduction

__all__ = ["quality_focal_loss", "varifocal_loss"]


def _quality_kernels(of: Any) -> Formulas:
    quality = of.quality
    binary = Formulas(quality.quality_hard, quality.quality_2_hard, quality.is_2)
    return Formulas(quality.quality, quality.quality_2, quality.is_2, binary)


@formula("quality_focal", _quality_kernels)
def quality_reference(x: Tensor, y: Tensor, beta: float) -> Tensor:
    distance = (x.sigmoid() * (1 - y) - (-x).sigmoid() * y).abs().clamp(min=torch.finfo(x.dtype).tiny)
    return distance**beta * bce_with_logits_reference(x, y, 1.0)


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

    Args: target: class indices (-1 background, where mmdetection has the number of classes; -2 ignored), whose row is y = score in its
    class and 0 elsewhere, or without score y = 1; or the qualities y in [0, 1] themselves; dim: the classes' dimension; score: in [0, 1],
    such as the IoU of the box; beta: at least 0; reduction: "mean" sums over the classes and averages over the rows not ignored, as
    mmdetection does, "none" gives the loss of each element (mmdetection: of each row); weight: one a row has shape (N, 1) for (N, C)
    logits; normalizer: mmdetection's avg_factor. Others: see lossforge.losses.functional. For β < 1 and saturated logits the gradient
    takes its limit.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
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
    return w * bce_with_logits_reference(x, y, 1.0)


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

    Args: target, score: as in quality_focal_loss, y the IoU-aware target; a score of 0 makes its class a negative, as in mmdetection;
    alpha, gamma: at least 0; iou_weighted: False is v = 1 where y > 0; reduction: "mean" is over all elements not ignored; normalizer:
    mmdetection's avg_factor. Others: see lossforge.losses.functional. For γ < 1 and saturated logits the gradient takes its limit.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    alpha = checks.number("alpha", alpha, 0.0)
    gamma = checks.number("gamma", gamma, 0.0)
    hyper = [alpha, gamma, float(checks.flag("iou_weighted", iou_weighted))]
    call = ElementCall("varifocal", input, target, weight=weight, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, {**options, "score": score})
