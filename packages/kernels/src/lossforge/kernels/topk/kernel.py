"""KL of a teacher known by its K likeliest classes of each row: Σₖ qₖ (ln qₖ - ln p[iₖ]), without a dense teacher.

With a tail, what is left of both, q₀ = 1 - Σ q and p₀ = 1 - Σ p[i], is one class more. The gradient at the logits is, over T,

    pⱼ (Σ q + q₀) - qⱼ    where j is one of the K,    pⱼ (Σ q + q₀ - q₀ / p₀)    elsewhere.

A sweep of the row finds the softmax's maximum and sum, a second writes the gradient as elsewhere, and then the K classes are written over.
Backward of the classic split is the same launch with the first sweep's results given.
"""

import triton
import triton.language as tl

from lossforge.kernels.divergence.rows import row_weight
from lossforge.kernels.engine.reduce import count_rows, divided, finish, over
from lossforge.kernels.math import LOG2E, exp, exp2, log
from lossforge.kernels.row.rows import LOWEST, in_row, read_tile, row_start, store_tile

LEAST = tl.constexpr(5.960464477539063e-08)  # 2⁻²⁴: below it 1 - Σ p[i] is rounding


@triton.jit
def members(indices, values, outer, row, keep, k, x, inverse, RENORMALIZE: tl.constexpr, KP: tl.constexpr):
    """Of each row's K entries (BR, KP): class, ln q, q, the class's logit, present or not; and whether all are valid, per row."""
    at = tl.arange(0, KP)[None, :]
    exists = keep[:, None] & (at < k)
    lane = row.to(tl.int64)[:, None]
    index = tl.load(indices.ptr + outer * indices.s0 + lane * indices.s1 + at * indices.s2, mask=exists, other=-1)
    lq = tl.load(values.ptr + outer * values.s0 + lane * values.s1 + at * values.s2, mask=exists, other=float("-inf")).to(tl.float32)
    valid = (index >= 0) & (index < x.classes)
    lq = tl.where(index == -1, float("-inf"), lq)
    if RENORMALIZE:
        top = tl.maximum(tl.max(lq, 1), LOWEST)
        step = (lq - top[:, None]) * inverse
        total = tl.sum(exp(step), 1)
        lq = step - log(tl.where(total == 0.0, 1.0, total))[:, None]  # a row without entries: -inf, not nan
    q = exp(lq)
    offset = outer * x.s0 + lane * x.s1 + index.to(tl.int64) * x.s2
    logit = tl.load(x.ptr + offset, mask=valid, other=0.0).to(tl.float32)
    wrong = tl.max(tl.where(valid | (index == -1), 0, 1), 1)
    return index, lq, q, logit, valid, wrong == 0


@triton.jit
def by_row(v):
    """v (BR,) as what a tile's rows are multiplied by: a number where there is one row.

    As a (1, 1) tensor Triton may spread it over the tile in one layout and carry all of it into another through shared memory.
    """
    return tl.sum(v, 0) if v.shape[0] == 1 else v[:, None]


@triton.jit
def sweep(m, s, tile, rate):
    """Take a tile (BR, BC) into the sums s = Σ exp(x - m) that each lane (BR, L) keeps of its BC / L classes."""
    x = tl.reshape(tile, [m.shape[0], m.shape[1], tile.shape[1] // m.shape[1]])
    top = tl.maximum(m, tl.max(x, 2))
    return top, s * exp2((m - top) * rate) + tl.sum(exp2((x - top[:, :, None]) * rate), 2)


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def topk_kernel(
    x,  # Logits
    indices,  # this and the next four: Strided; the first two with K in place of the classes
    values,
    labels,
    weight,
    gradient,
    loss_ptr,  # per row
    stats_ptr,  # (2, rows): max and log-sum; read where a gradient arrives, else written
    upstream_ptr,
    upstream_stride,  # 0 where one gradient arrives for all rows
    sum,
    divisor_ptr,
    inverse,  # 1 / T
    scale,
    ignore,
    k,
    rows_outer,
    blocks,
    counted,
    RENORMALIZE: tl.constexpr,
    TAIL: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WIDE: tl.constexpr,  # this and the next three: as in rowwise.py
    COUNT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    VEC: tl.constexpr,
    KP: tl.constexpr,  # K up to a power of 2
):
    RESUME: tl.constexpr = upstream_ptr is not None
    if COUNT:
        rows = count_rows(labels.ptr, None, None, None, tl.arange(0, COUNT), counted, x.classes, ignore)
        scale = over(scale, rows, EMPTY_IS_ZERO)
    else:
        scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    classes = x.classes
    if ALIGN > 1:
        classes = classes // ALIGN * ALIGN  # changes nothing but what the compiler knows
    rate = inverse * LOG2E
    lanes = tl.arange(0, BC)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = (program - outer * blocks).to(tl.int32) * BR + tl.arange(0, BR)
    inside = row < rows_outer // ROWS * ROWS
    w, keep = row_weight(labels, weight, ignore, outer, row, inside)
    index, lq, q, logit, valid, good = members(indices, values, outer, row, keep, k, x, inverse, RENORMALIZE, KP)
    start, _ = row_start(x, outer, row, ALIGN, 1)
    high = classes // BC * BC
    at_row = outer * rows_outer + row
    rows_all = (tl.num_programs(0) // blocks).to(tl.int64) * rows_outer

    EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None else "evict_first"
    if RESUME:
        top = tl.load(stats_ptr + at_row, mask=inside, other=0.0)
        ls = tl.load(stats_ptr + rows_all + at_row, mask=inside, other=0.0)
    else:
        if ONE_TILE:
            here = in_row(lanes[None, :], classes, 1)
            tile = read_tile(x, start, lanes, inside[:, None] & here, float("-inf"), WIDE, EVICT)
            top = tl.max(tile, 1)
            ls = log(tl.sum(exp2((tile - top[:, None]) * rate), 1))
        else:
            m = tl.full([BR, BC // VEC], LOWEST, tl.float32)
            s = tl.zeros([BR, BC // VEC], tl.float32)
            if high < classes:
                last = read_tile(x, start, high + lanes, inside[:, None] & (high + lanes < classes)[None, :], float("-inf"), WIDE, EVICT)
                m, s = sweep(m, s, last, rate)
            for at in tl.range(0, high, BC):
                full = read_tile(x, start, at + lanes, None if BR == 1 else inside[:, None], float("-inf"), WIDE, EVICT)
                m, s = sweep(m, s, full, rate)
            top = tl.max(m, 1)
            ls = log(tl.sum(s * exp2((m - top[:, None]) * rate), 1))
        top, ls = tl.where(keep, top, 0.0), tl.where(keep, ls, 0.0)

    lp = (logit - top[:, None]) * inverse - ls[:, None]
    p = tl.where(valid, exp(lp), 0.0)
    share = tl.sum(q, 1)  # what p is multiplied by in the gradient
    elsewhere = share
    value = tl.sum(tl.where(q == 0.0, 0.0, q * (lq - lp)), 1)
    if TAIL:
        left_q = tl.maximum(1.0 - share, 0.0)
        left_p = 1.0 - tl.sum(p, 1)
        counts = left_p > LEAST
        left_p = tl.maximum(left_p, LEAST)
        value += tl.where(left_q > 0.0, left_q * (log(left_q) - log(left_p)), 0.0)
        share += tl.where(counts, left_q, 0.0)
        elsewhere += tl.where(counts, left_q - left_q / left_p, 0.0)
    value = tl.where(keep, tl.where(good & (ls == ls), w * value, float("nan")), 0.0)
    if not RESUME:
        if loss_ptr is not None:
            tl.store(loss_ptr + at_row, value * scale, mask=inside)
        if stats_ptr is not None:
            tl.store(stats_ptr + at_row, top, mask=inside)
            tl.store(stats_ptr + rows_all + at_row, ls, mask=inside)
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)

    if gradient.ptr is not None:
        factor = w * scale * inverse
        if RESUME:
            factor *= tl.load(upstream_ptr + at_row * upstream_stride, mask=inside, other=0.0).to(tl.float32)
        factor = tl.where(keep, tl.where(good, factor, float("nan")), 0.0)
        to, _ = row_start(gradient, outer, row, ALIGN, 1)
        shift = ls * LOG2E
        mask = keep[:, None]
        if ROWS > 1:
            mask = inside[:, None]
        base = by_row(elsewhere * factor)
        for back in tl.range(0, tl.cdiv(classes, BC) * BC, BC):  # what was read last is likelier still in the cache
            at = (tl.cdiv(classes, BC) - 1) * BC - back
            within = (at + lanes < classes)[None, :]
            again = read_tile(x, start, at + lanes, mask & within, 0.0, WIDE, "evict_first")
            g = exp2((again - top[:, None]) * rate - shift[:, None]) * base
            store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, at + lanes, inside[:, None] & within, WIDE, "evict_first")
        tl.debug_barrier()
        own = (p * by_row(share) - q) * by_row(factor)
        offset = outer * gradient.s0 + row.to(tl.int64)[:, None] * gradient.s1 + index.to(tl.int64) * gradient.s2
        tl.store(gradient.ptr + offset, own, mask=valid & keep[:, None])
