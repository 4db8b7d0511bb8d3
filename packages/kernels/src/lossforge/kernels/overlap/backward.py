"""The second launch of the overlap template: the gradient at the logits, from the coefficients of the first."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.math import LOG2E, exp2, logistic, reciprocal
from lossforge.kernels.overlap.by_class import gradient_of_classes
from lossforge.kernels.overlap.planes import Images, Place, label_tile, logit_tile, store_gradient
from lossforge.kernels.overlap.terms import Region, coefficients_of, slope, swept_softmax, whole_softmax


class Coefficients(NamedTuple):
    """What the first launch stored, and the upstream gradient: 0-d, or (regions, classes - skip) where EACH; None for 1."""

    ptr: Any
    grad_output_ptr: Any


@triton.jit
def tile_gradient(images, place, c, region, coefficients):
    """Write the gradient of a tile with all classes that its pixels' probabilities depend on."""
    a, b, e = coefficients_of(coefficients, region, c, images.config)
    a, b, e = a[:, None], b[:, None], e[:, None]
    y, keep, _ = label_tile(images, place, c)
    tile = logit_tile(images, place, c, keep, "evict_first")
    if images.config.SOFTMAX:
        top, total = whole_softmax(tile)
        p = exp2((tile - top) * LOG2E) * reciprocal(total)
        h = slope(p, y, a, b, images.config.SQUARED)
        h = h - tl.sum(p * h, 0)[None, :]
        if images.config.CE:
            own = e * y
            h += tl.sum(own, 0)[None, :]
            g = p * h - own
        else:
            g = p * h
    elif images.config.SIGMOID:
        p, q, _ = logistic(tile)
        g = p * q * slope(p, y, a, b, images.config.SQUARED)
        if images.config.CE:
            g += e * (p - y)
    else:
        g = slope(tile, y, a, b, images.config.SQUARED)
    store_gradient(images, place, c, keep, g)


@triton.jit
def swept_gradient(images, place, region, coefficients):
    """Write the gradient of pixels whose classes take several tiles."""
    top, total = swept_softmax(images, place)
    share = reciprocal(total)
    dot = tl.zeros([1, images.config.BP], tl.float32)
    for sweep in tl.static_range(2):
        for at in range(0, images.classes, images.config.BC):
            c = at + tl.arange(0, images.config.BC)
            a, b, e = coefficients_of(coefficients, region, c, images.config)
            a, b, e = a[:, None], b[:, None], e[:, None]
            y, keep, _ = label_tile(images, place, c)
            tile = logit_tile(images, place, c, keep, "")
            p = exp2((tile - top) * LOG2E) * share
            h = slope(p, y, a, b, images.config.SQUARED)
            if sweep == 0:  # Σ p h, less what the cross entropy adds to every class
                dot += tl.sum(p * h, 0)[None, :]
                if images.config.CE:
                    dot -= tl.sum(e * y, 0)[None, :]
            else:
                g = p * (h - dot)
                if images.config.CE:
                    g -= e * y
                store_gradient(images, place, c, keep, g)


@triton.jit
def gradient(images, n, start, pixels, region, coefficients):
    """Write the gradient of image n's pixels from `start`; without masks where all of them exist."""
    lane = tl.arange(0, images.config.BP)
    take: tl.constexpr = gradient_of_classes if images.config.BY_CLASS else tile_gradient
    if images.config.ONE_TILE:
        c = 0 if images.config.BY_CLASS else tl.program_id(1) * images.config.BC + tl.arange(0, images.config.BC)
        if start + images.config.BP <= pixels:
            take(images, Place(n, start, lane, None), c, region, coefficients)
        else:
            take(images, Place(n, start, lane, start + lane < pixels), c, region, coefficients)
    else:
        swept_gradient(images, Place(n, start, lane, start + lane < pixels), region, coefficients)


@triton.jit(do_not_specialize=("images", "pixels", "inner", "first", "skip", "ignore"))
def overlap_backward_kernel(
    x,  # this, target and grad_input: Planes
    target,
    grad_input,
    coefficients,
    config,
    images,
    pixels,
    inner,
    classes,
    first,
    skip,
    ignore,
):
    # what the first launch read last is likelier still in the cache
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    n = program % images
    if config.BATCH:
        region = Region(n * 0, n * 0 + 1, classes, skip)
    else:
        region = Region(n, n * 0 + images, classes, skip)
    start = program // images * config.BP
    gradient(Images(x, target, grad_input, classes, inner, first, ignore, config), n, start, pixels, region, coefficients)
