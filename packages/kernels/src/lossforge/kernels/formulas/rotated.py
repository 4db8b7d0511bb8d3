"""What formulas of two rotated boxes (cx, cy, w, h, angle) share: their Gaussians, and the area that they share.

A box is the Gaussian of its centre and of Σ = R diag(w², h²) Rᵀ, up to the factor that each loss has. Of both covariances only the angle
δ between the boxes counts. With the sides a, b ordered so that (a₁ - b₁)(a₂ - b₂) ≥ 0, by turning the second box by 90° where they are not:

    det(Σ₁ + Σ₂) = (a₁² + a₂²)(b₁² + b₂²) + sin²δ (a₁² - b₁²)(a₂² - b₂²)
    tr (Σ₁ Σ₂)   = (a₁a₂)² + (b₁b₂)² - sin²δ (a₁² - b₁²)(a₂² - b₂²)

All terms of the first are at least 0, so that nothing cancels where boxes are nearly equal.
"""

import triton
import triton.language as tl

from lossforge.kernels.formulas.box import bounded, larger, smaller
from lossforge.kernels.math import LN2, log1p_unit


@triton.jit
def root(x, eps):
    """Return √x; below eps x/√eps, whose derivative is finite at 0."""
    return x / tl.sqrt(larger(x, eps))


@triton.jit
def log1p(x):
    """Return ln(1 + x) for x ≥ 0."""
    return tl.where(x < 1.0, log1p_unit(smaller(x, 1.0)), tl.log2(1.0 + x) * LN2)


@triton.jit
def sides(w1, h1, t1, w2, h2, t2, eps):
    """Return a₁, b₁, a₂, b₂ and sin²δ, with the sides of both boxes in one order. A side below eps counts as eps."""
    a1, b1 = larger(tl.abs(w1), eps), larger(tl.abs(h1), eps)
    a2, b2 = larger(tl.abs(w2), eps), larger(tl.abs(h2), eps)
    turned = (a1 - b1) * (a2 - b2) < 0.0
    sine = tl.where(turned, tl.cos(t1 - t2), tl.sin(t1 - t2))
    return a1, b1, tl.where(turned, b2, a2), tl.where(turned, a2, b2), sine * sine


@triton.jit
def between(s1, s2):
    """Return (s₁ - s₂)²/2s₁s₂ = (s₁² + s₂²)/2s₁s₂ - 1."""
    return 0.5 * ((s1 - s2) / s1) * ((s1 - s2) / s2)


@triton.jit
def spread(a1, b1, a2, b2, square):
    """Return det((Σ₁ + Σ₂)/2) / √(det Σ₁ det Σ₂) - 1. square: sin²δ."""
    across, down = between(a1, a2), between(b1, b2)
    turn = ((a1 - b1) / a1) * ((a1 + b1) / b1) * ((a2 - b2) / a2) * ((a2 + b2) / b2)
    return across + down + across * down + 0.25 * square * turn


@triton.jit
def within(x, limit):
    """Return x, at least -limit and at most limit."""
    return larger(smaller(x, limit), -limit)


@triton.jit
def surplus(s2, s1):
    """Return r² - 1 - ln r² of the ratio r of two sides: by its series near r = 1, where the difference would cancel."""
    u = ((s2 - s1) / s1) * ((s2 + s1) / s1)
    t = within(u, 0.125)
    series = 1 / 2 - t * (1 / 3 - t * (1 / 4 - t * (1 / 5 - t * (1 / 6 - t * (1 / 7 - t * (1 / 8 - t * (1 / 9)))))))
    return tl.where(tl.abs(u) < 0.125, t * t * series, u - 2.0 * LN2 * tl.log2(s2 / s1))


@triton.jit
def offset(x1, y1, x2, y2, angle):
    """Return the offset of the centres along the sides of a box of this angle."""
    dx, dy, c, s = x1 - x2, y1 - y2, tl.cos(angle), tl.sin(angle)
    return dx * c + dy * s, dy * c - dx * s


@triton.jit
def bhattacharyya(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps):
    """Return the distance of two boxes' Gaussians, whose covariances are R diag(w²/12, h²/12) Rᵀ."""
    a1, b1, a2, b2, square = sides(w1, h1, t1, w2, h2, t2, eps)
    v = spread(a1, b1, a2, b2, square)
    p1, q1 = offset(x1, y1, x2, y2, t1)
    p2, q2 = offset(x1, y1, x2, y2, t2)
    own_a2, own_b2 = larger(tl.abs(w2), eps), larger(tl.abs(h2), eps)
    of_1 = (p1 * p1 * (b1 / a1) + q1 * q1 * (a1 / b1)) / (a2 * b2)
    of_2 = (p2 * p2 * (own_b2 / own_a2) + q2 * q2 * (own_a2 / own_b2)) / (a1 * b1)
    return 0.75 * (of_1 + of_2) / (1.0 + v) + 0.5 * log1p(v)


@triton.jit
def column(x, y, dx, dy, half_w, half_h):
    """Return ∫ y dx along an edge from (x, y) to (x + dx, y + dy), where -half_w < x < half_w, with y kept in [-half_h, half_h]."""
    steep = tl.abs(dx) < 1e-30
    inverse = tl.where(steep, 0.0, 1.0 / tl.where(steep, 1.0, dx))
    start, end = within(x, half_w), within(x + dx, half_w)
    y1 = y + within((start - x) * inverse - 0.5, 0.5) * dy + 0.5 * dy
    y2 = y + within((end - x) * inverse - 0.5, 0.5) * dy + 0.5 * dy
    low, high = smaller(y1, y2), larger(y1, y2)
    inner_low, inner_high = within(low, half_h), within(high, half_h)
    below = smaller(high, -half_h) - smaller(low, -half_h)
    above = larger(high, half_h) - larger(low, half_h)
    flat = high - low < 1e-30
    mean = half_h * (above - below) + 0.5 * (inner_high - inner_low) * (inner_high + inner_low)
    mean = tl.where(flat, 0.5 * (inner_high + inner_low), mean / tl.where(flat, 1.0, high - low))
    return (end - start) * mean


@triton.jit
def shared_area(x, y, c, s, w1, h1, half_w, half_h):
    """Return the area that a box shares with one of half sides half_w, half_h, in whose frame its centre is (x, y) and its angle (c, s).

    It is the integral around the box of what `column` has: no list of corners, and continuous where edges lie on each other.
    """
    ux, uy, vx, vy = c * w1, s * w1, -s * h1, c * h1
    left, low = x - 0.5 * ux - 0.5 * vx, y - 0.5 * uy - 0.5 * vy
    right, high = x + 0.5 * ux + 0.5 * vx, y + 0.5 * uy + 0.5 * vy
    there = column(left, low, ux, uy, half_w, half_h) + column(left + ux, low + uy, vx, vy, half_w, half_h)
    back = column(right, high, -ux, -uy, half_w, half_h) + column(right - ux, high - uy, -vx, -vy, half_w, half_h)
    return larger(-(there + back), 0.0)


@triton.jit
def slab(x, dx, limit):
    """Return the first and last t in [-½, ½] with -limit < x + t dx < limit, and the share of this range that counts: ½ on the limit."""
    parallel = tl.abs(dx) < 1e-30
    step = tl.where(parallel, 1.0, dx)
    a, b = (limit - x) / step, (-limit - x) / step
    counts = tl.where(tl.abs(x) < limit, 1.0, tl.where(tl.abs(x) == limit, 0.5, 0.0))
    begin = tl.where(parallel, -0.5, larger(smaller(a, b), -0.5))
    return begin, tl.where(parallel, 0.5, smaller(larger(a, b), 0.5)), tl.where(parallel, counts, 1.0)


@triton.jit
def inner_edge(x, y, dx, dy, half_w, half_h):
    """Return the share of an edge about (x, y) that lies within a box about 0, and the first moment of that share about (x, y)."""
    begin_x, end_x, counts_x = slab(x, dx, half_w)
    begin_y, end_y, counts_y = slab(y, dy, half_h)
    begin, end = larger(begin_x, begin_y), smaller(end_x, end_y)
    share = larger(end - begin, 0.0) * (counts_x * counts_y)
    return share, 0.5 * share * (begin + end)


@triton.jit
def inner_edges(x, y, nx, ny, side, length, half_w, half_h):
    """Return the lengths of two edges, at side/2 and -side/2 along the normal n, within the box, and the first moment of each."""
    dx, dy = -ny * length, nx * length
    first, moment_1 = inner_edge(x + 0.5 * side * nx, y + 0.5 * side * ny, dx, dy, half_w, half_h)
    second, moment_2 = inner_edge(x - 0.5 * side * nx, y - 0.5 * side * ny, dx, dy, half_w, half_h)
    return first * length, second * length, moment_1 * length * length, moment_2 * length * length


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def rotated_iou(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps):
    """Compute 1 - I/U. An edge that moves outwards changes I by its length within the other box, from which all derivatives follow."""
    a1, b1, a2, b2 = tl.abs(w1), tl.abs(h1), tl.abs(w2), tl.abs(h2)
    c, s = tl.cos(t1 - t2), tl.sin(t1 - t2)
    x, y = offset(x1, y1, x2, y2, t2)
    right, left, moment_right, moment_left = inner_edges(x, y, c, s, a1, b1, 0.5 * a2, 0.5 * b2)
    top, bottom, moment_top, moment_bottom = inner_edges(x, y, -s, c, b1, a1, 0.5 * a2, 0.5 * b2)
    p, q = offset(x2, y2, x1, y1, t1)
    east, west, _, _ = inner_edges(p, q, c, -s, a2, b2, 0.5 * a1, 0.5 * b1)
    north, south, _, _ = inner_edges(p, q, s, c, b2, a2, 0.5 * a1, 0.5 * b1)
    disjoint = right + left + top + bottom + (east + west + north + south) == 0.0
    shared = tl.where(disjoint, 0.0 * (x + y), shared_area(x, y, c, s, a1, b1, 0.5 * a2, 0.5 * b2))
    union = a1 * b1 + (a2 * b2 - shared)
    kept, r, r_free = bounded(union, eps)
    value = (kept - shared) * r
    d_shared, d_area = -r - shared * r * r_free, shared * r * r_free
    gx, gy = (right - left) * c - (top - bottom) * s, (right - left) * s + (top - bottom) * c
    turn = moment_left - moment_right + (moment_bottom - moment_top)
    c2, s2 = tl.cos(t2), tl.sin(t2)
    dx, dy = d_shared * (gx * c2 - gy * s2), d_shared * (gx * s2 + gy * c2)
    d_w1 = sign(w1) * (0.5 * (right + left) * d_shared + d_area * b1)
    d_h1 = sign(h1) * (0.5 * (top + bottom) * d_shared + d_area * a1)
    d_w2 = sign(w2) * (0.5 * (east + west) * d_shared + d_area * b2)
    d_h2 = sign(h2) * (0.5 * (north + south) * d_shared + d_area * a2)
    d_t1, d_t2 = d_shared * turn, d_shared * (gx * y - gy * x - turn)
    return value, dx, dy, d_w1, d_h1, d_t1, -dx, -dy, d_w2, d_h2, d_t2
