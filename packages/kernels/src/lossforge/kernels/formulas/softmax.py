"""Losses of softmaxes: of a row's class, and of distributions p and q.

Of a row's class t: functions φ of z = lse(x) - x_t = -ln p_t, each with its derivative. z ≥ 0, and inf where p_t is 0.

Of distributions p and q over the classes of a row: divergences as a sum of f(ln p, ln q).

Each takes (log p, log q, p, q, unit, *hyper) and returns f, ∂f/∂ln p and ∂f/∂ln q. The logarithms are in units of `unit`, a compile-time
constant: ln p = unit · log p. Multiples of p (of q) may be omitted from the derivatives, because they cancel in the logits' gradient
hⱼ - pⱼ Σ h. A class with p = q = 0 and logarithms of -inf adds nothing.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, TINY, complement, exp, log, log2_nearest, powers

LEAST = tl.constexpr(-150.0)  # below the logarithm, to base 2 or e, of any float32 above 0
SMALLEST = tl.constexpr(2.0**-126)  # normal float32
STEEP = tl.constexpr(2.0**126)  # its product with any normal float32 is at least 1 in magnitude


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


@triton.jit
def kl(lp, lq, p, q, unit):
    """Compute KL(q ‖ p) = Σ q (ln q - ln p)."""
    term = tl.where(q == 0.0, 0.0, q * (lq - lp) * unit)
    return term, -q, term


@triton.jit
def kl_averaged(lq, lp):
    """Return the term whose mean under q is KL."""
    return lq - lp


@triton.jit
def soft_cross_entropy(lp, lq, p, q, unit):
    """Compute -Σ q ln p, the cross entropy of q and p."""
    term = tl.where(q == 0.0, 0.0, -q * lp * unit)
    return term, -q, term


@triton.jit
def soft_cross_entropy_averaged(lq, lp):
    """Return the term whose mean under q is the cross entropy."""
    return -lp


@triton.jit
def js(lp, lq, p, q, unit, beta):
    """Compute β KL(q ‖ m) + (1 - β) KL(p ‖ m), m = (1 - β) p + β q (GKD, arXiv 2306.13649)."""
    lm = log2_nearest(beta * q + ((1.0 - beta) * p + TINY)) * (LN2 / unit)
    # a factor of p = 0 need only be finite, so that one instruction suffices where tl.where takes two
    of_p = (1.0 - beta) * unit * p * (tl.maximum(lp, LEAST, tl.PropagateNan.ALL) - lm)
    of_q = beta * unit * q * (tl.maximum(lq, LEAST, tl.PropagateNan.ALL) - lm)
    return of_p + of_q, of_p, of_q


@triton.jit
def total_variation(lp, lq, p, q, unit):
    """Compute ½ Σ |p - q|.

    The derivatives are those of Σ max(q - p, 0), which is the same where both sums are 1. A multiple of p beside ½ sign(p - q) p changes
    no gradient of the logits, and costs it its digits where p is far from q.
    """
    d = p - q
    below = tl.clamp(d * STEEP - 0.5, -1.0, 0.0, tl.PropagateNan.ALL)  # -1 for p < q, else 0, without tl.where, which takes twice as long
    return 0.5 * tl.abs(d), below * p, -(below + 1.0) * q


@triton.jit
def overlap(lp, lq, p, q, unit):
    """Compute Σ min(p, q), which is 1 - ½ Σ |p - q|, and keeps its digits where it is small. So do the derivatives, of ½ Σ |p - q|."""
    below = tl.clamp((p - q) * STEEP - 0.5, -1.0, 0.0, tl.PropagateNan.ALL)
    return tl.minimum(p, q, tl.PropagateNan.ALL), below * p, -(below + 1.0) * q


# Losses of a draft model (arXiv 2602.23881): a row's value from `first`, the mean of the formula's `averaged`, and `total`, the sum of its
# terms over the classes that the draft has. mass: the teacher's probability of these. Each returns the value, the acceptance
# α = Σ min(p, q), and the derivatives of the value by `first` and by ½ Σ |p - q|.


@triton.jit
def draft_first(first, total, mass):
    """Return `first` itself, of terms `overlap`."""
    return first, total, tl.where(total == total, 1.0, 1.0), tl.where(total == total, 0.0, 0.0)


@triton.jit
def draft_total_variation(first, total, mass):
    """Compute 1 - α, of terms `total_variation`."""
    distance = total + 0.5 * (1.0 - mass)
    return distance, 1.0 - distance, tl.where(total == total, 0.0, 0.0), tl.where(total == total, 1.0, 1.0)


@triton.jit
def draft_log_acceptance(first, total, mass):
    """Compute -ln α, of terms `overlap`. Where α is 0 there is no gradient."""
    return -log(total), total, tl.where(total == total, 0.0, 0.0), tl.where(total < SMALLEST, 0.0, 1.0 / total)


@triton.jit
def draft_blend(first, total, mass, kl_scale, eta):
    """Compute λ first + (1 - λ) (1 - α), λ = kl_scale exp(-η α) without gradient, of terms `total_variation`."""
    distance = total + 0.5 * (1.0 - mass)
    share = kl_scale * exp(-eta * (1.0 - distance))
    value = tl.where(share == 0.0, 0.0, share * first) + (1.0 - share) * distance
    return value, 1.0 - distance, share, 1.0 - share
