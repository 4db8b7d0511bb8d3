"""Binary cross entropy, on logits and on probabilities.

On logits, with weight c of the positive class (softplus(x) = ln(1 + eˣ)):

    L = c y softplus(-x) + (1 - y) softplus(x)        dL/dx = (1 - y) σ(x) - c y σ(-x)

and for y of 0 or 1, with u = x where y is 0 and -x where it is 1, in fewer instructions:

    L = c^y softplus(u)        dL/du = c^y σ(u)

Softened targets (timm, arXiv 2110.00476) are y ← y slope + offset, and then 1 where above a threshold, else 0; -inf: no threshold.

On probabilities, as in PyTorch with each logarithm kept above -100:

    L = -[y ln p + (1 - y) ln(1 - p)]                 dL/dp = (1 - y)/(1 - p) - y/p

computed as one quotient, where each denominator is kept above `floor`, so that the derivative is exact wherever it is finite and finite at
p = 0 and 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, log, log1p_unit, log2, logistic, logistic_hard, reciprocal


@triton.jit
def bce_with_logits(x, y, pos_weight):
    p, q, log1p = logistic(x)
    positive = pos_weight * y
    negative = 1.0 - y
    value = tl.where(x >= 0, negative, positive) * tl.abs(x) + (positive + negative) * log1p
    return value, negative * p - positive * q


@triton.jit
def bce_with_logits_hard(x, positive, w, factor, pos_weight):
    q, _, entropy = logistic_hard(x, positive)
    return tl.where(positive, w * pos_weight, w) * entropy, tl.where(positive, -factor * pos_weight, factor) * q


@triton.jit
def bce_with_logits_softened(x, y, slope, offset, threshold, pos_weight):
    soft = y * slope + offset
    hard = tl.where(soft > threshold, 1.0, 0.0)
    return bce_with_logits(x, tl.where(threshold > float("-inf"), hard, soft), pos_weight)


@triton.jit
def bce(p, y, floor):
    q = 1.0 - p
    z = 1.0 - y
    p_kept, q_kept = tl.maximum(p, floor), tl.maximum(q, floor)
    inverse = reciprocal(p_kept * q_kept)
    ratio = p * (p_kept * inverse)  # p / (1 - p): ln(1 - p) = -ln(1 + p / (1 - p)) keeps its digits at small p
    log_q = tl.where(p <= 0.5, -log1p_unit(ratio), LN2 * log2(q))
    value = -y * tl.maximum(log(p), -100.0) - z * tl.maximum(log_q, -100.0)
    outside = (p < 0.0) | (p > 1.0) | (p != p)
    nan = float("nan")
    return tl.where(outside, nan, value), tl.where(outside, nan, (z * p_kept - y * q_kept) * inverse)
