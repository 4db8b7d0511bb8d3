"""Rare classes: a margin for each class, by how often it occurs. Balanced softmax is `logit_adjusted_cross_entropy`."""

from torch import Tensor

from lossforge.losses import cross_entropy


def ldam_loss(input: Tensor, target: Tensor, counts: Tensor, margin: float = 0.5, scale: float = 30.0) -> Tensor:
    """Return LDAM's loss (arXiv 1906.07413) of cosines (N, C): the margin of class j goes as counts[j]^(-1/4), the rarest has `margin`."""
    margins = counts.to(input.dtype) ** -0.25
    own = (margin * margins / margins.max())[target]
    return cross_entropy(input.scatter_add(1, target[:, None], -own[:, None]), target, scale=scale)
