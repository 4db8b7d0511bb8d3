"""Poly-1 on the binary cross entropy and on the focal loss (Leng et al. 2022, arXiv 2204.12511), in the terms of focal.py:

L = a q^γ (H + ε q)        dL/dx = a [q^γ (p - y + ε q') + γ q^(γ-1) q' (H + ε q)]        q' = (1 - 2y) p (1 - p)
"""

import triton
import triton.language as tl  # noqa: F401

from lossforge.kernels.formulas.focal import terms
from lossforge.kernels.math import powers


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
