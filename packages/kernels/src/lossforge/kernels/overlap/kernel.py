"""The template of losses of overlapping regions: one region an image and class, or a class over the batch.

A loss adds a formula f(I, P, Y, *hyper) → (L, ∂L/∂I, ∂L/∂P) of the sums I = Σ p y, P = Σ p, Y = Σ y over a region's pixels. Activation,
targets, ignored pixels, class weights, reduction, a cross entropy beside it, and addressing are the template's. Two launches:

    sums        reads logits and target, adds up by program, image and batch in this order, and gives the loss and a = ∂L/∂I, b = ∂L/∂P
    gradient    reads both again: with h = a y + b (2 b p where squared), softmax gives p (h - Σ p h), sigmoid p (1 - p) h, none h

The cross entropy is one more sum of the first launch, of y (lse - x) or of softplus(x) - x y, with its own coefficient e a class, by
which the second adds p Σ e y - e y or e (p - y).
"""

import triton
import triton.language as tl

from lossforge.kernels.engine.reduce import divided, over
from lossforge.kernels.overlap.by_class import sum_classes
from lossforge.kernels.overlap.planes import label_tile, logit_tile
from lossforge.kernels.overlap.terms import grouped, swept_softmax, terms, whole_softmax


@triton.jit
def tile_sums(
    x,
    target,
    n,
    start,
    lane,
    c,
    inside,
    inner,
    first,
    ignore,
    classes,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    SQUARED: tl.constexpr,
    CE: tl.constexpr,
    COUNT: tl.constexpr,
    ALL: tl.constexpr,
    WIDE: tl.constexpr,
    V: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """`terms` of a tile with all classes that its pixels' probabilities depend on, V pixels added up each."""
    MASKED: tl.constexpr = target.ptr.dtype.element_ty.is_int() or inside is not None
    y, keep, valid = label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, ALL, WIDE)
    tile = logit_tile(x, n, start, lane, c, inside, keep, inner, classes, SOFTMAX, MASKED, ALL, WIDE, "")
    top, total = 0.0, 1.0
    if SOFTMAX:
        top, total = whole_softmax(tile)
    i, p, y, ce, count = terms(tile, y, keep, valid, top, total, SOFTMAX, SIGMOID, SQUARED, CE, COUNT, MASKED)
    return (
        grouped(i, V, ADJACENT),
        grouped(p, V, ADJACENT),
        grouped(y, V, ADJACENT),
        grouped(ce, V, ADJACENT),
        grouped(count, V, ADJACENT),
    )


@triton.jit
def added(parts, rows, stride, c, classes, BK: tl.constexpr):
    """Σ over `rows` rows `stride` apart of the entries c, in their order."""
    total = tl.zeros([c.shape[0]], tl.float32)
    for start in range(0, rows, BK):
        k = start + tl.arange(0, BK)
        at = parts + k.to(tl.int64)[:, None] * stride + c[None, :]
        total += tl.sum(tl.load(at, mask=(k < rows)[:, None] & (c < classes)[None, :], other=0.0, cache_modifier=".cg"), 0)
    return total


@triton.jit
def settle(
    i,
    p,
    y,
    region,
    regions,
    c,
    weight_ptr,
    out_ptr,
    coefficients_ptr,
    hyper,
    scale,
    classes,
    skip,
    formula: tl.constexpr,
    PRESENT: tl.constexpr,
):
    """Loss of classes c of a region times their weights and `scale`, summed; stores each, and the coefficients a and b."""
    value, by_i, by_p = formula(i, p, y, *hyper)
    here = (c >= skip) & (c < classes)
    counts = here
    if PRESENT:
        counts = here & ((y > 0.0) | (p != p))
    factor = scale
    if weight_ptr is not None:
        factor = tl.load(weight_ptr + c, mask=counts, other=0.0).to(tl.float32) * scale
    value = tl.where(counts, value * factor, 0.0)
    if out_ptr is not None:
        tl.store(out_ptr + region * (classes - skip) + c - skip, value, mask=here)
    at = coefficients_ptr + region * classes + c
    tl.store(at, tl.where(counts, by_i * factor, 0.0), mask=c < classes)
    tl.store(at + regions * classes, tl.where(counts, by_p * factor, 0.0), mask=c < classes)
    return tl.sum(value, 0)


@triton.jit
def column_sum(at, rows, BLOCK: tl.constexpr):
    """Σ of `rows` neighbouring numbers, in their order; what a sum of many similar numbers rounds away is added to the next (Kahan)."""
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
def conclude(
    parts,
    ticket,
    out,
    total,
    coefficients,
    weight_ptr,
    divisor_ptr,
    hyper,
    scale,
    ce_scale,
    n,
    images,
    programs,
    classes,
    skip,
    S: tl.constexpr,
    formula: tl.constexpr,
    BATCH: tl.constexpr,
    PRESENT: tl.constexpr,
    CE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNTED: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    BF: tl.constexpr,
    BK: tl.constexpr,
):
    """By the last program of image n: add up the image's parts, and for the last image those of all, and give loss and coefficients."""
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    stride = S * classes
    of_image = parts + n * programs * stride
    of_images = parts + images.to(tl.int64) * programs * stride
    each = of_images
    if BATCH:
        each = of_images + images.to(tl.int64) * stride
    loss, ce, count = 0.0, 0.0, 0.0
    for at in range(0, classes, BF):
        c = at + tl.arange(0, BF)
        i = added(of_image, programs, stride, c, classes, BK)
        p = added(of_image + classes, programs, stride, c, classes, BK)
        y = added(of_image + 2 * classes, programs, stride, c, classes, BK)
        if BATCH:
            to = of_images + n * stride + c
            tl.store(to, i, mask=c < classes)
            tl.store(to + classes, p, mask=c < classes)
            tl.store(to + 2 * classes, y, mask=c < classes)
        else:
            loss += settle(i, p, y, n, images, c, weight_ptr, out, coefficients, hyper, scale, classes, skip, formula, PRESENT)
        if CE:
            w = class_weights(weight_ptr, c, classes)
            ce += tl.sum(w * added(of_image + 3 * classes, programs, stride, c, classes, BK), 0)
            if COUNT:
                count += tl.sum(added(of_image + 4 * classes, programs, stride, c, classes, BK), 0)
            else:
                count += tl.sum(w * y, 0)
    tl.store(each + n, loss)
    if CE:
        tl.store(each + images + n, ce)
        tl.store(each + 2 * images + n, count)
    tl.store(ticket + 1 + n, 0)
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == images - 1:
        value = column_sum(each, images, BF)
        if BATCH:
            for at in range(0, classes, BF):
                c = at + tl.arange(0, BF)
                i = added(of_images, images, stride, c, classes, BK)
                p = added(of_images + classes, images, stride, c, classes, BK)
                y = added(of_images + 2 * classes, images, stride, c, classes, BK)
                value += settle(i, p, y, 0, 1, c, weight_ptr, out, coefficients, hyper, scale, classes, skip, formula, PRESENT)
        if CE:
            e = ce_scale
            if COUNTED:
                e = over(ce_scale, column_sum(each + 2 * images, images, BF), EMPTY_IS_ZERO)
            value += e * column_sum(each + images, images, BF)
            behind = coefficients + 2 * classes
            if not BATCH:
                behind = coefficients + images.to(tl.int64) * 2 * classes
            for at in range(0, classes, BF):
                c = at + tl.arange(0, BF)
                tl.store(behind + c, e * class_weights(weight_ptr, c, classes), mask=c < classes)
        tl.store(total, value)
        tl.store(ticket, 0)


@triton.jit(do_not_specialize=("images", "pixels", "inner", "first", "skip", "ignore"))
def overlap_kernel(
    x,  # Planes
    target,
    parts,  # (images × programs an image, S, classes), then (images, S, classes) where BATCH, then loss, ce and count (images) each
    ticket,  # finished programs: of all images, of each
    out,  # (regions, classes - skip)
    total,
    coefficients,  # a and b (regions, classes) each, then e (classes) where CE
    weight_ptr,
    divisor_ptr,
    hyper,
    scale,
    ce_scale,
    images,
    pixels,
    inner,
    classes,
    first,  # the class index of channel 0
    skip,  # classes left out at the front
    ignore,
    formula: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    SQUARED: tl.constexpr,
    BATCH: tl.constexpr,  # regions reach over all images
    PRESENT: tl.constexpr,  # only classes that have target pixels count
    CE: tl.constexpr,
    COUNT: tl.constexpr,  # the elements not ignored are one of the S sums
    COUNTED: tl.constexpr,  # ce_scale is divided by the count, or by the class weights of the pixels not ignored
    EMPTY_IS_ZERO: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ALL: tl.constexpr,  # classes fill their tiles
    WIDE: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    V: tl.constexpr,
    ADJACENT: tl.constexpr,
    BY_CLASS: tl.constexpr,  # a lane holds V pixels with all their classes, BC
    BF: tl.constexpr,
    BK: tl.constexpr,
):
    S: tl.constexpr = 3 + CE + COUNT
    programs = tl.num_programs(0) // images  # an image
    program = tl.program_id(0).to(tl.int64)
    n = program // programs
    k = program - n * programs
    lane = tl.arange(0, BP)
    mine = parts + program * S * classes
    full = pixels // BP
    if BY_CLASS:
        sum_classes(x, target, mine, n, k, programs, pixels, inner, first, ignore, classes, SQUARED, CE, WIDE, BP, V, BC)
    elif ONE_TILE:
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        i = tl.zeros([BC, BP // V], tl.float32)
        p, y, ce, count = i, i, i, i
        # fmt: off
        for tile in range(k, full, programs):
            i_, p_, y_, ce_, count_ = tile_sums(
                x, target, n, tile * BP, lane, c, None, inner, first, ignore, classes,
                SOFTMAX, SIGMOID, SQUARED, CE, COUNT, ALL, WIDE, V, ADJACENT,
            )
            i, p, y, ce, count = i + i_, p + p_, y + y_, ce + ce_, count + count_
        if (full * BP < pixels) & (full % programs == k):
            i_, p_, y_, ce_, count_ = tile_sums(
                x, target, n, full * BP + k * 0, lane, c, lane < pixels - full * BP, inner, first, ignore, classes,
                SOFTMAX, SIGMOID, SQUARED, CE, COUNT, ALL, WIDE, V, ADJACENT,
            )
            i, p, y, ce, count = i + i_, p + p_, y + y_, ce + ce_, count + count_
        # fmt: on
        tl.store(mine + c, tl.sum(i, 1), mask=c < classes)
        tl.store(mine + classes + c, tl.sum(p, 1), mask=c < classes)
        tl.store(mine + 2 * classes + c, tl.sum(y, 1), mask=c < classes)
        if CE:
            tl.store(mine + 3 * classes + c, tl.sum(ce, 1), mask=c < classes)
        if COUNT:
            tl.store(mine + 4 * classes + c, tl.sum(count, 1), mask=c < classes)
    else:  # sums of so many classes stay in memory
        for tile in range(k, tl.cdiv(pixels, BP), programs):
            start = tile * BP
            inside = start + lane < pixels
            top, sum = swept_softmax(x, target, n, start, lane, inside, inner, first, ignore, classes, ALL, WIDE, BC)
            for at in range(0, classes, BC):
                c = at + tl.arange(0, BC)
                before = c < tl.where(tile > k, classes, 0)  # a lone condition joined with a block's is no mask in the interpreter
                y, keep, valid = label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, ALL, WIDE)
                x_tile = logit_tile(x, n, start, lane, c, inside, keep, inner, classes, True, True, ALL, WIDE, "")
                i, p, y, ce, _ = terms(x_tile, y, keep, valid, top, sum, True, False, SQUARED, CE, False, True)
                to = mine + c
                tl.store(to, tl.load(to, mask=before, other=0.0) + tl.sum(i, 1), mask=c < classes)
                to += classes
                tl.store(to, tl.load(to, mask=before, other=0.0) + tl.sum(p, 1), mask=c < classes)
                to += classes
                tl.store(to, tl.load(to, mask=before, other=0.0) + tl.sum(y, 1), mask=c < classes)
                if CE:
                    to += classes
                    tl.store(to, tl.load(to, mask=before, other=0.0) + tl.sum(ce, 1), mask=c < classes)
            tl.debug_barrier()

    tl.debug_barrier()
    if tl.atomic_add(ticket + 1 + n, 1, sem="acq_rel", scope="gpu") == programs * tl.num_programs(1) - 1:
        # fmt: off
        conclude(
            parts, ticket, out, total, coefficients, weight_ptr, divisor_ptr, hyper, scale, ce_scale, n, images, programs, classes, skip, S,
            formula, BATCH, PRESENT, CE, COUNT, COUNTED, EMPTY_IS_ZERO, BF, BK,
        )
        # fmt: on
