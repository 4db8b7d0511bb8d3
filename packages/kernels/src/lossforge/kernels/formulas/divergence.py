"""Divergences of distributions p and q over the classes of a row, as a sum of f(ln p, ln q).

Each takes (log p, log q, p, q, unit, *hyper) and returns f, ∂f/∂ln p and ∂f/∂ln q. The logarithms are in units of `unit`, a compile-time
constant: ln p = unit · log p. Multiples of p (of q) may be omitted from the derivatives, because they cancel in the logits' gradient
hⱼ - pⱼ Σ h. A class with p = q = 0 and logarithms of -inf adds nothing.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, TINY, log2_nearest

LEAST = tl.constexpr(-150.0)  # below the logarithm, to base 2 or e, of any float32 above 0
STEEP = tl.constexpr(2.0**126)  # its product with any normal float32 is at least 1 in magnitude


@triton.jit
def kl(lp, lq, p, q, unit):
    """Compute KL(q ‖ p) = Σ q (ln q - ln p)."""
    term = tl.where(q == 0.0, 0.0, q * (lq - lp) * unit)
    return term, -q, term


@triton.jit
def kl_averaged(lq, lp):
    """Return the term whose mean under q is KL."""
    return lq - lp


@triton.jit
def soft_cross_entropy(lp, lq, p, q, unit):
    """Compute -Σ q ln p, the cross entropy of q and p."""
    term = tl.where(q == 0.0, 0.0, -q * lp * unit)
    return term, -q, term


@triton.jit
def soft_cross_entropy_averaged(lq, lp):
    """Return the term whose mean under q is the cross entropy."""
    return -lp


@triton.jit
def js(lp, lq, p, q, unit, beta):
    """Compute β KL(q ‖ m) + (1 - β) KL(p ‖ m), m = (1 - β) p + β q (GKD, arXiv 2306.13649)."""
    lm = log2_nearest(beta * q + ((1.0 - beta) * p + TINY)) * (LN2 / unit)
    # a factor of p = 0 need only be finite, so that one instruction suffices where tl.where takes two
    of_p = (1.0 - beta) * unit * p * (tl.maximum(lp, LEAST, tl.PropagateNan.ALL) - lm)
    of_q = beta * unit * q * (tl.maximum(lq, LEAST, tl.PropagateNan.ALL) - lm)
    return of_p + of_q, of_p, of_q


@triton.jit
def total_variation(lp, lq, p, q, unit):
    """Compute ½ Σ |p - q|."""
    d = p - q
    slope = tl.clamp(d * STEEP, -0.5, 0.5, tl.PropagateNan.ALL)  # ½ sign(d), in two instructions where tl.where takes four
    return 0.5 * tl.abs(d), slope * p, -slope * q
