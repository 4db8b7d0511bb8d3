"""Losses of pairs of boxes, one a row of two tensors (..., 4)."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import BoxCall, Formulas
from lossforge.losses import checks
from lossforge.losses.device_names import complement, larger, overlap, smaller, tl
from lossforge.losses.formulas import formula
from lossforge.losses.functional.regression import smooth_l1_reference
from lossforge.losses.registry import loss
from lossforge.losses.templates.box import box_loss, corner_loss
from lossforge.losses.templates.module import Module
from lossforge.losses.templates.options import BoxOptions, CornerOptions
from lossforge.losses.types import NonNegative, Reduction

__all__ = [
    "box_iou_loss",
    "box_l1_loss",
    "box_smooth_l1_loss",
    "complete_box_iou_loss",
    "distance_box_iou_loss",
    "efficient_box_iou_loss",
    "generalized_box_iou_loss",
    "scylla_box_iou_loss",
]

OPTIONS = ({"eps": 3e3}, {"format": "cxcywh"})
"""Of the areas that tests divide by, about half are below an eps of 3e3."""


def _sides(b: Tensor) -> tuple[Tensor, Tensor]:
    return b[..., 2] - b[..., 0], b[..., 3] - b[..., 1]


def _hull(b1: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.minimum(b1[..., :2], b2[..., :2]), torch.maximum(b1[..., 2:], b2[..., 2:])
    return _sides(torch.cat([low, high], -1))


def _overlap(b1: Tensor, b2: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """1 - I/U, and U; nan where a box is flipped, in all derivatives too."""
    flipped = (b1[..., 2:] < b1[..., :2]) | (b2[..., 2:] < b2[..., :2])
    b1, b2 = (b * torch.where(flipped.any(-1, keepdim=True), torch.nan, 1.0) for b in (b1, b2))
    (w1, h1), (w2, h2) = _sides(b1), _sides(b2)
    low, high = torch.maximum(b1[..., :2], b2[..., :2]), torch.minimum(b1[..., 2:], b2[..., 2:])
    w, h = (high - low).unbind(-1)
    intersection = torch.where((w > 0) & (h > 0), w * h, 0.0)
    union = w1 * h1 + (w2 * h2 - intersection)
    kept = union.clamp(min=eps)
    return (kept - intersection) / kept, union


@formula("iou", lambda of: Formulas(of.box.iou))
def iou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    return _overlap(b1, b2, eps)[0]


@loss(
    "iou",
    "boxes",
    Module("BoxIoULoss", "IoU loss of two boxes", ' As there and in torchvision, the default reduction is "none".'),
    options=OPTIONS,
    paper="arXiv 1608.01471",
)
def box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> Tensor:
    """Loss of the intersection over union (IoU) of two boxes; no gradient where they do not overlap.

    L = w [1 - I/U] with I the area of the intersection, U that of the union; the linear form of Yu et al. 2016 (arXiv 1608.01471).

    Returns:
        a scalar or (...), in float32 (float64 for float64), as torchvision does. Boxes of equal coordinates and area have loss 0. Two boxes
        without area have I/U = 0. Where two edges lie on each other, the derivatives of min and max are halves, as in torch. A pair with
        a flipped box (x2 < x1, y2 < y1, or a negative width or height) has loss and gradient nan; validate=True raises.
    """
    return corner_loss("iou", boxes1, boxes2, reduction, eps, options)


@formula("giou", lambda of: Formulas(of.box.giou))
def giou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value, union = _overlap(b1, b2, eps)
    w, h = _hull(b1, b2)
    hull = w * h
    return value + (hull - union) / hull.clamp(min=eps)


@loss(
    "giou",
    "boxes",
    Module("GeneralizedBoxIoULoss", "Generalized IoU loss"),
    options=OPTIONS,
    judge="torchvision.ops:generalized_box_iou_loss",
    paper="arXiv 1902.09630",
)
def generalized_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> Tensor:
    """Generalized IoU loss (GIoU), as torchvision.ops.generalized_box_iou_loss (Rezatofighi et al. 2019, arXiv 1902.09630).

    L = w [1 - I/U + (C - U)/C] with C the area of the smallest box around both. torchvision adds eps to U and C, so that its loss of equal
    boxes is eps/U; ours is exactly 0.
    """
    return corner_loss("giou", boxes1, boxes2, reduction, eps, options)


@formula("diou", lambda of: Formulas(of.box.diou))
def diou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    w, h = _hull(b1, b2)
    offset = ((b1[..., :2] - b2[..., :2]) + (b1[..., 2:] - b2[..., 2:])) / 2
    return iou_reference(b1, b2, eps) + offset.square().sum(-1) / (w * w + h * h).clamp(min=eps)


@loss(
    "diou",
    "boxes",
    Module("DistanceBoxIoULoss", "Distance IoU loss"),
    options=OPTIONS,
    judge="torchvision.ops:distance_box_iou_loss",
    paper="arXiv 1911.08287",
)
def distance_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> Tensor:
    """Distance IoU loss (DIoU), as torchvision.ops.distance_box_iou_loss (Zheng et al. 2020, arXiv 1911.08287).

    L = w [1 - I/U + ρ²/d²] with ρ the distance of the centres, d the diagonal of the smallest box around both; as in
    generalized_box_iou_loss, eps bounds the denominators instead of being added.
    """
    return corner_loss("diou", boxes1, boxes2, reduction, eps, options)


def _angle(b: Tensor) -> Tensor:
    """atan(w / h), also where h is 0; 0, with derivative 0, where w is 0 as well."""
    w, h = _sides(b)
    point = (w == 0) & (h == 0)
    w, h = torch.where(point, 0.0, w), torch.where(point, 1.0, h)
    sign = torch.where(h < 0, -1.0, 1.0)
    return torch.atan2(sign * w, sign * h)


@formula("ciou", lambda of: Formulas(of.box.ciou))
def ciou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    v = 4 / math.pi**2 * (_angle(b2) - _angle(b1)).square()
    alpha = (v / (iou_reference(b1, b2, eps) + v).clamp(min=eps)).detach()
    return diou_reference(b1, b2, eps) + alpha * v


@loss(
    "ciou",
    "boxes",
    Module("CompleteBoxIoULoss", "Complete IoU loss"),
    options=OPTIONS,
    judge="torchvision.ops:complete_box_iou_loss",
    paper="arXiv 1911.08287",
)
def complete_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> Tensor:
    """Complete IoU loss (CIoU), as torchvision.ops.complete_box_iou_loss (Zheng et al. 2020, arXiv 1911.08287).

    L = w [1 - I/U + ρ²/d² + αv] with v = 4/π² (atan w₂/h₂ - atan w₁/h₁)² and α = v / (1 - I/U + v), through which, as in torchvision, no
    gradient goes. A box without width and height has the angle 0 and no gradient through v, where torchvision's loss is nan.

    Args:
        eps: of at least 0; a denominator below it is eps. It bounds all denominators, where torchvision's reaches only that of α.
    """
    return corner_loss("ciou", boxes1, boxes2, reduction, eps, options)


@formula("eiou", lambda of: Formulas(of.box.eiou))
def eiou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value = diou_reference(b1, b2, eps)
    for s1, s2, s in zip(_sides(b1), _sides(b2), _hull(b1, b2), strict=True):
        value = value + (s1 - s2).square() / (s * s).clamp(min=eps)
    return value


@loss("eiou", "boxes", Module("EfficientBoxIoULoss", "Efficient IoU loss"), options=OPTIONS, paper="arXiv 2101.08158")
def efficient_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> Tensor:
    """Efficient IoU loss (EIoU; Zhang et al. 2022, arXiv 2101.08158).

    L = w [1 - I/U + ρ²/d² + (w₁-w₂)²/w_C² + (h₁-h₂)²/h_C²] with w_C and h_C the sides of the smallest box around both, d its diagonal,
    and ρ the distance of the centres.
    """
    return corner_loss("eiou", boxes1, boxes2, reduction, eps, options)


def siou_side(gamma, offset, a, b, c, d, eps):
    hull = larger(b, d) - smaller(a, c)
    distance, _ = complement(gamma * offset * offset / larger(hull * hull, eps))
    shape, _ = complement(tl.abs((b - a) - (d - c)) / larger(larger(b - a, d - c), eps))
    return 0.5 * (distance + shape * shape * (shape * shape))


def siou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    dx, dy = 0.5 * ((x1 - u1) + (x2 - u2)), 0.5 * ((y1 - v1) + (y2 - v2))
    gamma = 2.0 - 2.0 * tl.abs(dx * dy) / larger(dx * dx + dy * dy, eps)
    sides = siou_side(gamma, dx, x1, x2, u1, u2, eps) + siou_side(gamma, dy, y1, y2, v1, v2, eps)
    return overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps) + sides


@formula("siou", lambda of: Formulas(of(siou, variables=8), heavy=True))
def siou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    d = ((b1[..., :2] - b2[..., :2]) + (b1[..., 2:] - b2[..., 2:])) / 2
    gamma = 2 - 2 * (d[..., :1] * d[..., 1:]).abs() / d.square().sum(-1, keepdim=True).clamp(min=eps)
    s1, s2, hull = (torch.stack(sides, -1) for sides in (_sides(b1), _sides(b2), _hull(b1, b2)))
    shape = torch.expm1(-(s1 - s2).abs() / torch.maximum(s1, s2).clamp(min=eps))
    return iou_reference(b1, b2, eps) + (shape**4 - torch.expm1(-gamma * d.square() / hull.square().clamp(min=eps))).sum(-1) / 2


@loss("siou", "boxes", Module("ScyllaBoxIoULoss", "SCYLLA IoU loss"), options=OPTIONS, paper="arXiv 2205.12740")
def scylla_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> Tensor:
    """SCYLLA IoU loss (SIoU; Gevorgyan 2022, arXiv 2205.12740).

    L = w [1 - I/U + ½ Σ (1 - exp(-γ d²/C²) + (1 - exp(-|s₁ - s₂| / max(s₁, s₂)))⁴)] with, over both axes, the offset of the centres d, the
    sides s₁, s₂ and C of the boxes and of the smallest one around both, and γ = 2 - Λ, Λ = 2 |d_x d_y| / (d_x² + d_y²) the angle's cost.
    """
    return corner_loss("siou", boxes1, boxes2, reduction, eps, options)


@formula("box_l1", lambda of: Formulas(of.box_l1.box_l1))
def box_l1_reference(b1: Tensor, b2: Tensor) -> Tensor:
    return F.l1_loss(b1, b2, reduction="none").sum(-1)


@loss("box_l1", "boxes", Module("BoxL1Loss", "Absolute error of boxes, summed over their coordinates"), paper="arXiv 2005.12872")
def box_l1_loss(boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", **options: Unpack[BoxOptions]) -> Tensor:
    """Absolute error of boxes or of their encoded offsets.

    L = w Σ |b₁ - b₂| over the four coordinates of a pair. As DETR's loss_bbox (arXiv 2005.12872) with normalizer = number of boxes, and
    as torchvision's RetinaNet head with reduction "sum"; a mean is four times torch's, which divides by the coordinates.

    Args:
        boxes1: (..., 4), of a floating dtype. Coordinates are compared as they are, whatever they stand for.
    """
    return box_loss(BoxCall("box_l1", boxes1, boxes2, reduction=reduction), options)


@formula("box_smooth_l1", lambda of: Formulas(of.box_l1.box_smooth_l1))
def box_smooth_l1_reference(b1: Tensor, b2: Tensor, beta: float) -> Tensor:
    return smooth_l1_reference(b1, b2, beta).sum(-1)


@loss(
    "box_smooth_l1",
    "boxes",
    Module("BoxSmoothL1Loss", "Smooth L1 loss of boxes, summed over their coordinates"),
    options=({"beta": 0.3}, {"beta": 20.0}, {"beta": 0.0}),
    paper="arXiv 1504.08083",
)
def box_smooth_l1_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", beta: NonNegative = 1.0, **options: Unpack[BoxOptions]
) -> Tensor:
    """Smooth L1 loss of boxes or of their encoded offsets (Girshick 2015, arXiv 1504.08083), as torchvision's RPN and RoI heads sum it.

    L = w Σ [½ d² / β if |d| < β else |d| - ½ β] over the four differences d of a pair's coordinates. β = 0 is box_l1_loss.

    Args:
        boxes1: (..., 4), of a floating dtype. Coordinates are compared as they are, whatever they stand for.
        beta: β of at least 0, in the units of the coordinates.
    """
    beta = checks.number("beta", beta, 0.0)
    name, hyper = ("box_smooth_l1", [beta]) if checks.nonzero(beta) else ("box_l1", [])
    return box_loss(BoxCall(name, boxes1, boxes2, hyper=hyper, reduction=reduction), options)
