"""Losses of elements from the references' formulas, without any code of ours."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.testing.oracles import reduced


def gaussian_focal(x, target, alpha=2.0, gamma=4.0, pos_weight=1.0, neg_weight=1.0, reduction="mean", weight=None):
    """Compute as CornerNet's equation 1 and mmdetection do, on probabilities."""
    p = x.sigmoid()
    peaks = (target == 1).to(x.dtype)
    positive = -(p.log() * (1 - p) ** alpha * peaks)
    negative = -((1 - p).log() * p**alpha * (1 - target) ** gamma * (1 - peaks))
    loss = pos_weight * positive + neg_weight * negative
    loss = loss if weight is None else loss * weight
    return reduced(loss, reduction)


def distribution_balanced(x: Tensor, y: Tensor, neg_scale=2.0, focal_gamma=2.0, focal_balance=2.0, reduction="mean", **of_counts) -> Tensor:
    """Compute what is left of timm's class where no counts are known, which timm requires. of_counts: options without effect then."""
    positive, negative = -F.logsigmoid(x), -F.logsigmoid(-x * neg_scale) / neg_scale
    if focal_gamma > 0:
        positive = positive * (-x).sigmoid() ** focal_gamma * focal_balance
        negative = negative * (x * neg_scale).sigmoid() ** focal_gamma * focal_balance
    loss = y * positive + (1 - y) * negative
    return reduced(loss, reduction)


def quantile(x: Tensor, y: Tensor, quantile: float | Tensor = 0.5, reduction: str = "mean") -> Tensor:
    """Compute max(τ (y - x), (τ - 1)(y - x))."""
    d = y - x
    return reduced(torch.maximum(quantile * d, (quantile - 1) * d), reduction)


def general_robust(x: Tensor, y: Tensor, alpha: Any = 1.0, scale: float = 1.0, reduction: str = "mean") -> Tensor:
    """Compute the paper's equation 13, case by case, with a power."""
    s = ((x - y) / scale) ** 2
    if isinstance(alpha, Tensor):
        (alpha,) = alpha.tolist()
    if alpha == 2:
        values = s / 2
    elif alpha == 0:
        values = torch.log(s / 2 + 1)
    elif alpha == -math.inf:
        values = 1 - torch.exp(-s / 2)
    else:
        b = abs(alpha - 2)
        values = b / alpha * ((s / b + 1) ** (alpha / 2) - 1)
    return reduced(values, reduction)
