"""Losses of the overlap of predicted and true regions: segmentation.

A region is one class of one image, or of the whole batch. With p the probabilities, y the targets and sums over the region's pixels:

    I = Σ p y,  P = Σ p,  Y = Σ y,  or with squared_pred P = Σ p² and Y = Σ y²

The sums, the loss and its derivatives by I and P are one launch, the gradient at the logits another, which follows at once where the
gradient is written in forward.
"""

from typing import Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import Formulas, OverlapCall
from lossforge.losses import checks
from lossforge.losses.formulas import formula
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.options import Settings
from lossforge.losses.templates.overlap import OVERLAP, OverlapOptions, overlap_loss
from lossforge.losses.types import Activation, NonNegative, Reduction, ScalarReduction


@formula("dice", lambda of: Formulas(of.overlap.dice))
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
    include_background: bool = True,
    activation: Activation | None = "softmax",
    squared_pred: bool = False,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
    """Soft Dice loss (Milletari et al. 2016, arXiv 1606.04797), as monai.losses.DiceLoss.

    L = 1 - (2 I + n) / (P + Y + d) with n = smooth_nr, d = smooth_dr. With batch=True, present_only=True and n = d = 2 s it is
    segmentation_models_pytorch's DiceLoss with smooth=s (before its version 0.4 with n = d = s).

    When to use it: Take it for the segmentation of small regions. Each region counts the same, however few pixels it has.

    When not: Do not take it as the only loss at the start of training, or where probabilities must be calibrated; `dice_ce` is steadier.
    Regions that are empty in many images need `batch=True` or care with the smoothing.
    """
    call = OverlapCall("dice", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, squared_pred=squared_pred, batch=batch, present_only=present_only)
    return overlap_loss(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("jaccard", lambda of: Formulas(of.overlap.jaccard))
def jaccard_reference(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (p + y - i + smooth_dr)


@loss(
    "jaccard",
    OVERLAP,
    Module("JaccardLoss", "Soft Jaccard loss, 1 - IoU"),
    options=({"smooth_nr": 1.0, "smooth_dr": 2.0}, {"squared_pred": True}),
)
def jaccard_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    squared_pred: bool = False,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
    """Soft Jaccard loss, 1 - IoU, as segmentation_models_pytorch's JaccardLoss.

    L = 1 - (I + n) / (P + Y - I + d) with n = smooth_nr, d = smooth_dr. monai.losses.DiceLoss(jaccard=True) is this with n and d halved.

    When to use it: Take it where a model is judged by IoU. It punishes errors of good regions more than `dice` does.

    When not: Do not take it as the only loss at the start of training, or where probabilities must be calibrated. It and `dice` have the
    same minimum, so the choice between them matters little.
    """
    call = OverlapCall("jaccard", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, squared_pred=squared_pred, batch=batch, present_only=present_only)
    return overlap_loss(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("tversky", lambda of: Formulas(of.overlap.tversky))
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
    include_background: bool = True,
    activation: Activation | None = "softmax",
    alpha: NonNegative = 0.5,
    beta: NonNegative = 0.5,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
    """Tversky loss (Salehi et al. 2017, arXiv 1706.05721), as monai.losses.TverskyLoss.

    L = 1 - (I + n) / (I + α (P - I) + β (Y - I) + d) with n = smooth_nr, d = smooth_dr; P - I are the false positives, Y - I the false
    negatives. α = β = 1/2 is the Dice loss (with n and d doubled), α = β = 1 the Jaccard loss.

    When to use it: Take it where misses cost more than false alarms, or less. α weighs false positives, β false negatives.

    When not: Leave it where both cost the same; take `dice`.

    Args:
        alpha: weight of false positives, at least 0.
        beta: weight of false negatives, at least 0.
    """
    call = OverlapCall("tversky", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, batch=batch, present_only=present_only)
    return overlap_loss(call, {"alpha": alpha, "beta": beta, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("focal_tversky", lambda of: Formulas(of.overlap.focal_tversky))
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
    include_background: bool = True,
    activation: Activation | None = "softmax",
    alpha: NonNegative = 0.3,
    beta: NonNegative = 0.7,
    gamma: NonNegative = 0.75,
    reduction: Reduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
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
    call = OverlapCall("focal_tversky", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, batch=batch, present_only=present_only)
    return overlap_loss(call, {"alpha": alpha, "beta": beta, "gamma": gamma, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@loss(
    "dice_ce",
    OVERLAP,
    Module("DiceCELoss", "Dice loss plus cross entropy as monai.losses.DiceCELoss"),
    formula="dice",
    options=({"lambda_dice": 0.5, "lambda_ce": 2.0}, {"lambda_dice": 0.0}, {"lambda_ce": 0.0}, {"squared_pred": True}),
    reductions=("mean", "sum"),
)
def dice_ce_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    squared_pred: bool = False,
    reduction: ScalarReduction = "mean",
    smooth_nr: NonNegative = 1e-5,
    smooth_dr: NonNegative = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    lambda_dice: NonNegative = 1.0,
    lambda_ce: NonNegative = 1.0,
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[Settings],
) -> Tensor:
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
    if activation is None:
        raise ValueError('activation must be "softmax" or "sigmoid" where a cross entropy needs logits, got None')
    if reduction == "none":
        raise ValueError('reduction must be "mean" or "sum" where two losses are added, got "none"')
    call = OverlapCall("dice", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, squared_pred=squared_pred, batch=batch, present_only=present_only)
    call = call._replace(loss_scale=lambda_dice, lambda_ce=lambda_ce)
    return overlap_loss(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)
