"""Asymmetric loss for many labels (Ben-Baruch et al. 2020, arXiv 2009.14119), for targets y in [0, 1].

    p = σ(x),  s = max(p - clip, 0),  b = y (1 - p) + (1 - y) s,  g = γ₊ y + γ₋ (1 - y),  H = -[c y ln p + (1 - y) ln(1 - s)]

    L = b^g H        dL/dx = b^g H' + g b^(g-1) b' H

    H' = -c y (1 - p) + (1 - y) s' / (1 - s),  b' = (1 - y) s' - y p (1 - p),  s' = p (1 - p) where p ≥ clip, else 0

For y of 0 or 1 these are the paper's two terms; between, timm's one power for both. Without clip -ln(1 - s) is softplus(x), exact at
any logit. Saturated logits take the limit, also for γ < 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, log1p_ratio, log2, logistic, powers, reciprocal


@triton.jit
def asymmetric(x, y, gamma_neg, gamma_pos, clip, pos_weight):
    p, q, log1p = logistic(x)
    z = 1.0 - y
    clips = clip > 0.0  # the same for the whole launch
    s = tl.maximum(p - clip, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inside = tl.where(p >= clip, z, 0.0)
    r = reciprocal(tl.where(clips, tl.minimum(q + clip, 1.0, propagate_nan=tl.PropagateNan.ALL), 1.0))  # 1 / (1 - s)
    clipped = tl.where(s <= 0.5, log1p_ratio(s * r, s), LN2 * log2(r))
    negative = tl.where(clips, clipped, tl.maximum(x, 0.0) + log1p)
    entropy = pos_weight * y * (tl.maximum(-x, 0.0) + log1p) + z * negative
    entropy_slope = inside * p * tl.where(clips, q * r, 1.0) - pos_weight * y * q
    base_slope = (p * q) * (inside - y)
    gamma = gamma_neg + (gamma_pos - gamma_neg) * y
    power, lower = powers(y * q + z * s, gamma)
    return power * entropy, power * entropy_slope + gamma * lower * base_slope * entropy
