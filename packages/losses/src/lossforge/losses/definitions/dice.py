"""Losses for segmentation: of the overlap of predicted and true regions, of their sorted errors, and of the hardest pixels.

A region is one class of one image, or of the whole batch. With p the probabilities, y the targets and sums over the region's pixels:

    I = Σ p y,  P = Σ p,  Y = Σ y,  or with squared_pred P = Σ p² and Y = Σ y²

The sums, the loss and its derivatives by I and P are one launch, the gradient at the logits another, which follows at once where the
gradient is written in forward.

The Lovász extension of the Jaccard index sorts a region's errors and weighs each by how much the Jaccard loss grows with that pixel among
the wrong ones. It is convex in the errors, and at errors of 0 and 1 it is the Jaccard loss itself.
"""

import math
from typing import Annotated, Unpack

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.kernels.masks.calls import LovaszCall, OverlapCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import Averaged, NonNegative, Range, Reduction, ScalarReduction, UnitInterval
from lossforge.losses.base.options import MaskedOptions, RegionOptions, RegionSettings
from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.engine.calls import compute
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import tl
from lossforge.losses.templates.lovasz import LOVASZ, LOVASZ_MASKS, lovasz_loss
from lossforge.losses.templates.overlap import OVERLAP, overlap_loss
from lossforge.losses.templates.plain_forms import which_count
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_loss


@loss(
    "ohem_ce",
    ROWWISE,
    Module("OHEMCrossEntropyLoss", "Cross entropy with online hard example mining"),
    formula="cross_entropy",
    options=({"threshold": 0.2, "min_kept": 3}, {"threshold": 0.0, "min_kept": 2}, {"threshold": 0.4, "min_kept": 0, "z_loss": 1e-2}),
    like="lossforge.losses.testing.oracles.classification:ohem_ce",
    paper="arXiv 1604.03540",
)
def ohem_cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    threshold: UnitInterval = 0.7,
    min_kept: Annotated[int, Range(least=0)] = 100_000,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall]:
    """Cross entropy with online hard example mining (OHEM; Shrivastava et al. 2016, arXiv 1604.03540), for segmentation.

    L = w_t (-ln p_t) [p_t < θ], p = softmax(x): rows with a smaller probability of their class than θ = threshold are kept; where these
    are fewer than min_kept, the min_kept rows of smallest p_t in the whole batch.

    The other rows count as ignored ones do: the mean divides by the weights of the classes of the kept rows. The rows are chosen in one
    pass over the logits, without waiting for the device; the loss then reads the kept rows alone. The choice has no gradient.

    When to use it: Take it for segmentation in which most pixels are easy, such as road and sky. It spends the gradient on hard regions.

    When not: Leave it where many labels are wrong, because those are the rows that it keeps; `generalized_ce` does the opposite. On
    balanced, easy data it only adds a pass.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b), and is kept or not as one.
        threshold: θ in [0, 1], the probability below which a row is hard.
        min_kept: the least number of rows that are kept of a batch; of a batch with fewer rows all are kept. Rows as hard as the last of
            them are kept, too.
        weight: (C,), a factor of each class, which the mean divides by. It does not change which rows are hard.
    """
    min_kept = checks.whole_number("min_kept", min_kept)
    if min_kept < 0:
        raise ValueError(f"min_kept must be at least 0, got {min_kept}")
    limit = -torch.as_tensor(checks.number("threshold", threshold, 0.0, 1.0), dtype=torch.float64, device="cpu").log()
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    keep = _hard_rows(rowwise_loss(call, options).call, limit, min_kept).view(target.shape)
    target_b = options.get("target_b")
    if target_b is not None:
        options["target_b"] = torch.where(keep, target_b.long(), ignore_index)
    return rowwise_loss(call._replace(target=torch.where(keep, target.long(), ignore_index)), options)


@torch.no_grad()
def _hard_rows(call: RowwiseCall, limit: Tensor, min_kept: int) -> Tensor:
    """Return which rows have a loss above `limit`, or one of the min_kept largest."""
    counts = which_count(call)
    plain = call._replace(weight=None, normalizer=None, z_loss=0.0, loss_scale=1.0, reduction="none", mean_of_rows=False)
    losses = compute(CheckedCall(plain, {}, first))
    hardness = torch.where(counts, losses.nan_to_num(nan=math.inf, posinf=math.inf), -math.inf)
    keep = hardness > limit
    if kept := min(min_kept, hardness.numel()):
        keep = keep | (hardness >= hardness.flatten().topk(kept).values[-1])
    return keep


@formula("dice", DeviceFormula("overlap.dice"))
def dice_reference(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (2 * i + smooth_nr) / (p + y + smooth_dr)


@loss(
    "dice",
    OVERLAP,
    Module("DiceLoss", "Soft Dice loss as monai.losses.DiceLoss"),
    options=({"smooth_nr": 0.0, "smooth_dr": 1e-6}, {"smooth_nr": 1.0, "smooth_dr": 1.0}, {"squared_pred": True}),
    paper="arXiv 1606.04797",
)
def dice_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    squared_pred: bool = False,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    **options: Unpack[RegionOptions],
) -> CheckedCall[OverlapCall]:
    """Soft Dice loss (Milletari et al. 2016, arXiv 1606.04797), as monai.losses.DiceLoss.

    L = 1 - (2 I + n) / (P + Y + d) with n = smooth_nr, d = smooth_dr. With batch=True, present_only=True and n = d = 2 s it is
    segmentation_models_pytorch's DiceLoss with smooth=s (before its version 0.4 with n = d = s).

    When to use it: Take it for the segmentation of small regions. Each region counts the same, however few pixels it has.

    When not: Do not take it as the only loss at the start of training, or where probabilities must be calibrated; `dice_ce` is steadier.
    Regions that are empty in many images need `batch=True` or care with the smoothing.
    """
    call = OverlapCall("dice", input, target, squared_pred=squared_pred, reduction=reduction)
    return overlap_loss(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("jaccard", DeviceFormula("overlap.jaccard"))
def jaccard_reference(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (p + y - i + smooth_dr)


@loss(
    "jaccard",
    OVERLAP,
    Module("JaccardLoss", "Soft Jaccard loss, 1 - IoU"),
    options=({"smooth_nr": 1.0, "smooth_dr": 2.0}, {"squared_pred": True}),
    paper="doi 10.1007/978-3-319-50835-1_22",
)
def jaccard_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    squared_pred: bool = False,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    **options: Unpack[RegionOptions],
) -> CheckedCall[OverlapCall]:
    """Soft Jaccard loss, 1 - IoU, as segmentation_models_pytorch's JaccardLoss.

    L = 1 - (I + n) / (P + Y - I + d) with n = smooth_nr, d = smooth_dr. monai.losses.DiceLoss(jaccard=True) is this with n and d halved.

    When to use it: Take it where a model is judged by IoU. It punishes errors of good regions more than `dice` does.

    When not: Do not take it as the only loss at the start of training, or where probabilities must be calibrated. It and `dice` have the
    same minimum, so the choice between them matters little.
    """
    call = OverlapCall("jaccard", input, target, squared_pred=squared_pred, reduction=reduction)
    return overlap_loss(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("tversky", DeviceFormula("overlap.tversky"))
def tversky_reference(i: Tensor, p: Tensor, y: Tensor, alpha: float, beta: float, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (i + alpha * (p - i) + beta * (y - i) + smooth_dr)


@loss(
    "tversky",
    OVERLAP,
    Module("TverskyLoss", "Tversky loss as monai.losses.TverskyLoss"),
    options=({"alpha": 0.3, "beta": 0.7}, {"alpha": 1.0, "beta": 1.0}, {"alpha": 0.0, "beta": 2.0, "smooth_dr": 1.0}),
    paper="arXiv 1706.05721",
)
def tversky_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    alpha: NonNegative = 0.5,
    beta: NonNegative = 0.5,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    **options: Unpack[RegionOptions],
) -> CheckedCall[OverlapCall]:
    """Tversky loss (Salehi et al. 2017, arXiv 1706.05721), as monai.losses.TverskyLoss.

    L = 1 - (I + n) / (I + α (P - I) + β (Y - I) + d) with n = smooth_nr, d = smooth_dr; P - I are the false positives, Y - I the false
    negatives. α = β = 1/2 is the Dice loss (with n and d doubled), α = β = 1 the Jaccard loss.

    When to use it: Take it where misses cost more than false alarms, or less. α weighs false positives, β false negatives.

    When not: Leave it where both cost the same; take `dice`.

    Args:
        alpha: weight of false positives, at least 0.
        beta: weight of false negatives, at least 0.
    """
    call = OverlapCall("tversky", input, target, reduction=reduction)
    return overlap_loss(call, {"alpha": alpha, "beta": beta, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("focal_tversky", DeviceFormula("overlap.focal_tversky"))
def focal_tversky_reference(
    i: Tensor, p: Tensor, y: Tensor, alpha: float, beta: float, gamma: float, smooth_nr: float, smooth_dr: float
) -> Tensor:
    rest = tversky_reference(i, p, y, alpha, beta, smooth_nr, smooth_dr)
    tiny = torch.finfo(rest.dtype).tiny
    return torch.where(rest <= tiny, 0.0, rest.clamp(min=tiny) ** gamma)


@loss(
    "focal_tversky",
    OVERLAP,
    Module("FocalTverskyLoss", "Focal Tversky loss; gamma is the exponent"),
    options=({"gamma": 1.0}, {"gamma": 2.0, "alpha": 0.5, "beta": 0.5}),
    paper="arXiv 1810.07842",
)
def focal_tversky_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    alpha: NonNegative = 0.3,
    beta: NonNegative = 0.7,
    gamma: NonNegative = 0.75,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    **options: Unpack[RegionOptions],
) -> CheckedCall[OverlapCall]:
    """Focal Tversky loss (Abraham and Khan 2018, arXiv 1810.07842).

    L = (1 - T)^γ, T = (I + n) / (I + α (P - I) + β (Y - I) + d) with n = smooth_nr, d = smooth_dr. γ is the exponent itself, as in the
    authors' code: the paper writes 1/γ, and its γ = 4/3 is 0.75 here. As in tversky_loss α weighs the false positives, which the paper
    calls β: its α = 0.7 is beta here.

    When to use it: Take it as `tversky`, to shift weight between regions. γ above 1 favours those that are badly segmented. The default
    0.75, which is the authors', favours those that are nearly right.

    When not: Leave γ above 1 where masks are noisy, because bad masks then dominate; and γ below 1 where hard regions are neglected.

    Args:
        alpha: weight of false positives, at least 0.
        beta: weight of false negatives, at least 0.
        gamma: γ of at least 0, the exponent of 1 - T. Where T is 1 the gradient is taken as 0, also for γ < 1.
    """
    call = OverlapCall("focal_tversky", input, target, reduction=reduction)
    return overlap_loss(call, {"alpha": alpha, "beta": beta, "gamma": gamma, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@loss(
    "dice_ce",
    OVERLAP,
    Module("DiceCELoss", "Dice loss plus cross entropy as monai.losses.DiceCELoss"),
    formula="dice",
    options=({"lambda_dice": 0.5, "lambda_ce": 2.0}, {"lambda_dice": 0.0}, {"lambda_ce": 0.0}, {"squared_pred": True}),
    reductions=("mean", "sum"),
    paper="arXiv 1809.10486",
)
def dice_ce_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    squared_pred: bool = False,
    reduction: ScalarReduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    lambda_dice: NonNegative = 1.0,
    lambda_ce: NonNegative = 1.0,
    **options: Unpack[RegionSettings],
) -> CheckedCall[OverlapCall]:
    """Dice loss plus cross entropy from one pass over the logits, as monai.losses.DiceCELoss.

    L = λ_dice dice_loss + λ_ce CE. CE is cross_entropy of the logits where activation is "softmax", and
    binary_cross_entropy_with_logits, each class times its weight, where it is "sigmoid"; both over all classes, with reduction "mean" over
    the pixels (softmax with class indices: their class weights) or elements that are not ignored. All ignored, CE is nan, or with
    empty="zero" 0.

    When to use it: Take it first for segmentation. Cross entropy steers each pixel and Dice each region, from one pass over the logits.

    When not: Leave it where one of the two parts needs options of its own; call `dice` and `ce` then.

    Args:
        activation: "softmax" or "sigmoid".
        reduction: "mean" or "sum".
        lambda_dice: λ_dice of at least 0, a factor of the Dice loss.
        lambda_ce: λ_ce of at least 0, a factor of the cross entropy.
    """
    lambda_dice = checks.number("lambda_dice", lambda_dice, 0.0)
    lambda_ce = checks.number("lambda_ce", lambda_ce, 0.0)
    if options.get("activation", "softmax") is None:
        raise ValueError('activation must be "softmax" or "sigmoid" where a cross entropy needs logits, got None')
    if reduction == "none":
        raise ValueError('reduction must be "mean" or "sum" where two losses are added, got "none"')
    call = OverlapCall("dice", input, target, squared_pred=squared_pred, reduction=reduction, loss_scale=lambda_dice, lambda_ce=lambda_ce)
    return overlap_loss(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


def missing_probability(p, y):
    return tl.abs(y - p)


@formula("lovasz_softmax", DeviceFormula(missing_probability))
def missing_probability_reference(p: Tensor, y: Tensor) -> Tensor:
    return (y - p).abs()


@loss(
    "lovasz_softmax",
    LOVASZ,
    Module("LovaszSoftmaxLoss", "Lovász-softmax loss, as segmentation_models_pytorch's LovaszLoss of several classes"),
    options=({"per_image": True}, {"classes": "all"}, {"classes": [2, 0], "per_image": True}),
    like="lossforge.losses.testing.oracles.segmentation:lovasz_softmax",
    paper="arXiv 1705.08790",
)
def lovasz_softmax_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…)
    classes: Averaged | list[int] | tuple[int, ...] = "present",
    per_image: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[MaskedOptions],
) -> CheckedCall[LovaszCall]:
    """Lovász-softmax loss (Berman et al. 2018, arXiv 1705.08790), as segmentation_models_pytorch's LovaszLoss in its multiclass mode.

    L = Σ gₖ eₖ over the pixels k of a region, the largest error first, e = |y - p|, p = softmax(x), gₖ = J({1…k}) - J({1…k - 1}), where
    J(M) = 1 - |Y - M| / |Y ∪ M| is the Jaccard loss of a mask of the class's pixels Y that is wrong at the pixels M.

    The mean is that of the classes, with per_image of each image, and then that of the images. Torch sorts the errors of each region;
    equal errors keep the order of their pixels. Kernels compute all else.

    When to use it: Take it to finish a segmentation that is judged by mean IoU, after or beside cross entropy. It optimises that measure
    itself, of the batch or of each image.

    When not: Leave it at the start of training, and on small batches of many classes, whose mean IoU says little of the data set's.
    `jaccard` needs no sort, which takes most of the time here.

    Args:
        classes: "present" averages the classes that have pixels, "all" every class. With a list of class indices absent classes count too,
            and a class that is listed twice counts twice.
    """
    checks.whole("input", input)
    if input.ndim < 2 or input.shape[1] < 2:
        raise ValueError(
            f"input must have shape (N, C, d…) with at least two classes, got {tuple(input.shape)}: of one class take lovasz_hinge_loss"
        )
    call = LovaszCall("lovasz_softmax", input, target, per_image=per_image, ignore_index=ignore_index, reduction=reduction)
    return lovasz_loss(call, classes, options)


def hinge(x, y):
    return 1.0 - x * (2.0 * y - 1.0)


@formula("lovasz_hinge", DeviceFormula(hinge))
def hinge_reference(x: Tensor, y: Tensor) -> Tensor:
    return 1 - x * (2 * y - 1)


@loss(
    "lovasz_hinge",
    LOVASZ_MASKS,
    Module("LovaszHingeLoss", "Lovász hinge loss, as segmentation_models_pytorch's LovaszLoss of one class"),
    options=({"per_image": True},),
    like="lossforge.losses.testing.oracles.segmentation:lovasz_hinge",
    paper="arXiv 1705.08790",
)
def lovasz_hinge_loss(
    input: Tensor,  # (N, d…), (N, 1, d…)
    target: Tensor,  # as input
    per_image: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[MaskedOptions],
) -> CheckedCall[LovaszCall]:
    """Lovász hinge loss of a mask (Berman et al. 2018, arXiv 1705.08790), as segmentation_models_pytorch's LovaszLoss in its binary mode.

    L = Σ gₖ max(0, eₖ) over the pixels k, the largest error first, e = 1 - x (2 y - 1), with gₖ as in `lovasz_softmax_loss`.

    When to use it: Take it for one class against background that is judged by its IoU, after or beside `bce`.

    When not: Leave it where logits must become probabilities, because it asks only that they pass a margin of 1.
    """
    checks.whole("input", input)
    checks.fits("input", input, input.ndim >= 2, "have shape (N, d…) or (N, 1, d…)")
    one = isinstance(target, Tensor) and target.ndim == input.ndim - 1 and input.shape[1] == 1
    x = input if one else input.unsqueeze(1)
    call = LovaszCall("lovasz_hinge", x, target, softmax=False, per_image=per_image, ignore_index=ignore_index, reduction=reduction)
    return lovasz_loss(call, "all", options)
