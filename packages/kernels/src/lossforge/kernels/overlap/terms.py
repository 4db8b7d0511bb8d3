"""Device functions of both launches of the overlap template: softmax of tiles, an element's terms, what a gradient is made of."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.math import LOG2E, exp2, log, logistic, reciprocal
from lossforge.kernels.overlap.planes import label_tile, logit_tile
from lossforge.kernels.row.rows import LOWEST


class Region(NamedTuple):
    """One of `regions` regions, of all classes but `skip` at the front."""

    number: Any
    regions: Any
    classes: Any
    skip: Any


@triton.jit
def whole_softmax(tile):
    """Per pixel the maximum of the classes, and Σ exp(x - maximum), both (1, BP), of a tile that holds all classes."""
    top = tl.max(tile, 0)[None, :]
    return top, tl.sum(exp2((tile - top) * LOG2E), 0)[None, :]


@triton.jit
def swept_softmax(images, place):
    """The same of classes that take several tiles."""
    top = tl.full([1, images.config.BP], LOWEST, tl.float32)
    total = tl.zeros([1, images.config.BP], tl.float32)
    for at in range(0, images.classes, images.config.BC):
        c = at + tl.arange(0, images.config.BC)
        tile = logit_tile(images, place, c, label_tile(images, place, c).keep, "evict_last")
        higher = tl.maximum(top, tl.max(tile, 0)[None, :])
        total = total * exp2((top - higher) * LOG2E) + tl.sum(exp2((tile - higher) * LOG2E), 0)[None, :]
        top = higher
    return top, total


@triton.jit
def terms(tile, labels, top, total, MASKED: tl.constexpr, config):
    """What each element adds to I, P, Y, and where asked for to the cross entropy and the count of elements."""
    y = labels.y
    ce, count = y, y
    share = 1.0
    if MASKED:
        share = tl.where(labels.keep, tl.where(labels.valid, 1.0, float("nan")), 0.0)  # a pixel of no class makes its image's sums nan
    if config.SOFTMAX:
        p = exp2((tile - top) * LOG2E) * (reciprocal(total) * share)
        if config.CE:
            ce = tl.where(y == 0.0, 0.0, y * (top - tile + log(total)))
    elif config.SIGMOID:
        p, _, log1p = logistic(tile)
        p = p * share
        if config.CE:
            ce = (tl.maximum(tile, 0.0) - tile * y + log1p) * share
    else:
        p = tile * share
    if config.COUNT:
        count = tl.zeros_like(y) + share
    i = p * y
    if config.SQUARED:
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
def coefficients_of(coefficients, region, c, config):
    """(a, b, e) of classes c in a region, or of one, times the upstream gradient."""
    at = coefficients.ptr + region.number * region.classes + c
    here = c < region.classes
    a = tl.load(at, mask=here, other=0.0)
    b = tl.load(at + region.regions * region.classes, mask=here, other=0.0)
    e = a
    if config.CE:
        e = tl.load(coefficients.ptr + 2 * region.regions * region.classes + c, mask=here, other=0.0)
    if coefficients.grad_output_ptr is not None:
        if config.EACH:
            up = coefficients.grad_output_ptr + region.number * (region.classes - region.skip) + c - region.skip
            up = tl.load(up, mask=here & (c >= region.skip), other=0.0)
        else:
            up = tl.load(coefficients.grad_output_ptr)
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
