"""Focal losses of targets in [0, 1] that are scores: of a box's quality, and of a heatmap.

Quality focal loss (Li et al. 2020, arXiv 2006.04388), for targets y in [0, 1] that say how good a box is.

    p = σ(x),  d = p - y,  H = y softplus(-x) + (1 - y) softplus(x)

    L = |d|^β H        dL/dx = |d|^β d + β |d|^(β-1) sign(d) p (1 - p) H

For y of 0 or 1 it is the focal loss with γ = β and without α. Saturated logits take the limit, also for β < 1.

Gaussian focal loss of heatmaps (Law and Deng 2018, arXiv 1808.01244), for targets y in [0, 1] with 1 at a peak.

With u = -x at a peak and x elsewhere, q = σ(u):

    L = w q^α softplus(u)        dL/du = w q^α [q + α (1 - q) softplus(u)]

where w is pos_weight at a peak and neg_weight (1 - y)^γ elsewhere. Saturated logits take the limit, also for α < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.formulas.binary.focal import focal_2_hard, focal_hard
from lossforge.kernels.math import logistic, power, powers


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


@triton.jit
def terms(x, y):
    """Return whether y is a peak, q, 1 - q and softplus(u)."""
    peak = y == 1.0
    u = tl.where(peak, -x, x)
    q, not_q, log1p = logistic(u)
    return peak, q, not_q, tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p


@triton.jit
def gaussian(x, y, alpha, gamma, neg_weight, pos_weight):
    peak, q, not_q, entropy = terms(x, y)
    w = tl.where(peak, pos_weight, neg_weight * power(tl.abs(1.0 - y), gamma)) * power(q, alpha)
    slope = w * (q + alpha * (not_q * tl.where(alpha == 0.0, 0.0, entropy)))
    return w * entropy, tl.where(peak, -slope, slope)


@triton.jit
def gaussian_2_4(x, y, alpha, gamma, neg_weight, pos_weight):
    """Compute gaussian for α = 2 and γ = 4, without powers."""
    peak, q, not_q, entropy = terms(x, y)
    square = (1.0 - y) * (1.0 - y)
    w = tl.where(peak, pos_weight, neg_weight * (square * square)) * (q * q)
    slope = w * (q + 2.0 * (not_q * entropy))
    return w * entropy, tl.where(peak, -slope, slope)


@triton.jit
def is_2_4(alpha, gamma, neg_weight, pos_weight=1.0):
    return (alpha == 2.0) & (gamma == 4.0)
