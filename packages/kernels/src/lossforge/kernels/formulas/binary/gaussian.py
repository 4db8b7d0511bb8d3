"""Gaussian focal loss of heatmaps (Law and Deng 2018, arXiv 1808.01244), for targets y in [0, 1] with 1 at a peak.

With u = -x at a peak and x elsewhere, q = σ(u):

    L = w q^α softplus(u)        dL/du = w q^α [q + α (1 - q) softplus(u)]

where w is pos_weight at a peak and neg_weight (1 - y)^γ elsewhere. Saturated logits take the limit, also for α < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic, power


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
