"""Losses of two or three vectors x, y, z by sums over their elements: terms to sum, the value of the sums, and the gradient.

Of each: `terms` of an element; the value of their sums a, b, c with its derivatives in these; `slopes`, the derivatives in x, y, z of an
element, from those of the sums.

Cosine embedding (torch.nn.functional.cosine_embedding_loss), a = Σ x y, b = Σ x², c = Σ y², ε = 1e-12:

    cos = a / √((b + ε) (c + ε))        L = 1 - cos where the label is 1, max(0, cos - m) where it is -1, else 0

cos is nan where b or c overflows.

Triplet margin of p-norms (torch.nn.functional.triplet_margin_loss), a = Σ |x - y + ε|^p, b = Σ |x - z + ε|^p, c = Σ |y - z + ε|^p:

    L = max(0, m + a^(1/p) - b^(1/p)), with `swap` min(b, c) in place of b

At a distance of 0 the slope is 0. The slope at a hinge is 1, as of torch's clamp.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import TINY, exp2, log2, log2_nearest


@triton.jit
def cosine_terms(x, y, z, margin):
    return x * y, x * x, y * y


@triton.jit
def cosine_value(a, b, c, label, margin):
    first, second = 1.0 / tl.sqrt_rn(b + 1e-12), 1.0 / tl.sqrt_rn(c + 1e-12)  # one after the other, because their product may overflow
    cos = tl.where((b < float("inf")) & (c < float("inf")), a * first * second, float("nan"))
    excess = tl.where(cos - margin < 0.0, 0.0, cos - margin)
    slope = tl.where(label == 1.0, -1.0, tl.where((label == -1.0) & ~(cos - margin < 0.0), 1.0, 0.0))
    value = tl.where(label == 1.0, 1.0 - cos, tl.where(label == -1.0, excess, 0.0))
    of_norm = -0.5 * slope * cos
    return value, slope * first * second, of_norm * first * first, of_norm * second * second


@triton.jit
def cosine_slopes(x, y, z, da, db, dc, margin):
    return da * y + 2.0 * db * x, da * x + 2.0 * dc * y, z


@triton.jit
def power_of(d, p):
    """Return |d|^p for p ≥ 1."""
    size = tl.abs(d)
    power = exp2(p * log2(tl.maximum(size, TINY, propagate_nan=tl.PropagateNan.ALL)))
    return tl.where((size == 0.0) | (p == 1.0), size, power)


@triton.jit
def slope_of_power(d, p):
    """Return the derivative of |d|^p: p |d|^(p - 1) with the sign of d, 0 at 0."""
    size = tl.maximum(tl.abs(d), TINY, propagate_nan=tl.PropagateNan.ALL)
    power = tl.where(p == 1.0, 1.0, exp2((p - 1.0) * log2(size)))  # 0 · log2 is nan at infinity
    return tl.where(d == 0.0, 0.0, tl.where(d < 0.0, -p, p) * power)


@triton.jit
def root(s, p):
    """Return s^(1/p) and its derivative, 0 at 0 and, for p above 1, at infinity."""
    near = tl.maximum(s, TINY, propagate_nan=tl.PropagateNan.ALL)
    distance = exp2(log2_nearest(near) / p)
    slope = tl.where(p == 1.0, 1.0, tl.where(s < float("inf"), distance / (p * near), tl.where(s == s, 0.0, s)))
    return tl.where((p == 1.0) | (s == 0.0), s, distance), tl.where(s == 0.0, 0.0, slope)


@triton.jit
def hinge_of_distances(first, second, third, margin, swap):
    """Return max(0, m + first - second) with `swap` for the smaller of the last two, and its slopes; halves at a tie."""
    share = tl.where(swap == 0.0, 1.0, tl.where(second < third, 1.0, tl.where(third < second, 0.0, 0.5)))
    nearest = tl.where(share == 0.0, third, second)
    h = margin + first - nearest
    slope = tl.where(h >= 0.0, 1.0, 0.0)
    return tl.where(h < 0.0, 0.0, h), slope, -slope * share, slope * (share - 1.0)


@triton.jit
def triplet_terms(x, y, z, margin, p, eps, swap):
    return power_of(x - y + eps, p), power_of(x - z + eps, p), power_of(y - z + eps, p)


@triton.jit
def hinge_of_sums(a, b, c, margin, p, swap, distance: tl.constexpr):
    first, of_a = distance(a, p)
    second, of_b = distance(b, p)
    third, of_c = distance(c, p)
    value, da, db, dc = hinge_of_distances(first, second, third, margin, swap)
    return value, da * of_a, db * of_b, dc * of_c


@triton.jit
def triplet_value(a, b, c, label, margin, p, eps, swap):
    return hinge_of_sums(a, b, c, margin, p, swap, root)


@triton.jit
def triplet_slopes(x, y, z, da, db, dc, margin, p, eps, swap):
    u, v, w = da * slope_of_power(x - y + eps, p), db * slope_of_power(x - z + eps, p), dc * slope_of_power(y - z + eps, p)
    return u + v, w - u, -v - w


@triton.jit
def squared_terms(x, y, z, margin, p, eps, swap):
    u, v, w = x - y + eps, x - z + eps, y - z + eps
    return u * u, v * v, w * w


@triton.jit
def square_root(s, p):
    distance = tl.sqrt_rn(s)
    return distance, tl.where(s > 0.0, 0.5 / distance, 0.0)


@triton.jit
def squared_value(a, b, c, label, margin, p, eps, swap):
    return hinge_of_sums(a, b, c, margin, p, swap, square_root)


@triton.jit
def squared_slopes(x, y, z, da, db, dc, margin, p, eps, swap):
    u, v, w = 2.0 * da * (x - y + eps), 2.0 * db * (x - z + eps), 2.0 * dc * (y - z + eps)
    return u + v, w - u, -v - w


@triton.jit
def is_squared(margin, p, eps, swap):
    return p == 2.0
