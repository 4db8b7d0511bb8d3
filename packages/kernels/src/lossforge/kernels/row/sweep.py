"""One sweep over rows of classes, for every loss of a row: cross entropy and its kin, divergences, top-k.

A program has BR rows, a tile of them BC classes. Classes are counted from `first`, the place of class 0 in the tile's row of lanes: where
a row does not begin at an aligned address, its tiles begin up to SHIFT - 1 elements before it, so that all but the first and the last
are read and written whole and aligned.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import longer
from lossforge.kernels.engine.reduce import count_rows, divided, over
from lossforge.kernels.tiles import COUNTED as MOST

COUNTED = tl.constexpr(MOST)


class Config(NamedTuple):
    """What a kernel over rows is compiled for, beside its formula."""

    BR: int
    BC: int
    TENSORS: int = 1  # read side by side
    VEC: int = 1  # neighbouring classes that one lane sums
    STAGES: int | None = None  # tiles on their way at once in a sweep's first direction
    ONE_TILE: bool = False
    WIDE: bool = False  # offsets within a row, or the number of rows, need 64 bits
    ALIGN: int = 1  # what rows' offsets and the number of classes are multiples of
    SHIFT: int = 1  # tiles begin at a multiple of it before class 0
    MULTIPLE: int = 1  # what the rows an outer index are a multiple of; above 1 a program reads neighbouring rows at once
    COUNT: bool = False  # the kernel counts the rows' class indices itself: they are contiguous, and at most COUNTED
    EMPTY_IS_ZERO: bool = False
    DENSE: bool = False  # targets of all classes: probabilities, or smoothing with class weights
    EVEN: bool = False  # the same target for all classes: smoothing without class weights
    ENTROPY: bool = False  # of rows: an output, BACKWARD its gradient
    CORRECT: bool = False
    ALL_ROWS: bool = False  # ignored rows are read too, for outputs that do not depend on the target
    BACKWARD: bool = False  # the second launch of the classic split
    SWAP: bool = False
    RENORMALIZE: bool = False
    TAIL: bool = False
    KP: int = 1  # entries of a row, up to a power of 2


Span = namedtuple("Span", "outer row inside rows_outer blocks first classes end low high")
"""A program's rows. A row's lanes are [0, end), in tiles of BC; the tiles from `low` to `high` lie wholly inside it. inside: which rows
exist."""

Reading = namedtuple("Reading", "edge full other EVICT needed BACK", defaults=(None, False))
"""What a sweep reads: masks of rows, of the first and the last tile (edge) and of those inside the row (full; None: all). needed: where
no row is, the tiles inside the row are left out; None: all are. BACK: the tiles inside the row come in reverse: what was read last is
likelier still in the cache."""

Tile = namedtuple("Tile", "stored lanes column mask here written EVICT")
"""A tile of each tensor as it is stored, and its classes. None: all are read, exist, may be written. column: class of each element, (BR
or 1, BC). mask: what was read. here: which classes exist. written: which classes may be written here."""


@triton.jit
def scaled(loss, index, weight_ptr, ignore, i, counted, classes, config):
    """The loss's scale over the divisor: the device's, or where COUNT the rows i of class indices that count."""
    if config.COUNT:
        rows = count_rows(index.ptr, None, None, weight_ptr, i, counted, classes, ignore)
        scale = over(loss.scale, rows, config.EMPTY_IS_ZERO)
    else:
        scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    return scale


@triton.jit
def row_address(t, outer, row):
    """Where the rows of a tensor with s0 and s1 begin."""
    return t.ptr + outer * t.s0 + row.to(tl.int64) * t.s1


@triton.jit
def element_address(t, outer, row, at):
    """Where elements `at` of the rows lie."""
    return t.ptr + (outer * t.s0 + row.to(tl.int64) * t.s1 + at.to(tl.int64) * t.s2)


@triton.jit
def row_start(t, outer, row, config):
    """Offset of the rows in a tensor with s0, s1, s2, at or before class 0, and how far before it."""
    offset = outer * t.s0 + row.to(tl.int64) * t.s1
    first = (offset * 0).to(tl.int32)
    if config.ALIGN > 1:
        offset = offset // config.ALIGN * config.ALIGN  # tells the compiler that loads can be vectorised
    if config.SHIFT > 1:
        aligned = offset // config.SHIFT * config.SHIFT
        first = (offset - aligned).to(tl.int32)
        offset = aligned
    return offset, first


@triton.jit
def span_of(x, rows_outer, blocks, config):
    """The rows of this program; rows_outer rows an outer index, in blocks of BR."""
    classes = x.classes
    if config.ALIGN > 1:
        classes = classes // config.ALIGN * config.ALIGN  # tells the compiler that loads can be vectorised
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = program - outer * blocks
    if not config.WIDE:
        row = row.to(tl.int32)
    row = row * config.BR + tl.arange(0, config.BR)
    inside = row < rows_outer // config.MULTIPLE * config.MULTIPLE  # the compiler then knows that neighbours are all inside
    _, first = row_start(x, outer, row, config)
    end = classes
    low = 0
    if config.SHIFT > 1:
        end += tl.max(first, 0)
        low = config.BC
    high = tl.maximum(end // config.BC * config.BC, low)
    return Span(outer, row, inside, rows_outer, blocks, first, classes, end, low, high)


@triton.jit
def place_of(span):
    """The rows' places among all rows."""
    return span.outer * span.rows_outer + span.row


@triton.jit
def columns(lanes, span, config):
    """Classes (BR or 1, BC) of lanes."""
    column = lanes[None, :]
    if config.SHIFT > 1:
        column = column - span.first[:, None]
    return column


@triton.jit
def class_offset(lane, stride, WIDE: tl.constexpr):
    """Offset of lanes within a row; WIDE where 32 bits do not hold it."""
    return lane.to(tl.int64) * stride if WIDE else lane * stride


@triton.jit
def start_of(t, span, config):
    """Offset of the rows in a tensor, at or before class 0: found once, before branches and loops."""
    start, _ = row_start(t, span.outer, span.row, config)
    return start


@triton.jit
def starts_of(tensors, span, config):
    TENSORS: tl.constexpr = config.TENSORS
    starts = ()
    for i in tl.static_range(TENSORS):
        starts = longer(starts, start_of(tensors[i], span, config))
    return starts


@triton.jit
def addresses(t, start, lanes, config):
    return t.ptr + start[:, None] + class_offset(lanes, t.s2, config.WIDE)[None, :]


@triton.jit
def stored_tile(t, start, lanes, mask, other, EVICT, config):
    """Elements (BR, BC) of a tensor as they lie in memory; `other` where the mask is false. Without a mask all are read."""
    at = addresses(t, start, lanes, config)
    if mask is None:
        tile = tl.load(at, eviction_policy=EVICT)
    else:
        tile = tl.load(at, mask=mask, other=other, eviction_policy=EVICT)
    return tile


@triton.jit
def stored_tiles(tensors, starts, lanes, mask, other, EVICT, config):
    """As stored_tile, of each tensor."""
    TENSORS: tl.constexpr = config.TENSORS
    tiles = ()
    for i in tl.static_range(TENSORS):
        tiles = longer(tiles, stored_tile(tensors[i], starts[i], lanes, mask, other, EVICT, config))
    return tiles


@triton.jit
def store_tile(g, t, start, lanes, mask, EVICT, config):
    tl.store(addresses(t, start, lanes, config), g, mask=mask, eviction_policy=EVICT)


@triton.jit
def existing(x, tile, config):
    """x of a tile, but -inf in what does not exist, where more than exists was read."""
    if config.SHIFT > 1 and tile.here is not None:
        x = tl.where(tile.here, x, float("-inf"))
    return x


@triton.jit
def write_tile(g, tile, of, config):
    """Store what may be written of a tile: of.gradient from of.rows.to on."""
    inside = of.rows.span.inside[:, None]
    if config.MULTIPLE > 1:  # neighbouring rows are read at once, those not kept with the others
        g = tl.where(of.rows.keep[:, None], g, 0.0)
    if tile.written is not None:
        store_tile(g, of.gradient, of.rows.to, tile.lanes, inside & tile.written, tile.EVICT, config)
    else:
        store_tile(g, of.gradient, of.rows.to, tile.lanes, None if config.BR == 1 else inside, tile.EVICT, config)


@triton.jit
def edge(at, inside, span, config):
    """Of the tile from lane `at`, which may reach beyond the row: lanes, classes, which classes exist, and what to read of rows `inside`.

    With SHIFT whole aligned vectors are read that hold a class of the row.
    """
    lanes = at + tl.arange(0, config.BC)
    column = columns(lanes, span, config)
    here = column < span.classes
    near = here
    if config.SHIFT > 1:
        here = here & (column >= 0)
        near = (lanes < tl.cdiv(span.end, config.SHIFT) * config.SHIFT)[None, :]
    return lanes, column, here, inside & near


@triton.jit
def read_edge(at, tensors, starts, span, reading, config):
    lanes, _, _, mask = edge(at, reading.edge, span, config)
    return stored_tiles(tensors, starts, lanes, mask, reading.other, reading.EVICT, config)


@triton.jit
def take_edge(state, stored, at, span, reading, take, operation, config):
    """Take the tile that read_edge read; with SHIFT whole aligned vectors are written that lie in the row, the rest are the leftovers."""
    lanes, column, here, mask = edge(at, reading.edge, span, config)
    written = here
    if config.SHIFT > 1:
        begin = tl.cdiv(tl.max(span.first, 0), config.SHIFT) * config.SHIFT
        written = ((lanes >= begin) & (lanes < span.end // config.SHIFT * config.SHIFT))[None, :]
    return take(state, Tile(stored, lanes, column, mask, here, written, reading.EVICT), operation, config)


@triton.jit
def sweep(state, tensors, span, reading, take, operation, config):
    """Take all tiles of the tensors' rows into `state`, tensors: take(state, Tile, operation, config) → state.

    The last and the first, which may reach beyond the row, come first: read before it is known whether the row counts.
    A record that holds records with constants must have no tensors or numbers beside them: Triton 3.6 loses the constants in a loop.
    """
    starts = starts_of(tensors, span, config)
    for edge in tl.static_range(2 if config.SHIFT > 1 else 1):
        at = span.high if edge == 0 else 0
        if at < span.end:
            stored = read_edge(at, tensors, starts, span, reading, config)
            state = take_edge(state, stored, at, span, reading, take, operation, config)
    stop = span.high
    if reading.needed is not None:
        stop = tl.where(tl.max(reading.needed.to(tl.int32), 0) > 0, span.high, span.low)
    for step in tl.range(span.low, stop, config.BC, num_stages=None if reading.BACK else config.STAGES):
        begin = stop + span.low - config.BC - step if reading.BACK else step
        lanes = begin + tl.arange(0, config.BC)
        column = columns(lanes, span, config)
        tiles = stored_tiles(tensors, starts, lanes, reading.full, reading.other, reading.EVICT, config)
        state = take(state, Tile(tiles, lanes, column, reading.full, None, None, reading.EVICT), operation, config)
    return state


@triton.jit
def nothing():
    """The state of a sweep that keeps none."""
    return tl.full([1], 0, tl.int32)


@triton.jit
def leftovers(tensors, of, write, config):
    """Write the gradient in the lanes of the rows before their first whole vector and after their last."""
    i = tl.arange(0, 2 * config.SHIFT)
    begin = tl.max(of.rows.span.first, 0)
    tail = of.rows.span.end // config.SHIFT * config.SHIFT
    lanes = tl.where(i < config.SHIFT, i, tail + i - config.SHIFT)
    # a number chosen before it is compared: in Triton's interpreter a lone condition joined with a block's is no mask
    before, after = tl.where(begin > 0, begin, config.SHIFT), tl.where(tail >= config.SHIFT, of.rows.span.end, 0)
    left = tl.where(i < config.SHIFT, i >= before, lanes < after)[None, :]
    mask = of.rows.keep[:, None] & left
    stored = stored_tiles(tensors, starts_of(tensors, of.rows.span, config), lanes, mask, 0.0, "", config)
    write(nothing(), Tile(stored, lanes, columns(lanes, of.rows.span, config), mask, left, left, ""), of, config)


@triton.jit
def read_mask(keep, span, config):
    """Rows to read: where neighbours are read at once, those not kept with the others."""
    return span.inside[:, None] if config.MULTIPLE > 1 else keep[:, None]


@triton.jit
def write_rows(tensors, of, write, BACK: tl.constexpr, config):
    """Write the gradient of whole rows in a sweep of its own; of.rows has their span, and which `keep` a gradient."""
    mask = read_mask(of.rows.keep, of.rows.span, config)
    sweep(nothing(), tensors, of.rows.span, Reading(mask, mask, 0.0, "evict_first", None, BACK), write, of, config)
    if config.SHIFT > 1:
        leftovers(tensors, of, write, config)


@triton.jit
def read_one(tensors, span, keep, config):
    """The program's tile of rows, by its place on the grid's second axis."""
    mask = read_mask(keep, span, config)
    starts = starts_of(tensors, span, config)
    return read_edge(tl.program_id(1) * config.BC, tensors, starts, span, Reading(mask, None, 0.0, ""), config)


@triton.jit
def write_one(stored, tensors, of, write, config):
    """Write the gradient of the tile that read_one read; 0 in rows not kept: their statistics are."""
    mask = read_mask(of.rows.keep, of.rows.span, config)
    at = tl.program_id(1) * config.BC
    take_edge(nothing(), stored, at, of.rows.span, Reading(mask, None, 0.0, ""), write, of, config)
    if config.SHIFT > 1:
        if tl.program_id(1) == 0:
            leftovers(tensors, of, write, config)


@triton.jit
def stats_at(ptr, i, span):
    rows = (tl.num_programs(0) // span.blocks).to(tl.int64) * span.rows_outer
    return ptr + i * rows + place_of(span)


@triton.jit
def store_stats(ptr, stats, span):
    """Store what backward needs of each row, (statistics, rows)."""
    for i in tl.static_range(len(stats)):
        tl.store(stats_at(ptr, i, span), stats[i], mask=span.inside)


@triton.jit
def load_stats(ptr, N: tl.constexpr, span):
    stats = ()
    for i in tl.static_range(N):
        stats = longer(stats, tl.load(stats_at(ptr, i, span), mask=span.inside, other=0.0))
    return stats
