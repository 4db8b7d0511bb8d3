"""The template of losses of overlapping regions. A region is a class of an image, or a class over the batch.

A loss supplies a formula f(I, P, Y, *hyper) → (L, ∂L/∂I, ∂L/∂P) of the sums I = Σ p y, P = Σ p, Y = Σ y over a region's pixels. The
template handles activation, targets, ignored pixels, class weights, reduction, a cross entropy beside it, and addressing. There are two
launches:

    sums        reads logits and target, adds up by program, image and batch in this order, and gives the loss and a = ∂L/∂I, b = ∂L/∂P
    gradient    reads both again: with h = a y + b (2 b p where squared), softmax gives p (h - Σ p h), sigmoid p (1 - p) h, none h

The cross entropy is one more sum of the first launch, Σ y (lse - x) or Σ softplus(x) - x y, with a coefficient e for each class. The second
launch then adds p Σ e y - e y, or e (p - y).

Losses that torch computes from a confusion matrix take its four sums in place of a loss: true and false positives, false and true
negatives. Then h = a y + b (1 - y). No sum is the difference of others, because a class of nearly all pixels leaves few negatives.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import END, longer
from lossforge.kernels.engine.reduce import Scaling, divided, over
from lossforge.kernels.masks.overlap.planes import (
    Images,
    Place,
    Region,
    labels_of,
    lanes,
    logit_tile,
    logits,
    rest_of,
    share_tile,
    swept_softmax,
    target_tile,
)
from lossforge.kernels.math import LOG2E, exp2, log, logistic, reciprocal


class Memory(NamedTuple):
    """What the first launch writes.

    Attributes:
        parts: (images × programs an image, SUMS, classes), then (images, SUMS, classes) with BATCH, then loss, ce and count, (images) each.
        ticket: counters of finished programs: one of all images, then one of each.
        out: (regions, classes - skip).
        total: 0-d.
        coefficients: see Region.
    """

    parts: Any
    ticket: Any
    out: Any
    total: Any
    coefficients: Any


class Loss(NamedTuple):
    """How a region's sums become its loss: a formula, times class weights and scale; and a cross entropy times ce_scale.

    formula: None with CONFUSION.
    """

    formula: Any
    hyper: Any
    weight_ptr: Any
    ce_scale: Any
    scaling: Scaling
    end: Any = END


@triton.jit
def terms(tile, y, labels, softmax, weight, MASKED: tl.constexpr, config):
    """Return each element's contribution to I, P and Y, and if asked for to the cross entropy and to the count of elements; or to the four
    sums of a confusion matrix.

    softmax: maximum, sum and rest of each pixel. weight: how much each element counts; None: wholly.
    """
    top, total, rest = softmax
    ce, count = y, y
    share, q = 1.0, y
    if MASKED:
        # an invalid class index makes its image's sums nan
        share = tl.where(labels.keep, tl.where(labels.valid, 1.0, float("nan")), 0.0)
    if config.SOFTMAX:
        p = exp2((tile - top) * LOG2E) * (reciprocal(total) * share)
        if config.CE:
            ce = tl.where(y == 0.0, 0.0, y * (top - tile + log(total)))
    elif config.SIGMOID:
        p, q, log1p = logistic(tile)
        p = p * share
        if config.CE:
            ce = (tl.where(tile >= 0, 1.0 - y, y) * tl.abs(tile) + log1p) * share
    else:
        p = tile * share
    if config.COUNT:
        count = tl.zeros_like(y) + share
    i = p * y
    if config.CONFUSION:
        if config.SOFTMAX:  # of a p above 1/2 the rest has more digits
            q = tl.where(p > 0.5, rest * reciprocal(total), 1.0 - p)
        elif not config.SIGMOID:
            q = 1.0 - p
        outside = (1.0 - y) * share
        p, y, ce = p * outside, q * y, q * outside
    if config.SQUARED:
        p, y = p * p, y * y
    if weight is not None:
        i, p, y, ce, count = i * weight, p * weight, y * weight, ce * weight, count * weight
    return i, p, y, ce, count


@triton.jit
def grouped(tile, V: tl.constexpr, ADJACENT: tl.constexpr):
    """Sum the V pixels that one lane reads, (BC, BP) to (BC, BP / V): neighbours if pixels are adjacent in memory, else every BP / V-th."""
    if ADJACENT:
        tile = tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // V, V]), 2)
    else:
        tile = tl.sum(tl.reshape(tile, [tile.shape[0], V, tile.shape[1] // V]), 1)
    return tile


@triton.jit
def add_tiles(sums, images, place, first):
    """Add the `terms` of tiles to `sums`, SUMS for each tile. The tiles hold all classes that their pixels' probabilities depend on."""
    S: tl.constexpr = images.config.SUMS
    MASKED: tl.constexpr = images.config.INDEX or place.inside is not None
    labels = labels_of(images, place)
    held, top, total = logits(images, place, labels.keep, first, "")
    rest = total
    if images.config.SOFTMAX and images.config.CONFUSION:
        rest = rest_of(held, top)
    added = ()
    for k in tl.static_range(len(images.config.HELD)):
        c = first + tl.arange(0, images.config.HELD[k])
        y = target_tile(images, place, labels, c)
        first += images.config.HELD[k]
        weight = share_tile(images, place, c) if images.config.MASK else None
        found = terms(held[k], y, labels, (top, total, rest), weight, MASKED, images.config)
        for s in tl.static_range(S):
            added = longer(added, sums[S * k + s] + grouped(found[s], images.config.V, images.config.ADJACENT))
    return added


@triton.jit
def sum_held(images, n, k, programs, pixels, mine):
    """Store the sums of image n's tiles k, k + programs, … at `mine`, (SUMS, classes). Only the last, partial tile has a mask."""
    BP: tl.constexpr = images.config.BP
    S: tl.constexpr = images.config.SUMS
    first = 0 if images.config.SOFTMAX else tl.program_id(1) * images.config.BC
    lane = lanes(images.config)
    full = pixels // BP
    sums = ()
    for at in tl.static_range(len(images.config.HELD)):
        for _ in tl.static_range(S):
            sums = longer(sums, tl.zeros([images.config.HELD[at], BP // images.config.V], tl.float32))
    for tile in range(k, full, programs):
        sums = add_tiles(sums, images, Place(n, tile * BP, lane, None), first)
    if (full * BP < pixels) & (full % programs == k):
        sums = add_tiles(sums, images, Place(n, full * BP + k * 0, lane, lane < pixels - full * BP), first)
    for at in tl.static_range(len(images.config.HELD)):
        c = first + tl.arange(0, images.config.HELD[at])
        first += images.config.HELD[at]
        for s in tl.static_range(S):
            tl.store(mine + s * images.classes + c, tl.sum(sums[S * at + s], 1), mask=c < images.classes)


@triton.jit
def sum_swept(images, n, k, programs, pixels, mine):
    """Store the same sums as sum_held, where a sweep over the classes is needed. The sums stay in memory, because there are too many."""
    lane = lanes(images.config)
    for tile in range(k, tl.cdiv(pixels, images.config.BP), programs):
        start = tile * images.config.BP
        place = Place(n, start, lane, start + lane < pixels)
        labels = labels_of(images, place)
        softmax = swept_softmax(images, place, labels.keep)
        for first in range(0, images.classes, images.config.BC):
            c = first + tl.arange(0, images.config.BC)
            before = c < tl.where(tile > k, images.classes, 0)  # in the interpreter a scalar condition joined with a block's is not a mask
            y = target_tile(images, place, labels, c)
            weight = share_tile(images, place, c) if images.config.MASK else None
            found = terms(logit_tile(images, place, c, labels.keep, ""), y, labels, softmax, weight, True, images.config)
            to = mine + c
            for s in tl.static_range(images.config.SUMS):
                tl.store(to, tl.load(to, mask=before, other=0.0) + tl.sum(found[s], 1), mask=c < images.classes)
                to += images.classes
        tl.debug_barrier()


@triton.jit
def added(parts, rows, stride, c, classes, S: tl.constexpr, BK: tl.constexpr):
    """Sum the entries c over `rows` rows, in their order, for each of S sums that follow each other. stride: between the rows."""
    sums = ()
    for s in tl.static_range(S):
        total = tl.zeros([c.shape[0]], tl.float32)
        for start in range(0, rows, BK):
            k = start + tl.arange(0, BK)
            at = parts + s * classes + k.to(tl.int64)[:, None] * stride + c[None, :]
            total += tl.sum(tl.load(at, mask=(k < rows)[:, None] & (c < classes)[None, :], other=0.0, cache_modifier=".cg"), 0)
        sums = longer(sums, total)
    return sums


@triton.jit
def settle(sums, region, c, scale, memory, loss, PRESENT: tl.constexpr):
    """Store loss and coefficients a and b of classes c of a region, with their weights and `scale`; return the sum of the losses."""
    i, p, y = sums[0], sums[1], sums[2]
    classes, skip = region.classes, region.skip
    value, by_i, by_p = loss.formula(i, p, y, *loss.hyper)
    here = (c >= skip) & (c < classes)
    counts = here
    if PRESENT:
        counts = here & ((y > 0.0) | (p != p))
    factor = scale
    if loss.weight_ptr is not None:
        factor = tl.load(loss.weight_ptr + c, mask=counts, other=0.0).to(tl.float32) * scale
    value = tl.where(counts, value * factor, 0.0)
    if memory.out is not None:
        tl.store(memory.out + region.number * (classes - skip) + c - skip, value, mask=here)
    at = region.coefficients_ptr + region.number * classes + c
    tl.store(at, tl.where(counts, by_i * factor, 0.0), mask=c < classes)
    tl.store(at + region.regions * classes, tl.where(counts, by_p * factor, 0.0), mask=c < classes)
    return tl.sum(value, 0)


@triton.jit
def settle_confusion(sums, region, c):
    """Store the four sums of classes c of a region."""
    to = region.coefficients_ptr + region.number * region.classes + c
    for s in tl.static_range(4):
        tl.store(to, sums[s], mask=c < region.classes)
        to += region.regions * region.classes


@triton.jit
def column_sum(at, rows, BLOCK: tl.constexpr):
    """Sum `rows` neighbouring numbers in their order. What is rounded off is added to the next number (Kahan), because they are similar."""
    parts = tl.zeros([BLOCK], tl.float32)
    excess = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        k = start + tl.arange(0, BLOCK)
        added = tl.load(at + k, mask=k < rows, other=0.0, cache_modifier=".cg") - excess
        sum = parts + added
        excess = (sum - parts) - added
        excess = tl.where(excess == excess, excess, 0.0)  # inf stays inf
        parts = sum
    return tl.sum(parts, 0)


@triton.jit
def class_weights(weight_ptr, c, classes):
    w = tl.where(c < classes, 1.0, 0.0)
    if weight_ptr is not None:
        w = tl.load(weight_ptr + c, mask=c < classes, other=0.0).to(tl.float32)
    return w


@triton.jit
def conclude(region, programs, memory, loss, config):
    """Finish image n, in its last program: add up its parts; for the last image also those of all images. Store loss and coefficients.

    region: with the image's number, also if regions extend over the batch.
    """
    S: tl.constexpr = config.SUMS
    scale = divided(loss.scaling.scale, loss.scaling.divisor_ptr, loss.scaling.EMPTY_IS_ZERO)
    n, images, classes = region.number, region.regions, region.classes
    of_image = memory.parts + n * programs * S * classes
    of_images = memory.parts + images.to(tl.int64) * programs * S * classes
    each = of_images
    if config.BATCH:
        each = of_images + images.to(tl.int64) * S * classes
    value, ce, count = 0.0, 0.0, 0.0
    for at in range(0, classes, config.BF):
        c = at + tl.arange(0, config.BF)
        sums = added(of_image, programs, S * classes, c, classes, S, config.BK)
        if config.BATCH:
            for s in tl.static_range(3 + config.CONFUSION):
                tl.store(of_images + (n * S + s) * classes + c, sums[s], mask=c < classes)
        elif config.CONFUSION:
            settle_confusion(sums, region, c)
        else:
            value += settle(sums, region, c, scale, memory, loss, config.PRESENT)
        if config.CE:
            w = class_weights(loss.weight_ptr, c, classes)
            ce += tl.sum(w * sums[3], 0)
            count += tl.sum(sums[4] if config.COUNT else w * sums[2], 0)
    tl.store(each + n, value)
    if config.CE:
        tl.store(each + images + n, ce)
        tl.store(each + 2 * images + n, count)
    tl.store(memory.ticket + 1 + n, 0)
    tl.debug_barrier()
    if tl.atomic_add(memory.ticket, 1, sem="acq_rel", scope="gpu") == images - 1:
        value = column_sum(each, images, config.BF)
        if config.BATCH:
            batch = Region(0, 1, classes, region.skip, region.coefficients_ptr, None)
            for at in range(0, classes, config.BF):
                c = at + tl.arange(0, config.BF)
                sums = added(of_images, images, S * classes, c, classes, 3 + config.CONFUSION, config.BK)
                if config.CONFUSION:
                    settle_confusion(sums, batch, c)
                else:
                    value += settle(sums, batch, c, scale, memory, loss, config.PRESENT)
        if config.CE:
            e = loss.ce_scale
            if config.COUNTED:
                e = over(loss.ce_scale, column_sum(each + 2 * images, images, config.BF), loss.scaling.EMPTY_IS_ZERO)
            value += e * column_sum(each + images, images, config.BF)
            regions = 1 if config.BATCH else images.to(tl.int64)
            for at in range(0, classes, config.BF):
                c = at + tl.arange(0, config.BF)
                w = class_weights(loss.weight_ptr, c, classes)
                tl.store(region.coefficients_ptr + regions * 2 * classes + c, e * w, mask=c < classes)
        tl.store(memory.total, value)
        tl.store(memory.ticket, 0)


@triton.jit(do_not_specialize=("images", "pixels", "inner", "first", "skip", "ignore"))
def overlap_kernel(x, target, mask, memory, loss, config, images, pixels, inner, classes, first, skip, ignore):
    """Store the sums of some tiles. The last program of an image finishes it.

    Args:
        x, target, mask: Planes; no mask is None.
        first: the class index of channel 0.
        skip: number of first classes to leave out.
    """
    programs = tl.num_programs(0) // images  # for each image
    program = tl.program_id(0).to(tl.int64)
    n = program // programs
    mine = memory.parts + program * config.SUMS * classes
    take: tl.constexpr = sum_held if len(config.HELD) > 0 else sum_swept
    take(Images(x, target, mask, None, classes, inner, first, ignore, config), n, program - n * programs, programs, pixels, mine)
    tl.debug_barrier()
    if tl.atomic_add(memory.ticket + 1 + n, 1, sem="acq_rel", scope="gpu") == programs * tl.num_programs(1) - 1:
        conclude(Region(n, images, classes, skip, memory.coefficients, None), programs, memory, loss, config)
