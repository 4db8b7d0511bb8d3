"""The second launch of the overlap template: the gradient at the logits, from the coefficients of the first."""

import triton
import triton.language as tl

from lossforge.kernels.math import LOG2E, exp2, logistic, reciprocal
from lossforge.kernels.overlap.by_class import gradient_of_classes
from lossforge.kernels.overlap.planes import label_tile, logit_tile
from lossforge.kernels.overlap.terms import coefficients_of, slope, swept_softmax, whole_softmax, write


@triton.jit
def tile_gradient(
    x,
    target,
    gradient,
    coefficients_ptr,
    up_ptr,
    n,
    start,
    lane,
    c,
    inside,
    region,
    regions,
    inner,
    first,
    skip,
    ignore,
    classes,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    SQUARED: tl.constexpr,
    CE: tl.constexpr,
    EACH: tl.constexpr,
    ALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the gradient of a tile with all classes that its pixels' probabilities depend on."""
    MASKED: tl.constexpr = target.ptr.dtype.element_ty.is_int() or inside is not None
    a, b, e = coefficients_of(coefficients_ptr, up_ptr, region, regions, c, classes, skip, CE, EACH)
    a, b, e = a[:, None], b[:, None], e[:, None]
    y, keep, _ = label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, ALL, WIDE)
    tile = logit_tile(x, n, start, lane, c, inside, keep, inner, classes, SOFTMAX, MASKED, ALL, WIDE, "evict_first")
    if SOFTMAX:
        top, total = whole_softmax(tile)
        p = exp2((tile - top) * LOG2E) * reciprocal(total)
        h = slope(p, y, a, b, SQUARED)
        h = h - tl.sum(p * h, 0)[None, :]
        if CE:
            own = e * y
            h += tl.sum(own, 0)[None, :]
            g = p * h - own
        else:
            g = p * h
    elif SIGMOID:
        p, q, _ = logistic(tile)
        g = p * q * slope(p, y, a, b, SQUARED)
        if CE:
            g += e * (p - y)
    else:
        g = slope(tile, y, a, b, SQUARED)
    write(gradient, g, n, start, lane, c, inside, keep, inner, classes, MASKED, ALL, WIDE)


@triton.jit(do_not_specialize=("images", "pixels", "inner", "first", "skip", "ignore"))
def overlap_backward_kernel(
    x,  # Planes
    target,
    gradient,
    coefficients_ptr,
    up_ptr,  # 0-d, or (regions, classes - skip) where EACH
    images,
    pixels,
    inner,
    classes,
    first,
    skip,
    ignore,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    SQUARED: tl.constexpr,
    BATCH: tl.constexpr,
    CE: tl.constexpr,
    EACH: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ALL: tl.constexpr,
    WIDE: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BY_CLASS: tl.constexpr,
):
    # what the first launch read last is likelier still in the cache
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    start = program // images * BP
    n = program % images
    if BATCH:
        region, regions = n * 0, n * 0 + 1
    else:
        region, regions = n, n * 0 + images
    lane = tl.arange(0, BP)
    # fmt: off
    if BY_CLASS:
        if start + BP <= pixels:
            gradient_of_classes(
                x, target, gradient, coefficients_ptr, up_ptr, n, start, lane, None, region, regions, inner, first, skip, ignore, classes,
                SQUARED, CE, EACH, WIDE, BC,
            )
        else:
            gradient_of_classes(
                x, target, gradient, coefficients_ptr, up_ptr, n, start, lane, start + lane < pixels, region, regions, inner, first, skip,
                ignore, classes, SQUARED, CE, EACH, WIDE, BC,
            )
    elif ONE_TILE:
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        if start + BP <= pixels:
            tile_gradient(
                x, target, gradient, coefficients_ptr, up_ptr, n, start, lane, c, None, region, regions, inner, first, skip, ignore,
                classes, SOFTMAX, SIGMOID, SQUARED, CE, EACH, ALL, WIDE,
            )
        else:
            tile_gradient(
                x, target, gradient, coefficients_ptr, up_ptr, n, start, lane, c, start + lane < pixels, region, regions, inner, first,
                skip, ignore, classes, SOFTMAX, SIGMOID, SQUARED, CE, EACH, ALL, WIDE,
            )
    # fmt: on
    else:
        inside = start + lane < pixels
        top, total = swept_softmax(x, target, n, start, lane, inside, inner, first, ignore, classes, ALL, WIDE, BC)
        share = reciprocal(total)
        dot = tl.zeros([1, BP], tl.float32)
        for sweep in tl.static_range(2):
            for at in range(0, classes, BC):
                c = at + tl.arange(0, BC)
                a, b, e = coefficients_of(coefficients_ptr, up_ptr, region, regions, c, classes, skip, CE, EACH)
                a, b, e = a[:, None], b[:, None], e[:, None]
                y, keep, _ = label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, ALL, WIDE)
                tile = logit_tile(x, n, start, lane, c, inside, keep, inner, classes, True, True, ALL, WIDE, "")
                p = exp2((tile - top) * LOG2E) * share
                h = slope(p, y, a, b, SQUARED)
                if sweep == 0:  # Σ p h, less what the cross entropy adds to every class
                    dot += tl.sum(p * h, 0)[None, :]
                    if CE:
                        dot -= tl.sum(e * y, 0)[None, :]
                else:
                    g = p * (h - dot)
                    if CE:
                        g -= e * y
                    write(gradient, g, n, start, lane, c, inside, keep, inner, classes, True, ALL, WIDE)
