"""Losses of pairs of boxes, one a row of two tensors (..., 4)."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import NonNegative, Reduction
from lossforge.losses.base.options import CornerOptions, WeightedOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.definitions.regression import smooth_l1_reference
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import (
    complement,
    hull,
    jaccard_distance,
    larger,
    length,
    overlap,
    smaller,
    tl,
    turned,
)
from lossforge.losses.templates.boxes import BOXES, box_loss, corner_loss

OPTIONS = ({"eps": 3e3}, {"format": "cxcywh"})
"""Of the areas that tests divide by, about half are below an eps of 3e3."""


def _sides(b: Tensor) -> tuple[Tensor, Tensor]:
    """Width and height; 0 of a flipped side."""
    sides = b[..., 2:] - b[..., :2]
    w, h = torch.where(sides < 0, 0.0 * sides, sides).unbind(-1)
    return w, h


def _hull(b1: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """Width and height of the smallest box around both, from the smallest coordinate to the largest; no derivative at a flipped side."""
    ends = []
    for b in (b1, b2):
        first, second = b[..., :2], b[..., 2:]
        flipped = second < first
        ends.append((torch.where(flipped, second.detach(), first), torch.where(flipped, first.detach(), second)))
    (low1, high1), (low2, high2) = ends
    w, h = (torch.maximum(high1, high2) - torch.minimum(low1, low2)).unbind(-1)
    return w, h


def _turn(b1: Tensor, b2: Tensor) -> Tensor:
    """0, with the derivatives that turn flipped sides back: (1 + depth / hull) / hull in how far they are flipped."""
    hull = torch.stack(_hull(b1, b2), -1).detach().clamp(min=torch.finfo(b1.dtype).tiny)
    value = torch.zeros_like(hull)
    for b in (b1, b2):
        depth = F.relu(b[..., :2] - b[..., 2:])
        held = depth.detach()
        value = value + (depth - held) * ((1 + held / hull) / hull)
    return value.sum(-1)


def _areas(b1: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """I and U; nan where the union is not finite, in all derivatives too."""
    (w1, h1), (w2, h2) = _sides(b1), _sides(b2)
    low, high = torch.maximum(b1[..., :2], b2[..., :2]), torch.minimum(b1[..., 2:], b2[..., 2:])
    w, h = (high - low).unbind(-1)
    intersection = torch.where((w > 0) & (h > 0), w * h, 0.0)  # w < 0 where a side is flipped
    union = w1 * h1 + (w2 * h2 - intersection)
    finite = torch.where(union.isfinite(), 1.0, torch.nan).to(union.dtype)
    return intersection * finite, union * finite


def overlap_ratio(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    """I/U, not computed as 1 minus the rest."""
    intersection, union = _areas(b1, b2)
    return intersection / union.clamp(min=eps) - _turn(b1, b2)


def _overlap(b1: Tensor, b2: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """1 - I/U, and U."""
    intersection, union = _areas(b1, b2)
    kept = union.clamp(min=eps)
    return (kept - intersection) / kept, union


@formula("iou", DeviceFormula("box.iou"))
def iou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    return _overlap(b1, b2, eps)[0] + _turn(b1, b2)


@formula("log_iou", DeviceFormula("box.log_iou"))
def log_iou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    intersection, union = _areas(b1, b2)
    kept = union.clamp(min=eps)
    ratio, near = intersection / kept, intersection > 0.5 * kept
    rest = torch.where(near, (kept - intersection) / kept, 0.0)
    far = torch.where(near | (ratio <= eps), torch.ones_like(ratio), ratio)
    bounded = torch.where(ratio <= eps, torch.full_like(ratio, eps), far)
    return _turn(b1, b2) - torch.log1p(-rest) - torch.log(bounded)


@loss(
    "iou",
    BOXES,
    Module("BoxIoULoss", "IoU loss of two boxes", ' As there and in torchvision, the default reduction is "none".'),
    switches=("log",),
    options=(*OPTIONS, {"log": True}, {"log": True, "eps": 0.2, "format": "cxcywh"}),
    paper="arXiv 1608.01471",
)
def box_iou_loss(
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: Reduction = "none",
    eps: NonNegative = 1e-7,
    *,
    log: bool = False,
    **options: Unpack[CornerOptions],
) -> CheckedCall[BoxesCall]:
    """Loss of the intersection over union (IoU) of two boxes; no gradient where they do not overlap.

    L = w [1 - I/U] with I the area of the intersection, U that of the union; the linear form of Yu et al. 2016 (arXiv 1608.01471). With
    log=True their own form, w [-ln max(I/U, eps)], as mmdetection's IoULoss(mode="log") has it, whose eps is 1e-6.

    When to use it: Take it for the refinement of boxes that overlap their targets already. log=True is UnitBox's loss and FCOS' first; it
    pulls harder at boxes that overlap little.

    When not: Leave it where boxes may not overlap, because its gradient is 0 there. Take `giou`.

    Args:
        eps: of at least 0; a union below it is eps. With log=True at most 1; an IoU of at most eps counts as eps and has no gradient.
        log: take -ln of the IoU in place of 1 - IoU.

    Returns:
        a scalar or (...), in float32 (float64 for float64), as torchvision does. Boxes of equal coordinates and area have loss 0. Two boxes
        without area have I/U = 0. Where two edges lie on each other, the derivatives of min and max are halves, as in torch. A flipped
        box (x2 < x1, y2 < y1, or a negative width or height) is an empty one, whose gradient turns it back; validate=True raises.
    """
    if log:
        return corner_loss("log_iou", boxes1, boxes2, reduction, checks.number("eps", eps, 0.0, 1.0), options)
    return corner_loss("iou", boxes1, boxes2, reduction, eps, options)


@formula("giou", DeviceFormula("box.giou"))
def giou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value, union = _overlap(b1, b2, eps)
    w, h = _hull(b1, b2)
    hull = w * h
    return value + (hull - union) / hull.clamp(min=eps) + _turn(b1, b2)


@loss(
    "giou",
    BOXES,
    Module("GeneralizedBoxIoULoss", "Generalized IoU loss"),
    options=OPTIONS,
    like="torchvision.ops:generalized_box_iou_loss",
    paper="arXiv 1902.09630",
)
def generalized_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> CheckedCall[BoxesCall]:
    """Generalized IoU loss (GIoU), as torchvision.ops.generalized_box_iou_loss (Rezatofighi et al. 2019, arXiv 1902.09630).

    L = w [1 - I/U + (C - U)/C] with C the area of the smallest box around both. torchvision adds eps to U and C, so that its loss of equal
    boxes is eps/U; ours is exactly 0.

    When to use it: Take it first for boxes. It has a gradient where boxes do not overlap, and no units.

    When not: Leave it where a box often lies within its target or around it; there it equals `iou` and says nothing about the centre. Take
    `diou`.
    """
    return corner_loss("giou", boxes1, boxes2, reduction, eps, options)


@formula("diou", DeviceFormula("box.diou"))
def diou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    w, h = _hull(b1, b2)
    offset = ((b1[..., :2] - b2[..., :2]) + (b1[..., 2:] - b2[..., 2:])) / 2
    return iou_reference(b1, b2, eps) + offset.square().sum(-1) / (w * w + h * h).clamp(min=eps)


@loss(
    "diou",
    BOXES,
    Module("DistanceBoxIoULoss", "Distance IoU loss"),
    options=OPTIONS,
    like="torchvision.ops:distance_box_iou_loss",
    paper="arXiv 1911.08287",
)
def distance_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> CheckedCall[BoxesCall]:
    """Distance IoU loss (DIoU), as torchvision.ops.distance_box_iou_loss (Zheng et al. 2020, arXiv 1911.08287).

    L = w [1 - I/U + ρ²/d²] with ρ the distance of the centres, d the diagonal of the smallest box around both; as in
    generalized_box_iou_loss, eps bounds the denominators instead of being added.

    When to use it: Take it where centres should meet quickly, and where non-maximum suppression goes by distance, too.

    When not: Leave it where the sides matter more than the centre (`ciou`, `eiou`).
    """
    return corner_loss("diou", boxes1, boxes2, reduction, eps, options)


def _angle(b: Tensor) -> Tensor:
    """atan(w / h), also where h is 0; 0, with derivative 0, where w is 0 as well."""
    w, h = _sides(b)
    point = (w == 0) & (h == 0)
    return torch.atan2(torch.where(point, 0.0, w), torch.where(point, 1.0, h))


@formula("ciou", DeviceFormula("box.ciou"))
def ciou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    v = 4 / math.pi**2 * (_angle(b2) - _angle(b1)).square()
    alpha = (v / (iou_reference(b1, b2, eps) + v).clamp(min=eps)).detach()
    return diou_reference(b1, b2, eps) + alpha * v


@loss(
    "ciou",
    BOXES,
    Module("CompleteBoxIoULoss", "Complete IoU loss"),
    options=OPTIONS,
    like="torchvision.ops:complete_box_iou_loss",
    paper="arXiv 1911.08287",
)
def complete_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> CheckedCall[BoxesCall]:
    """Complete IoU loss (CIoU), as torchvision.ops.complete_box_iou_loss (Zheng et al. 2020, arXiv 1911.08287).

    L = w [1 - I/U + ρ²/d² + αv] with v = 4/π² (atan w₂/h₂ - atan w₁/h₁)² and α = v / (1 - I/U + v), through which, as in torchvision, no
    gradient goes. A box without width and height has the angle 0 and no gradient through v, where torchvision's loss is nan.

    When to use it: Take it for detectors of the YOLO family. It has terms for overlap, centre and aspect ratio.

    When not: Leave it where predicted boxes have the right aspect ratio and the wrong size, because its last term is 0 there (`eiou`).

    Args:
        eps: of at least 0; a denominator below it is eps. It bounds all denominators, where torchvision's reaches only that of α.
    """
    return corner_loss("ciou", boxes1, boxes2, reduction, eps, options)


@formula("eiou", DeviceFormula("box.eiou"))
def eiou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value = diou_reference(b1, b2, eps)
    for s1, s2, s in zip(_sides(b1), _sides(b2), _hull(b1, b2), strict=True):
        value = value + (s1 - s2).square() / (s * s).clamp(min=eps)
    return value


@loss("eiou", BOXES, Module("EfficientBoxIoULoss", "Efficient IoU loss"), options=OPTIONS, paper="arXiv 2101.08158")
def efficient_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[CornerOptions]
) -> CheckedCall[BoxesCall]:
    """Efficient IoU loss (EIoU; Zhang et al. 2022, arXiv 2101.08158).

    L = w [1 - I/U + ρ²/d² + (w₁-w₂)²/w_C² + (h₁-h₂)²/h_C²] with w_C and h_C the sides of the smallest box around both, d its diagonal,
    and ρ the distance of the centres.

    When to use it: Take it as `ciou` where the sides themselves should be right, not only their ratio.

    When not: Leave it where boxes are far off at the start; its three terms then pull at once. Begin with `giou`.
    """
    return corner_loss("eiou", boxes1, boxes2, reduction, eps, options)


def siou_side(gamma, offset, a, b, c, d, eps):
    side, side_1, side_2 = hull(a, b, c, d), length(a, b), length(c, d)
    distance, e = complement(gamma * offset * offset / larger(side * side, eps))
    shape, _ = complement(tl.abs(side_1 - side_2) / larger(larger(side_1, side_2), eps))
    return distance, e, shape * shape * (shape * shape)


def siou_offset(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    dx, dy = 0.5 * ((x1 - u1) + (x2 - u2)), 0.5 * ((y1 - v1) + (y2 - v2))
    return dx, dy, 2.0 - 2.0 * tl.abs(dx * dy) / larger(dx * dx + dy * dy, eps)


def siou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    dx, dy, gamma = siou_offset(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    across, _, width = siou_side(gamma, dx, x1, x2, u1, u2, eps)
    down, _, height = siou_side(gamma, dy, y1, y2, v1, v2, eps)
    return overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps) + (0.5 * (across + width) + 0.5 * (down + height))


def siou_rising(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    dx, dy, gamma = siou_offset(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    across, e_x, width = siou_side(gamma, dx, x1, x2, u1, u2, eps)
    down, e_y, height = siou_side(gamma, dy, y1, y2, v1, v2, eps)
    sides = 0.5 * (width - across / e_x) + 0.5 * (height - down / e_y)
    value = larger(smaller(jaccard_distance(x1, y1, x2, y2, u1, v1, u2, v2, eps) + sides, 2.0), 0.0)
    return value + turned(x1, y1, x2, y2, u1, v1, u2, v2)


@formula("siou", DeviceFormula(siou, variables=8, heavy=True))
def siou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    return _siou(b1, b2, eps, -1.0) + _turn(b1, b2)


def _siou(b1: Tensor, b2: Tensor, eps: float, sign: float) -> Tensor:
    d = ((b1[..., :2] - b2[..., :2]) + (b1[..., 2:] - b2[..., 2:])) / 2
    gamma = 2 - 2 * (d[..., :1] * d[..., 1:]).abs() / d.square().sum(-1, keepdim=True).clamp(min=eps)
    s1, s2, hull = (torch.stack(sides, -1) for sides in (_sides(b1), _sides(b2), _hull(b1, b2)))
    shape = torch.expm1(-(s1 - s2).abs() / torch.maximum(s1, s2).clamp(min=eps))
    return _overlap(b1, b2, eps)[0] + (shape**4 - torch.expm1(sign * gamma * d.square() / hull.square().clamp(min=eps))).sum(-1) / 2


@formula("siou_rising", DeviceFormula(siou_rising, variables=8, heavy=True))
def siou_rising_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value = _siou(b1, b2, eps, 1.0)
    return torch.maximum(torch.minimum(value, torch.full_like(value, 2.0)), torch.zeros_like(value)) + _turn(b1, b2)


@loss(
    "siou",
    BOXES,
    Module("ScyllaBoxIoULoss", "SCYLLA IoU loss"),
    switches=("neg_gamma",),
    options=(*OPTIONS, {"neg_gamma": False}, {"neg_gamma": False, "eps": 3e3}),
    paper="arXiv 2205.12740",
)
def scylla_box_iou_loss(
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: Reduction = "none",
    eps: NonNegative = 1e-7,
    *,
    neg_gamma: bool = True,
    **options: Unpack[CornerOptions],
) -> CheckedCall[BoxesCall]:
    """SCYLLA IoU loss (SIoU; Gevorgyan 2022, arXiv 2205.12740).

    L = w [1 - I/U + ½ Σ (1 - exp(-γ d²/C²) + (1 - exp(-|s₁ - s₂| / max(s₁, s₂)))⁴)] with, over both axes, the offset of the centres d, the
    sides s₁, s₂ and C of the boxes and of the smallest one around both, and γ = 2 - Λ, Λ = 2 |d_x d_y| / (d_x² + d_y²) the angle's cost.

    When to use it: Take it in recipes that were tuned with it. It has a cost for the angle between the centres as well.

    When not: Leave it as a first choice. It is the most involved of these, and gains over `ciou` depend on the detector.

    Args:
        neg_gamma: the exponent is -γ, as in the paper and in mmdetection's siou_loss with neg_gamma=True. False is mmdetection's default,
            +γ, kept in [0, 2] as there: its cost falls as the distance of the centres grows. Take it only to repeat a training of
            mmdetection.
    """
    formula = "siou" if neg_gamma else "siou_rising"
    return corner_loss(formula, boxes1, boxes2, reduction, eps, options)


@formula("box_l1", DeviceFormula("regression.box_l1"))
def box_l1_reference(b1: Tensor, b2: Tensor) -> Tensor:
    return F.l1_loss(b1, b2, reduction="none").sum(-1)


@loss("box_l1", BOXES, Module("BoxL1Loss", "Absolute error of boxes, summed over their coordinates"), paper="arXiv 2005.12872")
def box_l1_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", **options: Unpack[WeightedOptions]
) -> CheckedCall[BoxesCall]:
    """Absolute error of boxes or of their encoded offsets.

    L = w Σ |b₁ - b₂| over the four coordinates of a pair. As DETR's loss_bbox (arXiv 2005.12872) with normalizer = number of boxes, and
    as torchvision's RetinaNet head with reduction "sum"; a mean is four times torch's, which divides by the coordinates.

    When to use it: Take it for encoded offsets, and beside `giou` for normalised boxes, as DETR does.

    When not: Do not use it alone on boxes in pixels, because large boxes then dominate small ones.

    Args:
        boxes1: (..., 4), of a floating dtype. Coordinates are compared as they are, whatever they stand for.
    """
    return box_loss(BoxesCall("box_l1", boxes1, boxes2, reduction=reduction), options)


@formula("box_smooth_l1", DeviceFormula("regression.box_smooth_l1"))
def box_smooth_l1_reference(b1: Tensor, b2: Tensor, beta: float) -> Tensor:
    return smooth_l1_reference(b1, b2, beta).sum(-1)


@loss(
    "box_smooth_l1",
    BOXES,
    Module("BoxSmoothL1Loss", "Smooth L1 loss of boxes, summed over their coordinates"),
    options=({"beta": 0.3}, {"beta": 20.0}, {"beta": 0.0}),
    paper="arXiv 1504.08083",
)
def box_smooth_l1_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", beta: NonNegative = 1.0, **options: Unpack[WeightedOptions]
) -> CheckedCall[BoxesCall]:
    """Smooth L1 loss of boxes or of their encoded offsets (Girshick 2015, arXiv 1504.08083), as torchvision's RPN and RoI heads sum it.

    L = w Σ [½ d² / β if |d| < β else |d| - ½ β] over the four differences d of a pair's coordinates. β = 0 is box_l1_loss.

    When to use it: Take it for the RPN and RoI heads of two-stage detectors, as torchvision has them.

    When not: Leave it on boxes in pixels, as `box_l1`. β must fit the scale of the encoded offsets.

    Args:
        boxes1: (..., 4), of a floating dtype. Coordinates are compared as they are, whatever they stand for.
        beta: β of at least 0, the distance at which the square becomes a line, in the units of the coordinates.
    """
    beta = checks.number("beta", beta, 0.0)
    name, hyper = ("box_smooth_l1", [beta]) if checks.nonzero(beta) else ("box_l1", [])
    return box_loss(BoxesCall(name, boxes1, boxes2, hyper=hyper, reduction=reduction), options)
