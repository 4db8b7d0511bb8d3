"""The overlap template for few classes under a softmax: a lane holds all classes of its pixels, one tile (1, BP) each.

A tile of all classes would be as high as the next power of two, and a pixel's classes would lie in several lanes that exchange their
maximum and sums. Here nothing is padded and nothing exchanged: of 21 classes the sums take 15 instructions a logit, not 36.
"""

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import longer
from lossforge.kernels.math import LOG2E, exp2, reciprocal
from lossforge.kernels.overlap.planes import index_tile, label_tile, logit_tile
from lossforge.kernels.overlap.terms import coefficients_of, grouped, slope, terms, write
from lossforge.kernels.row.rows import LOWEST


@triton.jit
def logits(x, target, n, start, lane, inside, inner, first, ignore, classes, WIDE: tl.constexpr, C: tl.constexpr, EVICT: tl.constexpr):
    """Logits of every class, the maximum and Σ exp(x - maximum) of each pixel, and what index_tile says of it: True of dense targets."""
    INDEX: tl.constexpr = target.ptr.dtype.element_ty.is_int()
    index, keep, valid = True, True, True
    if INDEX:
        index, keep, valid = index_tile(target, n, start, lane, inside, inner, first, ignore, classes, WIDE)
    elif inside is not None:
        keep, valid = inside[None, :], inside[None, :]
    held = ()
    for k in tl.static_range(C):
        c = tl.zeros([1], tl.int32) + k
        masked = INDEX or inside is not None
        held = longer(held, logit_tile(x, n, start, lane, c, inside, keep, inner, classes, True, masked, True, WIDE, EVICT))
    top = tl.full([1, lane.shape[0]], LOWEST, tl.float32)
    for k in tl.static_range(C):
        top = tl.maximum(top, held[k])
    total = tl.zeros([1, lane.shape[0]], tl.float32)
    for k in tl.static_range(C):
        total += exp2((held[k] - top) * LOG2E)
    return held, top, total, index, keep, valid


@triton.jit
def label(index, target, n, start, lane, c, inside, inner, first, ignore, classes, WIDE: tl.constexpr):
    """y of one class (1, BP)."""
    if target.ptr.dtype.element_ty.is_int():
        y = tl.where(index == (c + first)[:, None], 1.0, 0.0)
    else:
        y, _, _ = label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, True, WIDE)
    return y


@triton.jit
def add_classes(
    sums,
    x,
    target,
    n,
    start,
    lane,
    inside,
    inner,
    first,
    ignore,
    classes,
    SQUARED: tl.constexpr,
    CE: tl.constexpr,
    WIDE: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """`sums`, of every class I, P, Y and where asked for the cross entropy, (1, BP / V) each, with a tile's `terms` added."""
    MASKED: tl.constexpr = target.ptr.dtype.element_ty.is_int() or inside is not None
    S: tl.constexpr = 3 + CE
    held, top, total, index, keep, valid = logits(x, target, n, start, lane, inside, inner, first, ignore, classes, WIDE, C, "")
    added = ()
    for k in tl.static_range(C):
        c = tl.zeros([1], tl.int32) + k
        y = label(index, target, n, start, lane, c, inside, inner, first, ignore, classes, WIDE)
        i, p, y, ce, _ = terms(held[k], y, keep, valid, top, total, True, False, SQUARED, CE, False, MASKED)
        added = longer(added, sums[S * k] + grouped(i, V, True))
        added = longer(added, sums[S * k + 1] + grouped(p, V, True))
        added = longer(added, sums[S * k + 2] + grouped(y, V, True))
        if CE:
            added = longer(added, sums[S * k + 3] + grouped(ce, V, True))
    return added


@triton.jit
def sum_classes(
    x,
    target,
    mine,
    n,
    k,
    programs,
    pixels,
    inner,
    first,
    ignore,
    classes,
    SQUARED: tl.constexpr,
    CE: tl.constexpr,
    WIDE: tl.constexpr,
    BP: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """Store the sums of image n's tiles k, k + programs, … at `mine`, (S, classes)."""
    S: tl.constexpr = 3 + CE
    lane = tl.arange(0, BP)
    full = pixels // BP
    sums = ()
    for _ in tl.static_range(S * C):
        sums = longer(sums, tl.zeros([1, BP // V], tl.float32))
    for tile in range(k, full, programs):
        sums = add_classes(sums, x, target, n, tile * BP, lane, None, inner, first, ignore, classes, SQUARED, CE, WIDE, V, C)
    if (full * BP < pixels) & (full % programs == k):
        inside = lane < pixels - full * BP
        sums = add_classes(sums, x, target, n, full * BP + k * 0, lane, inside, inner, first, ignore, classes, SQUARED, CE, WIDE, V, C)
    for c in tl.static_range(C):
        for s in tl.static_range(S):
            tl.store(mine + s * classes + c, tl.sum(tl.sum(sums[S * c + s], 1), 0))


@triton.jit
def gradient_of_classes(
    x,
    target,
    gradient,
    coefficients_ptr,
    up_ptr,
    n,
    start,
    lane,
    inside,
    region,
    regions,
    inner,
    first,
    skip,
    ignore,
    classes,
    SQUARED: tl.constexpr,
    CE: tl.constexpr,
    EACH: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
):
    """As overlap_backward.tile_gradient."""
    MASKED: tl.constexpr = target.ptr.dtype.element_ty.is_int() or inside is not None
    held, top, total, index, keep, _ = logits(x, target, n, start, lane, inside, inner, first, ignore, classes, WIDE, C, "evict_first")
    share = reciprocal(total)
    dot = share * 0.0  # Σ p h, less what the cross entropy adds to every class
    for k in tl.static_range(C):
        c = tl.zeros([1], tl.int32) + k
        a, b, e = coefficients_of(coefficients_ptr, up_ptr, region, regions, k, classes, skip, CE, EACH)
        y = label(index, target, n, start, lane, c, inside, inner, first, ignore, classes, WIDE)
        p = exp2((held[k] - top) * LOG2E) * share
        dot += p * slope(p, y, a, b, SQUARED)
        if CE:
            dot -= e * y
    for k in tl.static_range(C):
        c = tl.zeros([1], tl.int32) + k
        a, b, e = coefficients_of(coefficients_ptr, up_ptr, region, regions, k, classes, skip, CE, EACH)
        y = label(index, target, n, start, lane, c, inside, inner, first, ignore, classes, WIDE)
        p = exp2((held[k] - top) * LOG2E) * share
        g = p * (slope(p, y, a, b, SQUARED) - dot)
        if CE:
            g -= e * y
        write(gradient, g, n, start, lane, c, inside, keep, inner, classes, MASKED, True, WIDE)
