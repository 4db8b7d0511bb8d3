"""The template of losses in which a row of C classes passes through one softmax.

A loss adds φ(z, *hyper) → (φ, φ′) of z = lse - x_t = -ln p_t of a row's class t; a row's loss is Σ c φ(z) over its classes, c their
class weights and shares of a mixup pair. What targets give to all classes (probabilities, label smoothing) counts by -ln p itself; what
the loss gives to all, by spread · p^focus (-ln p): see row_focus.py. Targets, weights, smoothing, z-loss, ignored rows, reduction,
scaling and addressing are the template's. One launch gives values, gradient, or both in two sweeps of a row (one where the row fits a
tile); the classic split keeps each row's statistics and sweeps again in backward.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.reduce import count_rows, divided, finish, over
from lossforge.kernels.math import LOG2E, exp2, log
from lossforge.kernels.row.focus import focused_sums, spread_row, spread_shares
from lossforge.kernels.row.rows import (
    LOWEST,
    accumulate,
    ahead,
    columns,
    dense_tile,
    gradient_tile,
    in_row,
    leftovers,
    logit_tile,
    merge,
    near,
    origin,
    own_classes,
    row_start,
    row_terms,
    store_tile,
    surprise,
    taken,
    whole,
)


class Outputs(NamedTuple):
    """Per-row results, contiguous over the rows. stats (3, rows): max, log-sum and the share of p in the gradient, for backward."""

    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    stats: Tensor | None


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def rowwise_kernel(
    x,  # Logits
    index_a,  # this and the next four: Strided
    index_b,
    lam,
    dense,
    gradient,
    labels,  # Labels
    out,  # Outputs
    sum,
    z_sum,
    divisor_ptr,
    hyper,
    z_loss,
    scale,
    rows_outer,  # rows an outer index
    blocks,  # of BR rows, an outer index
    counted,  # rows of contiguous class indices, counted here where COUNT
    phi: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALL_ROWS: tl.constexpr,  # ignored rows are read too, for outputs that do not depend on the target
    EMPTY_IS_ZERO: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WIDE: tl.constexpr,  # offsets within a row, or the number of rows, need 64 bits
    COUNT: tl.constexpr,
    ALIGN: tl.constexpr,  # what rows' offsets and the number of classes are multiples of
    SHIFT: tl.constexpr,  # tiles begin at a multiple of it before class 0
    ROWS: tl.constexpr,  # what rows_outer is a multiple of
    BR: tl.constexpr,
    BC: tl.constexpr,
    VEC: tl.constexpr,  # neighbouring classes that one lane sums
    STAGES: tl.constexpr,
):
    HARD: tl.constexpr = index_a.ptr is not None
    PAIR: tl.constexpr = index_b.ptr is not None
    FOCUS: tl.constexpr = labels.focus is not None
    EVEN: tl.constexpr = labels.smoothing is not None and labels.weight_ptr is None and dense.ptr is None  # d = smoothing / classes
    DENSE: tl.constexpr = dense.ptr is not None or (labels.smoothing is not None and not EVEN)
    if COUNT:
        scale = over(
            scale,
            count_rows(index_a.ptr, None, None, labels.weight_ptr, tl.arange(0, COUNT), counted, x.classes, labels.ignore),
            EMPTY_IS_ZERO,
        )
    else:
        scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    classes = x.classes
    if ALIGN > 1:
        classes = classes // ALIGN * ALIGN  # changes nothing but what the compiler knows
    each = 0.0  # d of every class where EVEN
    if EVEN:
        each = labels.smoothing / classes
    lanes = tl.arange(0, BC)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = program - outer * blocks
    if not WIDE:
        row = row.to(tl.int32)
    row = row * BR + tl.arange(0, BR)
    inside = row < rows_outer // ROWS * ROWS  # the compiler then knows that neighbours are all inside, and reads them at once
    a, c_a, logit_a, b, c_b, logit_b, keep, valid = row_terms(index_a, index_b, lam, labels, outer, row, inside, x)
    read = inside if ALL_ROWS else keep
    # where a program reads neighbouring rows at once, what is not kept is read with the others
    first_mask, second_mask = read[:, None], keep[:, None]
    if ROWS > 1:
        first_mask, second_mask = inside[:, None], inside[:, None]
    start, first = row_start(x, outer, row, ALIGN, SHIFT)
    # lanes of a row: [0, end), in tiles of BC of which those from `low` to `high` lie wholly inside it
    end = classes
    low = 0
    if SHIFT > 1:
        end += tl.max(first, 0)
        low = BC
    high = tl.maximum(end // BC * BC, low)

    d = tl.zeros([BR, BC], tl.float32)
    if ONE_TILE:
        column = columns(lanes, first, SHIFT)
        here = in_row(column, classes, SHIFT)
        tile = logit_tile(x, start, lanes, column, inside[:, None] & here, float("-inf"), WIDE, "")
        top = tl.max(tile, 1)
        step = tile - top[:, None]
        e = exp2(step * LOG2E)
        total = tl.sum(e, 1)
        if ENTROPY:
            u_row = tl.sum(tl.where(e > 0, e * step, 0.0), 1)
        if DENSE:
            d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
            d_row = tl.sum(d, 1)
            dot_row = tl.sum(tl.where(d == 0, 0.0, d * step), 1)
        if EVEN:
            dot_row = tl.sum(tl.where(here, step, 0.0), 1)
        if FOCUS:
            d_row, dot_row = focused_sums(step, here, labels.focus, 1)
        if out.correct is not None:
            before = ((tile > logit_a[:, None]) | ((tile == logit_a[:, None]) & (column < a[:, None]))) & (column != a[:, None]) & here
            beaten = tl.max(before.to(tl.int32), 1)
    else:
        EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None else ""
        m = tl.full([BR, BC // VEC], LOWEST, tl.float32)
        s = tl.zeros([BR, BC // VEC], tl.float32)
        u, d_sum, d_dot, ahead_by = s, s, s, s
        zero = tl.zeros([BR], tl.float32)
        if EVEN:
            zero = origin(x, outer, row, inside)
        # the last and the first tile, which may reach beyond the row: read before it is known whether the row counts
        for edge in tl.static_range(2 if SHIFT > 1 else 1):
            at = high if edge == 0 else 0
            if at < end:
                column = columns(at + lanes, first, SHIFT)
                here = in_row(column, classes, SHIFT)
                mask = inside[:, None] & near(at + lanes, end, here, SHIFT)
                tile = logit_tile(x, start, at + lanes, column, mask, float("-inf"), WIDE, EVICT)
                if SHIFT > 1:
                    tile = tl.where(here, tile, float("-inf"))
                if DENSE:
                    d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
                m, s, u, d_sum, d_dot = accumulate(m, s, u, d_sum, d_dot, tile, d, here, zero, labels.focus, ENTROPY, DENSE, EVEN)
                if out.correct is not None:
                    ahead_by = ahead(ahead_by, tile, column, here, a, logit_a)
        some = tl.max(read.to(tl.int32), 0)
        for at in tl.range(low, tl.where(some > 0, high, low), BC, num_stages=STAGES):
            column = columns(at + lanes, first, SHIFT)
            tile = logit_tile(x, start, at + lanes, column, None if BR == 1 else first_mask, float("-inf"), WIDE, EVICT)
            if DENSE:
                d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
            m, s, u, d_sum, d_dot = accumulate(m, s, u, d_sum, d_dot, tile, d, None, zero, labels.focus, ENTROPY, DENSE, EVEN)
            if out.correct is not None:
                ahead_by = ahead(ahead_by, tile, column, True, a, logit_a)
        top, total, u_row, d_row, dot_row = merge(m, s, u, d_sum, d_dot, labels.focus, ENTROPY, DENSE)
        if EVEN:
            dot_row += classes * (zero - top)
        if out.correct is not None:
            beaten = tl.max(ahead_by, 1).to(tl.int32)
    if EVEN:
        d_row = tl.zeros([BR], tl.float32) + labels.smoothing
        dot_row = dot_row * each

    ls = log(total)
    lse = top + ls
    value = tl.zeros([BR], tl.float32)
    q = tl.zeros([BR], tl.float32)
    h_share, h_shift = q, q
    if FOCUS:
        h_share, h_shift = spread_shares(c_a + c_b, ls, labels)
        value, q = spread_row(d_row, dot_row, ls, h_share, labels.focus)
    if HARD:
        of_a, slope_a = phi(surprise(c_a, top, ls, logit_a), *hyper)
        value += c_a * of_a
        c_a *= slope_a
        q += c_a
    if PAIR:
        of_b, slope_b = phi(surprise(c_b, top, ls, logit_b), *hyper)
        value += c_b * of_b
        c_b *= slope_b
        q += c_b
    if DENSE or EVEN:
        value += d_row * ls - dot_row
        q += d_row
    p_share = q
    if z_loss is not None:
        square = z_loss * lse * lse
        value += square
        p_share += 2.0 * z_loss * lse
    value = tl.where(keep, tl.where(valid & (total == total), value, float("nan")), 0.0)

    if not ONE_TILE:
        # handed in here, where no write of the second sweep has to be waited for
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)
        if z_sum is not None:
            finish(tl.sum(tl.where(keep, square, 0.0), 0), z_sum, scale)

    at = outer * rows_outer + row
    if out.loss is not None:
        tl.store(out.loss + at, value * scale, mask=inside)
    if out.z_loss is not None:
        tl.store(out.z_loss + at, tl.where(keep, square, 0.0) * scale, mask=inside)
    if out.lse is not None:
        tl.store(out.lse + at, lse, mask=inside)
    if ENTROPY:
        tl.store(out.entropy + at, ls - u_row / total, mask=inside)
    if out.correct is not None:
        tl.store(out.correct + at, (beaten == 0) & (a >= 0) & valid & (lse == lse), mask=inside)
    if out.stats is not None:
        rows = (tl.num_programs(0) // blocks).to(tl.int64) * rows_outer
        tl.store(out.stats + at, tl.where(read, top, 0.0), mask=inside)
        tl.store(out.stats + rows + at, tl.where(read, ls, 0.0), mask=inside)
        tl.store(out.stats + 2 * rows + at, tl.where(read, q, 0.0), mask=inside)

    if gradient.ptr is not None:
        shrink = tl.where(valid, scale, float("nan"))
        p_share = tl.where(keep, p_share * shrink / total, 0.0)  # rows not kept: their tiles are 0 - top = 0, their gradient 0
        q_share = tl.where(keep, shrink, 0.0)
        q_a, q_b = q_share * c_a, q_share * c_b
        top = tl.where(keep, top, 0.0)
        to, _ = row_start(gradient, outer, row, ALIGN, SHIFT)
        even = q_share[:, None] * each
        if FOCUS:
            h_share, h_shift = tl.where(keep, shrink * h_share, 0.0), tl.where(keep, h_shift, 0.0)
        if ONE_TILE:
            share = even + taken(column, a, q_a, b, q_b, q_share, d, DENSE, HARD, PAIR)
            g = gradient_tile(tile, x, top, p_share, h_share, h_shift, share, labels.focus, False)
            store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, inside[:, None] & here, WIDE, "")
        else:
            for edge in tl.static_range(2 if SHIFT > 1 else 1):
                at = high if edge == 0 else 0
                if at < end:
                    column = columns(at + lanes, first, SHIFT)
                    here = in_row(column, classes, SHIFT)
                    mask = second_mask & near(at + lanes, end, here, SHIFT)
                    tile = logit_tile(x, start, at + lanes, column, mask, 0.0, WIDE, "evict_first")
                    if DENSE:
                        d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
                    share = even + taken(column, a, q_a, b, q_b, q_share, d, DENSE, False, False)
                    g = gradient_tile(tile, x, top, p_share, h_share, h_shift, share, labels.focus, False)
                    if ROWS > 1:
                        g = tl.where(keep[:, None], g, 0.0)
                    store_tile(
                        g, gradient, to, at + lanes, inside[:, None] & whole(at + lanes, first, end, here, SHIFT), WIDE, "evict_first"
                    )
            for back in tl.range(low, high, BC):  # what was read last is likelier still in the cache
                at = high + low - BC - back
                column = columns(at + lanes, first, SHIFT)
                tile = logit_tile(x, start, at + lanes, column, second_mask, 0.0, WIDE, "evict_first")
                if DENSE:
                    d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
                share = even + taken(lanes[None, :], a, q_a, b, q_b, q_share, d, DENSE, False, False)
                g = gradient_tile(tile, x, top, p_share, h_share, h_shift, share, labels.focus, False)
                if ROWS > 1:
                    g = tl.where(keep[:, None], g, 0.0)
                store_tile(g, gradient, to, at + lanes, None if BR == 1 else inside[:, None], WIDE, "evict_first")
            if SHIFT > 1:
                rest, left = leftovers(first, end, classes, SHIFT)
                column = columns(rest, first, SHIFT)
                tile = logit_tile(x, start, rest, column, keep[:, None] & left, 0.0, WIDE, "")
                if DENSE:
                    d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
                share = even + taken(rest[None, :], a, q_a, b, q_b, q_share, d, DENSE, False, False)
                g = gradient_tile(tile, x, top, p_share, h_share, h_shift, share, labels.focus, False)
                store_tile(g, gradient, to, rest, inside[:, None] & left, WIDE, "")
            if HARD:
                shares = (p_share, q_share, q_a, q_b)
                own_classes(
                    gradient,
                    x,
                    dense,
                    labels,
                    outer,
                    row,
                    keep,
                    top,
                    a,
                    logit_a,
                    b,
                    logit_b,
                    shares,
                    h_share,
                    h_shift,
                    even,
                    DENSE,
                    PAIR,
                    False,
                    WIDE,
                )
    if ONE_TILE:
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)
        if z_sum is not None:
            finish(tl.sum(tl.where(keep, square, 0.0), 0), z_sum, scale)
