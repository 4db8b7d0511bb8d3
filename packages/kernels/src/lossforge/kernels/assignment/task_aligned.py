"""Task-aligned assignment of boxes to anchors, by three kernels, or four. None keeps a value for each pair of anchor and box.

choose    a program for each box: the k anchors inside it with the best alignment sᵅ uᵝ, s the score of the box's class, u the
          overlap of the box with the anchor's predicted box
resolve   a program for each block of anchors: an anchor that several boxes chose goes to the one that overlaps it most. The boxes
          keep the best alignment and overlap among their anchors, by maxima of integers, whose order changes nothing
narrow    a program for each box, where it may keep only some of its anchors: those with the best alignment
complete  a program for each block of anchors: the targets, scaled so that a box's best anchor has its best overlap
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.assignment.calls import Numbers
from lossforge.kernels.boxes.pairwise import formula, load_boxes
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import Strided, as_strided, constants
from lossforge.kernels.formulas.rotated import offset
from lossforge.kernels.math import logistic, power


class Scores(NamedTuple):
    """Scores (B, A, C), by their strides. LOGITS: before the sigmoid."""

    ptr: Any
    s0: int
    s1: int
    s2: int
    LOGITS: bool


class Given(NamedTuple):
    """Predictions (B, A, WIDTH), anchors (1, A, 2), and the boxes to assign (B, G, WIDTH) with label and mask (B, G) of each.

    WIDTH: 4 for corners, 5 for rotated boxes (cx, cy, w, h, angle).
    """

    scores: Scores
    predicted: Strided
    anchors: Strided
    labels: Strided
    targets: Strided
    mask: Strided
    WIDTH: int


class Chosen(NamedTuple):
    """What the kernels leave for each other: each box's anchors (B, G, PLACES), and the bits of its best alignment and overlap (B, G)."""

    anchors_ptr: Any
    alignment_ptr: Any
    overlap_ptr: Any
    PLACES: int


class Assigned(NamedTuple):
    """What is written for each anchor."""

    labels_ptr: Any
    boxes_ptr: Any
    scores_ptr: Any
    quality_ptr: Any
    foreground_ptr: Any
    index_ptr: Any


NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""The key of an anchor that cannot be chosen."""
CHOOSE, RESOLVE, COMPLETE = 1024, 128, 32
"""Anchors of a tile."""
CLASSES = 32
"""Classes of a tile, at most."""


def assign(
    scores: Tensor, boxes: Tensor, anchors: Tensor, labels: Tensor, targets: Tensor, mask: Tensor, numbers: Numbers
) -> tuple[Tensor, ...]:
    """Return labels, boxes, scores, quality, foreground and index of each anchor; no elements in scores unless they are asked for."""
    (batch, count, classes), (_, several, width) = scores.shape, targets.shape
    places = triton.next_power_of_2(numbers.topk)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return new_like(scores, (shape, dtype))

    s0, s1, s2 = scores.stride()
    given = Given(
        constants(Scores(scores, s0, s1, s2, numbers.logits)),
        as_strided(boxes),
        Strided(anchors, 0, *anchors.stride()),
        as_strided(labels),
        as_strided(targets),
        as_strided(mask),
        tl.constexpr(width),
    )
    bits = new(torch.int32, batch, several), new(torch.int32, batch, several)
    chosen = constants(Chosen(new(torch.int32, batch, several, places), *bits, places))
    of_anchor = (batch, count)
    found = (
        new(torch.int64, *of_anchor),
        new(targets.dtype, *of_anchor, width),
        new(scores.dtype, *of_anchor, classes) if numbers.dense else new(scores.dtype, 0),
        new(torch.float32, *of_anchor),
        new(torch.bool, *of_anchor),
        new(torch.int64, *of_anchor),
    )
    assigned = Assigned(*found)._replace(scores_ptr=found[2] if numbers.dense else None)
    sizes, exponents = (several, count, classes), (numbers.alpha, numbers.beta, numbers.margin, numbers.min_side)
    similarity, inside = formula(numbers.iou), not numbers.tood
    choose = (given, chosen, *sizes, numbers.topk, *exponents)
    Launch(choose_kernel, (batch * several,), choose, similarity=similarity, INSIDE=inside, BLOCK=CHOOSE, num_warps=4).start()
    resolve = (given, chosen, assigned, *sizes, *exponents)
    grid = (batch * triton.cdiv(count, RESOLVE),)
    Launch(resolve_kernel, grid, resolve, similarity=similarity, ANY=inside, BLOCK=RESOLVE, num_warps=4).start()
    if numbers.topk2:
        narrow = (given, chosen, assigned, *sizes, numbers.topk2)
        kept = triton.next_power_of_2(numbers.topk2)
        Launch(narrow_kernel, (batch * several,), narrow, similarity=similarity, PLACES=kept, BLOCK=CHOOSE, num_warps=4).start()
    columns = min(triton.next_power_of_2(classes), CLASSES)
    complete = (given, chosen, assigned, *sizes, numbers.eps)
    grid = (batch * triton.cdiv(count, COMPLETE),)
    Launch(complete_kernel, grid, complete, BLOCK=COMPLETE, CLASSES=columns, num_warps=4).start()
    return found


@triton.jit
def load_numbers(t, batch, i, mask, WIDTH: tl.constexpr):
    """Load the numbers of the boxes `i` in float32, 0 outside of the mask; the angle is 0 where boxes are corners."""
    a, b, c, d = load_boxes(t, batch, i, mask, False)
    e = a * 0.0
    if WIDTH == 5:
        e = tl.load(t.ptr + batch * t.s0 + i.to(tl.int64) * t.s1 + 4 * t.s2, mask=mask, other=0.0).to(tl.float32)
    return a, b, c, d, e


@triton.jit
def load_target(given, batch, g, classes):
    """Return the numbers of box g, its class, and whether it counts: it is not padding, and its class exists."""
    there = tl.load(given.mask.ptr + batch * given.mask.s0 + g * given.mask.s1).to(tl.int32) != 0
    label = tl.load(given.labels.ptr + batch * given.labels.s0 + g * given.labels.s1).to(tl.int64)
    box = load_numbers(given.targets, batch, g, g >= 0, given.WIDTH)
    return box, label, there & (label >= 0) & (label < classes)


@triton.jit
def load_points(given, a, mask):
    first = given.anchors.ptr + a.to(tl.int64) * given.anchors.s1
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(first + given.anchors.s2, mask=mask, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def grown(low, high, least):
    """Return the ends of a side; a side shorter than `least` is lengthened to it around its centre."""
    center, short = (low + high) * 0.5, high - low < least
    return tl.where(short, center - 0.5 * least, low), tl.where(short, center + 0.5 * least, high)


@triton.jit
def is_inside(given, x, y, box, margin, least):
    """Return whether points lie in a box, further than `margin` from its sides, of which none counts as shorter than `least`."""
    a, b, c, d, e = box
    if given.WIDTH == 5:
        along, across = offset(x, y, a, b, e)
        half_w, half_h = 0.5 * tl.maximum(c, least), 0.5 * tl.maximum(d, least)
        inside = (half_w - tl.abs(along) > margin) & (half_h - tl.abs(across) > margin)
    else:
        a, c = grown(a, c, least)
        b, d = grown(b, d, least)
        inside = (x - a > margin) & (y - b > margin) & (c - x > margin) & (d - y > margin)
    return inside


@triton.jit
def spread(x, a):
    """Return the number in the shape of `a`, because formulas compare tensors of one shape."""
    return tl.broadcast_to(x, a.shape)


@triton.jit
def overlap_of(given, batch, i, mask, box, similarity: tl.constexpr):
    """Return how much boxes overlap with those that the anchors i predict; 0 where they do not, or where a prediction is nan."""
    p, q, r, s, t = load_numbers(given.predicted, batch, i, mask, given.WIDTH)
    a, b, c, d, e = box
    a, b, c, d, e = spread(a, i), spread(b, i), spread(c, i), spread(d, i), spread(e, i)
    if given.WIDTH == 5:
        value = similarity(a, b, c, d, e, p, q, r, s, t, 1e-7)
    else:
        value = similarity(a, b, c, d, p, q, r, s, 1e-7)
    return tl.where(mask & (value > 0.0), value, 0.0)


@triton.jit
def alignment_of(given, batch, a, label, mask, overlap, alpha, beta):
    """Return sᵅ uᵝ; 0 where s or u is, or where s is nan."""
    where = given.scores.ptr + batch * given.scores.s0 + a.to(tl.int64) * given.scores.s1 + label * given.scores.s2
    s = tl.load(where, mask=mask & (overlap > 0.0), other=0.0).to(tl.float32)
    if given.scores.LOGITS:
        s, _, _ = logistic(s)
    some = mask & (overlap > 0.0) & (s > 0.0)
    return tl.where(some, power(s, alpha) * power(overlap, beta), 0.0)


@triton.jit
def key_of(alignment, a, mask):
    """Return numbers in the order of the choice: the alignment's bits above, the anchor's number below, the first being the largest."""
    key = (alignment.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - a).to(tl.int64)
    return tl.where(mask & (alignment > 0.0), key, NOTHING)


@triton.jit
def no_best(place, k, PLACES: tl.constexpr):
    """Return the keys of k places that nothing took yet. Places beyond k are never free."""
    return tl.where(place < k, place.to(tl.int64) - PLACES, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def with_best(best, key):
    """Return the best keys, of those that have a place and of a block's."""
    top, worst = tl.max(key, 0), tl.min(best, 0)
    while top > worst:
        best = tl.where(best == worst, top, best)
        key = tl.where(key == top, NOTHING, key)
        top, worst = tl.max(key, 0), tl.min(best, 0)
    return best


@triton.jit
def anchors_of(best, place, k):
    """Return the anchors of the best keys, and which places have one."""
    found = (place < k) & (best >= 0)
    return tl.where(found, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), -1), found


@triton.jit(do_not_specialize=("boxes", "anchors", "classes", "k", "alpha", "beta", "margin", "least"))
def choose_kernel(
    given,
    chosen,
    boxes,
    anchors,
    classes,
    k,
    alpha,
    beta,
    margin,
    least,
    similarity: tl.constexpr,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the anchors of a box.

    Args:
        boxes: of an image.
        INSIDE: the k best are those of the anchors inside, else of all, of which those outside are left out afterwards.
    """
    program = tl.program_id(0).to(tl.int64)
    batch, g = program // boxes, program % boxes
    box, label, counts = load_target(given, batch, g, classes)
    place = tl.arange(0, chosen.PLACES)
    best = no_best(place, k, chosen.PLACES)
    end = tl.where(counts, anchors, 0)
    for start in range(0, end, BLOCK):
        a = start + tl.arange(0, BLOCK)
        mask = a < anchors
        if INSIDE:
            x, y = load_points(given, a, mask)
            mask = mask & is_inside(given, x, y, box, margin, least)
        if tl.max(mask.to(tl.int32), 0) > 0:
            u = overlap_of(given, batch, a, mask, box, similarity)
            alignment = alignment_of(given, batch, a, label, mask, u, alpha, beta)
            best = with_best(best, key_of(alignment, a, mask))
    anchor, found = anchors_of(best, place, k)
    if not INSIDE:
        x, y = load_points(given, anchor, found)
        anchor = tl.where(found & is_inside(given, x, y, box, margin, least), anchor, -1)
    tl.store(chosen.anchors_ptr + program * chosen.PLACES + place, anchor)
    tl.store(chosen.alignment_ptr + program, 0)
    tl.store(chosen.overlap_ptr + program, 0)


@triton.jit(do_not_specialize=("boxes", "anchors", "classes", "alpha", "beta", "margin", "least"))
def resolve_kernel(
    given,
    chosen,
    assigned,
    boxes,
    anchors,
    classes,
    alpha,
    beta,
    margin,
    least,
    similarity: tl.constexpr,
    ANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give each anchor of a block to one box.

    Args:
        ANY: an anchor that several boxes chose goes to any box that it lies in, else to one of those that chose it.
    """
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(anchors, BLOCK)
    batch = program // across
    start = (program % across).to(tl.int32) * BLOCK
    a = start + tl.arange(0, BLOCK)
    inside = a < anchors
    place = tl.arange(0, chosen.PLACES)
    times = tl.zeros([BLOCK], tl.int32)
    index = times - 1
    most = tl.zeros([BLOCK], tl.float32)
    for g in range(boxes):
        anchor = tl.load(chosen.anchors_ptr + (batch * boxes + g) * chosen.PLACES + place)
        if tl.max(((anchor >= start) & (anchor < start + BLOCK)).to(tl.int32), 0) > 0:
            chose = tl.max((anchor[None, :] == a[:, None]).to(tl.int32), 1) > 0
            times += chose.to(tl.int32)
            box, _, _ = load_target(given, batch, batch * 0 + g, classes)
            u = overlap_of(given, batch, a, chose, box, similarity)
            better = chose & ((u > most) | (index < 0))
            index, most = tl.where(better, g, index), tl.where(better, u, most)
    several = times > 1
    if ANY:
        if tl.max(several.to(tl.int32), 0) > 0:
            x, y = load_points(given, a, inside)
            index, most = tl.where(several, -1, index), tl.where(several, 0.0, most)
            for g in range(boxes):
                box, _, counts = load_target(given, batch, batch * 0 + g, classes)
                within = several & counts & is_inside(given, x, y, box, margin, least)
                if tl.max(within.to(tl.int32), 0) > 0:
                    u = overlap_of(given, batch, a, within, box, similarity)
                    better = within & ((u > most) | (index < 0))
                    index, most = tl.where(better, g, index), tl.where(better, u, most)
    has = inside & (index >= 0)
    where = batch * boxes + tl.where(has, index, 0)
    label = tl.load(given.labels.ptr + batch * given.labels.s0 + index * given.labels.s1, mask=has, other=0).to(tl.int64)
    alignment = alignment_of(given, batch, a, label, has, most, alpha, beta)
    # of positive numbers the bits are in the order of the values
    tl.atomic_max(chosen.alignment_ptr + where, alignment.to(tl.int32, bitcast=True), mask=has)
    tl.atomic_max(chosen.overlap_ptr + where, most.to(tl.int32, bitcast=True), mask=has)
    out = batch * anchors + a
    tl.store(assigned.quality_ptr + out, alignment, mask=inside)
    tl.store(assigned.index_ptr + out, index.to(tl.int64), mask=inside)
    tl.store(assigned.labels_ptr + out, tl.where(has, label, -1), mask=inside)
    tl.store(assigned.foreground_ptr + out, has, mask=inside)


@triton.jit
def owned(assigned, batch, g, anchors, a):
    """Return which anchors box g has, and their keys. `quality` holds alignments still."""
    mine = tl.load(assigned.index_ptr + batch * anchors + a, mask=a < anchors, other=-1) == g
    alignment = tl.load(assigned.quality_ptr + batch * anchors + a, mask=mine, other=0.0)
    return mine, key_of(alignment, a, mine)


@triton.jit(do_not_specialize=("boxes", "anchors", "classes", "k"))
def narrow_kernel(
    given,
    chosen,
    assigned,
    boxes,
    anchors,
    classes,
    k,
    similarity: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Let a box keep the k of its anchors with the best alignment, and its largest overlap be one of theirs."""
    program = tl.program_id(0).to(tl.int64)
    batch, g = program // boxes, program % boxes
    box, _, counts = load_target(given, batch, g, classes)
    place = tl.arange(0, PLACES)
    best = no_best(place, k, PLACES)
    end = tl.where(counts, anchors, 0)
    for start in range(0, end, BLOCK):
        a = start + tl.arange(0, BLOCK)
        mine, key = owned(assigned, batch, g, anchors, a)
        best = with_best(best, key)
    worst = tl.min(best, 0)
    for start in range(0, end, BLOCK):
        a = start + tl.arange(0, BLOCK)
        mine, key = owned(assigned, batch, g, anchors, a)
        dropped = mine & (key < worst)
        if tl.max(dropped.to(tl.int32), 0) > 0:
            out = batch * anchors + a
            tl.store(assigned.index_ptr + out, tl.full([BLOCK], -1, tl.int64), mask=dropped)
            tl.store(assigned.labels_ptr + out, tl.full([BLOCK], -1, tl.int64), mask=dropped)
            tl.store(assigned.foreground_ptr + out, mine & (key >= worst), mask=dropped)
    anchor, found = anchors_of(best, place, k)
    overlap = overlap_of(given, batch, anchor, found, box, similarity)
    tl.store(chosen.overlap_ptr + program, tl.max(overlap, 0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=("boxes", "anchors", "classes", "eps"))
def complete_kernel(given, chosen, assigned, boxes, anchors, classes, eps, BLOCK: tl.constexpr, CLASSES: tl.constexpr):
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(anchors, BLOCK)
    batch = program // across
    a = (program % across).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    inside = a < anchors
    out = batch * anchors + a
    index = tl.load(assigned.index_ptr + out, mask=inside, other=-1).to(tl.int32)
    has = index >= 0
    where = batch * boxes + tl.where(has, index, 0)
    alignment = tl.load(assigned.quality_ptr + out, mask=inside, other=0.0)
    largest = tl.load(chosen.alignment_ptr + where, mask=has, other=0).to(tl.float32, bitcast=True)
    overlap = tl.load(chosen.overlap_ptr + where, mask=has, other=0).to(tl.float32, bitcast=True)
    quality = tl.where(has, alignment * overlap / (largest + eps), 0.0)
    tl.debug_barrier()  # a block has more threads than anchors: several threads read an alignment, and one writes the quality over it
    tl.store(assigned.quality_ptr + out, quality, mask=inside)
    side = tl.arange(0, 4 if given.WIDTH == 4 else 8)[None, :]
    number = given.targets.ptr + batch * given.targets.s0 + index[:, None] * given.targets.s1 + side * given.targets.s2
    exists = side < given.WIDTH
    box = tl.load(number, mask=has[:, None] & exists, other=0.0)
    tl.store(assigned.boxes_ptr + out[:, None] * given.WIDTH + side, box, mask=inside[:, None] & exists)
    if assigned.scores_ptr is not None:
        label = tl.load(assigned.labels_ptr + out, mask=inside, other=-1).to(tl.int32)
        for first in range(0, classes, CLASSES):
            c = first + tl.arange(0, CLASSES)[None, :]
            score = tl.where(label[:, None] == c, quality[:, None], 0.0)
            tl.store(assigned.scores_ptr + out[:, None] * classes + c, score, mask=inside[:, None] & (c < classes))
