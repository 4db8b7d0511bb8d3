"""Device functions of both launches of the overlap template: softmax of tiles, an element's terms, what a gradient is made of."""

import triton
import triton.language as tl

from lossforge.kernels.math import LOG2E, exp2, log, logistic, reciprocal
from lossforge.kernels.overlap.planes import label_tile, logit_tile, pointers
from lossforge.kernels.row.rows import LOWEST


@triton.jit
def whole_softmax(tile):
    """Per pixel the maximum of the classes, and Σ exp(x - maximum), both (1, BP), of a tile that holds all classes."""
    top = tl.max(tile, 0)[None, :]
    return top, tl.sum(exp2((tile - top) * LOG2E), 0)[None, :]


@triton.jit
def swept_softmax(
    x, target, n, start, lane, inside, inner, first, ignore, classes, ALL: tl.constexpr, WIDE: tl.constexpr, BC: tl.constexpr
):
    """The same of classes that take several tiles."""
    BP: tl.constexpr = lane.shape[0]
    top = tl.full([1, BP], LOWEST, tl.float32)
    total = tl.zeros([1, BP], tl.float32)
    for at in range(0, classes, BC):
        c = at + tl.arange(0, BC)
        _, keep, _ = label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, ALL, WIDE)
        tile = logit_tile(x, n, start, lane, c, inside, keep, inner, classes, True, True, ALL, WIDE, "evict_last")
        higher = tl.maximum(top, tl.max(tile, 0)[None, :])
        total = total * exp2((top - higher) * LOG2E) + tl.sum(exp2((tile - higher) * LOG2E), 0)[None, :]
        top = higher
    return top, total


@triton.jit
def terms(
    tile,
    y,
    keep,
    valid,
    top,
    total,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    SQUARED: tl.constexpr,
    CE: tl.constexpr,
    COUNT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What each element adds to I, P, Y, the cross entropy and the count of elements; the last two only where asked for."""
    ce, count = y, y
    share = 1.0
    if MASKED:
        share = tl.where(keep, tl.where(valid, 1.0, float("nan")), 0.0)  # (1, BP): a pixel of no class makes its image's sums nan
    if SOFTMAX:
        p = exp2((tile - top) * LOG2E) * (reciprocal(total) * share)
        if CE:
            ce = tl.where(y == 0.0, 0.0, y * (top - tile + log(total)))
    elif SIGMOID:
        p, _, log1p = logistic(tile)
        p = p * share
        if CE:
            ce = (tl.maximum(tile, 0.0) - tile * y + log1p) * share
    else:
        p = tile * share
    if COUNT:
        count = tl.zeros_like(y) + share
    i = p * y
    if SQUARED:
        p, y = p * p, y * y
    return i, p, y, ce, count


@triton.jit
def grouped(tile, V: tl.constexpr, ADJACENT: tl.constexpr):
    """Sums of V pixels that one lane reads, (BC, BP) to (BC, BP / V): neighbours where pixels are adjacent in memory, else BP / V apart."""
    if ADJACENT:
        tile = tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // V, V]), 2)
    else:
        tile = tl.sum(tl.reshape(tile, [tile.shape[0], V, tile.shape[1] // V]), 1)
    return tile


@triton.jit
def coefficients_of(coefficients_ptr, up_ptr, region, regions, c, classes, skip, CE: tl.constexpr, EACH: tl.constexpr):
    """(a, b, e) of classes c in a region, or of one, times the upstream gradient."""
    at = coefficients_ptr + region * classes + c
    here = c < classes
    a = tl.load(at, mask=here, other=0.0)
    b = tl.load(at + regions * classes, mask=here, other=0.0)
    e = a
    if CE:
        e = tl.load(coefficients_ptr + 2 * regions * classes + c, mask=here, other=0.0)
    if up_ptr is not None:
        if EACH:
            up = tl.load(up_ptr + region * (classes - skip) + c - skip, mask=here & (c >= skip), other=0.0)
        else:
            up = tl.load(up_ptr)
        up = up.to(tl.float32)
        a, b, e = a * up, b * up, e * up
    return a, b, e


@triton.jit
def slope(p, y, a, b, SQUARED: tl.constexpr):
    """h = ∂L/∂p."""
    h = a * y + b
    if SQUARED:
        h = a * y + 2.0 * b * p
    return h


@triton.jit
def write(gradient, g, n, start, lane, c, inside, keep, inner, classes, MASKED: tl.constexpr, ALL: tl.constexpr, WIDE: tl.constexpr):
    if MASKED:
        g = tl.where(keep, g, 0.0)
    to = pointers(gradient, n, start, lane, c, inner, WIDE)
    if inside is not None:
        tl.store(to, g, mask=(c < classes)[:, None] & inside[None, :], eviction_policy="evict_first")
    elif ALL:
        tl.store(to, g, eviction_policy="evict_first")
    else:
        tl.store(to, g, mask=(c < classes)[:, None], eviction_policy="evict_first")
