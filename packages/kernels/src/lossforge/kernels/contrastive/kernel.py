"""The template of losses of a matrix of similarities with pairs: a softmax over rows and one over columns.

For x (N, M) whose row i belongs to column i + o, with r = ln Σⱼ exp xᵢⱼ of a row and c = ln Σᵢ exp xᵢⱼ of a column:

    Lᵢ = ½ (rᵢ - xᵢ,ᵢ₊ₒ) + ½ (cᵢ₊ₒ - xᵢ,ᵢ₊ₒ)        g = ½ uᵢ (exp(x - rᵢ) - δ) + ½ uⱼ₋ₒ (exp(x - cⱼ) - δ)

There are two launches. Each reads the matrix once, and a program reads one tile. The first stores maximum and sum of each row and column of
a tile. The last program of a row or column of tiles joins these in their order, and the last of all programs adds up the loss. The second
launch writes the gradient.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import END
from lossforge.kernels.engine.reduce import add_up, divided
from lossforge.kernels.math import LOG2E, exp2, log
from lossforge.kernels.rowwise.rows import LOWEST, class_offset

JOINED = tl.constexpr(2048)  # parts of rows or columns that are joined at once
NEAR = tl.constexpr(60.0)  # exponents within this range share one exponential; its error is below 1e-12 of the largest


class Config(NamedTuple):
    """Compile-time constants.

    Attributes:
        BR, BC: rows and columns of a tile.
        WIDE: offsets within a tile need 64 bits.
        EMPTY_IS_ZERO: whether a mean over nothing is 0.
        EACH: each pair has an upstream gradient.
    """

    BR: int
    BC: int
    WIDE: bool
    EMPTY_IS_ZERO: bool
    EACH: bool = False


class Matrix(NamedTuple):
    """x with strides s0, s1. It is multiplied by `scale` as it is read."""

    ptr: Any
    s0: int
    s1: int
    scale: Any = None


class Side(NamedTuple):
    """Results of rows or of columns.

    Attributes:
        parts: maximum and sum of each in each tile, (2, tiles across, length).
        lse: (length,).
        loss: of each pair, or None.
    """

    parts: Any
    lse: Any
    loss: Any


Tile = namedtuple("Tile", "i j row column here there inside full")
"""Tile (i, j) of a matrix: indices of rows and columns, which rows, columns and elements exist, and whether all do."""


Line = namedtuple("Line", "at length across before")
"""Rows or columns `at` of `length`. The first `before` belong to no pair. `across` tiles make up a row or column."""


class Whole(NamedTuple):
    """Where the loss of all rows and columns is added up, with a slot for each row and column of tiles, and the factor of the loss."""

    sum: Any
    slots: Any
    scale: Any
    end: Any = END


@triton.jit
def tile_of(program, height, width, across, config):
    i, j = program // across, program % across
    row, column = i * config.BR + tl.arange(0, config.BR), j * config.BC + tl.arange(0, config.BC)
    full = ((i + 1) * config.BR <= height) & ((j + 1) * config.BC <= width)
    here, there = row < height, column < width
    return Tile(i, j, row, column, here, there, here[:, None] & there[None, :], full)


@triton.jit
def address(t, tile, config):
    """Return pointers to the elements of a tile."""
    base = t.ptr + tile.i.to(tl.int64) * config.BR * t.s0 + tile.j.to(tl.int64) * config.BC * t.s1
    row, column = class_offset(tl.arange(0, config.BR), t.s0, config.WIDE), class_offset(tl.arange(0, config.BC), t.s1, config.WIDE)
    return base + row[:, None] + column[None, :]


@triton.jit
def scaled(x, values):
    """Return values of x in float32, times its scale."""
    values = values.to(tl.float32)
    if x.scale is not None:
        values = values * x.scale
    return values


@triton.jit
def read(x, tile, config):
    """Load a tile in float32, with -inf outside of the matrix."""
    at = address(x, tile, config)
    if tile.full:
        found = scaled(x, tl.load(at))
    else:
        found = tl.where(tile.inside, scaled(x, tl.load(at, mask=tile.inside, other=0.0)), float("-inf"))
    return found


@triton.jit
def join(side, line):
    """Return ln Σ exp of rows or columns from their parts in all tiles across."""
    B: tl.constexpr = line.at.shape[0]
    K: tl.constexpr = JOINED // B
    m = tl.full([B], LOWEST, tl.float32)
    s = tl.zeros([B], tl.float32)
    for start in range(0, line.across, K):
        tile = start + tl.arange(0, K)
        part = side.parts + tile.to(tl.int64)[:, None] * line.length + line.at[None, :]
        mask = (tile < line.across)[:, None] & (line.at < line.length)[None, :]
        tops = tl.load(part, mask=mask, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(part + line.across.to(tl.int64) * line.length, mask=mask, other=0.0, cache_modifier=".cg")
        top = tl.maximum(m, tl.max(tops, 0))
        s = s * exp2((m - top) * LOG2E) + tl.sum(sums * exp2((tops - top[None, :]) * LOG2E), 0)
        m = top
    return m + log(s)


@triton.jit
def keep(side, line, tile, top, sum):
    """Store maximum and sum of each row or column of the tile-th tile across."""
    part = side.parts + tile.to(tl.int64) * line.length + line.at
    inside = line.at < line.length
    tl.store(part, top, mask=inside)
    tl.store(part + line.across.to(tl.int64) * line.length, sum, mask=inside)


@triton.jit
def close(x, height, offset, side, line, slot, whole):
    """Count this program among those of its rows or columns. The last of them finishes these; the last of all finishes the loss."""
    ticket = whole.sum.ticket + 1 + slot
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == line.across - 1:
        tl.store(ticket, 0)
        lse = join(side, line)
        pair = (line.at - line.before).to(tl.int64)
        paired = (pair >= 0) & (pair < height)
        own = scaled(x, tl.load(x.ptr + pair * x.s0 + (pair + offset) * x.s1, mask=paired, other=0.0))
        loss = tl.where(paired, 0.5 * (lse - own), 0.0)
        # columns without a pair do not take part in the gradient: exp(x - inf) is 0
        tl.store(side.lse + line.at, tl.where(paired, lse, float("inf")), mask=line.at < line.length)
        if side.loss is not None:
            tl.store(side.loss + pair, loss * whole.scale, mask=paired)
        tl.store(whole.sum.parts + slot, tl.sum(loss, 0))
        tl.debug_barrier()
        if tl.atomic_add(whole.sum.ticket, 1, sem="acq_rel", scope="gpu") == whole.slots - 1:
            tl.store(whole.sum.total, add_up(whole.sum.parts, whole.slots) * whole.scale)
            tl.store(whole.sum.ticket, 0)


@triton.jit(do_not_specialize=("height", "width", "offset", "across", "down"))
def contrastive_kernel(x, rows, columns, sum, divisor_ptr, scale, height, width, offset, across, down, config):
    """Store the sums of a tile. The last program of its rows, and of its columns, finishes these.

    Args:
        x: Matrix.
        rows, columns: Side.
        sum: Sum, with one more ticket for each row and each column of tiles.
        height: rows of the matrix.
        offset: the column that belongs to row 0.
        across: tiles of a row.
        down: tiles of a column.
    """
    scale = divided(scale, divisor_ptr, config.EMPTY_IS_ZERO)
    place = tile_of(tl.program_id(0), height, width, across, config)
    tile = read(x, place, config)

    row_top, column_top = tl.maximum(tl.max(tile, 1), LOWEST), tl.maximum(tl.max(tile, 0), LOWEST)
    top = tl.max(row_top, 0)
    if place.full & (top - tl.minimum(tl.min(row_top, 0), tl.min(column_top, 0)) < NEAR):
        e = exp2((tile - top) * LOG2E)
        row_sum, column_sum = tl.sum(e, 1), tl.sum(e, 0)
        row_top, column_top = tl.zeros([config.BR], tl.float32) + top, tl.zeros([config.BC], tl.float32) + top
    else:
        row_sum = tl.sum(exp2((tile - row_top[:, None]) * LOG2E), 1)
        column_sum = tl.sum(exp2((tile - column_top[None, :]) * LOG2E), 0)
    row, column = Line(place.row, height, across, 0), Line(place.column, width, down, offset)
    keep(rows, row, place.j, row_top, row_sum)
    keep(columns, column, place.i, column_top, column_sum)
    whole = Whole(sum, down + across, scale)
    close(x, height, offset, rows, row, place.i, whole)
    close(x, height, offset, columns, column, down + place.j, whole)


@triton.jit(do_not_specialize=("height", "width", "offset", "across"))
def contrastive_backward_kernel(
    x, grad_input, row_lse_ptr, column_lse_ptr, grad_output_ptr, divisor_ptr, scale, height, width, offset, across, config
):
    """Write the gradient of a tile.

    Args:
        x, grad_input: Matrix.
        grad_output_ptr: 0-d, or one for each pair with EACH; None for 1.
    """
    share = 0.5 * divided(scale, divisor_ptr, config.EMPTY_IS_ZERO)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is most likely still in the cache
    place = tile_of(program, height, width, across, config)
    row, column = place.row, place.column
    pair = column - offset
    paired = (pair >= 0) & (pair < height)
    of_row, of_column = tl.zeros([config.BR], tl.float32) + share, tl.zeros([config.BC], tl.float32) + share
    if grad_output_ptr is not None:
        if config.EACH:
            of_row *= tl.load(grad_output_ptr + row, mask=place.here, other=0.0).to(tl.float32)
            of_column *= tl.load(grad_output_ptr + pair, mask=paired, other=0.0).to(tl.float32)
        else:
            grad_output = tl.load(grad_output_ptr).to(tl.float32)
            of_row *= grad_output
            of_column *= grad_output
    r = tl.load(row_lse_ptr + row, mask=place.here, other=0.0)
    c = tl.load(column_lse_ptr + column, mask=place.there, other=0.0)
    tile = read(x, place, config)

    known = tl.where(paired, c, tl.max(r, 0))
    low = tl.minimum(tl.min(r, 0), tl.min(known, 0))
    if tl.maximum(tl.max(r, 0), tl.max(known, 0)) - low < 0.5 * NEAR:
        # exp(x - c) = exp(x - r) exp(r - low) exp(low - c)
        of_both = of_row[:, None] + exp2((r - low) * LOG2E)[:, None] * (exp2((low - c) * LOG2E) * of_column)[None, :]
        g = exp2((tile - r[:, None]) * LOG2E) * of_both
    else:
        g = exp2((tile - r[:, None]) * LOG2E) * of_row[:, None] + exp2((tile - c[None, :]) * LOG2E) * of_column[None, :]
    begin = place.i * config.BR + offset
    if (begin < (place.j + 1) * config.BC) & (place.j * config.BC < begin + config.BR):
        g -= tl.where((row + offset)[:, None] == column[None, :], 2.0 * of_row[:, None], 0.0)
    if x.scale is not None:
        g *= x.scale
    to = address(grad_input, place, config)
    if place.full:
        tl.store(to, g)
    else:
        tl.store(to, g, mask=place.inside)
