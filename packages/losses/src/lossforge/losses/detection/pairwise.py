"""Matrices of how well each box of one set matches each of another: torchvision.ops.box_iou and its variants, in one launch."""

import math
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import BoxFormat
from lossforge.losses.base.state import KERNEL_DTYPES, kernels_apply
from lossforge.losses.definitions.boxes.iou import overlap_ratio
from lossforge.losses.engine.operators import define_differentiable, launched
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.functional import probiou_loss, rotated_iou_loss
from lossforge.losses.templates.boxes import FORMATS
from lossforge.losses.templates.plain_forms import accurate, corners

__all__ = ["box_iou", "complete_box_iou", "distance_box_iou", "generalized_box_iou", "probabilistic_box_iou", "rotated_box_iou"]


@checks.named
def box_iou(boxes1: Tensor, boxes2: Tensor, fmt: BoxFormat = "xyxy", *, eps: float = 1e-7) -> Tensor:
    """Intersection over union of each box of one set with each of another, as torchvision.ops.box_iou.

    IoU = I/U with I the area of the intersection, U that of the union. One launch writes the matrix and nothing beside it; torchvision's
    takes ten tensors of its size. Differentiable in both sets.

    Args:
        boxes1: (..., N, 4), of a floating dtype.
        boxes2: (..., M, 4), whose leading dimensions broadcast with those of boxes1.
        fmt: "xyxy" (x1, y1, x2, y2), x1 < x2 and y1 < y2, or "cxcywh" (centre, width, height).
        eps: of at least 0; a union below it is eps. So two boxes without area have 0, where torchvision has nan.

    Returns:
        (..., N, M), in float32 (float64 for float64). A flipped box (x2 < x1 or y2 < y1) is an empty one, whose gradient turns it back.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import box_iou
        >>> corners = torch.rand(7, 2)
        >>> boxes = torch.cat([corners, corners + 0.5], 1)
        >>> box_iou(boxes, boxes).shape
        torch.Size([7, 7])
    """
    return _matrix("iou", boxes1, boxes2, fmt, eps)


@checks.named
def generalized_box_iou(boxes1: Tensor, boxes2: Tensor, fmt: BoxFormat = "xyxy", *, eps: float = 1e-7) -> Tensor:
    """Generalized IoU of each box of one set with each of another, as torchvision.ops.generalized_box_iou (arXiv 1902.09630).

    GIoU = I/U - (C - U)/C with C the area of the smallest box around both.

    Args:
        boxes1: (..., N, 4), of a floating dtype.
        boxes2: (..., M, 4), whose leading dimensions broadcast with those of boxes1.
        fmt: "xyxy" (x1, y1, x2, y2), x1 < x2 and y1 < y2, or "cxcywh" (centre, width, height).
        eps: of at least 0; a denominator below it is eps.

    Returns:
        (..., N, M), in float32 (float64 for float64). A flipped box (x2 < x1 or y2 < y1) is an empty one, whose gradient turns it back.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import generalized_box_iou
        >>> predicted, target = torch.rand(100, 4), torch.rand(7, 4)
        >>> cost = -generalized_box_iou(predicted, target, "cxcywh")
    """
    return _matrix("giou", boxes1, boxes2, fmt, eps)


@checks.named
def distance_box_iou(boxes1: Tensor, boxes2: Tensor, eps: float = 1e-7, *, fmt: BoxFormat = "xyxy") -> Tensor:
    """Distance IoU of each box of one set with each of another, as torchvision.ops.distance_box_iou (arXiv 1911.08287).

    DIoU = I/U - ρ²/d² with ρ the distance of the centres, d the diagonal of the smallest box around both.

    Args:
        boxes1: (..., N, 4), of a floating dtype.
        boxes2: (..., M, 4), whose leading dimensions broadcast with those of boxes1.
        eps: of at least 0; a denominator below it is eps (torchvision adds it).
        fmt: "xyxy" (x1, y1, x2, y2), x1 < x2 and y1 < y2, or "cxcywh" (centre, width, height).

    Returns:
        (..., N, M), in float32 (float64 for float64). A flipped box (x2 < x1 or y2 < y1) is an empty one, whose gradient turns it back.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import distance_box_iou
        >>> similarity = distance_box_iou(torch.rand(100, 4), torch.rand(7, 4), fmt="cxcywh")
    """
    return _matrix("diou", boxes1, boxes2, fmt, eps)


@checks.named
def complete_box_iou(boxes1: Tensor, boxes2: Tensor, eps: float = 1e-7, *, fmt: BoxFormat = "xyxy") -> Tensor:
    """Complete IoU of each box of one set with each of another, as torchvision.ops.complete_box_iou (arXiv 1911.08287).

    CIoU = I/U - ρ²/d² - αv with v = 4/π² (atan w₂/h₂ - atan w₁/h₁)² and α = v / (1 - I/U + v), through which, as in torchvision, no
    gradient goes.

    Args:
        boxes1: (..., N, 4), of a floating dtype.
        boxes2: (..., M, 4), whose leading dimensions broadcast with those of boxes1.
        eps: of at least 0; a denominator below it is eps (torchvision adds it).
        fmt: "xyxy" (x1, y1, x2, y2), x1 < x2 and y1 < y2, or "cxcywh" (centre, width, height).

    Returns:
        (..., N, M), in float32 (float64 for float64). A flipped box (x2 < x1 or y2 < y1) is an empty one, whose gradient turns it back.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import complete_box_iou
        >>> similarity = complete_box_iou(torch.rand(100, 4), torch.rand(7, 4), fmt="cxcywh")
    """
    return _matrix("ciou", boxes1, boxes2, fmt, eps)


@checks.named
def rotated_box_iou(boxes1: Tensor, boxes2: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Intersection over union of each rotated box of one set with each of another, by the exact area that both polygons share.

    IoU = 1 - rotated_iou_loss of each pair. One launch reads the boxes where they are and writes a number a pair; a second one takes it
    from 1. Differentiable in both sets, for which five numbers a pair are kept.

    Args:
        boxes1: (..., N, 5), of a floating dtype: (cx, cy, w, h, angle in radians).
        boxes2: (..., M, 5), whose leading dimensions broadcast with those of boxes1.
        eps: of at least 0; a union below it is eps.

    Returns:
        (..., N, M), in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import rotated_box_iou
        >>> rotated_box_iou(torch.rand(100, 5), torch.rand(7, 5)).shape
        torch.Size([100, 7])
    """
    return 1 - rotated_iou_loss(*_each_pair(boxes1, boxes2), eps=eps)


@checks.named
def probabilistic_box_iou(boxes1: Tensor, boxes2: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Probabilistic IoU of each rotated box of one set with each of another (arXiv 2106.06072), as ultralytics' batch_probiou.

    ProbIoU = 1 - probiou_loss of each pair, computed as rotated_box_iou.

    Args:
        boxes1: (..., N, 5), of a floating dtype: (cx, cy, w, h, angle in radians).
        boxes2: (..., M, 5), whose leading dimensions broadcast with those of boxes1.
        eps: above 0; a side below it is eps, and below it the root is a line.

    Returns:
        (..., N, M), in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import probabilistic_box_iou
        >>> cost = -probabilistic_box_iou(torch.rand(100, 5), torch.rand(7, 5))
    """
    return 1 - probiou_loss(*_each_pair(boxes1, boxes2), eps=eps)


def _each_pair(boxes1: Tensor, boxes2: Tensor) -> tuple[Tensor, Tensor]:
    """Return views (..., N, M, 5) of both sets of rotated boxes."""
    outer = _outer(boxes1, boxes2, 5)
    shape = (*outer, boxes1.shape[-2], boxes2.shape[-2], 5)
    return boxes1.unsqueeze(-2).expand(shape), boxes2.unsqueeze(-3).expand(shape)


def _outer(boxes1: Tensor, boxes2: Tensor, width: int) -> torch.Size:
    """Check two sets of boxes; return the leading dimensions of their matrices."""
    checks.whole("boxes1", boxes1)
    checks.whole("boxes2", boxes2)
    checks.beside("boxes2", boxes2, boxes1, "boxes1")
    for what, boxes in (("boxes1", boxes1), ("boxes2", boxes2)):
        checks.fits(what, boxes, boxes.ndim >= 2 and boxes.shape[-1] == width, "have shape (..., boxes, {})", width)
    try:
        return torch.broadcast_shapes(boxes1.shape[:-2], boxes2.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"boxes2 must broadcast with the leading dimensions of boxes1, {tuple(boxes1.shape)}, got {tuple(boxes2.shape)}"
        ) from None


def _matrix(name: str, boxes1: Tensor, boxes2: Tensor, fmt: str, eps: float) -> Tensor:
    outer = _outer(boxes1, boxes2, 4)
    checks.one_of("fmt", fmt, FORMATS)
    eps = checks.number("eps", eps, 0.0)
    if boxes2.dtype not in KERNEL_DTYPES or not kernels_apply(boxes1) or boxes2.numel() == 0 or isinstance(eps, Tensor):
        return pairwise_reference(boxes1, boxes2, name, eps, fmt == "cxcywh")
    count = math.prod(outer)
    flat = [b.resolve_neg().expand(*outer, *b.shape[-2:]).reshape(count, *b.shape[-2:]) for b in (boxes1, boxes2)]
    found: Tensor = OPERATORS.pairwise(*flat, name, eps, fmt == "cxcywh")
    return found.view(*outer, boxes1.shape[-2], boxes2.shape[-2])


def pairwise_reference(boxes1: Tensor, boxes2: Tensor, name: str, eps: float, centered: bool) -> Tensor:
    """Compute a matrix in plain torch, differentiable as often as one likes."""
    boxes1 = accurate(boxes1)
    boxes1, boxes2 = boxes1.to(torch.promote_types(boxes1.dtype, boxes2.dtype)), boxes2.to(torch.promote_types(boxes1.dtype, boxes2.dtype))
    b1, b2 = torch.broadcast_tensors(boxes1.unsqueeze(-2), boxes2.unsqueeze(-3))
    if centered:
        b1, b2 = corners(b1), corners(b2)
    ratio = overlap_ratio(b1, b2, eps)
    if name == "iou":
        return ratio
    # the losses share 1 - I/U, so that their difference is the rest
    return ratio - (FORMULAS[name].reference(b1, b2, eps) - FORMULAS["iou"].reference(b1, b2, eps))


def box_terms(boxes: Tensor) -> Tensor:
    """Return (6, N) of boxes (N, 4): both corners from the smallest coordinate to the largest, area and atan(w / h), of an empty box 0."""
    low, high = boxes.mT[:2], boxes.mT[2:]
    w, h = torch.where(high < low, 0.0, high - low)
    point = (w == 0) & (h == 0)
    angle = torch.atan2(torch.where(point, 0.0, w), torch.where(point, 1.0, h))
    return torch.cat([torch.minimum(low, high), torch.maximum(low, high), torch.stack([w * h, angle])])


def overlap_of_pairs(terms1: Tensor, terms2: Tensor, first: Tensor, second: Tensor, name: str, eps: float) -> Tensor:
    """Return what `pairwise_reference` has for the pairs of box first[i] and box second[i] (M,), to the bit where it is above 0.

    Args:
        terms1, terms2: box_terms of both sets of boxes.
        first, second: (M,), the boxes of each pair.
        name: "iou", "giou", "diou" or "ciou".
        eps: a denominator below it is eps.
    """
    count = 6 if name == "ciou" else 5
    x1, y1, x2, y2, area1, *angle1 = terms1[:count].index_select(1, first)
    u1, v1, u2, v2, area2, *angle2 = terms2[:count].index_select(1, second)
    w, h = torch.minimum(x2, u2).sub_(torch.maximum(x1, u1)), torch.minimum(y2, v2).sub_(torch.maximum(y1, v1))
    intersection = w.clamp_(min=0).mul_(h.clamp_(min=0)).masked_fill_((area1 == 0) | (area2 == 0), 0.0)
    kept = (area1 + (area2 - intersection)).clamp_(min=eps)
    ratio = intersection / kept
    if name == "iou":
        return ratio
    rest = (kept - intersection) / kept
    w, h = torch.maximum(x2, u2).sub_(torch.minimum(x1, u1)), torch.maximum(y2, v2).sub_(torch.minimum(y1, v1))
    if name == "giou":
        hull = w.mul_(h)
        union = area1 + (area2 - intersection)
        return ratio - ((rest + (hull - union).div_(hull.clamp(min=eps))).sub_(rest))
    across, down = ((x1 - u1).add_(x2 - u2)).div_(2), ((y1 - v1).add_(y2 - v2)).div_(2)
    loss = rest + across.square_().add_(down.square_()).div_(w.square_().add_(h.square_()).clamp_(min=eps))
    if name == "ciou":
        v = (angle2[0] - angle1[0]).square_().mul_(4 / math.pi**2)
        loss.add_((v / (rest + v).clamp_(min=eps)).mul_(v))
    return ratio.sub_(loss.sub_(rest))


def _forward(boxes1: Tensor, boxes2: Tensor, name: str, eps: float, centered: bool) -> Tensor:
    found: tuple[Tensor] = launched("boxes.pairwise", "forward", (boxes1, boxes2), name, eps, centered)
    return found[0]


def _fake(boxes1: Tensor, boxes2: Tensor, name: str, eps: float, centered: bool) -> Tensor:
    return boxes1.new_empty((*boxes1.shape[:-1], boxes2.shape[1]), dtype=torch.float32)


def _backward(grad: Tensor, _: None, boxes1: Tensor, boxes2: Tensor, *rest: Any) -> None:
    *numbers, gradient1, gradient2 = rest
    launched("boxes.pairwise", "backward", (boxes1, boxes2, grad, gradient1, gradient2), *numbers)


define_differentiable(
    "pairwise",
    "Tensor boxes1, Tensor boxes2, str name, float eps, bool centered",
    _forward,
    _fake,
    _backward,
    pairwise_reference,
    inputs=2,
    keeps=False,
)
