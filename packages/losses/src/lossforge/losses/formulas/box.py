"""Losses of pairs of boxes: twins take boxes (..., 4), corners where the loss is one of overlap, and return one value a pair."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family
from lossforge.losses.formulas.regression import smooth_l1_twin


def _sides(b: Tensor) -> tuple[Tensor, Tensor]:
    return b[..., 2] - b[..., 0], b[..., 3] - b[..., 1]


def _hull(b1: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.minimum(b1[..., :2], b2[..., :2]), torch.maximum(b1[..., 2:], b2[..., 2:])
    return _sides(torch.cat([low, high], -1))


def _overlap(b1: Tensor, b2: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """1 - I/U, and U."""
    (w1, h1), (w2, h2) = _sides(b1), _sides(b2)
    low, high = torch.maximum(b1[..., :2], b2[..., :2]), torch.minimum(b1[..., 2:], b2[..., 2:])
    w, h = (high - low).unbind(-1)
    intersection = torch.where((w > 0) & (h > 0), w * h, 0.0)
    union = w1 * h1 + (w2 * h2 - intersection)
    kept = union.clamp(min=eps)
    return (kept - intersection) / kept, union


def iou_twin(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    return _overlap(b1, b2, eps)[0]


def giou_twin(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value, union = _overlap(b1, b2, eps)
    w, h = _hull(b1, b2)
    hull = w * h
    return value + (hull - union) / hull.clamp(min=eps)


def diou_twin(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    w, h = _hull(b1, b2)
    offset = ((b1[..., :2] - b2[..., :2]) + (b1[..., 2:] - b2[..., 2:])) / 2
    return iou_twin(b1, b2, eps) + offset.square().sum(-1) / (w * w + h * h).clamp(min=eps)


def _angle(b: Tensor) -> Tensor:
    """atan(w / h), also where h is 0; 0, with derivative 0, where w is 0 as well."""
    w, h = _sides(b)
    point = (w == 0) & (h == 0)
    w, h = torch.where(point, 0.0, w), torch.where(point, 1.0, h)
    sign = torch.where(h < 0, -1.0, 1.0)
    return torch.atan2(sign * w, sign * h)


def ciou_twin(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    v = 4 / math.pi**2 * (_angle(b2) - _angle(b1)).square()
    alpha = (v / (iou_twin(b1, b2, eps) + v).clamp(min=eps)).detach()
    return diou_twin(b1, b2, eps) + alpha * v


def eiou_twin(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    value = diou_twin(b1, b2, eps)
    for s1, s2, s in zip(_sides(b1), _sides(b2), _hull(b1, b2), strict=True):
        value = value + (s1 - s2).square() / (s * s).clamp(min=eps)
    return value


def box_l1_twin(b1: Tensor, b2: Tensor) -> Tensor:
    return F.l1_loss(b1, b2, reduction="none").sum(-1)


def box_smooth_l1_twin(b1: Tensor, b2: Tensor, beta: float) -> Tensor:
    return smooth_l1_twin(b1, b2, beta).sum(-1)


TWINS = {
    "iou": iou_twin,
    "giou": giou_twin,
    "diou": diou_twin,
    "ciou": ciou_twin,
    "eiou": eiou_twin,
    "box_l1": box_l1_twin,
    "box_smooth_l1": box_smooth_l1_twin,
}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import box, box_l1

    return {
        "iou": Formulas(box.iou),
        "giou": Formulas(box.giou),
        "diou": Formulas(box.diou),
        "ciou": Formulas(box.ciou),
        "eiou": Formulas(box.eiou),
        "box_l1": Formulas(box_l1.box_l1),
        "box_smooth_l1": Formulas(box_l1.box_smooth_l1),
    }


FORMULAS = family(TWINS, _kernels)
