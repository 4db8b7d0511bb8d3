"""Losses of rows, computed inside the matrix product that gives their logits: no logit is ever in memory.

A tile of z = input · weightᵀ + bias is computed by tensor cores in float32, and stays in registers. An epilogue reads it before it is
rounded. There are three:

    statistics   of each row in a tile: its maximum m, Σ exp(x - m), the target's z, and what further results need. A second launch joins
                 the tiles of a row in their order, and computes the loss as the row-wise template does.
    slopes       the gradient G of z, from what is known of the rows. Two more products turn it into those of input and weight.
    exponentials e^z up to a factor a row: value and gradient of a scalar loss, see exponentials.py.

What a row gets depends on the row and the weights alone. Tiles are the same for every number of rows. Neither this number nor an address
that depends on it is specialised, because both change the layout of a load, and with it the order of a sum.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise import rows
from lossforge.kernels.classes.rowwise.kernel import add_up
from lossforge.kernels.classes.rowwise.results import row_shares, row_value, store_results
from lossforge.kernels.classes.rowwise.sweep import Span, load_stats, place_of, row_address
from lossforge.kernels.engine.layout import END, halves_of, place_in_groups
from lossforge.kernels.engine.reduce import divided
from lossforge.kernels.math import INTERPRETED, LOG2E, exp2

JOINED = tl.constexpr(32)  # tiles that are joined at once


class Config(NamedTuple):
    """Compile-time constants of a product.

    Attributes:
        BM, BN, BK: rows, classes and features of a tile.
        GROUP: tiles of rows whose programs run together, so that their classes are read from the cache.
        PROGRAMS: of a GPU. Each computes several tiles.
        ENTROPY, SUM, SQUARES, ARGMAX: which plane of the statistics holds Σ e^(x - m) (x - m), Σ (x - m), Σ e^2(x - m), and the first
            class of the maximum; 0: none does. For slopes ENTROPY is the first plane of an entropy's two factors.
        MAXIMA: of exponentials, which plane holds Σ e^(x - m), where the results are to have the bits of `statistics`; 0: none does.
        EVEN: which plane of the factors holds the target of every class.
        DENSE, BACKWARD: as in the row-wise template's Config.
        AGAIN: whether only the rows that the device lists are computed.
    """

    BM: int
    BN: int
    BK: int
    GROUP: int
    PROGRAMS: int
    ENTROPY: int = 0
    SUM: int = 0
    SQUARES: int = 0
    ARGMAX: int = 0
    MAXIMA: int = 0
    EVEN: int = 0
    DENSE: bool = False
    BACKWARD: bool = False
    AGAIN: bool = False


class Given(NamedTuple):
    """What an epilogue reads and writes beside its tile.

    Attributes:
        bias_ptr: (classes,), the layer's, or None.
        parts_ptr: (planes, halves of tiles across, rows), statistics of each row there.
        own_ptr: (rows,), the target's z.
        shares_ptr: (planes, rows), factors of each row's gradient: of `slope_tile` top, p, a, then h and shift, then even. Of
            exponentials the offset.
        again_ptr: how many rows are computed again, then which ones: (1 + rows,).
    """

    bias_ptr: Any = None
    parts_ptr: Any = None
    own_ptr: Any = None
    shares_ptr: Any = None
    again_ptr: Any = None
    end: Any = END


Tile = namedtuple("Tile", "begin row j first rows across")
"""A tile: its first row, its rows (BM,); its place in the row of tiles, its first class; the numbers of all rows, and of tiles across."""


@triton.jit
def bias_of(bias_ptr, begin, end, config):
    """Return the bias (1, BN) of the classes from `begin` on.

    It is loaded in two halves, because a load with an element for each thread decides the layout of the tile, which then moves through
    shared memory.
    """
    low = begin + tl.arange(0, config.BN // 2)
    high = low + config.BN // 2
    a, b = tl.load(bias_ptr + low, mask=low < end, other=0.0), tl.load(bias_ptr + high, mask=high < end, other=0.0)
    return tl.reshape(tl.permute(tl.join(a, b), [1, 0]), [1, config.BN]).to(tl.float32)


@triton.jit(do_not_specialize=("rows_in_all", "first"))
def linear_product_kernel(a, b, out, x, target, given, rows_in_all, columns, depth, first, config: tl.constexpr, EPILOGUE: tl.constexpr):
    """Compute tiles of z, and let the epilogue take each.

    Args:
        a: descriptor of the input; with AGAIN of its listed rows.
        b: descriptor of the weight.
        out: descriptor of what the epilogue stores, or None; with AGAIN Strided.
        x: Logits without a pointer.
        target: Target.
        given: Given.
        columns, first: number of classes of this launch, and the first of them.
    """
    down, across = tl.cdiv(rows_in_all, config.BM), tl.cdiv(columns, config.BN)
    steps = tl.cdiv(depth, config.BK)
    if config.AGAIN:
        listed = tl.load(given.again_ptr)
        down = tl.cdiv(listed, config.BM)
    for index in tl.range(tl.program_id(0), down * across, config.PROGRAMS, flatten=True):
        i, j = place_in_groups(index, down, across, config.GROUP)
        z = tl.full([config.BM, config.BN], 0.0, tl.float32)
        for k in range(steps):
            p, q = a.load([i * config.BM, k * config.BK]), b.load([first + j * config.BN, k * config.BK])
            if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
                p, q = p.to(tl.float32), q.to(tl.float32)
            z = tl.dot(p, q.T, z)
        if given.bias_ptr is not None:
            z += bias_of(given.bias_ptr, first + j * config.BN, first + columns, config)
        row = i * config.BM + tl.arange(0, config.BM)
        if config.AGAIN:
            row = tl.load(given.again_ptr + 1 + row, mask=row < listed, other=rows_in_all)
        EPILOGUE(z, Tile(i * config.BM, row, j, first + j * config.BN, rows_in_all, across), x, target, given, out, config)


@triton.jit
def part(parts_ptr, plane, j, row, count, across):
    """Return pointers to a number of the rows in tile j."""
    return parts_ptr + (plane * across + j).to(tl.int64) * count + row


@triton.jit
def store_own(z, t, begin, column, inside, tile, x, given):
    """Store the z of targets that are among the classes of `column`, from `begin` on."""
    mine = inside & (t >= begin) & (t < begin + column.shape[1]) & (t < x.classes)
    if tl.max(mine.to(tl.int32), 0) > 0:  # few tiles hold a target
        tl.store(given.own_ptr + tile.row, tl.sum(tl.where(column == t[:, None], z, 0.0), 1), mask=mine)


Half = namedtuple("Half", "seen m step e column here j")
"""Half of a tile: its logits, -inf outside of the classes; each row's maximum; the logits relative to this or to an offset, and their
exponentials; its classes, which of them there are, and its number in the row of halves."""


@triton.jit
def store_parts(half, tile, inside, given, config):
    """Store what is summed over the classes of half a tile."""
    parts_ptr, j, across = given.parts_ptr, half.j, 2 * tile.across
    tl.store(part(parts_ptr, 0, j, tile.row, tile.rows, across), half.m, mask=inside)
    tl.store(part(parts_ptr, 1, j, tile.row, tile.rows, across), tl.sum(half.e, 1), mask=inside)
    if config.ARGMAX:
        best = tl.min(tl.where((half.seen == half.m[:, None]) & half.here, half.column, rows.NONE), 1).to(tl.float32, bitcast=True)
        tl.store(part(parts_ptr, config.ARGMAX, j, tile.row, tile.rows, across), best, mask=inside)
    if config.MAXIMA:
        of_maximum = tl.sum(exp2((half.seen - half.m[:, None]) * LOG2E), 1)
        tl.store(part(parts_ptr, config.MAXIMA, j, tile.row, tile.rows, across), of_maximum, mask=inside)
    if config.ENTROPY:
        u = tl.sum(tl.where(half.e > 0, half.e * half.step, 0.0), 1)
        tl.store(part(parts_ptr, config.ENTROPY, j, tile.row, tile.rows, across), u, mask=inside)
    if config.SUM:
        above = tl.sum(tl.where(half.here, half.step, 0.0), 1)
        tl.store(part(parts_ptr, config.SUM, j, tile.row, tile.rows, across), above, mask=inside)
    if config.SQUARES:
        squares = tl.sum(half.e * half.e, 1)
        tl.store(part(parts_ptr, config.SQUARES, j, tile.row, tile.rows, across), squares, mask=inside)


@triton.jit
def statistics(z, tile, x, target, given, out, config):
    """Store what is summed over the classes of each half of a tile."""
    HALF: tl.constexpr = config.BN // 2
    inside = tile.row < tile.rows
    t = tl.load(target.a.ptr + tile.row, mask=inside, other=-1)
    halves = halves_of(z)
    for i in tl.static_range(2):
        j = 2 * tile.j + i
        column = j * HALF + tl.arange(0, HALF)[None, :]
        here = column < x.classes
        store_own(halves[i], t, j * HALF, column, inside, tile, x, given)
        seen = tl.where(here, rows.transform(halves[i], x, column, here), float("-inf"))
        m = tl.maximum(tl.max(seen, 1), rows.LOWEST)
        step = seen - m[:, None]
        e = exp2(step * LOG2E)
        store_parts(Half(seen, m, step, e, column, here, j), tile, inside, given, config)


@triton.jit
def factor(shares_ptr, plane, tile):
    """Load a factor of the rows' gradients."""
    at = shares_ptr + (plane + tile.row * 0).to(tl.int64) * tile.rows + tile.row
    return tl.load(at, mask=tile.row < tile.rows, other=0.0)


@triton.jit
def slopes(z, tile, x, target, given, out, config):
    """Store the gradient of a tile's logits."""
    inside = tile.row < tile.rows
    t = tl.load(target.a.ptr + tile.row, mask=inside, other=-1).to(tl.int32)
    top, p, a = factor(given.shares_ptr, 0, tile), factor(given.shares_ptr, 1, tile), factor(given.shares_ptr, 2, tile)
    h = tl.full([config.BM], 0.0, tl.float32)
    shift, even = h, h
    if config.ENTROPY:
        h, shift = factor(given.shares_ptr, config.ENTROPY, tile), factor(given.shares_ptr, config.ENTROPY + 1, tile)
    if config.EVEN:
        even = factor(given.shares_ptr, config.EVEN, tile)
    dead = ((p == 0.0) & (a == 0.0) & (h == 0.0))[:, None]  # the logits of a row that does not count may be nan
    terms = rows.Terms(t, a, a, t, a, a, inside, inside)
    shares = rows.Shares(top, p, a, a, a, h, shift, even[:, None], a)
    of = rows.GradientOp(x, target, None, rows.RowStats(None, None, terms, shares, inside, inside))
    HALF: tl.constexpr = config.BN // 2
    halves = halves_of(z)
    for i in tl.static_range(2):
        column = tile.first + i * HALF + tl.arange(0, HALF)[None, :]
        seen = rows.transform(halves[i], x, column, column < x.classes)
        g = tl.where(dead, 0.0, rows.slope_tile(seen, column, None, of, True, config))
        out.store([tile.begin, tile.j * config.BN + i * HALF], g.to(out.dtype))


@triton.jit
def span_of_rows(count, classes, config):
    """Return the rows of this program."""
    row = tl.program_id(0) * config.BR + tl.arange(0, config.BR)
    none = tl.program_id(0).to(tl.int64) * 0
    return Span(none, row, row < count, count, tl.num_programs(0), none, classes, classes, classes, classes)


@triton.jit
def parts_of(parts_ptr, plane, j, span, across, other):
    """Load a number of the rows in several tiles."""
    at = part(parts_ptr, plane, j[:, None], span.row[None, :], span.rows_outer, across)
    return tl.load(at, mask=(j < across)[:, None] & span.inside[None, :], other=other)


@triton.jit
def maxima(parts_ptr, span, across):
    """Return the maximum of each row over the halves of tiles."""
    top = tl.full([span.row.shape[0]], rows.LOWEST, tl.float32)
    for start in range(0, across, JOINED):
        top = tl.maximum(top, tl.max(parts_of(parts_ptr, 0, start + tl.arange(0, JOINED), span, across, rows.LOWEST), 0))
    return top


@triton.jit
def joined(parts_ptr, offset, sums, x, terms, span, across, planes):
    """Return the Softmax of rows, relative to the rows' offset. None: each half is relative to its own maximum, and the rows to theirs.

    sums: the plane of the halves' sums.
    """
    zero = tl.full([span.row.shape[0]], 0.0, tl.float32)
    top, s, u, above, squares = zero, zero, zero, zero, zero
    if planes.ARGMAX or offset is None:
        top = maxima(parts_ptr, span, across)
    best = tl.full([span.row.shape[0]], rows.NONE, tl.int32)
    for start in range(0, across, JOINED):
        j = start + tl.arange(0, JOINED)
        m, more = parts_of(parts_ptr, 0, j, span, across, rows.LOWEST), parts_of(parts_ptr, sums, j, span, across, 0.0)
        if offset is None:
            step = m - top[None, :]
        else:
            step = more * 0.0
        fade = exp2(step * LOG2E)
        s += tl.sum(more * fade, 0)
        if planes.ENTROPY:
            steps = parts_of(parts_ptr, planes.ENTROPY, j, span, across, 0.0)
            u += tl.sum(tl.where(more == 0, 0.0, fade * (steps + step * more)), 0)
        if planes.SUM:
            number = tl.minimum(tl.maximum(x.classes - j * (planes.BN // 2), 0), planes.BN // 2)
            summed = parts_of(parts_ptr, planes.SUM, j, span, across, 0.0) + number[:, None] * step
            above += tl.sum(tl.where((j < across)[:, None], summed, 0.0), 0)
        if planes.SQUARES:
            squares += tl.sum(parts_of(parts_ptr, planes.SQUARES, j, span, across, 0.0) * fade * fade, 0)
        if planes.ARGMAX:
            of_tile = parts_of(parts_ptr, planes.ARGMAX, j, span, across, 0.0).to(tl.int32, bitcast=True)
            best = tl.minimum(best, tl.min(tl.where((m == top[None, :]) & (j < across)[:, None], of_tile, rows.NONE), 0))
    reference = top if offset is None else offset
    return rows.Softmax(reference, s, u, zero, above, (best != terms.a).to(tl.int32), best, squares, above)


@triton.jit(do_not_specialize=("count",))
def linear_join_kernel(x, target, parts_ptr, out, sums, loss, count, across, planes: tl.constexpr, config: tl.constexpr):
    """Join the tiles of rows, and compute their results.

    Args:
        x: Logits, whose memory holds the target's z alone.
        out: Outputs.
        sums: a Sum or None each: of the loss, of the z-loss.
        loss: RowLoss.
        count: rows.
        across: halves of tiles.
        planes: Config of the product.
        config: that of the row-wise template.
    """
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = span_of_rows(count, x.classes, config)
    terms = rows.row_terms(target, span.outer, span.row, span.inside, x)
    each = 0.0
    if config.EVEN:
        each = target.labels.smoothing / span.classes
    found = joined(parts_ptr, None, 1, x, terms, span, across, planes)
    of_row = row_value(found, terms, each, target, loss, config)
    add_up(of_row.loss, of_row.z_loss, sums, scale)
    store_results(out, of_row, found, terms, scale, found.m, span, config)


@triton.jit(do_not_specialize=("count",))
def linear_shares_kernel(target, kept, grad_outputs, loss, shares_ptr, classes, count, planes: tl.constexpr, config: tl.constexpr):
    """Store the factors of the rows' gradients, (planes, rows).

    Args:
        kept: Kept.
        grad_outputs: GradOutputs.
        count: rows.
    """
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = span_of_rows(count, classes, config)
    t = tl.load(target.a.ptr + span.row, mask=span.inside, other=target.labels.ignore)
    counts = t != target.labels.ignore
    if target.lam.ptr is not None:
        counts = counts & (tl.load(row_address(target.lam, 0, span.row), mask=span.inside, other=0.0) != 0.0)
    none = tl.full([config.BR], 0.0, tl.float32)
    terms = rows.Terms(t, none, none, t, none, none, span.inside & counts, ((t >= 0) & (t < classes)) | (t == target.labels.ignore))
    m, ls, own = load_stats(kept.stats, 3, span)
    found = row_shares((place_of(span), m, ls, own, kept.entropy), terms, grad_outputs, target, loss, scale, span, config)
    if config.EVEN:
        own = own - target.labels.smoothing
    to, length = shares_ptr + span.row, span.rows_outer.to(tl.int64)
    tl.store(to, found.top, mask=span.inside)
    tl.store(to + length, found.p, mask=span.inside)
    tl.store(to + 2 * length, found.a * own, mask=span.inside)
    if planes.ENTROPY:
        tl.store(to + planes.ENTROPY * length, found.h, mask=span.inside)
        tl.store(to + (planes.ENTROPY + 1) * length, found.shift, mask=span.inside)
    if planes.EVEN:
        even = tl.sum(found.even, 1)
        tl.store(to + planes.EVEN * length, even, mask=span.inside)
