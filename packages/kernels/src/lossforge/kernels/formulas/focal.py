"""Sigmoid focal loss (Lin et al. 2017, arXiv 1708.02002), for targets y in [0, 1].

    p = σ(x),  q = p (1 - y) + (1 - p) y = 1 - p_t,  H = y softplus(-x) + (1 - y) softplus(x),  a = α y + (1 - α)(1 - y)

    L = a q^γ H        dL/dx = a [q^γ (p - y) - γ q^(γ-1) (2y - 1) p (1 - p) H]

A negative α leaves a = 1, as in torchvision. Saturated logits take the limit, also for γ < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic, powers


@triton.jit
def focal(x, y, gamma, alpha):
    p, one_minus_p, log1p = logistic(x)
    z = 1.0 - y
    q = p * z + one_minus_p * y
    entropy = y * (tl.maximum(-x, 0.0) + log1p) + z * (tl.maximum(x, 0.0) + log1p)
    a = tl.where(alpha < 0.0, 1.0, alpha * y + (1.0 - alpha) * z)
    power, lower = powers(q, gamma)
    slope = (p * z - one_minus_p * y) * power - gamma * lower * (y - z) * p * one_minus_p * entropy
    return a * power * entropy, a * slope
