"""Losses of samples with several labels, from timm or the papers' formulas."""

import torch.nn.functional as F
from torch import Tensor


def distribution_balanced(x: Tensor, y: Tensor, neg_scale=2.0, focal_gamma=2.0, focal_balance=2.0, reduction="mean", **of_counts) -> Tensor:
    """Compute what is left of timm's class where no counts are known, which timm requires. of_counts: options without effect then."""
    positive, negative = -F.logsigmoid(x), -F.logsigmoid(-x * neg_scale) / neg_scale
    if focal_gamma > 0:
        positive = positive * (-x).sigmoid() ** focal_gamma * focal_balance
        negative = negative * (x * neg_scale).sigmoid() ** focal_gamma * focal_balance
    loss = y * positive + (1 - y) * negative
    return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction]
