"""Sigmoid focal loss (Lin et al. 2017, arXiv 1708.02002), for targets y in [0, 1].

    p = σ(x),  q = p (1 - y) + (1 - p) y = 1 - p_t,  H = y softplus(-x) + (1 - y) softplus(x),  a = α y + (1 - α)(1 - y)

    L = a q^γ H        dL/dx = a [q^γ (p - y) - γ q^(γ-1) (2y - 1) p (1 - p) H]

and for y of 0 or 1, with u = x where y is 0 and -x where it is 1, q = σ(u), in fewer instructions:

    L = a q^γ softplus(u)        dL/du = a q^γ [q + γ (1 - q) softplus(u)]

Poly-1 on it, and with γ = 0 on the binary cross entropy (Leng et al. 2022, arXiv 2204.12511):

    L = a q^γ (H + ε q)        dL/dx = a [q^γ (p - y + ε q') + γ q^(γ-1) q' (H + ε q)]        q' = (1 - 2y) p (1 - p)

A negative α leaves a = 1, as in torchvision. Saturated logits take the limit, also for γ < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic, logistic_hard, power, powers


@triton.jit
def terms(x, y, alpha):
    """Return q, a, H, and the slopes H' = p (1 - y) - (1 - p) y and q' = (1 - 2y) p (1 - p)."""
    p, not_p, log1p = logistic(x)
    positive, negative = not_p * y, p - p * y
    entropy = tl.where(x >= 0, 1.0 - y, y) * tl.abs(x) + log1p
    every = alpha < 0.0  # the same for every element, so it is computed once
    a = tl.where(every, 0.0, 2.0 * alpha - 1.0) * y + tl.where(every, 1.0, 1.0 - alpha)
    return negative + positive, a, entropy, negative - positive, negative * not_p - positive * p


@triton.jit
def focal(x, y, gamma, alpha):
    q, a, entropy, slope, tilt = terms(x, y, alpha)
    modulation, lower = powers(q, gamma)
    return a * modulation * entropy, a * (slope * modulation + gamma * lower * (tilt * tl.where(gamma == 0.0, 0.0, entropy)))


@triton.jit
def focal_2(x, y, gamma, alpha):
    """Compute focal for γ = 2, without powers."""
    q, a, entropy, slope, tilt = terms(x, y, alpha)
    factor = a * q
    return factor * (q * entropy), factor * (slope * q + 2.0 * (tilt * entropy))


@triton.jit
def hard_weights(positive, w, factor, alpha):
    """Return w a and factor a du/dx."""
    every = alpha < 0.0
    a, not_a = tl.where(every, 1.0, alpha), tl.where(every, 1.0, 1.0 - alpha)
    return tl.where(positive, w * a, w * not_a), tl.where(positive, -factor * a, factor * not_a)


@triton.jit
def focal_hard(x, positive, w, factor, gamma, alpha):
    q, not_q, entropy = logistic_hard(x, positive)
    w, factor = hard_weights(positive, w, factor, alpha)
    modulation = power(q, gamma)
    return w * (modulation * entropy), factor * modulation * (q + gamma * (not_q * tl.where(gamma == 0.0, 0.0, entropy)))


@triton.jit
def focal_2_hard(x, positive, w, factor, gamma, alpha):
    q, not_q, entropy = logistic_hard(x, positive)
    w, factor = hard_weights(positive, w, factor, alpha)
    square = q * q
    return w * (square * entropy), factor * square * (q + 2.0 * (not_q * entropy))


@triton.jit
def is_2(gamma, alpha=0.0):
    return gamma == 2.0


@triton.jit
def poly_bce(x, y, epsilon, gamma, alpha):
    q, a, entropy, slope, tilt = terms(x, y, alpha)
    power, lower = powers(q, gamma)
    polynomial = entropy + epsilon * q
    return a * power * polynomial, a * (power * (slope + epsilon * tilt) + gamma * lower * tilt * polynomial)


@triton.jit
def poly_bce_0(x, y, epsilon, gamma, alpha):
    """Compute poly_bce for γ = 0, without powers."""
    q, a, entropy, slope, tilt = terms(x, y, alpha)
    return a * (entropy + epsilon * q), a * (slope + epsilon * tilt)


@triton.jit
def is_0(epsilon, gamma, alpha=0.0):
    return gamma == 0.0
