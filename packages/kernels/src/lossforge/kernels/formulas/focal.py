"""Sigmoid focal loss (Lin et al. 2017, arXiv 1708.02002), for targets y in [0, 1].

    p = σ(x),  q = p (1 - y) + (1 - p) y = 1 - p_t,  H = y softplus(-x) + (1 - y) softplus(x),  a = α y + (1 - α)(1 - y)

    L = a q^γ H        dL/dx = a [q^γ (p - y) - γ q^(γ-1) (2y - 1) p (1 - p) H]

and for y of 0 or 1, with u = x where y is 0 and -x where it is 1, q = σ(u), in fewer instructions:

    L = a q^γ softplus(u)        dL/du = a q^γ [q + γ (1 - q) softplus(u)]

A negative α leaves a = 1, as in torchvision. Saturated logits take the limit, also for γ < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic, powers


@triton.jit
def terms(x, y, alpha):
    """q, a, H, and the slopes H' = p (1 - y) - (1 - p) y and q' = (1 - 2y) p (1 - p)."""
    p, not_p, log1p = logistic(x)
    z = 1.0 - y
    positive, negative = not_p * y, p * z
    entropy = (tl.maximum(x, 0.0) - x * y) + log1p
    every = alpha < 0.0  # the same for the whole launch, so this costs nothing an element
    a = tl.where(every, 0.0, 2.0 * alpha - 1.0) * y + tl.where(every, 1.0, 1.0 - alpha)
    return negative + positive, a, entropy, negative - positive, (z - y) * (p * not_p)


@triton.jit
def focal(x, y, gamma, alpha):
    q, a, entropy, slope, tilt = terms(x, y, alpha)
    power, lower = powers(q, gamma)
    return a * power * entropy, a * (slope * power + gamma * tilt * entropy * lower)


@triton.jit
def focal_2(x, y, gamma, alpha):
    """γ = 2 without powers."""
    q, a, entropy, slope, tilt = terms(x, y, alpha)
    return a * (q * q) * entropy, a * q * (slope * q + 2.0 * tilt * entropy)


@triton.jit
def hard_terms(x, y, alpha):
    """(whether y is 1, a, q, 1 - q, softplus(u))"""
    positive = y > 0.5
    u = tl.where(positive, -x, x)
    q, not_q, log1p = logistic(u)
    a = tl.where(alpha < 0.0, 1.0, tl.where(positive, alpha, 1.0 - alpha))
    return positive, a, q, not_q, tl.maximum(u, 0.0) + log1p


@triton.jit
def focal_hard(x, y, gamma, alpha):
    positive, a, q, not_q, entropy = hard_terms(x, y, alpha)
    power, _ = powers(q, gamma)
    slope = a * power * (q + gamma * not_q * entropy)
    return a * power * entropy, tl.where(positive, -slope, slope)


@triton.jit
def focal_2_hard(x, y, gamma, alpha):
    positive, a, q, not_q, entropy = hard_terms(x, y, alpha)
    power = a * (q * q)
    slope = power * (q + 2.0 * (not_q * entropy))
    return power * entropy, tl.where(positive, -slope, slope)


@triton.jit
def is_2(gamma, alpha=0.0):
    return gamma == 2.0
