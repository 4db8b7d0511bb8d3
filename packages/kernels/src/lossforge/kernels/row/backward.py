"""The second launch of the row-wise template's classic split: the gradient from the logits and the statistics that forward kept."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.reduce import divided
from lossforge.kernels.math import exp
from lossforge.kernels.row.focus import spread_shares
from lossforge.kernels.row.rows import (
    columns,
    dense_tile,
    gradient_tile,
    in_row,
    leftovers,
    logit_tile,
    near,
    row_start,
    row_terms,
    store_tile,
    surprise,
    taken,
    whole,
)


class Upstream(NamedTuple):
    """Gradients that arrive at the outputs: per row where the stride is 1, one for all where it is 0; None where nothing arrives."""

    loss: Tensor | None
    loss_stride: int
    z_loss: Tensor | None
    z_stride: int
    lse: Tensor | None
    entropy: Tensor | None


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def rowwise_backward_kernel(
    x,
    index_a,
    index_b,
    lam,
    dense,
    gradient,
    labels,
    stats_ptr,
    entropy_ptr,
    upstream,
    divisor_ptr,
    hyper,
    z_loss,
    scale,
    rows_outer,
    blocks,
    phi: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of the gradient from kept statistics; the second grid axis walks the classes."""
    HARD: tl.constexpr = index_a.ptr is not None
    PAIR: tl.constexpr = index_b.ptr is not None
    EVEN: tl.constexpr = labels.smoothing is not None and labels.weight_ptr is None and dense.ptr is None
    DENSE: tl.constexpr = dense.ptr is not None or (labels.smoothing is not None and not EVEN)
    ENTROPY: tl.constexpr = upstream.entropy is not None
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = program - outer * blocks
    if not WIDE:
        row = row.to(tl.int32)
    row = row * BR + tl.arange(0, BR)
    inside = row < rows_outer // ROWS * ROWS
    start, first = row_start(x, outer, row, ALIGN, SHIFT)
    classes = x.classes
    if ALIGN > 1:
        classes = classes // ALIGN * ALIGN
    lanes = tl.program_id(1) * BC + tl.arange(0, BC)
    column = columns(lanes, first, SHIFT)
    here = in_row(column, classes, SHIFT)
    a, c_a, logit_a, b, c_b, logit_b, keep, valid = row_terms(index_a, index_b, lam, labels, outer, row, inside, x)
    ALL_ROWS: tl.constexpr = upstream.lse is not None or upstream.entropy is not None
    read = inside if ALL_ROWS else keep
    end = classes
    if SHIFT > 1:
        end += tl.max(first, 0)
    mask = read[:, None]
    if ROWS > 1:
        mask = inside[:, None]  # neighbouring rows are read at once, what is not kept with the others
    tile = logit_tile(x, start, lanes, column, mask & near(lanes, end, here, SHIFT), 0.0, WIDE, "")

    at = outer * rows_outer + row
    rows = (tl.num_programs(0) // blocks).to(tl.int64) * rows_outer
    top = tl.load(stats_ptr + at, mask=inside, other=0.0)
    ls = tl.load(stats_ptr + rows + at, mask=inside, other=0.0)
    q = tl.load(stats_ptr + 2 * rows + at, mask=inside, other=0.0)
    c_row = c_a + c_b
    if HARD:
        _, slope_a = phi(surprise(c_a, top, ls, logit_a), *hyper)
        c_a *= slope_a
    if PAIR:
        _, slope_b = phi(surprise(c_b, top, ls, logit_b), *hyper)
        c_b *= slope_b
    p_share = tl.zeros([BR], tl.float32)
    q_share = tl.zeros([BR], tl.float32)
    if upstream.loss is not None:
        arriving = tl.load(upstream.loss + at * upstream.loss_stride, mask=inside, other=0.0).to(tl.float32) * scale
        q_share += arriving
        p_share += arriving * q
        if z_loss is not None:
            p_share += arriving * 2.0 * z_loss * (top + ls)
    if upstream.z_loss is not None:
        arriving = tl.load(upstream.z_loss + at * upstream.z_stride, mask=inside, other=0.0).to(tl.float32) * scale
        p_share += arriving * 2.0 * z_loss * (top + ls)
    p_share = tl.where(keep, tl.where(valid, p_share, float("nan")), 0.0)
    q_share = tl.where(keep, q_share, 0.0)
    if upstream.lse is not None:
        p_share += tl.load(upstream.lse + at, mask=inside, other=0.0).to(tl.float32)
    inverse = exp(-ls)
    p_share *= inverse
    h_share = tl.zeros([BR], tl.float32)
    h_shift = tl.zeros([BR], tl.float32)
    if labels.focus is not None:
        h_share, h_shift = spread_shares(q_share * c_row, ls, labels)
    if ENTROPY:
        h_share = tl.load(upstream.entropy + at, mask=inside, other=0.0).to(tl.float32) * inverse
        h_shift = tl.load(entropy_ptr + at, mask=inside, other=0.0) - ls

    d = tl.zeros([BR, BC], tl.float32)
    if DENSE:
        d = dense_tile(dense, labels, outer, row, inside, column, x, WIDE)
    even = tl.zeros([BR, 1], tl.float32)
    if EVEN:
        even = q_share[:, None] * (labels.smoothing / classes)
    share = even + taken(column, a, q_share * c_a, b, q_share * c_b, q_share, d, DENSE, HARD, PAIR)
    g = gradient_tile(tile, x, top, p_share, h_share, h_shift, share, labels.focus, ENTROPY)  # 0 in rows not read: their statistics are 0
    if ROWS > 1:
        g = tl.where(read[:, None], g, 0.0)
    to, _ = row_start(gradient, outer, row, ALIGN, SHIFT)
    store_tile(g, gradient, to, lanes, inside[:, None] & whole(lanes, first, end, here, SHIFT), WIDE, "")
    if SHIFT > 1:
        if tl.program_id(1) == 0:
            rest, left = leftovers(first, end, classes, SHIFT)
            there = columns(rest, first, SHIFT)
            few = logit_tile(x, start, rest, there, read[:, None] & left, 0.0, WIDE, "")
            q_few = 0.0
            if DENSE:
                q_few = dense_tile(dense, labels, outer, row, inside, there, x, WIDE)
            of_few = even + taken(there, a, q_share * c_a, b, q_share * c_b, q_share, q_few, DENSE, HARD, PAIR)
            store_tile(
                gradient_tile(few, x, top, p_share, h_share, h_shift, of_few, labels.focus, ENTROPY),
                gradient,
                to,
                rest,
                inside[:, None] & left,
                WIDE,
                "",
            )
