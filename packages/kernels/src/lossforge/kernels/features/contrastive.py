"""The template of losses of a matrix of similarities with pairs: a softmax over rows and one over columns.

For x (N, M) whose row i belongs to column i + o, with r = ln Σⱼ exp xᵢⱼ of a row and c = ln Σᵢ exp xᵢⱼ of a column:

    Lᵢ = ½ (rᵢ - xᵢ,ᵢ₊ₒ) + ½ (cᵢ₊ₒ - xᵢ,ᵢ₊ₒ)        g = ½ uᵢ (exp(x - rᵢ) - δ) + ½ uⱼ₋ₒ (exp(x - cⱼ) - δ)

A log-sum-exp is kept as the stored element of the largest similarity, m, and the logarithm of the sum relative to it: r - xᵢⱼ is then
scale · (m - xᵢⱼ) + ln Σ, and a common offset of the similarities costs no digits.

There are two launches. Each reads the matrix once, and a program reads one tile. The first stores maximum and sum of each row and column of
a tile. The last program of a row or column of tiles joins these in their order, and the last of all programs adds up the loss. The second
launch writes the gradient.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.call import FLOAT, scale_of
from lossforge.kernels.classes.rowwise.rows import LOWEST, class_offset
from lossforge.kernels.engine.launch import PROGRAMS_A_GROUP, Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import END, Tensors, constants
from lossforge.kernels.engine.reduce import add_up, divided
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.features.calls import ContrastiveCall
from lossforge.kernels.math import LOG2E, TINY, exp2, log
from lossforge.kernels.plans import computed, in_order
from lossforge.kernels.tiles import MatrixTiles, contrastive_tiles, similarity_gradient_tiles

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
    """x with strides s0, s1. The similarities are scale · x; None for 1."""

    ptr: Any
    s0: int
    s1: int
    scale: Any = None


class Side(NamedTuple):
    """Results of rows or of columns.

    Attributes:
        parts: maximum and sum of each in each tile, (2, tiles across, length).
        lse: m and ln Σ, (2, length).
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


def _matrix(t: Any, scale: float = 1.0) -> Matrix:
    """Of a dimension of size 1 the stride is the one that leaves elements next to each other along one dimension."""
    (rows, columns), (s0, s1) = t.shape, t.stride()
    if rows == 1:
        s0 = 0
    return Matrix(t, s0, s1 if columns > 1 else int(s0 != 1), None if scale == 1.0 else scale)


def _config(call: ContrastiveCall, tiles: MatrixTiles, *matrices: Tensor, each: bool = False) -> Any:
    wide = any(max(t.stride()) * 256 >= 2**31 for t in matrices)
    return constants(Config(tiles.rows, tiles.columns, wide, call.empty_is_zero, EACH=each))


def _grid(call: ContrastiveCall, tiles: MatrixTiles) -> tuple[int, int]:
    """Return tiles down and across."""
    rows, columns = call.x.shape
    return triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)


def _compute(call: ContrastiveCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    rows, columns = call.x.shape
    tiles = contrastive_tiles(rows, columns)
    down, across = _grid(call, tiles)
    shapes = [(2, across, rows), (2, down, columns), (2, rows), (2, columns)]
    row_parts, column_parts, *kept = (new_like(call.x, (s, FLOAT)) for s in shapes)
    losses = [new_like(call.x, ((rows,), FLOAT)) if call.reduction == "none" else None for _ in kept]
    sides = Side(row_parts, kept[0], losses[0]), Side(column_parts, kept[1], losses[1])
    factors = (sum_slots(), call.normalizer, scale_of(call, rows))
    sizes = (rows, columns, call.offset, across, down, _config(call, tiles, call.x))
    counting = PROGRAMS_A_GROUP * (down + across)  # a ticket for each row and column of tiles
    arguments = (_matrix(call.x, call.logit_scale), *sides, *factors, *sizes)
    (value,) = Launch(contrastive_kernel, (down * across,), arguments, totals=1, counting=counting, num_warps=tiles.warps).start()
    if losses[0] is not None and losses[1] is not None:
        value = computed(torch.add, losses[0], losses[1])
    return (value,), kept


def _differentiate(call: ContrastiveCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    (gradient,) = gradients
    assert gradient is not None
    tiles = similarity_gradient_tiles()
    down, across = _grid(call, tiles)
    config = _config(call, tiles, call.x, gradient, each=grad_output is not None and grad_output.ndim == 1)
    matrices = (_matrix(call.x, call.logit_scale), _matrix(gradient))
    factors = (in_order(grad_output), call.normalizer, scale_of(call, call.x.shape[0]))
    arguments = (*matrices, *kept, *factors, *call.x.shape, call.offset, across, config)
    Launch(contrastive_backward_kernel, (down * across,), arguments, num_warps=tiles.warps).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward


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
def sign_and_size(scale):
    """Return the sign of a scale, and its size as what is above 0."""
    size = tl.abs(scale)
    return tl.where(scale < 0.0, -1.0, tl.where(scale == 0.0, 0.0, 1.0)), tl.where(size < TINY, TINY, size)


@triton.jit
def signed(x, values):
    """Return values of x in float32, times the sign of its scale: their order is that of the similarities."""
    values = values.to(tl.float32)
    if x.scale is not None:
        sign, _ = sign_and_size(x.scale)
        values = values * sign
    return values


@triton.jit
def unsigned(x, difference):
    """Return a difference of signed values as one of similarities."""
    if x.scale is not None:
        _, size = sign_and_size(x.scale)
        difference = difference * size
    return difference


@triton.jit
def exponential(x, difference):
    """Return e to a difference of signed values, as one of similarities."""
    if x.scale is not None:
        _, size = sign_and_size(x.scale)
        power = exp2(difference * (size * LOG2E))
    else:
        power = exp2(difference * LOG2E)
    return power


@triton.jit
def scaled(x, difference):
    """Return a difference of values of x as one of similarities."""
    if x.scale is not None:
        difference = difference * x.scale
    return difference


@triton.jit
def read(x, tile, config):
    """Load a tile in float32; 0 outside of the matrix."""
    at = address(x, tile, config)
    if tile.full:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=tile.inside, other=0.0)
    return found.to(tl.float32)


@triton.jit
def join(x, side, line):
    """Return the maximum of rows or columns and ln Σ exp relative to it, from their parts in all tiles across."""
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
        s = s * exponential(x, m - top) + tl.sum(sums * exponential(x, tops - top[None, :]), 0)
        m = top
    return m, log(s)


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
        top, ls = join(x, side, line)
        pair = (line.at - line.before).to(tl.int64)
        paired = (pair >= 0) & (pair < height)
        own = signed(x, tl.load(x.ptr + pair * x.s0 + (pair + offset) * x.s1, mask=paired, other=0.0))
        loss = tl.where(paired, 0.5 * (unsigned(x, top - own) + ls), 0.0)
        # columns without a pair do not take part in the gradient: exp(x - inf) is 0
        tl.store(side.lse + line.at, tl.where(paired, signed(x, top), 0.0), mask=line.at < line.length)
        tl.store(side.lse + line.length + line.at, tl.where(paired, ls, float("inf")), mask=line.at < line.length)
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
    tile = signed(x, read(x, place, config))
    if not place.full:
        tile = tl.where(place.inside, tile, float("-inf"))

    row_top, column_top = tl.maximum(tl.max(tile, 1), LOWEST), tl.maximum(tl.max(tile, 0), LOWEST)
    top = tl.max(row_top, 0)
    if place.full & (unsigned(x, top - tl.minimum(tl.min(row_top, 0), tl.min(column_top, 0))) < NEAR):
        e = exponential(x, tile - top)
        row_sum, column_sum = tl.sum(e, 1), tl.sum(e, 0)
        row_top, column_top = tl.zeros([config.BR], tl.float32) + top, tl.zeros([config.BC], tl.float32) + top
    else:
        row_sum = tl.sum(exponential(x, tile - row_top[:, None]), 1)
        column_sum = tl.sum(exponential(x, tile - column_top[None, :]), 0)
    row, column = Line(place.row, height, across, 0), Line(place.column, width, down, offset)
    keep(rows, row, place.j, row_top, row_sum)
    keep(columns, column, place.i, column_top, column_sum)
    whole = Whole(sum, down + across, scale)
    close(x, height, offset, rows, row, place.i, whole)
    close(x, height, offset, columns, column, down + place.j, whole)


@triton.jit
def soft(lse_ptr, at, mask, length):
    """Load the maximum of rows or columns, and ln Σ exp relative to it."""
    return tl.load(lse_ptr + at, mask=mask, other=0.0), tl.load(lse_ptr + length + at, mask=mask, other=0.0)


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
    row_top, row_ls = soft(row_lse_ptr, row, place.here, height)
    column_top, column_ls = soft(column_lse_ptr, column, place.there, width)
    tile = read(x, place, config)

    zero = tl.max(row_top, 0)  # what r and c are relative to
    r, c = scaled(x, row_top - zero) + row_ls, scaled(x, column_top - zero) + column_ls
    known = tl.where(paired, c, tl.max(r, 0))
    low = tl.minimum(tl.min(r, 0), tl.min(known, 0))
    of_rows = exp2(scaled(x, tile - row_top[:, None]) * LOG2E - (row_ls * LOG2E)[:, None])
    if tl.maximum(tl.max(r, 0), tl.max(known, 0)) - low < 0.5 * NEAR:
        # exp(x - c) = exp(x - r) exp(r - low) exp(low - c)
        g = of_rows * (of_row[:, None] + exp2((r - low) * LOG2E)[:, None] * (exp2((low - c) * LOG2E) * of_column)[None, :])
    else:
        of_columns = exp2(scaled(x, tile - column_top[None, :]) * LOG2E - (column_ls * LOG2E)[None, :])
        g = of_rows * of_row[:, None] + of_columns * of_column[None, :]
    begin = place.i * config.BR + offset
    if (begin < (place.j + 1) * config.BC) & (place.j * config.BC < begin + config.BR):
        g -= tl.where((row + offset)[:, None] == column[None, :], 2.0 * of_row[:, None], 0.0)
    g = scaled(x, g)
    to = address(grad_input, place, config)
    if place.full:
        tl.store(to, g)
    else:
        tl.store(to, g, mask=place.inside)
