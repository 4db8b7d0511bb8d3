"""Functions φ of z = lse(x) - x_t = -ln p_t, where t is a row's class, each with its derivative. z ≥ 0, and inf where p_t is 0."""

import triton
import triton.language as tl

from lossforge.kernels.math import complement, exp, powers


@triton.jit
def cross_entropy(z: tl.tensor):
    return z, 1.0


@triton.jit
def by_probability(z: tl.tensor):
    """Compute φ = p z, in which p is a constant; 0 at z = inf. Wu et al. 2025, arXiv 2508.05629."""
    p = exp(-z)
    return p * tl.minimum(z, 1e30), p


@triton.jit
def focal(z, gamma):
    """Compute φ = u^γ z with u = 1 - p; φ′ = u^γ (1 + γ p z / u), finite at any γ. Lin et al. 2017, arXiv 1708.02002."""
    u, p = complement(z)
    power, _ = powers(u, gamma)
    ratio = tl.where(u > 0, tl.minimum(z, 1e30) / u, 1.0)  # p z is 0 at z = inf
    return power * z, power * (1.0 + gamma * p * ratio)


@triton.jit
def poly(z, epsilon, offset):
    """Compute φ = z + ε (1 - p) + offset. Leng et al. 2022, arXiv 2204.12511."""
    u, p = complement(z)
    return z + epsilon * u + offset, 1.0 + epsilon * p


@triton.jit
def generalized(z, q):
    """Compute φ = (1 - p^q) / q, which is z where q is 0. Zhang and Sabuncu 2018, arXiv 1805.07836."""
    t = tl.where(q == 0.0, 0.0, q * z)
    u, e = complement(t)
    return tl.where(t < 1e-8, z, u / q), e


@triton.jit
def asymmetric(z, gamma_pos, gamma_neg, own, spread):
    """Compute φ = own (1 - p)^γ₊ z - spread p^γ₋ z, which replaces the spread term of the row's class by its own. arXiv 2009.14119."""
    value, slope = focal(z, gamma_pos)
    far = tl.minimum(z, 1e30)  # p^γ z is 0 at z = inf
    t = gamma_neg * far
    power = exp(-t)
    return own * value - spread * power * far, own * slope - spread * power * (1.0 - t)
