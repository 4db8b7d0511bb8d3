"""Losses of the overlap of predicted and true regions, from three sums over a region's pixels: I = Σ p y, P = Σ p, Y = Σ y.

With squared predictions P = Σ p² and Y = Σ y². Smoothing n in numerators and d in denominators:

    dice             L = 1 - (2 I + n) / (P + Y + d)                                (Milletari et al. 2016, arXiv 1606.04797)
    jaccard          L = 1 - (I + n) / (P + Y - I + d)
    tversky          L = 1 - T,  T = (I + n) / (I + α (P - I) + β (Y - I) + d)      (Salehi et al. 2017, arXiv 1706.05721)
    focal_tversky    L = (1 - T)^γ                                                  (Abraham, Khan 2018, arXiv 1810.07842)

P - I are the false positives, Y - I the false negatives. L is computed as (denominator - numerator) / denominator, rounded to nearest. So
it is exactly 0 where region and prediction are equal, and exactly 1 where they are disjoint. Each formula returns (L, ∂L/∂I, ∂L/∂P).
Where 1 - T is 0 the gradient of (1 - T)^γ is taken as 0, because for γ < 1 it has no finite limit.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import TINY, powers


@triton.jit
def dice(i, p, y, smooth_nr, smooth_dr):
    whole = p + y + smooth_dr
    r = 1.0 / whole
    ratio = (2.0 * i + smooth_nr) * r
    return tl.div_rn(p + y - 2.0 * i + (smooth_dr - smooth_nr), whole), -2.0 * r, ratio * r


@triton.jit
def jaccard(i, p, y, smooth_nr, smooth_dr):
    union = p + y - i + smooth_dr
    r = 1.0 / union
    ratio = (i + smooth_nr) * r
    return tl.div_rn(p + y - 2.0 * i + (smooth_dr - smooth_nr), union), -r * (1.0 + ratio), ratio * r


@triton.jit
def tversky(i, p, y, alpha, beta, smooth_nr, smooth_dr):
    faults = alpha * (p - i) + beta * (y - i)
    whole = i + faults + smooth_dr
    r = 1.0 / whole
    ratio = (i + smooth_nr) * r
    return tl.div_rn(faults + (smooth_dr - smooth_nr), whole), r * (ratio * (1.0 - alpha - beta) - 1.0), alpha * ratio * r


@triton.jit
def focal_tversky(i, p, y, alpha, beta, gamma, smooth_nr, smooth_dr):
    rest, by_i, by_p = tversky(i, p, y, alpha, beta, smooth_nr, smooth_dr)
    power, lower = powers(rest, gamma)
    slope = tl.where(rest <= TINY, 0.0, gamma * lower)
    return tl.where(rest <= TINY, 0.0, power), slope * by_i, slope * by_p
