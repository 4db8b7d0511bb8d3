"""The template of losses over a matrix of similarities in which pairs belong together: a softmax over rows and one over columns.

For x (N, M) whose row i belongs to column i + o, with r = ln Σⱼ exp xᵢⱼ of a row and c = ln Σᵢ exp xᵢⱼ of a column:

    Lᵢ = ½ (rᵢ - xᵢ,ᵢ₊ₒ) + ½ (cᵢ₊ₒ - xᵢ,ᵢ₊ₒ)        g = ½ uᵢ (exp(x - rᵢ) - δ) + ½ uⱼ₋ₒ (exp(x - cⱼ) - δ)

Two launches, each of which reads the matrix once, a tile a program. The first keeps maximum and sum of each row and column of a tile; the
last program of a row or column of tiles joins them in their order, and the last of these adds up the loss. The second writes the gradient.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.reduce import add_up, divided
from lossforge.kernels.math import LOG2E, exp2, log
from lossforge.kernels.row.rows import LOWEST, class_offset

JOINED = tl.constexpr(2048)  # parts of rows or columns that a program joins at once
NEAR = tl.constexpr(60.0)  # exponents that differ by no more share one exponential: what it loses is below 1e-12 of the largest


class Matrix(NamedTuple):
    """x with strides s0, s1, multiplied by `scale` as it is read."""

    ptr: Tensor
    s0: int
    s1: int
    scale: float | None = None


class Side(NamedTuple):
    """Rows or columns: maximum and sum of each in each tile across, (2, tiles across, length); lse and loss of each, (length,)."""

    parts: Tensor
    lse: Tensor
    loss: Tensor | None


@triton.jit
def address(t, i, j, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr):
    """Where the elements of tile (i, j) lie; WIDE where 32 bits do not hold their distance."""
    base = t.ptr + i.to(tl.int64) * BR * t.s0 + j.to(tl.int64) * BC * t.s1
    return base + class_offset(tl.arange(0, BR), t.s0, WIDE)[:, None] + class_offset(tl.arange(0, BC), t.s1, WIDE)[None, :]


@triton.jit
def read(x, at, full, inside):
    """A tile in float32, -inf outside of the matrix."""
    if full:
        tile = tl.load(at).to(tl.float32)
        if x.scale is not None:
            tile = tile * x.scale
    else:
        tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if x.scale is not None:
            tile = tile * x.scale
        tile = tl.where(inside, tile, float("-inf"))
    return tile


@triton.jit
def join(side, at, length, across):
    """ln Σ exp of rows or columns `at` from their parts in all tiles across."""
    B: tl.constexpr = at.shape[0]
    K: tl.constexpr = JOINED // B
    m = tl.full([B], LOWEST, tl.float32)
    s = tl.zeros([B], tl.float32)
    for start in range(0, across, K):
        tile = start + tl.arange(0, K)
        part = side.parts + tile.to(tl.int64)[:, None] * length + at[None, :]
        mask = (tile < across)[:, None] & (at < length)[None, :]
        tops = tl.load(part, mask=mask, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(part + across.to(tl.int64) * length, mask=mask, other=0.0, cache_modifier=".cg")
        top = tl.maximum(m, tl.max(tops, 0))
        s = s * exp2((m - top) * LOG2E) + tl.sum(sums * exp2((tops - top[None, :]) * LOG2E), 0)
        m = top
    return m + log(s)


@triton.jit
def close(x, height, offset, side, at, length, across, first, ticket, sum, slot, slots, scale):
    """Count this program among those of its rows or columns `at`; the last one finishes these, and the last of all the loss.

    Row or column `at` belongs to pair at - first.
    """
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == across - 1:
        tl.store(ticket, 0)
        lse = join(side, at, length, across)
        pair = (at - first).to(tl.int64)
        paired = (pair >= 0) & (pair < height)
        own = tl.load(x.ptr + pair * x.s0 + (pair + offset) * x.s1, mask=paired, other=0.0).to(tl.float32)
        if x.scale is not None:
            own = own * x.scale
        loss = tl.where(paired, 0.5 * (lse - own), 0.0)
        # columns of no pair take no part in the gradient: exp(x - inf) is 0
        tl.store(side.lse + at, tl.where(paired, lse, float("inf")), mask=at < length)
        if side.loss is not None:
            tl.store(side.loss + pair, loss * scale, mask=paired)
        tl.store(sum.parts + slot, tl.sum(loss, 0))
        tl.debug_barrier()
        if tl.atomic_add(sum.ticket, 1, sem="acq_rel", scope="gpu") == slots - 1:
            tl.store(sum.total, add_up(sum.parts, slots) * scale)
            tl.store(sum.ticket, 0)


@triton.jit(do_not_specialize=("height", "width", "offset", "across", "down"))
def contrastive_kernel(
    x,  # Matrix
    height,  # rows of the matrix
    width,
    offset,  # the column that belongs to row 0
    rows,  # Side
    columns,  # Side
    sum,  # with a ticket for each row and column of tiles beside the launch's
    divisor_ptr,
    scale,
    across,  # tiles of a row
    down,  # tiles of a column
    EMPTY_IS_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = i * BR + tl.arange(0, BR), j * BC + tl.arange(0, BC)
    here, there = row < height, column < width
    full = ((i + 1) * BR <= height) & ((j + 1) * BC <= width)
    tile = read(x, address(x, i, j, BR, BC, WIDE), full, here[:, None] & there[None, :])

    row_top, column_top = tl.maximum(tl.max(tile, 1), LOWEST), tl.maximum(tl.max(tile, 0), LOWEST)
    top = tl.max(row_top, 0)
    if full & (top - tl.minimum(tl.min(row_top, 0), tl.min(column_top, 0)) < NEAR):
        e = exp2((tile - top) * LOG2E)
        row_sum, column_sum = tl.sum(e, 1), tl.sum(e, 0)
        row_top, column_top = tl.zeros([BR], tl.float32) + top, tl.zeros([BC], tl.float32) + top
    else:
        row_sum = tl.sum(exp2((tile - row_top[:, None]) * LOG2E), 1)
        column_sum = tl.sum(exp2((tile - column_top[None, :]) * LOG2E), 0)
    part = rows.parts + j.to(tl.int64) * height + row
    tl.store(part, row_top, mask=here)
    tl.store(part + across.to(tl.int64) * height, row_sum, mask=here)
    part = columns.parts + i.to(tl.int64) * width + column
    tl.store(part, column_top, mask=there)
    tl.store(part + down.to(tl.int64) * width, column_sum, mask=there)

    slots = down + across
    close(x, height, offset, rows, row, height, across, 0, sum.ticket + 1 + i, sum, i, slots, scale)
    close(x, height, offset, columns, column, width, down, offset, sum.ticket + 1 + down + j, sum, down + j, slots, scale)


@triton.jit(do_not_specialize=("height", "width", "offset", "across"))
def contrastive_backward_kernel(
    x,  # Matrix
    height,
    width,
    offset,
    gradient,  # Matrix
    row_lse_ptr,
    column_lse_ptr,
    upstream_ptr,
    divisor_ptr,
    scale,
    across,
    EACH: tl.constexpr,  # one upstream gradient a pair
    EMPTY_IS_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    share = 0.5 * divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is likelier still in the cache
    i, j = program // across, program % across
    row, column = i * BR + tl.arange(0, BR), j * BC + tl.arange(0, BC)
    here, there = row < height, column < width
    full = ((i + 1) * BR <= height) & ((j + 1) * BC <= width)
    inside = here[:, None] & there[None, :]
    pair = column - offset
    paired = (pair >= 0) & (pair < height)
    of_row, of_column = tl.zeros([BR], tl.float32) + share, tl.zeros([BC], tl.float32) + share
    if upstream_ptr is not None:
        if EACH:
            of_row *= tl.load(upstream_ptr + row, mask=here, other=0.0).to(tl.float32)
            of_column *= tl.load(upstream_ptr + pair, mask=paired, other=0.0).to(tl.float32)
        else:
            upstream = tl.load(upstream_ptr).to(tl.float32)
            of_row *= upstream
            of_column *= upstream
    r = tl.load(row_lse_ptr + row, mask=here, other=0.0)
    c = tl.load(column_lse_ptr + column, mask=there, other=0.0)
    tile = read(x, address(x, i, j, BR, BC, WIDE), full, inside)

    known = tl.where(paired, c, tl.max(r, 0))
    low = tl.minimum(tl.min(r, 0), tl.min(known, 0))
    if tl.maximum(tl.max(r, 0), tl.max(known, 0)) - low < 0.5 * NEAR:
        # exp(x - c) = exp(x - r) exp(r - low) exp(low - c)
        of_both = of_row[:, None] + exp2((r - low) * LOG2E)[:, None] * (exp2((low - c) * LOG2E) * of_column)[None, :]
        g = exp2((tile - r[:, None]) * LOG2E) * of_both
    else:
        g = exp2((tile - r[:, None]) * LOG2E) * of_row[:, None] + exp2((tile - c[None, :]) * LOG2E) * of_column[None, :]
    begin = i * BR + offset
    if (begin < (j + 1) * BC) & (j * BC < begin + BR):
        g -= tl.where((row + offset)[:, None] == column[None, :], 2.0 * of_row[:, None], 0.0)
    if x.scale is not None:
        g *= x.scale
    to = address(gradient, i, j, BR, BC, WIDE)
    if full:
        tl.store(to, g)
    else:
        tl.store(to, g, mask=inside)
