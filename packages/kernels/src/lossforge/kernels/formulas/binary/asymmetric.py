"""Asymmetric loss for many labels (Ben-Baruch et al. 2020, arXiv 2009.14119), for targets y in [0, 1].

    p = σ(x),  s = max(p - clip, 0),  b = y (1 - p) + (1 - y) s,  g = γ₊ y + γ₋ (1 - y),  H = -[c y ln p + (1 - y) ln(1 - s)]

    L = b^g H        dL/dx = b^g H' + g b^(g-1) b' H

    H' = -c y (1 - p) + (1 - y) s' / (1 - s),  b' = (1 - y) s' - y p (1 - p),  s' = p (1 - p) where p ≥ clip, else 0

For y of 0 or 1 these are the paper's two terms; for y between, both terms share one power, as in timm. Without clip -ln(1 - s) is
softplus(x), exact at any logit. Saturated logits take the limit, also for γ < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, log1p_ratio, log2, logistic, powers, reciprocal


@triton.jit
def clipped(p, q, z, clip):
    """Return s, -ln(1 - s), its slope times 1 - y, and (1 - y) where p ≥ clip, for a clip above 0."""
    s = tl.maximum(p - clip, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inside = tl.where(p >= clip, z, 0.0)
    r = reciprocal(tl.minimum(q + clip, 1.0, propagate_nan=tl.PropagateNan.ALL))  # 1 / (1 - s)
    return s, tl.where(s <= 0.5, log1p_ratio(s * r, s), LN2 * log2(r)), inside * p * (q * r), inside


@triton.jit
def joined(x, y, z, p, q, log1p, s, negative, negative_slope, inside, gamma_neg, gamma_pos, pos_weight):
    """Return the value, its derivative with the power b^g held constant, and the power's part of the derivative."""
    positive = pos_weight * y
    entropy = positive * (tl.maximum(-x, 0.0) + log1p) + z * negative
    base_slope = (p * q) * (inside - y)
    gamma = gamma_neg + (gamma_pos - gamma_neg) * y
    power, lower = powers(y * q + z * s, gamma)
    return power * entropy, power * (negative_slope - positive * q), gamma * lower * (base_slope * tl.where(gamma == 0.0, 0.0, entropy))


@triton.jit
def unclipped(x, y, gamma_neg, gamma_pos, pos_weight):
    p, q, log1p = logistic(x)
    z = 1.0 - y
    return joined(x, y, z, p, q, log1p, p, tl.maximum(x, 0.0) + log1p, z * p, z, gamma_neg, gamma_pos, pos_weight)


@triton.jit
def with_clip(x, y, gamma_neg, gamma_pos, clip, pos_weight):
    p, q, log1p = logistic(x)
    z = 1.0 - y
    s, negative, negative_slope, inside = clipped(p, q, z, clip)
    return joined(x, y, z, p, q, log1p, s, negative, negative_slope, inside, gamma_neg, gamma_pos, pos_weight)


@triton.jit
def asymmetric_unclipped(x, y, gamma_neg, gamma_pos, clip, pos_weight):
    value, slope, slope_of_power = unclipped(x, y, gamma_neg, gamma_pos, pos_weight)
    return value, slope + slope_of_power


@triton.jit
def asymmetric_clipped(x, y, gamma_neg, gamma_pos, clip, pos_weight):
    value, slope, slope_of_power = with_clip(x, y, gamma_neg, gamma_pos, clip, pos_weight)
    return value, slope + slope_of_power


@triton.jit
def asymmetric_unclipped_constant(x, y, gamma_neg, gamma_pos, clip, pos_weight):
    """Treat the power as constant in the derivative."""
    value, slope, _ = unclipped(x, y, gamma_neg, gamma_pos, pos_weight)
    return value, slope


@triton.jit
def asymmetric_clipped_constant(x, y, gamma_neg, gamma_pos, clip, pos_weight):
    value, slope, _ = with_clip(x, y, gamma_neg, gamma_pos, clip, pos_weight)
    return value, slope


@triton.jit
def clips(gamma_neg, gamma_pos, clip, pos_weight=1.0):
    return clip > 0.0
