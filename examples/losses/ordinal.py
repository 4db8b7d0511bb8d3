"""Ordered classes 0 … K - 1 from K - 1 logits, each of which says whether the class is above k: binary cross entropies."""

import torch
from torch import Tensor

from lossforge.losses import binary_cross_entropy_with_logits


def coral_loss(input: Tensor, target: Tensor) -> Tensor:
    """Return CORAL's loss, Σₖ BCE(xₖ, [y > k]) of a row, as a mean over rows (arXiv 1901.07884). input: (N, K - 1). target: (N,)."""
    above = (target[:, None] > torch.arange(input.shape[1], device=input.device)).to(input.dtype)
    return binary_cross_entropy_with_logits(input, above, reduction="sum") / len(input)


def corn_loss(input: Tensor, target: Tensor) -> Tensor:
    """Return CORN's loss (arXiv 2111.08851): task k sees the rows of class k and above alone. input: (N, K - 1). target: (N,)."""
    k = torch.arange(input.shape[1], device=input.device)
    seen = (target[:, None] >= k).to(input.dtype)
    above = (target[:, None] > k).to(input.dtype)
    return binary_cross_entropy_with_logits(input, above, weight=seen, reduction="sum") / seen.sum()
