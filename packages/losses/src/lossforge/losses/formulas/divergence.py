"""Divergences of the softmax of logits from a teacher's. Twins take (ln p, ln q, *hyper) and return the terms of the sum over the classes.

Where a class has probability 0 (a logit of -inf), its term has the limit 0 in the value and in what is multiplied by the probability.
"""

import torch
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family


def _weighted(p: Tensor, lp: Tensor, lq: Tensor) -> Tensor:
    """p ln (p / q), 0 where p is."""
    return p * torch.where(p == 0, 0.0, lp - lq)


def kl(lp: Tensor, lq: Tensor) -> Tensor:
    return _weighted(lq.exp(), lq, lp)


def js(lp: Tensor, lq: Tensor, beta: float) -> Tensor:
    p, q = lp.exp(), lq.exp()
    m = (1 - beta) * p + beta * q
    lm = torch.where(m == 0, 1.0, m).log()
    return beta * _weighted(q, lq, lm) + (1 - beta) * _weighted(p, lp, lm)


def total_variation(lp: Tensor, lq: Tensor) -> Tensor:
    return 0.5 * (lp.exp() - lq.exp()).abs()


def topk_kl(lp: Tensor, lq: Tensor, tail: bool) -> Tensor:
    """Of the K classes in dimension 1 and, with `tail`, of all others as one more, whose probabilities are 1 less the sum of these."""
    terms = _weighted(lq.exp(), lq, lp)
    if not tail:
        return terms
    least = 2.0**-24 if lp.dtype == torch.float32 else 2.0**-53  # below it the difference is rounding
    left_p = (1 - lp.exp().sum(1, keepdim=True)).clamp(min=least)
    left_q = (1 - lq.exp().sum(1, keepdim=True)).clamp(min=0.0)
    return torch.cat([terms, _weighted(left_q, torch.where(left_q == 0, 1.0, left_q).log(), left_p.log())], dim=1)


TWINS = {
    "kl": kl,
    "js": js,
    "total_variation": total_variation,
    "topk_kl": topk_kl,
}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import divergence
    from lossforge.kernels.topk.kernel import topk_kernel

    return {
        "kl": Formulas(divergence.kl, sums=divergence.kl_sums),
        "js": Formulas(divergence.js),
        "total_variation": Formulas(divergence.total_variation),
        "topk_kl": Formulas(topk_kernel),
    }


FORMULAS = family(TWINS, _kernels)
