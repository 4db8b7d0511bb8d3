"""Losses of a difference from the papers' formulas, without any code of ours."""

import math
from typing import Any

import torch
from torch import Tensor


def _reduced(values: Tensor, reduction: str) -> Tensor:
    return {"none": values, "mean": values.mean(), "sum": values.sum()}[reduction]


def quantile(x: Tensor, y: Tensor, quantile: float | Tensor = 0.5, reduction: str = "mean") -> Tensor:
    """Compute max(τ (y - x), (τ - 1)(y - x))."""
    d = y - x
    return _reduced(torch.maximum(quantile * d, (quantile - 1) * d), reduction)


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
    return _reduced(values, reduction)
