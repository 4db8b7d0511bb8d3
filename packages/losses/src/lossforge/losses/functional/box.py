"""Losses of pairs of boxes, one a row of two tensors (..., 4)."""

from typing import Unpack

from torch import Tensor

from lossforge.kernels.call import BoxCall
from lossforge.losses import checks
from lossforge.losses.dispatch import value
from lossforge.losses.functional.common import BoxOptions, check_options, factor
from lossforge.losses.repeat import repeated
from lossforge.losses.types import BoxFormat, Reduction

FORMATS = ("xyxy", "cxcywh")


def box_loss(
    loss: str,
    boxes1: Tensor,
    boxes2: Tensor,
    hyper: list[float],
    reduction: str,
    weight: Tensor | None,
    format: str,
    options: BoxOptions,
) -> Tensor:
    checks.floating("boxes1", boxes1)
    checks.floating_beside("boxes2", boxes2, boxes1, "boxes1")
    shape = boxes1.shape
    if not shape or shape[-1] != 4:
        raise ValueError(f"boxes1 must have shape (..., 4), got {tuple(shape)}")
    if boxes2.shape != shape:
        raise ValueError(f"boxes2 must have the shape of boxes1, {tuple(shape)}, got {tuple(boxes2.shape)}")
    checks.one_of("format", format, FORMATS)
    divisor = check_options(boxes1, reduction, options, BoxOptions, "boxes1")
    if weight is not None:
        checks.floating_beside("weight", weight, boxes1, "boxes1")
        pairs = shape[:-1]
        if weight.ndim > len(pairs) or any(a not in (1, b) for a, b in zip(reversed(weight.shape), reversed(pairs), strict=False)):
            raise ValueError(f"weight must hold one weight a pair and broadcast to {tuple(pairs)}, got {tuple(weight.shape)}")
    given: BoxOptions = {"empty": "zero", **options}
    call = BoxCall(
        loss=loss,
        boxes1=boxes1,
        boxes2=boxes2,
        weight=weight,
        normalizer=divisor,
        hyper=[1.0 * h for h in hyper],
        loss_scale=factor(given),
        centered=format == "cxcywh",
        reduction=reduction if given.get("normalizer") is None else "sum",
        empty_is_zero=given["empty"] == "zero",
    )
    return value(call, options.get("gradient"))


def _overlap_loss(
    loss: str, boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float, weight: Tensor | None, format: str, options: BoxOptions
) -> Tensor:
    eps = checks.number("eps", eps, 0.0)
    return box_loss(loss, boxes1, boxes2, [eps], reduction, weight, format, options)


@repeated
def box_iou_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    eps: float = 1e-7,
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    format: BoxFormat = "xyxy",
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Loss of the intersection over union (IoU) of two boxes; no gradient where they do not overlap.

    L = w [1 - I/U] with I the area of the intersection, U that of the union; the linear form of Yu et al. 2016 (arXiv 1608.01471).

    Args: boxes1, boxes2: of a floating dtype, in the units of an image or as fractions of it; gradients go to both. reduction: "none",
    "mean" over the pairs, or "sum". eps: at least 0; a denominator (an area, a squared length) below it is eps. weight: one a pair; a
    mean divides by the number of pairs also then, by the weights with normalizer=weight.sum(). format: "xyxy" (x1, y1, x2, y2), x1 < x2
    and y1 < y2, or "cxcywh" (centre, width, height). empty: what a mean over no pairs gives, by default "zero" as in torchvision.
    normalizer, gradient: see lossforge.losses.functional.
    Returns: a scalar or (...), in float32 (float64 for float64), as torchvision does. Boxes of equal coordinates and area have loss 0.
    Two boxes without area have I/U = 0. Where two edges lie on each other, the derivatives of min and max are halves, as in torch.
    Raises: TypeError, ValueError naming the argument.
    """
    return _overlap_loss("iou", boxes1, boxes2, reduction, eps, weight, format, options)


@repeated
def generalized_box_iou_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    eps: float = 1e-7,
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    format: BoxFormat = "xyxy",
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Generalized IoU loss (GIoU), as torchvision.ops.generalized_box_iou_loss (Rezatofighi et al. 2019, arXiv 1902.09630).

    L = w [1 - I/U + (C - U)/C] with C the area of the smallest box around both. torchvision adds eps to U and C, so that its loss of equal
    boxes is eps/U; ours is exactly 0.

    Args: as in box_iou_loss.
    Raises: TypeError, ValueError naming the argument.
    """
    return _overlap_loss("giou", boxes1, boxes2, reduction, eps, weight, format, options)


@repeated
def distance_box_iou_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    eps: float = 1e-7,
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    format: BoxFormat = "xyxy",
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Distance IoU loss (DIoU), as torchvision.ops.distance_box_iou_loss (Zheng et al. 2020, arXiv 1911.08287).

    L = w [1 - I/U + ρ²/d²] with ρ the distance of the centres, d the diagonal of the smallest box around both; as in
    generalized_box_iou_loss, eps bounds the denominators instead of being added.

    Args: as in box_iou_loss.
    Raises: TypeError, ValueError naming the argument.
    """
    return _overlap_loss("diou", boxes1, boxes2, reduction, eps, weight, format, options)


@repeated
def complete_box_iou_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    eps: float = 1e-7,
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    format: BoxFormat = "xyxy",
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Complete IoU loss (CIoU), as torchvision.ops.complete_box_iou_loss (Zheng et al. 2020, arXiv 1911.08287).

    L = w [1 - I/U + ρ²/d² + αv] with v = 4/π² (atan w₂/h₂ - atan w₁/h₁)² and α = v / (1 - I/U + v), through which, as in torchvision, no
    gradient goes. A box without width and height has the angle 0 and no gradient through v, where torchvision's loss is nan.

    Args: as in box_iou_loss; eps bounds all denominators, where torchvision's reaches only that of α.
    Raises: TypeError, ValueError naming the argument.
    """
    return _overlap_loss("ciou", boxes1, boxes2, reduction, eps, weight, format, options)


@repeated
def efficient_box_iou_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    eps: float = 1e-7,
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    format: BoxFormat = "xyxy",
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Efficient IoU loss (EIoU; Zhang et al. 2022, arXiv 2101.08158).

    L = w [1 - I/U + ρ²/d² + (w₁-w₂)²/w_C² + (h₁-h₂)²/h_C²] with w_C and h_C the sides of the smallest box around both, d its diagonal,
    and ρ the distance of the centres.

    Args: as in box_iou_loss.
    Raises: TypeError, ValueError naming the argument.
    """
    return _overlap_loss("eiou", boxes1, boxes2, reduction, eps, weight, format, options)


@repeated
def box_l1_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Absolute error of boxes or of their encoded offsets.

    L = w Σ |b₁ - b₂| over the four coordinates of a pair. As DETR's loss_bbox (arXiv 2005.12872) with normalizer = number of boxes, and
    as torchvision's RetinaNet head with reduction "sum"; a mean is four times torch's, which divides by the coordinates.

    Args: as in box_iou_loss; the coordinates are compared as they are, whatever they stand for.
    Raises: TypeError, ValueError naming the argument.
    """
    return box_loss("box_l1", boxes1, boxes2, [], reduction, weight, "xyxy", options)


@repeated
def box_smooth_l1_loss(
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,  # as boxes1
    reduction: Reduction = "none",
    beta: float = 1.0,
    *,
    weight: Tensor | None = None,  # broadcasts to (...)
    **options: Unpack[BoxOptions],
) -> Tensor:
    """Smooth L1 loss of boxes or of their encoded offsets (Girshick 2015, arXiv 1504.08083), as torchvision's RPN and RoI heads sum it.

    L = w Σ [½ d² / β if |d| < β else |d| - ½ β] over the four differences d of a pair's coordinates. β = 0 is box_l1_loss.

    Args: beta: at least 0, in the units of the coordinates. Others: as in box_l1_loss.
    Raises: TypeError, ValueError naming the argument.
    """
    beta = checks.number("beta", beta, 0.0)
    name, hyper = ("box_smooth_l1", [beta]) if checks.nonzero(beta) else ("box_l1", [])
    return box_loss(name, boxes1, boxes2, hyper, reduction, weight, "xyxy", options)
