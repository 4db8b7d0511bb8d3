"""The template of losses of all pairs of two sets of features, whose similarities are never in memory as a whole.

For features a (N, D) and b (M, D), x = scale · a bᵀ + bias, and the columns P of a row that belong to it:

    softmax: Lᵢ = rᵢ - Σ_P xᵢⱼ / |P|,  r = ln Σⱼ exp xᵢⱼ        g = exp(x - rᵢ) - [j ∈ P] / |P|
    both sides, one pair a row: Lᵢ = ½ (rᵢ - xᵢₚ) + ½ (cₚ - xᵢₚ),  c = ln Σᵢ exp xᵢⱼ
    decoupled: the sum of rᵢ is over the columns that do not belong to the row
    sigmoid: Lᵢ = Σⱼ softplus(-z xᵢⱼ),  z = 1 where j ∈ P, else -1      g = -z σ(-z x)

A program computes a tile of a bᵀ by tensor cores, in float32, and keeps it in registers. The first launch stores maximum and sum of each
row, and column, of a tile; the second joins them in their order. A softmax needs differences alone: r is kept as the product of the largest
x, m, and the logarithm of the sum relative to it, and x - rᵢ is scale · (a bᵀ - m) - ln Σ. So a common offset costs no digits. The gradient
computes the tiles again and stores g, a block of rows at a time; two matrix products make it the gradients of a and b (launch.py).
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.layout import END, halves_of, place_in_groups
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.features import calls
from lossforge.kernels.features.contrastive import sign_and_size
from lossforge.kernels.math import INTERPRETED, LOG2E, decay, exp2, log, log1p_unit

OWN, OTHERS, SAME = tl.constexpr(calls.OWN), tl.constexpr(calls.OTHERS), tl.constexpr(calls.SAME)
JOINED = tl.constexpr(32)  # tiles that are joined at once


class Config(NamedTuple):
    """Compile-time constants.

    Attributes:
        BR, BC, BK: rows, columns and features of a tile.
        GROUP: rows of tiles whose programs run together, so that their columns are read from the cache.
        SKIP: which columns a row leaves out, as features/calls.py names it.
        LABELLED: labels say what belongs together.
        DECOUPLED: what belongs together is not in the softmax.
        GUIDED: products of guides say what is left out as well.
        HARD: the own pair has another scale in the value.
        CIRCLE, MINED: as pair_sums.py says.
        SIGMOID: each pair is a decision of its own; else a softmax.
        COLUMNS: there is a softmax over the columns too.
        EACH: each row has an upstream gradient.
    """

    BR: int
    BC: int
    BK: int
    GROUP: int
    SKIP: int
    SIGMOID: bool
    COLUMNS: bool
    LABELLED: bool
    DECOUPLED: bool
    GUIDED: bool
    HARD: bool
    CIRCLE: bool
    MINED: bool
    EACH: bool = False


class Affine(NamedTuple):
    """Scale and bias of the similarities: numbers, times or plus what is in device memory."""

    scale: float
    bias: float
    scale_ptr: Any = None
    bias_ptr: Any = None
    hardness: float = 0.0


class Guide(NamedTuple):
    """Features whose products say what a row leaves out: those above its threshold. As a and b of the kernels, or None."""

    a: Any = None
    b: Any = None
    threshold_ptr: Any = None
    depth: int = 0


class Labels(NamedTuple):
    """Of rows and columns, which belong together where their labels are equal; without, row i belongs to column i + offset."""

    row_ptr: Any = None
    column_ptr: Any = None


class Given(NamedTuple):
    """What both kernels read. a, b: rows of `depth` features, each contiguous, s0 elements from one to the next."""

    a: Any
    b: Any
    affine: Affine
    labels: Labels
    guide: Guide
    depth: int
    end: Any = END


class Parts(NamedTuple):
    """Sums of each tile, (planes, tiles across, length): maximum and Σ exp, with labels Σ_P (x - maximum) and |P|, decoupled Σ_P x and
    |P|; of a sigmoid its loss alone. Maxima and differences are of products times the sign of the scale. own_ptr: of each row's pair."""

    row_ptr: Any
    column_ptr: Any = None
    own_ptr: Any = None


class Kept(NamedTuple):
    """What backward reads: m and ln Σ of rows and of columns, (2, length), inf for those without a pair; 1 / |P| with labels. With EACH
    the upstream gradients of the rows' losses and of the columns'."""

    row_lse: Any = None
    share: Any = None
    column_lse: Any = None
    row_grad: Any = None
    column_grad: Any = None


class Slopes(NamedTuple):
    """What the gradient's kernel writes: the gradient g of x, (rows, columns), perhaps in half precision; and of each program, from g in
    float32, the sum of g times the products of features, which scale's gradient takes, and of a sigmoid the sum of g, or None."""

    gradient: Any
    scale_ptr: Any = None
    bias_ptr: Any = None
    end: Any = END


Tile = namedtuple("Tile", "i j row column")
"""Tile (i, j). row, column: indices."""


class Side(NamedTuple):
    """Results of rows or columns, each (length,) or None, but lse (2, length); own: the product of each pair, times the scale's sign."""

    parts: Any
    own: Any = None
    lse: Any = None
    share: Any = None
    loss: Any = None


@triton.jit
def tile_of(rows, columns, config):
    """Return the tile of this program."""
    down, across = tl.cdiv(rows, config.BR), tl.cdiv(columns, config.BC)
    i, j = place_in_groups(tl.program_id(0), down, across, config.GROUP)
    return Tile(i, j, i * config.BR + tl.arange(0, config.BR), j * config.BC + tl.arange(0, config.BC))


@triton.jit
def products(a, b, tile, rows, columns, depth, config):
    """Return a tile of a bᵀ. Rows and columns beyond the last are those of the last; depth is a positive multiple of BK."""
    lane = tl.arange(0, config.BK)
    row = tl.minimum(tl.arange(0, config.BR), rows - 1 - tile.i * config.BR)
    column = tl.minimum(tl.arange(0, config.BC), columns - 1 - tile.j * config.BC)
    of_a, of_b = row[:, None] * a.s0 + lane[None, :], column[None, :] * b.s0 + lane[:, None]
    a_ptr, b_ptr = a.ptr + tile.i.to(tl.int64) * config.BR * a.s0, b.ptr + tile.j.to(tl.int64) * config.BC * b.s0
    total = tl.zeros([config.BR, config.BC], tl.float32)
    tl.assume(depth > 0)  # else a second way around the loop writes the accumulator, and ptxas lets no two products overlap
    for start in range(0, depth, config.BK):
        x, y = tl.load(a_ptr + start + of_a), tl.load(b_ptr + start + of_b)
        if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision="ieee")
    return total


@triton.jit
def loaded(affine):
    """Return scale and bias."""
    scale, bias = affine.scale, affine.bias
    if affine.scale_ptr is not None:
        scale = scale * tl.load(affine.scale_ptr).to(tl.float32)
    if affine.bias_ptr is not None:
        bias = bias + tl.load(affine.bias_ptr).to(tl.float32)
    return scale, bias


@triton.jit
def pair_scaled(x, affine, scale, tile, offset):
    """Return the products with the own pair's over the scale of all others, and that scale."""
    steep = scale + affine.hardness
    return tl.where((tile.row + offset)[:, None] == tile.column[None, :], x * (scale / steep), x), steep


@triton.jit
def below_threshold(guide, tile, rows, columns, config):
    """Return which products of guides exceed no threshold. It comes before the features' products, whose sums leave it no registers."""
    if config.GUIDED:
        threshold = tl.load(guide.threshold_ptr + tile.row, mask=tile.row < rows, other=0.0)
        below = ~(products(guide.a, guide.b, tile, rows, columns, guide.depth, config) > threshold[:, None])
    else:
        below = (tile.row < rows)[:, None]  # which nothing reads
    return below


@triton.jit
def related(labels, below, tile, rows, columns, offset, pairs, config):
    """Return which elements of a tile count, and which of these belong together."""
    own = (tile.row + offset)[:, None] == tile.column[None, :]
    counts = (tile.row < rows)[:, None] & (tile.column < columns)[None, :]
    if config.SKIP == OWN:
        counts = counts & ((tile.row + offset)[:, None] != tile.column[None, :])
    if config.SKIP == OTHERS:
        counts = counts & (own | (tile.column >= pairs)[None, :])
    together = own
    if labels.row_ptr is not None:
        of_rows = tl.load(labels.row_ptr + tile.row, mask=tile.row < rows, other=0)
        of_columns = tl.load(labels.column_ptr + tile.column, mask=tile.column < columns, other=0)
        if config.SKIP == SAME:
            counts = counts & (own | (of_rows[:, None] != of_columns[None, :]))
        else:
            together = of_rows[:, None] == of_columns[None, :]
    if config.GUIDED:
        counts = counts & (own | below)
    return counts, together & counts


@triton.jit
def keep(parts_ptr, plane, across, tile, length, at, values):
    """Store a number of each row or column of a tile."""
    where = (plane * across + tile).to(tl.int64) * length + at
    tl.store(parts_ptr + where, values, mask=at < length)


@triton.jit(do_not_specialize=("rows", "columns", "offset", "pairs"))
def similarity_kernel(given, parts, rows, columns, offset, pairs, config):
    """Store what is summed over the rows of a tile, and over its columns.

    Args:
        given: Given.
        parts: Parts.
    """
    tile = tile_of(rows, columns, config)
    scale, bias = loaded(given.affine)
    below = below_threshold(given.guide, tile, rows, columns, config)
    x = products(given.a, given.b, tile, rows, columns, given.depth, config)
    counts, together = related(given.labels, below, tile, rows, columns, offset, pairs, config)
    down, across = tl.cdiv(rows, config.BR), tl.cdiv(columns, config.BC)
    if config.SIGMOID:
        x = x * scale + bias
        loss = log1p_unit(decay(x)) + tl.maximum(tl.where(together, -x, x), 0.0, tl.PropagateNan.ALL)
        keep(parts.row_ptr, 0, across, tile.j, rows, tile.row, tl.sum(tl.where(counts, loss, 0.0), 1))
    else:
        if config.HARD:
            x, scale = pair_scaled(x, given.affine, scale, tile, offset)
        sign, size = sign_and_size(scale)
        if config.DECOUPLED:
            every = x * sign
            x = tl.where(counts & ~together, every, float("-inf"))
        else:
            x = tl.where(counts, x * sign, float("-inf"))
            every = x  # what belongs together counts: one tile in registers suffices
        top = tl.maximum(tl.max(x, 1), LOWEST)
        keep(parts.row_ptr, 0, across, tile.j, rows, tile.row, top)
        keep(parts.row_ptr, 1, across, tile.j, rows, tile.row, tl.sum(exp2((x - top[:, None]) * (size * LOG2E)), 1))
        if config.LABELLED:
            of_pairs = every
            if config.DECOUPLED == 0:
                of_pairs = x - top[:, None]
            keep(parts.row_ptr, 2, across, tile.j, rows, tile.row, tl.sum(tl.where(together, of_pairs, 0.0), 1))
            keep(parts.row_ptr, 3, across, tile.j, rows, tile.row, tl.sum(tl.where(together, 1.0, 0.0), 1))
        elif parts.own_ptr is not None:
            first = tile.i * config.BR + offset
            if (first < (tile.j + 1) * config.BC) & (tile.j * config.BC < first + config.BR):
                column = tile.row + offset
                here = (tile.row < rows) & (column >= tile.j * config.BC) & (column < (tile.j + 1) * config.BC)
                tl.store(parts.own_ptr + tile.row, tl.sum(tl.where(together, every, 0.0), 1), mask=here)
        if config.COLUMNS:
            top = tl.maximum(tl.max(x, 0), LOWEST)
            keep(parts.column_ptr, 0, down, tile.i, columns, tile.column, top)
            keep(parts.column_ptr, 1, down, tile.i, columns, tile.column, tl.sum(exp2((x - top[None, :]) * (size * LOG2E)), 0))


@triton.jit
def part_of(side, plane, across, tile, length, at, other):
    """Load a number of each row or column, of several tiles."""
    where = (plane * across + tile).to(tl.int64)[:, None] * length + at[None, :]
    mask = (tile < across)[:, None] & (at < length)[None, :]
    return tl.load(side.parts + where, mask=mask, other=other)


@triton.jit(do_not_specialize=("length", "across", "offset", "paired"))
def similarity_join_kernel(
    side,
    affine,
    sum,
    divisor_ptr,
    scale,
    length,
    across,
    offset,
    paired,
    SIGMOID: tl.constexpr,
    DECOUPLED: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join the tiles of rows, or of columns; add up the loss.

    Args:
        side: Side.
        sum: Sum.
        across: tiles.
        offset: what leads from a row or column to its pair's place in `own`.
        paired: places there.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    near, count = s, s
    factor, _ = loaded(affine)
    sign, size = sign_and_size(factor + affine.hardness)
    for start in range(0, across, JOINED):
        tile = start + tl.arange(0, JOINED)
        if SIGMOID:
            s += tl.sum(part_of(side, 0, across, tile, length, at, 0.0), 0)
        else:
            tops = part_of(side, 0, across, tile, length, at, LOWEST)
            top = tl.maximum(m, tl.max(tops, 0))
            sums = part_of(side, 1, across, tile, length, at, 0.0) * exp2((tops - top[None, :]) * (size * LOG2E))
            s = s * exp2((m - top) * (size * LOG2E)) + tl.sum(sums, 0)
            if side.share is not None:
                counts = part_of(side, 3, across, tile, length, at, 0.0)
                of_tiles = part_of(side, 2, across, tile, length, at, 0.0)
                if DECOUPLED:
                    near += tl.sum(of_tiles, 0)
                else:
                    of_tiles = tl.where(counts == 0.0, 0.0, of_tiles + counts * (tops - top[None, :]))
                    near = tl.where(count == 0.0, 0.0, near + count * (m - top)) + tl.sum(of_tiles, 0)
                count += tl.sum(counts, 0)
            m = top
    inside = at < length
    place = at + offset
    if SIGMOID:
        loss = s
    else:
        ls = log(s)
        if side.share is not None:
            inside = inside & (count > 0.0)
            share = 1.0 / tl.maximum(count, 1.0)
            if DECOUPLED:
                loss = (m - near * share) * size + ls
            else:
                loss = ls - near * share * size
            tl.store(side.share + at, share, mask=at < length)
        else:
            inside = inside & (place >= 0) & (place < paired)
            loss = (m - tl.load(side.own + place, mask=inside, other=0.0)) * size + ls
        # what has no pair takes no part in the gradient: exp(x - inf) is 0
        tl.store(side.lse + at, tl.where(inside, sign * m, 0.0), mask=at < length)
        tl.store(side.lse + length + at, tl.where(inside, ls, float("inf")), mask=at < length)
    loss = tl.where(inside, loss, 0.0)
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    if side.loss is not None:
        tl.store(side.loss + place, loss * scale, mask=(at < length) & (place >= 0) & (place < paired))
    finish(tl.sum(loss, 0), sum, scale)


@triton.jit
def soft(lse_ptr, at, length, mask):
    """Load m and ln Σ of rows or columns."""
    m = tl.load(lse_ptr + at, mask=mask, other=0.0)
    return m, tl.load(lse_ptr + length + at, mask=mask, other=float("inf"))


RowSlope = namedtuple("RowSlope", "m ls share upstream")
"""What the gradient takes of each row: the largest x and ln Σ of its softmax, 1 / |P|, and its upstream gradient."""


@triton.jit
def slope_of_rows(kept, row, rows, config):
    """Load what the gradient takes of each row."""
    here, unused = row < rows, row.to(tl.float32)
    m, ls, share, upstream = unused, unused, unused, unused
    if config.SIGMOID == 0:
        m, ls = soft(kept.row_lse, row, rows, here)
        share = tl.where(ls == float("inf"), 0.0, 1.0)
        if kept.share is not None:
            share = share * tl.load(kept.share + row, mask=here, other=0.0)
    if config.EACH:
        upstream = tl.load(kept.row_grad + row, mask=here, other=0.0).to(tl.float32)
    return RowSlope(m, ls, share, upstream)


@triton.jit
def gradient_of(x, pairs, of, tile, affine, kept, columns, config):
    """Return the gradient of a tile of products x. pairs: from `related`. affine: scale and bias."""
    counts, together = pairs
    scale, bias = affine
    there = tile.column < columns
    if config.SIGMOID:
        x = x * scale + bias
        e = decay(x)
        wrong = tl.where((x >= 0.0) == together, e, 1.0) / (1.0 + e)
        g = tl.where(together, -wrong, wrong)
    else:
        g = exp2((x - of.m[:, None]) * (scale * LOG2E) - (of.ls * LOG2E)[:, None])
        if config.DECOUPLED:
            g = tl.where(together, -of.share[:, None], g)
        else:
            g -= tl.where(together, of.share[:, None], 0.0)
    if config.EACH:
        g *= of.upstream[:, None]
    if config.COLUMNS:
        m, ls = soft(kept.column_lse, tile.column, columns, there)
        q = exp2((x - m[None, :]) * (scale * LOG2E) - (ls * LOG2E)[None, :])
        if config.DECOUPLED:
            q = tl.where(together, -1.0, q)
        else:
            q -= tl.where(together, 1.0, 0.0)
        if config.EACH:
            q *= tl.load(kept.column_grad + tile.column, mask=there, other=0.0).to(tl.float32)[None, :]
        g = 0.5 * (g + q)
    return tl.where(counts, g, 0.0)


@triton.jit
def columns_of(t, i: tl.constexpr, PARTS: tl.constexpr):
    """Return the i-th of one, two or four parts of a tile's columns."""
    if PARTS == 1:
        return t
    elif PARTS == 2:
        return halves_of(t)[i]
    else:
        return halves_of(halves_of(t)[i // 2])[i % 2]


@triton.jit(do_not_specialize=("rows", "columns", "offset", "pairs"))
def similarity_gradient_kernel(given, kept, out, rows, columns, offset, pairs, config):
    """Write the gradient of a block of rows of x, without the loss's own factor.

    Args:
        given: Given.
        kept: Kept.
        out: Slopes.
    """
    tile = tile_of(rows, columns, config)
    scale, bias = loaded(given.affine)
    below = below_threshold(given.guide, tile, rows, columns, config)
    x = products(given.a, given.b, tile, rows, columns, given.depth, config)
    of = slope_of_rows(kept, tile.row, rows, config)
    if config.HARD:
        x, scale = pair_scaled(x, given.affine, scale, tile, offset)
    # a part after the other takes fewer registers: two sums live beside the gradient where scale has one
    PARTS: tl.constexpr = 4 if out.scale_ptr is not None else 1 if config.SIGMOID else 2
    WIDTH: tl.constexpr = config.BC // PARTS
    whole, for_scale, for_bias = x, 0.0, 0.0
    for i in tl.static_range(PARTS):
        x = columns_of(whole, i, PARTS)
        part = Tile(tile.i, tile.j, tile.row, tile.j * config.BC + i * WIDTH + tl.arange(0, WIDTH))
        here_below = below
        if config.GUIDED:
            here_below = columns_of(below, i, PARTS)
        found = related(given.labels, here_below, part, rows, columns, offset, pairs, config)
        g = gradient_of(x, found, of, part, (scale, bias), kept, columns, config)
        if out.scale_ptr is not None:  # with HARD the scale is a number
            for_scale += tl.sum(tl.sum(g * x, 1), 0)
        if out.bias_ptr is not None:
            for_bias += tl.sum(tl.sum(g, 1), 0)
        to = out.gradient.ptr + part.row.to(tl.int64)[:, None] * out.gradient.s0 + part.column[None, :]
        tl.store(to, g, mask=(part.row < rows)[:, None] & (part.column < columns)[None, :])
    if out.scale_ptr is not None:
        tl.store(out.scale_ptr + tl.program_id(0), for_scale)
    if out.bias_ptr is not None:
        tl.store(out.bias_ptr + tl.program_id(0), for_bias)
