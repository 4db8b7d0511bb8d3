"""Losses of the overlap of predicted and true regions: segmentation.

A region is one class of one image, or of the whole batch. With p the probabilities, y the targets and sums over the region's pixels:

    I = Σ p y,  P = Σ p,  Y = Σ y,  or with squared_pred P = Σ p² and Y = Σ y²

Arguments that they share:

input: logits (N, C, d…) with any number of spatial dimensions, none included; probabilities where activation is None.
target: class indices (N, d…) or (N, 1, d…) of any integer dtype (uint8 is read as it is), or dense targets (N, C, d…) of a floating
    dtype, bool, or with C > 1 an integer dtype, one-hot, soft, or with several labels a pixel. For one channel, indices are the mask
    itself: 1 is the channel's class, 0 background.
activation: "softmax" over the classes, of which there must be two or more, "sigmoid" of each, or None. (MONAI's flags softmax and
    sigmoid, of which neither is the default.)
include_background: whether class 0 counts.
reduction: "mean" and "sum" over images and classes, or "none": (N, C), with batch (C,), without class 0 where it does not count.
batch: a region is a class over all images, as in segmentation_models_pytorch; by default one of each image, as in MONAI.
weight: (C,), one a class; a mean does not divide by them.
ignore_index: pixels with this class index belong to no region and get gradient 0, whatever their logits are.
present_only: the loss of a class without target pixels is 0, as in segmentation_models_pytorch; the mean counts it nevertheless.
smooth_nr, smooth_dr: added to numerator and denominator. Where a region is empty in prediction and target, or all is ignored, the ratio
    is smooth_nr / smooth_dr: 1 by default, so the loss is 0. Both 0 make it nan.
normalizer, empty, gradient, inplace, validate: see lossforge.losses.functional. An index out of range, unchecked, makes the regions of
    its image nan, with batch all of them.

The sums, the loss and its derivatives by I and P are one launch, the gradient at the logits another, which follows at once where the
gradient is written in forward.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import Formulas, OverlapCall
from lossforge.losses import checks
from lossforge.losses.autograd import value
from lossforge.losses.formulas import formula
from lossforge.losses.registry import loss
from lossforge.losses.templates.module import LossModule, Module
from lossforge.losses.templates.options import Settings, check_options, rows_of, weights_of_classes, with_options
from lossforge.losses.types import Activation, NonNegative, Reduction, ScalarReduction

__all__ = ["dice_ce_loss", "dice_loss", "focal_tversky_loss", "jaccard_loss", "tversky_loss"]

ACTIVATIONS = ("softmax", "sigmoid", None)
INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OverlapOptions(Settings, total=False):
    normalizer: float | Tensor | None


class OverlapModule(LossModule):
    quiet = ("include_background", "activation", "smooth_nr", "smooth_dr", "batch", "weight", "ignore_index", "present_only")


@formula("dice", lambda of: Formulas(of.overlap.dice))
def dice_reference(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (2 * i + smooth_nr) / (p + y + smooth_dr)


@loss(
    "dice",
    "overlap",
    Module("DiceLoss", "Soft Dice loss as monai.losses.DiceLoss", base=OverlapModule),
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
    """
    call = OverlapCall("dice", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, squared_pred=squared_pred, batch=batch, present_only=present_only)
    return _of_regions(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("jaccard", lambda of: Formulas(of.overlap.jaccard))
def jaccard_reference(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (p + y - i + smooth_dr)


@loss(
    "jaccard",
    "overlap",
    Module("JaccardLoss", "Soft Jaccard loss, 1 - IoU", base=OverlapModule),
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
    """
    call = OverlapCall("jaccard", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, squared_pred=squared_pred, batch=batch, present_only=present_only)
    return _of_regions(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("tversky", lambda of: Formulas(of.overlap.tversky))
def tversky_reference(i: Tensor, p: Tensor, y: Tensor, alpha: float, beta: float, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (i + alpha * (p - i) + beta * (y - i) + smooth_dr)


@loss(
    "tversky",
    "overlap",
    Module("TverskyLoss", "Tversky loss as monai.losses.TverskyLoss", base=OverlapModule),
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

    Args:
        alpha: weight of false positives, at least 0.
        beta: weight of false negatives, at least 0.
    """
    call = OverlapCall("tversky", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, batch=batch, present_only=present_only)
    return _of_regions(call, {"alpha": alpha, "beta": beta, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@formula("focal_tversky", lambda of: Formulas(of.overlap.focal_tversky))
def focal_tversky_reference(
    i: Tensor, p: Tensor, y: Tensor, alpha: float, beta: float, gamma: float, smooth_nr: float, smooth_dr: float
) -> Tensor:
    rest = tversky_reference(i, p, y, alpha, beta, smooth_nr, smooth_dr)
    tiny = torch.finfo(rest.dtype).tiny
    return torch.where(rest <= tiny, 0.0, rest.clamp(min=tiny) ** gamma)


@loss(
    "focal_tversky",
    "overlap",
    Module("FocalTverskyLoss", "Focal Tversky loss; gamma is the exponent", base=OverlapModule),
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

    Args:
        alpha: weight of false positives, at least 0.
        beta: weight of false negatives, at least 0.
        gamma: exponent of at least 0. Where T is 1 the gradient is taken as 0, also for γ < 1.
    """
    call = OverlapCall("focal_tversky", input, target, weight=weight, activation=activation, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(include_background=include_background, batch=batch, present_only=present_only)
    return _of_regions(call, {"alpha": alpha, "beta": beta, "gamma": gamma, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


@loss(
    "dice_ce",
    "overlap",
    Module("DiceCELoss", "Dice loss plus cross entropy as monai.losses.DiceCELoss", base=OverlapModule),
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

    Args:
        activation: "softmax" or "sigmoid".
        reduction: "mean" or "sum".
        lambda_dice: of at least 0.
        lambda_ce: of at least 0.
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
    return _of_regions(call, {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr}, options)


def _of_regions(call: OverlapCall, hyper: dict[str, float], options: Any) -> Tensor:
    """Check arguments and compute. call: with the function's arguments as they are.

    options: of the names in OverlapOptions, without normalizer beside a cross entropy.
    """
    input, target, activation = call.x, call.target, call.activation
    checks.whole("input", input)
    if input.ndim < 2:
        raise ValueError(f"input must have shape (N, C, d…), got {tuple(input.shape)}")
    normalizer = check_options(input, call.reduction, options, OverlapOptions if call.lambda_ce is None else Settings)
    checks.one_of("activation", activation, ACTIVATIONS)
    for name in ("include_background", "squared_pred", "batch", "present_only"):
        checks.flag(name, getattr(call, name))
    numbers = [checks.number(name, number, 0.0) for name, number in hyper.items()]
    ignore_index = checks.whole_number("ignore_index", call.ignore_index)
    classes = input.shape[1]
    if classes == 1 and activation == "softmax":
        raise ValueError(
            f"input must have more than one class under a softmax, which gives one class probability 1 whatever its logits are, got shape "
            f'{tuple(input.shape)}: for the mask of one class pass activation="sigmoid"'
        )
    if classes == 1 and not call.include_background:
        raise ValueError("include_background=False needs more than one class, got an input of one channel")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    first = int(classes == 1)
    if target.shape == input.shape and not target.is_floating_point() and (classes > 1 or target.dtype == torch.bool):
        target = target.to(input.dtype)
    if target.is_floating_point():
        checks.dense(target, input, rows_of(input, 1), ", where it is dense")
        checks.beside("target", target, input)
    else:
        if target.ndim == input.ndim and target.shape[1] == 1:
            target = target.squeeze(1)
        allowed = checks.Allowed(0, classes + first, ignore_index, options.get("validate"))
        target = checks.indices("target", target, input, allowed, rows_of(input, 1), INDICES)
    weight = weights_of_classes("weight", call.weight, input, classes)
    call = call._replace(target=target, weight=weight, hyper=numbers, ignore_index=ignore_index)
    return value(with_options(call, options, normalizer), options)
