"""Losses of the overlap of two boxes (x1, y1, x2, y2), with derivatives in the coordinates of both.

With I the area of the intersection, U = A₁ + A₂ - I that of the union, C, w_C and h_C the area and sides of the smallest box around both,
d² = w_C² + h_C², ρ the distance of the centres, wᵢ and hᵢ the sides of the boxes:

    IoU     L = 1 - I/U                                       (Yu et al. 2016, arXiv 1608.01471, without its logarithm)
    -ln IoU L = -ln max(I/U, eps)                             (the same, with it)
    GIoU    L = 1 - I/U + (C - U)/C                           (Rezatofighi et al. 2019, arXiv 1902.09630)
    DIoU    L = 1 - I/U + ρ²/d²                               (Zheng et al. 2020, arXiv 1911.08287)
    CIoU    L = 1 - I/U + ρ²/d² + αv                          (the same), v = 4/π² (atan w₂/h₂ - atan w₁/h₁)²,
                                                              α = v / (1 - I/U + v), a constant to the derivative
    EIoU    L = 1 - I/U + ρ²/d² + (w₁-w₂)²/w_C² + (h₁-h₂)²/h_C²   (Zhang et al. 2022, arXiv 2101.08158)

A denominator below `eps` is `eps`, so that boxes without area have finite losses, and equal boxes with area one of exactly 0.

A flipped box, whose second corner lies before its first, is an empty one: the side that is flipped has length 0, and the smallest box
around both reaches from the smallest coordinate to the largest. The loss of an empty box mostly does not depend on its corners, so its
derivatives would leave it as it is. In their place the coordinates of a flipped side get a `push`, so that a step turns the side back. The
derivative in the centre stays.

Each loss follows from five quantities of either axis: the two lengths, their overlap, their hull, and the offset of the centres. So it is
differentiated in these, and `edges` takes the derivatives to the coordinates. Where two edges lie on each other, the derivatives
of min and max are halves, as in PyTorch.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import TINY, atan_ratio, hold, log, log1p_unit, product, reciprocal

V_SCALE = tl.constexpr(0.4052847345693511)  # 4 / π²


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def share(x, y):
    """Return ∂max(x, y)/∂x."""
    return tl.where(x > y, 1.0, tl.where(x == y, 0.5, 0.0))


@triton.jit
def length(a, b):
    """Return b - a; 0 where [a, b] is flipped, b < a, and nan where that is infinite."""
    return tl.where(b < a, 0.0 * (b - a), b - a)


@triton.jit
def ends(a, b):
    """Return the smaller and the larger of a and b; no derivative where [a, b] is flipped."""
    return tl.where(b < a, hold(b), a), tl.where(b < a, hold(a), b)


@triton.jit
def hull(a, b, c, d):
    """Return the length of the smallest interval around [a, b] and [c, d], either of which may be flipped."""
    low_1, high_1 = ends(a, b)
    low_2, high_2 = ends(c, d)
    return larger(high_1, high_2) - smaller(low_1, low_2)


@triton.jit
def push(depth, hull):
    """Return the derivative in how far a side is flipped, (1 + depth / hull) / hull. A constant could end at a length of exactly 0."""
    inverse = reciprocal(larger(hull, TINY))
    return inverse * (1.0 + depth * inverse)


@triton.jit
def turn(a, b, c, d):
    """Return 0, for derived formulas: with the derivatives that turn [a, b] back beside [c, d] if it is flipped."""
    depth = tl.where(b < a, a - b, 0.0)
    return (depth - hold(depth)) * hold(push(depth, hull(a, b, c, d)))


@triton.jit
def axis(a, b, c, d):
    """Return of [a, b] and [c, d] lengths, overlap, hull, and the offset of the centres; for the overlap ∂begin/∂a and ∂end/∂b.

    Last `push` of an interval that is flipped, else 0: of the first, and of the second. The overlap of a flipped one is negative.
    """
    low_1, high_1 = ends(a, b)
    low_2, high_2 = ends(c, d)
    around = larger(high_1, high_2) - smaller(low_1, low_2)
    return (
        length(a, b),
        length(c, d),
        smaller(b, d) - larger(a, c),
        around,
        0.5 * ((a - c) + (b - d)),
        share(low_1, low_2),
        share(high_2, high_1),
        tl.where(b < a, push(a - b, around), 0.0),
        tl.where(d < c, push(c - d, around), 0.0),
    )


@triton.jit
def edges(interval, overlap, hull, length_1, length_2, offset):
    """Return dL/da, dL/db, dL/dc, dL/dd of intervals [a, b] and [c, d] from the derivatives by what `axis` returns, `interval`."""
    _, _, _, _, _, begin, end, turn_1, turn_2 = interval
    moved = overlap - hull
    half = 0.5 * offset
    return (
        half + tl.where(turn_1 > 0, turn_1, -length_1 - hull - begin * moved),
        half - tl.where(turn_1 > 0, turn_1, -length_1 - hull - end * moved),
        tl.where(turn_2 > 0, turn_2, begin * moved - length_2 - overlap) - half,
        tl.where(turn_2 > 0, -turn_2, length_2 + overlap - end * moved) - half,
    )


@triton.jit
def result(value, across, down, d_inter, d_union, d_wc, d_hc, d_w1, d_h1, d_w2, d_h2, d_dx, d_dy):
    """Return the value and its derivatives in box 1's coordinates, then in box 2's.

    Args:
        value: of the loss.
        across: what `axis` returns for the x coordinates.
        down: what `axis` returns for the y coordinates.
        d_inter, d_union: derivatives in I (for a given U) and in U.
        d_wc, d_hc: in the sides of the hull.
        d_w1, d_h1, d_w2, d_h2: in the sides of the boxes, without their effect through the areas.
        d_dx, d_dy: in the offsets of the centres.
    """
    w1, w2, wi, _, _, _, _, _, _ = across
    h1, h2, hi, _, _, _, _, _, _ = down
    d_inter = tl.where((wi > 0) & (hi > 0), d_inter - d_union, 0.0)
    dx1, dx2, du1, du2 = edges(across, d_inter * hi, d_wc, d_union * h1 + d_w1, d_union * h2 + d_w2, d_dx)
    dy1, dy2, dv1, dv2 = edges(down, d_inter * wi, d_hc, d_union * w1 + d_h1, d_union * w2 + d_h2, d_dy)
    return value, dx1, dy1, dx2, dy2, du1, dv1, du2, dv2


@triton.jit
def bounded(x, eps):
    """Return max(x, eps), its reciprocal r, and r where x ≥ eps, else 0: d(n / max(x, eps))/dx = -(n · r) · r with the last of these."""
    kept = larger(x, eps)
    r = reciprocal(kept)
    return kept, r, tl.where(x >= eps, r, 0.0)


@triton.jit
def overlap_loss(across, down, eps):
    """Return 1 - I/U, U, dL/dI (for a given U) and dL/dU."""
    w1, w2, wi, _, _, _, _, _, _ = across
    h1, h2, hi, _, _, _, _, _, _ = down
    intersection = tl.where((wi > 0) & (hi > 0), product(wi, hi), 0.0)
    union = product(w1, h1) + (product(w2, h2) - intersection)
    union = tl.where(union == float("inf"), float("nan"), union)
    kept, r, r_free = bounded(union, eps)
    return (kept - intersection) * r, union, -r, intersection * r * r_free


@triton.jit
def distance_loss(across, down, eps):
    """Return ρ²/d², and its derivatives in the hull's sides and in the offsets of the centres."""
    _, _, _, wc, dx, _, _, _, _ = across
    _, _, _, hc, dy, _, _, _, _ = down
    squared = dx * dx + dy * dy
    _, r, r_free = bounded(wc * wc + hc * hc, eps)
    value = squared * r
    slope = -2.0 * value * r_free
    return value, slope * wc, slope * hc, 2.0 * dx * r, 2.0 * dy * r


@triton.jit
def turned(x1, y1, x2, y2, u1, v1, u2, v2):
    """Return 0, for derived formulas: with the derivatives that turn the flipped sides of both boxes back."""
    return (turn(x1, x2, u1, u2) + turn(u1, u2, x1, x2)) + (turn(y1, y2, v1, v2) + turn(v1, v2, y1, y2))


@triton.jit
def overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """Compute 1 - I/U for formulas whose derivatives are derived. They turn a flipped box back, see `turned`."""
    return jaccard_distance(x1, y1, x2, y2, u1, v1, u2, v2, eps) + turned(x1, y1, x2, y2, u1, v1, u2, v2)


@triton.jit
def jaccard_distance(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """Compute 1 - I/U for formulas whose derivatives are derived, and that add `turned` themselves."""
    w, h = smaller(x2, u2) - larger(x1, u1), smaller(y2, v2) - larger(y1, v1)
    intersection = tl.where((w > 0) & (h > 0), product(w, h), 0.0)
    union = product(length(x1, x2), length(y1, y2)) + (product(length(u1, u2), length(v1, v2)) - intersection)
    union = larger(union, eps)
    return (union - intersection) / union  # not by a reciprocal, whose derivative underflows


@triton.jit
def iou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    value, _, d_inter, d_union = overlap_loss(across, down, eps)
    return result(value, across, down, d_inter, d_union, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@triton.jit
def log_iou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """Compute ln(U/I), from 1 - I/U where I/U is near 1, so that small losses keep their digits."""
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    _, _, wi, _, _, _, _, _, _ = across
    _, _, hi, _, _, _, _, _, _ = down
    rest, union, d_inter, d_union = overlap_loss(across, down, eps)
    ratio = tl.where((wi > 0) & (hi > 0), product(wi, hi), 0.0) * reciprocal(larger(union, eps))
    inverse = reciprocal(ratio)
    value = tl.where(ratio > 0.5, log1p_unit(rest * inverse), -log(larger(ratio, eps)))
    slope = tl.where(ratio <= eps, 0.0, inverse)
    return result(value, across, down, d_inter * slope, d_union * slope, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@triton.jit
def giou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    _, _, _, wc, _, _, _, _, _ = across
    _, _, _, hc, _, _, _, _, _ = down
    value, union, d_inter, d_union = overlap_loss(across, down, eps)
    hull = product(wc, hc)
    _, r, r_free = bounded(hull, eps)
    empty = (hull - union) * r
    d_hull = r - empty * r_free
    return result(value + empty, across, down, d_inter, d_union - r, d_hull * hc, d_hull * wc, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@triton.jit
def diou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    value, _, d_inter, d_union = overlap_loss(across, down, eps)
    distance, d_wc, d_hc, d_dx, d_dy = distance_loss(across, down, eps)
    return result(value + distance, across, down, d_inter, d_union, d_wc, d_hc, 0.0, 0.0, 0.0, 0.0, d_dx, d_dy)


@triton.jit
def over_diagonal(w, h):
    """Return 1 / (w² + h²), the factor in d atan(w/h) = (h dw - w dh) / (w² + h²); 0 at w = h = 0, where the angle is not defined."""
    squared = w * w + h * h
    return tl.where(squared < TINY, 0.0, reciprocal(squared))


@triton.jit
def ciou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    w1, w2, _, _, _, _, _, _, _ = across
    h1, h2, _, _, _, _, _, _, _ = down
    value, _, d_inter, d_union = overlap_loss(across, down, eps)
    distance, d_wc, d_hc, d_dx, d_dy = distance_loss(across, down, eps)
    angle = atan_ratio(w2, h2) - atan_ratio(w1, h1)
    v = V_SCALE * angle * angle
    alpha = v * reciprocal(larger(value + v, eps))
    turn = 2.0 * V_SCALE * alpha * angle
    turn_1, turn_2 = turn * over_diagonal(w1, h1), turn * over_diagonal(w2, h2)
    value += distance + hold(alpha) * v
    return result(value, across, down, d_inter, d_union, d_wc, d_hc, -turn_1 * h1, turn_1 * w1, turn_2 * h2, -turn_2 * w2, d_dx, d_dy)


@triton.jit
def side_loss(s1, s2, sc, eps):
    """Return (s₁ - s₂)²/s_C², and its derivatives in s₁ (minus the one in s₂) and in s_C."""
    difference = s1 - s2
    _, r, r_free = bounded(sc * sc, eps)
    value = difference * difference * r
    return value, 2.0 * difference * r, -2.0 * value * r_free * sc


@triton.jit
def eiou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    w1, w2, _, wc, _, _, _, _, _ = across
    h1, h2, _, hc, _, _, _, _, _ = down
    value, _, d_inter, d_union = overlap_loss(across, down, eps)
    distance, d_wc, d_hc, d_dx, d_dy = distance_loss(across, down, eps)
    width, d_w, d_width = side_loss(w1, w2, wc, eps)
    height, d_h, d_height = side_loss(h1, h2, hc, eps)
    value += distance + width + height
    return result(value, across, down, d_inter, d_union, d_wc + d_width, d_hc + d_height, d_w, d_h, -d_w, -d_h, d_dx, d_dy)
