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

from lossforge.kernels.call import OverlapCall
from lossforge.losses import checks
from lossforge.losses.dispatch import value
from lossforge.losses.functional.common import Settings, check_options, factor
from lossforge.losses.repeat import repeated
from lossforge.losses.types import Activation, Reduction, ScalarReduction

ACTIVATIONS = ("softmax", "sigmoid", None)
INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OverlapOptions(Settings, total=False):
    normalizer: float | Tensor | None


def _loss(
    loss: str,
    input: Tensor,
    target: Tensor,
    hyper: dict[str, float],
    options: Any,  # of the names in OverlapOptions, without normalizer beside a cross entropy
    *,
    include_background: bool,
    activation: str | None,
    squared_pred: bool = False,
    reduction: str,
    batch: bool,
    weight: Tensor | None,
    ignore_index: int,
    present_only: bool,
    lambda_dice: float = 1.0,
    lambda_ce: float | None = None,
) -> Tensor:
    """Check arguments and compute."""
    checks.floating("input", input)
    if input.ndim < 2:
        raise ValueError(f"input must have shape (N, C, d…), got {tuple(input.shape)}")
    normalizer = check_options(input, reduction, options, OverlapOptions if lambda_ce is None else Settings)
    checks.one_of("activation", activation, ACTIVATIONS)
    flags = {"include_background": include_background, "squared_pred": squared_pred, "batch": batch, "present_only": present_only}
    for name, flag in flags.items():
        checks.flag(name, flag)
    numbers = [checks.number(name, number, 0.0) for name, number in hyper.items()]
    ignore_index = checks.whole_number("ignore_index", ignore_index)
    classes = input.shape[1]
    if classes == 1 and activation == "softmax":
        raise ValueError(
            f"input must have more than one class under a softmax, which gives one class probability 1 whatever its logits are, got shape "
            f'{tuple(input.shape)}: for the mask of one class pass activation="sigmoid"'
        )
    if classes == 1 and not include_background:
        raise ValueError("include_background=False needs more than one class, got an input of one channel")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    first = int(classes == 1)
    if target.shape == input.shape and not target.is_floating_point() and (classes > 1 or target.dtype == torch.bool):
        target = target.to(input.dtype)
    if target.is_floating_point():
        if target.shape != input.shape:
            raise ValueError(f"target must have the shape of input, {tuple(input.shape)}, where it is dense, got {tuple(target.shape)}")
        checks.beside("target", target, input)
    else:
        if target.ndim == input.ndim and target.shape[1] == 1:
            target = target.squeeze(1)
        pixels = (input.shape[0], *input.shape[2:])
        target = checks.indices("target", target, pixels, input, 0, classes + first, ignore_index, options.get("validate"), INDICES)
    if weight is not None:
        checks.floating_beside("weight", weight, input)
        if weight.shape != (classes,):
            raise ValueError(f"weight must hold one weight a class, shape ({classes},), got {tuple(weight.shape)}")
        weight = weight.contiguous()
    call = OverlapCall(
        loss=loss,
        x=input,
        target=target,
        weight=weight,
        normalizer=normalizer,
        hyper=numbers,
        activation=activation,
        ignore_index=ignore_index,
        include_background=include_background,
        squared_pred=squared_pred,
        batch=batch,
        present_only=present_only,
        loss_scale=lambda_dice * factor(options),
        lambda_ce=lambda_ce,
        reduction=reduction if options.get("normalizer") is None else "sum",
        empty_is_zero=options.get("empty") == "zero",
    )
    return value(call, options.get("gradient"), options.get("inplace", False))


@repeated
def dice_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    squared_pred: bool = False,
    reduction: Reduction = "mean",
    smooth_nr: float = 1e-5,
    smooth_dr: float = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
    """Soft Dice loss (Milletari et al. 2016, arXiv 1606.04797), as monai.losses.DiceLoss.

    L = 1 - (2 I + n) / (P + Y + d) with n = smooth_nr, d = smooth_dr. With batch=True, present_only=True and n = d = s it is
    segmentation_models_pytorch's DiceLoss with smooth=s.

    Args: see lossforge.losses.functional.overlap.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    return _loss(
        "dice",
        input,
        target,
        {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr},
        options,
        include_background=include_background,
        activation=activation,
        squared_pred=squared_pred,
        reduction=reduction,
        batch=batch,
        weight=weight,
        ignore_index=ignore_index,
        present_only=present_only,
    )


@repeated
def jaccard_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    squared_pred: bool = False,
    reduction: Reduction = "mean",
    smooth_nr: float = 1e-5,
    smooth_dr: float = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
    """Soft Jaccard loss, 1 - IoU, as segmentation_models_pytorch's JaccardLoss.

    L = 1 - (I + n) / (P + Y - I + d) with n = smooth_nr, d = smooth_dr. monai.losses.DiceLoss(jaccard=True) is this with n and d halved.

    Args: see lossforge.losses.functional.overlap.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    return _loss(
        "jaccard",
        input,
        target,
        {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr},
        options,
        include_background=include_background,
        activation=activation,
        squared_pred=squared_pred,
        reduction=reduction,
        batch=batch,
        weight=weight,
        ignore_index=ignore_index,
        present_only=present_only,
    )


@repeated
def tversky_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    alpha: float = 0.5,
    beta: float = 0.5,
    reduction: Reduction = "mean",
    smooth_nr: float = 1e-5,
    smooth_dr: float = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[OverlapOptions],
) -> Tensor:
    """Tversky loss (Salehi et al. 2017, arXiv 1706.05721), as monai.losses.TverskyLoss.

    L = 1 - (I + n) / (I + α (P - I) + β (Y - I) + d) with n = smooth_nr, d = smooth_dr; P - I are the false positives, Y - I the false
    negatives. α = β = 1/2 is the Dice loss (with n and d doubled), α = β = 1 the Jaccard loss.

    Args: alpha, beta: weights of false positives and false negatives, at least 0. Others: see lossforge.losses.functional.overlap.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    return _loss(
        "tversky",
        input,
        target,
        {"alpha": alpha, "beta": beta, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr},
        options,
        include_background=include_background,
        activation=activation,
        reduction=reduction,
        batch=batch,
        weight=weight,
        ignore_index=ignore_index,
        present_only=present_only,
    )


@repeated
def focal_tversky_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    alpha: float = 0.3,
    beta: float = 0.7,
    gamma: float = 0.75,
    reduction: Reduction = "mean",
    smooth_nr: float = 1e-5,
    smooth_dr: float = 1e-5,
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

    Args: alpha, beta, gamma: at least 0; where T is 1 the gradient is taken as 0, also for γ < 1. Others: see
    lossforge.losses.functional.overlap.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    return _loss(
        "focal_tversky",
        input,
        target,
        {"alpha": alpha, "beta": beta, "gamma": gamma, "smooth_nr": smooth_nr, "smooth_dr": smooth_dr},
        options,
        include_background=include_background,
        activation=activation,
        reduction=reduction,
        batch=batch,
        weight=weight,
        ignore_index=ignore_index,
        present_only=present_only,
    )


@repeated
def dice_ce_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…) or (N, C, d…)
    *,
    include_background: bool = True,
    activation: Activation | None = "softmax",
    squared_pred: bool = False,
    reduction: ScalarReduction = "mean",
    smooth_nr: float = 1e-5,
    smooth_dr: float = 1e-5,
    batch: bool = False,
    weight: Tensor | None = None,  # (C,)
    lambda_dice: float = 1.0,
    lambda_ce: float = 1.0,
    ignore_index: int = -100,
    present_only: bool = False,
    **options: Unpack[Settings],
) -> Tensor:
    """Dice loss plus cross entropy from one pass over the logits, as monai.losses.DiceCELoss.

    L = λ_dice dice_loss + λ_ce CE. CE is cross_entropy of the logits where activation is "softmax", and
    binary_cross_entropy_with_logits, each class times its weight, where it is "sigmoid"; both over all classes, with reduction "mean" over
    the pixels (softmax with class indices: their class weights) or elements that are not ignored. All ignored, CE is nan, or with
    empty="zero" 0.

    Args: activation: "softmax" or "sigmoid"; reduction: "mean" or "sum"; lambda_dice, lambda_ce: at least 0.
    Others: see lossforge.losses.functional.overlap; normalizer is not taken.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    lambda_dice = checks.number("lambda_dice", lambda_dice, 0.0)
    lambda_ce = checks.number("lambda_ce", lambda_ce, 0.0)
    if activation is None:
        raise ValueError('activation must be "softmax" or "sigmoid" where a cross entropy needs logits, got None')
    if reduction == "none":
        raise ValueError('reduction must be "mean" or "sum" where two losses are added, got "none"')
    return _loss(
        "dice",
        input,
        target,
        {"smooth_nr": smooth_nr, "smooth_dr": smooth_dr},
        options,
        include_background=include_background,
        activation=activation,
        squared_pred=squared_pred,
        reduction=reduction,
        batch=batch,
        weight=weight,
        ignore_index=ignore_index,
        present_only=present_only,
        lambda_dice=lambda_dice,
        lambda_ce=lambda_ce,
    )
