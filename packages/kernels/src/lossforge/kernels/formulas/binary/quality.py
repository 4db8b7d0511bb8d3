"""Quality focal loss (Li et al. 2020, arXiv 2006.04388), for targets y in [0, 1] that say how good a box is.

    p = σ(x),  d = p - y,  H = y softplus(-x) + (1 - y) softplus(x)

    L = |d|^β H        dL/dx = |d|^β d + β |d|^(β-1) sign(d) p (1 - p) H

For y of 0 or 1 it is the focal loss with γ = β and without α. Saturated logits take the limit, also for β < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.formulas.binary.focal import focal_2_hard, focal_hard
from lossforge.kernels.math import logistic, powers


@triton.jit
def distance(x, y):
    """Return d, H and p (1 - p)."""
    p, not_p, log1p = logistic(x)
    return p - p * y - not_p * y, tl.where(x >= 0, 1.0 - y, y) * tl.abs(x) + log1p, p * not_p


@triton.jit
def quality(x, y, beta):
    d, entropy, tilt = distance(x, y)
    power, lower = powers(tl.abs(d), beta)
    signed = tl.where(d < 0.0, -tilt, tl.where(d > 0.0, tilt, 0.0))
    return power * entropy, power * d + beta * lower * signed * tl.where(beta == 0.0, 0.0, entropy)


@triton.jit
def quality_2(x, y, beta):
    """Compute quality for β = 2, without powers."""
    d, entropy, tilt = distance(x, y)
    square = d * d
    return square * entropy, d * (square + 2.0 * (tilt * entropy))


@triton.jit
def quality_hard(x, positive, w, factor, beta):
    return focal_hard(x, positive, w, factor, beta, -1.0)


@triton.jit
def quality_2_hard(x, positive, w, factor, beta):
    return focal_2_hard(x, positive, w, factor, beta, -1.0)


@triton.jit
def is_2(beta):
    return beta == 2.0
