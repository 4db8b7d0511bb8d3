"""Device functions of both launches of the overlap template: logits and their softmax over the classes, and what elements add to sums."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import longer
from lossforge.kernels.math import LOG2E, exp2, log, logistic, reciprocal
from lossforge.kernels.overlap.planes import logit_tile
from lossforge.kernels.row.rows import LOWEST


class Region(NamedTuple):
    """One of `regions` regions, of all classes but `skip` at the front.

    coefficients_ptr: a and b (regions, classes) each, then e (classes) where CE.
    """

    number: Any
    regions: Any
    classes: Any
    skip: Any
    coefficients_ptr: Any
    grad_output_ptr: Any


@triton.jit
def logits(images, place, keep, first, EVICT: tl.constexpr):
    """Tiles of classes from `first`; under a softmax the maximum of each pixel's classes, and Σ exp(x - maximum), both (1, BP)."""
    held = ()
    for k in tl.static_range(images.config.HELD):
        c = first + k * images.config.BC + tl.arange(0, images.config.BC)
        held = longer(held, logit_tile(images, place, c, keep, EVICT))
    top, total = 0.0, 1.0
    if images.config.SOFTMAX:
        top = tl.max(held[0], 0)[None, :]
        for k in tl.static_range(1, images.config.HELD):
            top = tl.maximum(top, tl.max(held[k], 0)[None, :])
        total = tl.sum(exp2((held[0] - top) * LOG2E), 0)[None, :]
        for k in tl.static_range(1, images.config.HELD):
            total += tl.sum(exp2((held[k] - top) * LOG2E), 0)[None, :]
    return held, top, total


@triton.jit
def swept_softmax(images, place, keep):
    """Maximum and Σ exp(x - maximum) of classes that take a sweep."""
    top = tl.full([1, images.config.BP], LOWEST, tl.float32)
    total = tl.zeros([1, images.config.BP], tl.float32)
    for first in range(0, images.classes, images.config.BC):
        tile = logit_tile(images, place, first + tl.arange(0, images.config.BC), keep, "evict_last")
        higher = tl.maximum(top, tl.max(tile, 0)[None, :])
        total = total * exp2((top - higher) * LOG2E) + tl.sum(exp2((tile - higher) * LOG2E), 0)[None, :]
        top = higher
    return top, total


@triton.jit
def terms(tile, y, labels, top, total, MASKED: tl.constexpr, config):
    """What each element adds to I, P, Y, and where asked for to the cross entropy and the count of elements."""
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
