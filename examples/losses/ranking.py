"""Losses of a list: scores (N, M) of M documents a query, and their relevance (N, M)."""

from torch import Tensor

from lossforge.losses import cross_entropy


def listnet_loss(input: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of the softmax of scores under that of relevances, ListNet's top-one form (Cao et al. 2007)."""
    return cross_entropy(input, target.softmax(1))


def listmle_loss(input: Tensor, target: Tensor) -> Tensor:
    """Return -ln P of the order by relevance under Plackett and Luce's model, Σᵢ ln Σⱼ≥ᵢ exp xⱼ - xᵢ (ListMLE, Xia et al. 2008)."""
    ordered = input.gather(1, target.argsort(dim=1, descending=True, stable=True))
    rest = ordered.flip(1).logcumsumexp(1).flip(1)
    return (rest - ordered).sum(1).mean()
