"""Device functions of the row-wise template: a tile of logits, a row's target, the online softmax, the gradient of a tile.

A tile has BR rows and BC classes. For a row whose targets are hard terms c[j = t] and dense terms dⱼ:

    m = max xⱼ,  ls = ln Σ exp(xⱼ - m),  lse = m + ls
    loss = Σ c φ(m - x_t + ls) + Σ dⱼ (m - xⱼ + ls)

Classes are counted from `first`, the place of class 0 in the tile's row of lanes: where a row does not begin at an aligned address,
its tiles begin up to SHIFT - 1 elements before it, so that all but the first and the last are read and written whole and aligned.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.math import LOG2E, exp2, tanh
from lossforge.kernels.row.focus import focused, focused_sums, moved

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32: differences to it stay finite, as those to -inf do not


class Logits(NamedTuple):
    """x as (outer, rows, classes) with strides s0, s1, s2, scaled, soft-capped and shifted by a bias a class as it is read:

    x ← cap · tanh(scale · x / cap), or x ← scale · x + tau · bias. There is no bias with a cap.
    """

    ptr: Tensor
    s0: int
    s1: int
    s2: int
    classes: int
    scale: float | None
    softcap: float | None
    bias_ptr: Tensor | None = None
    tau: float | None = None


class Labels(NamedTuple):
    """What the rows' targets share: class weights, the index that is ignored, label smoothing.

    spread, focus: every class adds spread · p^focus (-ln p) to a row, times the weights of the row's hard targets.
    """

    weight_ptr: Tensor | None
    ignore: int
    smoothing: float | None
    spread: float | None = None
    focus: float | None = None


@triton.jit
def transform(seen, x, column, mask):
    """Logits of classes `column` as the loss sees them; those outside `mask` get no bias, without a mask all exist."""
    if x.scale is not None:
        seen = seen * x.scale
    if x.softcap is not None:
        seen = x.softcap * tanh(seen / x.softcap)
    if x.bias_ptr is not None:
        if mask is None:
            bias = tl.load(x.bias_ptr + column)
        else:
            bias = tl.load(x.bias_ptr + column, mask=mask, other=0.0)
        seen += x.tau * bias.to(tl.float32)
    return seen


@triton.jit
def row_start(t, outer, row, ALIGN: tl.constexpr, SHIFT: tl.constexpr):
    """Offset of the rows in a tensor with s0, s1, s2, at or before class 0, and how far before it.

    ALIGN: what offsets are multiples of. SHIFT: go back to a multiple of it.
    """
    offset = outer * t.s0 + row.to(tl.int64) * t.s1
    first = (offset * 0).to(tl.int32)
    if ALIGN > 1:
        offset = offset // ALIGN * ALIGN  # changes nothing but what the compiler knows
    if SHIFT > 1:
        aligned = offset // SHIFT * SHIFT
        first = (offset - aligned).to(tl.int32)
        offset = aligned
    return offset, first


@triton.jit
def columns(lanes, first, SHIFT: tl.constexpr):
    """Classes (BR or 1, BC) of lanes."""
    column = lanes[None, :]
    if SHIFT > 1:
        column = column - first[:, None]
    return column


@triton.jit
def in_row(column, classes, SHIFT: tl.constexpr):
    here = column < classes
    if SHIFT > 1:
        here = here & (column >= 0)
    return here


@triton.jit
def near(lanes, end, here, SHIFT: tl.constexpr):
    """What may be read of lanes: with SHIFT whole aligned vectors that hold a class of the row, else `here`."""
    mask = here
    if SHIFT > 1:
        mask = (lanes < tl.cdiv(end, SHIFT) * SHIFT)[None, :]
    return mask


@triton.jit
def whole(lanes, first, end, here, SHIFT: tl.constexpr):
    """What may be written of lanes: with SHIFT whole aligned vectors that lie in the row, else `here`; the rest are the leftovers."""
    mask = here
    if SHIFT > 1:
        mask = ((lanes >= tl.cdiv(tl.max(first, 0), SHIFT) * SHIFT) & (lanes < end // SHIFT * SHIFT))[None, :]
    return mask


@triton.jit
def leftovers(first, end, classes, SHIFT: tl.constexpr):
    """Lanes of the row before its first whole vector and after its last, and which of them exist."""
    i = tl.arange(0, 2 * SHIFT)
    begin = tl.max(first, 0)
    tail = end // SHIFT * SHIFT
    lane = tl.where(i < SHIFT, i, tail + i - SHIFT)
    # a number chosen before it is compared: in Triton's interpreter a lone condition joined with a block's is no mask
    exists = tl.where(i < SHIFT, i >= tl.where(begin > 0, begin, SHIFT), lane < tl.where(tail >= SHIFT, end, 0))
    return lane, exists[None, :]


@triton.jit
def class_offset(lane, stride, WIDE: tl.constexpr):
    """Offset of lanes within a row; WIDE where 32 bits do not hold it."""
    return lane.to(tl.int64) * stride if WIDE else lane * stride


@triton.jit
def stored_tile(x, start, lane, mask, other, WIDE: tl.constexpr, EVICT: tl.constexpr):
    """Logits (BR, BC) as they lie in memory; `other` where the mask is false. Without a mask all are read."""
    at = x.ptr + start[:, None] + class_offset(lane, x.s2, WIDE)[None, :]
    if mask is None:
        seen = tl.load(at, eviction_policy=EVICT)
    else:
        seen = tl.load(at, mask=mask, other=other, eviction_policy=EVICT)
    return seen


@triton.jit
def read_tile(x, start, lane, mask, other, WIDE: tl.constexpr, EVICT: tl.constexpr):
    """As stored_tile, in float32."""
    return stored_tile(x, start, lane, mask, other, WIDE, EVICT).to(tl.float32)


@triton.jit
def logit_tile(x, start, lane, column, mask, other, WIDE: tl.constexpr, EVICT: tl.constexpr):
    """Logits (BR, BC) of classes `column` as the loss sees them; `other` where the mask is false. Without a mask all are read."""
    tile = read_tile(x, start, lane, mask, other, WIDE, EVICT)
    if mask is None:
        tile = transform(tile, x, column, None)
    else:
        tile = transform(tile, x, column, (column >= 0) & (column < x.classes))
        if x.scale is not None or x.softcap is not None or x.bias_ptr is not None:
            tile = tl.where(mask, tile, other)
    return tile


@triton.jit
def store_tile(g, gradient, start, lane, mask, WIDE: tl.constexpr, EVICT: tl.constexpr):
    at = gradient.ptr + start[:, None] + class_offset(lane, gradient.s2, WIDE)[None, :]
    tl.store(at, g, mask=mask, eviction_policy=EVICT)


@triton.jit
def hard_term(index, outer, row, inside, weight_ptr, ignore, x):
    """A class index per row: (class, class weight, counts, valid, the class's logit)."""
    t = tl.load(index.ptr + outer * index.s0 + row.to(tl.int64) * index.s1, mask=inside, other=ignore)
    counts = inside & (t != ignore)
    valid = (t >= 0) & (t < x.classes)
    safe = counts & valid
    w = tl.where(counts, 1.0, 0.0)
    if weight_ptr is not None:
        w = tl.load(weight_ptr + t, mask=safe, other=0.0).to(tl.float32)
    at = outer * x.s0 + row.to(tl.int64) * x.s1 + t.to(tl.int64) * x.s2
    logit = transform(tl.load(x.ptr + at, mask=safe, other=0.0).to(tl.float32), x, t, safe)
    return tl.where(safe, t, -1).to(tl.int32), w, counts, valid | (t == ignore), logit


@triton.jit
def dense_tile(dense, labels, outer, row, exists, column, x, WIDE: tl.constexpr):
    """Dense part dⱼ (BR, BC) of the targets at classes `column` (BR or 1, BC): probabilities and smoothing, times the class weights."""
    inside = (column >= 0) & (column < x.classes)
    mask = exists[:, None] & inside
    d = tl.zeros([row.shape[0], column.shape[1]], tl.float32)
    if dense.ptr is not None:
        base = dense.ptr + (outer * dense.s0 + row.to(tl.int64) * dense.s1)[:, None]
        d = tl.load(base + class_offset(column, dense.s2, WIDE), mask=mask, other=0.0).to(tl.float32)
        if labels.smoothing is not None:
            d = d * (1.0 - labels.smoothing)
    if labels.smoothing is not None:
        d = d + tl.where(mask, labels.smoothing / x.classes, 0.0)
    if labels.weight_ptr is not None:
        d = d * tl.load(labels.weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return d


@triton.jit
def shrunk(before, top):
    """e^(m - top) for running maxima m ≤ top."""
    return exp2((before - top) * LOG2E)


@triton.jit
def origin(x, outer, row, inside):
    """A logit relative to which a row's are summed, so that a common offset costs no digits: its first, if finite."""
    first = tl.load(x.ptr + outer * x.s0 + row.to(tl.int64) * x.s1, mask=inside, other=0.0).to(tl.float32)
    first = transform(first, x, row * 0, inside)
    return tl.where(tl.abs(first) < float("inf"), first, 0.0)


@triton.jit
def accumulate(m, s, u, d_sum, d_dot, x, d, inside, zero, focus, ENTROPY: tl.constexpr, DENSE: tl.constexpr, EVEN: tl.constexpr):
    """Take a tile (BR, BC) into the running sums that each lane (BR, L) keeps of its BC / L classes, relative to its own maximum m.

    s = Σ exp(x - m),  u = Σ exp(x - m)(x - m),  d_sum = Σ d,  d_dot = Σ d (x - m), with EVEN instead Σ (x - zero) of those `inside`,
    with a focus d = exp(x - m)^γ.
    One exponential an element: the maximum of the classes that a lane takes at once comes first.
    """
    BR: tl.constexpr = m.shape[0]
    L: tl.constexpr = m.shape[1]
    V: tl.constexpr = x.shape[1] // L
    if EVEN:
        above = x - zero[:, None]
        if inside is not None:
            above = tl.where(inside, above, 0.0)
        d_dot += tl.sum(tl.reshape(above, [BR, L, V]), 2)
    x = tl.reshape(x, [BR, L, V])
    top = tl.maximum(m, tl.max(x, 2))
    fade = shrunk(m, top)
    step = x - top[:, :, None]
    e = exp2(step * LOG2E)
    if ENTROPY:
        before = tl.where(s == 0, 0.0, fade * (u + (m - top) * s))
        u = before + tl.sum(tl.where(e > 0, e * step, 0.0), 2)
    s = s * fade + tl.sum(e, 2)
    if DENSE:
        d = tl.reshape(d, [BR, L, V])
        d_dot += tl.where(d_sum == 0, 0.0, d_sum * (m - top)) + tl.sum(tl.where(d == 0, 0.0, d * step), 2)
        d_sum += tl.sum(d, 2)
    if focus is not None:
        if inside is not None:
            inside = tl.reshape(tl.broadcast_to(inside, [BR, L * V]), [BR, L, V])
        d_sum, d_dot = moved(d_sum, d_dot, m - top, focus)
        d_more, dot_more = focused_sums(step, inside, focus, 2)
        d_sum += d_more
        d_dot += dot_more
    return top, s, u, d_sum, d_dot


@triton.jit
def merge(m, s, u, d_sum, d_dot, focus, ENTROPY: tl.constexpr, DENSE: tl.constexpr):
    """Join the lanes of each row: (m, Σexp, u, d_sum, d_dot), each (BR,)."""
    top = tl.max(m, 1)
    step = m - top[:, None]
    e = exp2(step * LOG2E)
    if ENTROPY:
        u = tl.where(s == 0, 0.0, e * (u + step * s))
    if DENSE:
        d_dot = tl.where(d_sum == 0, 0.0, d_dot + d_sum * step)
    if focus is not None:
        d_sum, d_dot = moved(d_sum, d_dot, step, focus)
    return top, tl.sum(s * e, 1), tl.sum(u, 1), tl.sum(d_sum, 1), tl.sum(d_dot, 1)


@triton.jit
def taken(column, a, q_a, b, q_b, q_share, d, DENSE: tl.constexpr, HARD: tl.constexpr, PAIR: tl.constexpr):
    """What the targets take from the gradient at classes `column`: q_a [j = a] + q_b [j = b] + q_share d. d: (BR, BC) or a number."""
    share = q_share[:, None] * d if DENSE else q_share[:, None] * 0.0
    if HARD:
        share += tl.where(column == a[:, None], q_a[:, None], 0.0)
    if PAIR:
        share += tl.where(column == b[:, None], q_b[:, None], 0.0)
    return share


@triton.jit
def gradient_tile(x, z, m, p_share, h_share, h_shift, share, focus, ENTROPY: tl.constexpr):
    """Gradient at the logits as they lie in memory, from per-row shares; e = exp(x - m), which is p up to the row's sum.

    e p_share - e h_share (x - m + h_shift) - share, times dx/draw; with a focus γ in the middle e^γ h_share (γ (x - m) + h_shift).
    """
    step = x - m[:, None]
    e = exp2(step * LOG2E)
    g = e * p_share[:, None] - share
    if ENTROPY:
        g -= tl.where(e > 0, e * h_share[:, None] * (step + h_shift[:, None]), 0.0)
    if focus is not None:
        tl.static_assert(not ENTROPY, "a loss with a focus has no entropy to differentiate")
        power, t = focused(step, focus)
        g -= tl.where(power == 0.0, 0.0, power * h_share[:, None] * (t + h_shift[:, None]))
    if z.softcap is not None:
        t = x / z.softcap
        g *= 1.0 - t * t
    if z.scale is not None:
        g *= z.scale
    return g


@triton.jit
def row_terms(index_a, index_b, lam, labels, outer, row, inside, x):
    """What the targets of the rows say: (a, c_a, logit_a, b, c_b, logit_b, keep, valid); absent terms name class -1 with c = 0."""
    keep, valid = inside, inside
    a = row * 0 - 1
    b = a
    c_a = (row * 0).to(tl.float32)
    c_b, logit_a, logit_b = c_a, c_a, c_a
    if index_a.ptr is not None:
        a, c_a, keep, valid, logit_a = hard_term(index_a, outer, row, inside, labels.weight_ptr, labels.ignore, x)
        if index_b.ptr is not None:
            b, c_b, keep_b, valid_b, logit_b = hard_term(index_b, outer, row, inside, labels.weight_ptr, labels.ignore, x)
            share = tl.load(lam.ptr + outer * lam.s0 + row.to(tl.int64) * lam.s1, mask=inside, other=1.0).to(tl.float32)
            c_a, c_b = share * c_a, (1.0 - share) * c_b
            keep, valid = keep | keep_b, valid & valid_b
        if labels.smoothing is not None:
            c_a, c_b = (1.0 - labels.smoothing) * c_a, (1.0 - labels.smoothing) * c_b
    return a, c_a, logit_a, b, c_b, logit_b, keep, valid


@triton.jit
def surprise(c, m, ls, logit):
    """z = lse - x_t, 0 where its share c is."""
    return tl.where(c == 0.0, 0.0, m - logit + ls)


@triton.jit
def ahead(found, tile, column, here, a, logit_a):
    """Mark lanes that hold a class before the target in the order of the logits; of equal logits the first comes first."""
    first = (tile > logit_a[:, None]) | ((tile == logit_a[:, None]) & (column < a[:, None]))
    first = first & (column != a[:, None]) & here
    marks = tl.reshape(first.to(tl.float32), [found.shape[0], found.shape[1], tile.shape[1] // found.shape[1]])
    return tl.maximum(found, tl.max(marks, 2))


@triton.jit
def own_classes(
    gradient,
    x,
    dense,
    labels,
    outer,
    row,
    here,
    top,
    a,
    logit_a,
    b,
    logit_b,
    shares,
    h_share,
    h_shift,
    even,
    DENSE: tl.constexpr,
    PAIR: tl.constexpr,
    ENTROPY: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the gradient at the targets' own classes, over what was stored there without them: a comparison an element would cost more."""
    p_share, q_share, q_a, q_b = shares
    tl.debug_barrier()
    for which in tl.static_range(2 if PAIR else 1):
        t, logit = (a, logit_a) if which == 0 else (b, logit_b)
        d = 0.0
        if DENSE:
            d = dense_tile(dense, labels, outer, row, here, t[:, None], x, WIDE)
        share = even + taken(t[:, None], a, q_a, b, q_b, q_share, d, DENSE, True, PAIR)
        g = gradient_tile(logit[:, None], x, top, p_share, h_share, h_shift, share, labels.focus, ENTROPY)
        at = outer * gradient.s0 + row.to(tl.int64) * gradient.s1 + t.to(tl.int64) * gradient.s2
        store_tile(g, gradient, at, tl.arange(0, 1), (here & (t >= 0))[:, None], WIDE, "")
