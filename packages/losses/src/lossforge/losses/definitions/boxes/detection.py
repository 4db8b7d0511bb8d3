"""Losses of dense detectors: classification whose targets say how good a box is, and sides of boxes as distributions."""

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import DistributionCall
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import NonNegative, Positive, Reduction, UnitInterval
from lossforge.losses.base.options import (
    WeightedElementwiseOptions,
    WeightedOptions,
    WeightedUnscoredOptions,
    broadcast_weight,
    check_options,
    checked_call,
)
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.definitions.classes.binary import bce_with_logits_reference, lost
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.distribution import DISTRIBUTION
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss, with_parameter

QUALITY = DeviceFormula(
    "binary.quality.quality",
    "binary.quality.quality_2",
    "binary.quality.is_2",
    binary=DeviceFormula("binary.quality.quality_hard", "binary.quality.quality_2_hard", "binary.quality.is_2"),
)


@formula("quality_focal", QUALITY, saturates=True)
def quality_reference(x: Tensor, y: Tensor, beta: float) -> Tensor:
    distance = (x.sigmoid() * (1 - y) - (-x).sigmoid() * y).abs().clamp(min=torch.finfo(x.dtype).tiny)
    return lost(distance**beta * bce_with_logits_reference(x, y, 1.0), x, beta != 0)


@loss(
    "quality_focal",
    ELEMENTWISE,
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
    **options: Unpack[WeightedUnscoredOptions],
) -> CheckedCall[ElementwiseCall]:
    """Quality focal loss on logits, as mmdetection's quality_focal_loss (Li et al. 2020, arXiv 2006.04388).

    L = w |y - p|^β [y softplus(-x) + (1 - y) softplus(x)], p = σ(x). The factor |y - p|^β is differentiated as well.

    When to use it: Take it for detectors whose class score should say how good the box is, as GFL does. Its targets are qualities such as
    the IoU.

    When not: Leave it where targets are 0 and 1; it is then focal loss without α. Qualities that are noisy early in training mislead the
    score.

    Args:
        target: class indices, -1 background (mmdetection: the number of classes) and -2 ignored; or the qualities y in [0, 1] themselves,
            dense.
        score: of class indices: y of the row's class in [0, 1], such as the IoU of the box; without it 1.
        beta: β of at least 0, the exponent of the distance to the quality. Below 1, saturated logits take the limit.
        reduction: "mean" sums over the classes and averages over the rows not ignored, as mmdetection does; "sum"; "none" gives the loss of
            each element (mmdetection: of each row).
        weight: broadcasts to input: one a row has shape (N, 1) for (N, C) logits.
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.
    """
    beta = checks.number("beta", beta, 0.0)
    call = ElementwiseCall("quality_focal", input, target, hyper=[beta], reduction=reduction)
    return elementwise_loss(call, {**options, "score": score}, mean="rows")


VARIFOCAL = DeviceFormula(
    "binary.varifocal.varifocal",
    "binary.varifocal.varifocal_2",
    "binary.varifocal.is_2",
    binary=DeviceFormula("binary.varifocal.varifocal_hard", "binary.varifocal.varifocal_2_hard", "binary.varifocal.is_2"),
)


@formula("varifocal", VARIFOCAL, saturates=True)
def varifocal_reference(x: Tensor, y: Tensor, alpha: float, gamma: float, iou_weighted: float, free: float) -> Tensor:
    negative = alpha * (x if free else x.detach()).sigmoid().clamp(min=torch.finfo(x.dtype).tiny) ** gamma
    w = torch.where(y > 0, y if iou_weighted else torch.ones_like(y), negative)
    return lost(w * bce_with_logits_reference(x, y, 1.0), x, y == 0, gamma != 0, free != 0)


@loss(
    "varifocal",
    ELEMENTWISE,
    Module("VarifocalLoss", "Varifocal loss as mmdetection's"),
    switches=("iou_weighted", "hold_weight", "positive_at_zero"),
    options=(
        {"iou_weighted": False},
        {"gamma": 0.5},
        {"gamma": 0.0, "alpha": 0.3},
        {"gamma": 3.5},
        {"hold_weight": True},
        {"hold_weight": True, "gamma": 1.5},
    ),
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
    hold_weight: bool = False,
    positive_at_zero: bool = False,
    **options: Unpack[WeightedUnscoredOptions],
) -> CheckedCall[ElementwiseCall]:
    """Varifocal loss on logits, as mmdetection's varifocal_loss (Zhang et al. 2021, arXiv 2008.13367).

    L = w v [y softplus(-x) + (1 - y) softplus(x)] with v = y where y > 0 and v = α p^γ elsewhere, p = σ(x). The factor p^γ is
    differentiated as well, unless hold_weight. RT-DETR (arXiv 2304.08069) and D-FINE have both hold_weight and positive_at_zero.

    When to use it: Take it for detectors whose score ranks boxes by their IoU, as VarifocalNet does. Only negatives are damped; positives
    keep their weight.

    When not: Leave it where the IoU of the predicted box is not at hand when the loss is computed.

    Args:
        target: class indices, -1 background and -2 ignored; or the IoU-aware targets y in [0, 1] themselves, dense.
        score: of class indices: y of the row's class in [0, 1]; 0 makes its class a negative, as in mmdetection, unless positive_at_zero.
        alpha: α of at least 0, a factor of negatives.
        gamma: γ of at least 0, the focusing exponent of negatives. Below 1, saturated logits take the limit.
        iou_weighted: weigh positives by their target, which is an IoU; False is v = 1 where y > 0.
        hold_weight: let no gradient go through the weight α p^γ of negatives.
        positive_at_zero: let a row's class of score 0 count as a positive, whose weight is then 0, or 1 without iou_weighted. It takes
            class indices, because dense targets do not tell which zeros are such.
        reduction: "mean" over all elements not ignored, "sum" or "none".
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.
    """
    alpha = checks.number("alpha", alpha, 0.0)
    gamma = checks.number("gamma", gamma, 0.0)
    hyper = [alpha, gamma, float(iou_weighted), float(not hold_weight)]
    if positive_at_zero:
        if isinstance(target, Tensor) and target.is_floating_point():
            raise TypeError(f"target must hold class indices where positive_at_zero=True, got {target.dtype}")
        score = _above_zero(score)
    call = ElementwiseCall("varifocal", input, target, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, {**options, "score": score})


SMALLEST = torch.finfo(torch.float32).tiny
"""The score of a positive whose quality is 0, because formulas take y = 0 as a negative."""


def _above_zero(score: Tensor | None) -> Tensor | None:
    """Return scores of which none is 0, in float32 at least, and what is refused later as it is."""
    if not isinstance(score, Tensor) or not score.is_floating_point():
        return score
    return _wide(score).clamp(min=SMALLEST)


def _raised(target: Tensor, score: Tensor | None, exponent: float) -> tuple[Tensor | None, float]:
    """Return the scores of class indices to a power, none of them 0, and the power that is left for the kernel: that of dense targets."""
    if isinstance(target, Tensor) and target.is_floating_point():
        return score, exponent
    if isinstance(score, Tensor) and score.is_floating_point():
        score = _above_zero(_wide(score).clamp(min=SMALLEST) ** exponent)
    return score, 1.0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _to_the_power(y: Tensor, exponent: float) -> Tensor:
    return torch.where(y > 0, y.clamp(min=torch.finfo(y.dtype).tiny) ** exponent, y)


BY_QUALITY = replace(
    ELEMENTWISE.docs,
    arguments={
        **ELEMENTWISE.docs.arguments,
        "target": "class indices, -1 background and -2 ignored; or the qualities q in [0, 1] themselves, dense: 0 is a negative.",
        "score": "of class indices: q of the row's class in [0, 1], such as the IoU of the box; without it 1. "
        "A class of score 0 is a positive.",
        "reduction": '"mean" over all elements not ignored, "sum" or "none".',
        "normalizer": "number or 0-d tensor that takes the place of the mean's divisor, such as the number of boxes.",
    },
)


def _of_power(name: str) -> DeviceFormula:
    """Return a formula with a quicker one for qualities that need no power."""
    binary = DeviceFormula(f"binary.varifocal.{name}_hard", f"binary.varifocal.{name}_hard", "binary.varifocal.is_1", heavy=True)
    return DeviceFormula(f"binary.varifocal.{name}", f"binary.varifocal.{name}_1", "binary.varifocal.is_1", binary=binary, heavy=True)


@formula("mal", _of_power("mal"), saturates=True)
def mal_reference(x: Tensor, y: Tensor, alpha: float, gamma: float, exponent: float) -> Tensor:
    w = torch.where(y > 0, 1.0, alpha * x.detach().sigmoid().clamp(min=torch.finfo(x.dtype).tiny) ** gamma)
    return w * bce_with_logits_reference(x, _to_the_power(y, exponent), 1.0)


@loss(
    "mal",
    ELEMENTWISE,
    Module("MatchabilityAwareLoss", "Matchability-aware loss as DEIM's"),
    options=({"gamma": 2.0}, {"gamma": 0.5, "alpha": 0.3}),
    paper="arXiv 2412.04234",
    docs=BY_QUALITY,
)
def mal_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    score: Tensor | None = None,  # as a class-index target
    gamma: Positive = 1.5,
    alpha: NonNegative = 1.0,
    reduction: Reduction = "mean",
    **options: Unpack[WeightedUnscoredOptions],
) -> CheckedCall[ElementwiseCall]:
    """Matchability-aware loss on logits (MAL; Huang et al. 2025, arXiv 2412.04234), as DEIM's loss_labels_mal.

    L = w [q^γ softplus(-x) + (1 - q^γ) softplus(x)] of a positive of quality q, and w α p^γ softplus(x) of a negative, p = σ(x). No
    gradient goes through the weight α p^γ.

    When to use it: Take it for DETRs that match one query with each box, as DEIM and DEIMv2 do. A match of low IoU keeps its full weight,
    where varifocal loss all but drops it.

    When not: Leave it where many anchors of low IoU are positives, as in dense detectors; `varifocal` weighs these by their IoU.

    Args:
        gamma: γ above 0, the exponent of the quality, and of a negative's probability.
        alpha: α of at least 0, a factor of negatives: DEIM's mal_alpha, whose None is 1.
    """
    gamma = checks.number("gamma", gamma, 0.0, exclusive=True)
    score, exponent = _raised(target, score, gamma)
    hyper = [checks.number("alpha", alpha, 0.0), gamma, exponent]
    call = ElementwiseCall("mal", input, target, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, {**options, "score": score})


@formula("ia_bce", _of_power("ia_bce"), saturates=True)
def ia_bce_reference(x: Tensor, y: Tensor, alpha: float, gamma: float, exponent: float) -> Tensor:
    p = x.sigmoid().clamp(min=torch.finfo(x.dtype).tiny)
    t = torch.where(y > 0, (p.detach() ** alpha * _to_the_power(y, exponent)).clamp(min=0.01), y)
    w = torch.where(y > 0, 1.0, p**gamma)
    return lost(w * bce_with_logits_reference(x, t, 1.0), x, y == 0, gamma != 0)


@loss(
    "ia_bce",
    ELEMENTWISE,
    Module("IoUAwareBCELoss", "IoU-aware binary cross entropy as LW-DETR's"),
    options=({"alpha": 0.5, "gamma": 1.5}, {"alpha": 0.0}, {"alpha": 0.7, "gamma": 0.0}),
    paper="arXiv 2406.03459",
    docs=BY_QUALITY,
)
def ia_bce_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    score: Tensor | None = None,  # as a class-index target
    alpha: UnitInterval = 0.25,
    gamma: NonNegative = 2.0,
    reduction: Reduction = "mean",
    **options: Unpack[WeightedUnscoredOptions],
) -> CheckedCall[ElementwiseCall]:
    """IoU-aware binary cross entropy on logits (IA-BCE), as LW-DETR's and RF-DETR's loss_labels (Chen et al. 2024, arXiv 2406.03459).

    L = w [t softplus(-x) + (1 - t) softplus(x)] of a positive of quality q, t = max(p^α q^(1-α), 0.01), and w p^γ softplus(x) of a
    negative, p = σ(x). No gradient goes through p in t. The factor p^γ of negatives is differentiated.

    When to use it: Take it for DETRs in the manner of LW-DETR and RF-DETR. Its target lies between the score and the IoU, so that it rises
    as both do.

    When not: Leave it where scores must be the IoU itself, as for ranking by it; take `quality_focal` or `mal`.

    Args:
        alpha: α in [0, 1], the share of the predicted score in the target.
        gamma: γ of at least 0, the focusing exponent of negatives. Below 1, saturated logits take the limit.
    """
    alpha = checks.number("alpha", alpha, 0.0, 1.0)
    score, exponent = _raised(target, score, 1.0 - alpha)
    hyper = [alpha, checks.number("gamma", gamma, 0.0), exponent]
    call = ElementwiseCall("ia_bce", input, target, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, {**options, "score": score})


@formula("gaussian_focal", DeviceFormula("binary.quality.gaussian", "binary.quality.gaussian_2_4", "binary.quality.is_2_4"))
def gaussian_reference(x: Tensor, y: Tensor, alpha: float, gamma: float, neg_weight: float, pos_weight: Tensor | float) -> Tensor:
    tiny, peak = torch.finfo(x.dtype).tiny, y == 1
    u = torch.where(peak, -x, x)
    w = torch.where(peak, pos_weight, neg_weight * (1 - y).abs().clamp(min=tiny) ** gamma)
    return lost(w * u.sigmoid().clamp(min=tiny) ** alpha * -F.logsigmoid(-u), x, alpha != 0)


@loss(
    "gaussian_focal",
    ELEMENTWISE,
    Module("GaussianFocalLoss", "Gaussian focal loss of heatmaps as mmdetection's, on logits"),
    options=({"alpha": 0.5, "gamma": 1.5}, {"alpha": 0.0, "gamma": 0.0}, {"alpha": 3.0, "pos_weight": 3.0, "neg_weight": 0.5}),
    like="lossforge.losses.testing.oracles.elements:gaussian_focal",
    paper="arXiv 1808.01244",
)
def gaussian_focal_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    alpha: NonNegative = 2.0,
    gamma: NonNegative = 4.0,
    pos_weight: NonNegative | Tensor = 1.0,  # number, or broadcasts to input
    neg_weight: NonNegative = 1.0,
    reduction: Reduction = "mean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Gaussian focal loss of heatmaps on logits, as mmdetection's gaussian_focal_loss (Law and Deng 2018, arXiv 1808.01244).

    L = w c₊ (1 - p)^α softplus(-x) where y = 1 and w c₋ (1 - y)^γ p^α softplus(x) elsewhere, p = σ(x), with c₊ = pos_weight and
    c₋ = neg_weight. mmdetection takes p, to whose logarithms it adds 1e-12; the logits need no such bound.

    When to use it: Take it for heatmaps of points, as in CornerNet, CenterNet and pose estimation: 1 at an object, a Gaussian around it, so
    that near misses cost less. Divide by the number of objects with `normalizer=`.

    When not: Leave it where targets are 0 and 1 only; it is then `focal` without its α. A peak must be exactly 1: a Gaussian that is drawn
    between pixels has none.

    Args:
        input: logits of any shape and floating dtype, before the sigmoid of CenterNet's head.
        target: heatmaps y in [0, 1], dense. In bfloat16 what is above 0.998 is 1 and so a peak: give them in float32, whatever the logits
            are in. Or class indices, -1 background and -2 ignored.
        alpha: α of at least 0, the focusing exponent.
        gamma: γ of at least 0; the larger, the less pixels around a peak count.
        pos_weight: c₊ of at least 0, a factor of the peaks; or a tensor that broadcasts to input, such as one a class.
        neg_weight: c₋ of at least 0, a factor of all others.
        normalizer: number or 0-d tensor that takes the place of the mean's divisor, such as the number of objects.
    """
    hyper = [checks.number("alpha", alpha, 0.0), checks.number("gamma", gamma, 0.0), checks.number("neg_weight", neg_weight, 0.0)]
    hyper, parameter = with_parameter(hyper, "pos_weight", pos_weight, input, 0.0)
    call = ElementwiseCall("gaussian_focal", input, target, parameter=parameter, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, options)


MOST_BINS = 4096
"""As many as a program holds in registers with room to spare."""


class DistributionOptions(WeightedOptions, total=False):
    """weight: one a target, broadcasts to (...)."""

    inplace: bool


@loss(
    "distribution_focal",
    DISTRIBUTION,
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
) -> CheckedCall[DistributionCall]:
    """Distribution focal loss, as mmdetection's distribution_focal_loss (Li et al. 2020, arXiv 2006.04388).

    L = w Σⱼ max(0, 1 - |j - y|) (-ln pⱼ), p the softmax over the bins: between the bins i and i + 1, w [(i + 1 - y) (-ln pᵢ) +
    (y - i) (-ln pᵢ₊₁)]. It is the loss of YOLOv8's sides of boxes, and the two-hot cross entropy of distributional critics.

    When to use it: Take it for sides of boxes as distributions over bins, as in GFL and YOLOv8. It is also the two-hot cross entropy of
    critics in reinforcement learning.

    When not: Leave it where targets fall outside the bins, or some hundred bins would be needed. A regression loss is simpler there.

    Args:
        input: logits of 2 to 4096 bins, such as (N, 4, 16), one distribution a side of a box.
        target: the position y in [0, bins - 1], of any floating dtype (float16 and bfloat16 hold few positions), in the shape of input
            without the bins. Outside of that, or nan, it makes its own loss and gradient nan, on every device and unless its weight is 0,
            and harms no other.
        reduction: "mean" over the targets, "sum" or "none".
        weight: one a target, or what broadcasts to target, such as (N, 1) for (N, 4).
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.

    Examples:
        >>> sides = torch.randn(32, 4, 17, requires_grad=True)
        >>> distribution_focal_loss(sides, 16 * torch.rand(32, 4)).backward()
    """
    checks.whole("input", input)
    checks.floating_beside("target", target, input)
    shape = input.shape[:-1]
    checks.fits("input", input, input.ndim > 0 and 2 <= input.shape[-1] <= MOST_BINS, "have shape (..., bins) with 2 to {} bins", MOST_BINS)
    checks.fits("target", target, target.shape == shape, "have the shape of input without its bins, {}", shape)
    divisor = check_options(input, reduction, options, DistributionOptions)
    weight = broadcast_weight(options, input, "input", shape, "broadcast to the shape of target,")
    return checked_call(DistributionCall("cross_entropy", input, target, weight, reduction=reduction), options, divisor)
