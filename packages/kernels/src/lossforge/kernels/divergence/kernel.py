"""The template of losses between the softmax p of a row's logits and the softmax q of a teacher's: D = Σⱼ f(ln pⱼ, ln qⱼ).

Both are softened by a temperature T: ln p = log_softmax(x / T). With hⱼ = ∂f/∂ln pⱼ, the gradient at x is (hⱼ - pⱼ Σ h) / T.

A row that fits a tile is read once. A longer one is swept: first for both softmaxes' maxima and sums, last for the gradient, and in
between for D and Σ h, unless the formula is KL, whose sum is carried along in the first sweep and gives Σ h in closed form. One launch
gives values, gradient, or both; the classic split keeps each row's statistics and sweeps once more in backward.

With SWAP the logits play q's part and the teacher p's: KL(q ‖ p) becomes KL(p ‖ q).
"""

import triton
import triton.language as tl

from lossforge.kernels.divergence.rows import (
    accumulate_both,
    at_logits,
    both,
    by_lane,
    closed,
    divergence_gradient,
    merge_both,
    of_tile,
    row_weight,
    value_and_slope,
)
from lossforge.kernels.engine.reduce import count_rows, divided, finish, over
from lossforge.kernels.math import LOG2E, exp2, log, product
from lossforge.kernels.row.rows import LOWEST, columns, in_row, leftovers, near, row_start, store_tile, whole

STATS = 5
"""Statistics a row that backward needs: max and log-sum of the logits and of the teacher's, all but Σ h in units of x / T."""


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def divergence_kernel(
    x,  # Logits; and of the teacher
    teacher,
    labels,  # this and the next two: Strided
    weight,
    gradient,
    loss_ptr,  # per row
    stats_ptr,  # (STATS, rows)
    sum,
    divisor_ptr,
    hyper,
    inverse,  # 1 / T
    scale,
    ignore,
    rows_outer,  # rows an outer index
    blocks,  # of BR rows, an outer index
    counted,  # labels, contiguous, counted here where COUNT
    terms: tl.constexpr,
    sums: tl.constexpr,  # closed form of Σ h, None where a sweep is needed
    SWAP: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WIDE: tl.constexpr,  # this and the next three: as in rowwise.py
    COUNT: tl.constexpr,
    ALIGN: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    VEC: tl.constexpr,  # neighbouring classes that one lane sums
):
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
    # where a program reads neighbouring rows at once, what is not kept is read with the others
    mask = keep[:, None]
    if ROWS > 1:
        mask = inside[:, None]
    start, first = row_start(x, outer, row, ALIGN, SHIFT)
    begin, _ = row_start(teacher, outer, row, ALIGN, SHIFT)
    # lanes of a row: [0, end), in tiles of BC of which those from `low` to `high` lie wholly inside it
    end = classes
    low = 0
    if SHIFT > 1:
        end += tl.max(first, 0)
        low = BC
    high = tl.maximum(end // BC * BC, low)
    EDGES: tl.constexpr = 2 if SHIFT > 1 else 1

    if ONE_TILE:
        here = in_row(columns(lanes, first, SHIFT), classes, SHIFT)
        one_x, one_t = both(x, teacher, start, begin, lanes, inside[:, None] & here, float("-inf"), WIDE, "")
        top_x, top_t = tl.max(one_x, 1), tl.max(one_t, 1)
        step_x, step_t = one_x - top_x[:, None], one_t - top_t[:, None]
        e_x, e_t = exp2(step_x * rate), exp2(step_t * rate)
        total_x, total_t = tl.sum(e_x, 1), tl.sum(e_t, 1)
        ls_x, ls_t = log(total_x), log(total_t)
        p, q = product(e_x, (1.0 / total_x)[:, None]), product(e_t, (1.0 / total_t)[:, None])  # equal where the logits are
        f, h = value_and_slope(step_x * inverse - ls_x[:, None], step_t * inverse - ls_t[:, None], p, q, 1.0, terms, hyper, SWAP)
        value, h_sum = tl.sum(f, 1), tl.sum(h, 1)
    else:
        EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None or sums is None else "evict_first"
        LATER: tl.constexpr = "evict_last" if gradient.ptr is not None else "evict_first"
        DOT: tl.constexpr = sums is not None
        m_x = tl.full([BR, BC // VEC], LOWEST, tl.float32)
        s_x = tl.zeros([BR, BC // VEC], tl.float32)
        m_t, s_t, dot = m_x, s_x, s_x
        for edge in tl.static_range(EDGES):
            at = high if edge == 0 else 0
            if at < end:
                here = in_row(columns(at + lanes, first, SHIFT), classes, SHIFT)
                near_it = inside[:, None] & near(at + lanes, end, here, SHIFT)
                tile_x, tile_t = both(x, teacher, start, begin, at + lanes, near_it, float("-inf"), WIDE, EVICT)
                if SHIFT > 1:
                    tile_x, tile_t = tl.where(here, tile_x, float("-inf")), tl.where(here, tile_t, float("-inf"))
                tile_x, tile_t = by_lane(tile_x, VEC), by_lane(tile_t, VEC)
                m_x, s_x, m_t, s_t, dot = accumulate_both(m_x, s_x, m_t, s_t, dot, tile_x, tile_t, rate, DOT, SWAP)
        some = tl.max(keep.to(tl.int32), 0)
        stop = tl.where(some > 0, high, low)
        for at in tl.range(low, stop, BC):
            tile_x, tile_t = both(x, teacher, start, begin, at + lanes, None if BR == 1 else mask, float("-inf"), WIDE, EVICT)
            m_x, s_x, m_t, s_t, dot = accumulate_both(m_x, s_x, m_t, s_t, dot, by_lane(tile_x, VEC), by_lane(tile_t, VEC), rate, DOT, SWAP)
        top_x, top_t = tl.max(m_x, 1), tl.max(m_t, 1)
        total_x, total_t, dot_row = merge_both(m_x, s_x, m_t, s_t, dot, top_x[:, None], top_t[:, None], rate, DOT, SWAP)
        ls_x, ls_t = log(total_x), log(total_t)
        if DOT:
            value, h_sum = closed(dot_row, total_x, total_t, ls_x, ls_t, inverse, sums, SWAP)
        else:
            f_sum = tl.zeros([BR, BC // VEC], tl.float32)
            slopes = f_sum
            stats_of = (top_x[:, None], ls_x[:, None], top_t[:, None], ls_t[:, None])
            for edge in tl.static_range(EDGES):
                at = high if edge == 0 else 0
                if at < end:
                    here = in_row(columns(at + lanes, first, SHIFT), classes, SHIFT)
                    near_it = inside[:, None] & near(at + lanes, end, here, SHIFT)
                    tile_x, tile_t = both(x, teacher, start, begin, at + lanes, near_it, float("-inf"), WIDE, LATER)
                    if SHIFT > 1:
                        tile_x, tile_t = tl.where(here, tile_x, float("-inf")), tl.where(here, tile_t, float("-inf"))
                    f, h, p = of_tile(tile_x, tile_t, *stats_of, rate, terms, hyper, SWAP)
                    f_sum += tl.sum(by_lane(f, VEC), 2)
                    slopes += tl.sum(by_lane(h, VEC), 2)
            for back in tl.range(low, stop, BC):  # what was read last is likelier still in the cache
                at = stop + low - BC - back
                tile_x, tile_t = both(x, teacher, start, begin, at + lanes, None if BR == 1 else mask, float("-inf"), WIDE, LATER)
                f, h, p = of_tile(tile_x, tile_t, *stats_of, rate, terms, hyper, SWAP)
                f_sum += tl.sum(by_lane(f, VEC), 2)
                slopes += tl.sum(by_lane(h, VEC), 2)
            value, h_sum = tl.sum(f_sum, 1), tl.sum(slopes, 1)
    value = tl.where(keep, w * value, 0.0)

    if not ONE_TILE:
        if sum is not None:  # handed in here, where no write of the last sweep has to be waited for
            finish(tl.sum(value, 0), sum, scale)
    at = outer * rows_outer + row
    if loss_ptr is not None:
        tl.store(loss_ptr + at, value * scale, mask=inside)
    # rows not kept: all that is read of them is 0, so are their statistics, and their gradient
    h_sum = tl.where(keep, h_sum, 0.0)
    if not ONE_TILE or stats_ptr is not None:
        top_x, ls_x = tl.where(keep, top_x, 0.0), tl.where(keep, ls_x, 0.0)
        top_t, ls_t = tl.where(keep, top_t, 0.0), tl.where(keep, ls_t, 0.0)
    if stats_ptr is not None:
        rows = (tl.num_programs(0) // blocks).to(tl.int64) * rows_outer
        tl.store(stats_ptr + at, top_x, mask=inside)
        tl.store(stats_ptr + rows + at, ls_x, mask=inside)
        tl.store(stats_ptr + 2 * rows + at, top_t, mask=inside)
        tl.store(stats_ptr + 3 * rows + at, ls_t, mask=inside)
        tl.store(stats_ptr + 4 * rows + at, h_sum, mask=inside)

    if gradient.ptr is not None:
        share = tl.where(keep, w * scale * inverse, 0.0)
        to, _ = row_start(gradient, outer, row, ALIGN, SHIFT)
        stats_of = (top_x[:, None], ls_x[:, None], top_t[:, None], ls_t[:, None])
        if ONE_TILE:
            g = at_logits(h, p, h_sum[:, None], share[:, None])
            store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, inside[:, None] & here, WIDE, "")
        else:
            for edge in tl.static_range(EDGES):
                at = high if edge == 0 else 0
                if at < end:
                    here = in_row(columns(at + lanes, first, SHIFT), classes, SHIFT)
                    near_it = mask & near(at + lanes, end, here, SHIFT)
                    tile_x, tile_t = both(x, teacher, start, begin, at + lanes, near_it, 0.0, WIDE, "evict_first")
                    g = divergence_gradient(tile_x, tile_t, *stats_of, rate, h_sum[:, None], share[:, None], terms, hyper, SWAP)
                    if ROWS > 1:
                        g = tl.where(keep[:, None], g, 0.0)
                    written = inside[:, None] & whole(at + lanes, first, end, here, SHIFT)
                    store_tile(g, gradient, to, at + lanes, written, WIDE, "evict_first")
            for back in tl.range(low, high, BC):
                at = high + low - BC - back
                if sums is None:
                    at = back  # the sweep before it ended at the beginning
                tile_x, tile_t = both(x, teacher, start, begin, at + lanes, mask, 0.0, WIDE, "evict_first")
                g = divergence_gradient(tile_x, tile_t, *stats_of, rate, h_sum[:, None], share[:, None], terms, hyper, SWAP)
                if ROWS > 1:
                    g = tl.where(keep[:, None], g, 0.0)
                store_tile(g, gradient, to, at + lanes, None if BR == 1 else inside[:, None], WIDE, "evict_first")
            if SHIFT > 1:
                rest, left = leftovers(first, end, classes, SHIFT)
                tile_x, tile_t = both(x, teacher, start, begin, rest, keep[:, None] & left, 0.0, WIDE, "")
                few = divergence_gradient(tile_x, tile_t, *stats_of, rate, h_sum[:, None], share[:, None], terms, hyper, SWAP)
                store_tile(few, gradient, to, rest, inside[:, None] & left, WIDE, "")
    if ONE_TILE:
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)
