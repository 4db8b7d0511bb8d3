"""Losses of regions that take the sums of several classes, or the pixels outside of a region too."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lossforge.kernels.masks.calls import OverlapCall
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import Activation, Reduction
from lossforge.losses.base.state import KERNEL_DTYPES, kernels_apply
from lossforge.losses.engine.operators import define_differentiable, launched
from lossforge.losses.templates.overlap import elements, overlap_loss, times

__all__ = ["generalized_dice_loss", "mcc_loss"]

WEIGHTINGS = ("square", "simple", "uniform")


@checks.named
def generalized_dice_loss(
    input: Tensor,
    target: Tensor,
    weighting: Literal["square", "simple", "uniform"] = "square",
    reduction: Reduction = "mean",
    *,
    activation: Activation | None = "softmax",
    include_background: bool = True,
    batch: bool = False,
    ignore_index: int = -100,
    smooth_nr: float = 1e-5,
    smooth_dr: float = 1e-5,
    mask: Tensor | None = None,
) -> Tensor:
    """Generalised Dice loss (Sudre et al. 2017, arXiv 1707.03237), as monai.losses.GeneralizedDiceLoss.

    L = 1 - (2 Σ w I + n) / (Σ w (P + Y) + d) of each image, over its classes, with I = Σ p y, P = Σ p, Y = Σ y over the class's pixels,
    n = smooth_nr, d = smooth_dr. The weight w of a class is 1/Y², 1/Y or 1; a class without pixels has the largest of the others'.

    Two launches compute the sums and the gradient, as those of `dice_loss`.

    When to use it: Take it where classes differ much in size, and each must count the same within one loss.

    When not: Leave it where many classes are absent from an image, whose weight is then the rarest one's; `dice_loss` averages classes.

    Args:
        input: logits (N, C, d…); probabilities where activation is None.
        target: class indices (N, d…) of any integer dtype, or masks (N, C, d…).
        weighting: "square" for w = 1/Y², "simple" for 1/Y, "uniform" for 1.
        reduction: "mean" over images, "sum", or "none": (N,).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        batch: the sums are over all images, so that there is one value.
        ignore_index: pixels with this class index belong to no region and get gradient 0.
        smooth_nr: n of at least 0.
        smooth_dr: d of at least 0.
        mask: which pixels count, as in `dice_loss`.

    Returns:
        a scalar; with reduction "none" one value an image. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import generalized_dice_loss
        >>> logits = torch.randn(2, 5, 16, 16, requires_grad=True)
        >>> generalized_dice_loss(logits, torch.randint(5, (2, 16, 16))).backward()
    """
    checks.one_of("weighting", weighting, WEIGHTINGS)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    smooth_nr, smooth_dr = checks.number("smooth_nr", smooth_nr, 0.0), checks.number("smooth_dr", smooth_dr, 0.0)
    which = {"ignore_index": ignore_index, "mask": mask}
    options = {"activation": activation, "include_background": include_background, "batch": batch, **which}
    i, outside, missed, _ = region_sums(checked_regions(input, target, options))
    p, y = i + outside, i + missed
    if weighting == "uniform":
        w = torch.ones_like(y)
    else:
        size = y if weighting == "simple" else y.square()
        empty = size.reciprocal().isinf()  # whose derivative would be nan, in a gradient of the target
        w = torch.where(empty, 0.0, torch.where(empty, 1.0, size).reciprocal())
        w = torch.where(empty, w.amax(1, keepdim=True), w)
    return _averaged(1 - (2 * (w * i).sum(1) + smooth_nr) / ((w * (p + y)).sum(1) + smooth_dr), reduction)


@checks.named
def mcc_loss(
    input: Tensor,
    target: Tensor,
    reduction: Reduction = "mean",
    *,
    activation: Activation | None = "softmax",
    include_background: bool = True,
    batch: bool = False,
    ignore_index: int = -100,
    smooth_nr: float = 0.0,
    smooth_dr: float = 1e-5,
    mask: Tensor | None = None,
) -> Tensor:
    """Matthews correlation coefficient loss (Abhishek and Hamarneh 2021, arXiv 2010.13454), as monai.losses.MCCLoss.

    L = 1 - (TP TN - FP FN + n) / √((TP + FP) (TP + FN) (TN + FP) (TN + FN) + d) of each class of each image, with TP = Σ p y,
    FP = Σ p (1 - y), FN = Σ (1 - p) y and TN = Σ (1 - p) (1 - y) over its pixels, n = smooth_nr, d = smooth_dr; 0 where the prediction is
    exactly right, and where no pixel counts. With activation=None, batch=True and one class it is segmentation_models_pytorch's MCCLoss but
    for its eps, which it adds to each of the four sums.

    When to use it: Take it for binary masks where the background counts too: unlike Dice it changes when region and background are swapped.

    When not: Leave it for regions that are empty in many images, whose coefficient is not defined; use `batch=True` there.

    Args:
        input: logits (N, C, d…); probabilities where activation is None.
        target: class indices (N, d…) of any integer dtype, or masks (N, C, d…). For one channel, indices are the mask itself.
        reduction: "mean" over images and classes, "sum", or "none": (N, C), with batch (1, C).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        batch: a region is a class over all images.
        ignore_index: pixels with this class index count nowhere and get gradient 0.
        smooth_nr: n of at least 0.
        smooth_dr: d of at least 0.
        mask: which pixels count, as in `dice_loss`.

    Returns:
        a scalar; with reduction "none" one value a region. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import mcc_loss
        >>> logits = torch.randn(2, 1, 16, 16, requires_grad=True)
        >>> mcc_loss(logits, torch.randint(2, (2, 16, 16)), activation="sigmoid").backward()
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    smooth_nr, smooth_dr = checks.number("smooth_nr", smooth_nr, 0.0), checks.number("smooth_dr", smooth_dr, 0.0)
    which = {"ignore_index": ignore_index, "mask": mask}
    options = {"activation": activation, "include_background": include_background, "batch": batch, **which}
    sums = region_sums(checked_regions(input, target, options))
    m = sums.detach().sum(0).clamp(min=1)
    tp, fp, fn, tn = sums / m  # shares, whose product of four does not overflow
    right = (fp == 0) & (fn == 0)
    product = (tp + fp) * (tp + fn) * (tn + fp).clamp(min=0) * (tn + fn).clamp(min=0) + smooth_dr / m**4
    scores = (tp * tn - fp * fn + smooth_nr / m**2) / torch.where(right, 1.0, product).sqrt()
    return _averaged(torch.where(right, 0.0, 1 - scores), reduction)


def _averaged(values: Tensor, reduction: str) -> Tensor:
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def checked_regions(input: Tensor, target: Tensor, options: Mapping[str, Any]) -> OverlapCall:
    """Check logits, targets and options as the losses of overlapping regions do."""
    return overlap_loss(OverlapCall("region_sums", input, target), {}, dict(options)).call


def region_sums(call: OverlapCall) -> Tensor:
    """Return the sums of each region's confusion matrix, Σ p y, Σ p (1 - y), Σ (1 - p) y and Σ (1 - p) (1 - y): (4, N, C), or with batch
    (4, 1, C), without class 0 where it does not count.
    """
    x, target = call.x, call.target
    options = (call.mask, call.activation, call.ignore_index, call.batch)
    narrow = not target.is_floating_point() or (target.dtype in KERNEL_DTYPES and not target.requires_grad)
    if narrow and kernels_apply(x):
        found: Tensor = OPERATORS.region_sums(x.resolve_neg(), target.resolve_neg(), *options)
    else:
        found = _reference(x, target, *options)
    return found[..., call.skip() :]


def dense_target(call: OverlapCall) -> Tensor:
    """Return the targets as (N, C, d…)."""
    target = call.target
    if target.is_floating_point():
        return target if call.mask is None else target.masked_fill(call.mask == 0, 0.0)
    classes = torch.arange(call.x.shape[1], device=target.device).view(1, -1, *(1,) * (target.ndim - 1))
    return (target.unsqueeze(1) == classes + call.first()).to(call.x.dtype)


def left_out(call: OverlapCall) -> Tensor | None:
    """Return which elements belong to no region, (N, 1, d…) of class indices, else (N, C, d…); None: none is."""
    if call.target.is_floating_point():
        return None if call.mask is None else call.mask == 0
    return (call.target.to(torch.int64) == call.ignore_index).unsqueeze(1)


def unknown_pixels(call: OverlapCall) -> Tensor:
    """Return which pixels have an index of no class, (N, 1, d…). On CPU they were refused."""
    index = call.target.to(torch.int64).unsqueeze(1)
    return ((index < 0) | (index >= call.x.shape[1] + call.first())) & (index != call.ignore_index)


def kept_pixels(call: OverlapCall) -> Tensor:
    """Return the logits, which are 0 where they belong to no region, because nan times a distance of 0 is nan."""
    nothing = left_out(call)
    return call.x if nothing is None else torch.where(nothing, 0.0, call.x)


def _reference(x: Tensor, target: Tensor, mask: Tensor | None, activation: str | None, ignore_index: int, batch: bool) -> Tensor:
    call = OverlapCall("region_sums", x, target, mask=mask, activation=activation, ignore_index=ignore_index)
    read, p, y, counts, share = elements(call)
    q, outside = complement(read, p, activation), torch.where(counts, 1 - y, 0.0)
    each = times(torch.stack([p * y, p * outside, q * y, q * outside]), share)
    sums = each.flatten(3).sum(3) if x.ndim > 2 else each
    return sums.sum(1, keepdim=True) if batch else sums


def complement(x: Tensor, p: Tensor, activation: str | None) -> Tensor:
    """Return 1 - p, under an activation without a difference of near numbers."""
    if activation == "sigmoid":
        return (-x).sigmoid()
    if activation == "softmax":
        return torch.where(p > 0.5, torch.where(p > 0.5, 0.0, p).sum(1, keepdim=True), 1 - p)
    return 1 - p


def _sums(x: Tensor, target: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
    _, sums = launched("masks.overlap.launch", "sums", (x, target, mask), *options)
    found: Tensor = sums.view(4, -1, x.shape[1])
    return found


def _fake(x: Tensor, target: Tensor, mask: Tensor | None, activation: str | None, ignore_index: int, batch: bool) -> Tensor:
    return x.new_empty((4, 1 if batch else x.shape[0], x.shape[1]), dtype=torch.float32)


def _backward(grad: Tensor, result: Tensor, x: Tensor, target: Tensor, mask: Tensor | None, *rest: Any) -> None:
    *options, gradient = rest
    inside, outside = grad[0] - grad[2], grad[1] - grad[3]
    launched("masks.overlap.launch", "sums_backward", (x, target, mask, torch.stack([inside, outside]).flatten(), gradient), *options)


define_differentiable(
    "region_sums",
    "Tensor x, Tensor target, Tensor? mask, str? activation, int ignore_index, bool batch",
    _sums,
    _fake,
    _backward,
    _reference,
)
