"""Binary cross entropy, on logits and on probabilities.

On logits, with weight c of the positive class (softplus(x) = ln(1 + eˣ)):

    L = c y softplus(-x) + (1 - y) softplus(x)        dL/dx = (1 - y) σ(x) - c y σ(-x)

and for y of 0 or 1, with u = x where y is 0 and -x where it is 1, in fewer instructions:

    L = c^y softplus(u)        dL/du = c^y σ(u)

Softened targets (timm, arXiv 2110.00476): y ← y slope + offset, which then becomes 1 above a threshold, else 0. -inf: no threshold.

On probabilities, as in PyTorch, with each logarithm at least -100:

    L = -[y ln p + (1 - y) ln(1 - p)]                 dL/dp = (1 - y)/(1 - p) - y/p

computed as one quotient. Each denominator is at least `floor`, so that the derivative is exact wherever it is finite, and finite at p = 0
and 1.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, half_logistic, log1p_ratio, log2_subnormal, logistic, logistic_hard, reciprocal


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
def softened(y, slope, offset, threshold):
    soft = y * slope + offset
    hard = tl.where(soft > threshold, 1.0, 0.0)
    return tl.where(threshold > float("-inf"), hard, soft)


@triton.jit
def bce_with_logits_softened(x, y, slope, offset, threshold, pos_weight):
    return bce_with_logits(x, softened(y, slope, offset, threshold), pos_weight)


@triton.jit
def bce_with_logits_softened_hard(x, positive, w, factor, slope, offset, threshold, pos_weight):
    """Compute most terms once for a launch or row; for each element only the logistic, and which side of 0 its logit lies on."""
    on = softened(1.0, slope, offset, threshold)
    off = softened(0.0, slope, offset, threshold)
    of_positive = tl.where(positive, pos_weight * on, pos_weight * off)
    of_negative = tl.where(positive, 1.0 - on, 1.0 - off)
    larger, smaller, log1p = half_logistic(x)
    # slope = near p - far q. With (near + far) taken out it is -far + (near + far) p, or near - (near + far) q; the form chosen has
    # the smaller share as its constant. x's sign is compared once, together with the order of both shares, for the slope and for the value.
    # Weight and factor come last, so that an infinite one meets no difference of two terms.
    near, far = of_negative, of_positive
    rising = tl.abs(near) >= tl.abs(far)
    least, rest = tl.where(rising, -far, near), tl.where(rising, near + far, -near - far)
    side = (x >= 0) == rising
    linear = tl.where(side, tl.where(rising, near, -far), tl.where(rising, -far, near))  # x ≥ 0: near
    value = w * (linear * x + (near + far) * log1p)
    return value, factor * (least + rest * tl.where(side, larger, smaller))


@triton.jit
def bce(p, y, floor):
    """Take the logarithm of the smaller of p and 1 - p. The larger's follows from it, and so keeps its digits near 0.

    Outside [0, 1] the logarithm is nan, and so are value and slope.
    """
    q = 1.0 - p
    z = 1.0 - y
    p_kept, q_kept = tl.maximum(p, floor), tl.maximum(q, floor)
    inverse = reciprocal(p_kept * q_kept)
    smaller = tl.minimum(p, q)
    of_smaller = tl.maximum(LN2 * log2_subnormal(smaller), -100.0, propagate_nan=tl.PropagateNan.ALL)
    of_larger = -log1p_ratio(smaller * (tl.minimum(p_kept, q_kept) * inverse), smaller)
    below = p <= 0.5
    value = -y * tl.where(below, of_smaller, of_larger) - z * tl.where(below, of_larger, of_smaller)
    return value, (z * p_kept - y * q_kept) * inverse + 0.0 * of_smaller
