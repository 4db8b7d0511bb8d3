"""The template of losses in which a row of C classes passes through one softmax.

A loss adds φ(z, *hyper) → (φ, φ′) of the row's cross entropy z = Σⱼ qⱼ (lse - xⱼ). Targets, class weights, label smoothing, z-loss,
ignored rows, reduction, scaling and addressing are the template's. One launch gives values, gradient, or both in two sweeps of a row
(one where the row fits a tile); the classic split keeps each row's statistics and sweeps again in backward.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.math import exp, log
from lossforge.kernels.reduce import divided, finish
from lossforge.kernels.rows import LOWEST, accumulate, dense_tile, gradient_tile, hard_part, logit_tile, merge, row_terms, store_tile


class Outputs(NamedTuple):
    """Per-row results, contiguous over the rows. stats (4, rows): max, log-sum, Σ q and z, which backward needs."""

    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    stats: Tensor | None


class Upstream(NamedTuple):
    """Gradients that arrive at the outputs: per row where the stride is 1, one for all where it is 0; None where nothing arrives."""

    loss: Tensor | None
    loss_stride: int
    z_loss: Tensor | None
    z_stride: int
    lse: Tensor | None
    entropy: Tensor | None


@triton.jit
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
    blocks,  # programs an outer index
    phi: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALL_ROWS: tl.constexpr,  # ignored rows are read too, for outputs that do not depend on the target
    EMPTY_IS_ZERO: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WIDE: tl.constexpr,  # offsets within a row need 64 bits
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    DENSE: tl.constexpr = dense.ptr is not None or labels.smoothing is not None
    HARD: tl.constexpr = index_a.ptr is not None
    PAIR: tl.constexpr = index_b.ptr is not None
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = (program - outer * blocks).to(tl.int32) * BR + tl.arange(0, BR)
    inside = row < x.rows
    a, c_a, logit_a, b, c_b, logit_b, keep, valid = row_terms(index_a, index_b, lam, labels, outer, row, x)
    read = inside if ALL_ROWS else keep

    m = tl.full([BR, BC], LOWEST, tl.float32)
    s = tl.zeros([BR, BC], tl.float32)
    u = tl.zeros([BR, BC], tl.float32)
    d = tl.zeros([BR, BC], tl.float32)
    d_sum = tl.zeros([BR, BC], tl.float32)
    d_dot = tl.zeros([BR, BC], tl.float32)
    beaten = tl.zeros([BR, BC], tl.int32)
    if ONE_TILE:
        column = tl.arange(0, BC)
        tile = logit_tile(x, outer, row, column, read, WIDE, "evict_first")
        top = tl.max(tile, 1)
        step = tile - top[:, None]
        e = exp(step)
        total = tl.sum(e, 1)
        if ENTROPY:
            u_row = tl.sum(tl.where(e > 0, e * step, 0.0), 1)
        if DENSE:
            d = dense_tile(dense, labels, outer, row, column, x, WIDE)
            d_row = tl.sum(d, 1)
            dot_row = tl.sum(tl.where(d == 0, 0.0, d * step), 1)
        if out.correct is not None:
            beaten = ((tile > logit_a[:, None]) | ((tile == logit_a[:, None]) & (column[None, :] < a[:, None]))).to(tl.int32)
            beaten = tl.where(column[None, :] == a[:, None], 0, beaten)
    else:
        for start in range(0, x.classes, BC):
            column = start + tl.arange(0, BC)
            tile = logit_tile(x, outer, row, column, read, WIDE, "evict_last" if gradient.ptr is not None else "evict_first")
            if DENSE:
                d = dense_tile(dense, labels, outer, row, column, x, WIDE)
            m, s, u, d_sum, d_dot = accumulate(m, s, u, d_sum, d_dot, tile, d, ENTROPY, DENSE)
            if out.correct is not None:
                ahead = (tile > logit_a[:, None]) | ((tile == logit_a[:, None]) & (column[None, :] < a[:, None]))
                beaten = tl.where(ahead & (column[None, :] != a[:, None]), 1, beaten)
        top, total, u_row, d_row, dot_row = merge(m, s, u, d_sum, d_dot, ENTROPY, DENSE)

    ls = log(total)
    lse = top + ls
    z = tl.zeros([BR], tl.float32)
    q = tl.zeros([BR], tl.float32)
    if HARD:
        z += hard_part(c_a, top, ls, logit_a)
        q += c_a
    if PAIR:
        z += hard_part(c_b, top, ls, logit_b)
        q += c_b
    if DENSE:
        z += d_row * ls - dot_row
        q += d_row
    value, slope = phi(z, *hyper)
    p_share = slope * q
    if z_loss is not None:
        square = z_loss * lse * lse
        value += square
        p_share += 2.0 * z_loss * lse
    value = tl.where(keep, tl.where(valid & (total == total), value, float("nan")), 0.0)

    at = outer * x.rows + row
    if out.loss is not None:
        tl.store(out.loss + at, value * scale, mask=inside)
    if out.z_loss is not None:
        tl.store(out.z_loss + at, tl.where(keep, square, 0.0) * scale, mask=inside)
    if out.lse is not None:
        tl.store(out.lse + at, lse, mask=inside)
    if ENTROPY:
        tl.store(out.entropy + at, ls - u_row / total, mask=inside)
    if out.correct is not None:
        tl.store(out.correct + at, (tl.max(beaten, 1) == 0) & (a >= 0) & valid & (lse == lse), mask=inside)
    if out.stats is not None:
        rows = (tl.num_programs(0) // blocks).to(tl.int64) * x.rows
        tl.store(out.stats + at, tl.where(read, top, 0.0), mask=inside)
        tl.store(out.stats + rows + at, tl.where(read, ls, 0.0), mask=inside)
        tl.store(out.stats + 2 * rows + at, tl.where(read, q, 0.0), mask=inside)
        tl.store(out.stats + 3 * rows + at, tl.where(read, z, 0.0), mask=inside)

    if gradient.ptr is not None:
        shrink = tl.where(valid, scale, float("nan"))
        p_share = p_share * shrink / total
        q_share = slope * shrink
        if ONE_TILE:
            g = gradient_tile(
                tile, x, column, top, p_share, 0.0, 0.0, a, q_share * c_a, b, q_share * c_b, q_share, d, False, DENSE, HARD, PAIR
            )
            store_tile(g, gradient, x, outer, row, column, keep, WIDE)
        else:
            for start in range(0, x.classes, BC):
                column = start + tl.arange(0, BC)
                tile = logit_tile(x, outer, row, column, keep, WIDE, "evict_first")
                if DENSE:
                    d = dense_tile(dense, labels, outer, row, column, x, WIDE)
                g = gradient_tile(
                    tile, x, column, top, p_share, 0.0, 0.0, a, q_share * c_a, b, q_share * c_b, q_share, d, False, DENSE, HARD, PAIR
                )
                store_tile(g, gradient, x, outer, row, column, keep, WIDE)
    if sum is not None:
        finish(tl.sum(value, 0), sum, scale)
    if z_sum is not None:
        finish(tl.sum(tl.where(keep, square, 0.0), 0), z_sum, scale)


@triton.jit
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
    blocks,
    phi: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of the gradient from kept statistics; the second grid axis walks the classes."""
    DENSE: tl.constexpr = dense.ptr is not None or labels.smoothing is not None
    HARD: tl.constexpr = index_a.ptr is not None
    PAIR: tl.constexpr = index_b.ptr is not None
    ENTROPY: tl.constexpr = upstream.entropy is not None
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = (program - outer * blocks).to(tl.int32) * BR + tl.arange(0, BR)
    inside = row < x.rows
    a, c_a, _, b, c_b, _, keep, valid = row_terms(index_a, index_b, lam, labels, outer, row, x)
    ALL_ROWS: tl.constexpr = upstream.lse is not None or upstream.entropy is not None
    read = inside if ALL_ROWS else keep

    at = outer * x.rows + row
    rows = (tl.num_programs(0) // blocks).to(tl.int64) * x.rows
    top = tl.load(stats_ptr + at, mask=inside, other=0.0)
    ls = tl.load(stats_ptr + rows + at, mask=inside, other=0.0)
    q = tl.load(stats_ptr + 2 * rows + at, mask=inside, other=0.0)
    z = tl.load(stats_ptr + 3 * rows + at, mask=inside, other=0.0)
    _, slope = phi(z, *hyper)
    p_share = tl.zeros([BR], tl.float32)
    q_share = tl.zeros([BR], tl.float32)
    if upstream.loss is not None:
        arriving = tl.load(upstream.loss + at * upstream.loss_stride, mask=inside, other=0.0).to(tl.float32) * scale
        q_share += arriving * slope
        p_share += arriving * slope * q
        if z_loss is not None:
            p_share += arriving * 2.0 * z_loss * (top + ls)
    if upstream.z_loss is not None:
        arriving = tl.load(upstream.z_loss + at * upstream.z_stride, mask=inside, other=0.0).to(tl.float32) * scale
        p_share += arriving * 2.0 * z_loss * (top + ls)
    p_share = tl.where(keep, tl.where(valid, p_share, float("nan")), 0.0)
    if upstream.lse is not None:
        p_share += tl.load(upstream.lse + at, mask=inside, other=0.0).to(tl.float32)
    inverse = exp(-ls)
    p_share *= inverse
    h_share = tl.zeros([BR], tl.float32)
    h_shift = tl.zeros([BR], tl.float32)
    if ENTROPY:
        h_share = tl.load(upstream.entropy + at, mask=inside, other=0.0).to(tl.float32) * inverse
        h_shift = tl.load(entropy_ptr + at, mask=inside, other=0.0) - ls

    column = tl.program_id(1) * BC + tl.arange(0, BC)
    tile = logit_tile(x, outer, row, column, read, WIDE, "evict_first")
    d = tl.zeros([BR, BC], tl.float32)
    if DENSE:
        d = dense_tile(dense, labels, outer, row, column, x, WIDE)
    g = gradient_tile(
        tile, x, column, top, p_share, h_share, h_shift, a, q_share * c_a, b, q_share * c_b, q_share, d, ENTROPY, DENSE, HARD, PAIR
    )
    store_tile(g, gradient, x, outer, row, column, read, WIDE)
