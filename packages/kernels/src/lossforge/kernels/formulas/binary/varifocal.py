"""Varifocal loss (Zhang et al. 2021, arXiv 2008.13367), for targets y in [0, 1]: a box's quality at its class, and 0 at other classes.

    p = σ(x),  H = y softplus(-x) + (1 - y) softplus(x)

    L = y H              dL/dx = y (p - y)                                where y > 0; the factor y is 1 unless iou_weighted
    L = α p^γ H          dL/dx = α p^γ [p + γ (1 - p) H]                  where y = 0

and for y of 0 or 1, with u = x where y is 0 and -x where it is 1, L = w softplus(u) with w of 1 or α σ(u)^γ. Saturated logits take the
limit, also for γ < 1. `free` is 1, or 0 where the weight α p^γ is held: the term with γ in its derivative is then 0.

Matchability-aware loss (Huang et al. 2025, arXiv 2412.04234) raises the target to a power, and holds the weight of negatives:

    L = H, t = y^γ       dL/dx = p - t                                    where y > 0
    L = α p^γ softplus   dL/dx = α p^γ p                                  where y = 0

IoU-aware BCE (Chen et al. 2024, arXiv 2406.03459) mixes the score into the target t, and holds it there:

    L = H, t = max(p^α y^(1-α), 0.01)      dL/dx = p - t                  where y > 0
    L = p^γ softplus                       dL/dx = p^γ [p + γ (1 - p) H]  where y = 0

`exponent` is that of y. It is 1 where the host raised the rows' scores already, which are few. A y whose power is below the smallest
float32 is a negative.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import hold, logistic, logistic_hard, power


@triton.jit
def terms(x, y, iou_weighted):
    """Return (y > 0, p, 1 - p, p - y, H, the weight of a positive)."""
    p, not_p, log1p = logistic(x)
    entropy = tl.where(x >= 0, 1.0 - y, y) * tl.abs(x) + log1p
    w = tl.where(iou_weighted > 0.0, y, 1.0)  # the condition is the same for every element
    return y > 0.0, p, not_p, p - p * y - not_p * y, entropy, w


@triton.jit
def unless(free, w):
    """Hold a weight unless it is free: `check` then leaves it as it is, as the gradients below do."""
    return tl.where(free == 0.0, hold(w), w)


@triton.jit
def varifocal(x, y, alpha, gamma, iou_weighted, free):
    positive, p, not_p, d, entropy, w = terms(x, y, iou_weighted)
    w = tl.where(positive, w, unless(free, alpha * power(p, gamma)))
    tilt = gamma * free
    return w * entropy, w * (d + tilt * not_p * tl.where(positive, 0.0, tl.where(tilt == 0.0, 0.0, entropy)))


@triton.jit
def varifocal_2(x, y, alpha, gamma, iou_weighted, free):
    """Compute varifocal for γ = 2, without powers."""
    positive, p, not_p, d, entropy, w = terms(x, y, iou_weighted)
    w = tl.where(positive, w, unless(free, alpha * (p * p)))
    return w * entropy, w * (d + (2.0 * free) * not_p * tl.where(positive, 0.0, tl.where(free == 0.0, 0.0, entropy)))


@triton.jit
def varifocal_hard(x, positive, w, factor, alpha, gamma, iou_weighted, free):
    q, not_q, entropy = logistic_hard(x, positive)
    modulation, tilt = power(q, gamma), gamma * free
    slope = (factor * alpha) * modulation * (q + tilt * (not_q * tl.where(tilt == 0.0, 0.0, entropy)))
    return tl.where(positive, w, (w * alpha) * modulation) * entropy, tl.where(positive, -factor * q, slope)


@triton.jit
def varifocal_2_hard(x, positive, w, factor, alpha, gamma, iou_weighted, free):
    q, not_q, entropy = logistic_hard(x, positive)
    square = q * q
    slope = (factor * alpha) * square * (q + (2.0 * free) * (not_q * tl.where(free == 0.0, 0.0, entropy)))
    return tl.where(positive, w, (w * alpha) * square) * entropy, tl.where(positive, -factor * q, slope)


@triton.jit
def is_2(alpha, gamma, iou_weighted, free):
    return gamma == 2.0


@triton.jit
def raised(y, exponent):
    """Return y to a power; 0 and nan stay."""
    return tl.where(y > 0.0, power(y, exponent), y)


@triton.jit
def is_1(alpha, gamma, exponent):
    return exponent == 1.0


@triton.jit
def mal(x, y, alpha, gamma, exponent):
    return mal_1(x, raised(y, exponent), alpha, gamma, exponent)


@triton.jit
def mal_1(x, y, alpha, gamma, exponent):
    """Compute mal for an exponent of 1."""
    p, not_p, log1p = logistic(x)
    w = tl.where(y > 0.0, 1.0, hold(alpha * power(p, gamma)))
    return w * (tl.where(x >= 0, 1.0 - y, y) * tl.abs(x) + log1p), w * (p - p * y - not_p * y)


@triton.jit
def mal_hard(x, positive, w, factor, alpha, gamma, exponent):
    q, _, entropy = logistic_hard(x, positive)
    weight = tl.where(positive, 1.0, alpha * power(q, gamma))
    return w * weight * entropy, tl.where(positive, -factor, factor * weight) * q


@triton.jit
def mixed(x, y, positive, alpha, gamma):
    """Return p^α of a positive and p^γ of a negative, 1 - p, p - t, the factor of |x| in H, and ln(1 + e^-|x|)."""
    p, not_p, log1p = logistic(x)
    modulation = power(p, tl.where(positive, alpha, gamma))
    modulation = tl.where((gamma == 2.0) & ~positive, p * p, modulation)  # the powers of many negatives would add up their bias
    t = tl.where(positive, hold(tl.maximum(modulation * y, 0.01, propagate_nan=tl.PropagateNan.ALL)), y)  # of a negative 0, or nan
    return modulation, not_p, p - p * t - not_p * t, tl.where(x >= 0, 1.0 - t, t), log1p


@triton.jit
def ia_bce(x, y, alpha, gamma, exponent):
    return ia_bce_1(x, raised(y, exponent), alpha, gamma, exponent)


@triton.jit
def ia_bce_1(x, y, alpha, gamma, exponent):
    """Compute ia_bce for an exponent of 1."""
    positive = y > 0.0
    modulation, not_p, d, rest, log1p = mixed(x, y, positive, alpha, gamma)
    entropy = rest * tl.abs(x) + log1p
    w = tl.where(positive, 1.0, modulation)
    return w * entropy, w * (d + gamma * not_p * tl.where(positive, 0.0, tl.where(gamma == 0.0, 0.0, entropy)))


@triton.jit
def ia_bce_hard(x, positive, w, factor, alpha, gamma, exponent):
    modulation, not_p, d, rest, log1p = mixed(x, tl.where(positive, 1.0, 0.0), positive, alpha, gamma)
    entropy = tl.where(rest == 0.0, 0.0, rest * tl.abs(x)) + log1p
    slope = (factor * modulation) * (d + gamma * (not_p * tl.where(gamma == 0.0, 0.0, entropy)))
    return tl.where(positive, w, w * modulation) * entropy, tl.where(positive, factor * d, slope)
