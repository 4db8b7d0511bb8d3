"""Varifocal loss (Zhang et al. 2021, arXiv 2008.13367), for targets y in [0, 1]: a box's quality at its class, and 0 at other classes.

    p = σ(x),  H = y softplus(-x) + (1 - y) softplus(x)

    L = y H              dL/dx = y (p - y)                                where y > 0; the factor y is 1 unless iou_weighted
    L = α p^γ H          dL/dx = α p^γ [p + γ (1 - p) H]                  where y = 0

and for y of 0 or 1, with u = x where y is 0 and -x where it is 1, L = w softplus(u) with w of 1 or α σ(u)^γ. Saturated logits take the
limit, also for γ < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic, logistic_hard, power


@triton.jit
def terms(x, y, iou_weighted):
    """Return (y > 0, p, 1 - p, p - y, H, the weight of a positive)."""
    p, not_p, log1p = logistic(x)
    entropy = tl.where(x >= 0, 1.0 - y, y) * tl.abs(x) + log1p
    w = tl.where(iou_weighted > 0.0, y, 1.0)  # the condition is the same for every element
    return y > 0.0, p, not_p, p - p * y - not_p * y, entropy, w


@triton.jit
def varifocal(x, y, alpha, gamma, iou_weighted):
    positive, p, not_p, d, entropy, w = terms(x, y, iou_weighted)
    w = tl.where(positive, w, alpha * power(p, gamma))
    return w * entropy, w * (d + gamma * not_p * tl.where(positive, 0.0, tl.where(gamma == 0.0, 0.0, entropy)))


@triton.jit
def varifocal_2(x, y, alpha, gamma, iou_weighted):
    """Compute varifocal for γ = 2, without powers."""
    positive, p, not_p, d, entropy, w = terms(x, y, iou_weighted)
    w = tl.where(positive, w, alpha * (p * p))
    return w * entropy, w * (d + 2.0 * not_p * tl.where(positive, 0.0, entropy))


@triton.jit
def varifocal_hard(x, positive, w, factor, alpha, gamma, iou_weighted):
    q, not_q, entropy = logistic_hard(x, positive)
    modulation = power(q, gamma)
    slope = (factor * alpha) * modulation * (q + gamma * (not_q * tl.where(gamma == 0.0, 0.0, entropy)))
    return tl.where(positive, w, (w * alpha) * modulation) * entropy, tl.where(positive, -factor * q, slope)


@triton.jit
def varifocal_2_hard(x, positive, w, factor, alpha, gamma, iou_weighted):
    q, not_q, entropy = logistic_hard(x, positive)
    square = q * q
    slope = (factor * alpha) * square * (q + 2.0 * (not_q * entropy))
    return tl.where(positive, w, (w * alpha) * square) * entropy, tl.where(positive, -factor * q, slope)


@triton.jit
def is_2(alpha, gamma, iou_weighted):
    return gamma == 2.0
