"""Losses of pairs of boxes, upright and rotated."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from lossforge.bench.record import FP32, F, Target, Tensor, enter, loss, of_module, reduced, summed, torch

pairs = partial(summed, "box-pairs", (2**22, 4), "boxes", dtypes=[FP32])
rotated = partial(summed, "rotated-box-pairs", (2**22, 5), "rotated", dtypes=[FP32])
FACTS: dict[str, Any] = {"template": "boxes"}


def of_torchvision(name: str) -> dict[str, Any]:
    """Return the facts of a loss that torchvision has, and whose time on four million pairs is known."""
    return FACTS | {
        "peers": {"torchvision": lambda case: of_module("torchvision.ops", name)},
        "targets": (Target("4194304x4 fp32", "ms", 0.11),),
    }


def area(low: Tensor, high: Tensor) -> Tensor:
    w, h = (high - low).unbind(1)
    return w * h


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the intersection over union of boxes (x1, y1, x2, y2), their union, and the sides of the smallest box around both."""
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    intersection = torch.where((high > low).all(1), area(low, high), 0.0)
    union = area(a[:, :2], a[:, 2:]) + area(b[:, :2], b[:, 2:]) - intersection
    return intersection / union, union, torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])


@loss("iou", "IoU", pairs(), pairs(options={"log": True}, variant="log"), **FACTS)
def box_iou(x: Tensor, target: Tensor, *, log: bool = False, reduction: str) -> Tensor:
    iou, _, _ = overlap(x, target)
    return reduced(-iou.clamp(min=1e-7).log() if log else 1 - iou, reduction)


@loss("giou", "GIoU", pairs(), **of_torchvision("generalized_box_iou_loss"))
def giou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 1902.09630."""
    iou, union, around = overlap(x, target)
    hull = around[:, 0] * around[:, 1]
    return reduced(1 - iou + (hull - union) / hull, reduction)


def distance(a: Tensor, b: Tensor, around: Tensor) -> Tensor:
    """Return ρ²/d²: the squared distance of the centres over the squared diagonal of the smallest box around both."""
    return ((a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2).square().sum(1) / around.square().sum(1)


@loss("diou", "DIoU", pairs(), **of_torchvision("distance_box_iou_loss"))
def diou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 1911.08287."""
    iou, _, around = overlap(x, target)
    return reduced(1 - iou + distance(x, target, around), reduction)


@loss("ciou", "CIoU", pairs(), **of_torchvision("complete_box_iou_loss"))
def ciou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute arXiv 1911.08287. No gradient goes through α, as in the authors' code."""
    iou, _, around = overlap(x, target)
    angle, wanted = (torch.atan((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])) for b in (x, target))
    v = 4 / math.pi**2 * (wanted - angle).square()
    alpha = (v / (1 - iou + v)).detach()
    return reduced(1 - iou + distance(x, target, around) + alpha * v, reduction)


@loss("eiou", "EIoU", pairs(), **FACTS)
def eiou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 2101.08158."""
    iou, _, around = overlap(x, target)
    differences = (x[:, 2:] - x[:, :2]) - (target[:, 2:] - target[:, :2])
    return reduced(1 - iou + distance(x, target, around) + (differences / around).square().sum(1), reduction)


@loss("siou", "SIoU", pairs(), **FACTS)
def siou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 2205.12740."""
    iou, _, around = overlap(x, target)
    offset = (x[:, :2] + x[:, 2:] - target[:, :2] - target[:, 2:]) / 2
    angle = 2 * offset.prod(1, keepdim=True).abs() / offset.square().sum(1, keepdim=True)
    distance = 1 - torch.exp((angle - 2) * (offset / around).square())
    own, wanted = x[:, 2:] - x[:, :2], target[:, 2:] - target[:, :2]
    shape = 1 - torch.exp(-(own - wanted).abs() / torch.maximum(own, wanted))
    return reduced(1 - iou + (distance + shape**4).sum(1) / 2, reduction)


enter("box_l1", "box L1", pairs(), eager=lambda x, target, **options: F.l1_loss(x, target, **options), **FACTS)
enter(
    "box_smooth_l1",
    "box smooth L1",
    pairs(options={"beta": 1.0}, other={"beta": 0.5}),
    eager=lambda x, target, **options: F.smooth_l1_loss(x, target, **options),
    **FACTS,
)


def gaussian(boxes: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the covariance [[a, c], [c, b]] of rotated boxes (cx, cy, w, h, angle) as a, b, c, and its determinant."""
    w, h = (boxes[:, 2:4].square() * share).unbind(1)
    cosine, sine = boxes[:, 4].cos(), boxes[:, 4].sin()
    return w * cosine**2 + h * sine**2, w * sine**2 + h * cosine**2, (w - h) * cosine * sine, w * h


@loss("probiou", "ProbIoU", rotated(), template="rotated")
def probiou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as ultralytics does."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = gaussian(x, 1 / 12), gaussian(target, 1 / 12)
    (dx, dy), a, b, c = (x[:, :2] - target[:, :2]).unbind(1), a1 + a2, b1 + b2, c1 + c2
    det = a * b - c**2
    distance = (a * dy**2 + b * dx**2 - 2 * c * dx * dy) / det / 4 + (det / (4 * (det1 * det2).sqrt())).log() / 2
    return reduced((1 - (-distance).exp()).sqrt(), reduction)


@loss("gwd", "GWD", rotated(), template="rotated")
def gwd(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmrotate does."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = gaussian(x, 1 / 4), gaussian(target, 1 / 4)
    root = (det1 * det2).sqrt()
    shapes = a1 + b1 + a2 + b2 - 2 * (a1 * a2 + b1 * b2 + 2 * c1 * c2 + 2 * root).sqrt()
    distance = ((x[:, :2] - target[:, :2]).square().sum(1) + shapes).sqrt() / (2 * root.sqrt().sqrt())
    return reduced(1 - 1 / (1 + distance.log1p()), reduction)


@loss("kld", "KLD", rotated(), template="rotated")
def kld(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmrotate does."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = gaussian(x, 1 / 4), gaussian(target, 1 / 4)
    dx, dy = (x[:, :2] - target[:, :2]).unbind(1)
    offset = (b1 * dx**2 + a1 * dy**2 - 2 * c1 * dx * dy) / det1
    distance = (offset + (b1 * a2 + a1 * b2 - 2 * c1 * c2) / det1 + (det1 / det2).log()) / 2 - 1
    return reduced(1 - 1 / (1 + distance.sqrt().log1p()), reduction)


@loss("kfiou", "KFIoU", rotated(), template="rotated")
def kfiou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmrotate does, by the determinant of the product."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = gaussian(x, 1 / 4), gaussian(target, 1 / 4)
    shared = 4 * (det1 * det2 / ((a1 + a2) * (b1 + b2) - (c1 + c2) ** 2)).sqrt()
    return reduced(1 - shared / (4 * det1.sqrt() + 4 * det2.sqrt() - shared), reduction)


def polygon(boxes: Tensor) -> Tensor:
    """Return the corners (N, 4, 2)."""
    cosine, sine = boxes[:, 4].cos(), boxes[:, 4].sin()
    along, across = torch.stack([cosine, sine], 1) * boxes[:, 2:3] / 2, torch.stack([-sine, cosine], 1) * boxes[:, 3:4] / 2
    return boxes[:, None, :2] + torch.stack([-along - across, along - across, along + across, across - along], 1)


def inside(points: Tensor, boxes: Tensor) -> Tensor:
    (dx, dy), cosine, sine = (points - boxes[:, None, :2]).unbind(2), boxes[:, 4:].cos(), boxes[:, 4:].sin()
    return ((dx * cosine + dy * sine).abs() <= boxes[:, 2:3] / 2) & ((dy * cosine - dx * sine).abs() <= boxes[:, 3:4] / 2)


def cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


@loss("rotated_iou", "rotated IoU", rotated(), template="rotated")
def rotated_iou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Sort the corners within the other box and the crossings of the edges by their angle, as differentiable IoU in mmcv does."""
    first, second = polygon(x), polygon(target)
    p, q = first.unsqueeze(2), second.unsqueeze(1)
    d, e = first.roll(-1, 1).unsqueeze(2) - p, second.roll(-1, 1).unsqueeze(1) - q
    turn = cross(d, e)
    t, u = cross(q - p, e) / turn, cross(q - p, d) / turn
    crosses = (t > 0) & (t < 1) & (u > 0) & (u < 1)
    crossings = p + torch.where(crosses, t, 0.0).unsqueeze(3) * d
    points = torch.cat([first, second, crossings.flatten(1, 2)], 1)
    counts = torch.cat([inside(first, target), inside(second, x), crosses.flatten(1)], 1)
    number = counts.sum(1, keepdim=True)
    middle = torch.where(counts.unsqueeze(2), points, 0.0).sum(1, keepdim=True) / number.unsqueeze(2).clamp(min=1)
    dx, dy = (points - middle).detach().unbind(2)
    order = torch.where(counts, torch.atan2(dy, dx), torch.inf).argsort(1)[:, :8]
    around = points.gather(1, order.unsqueeze(2).expand(-1, -1, 2)) - middle
    kept = torch.arange(8, device=x.device) < number
    around = torch.where(kept.unsqueeze(2), around, around[:, :1])
    shared = torch.where(number.squeeze(1) > 2, cross(around, around.roll(-1, 1)).sum(1) / 2, 0.0)
    return reduced(1 - shared / (x[:, 2:4].prod(1) + target[:, 2:4].prod(1) - shared), reduction)
