"""The second launch of the overlap template: the gradient at the logits, from the coefficients that the first one computed."""

import triton
import triton.language as tl

from lossforge.kernels.masks.overlap.planes import (
    Images,
    Place,
    Region,
    labels_of,
    lanes,
    logit_tile,
    logits,
    share_tile,
    store_gradient,
    swept_softmax,
    target_tile,
)
from lossforge.kernels.math import LOG2E, exp2, logistic, reciprocal


@triton.jit
def coefficients_of(region, first, config, BC: tl.constexpr):
    """Return (a, b, e) of a tile's BC classes from `first` on, times the upstream gradient; scalars if the tile has one class."""
    c = first
    if BC > 1:
        c = first + tl.arange(0, BC)
    at = region.coefficients_ptr + region.number * region.classes + c
    here = c < region.classes
    a = tl.load(at, mask=here, other=0.0)
    b = tl.load(at + region.regions * region.classes, mask=here, other=0.0)
    e = a
    if config.CE:
        e = tl.load(region.coefficients_ptr + 2 * region.regions * region.classes + c, mask=here, other=0.0)
    if region.grad_output_ptr is not None:
        if config.EACH:
            up = region.grad_output_ptr + region.number * (region.classes - region.skip) + c - region.skip
            up = tl.load(up, mask=here & (c >= region.skip), other=0.0)
        else:
            up = tl.load(region.grad_output_ptr)
        up = up.to(tl.float32)
        a, b, e = a * up, b * up, e * up
    if BC > 1:
        a, b, e = a[:, None], b[:, None], e[:, None]
    return a, b, e


@triton.jit
def slope(p, y, a, b, config):
    """Return h = ∂L/∂p."""
    h = a * y + b
    if config.SQUARED:
        h = a * y + 2.0 * b * p
    if config.CONFUSION:  # a + b would lose the digits of a that are smaller than those of b
        h = a * y + b * (1.0 - y)
    return h


@triton.jit
def softmax_tile(images, place, pixels, sums, tile, first, region, STORE: tl.constexpr):
    """With STORE write the gradient of a tile. Without it add the tile to the sums of its pixels.

    p (h - Σ p h) would lose its digits where p is nearly 1. It is p (h - k - Σ p (h - k)) too, with h = k of the likeliest class, which
    then adds nothing to the sum.

    Args:
        pixels: their labels, the maximum, and 1 / Σ exp(x - maximum).
        sums: Σ p h of all but the likeliest class, less the cross entropy's Σ e y; Σ p of these; Σ h of the likeliest, of which there are
            several at a tie. With STORE the first is Σ p (h - k), the last k.
    """
    BC: tl.constexpr = tile.shape[0]
    labels, top, share = pixels
    dot, others, peak = sums
    c = first + tl.arange(0, BC)
    a, b, e = coefficients_of(region, first, images.config, BC)
    y = target_tile(images, place, labels, c)
    p = exp2((tile - top) * LOG2E) * share
    h = slope(p, y, a, b, images.config)
    if images.config.MASK:
        weight = share_tile(images, place, c)
        h, y = h * weight, y * weight
    if STORE:
        g = p * ((h - peak) - dot)
        if images.config.CE:
            g -= e * y
        store_gradient(images, place, c, labels.keep, g)
    else:
        likeliest = tile == top
        p = tl.where(likeliest, 0.0, p)
        dot += tl.sum(p * h, 0)[None, :]
        others += tl.sum(p, 0)[None, :]
        peak += tl.sum(tl.where(likeliest, h, 0.0), 0)[None, :]
        if images.config.CE:
            dot -= tl.sum(e * y, 0)[None, :]
    return dot, others, peak


@triton.jit
def softmax_gradient(images, place, region):
    """Write the gradient of pixels whose classes depend on each other."""
    labels = labels_of(images, place)
    if len(images.config.HELD) > 0:
        held, top, total = logits(images, place, labels.keep, 0, "evict_first")
    else:
        top, total, _ = swept_softmax(images, place, labels.keep)
    share = reciprocal(total)
    pixels = labels, top, share
    none = share * 0.0
    sums = none, none, none
    for sweep in tl.static_range(2):
        if sweep == 1:
            dot, others, peak = sums
            peak = peak / tl.floor((1.0 - others) / share + 0.5)  # by the number of the likeliest
            sums = dot - peak * others, others, peak
        if len(images.config.HELD) > 0:
            first = 0
            for k in tl.static_range(len(images.config.HELD)):
                sums = softmax_tile(images, place, pixels, sums, held[k], first, region, sweep == 1)
                first += images.config.HELD[k]
        else:
            for first in range(0, images.classes, images.config.BC):
                tile = logit_tile(images, place, first + tl.arange(0, images.config.BC), labels.keep, "")
                sums = softmax_tile(images, place, pixels, sums, tile, first, region, sweep == 1)


@triton.jit
def element_gradient(images, place, region):
    """Write the gradient of a tile under a sigmoid or without activation."""
    first = tl.program_id(1) * images.config.BC
    c = first + tl.arange(0, images.config.BC)
    a, b, e = coefficients_of(region, first, images.config, images.config.BC)
    labels = labels_of(images, place)
    y = target_tile(images, place, labels, c)
    tile = logit_tile(images, place, c, labels.keep, "evict_first")
    if images.config.SIGMOID:
        p, q, _ = logistic(tile)
        g = p * q * slope(p, y, a, b, images.config)
        if images.config.CE:
            g += e * (p - y)
    else:
        g = slope(tile, y, a, b, images.config)
    if images.config.MASK:
        g = g * share_tile(images, place, c)
    store_gradient(images, place, c, labels.keep, g)


@triton.jit(do_not_specialize=("images", "pixels", "inner", "first", "skip", "ignore"))
def overlap_backward_kernel(
    x, target, mask, grad_input, coefficients_ptr, grad_output_ptr, config, images, pixels, inner, classes, first, skip, ignore
):
    """Write the gradient of some pixels.

    Args:
        x, target, mask, grad_input: Planes; no mask is None.
        grad_output_ptr: 0-d, or (regions, classes - skip) where EACH; None for 1.
    """
    # start with what the first launch read last, because it is most likely still in the cache
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    n = program % images
    if config.BATCH:
        region = Region(n * 0, n * 0 + 1, classes, skip, coefficients_ptr, grad_output_ptr)
    else:
        region = Region(n, n * 0 + images, classes, skip, coefficients_ptr, grad_output_ptr)
    start = program // images * config.BP
    lane = lanes(config)
    take: tl.constexpr = softmax_gradient if config.SOFTMAX else element_gradient
    if len(config.HELD) > 0 and start + config.BP <= pixels:  # no masks where all pixels exist
        take(Images(x, target, mask, grad_input, classes, inner, first, ignore, config), Place(n, start, lane, None), region)
    else:
        inside = start + lane < pixels
        take(Images(x, target, mask, grad_input, classes, inner, first, ignore, config), Place(n, start, lane, inside), region)
