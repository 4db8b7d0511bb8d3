"""Divergences of distributions p and q over the classes of a row, as a sum of f(ln p, ln q).

Each takes (ln p, ln q, p, q, *hyper) and returns f, ∂f/∂ln p and ∂f/∂ln q; multiples of p (of q) may be left out of the derivatives, as
they change nothing of the gradient hⱼ - pⱼ Σ h at the logits. A class that neither has, p = q = 0 with logarithms of -inf, adds nothing.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, TINY, log2


@triton.jit
def kl(lp, lq, p, q):
    """KL(q ‖ p) = Σ q (ln q - ln p)."""
    term = tl.where(q == 0.0, 0.0, q * (lq - lp))
    return term, -q, term


@triton.jit
def kl_sums(value):
    """Σ ∂f/∂ln p and Σ ∂f/∂ln q of a row from its KL(q ‖ p)."""
    return tl.where(value == value, -1.0, -1.0), value  # in the shape of value, a scalar too


@triton.jit
def js(lp, lq, p, q, beta):
    """β KL(q ‖ m) + (1 - β) KL(p ‖ m), m = (1 - β) p + β q (GKD, arXiv 2306.13649)."""
    m = (1.0 - beta) * p + beta * q
    lm = log2(tl.maximum(m, TINY, tl.PropagateNan.ALL)) * LN2
    of_p = tl.where(p == 0.0, 0.0, (1.0 - beta) * p * (lp - lm))
    of_q = tl.where(q == 0.0, 0.0, beta * q * (lq - lm))
    return of_p + of_q, of_p, of_q


@triton.jit
def total_variation(lp, lq, p, q):
    """½ Σ |p - q|."""
    d = p - q
    slope = tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, d))  # 0 or nan
    return 0.5 * tl.abs(d), slope * p, -slope * q
