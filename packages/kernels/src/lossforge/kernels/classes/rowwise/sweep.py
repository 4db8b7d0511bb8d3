"""One sweep over rows of classes, for every loss of a row: cross entropy and similar losses, divergences, top-k.

A program has BR rows, and a tile has BC classes of them. `first` is the lane of class 0 in its row. Where a row does not begin at an
aligned address, its tiles begin up to SHIFT - 1 elements before it. So all tiles but the first and the last are read and written in whole,
aligned vectors.
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
    """Compile-time constants of a kernel over rows, beside its formula."""

    BR: int
    BC: int
    TENSORS: int = 1  # that are read together
    VEC: int = 1  # neighbouring classes that one lane sums
    STAGES: int | None = None  # tiles in flight at once in a forward sweep (not BACK)
    ONE_TILE: bool = False
    WIDE: bool = False  # offsets within a row, or the number of rows, need 64 bits
    ALIGN: int = 1  # divides rows' offsets and the number of classes
    SHIFT: int = 1  # tiles begin at the last multiple of it at or before class 0
    MULTIPLE: int = 1  # divides the rows of an outer index; above 1 a program reads neighbouring rows at once
    COUNT: bool = False  # the kernel counts the rows' class indices itself: they are contiguous, and at most COUNTED
    EMPTY_IS_ZERO: bool = False
    DENSE: bool = False  # targets of all classes: probabilities, or smoothing with class weights
    EVEN: bool = False  # the same target for all classes: smoothing without class weights
    ENTROPY: bool = False  # each row's entropy is an output; with BACKWARD it has a gradient
    CORRECT: bool = False
    ARGMAX: bool = False
    SQUARES: bool = False  # ln Σ p² is an output
    MEAN: bool = False  # the mean logit is an output
    ALL_ROWS: bool = False  # ignored rows are read too, for outputs that do not depend on the target
    BACKWARD: bool = False  # the second launch of the classic split
    SWAP: bool = False
    COSINE: bool = False  # of the logits themselves, without softmaxes
    KNOWN: bool = False  # the softmaxes' statistics are known before the launch
    RENORMALIZE: bool = False
    TAIL: bool = False
    KP: int = 1  # entries of a row, up to a power of 2


Span = namedtuple("Span", "outer row inside rows_outer blocks first classes end low high")
"""A program's rows. inside: which of them exist. A row's lanes are [0, end), in tiles of BC; the tiles from `low` to `high` lie wholly in
it."""

Reading = namedtuple("Reading", "edge full other EVICT needed BACK", defaults=(None, False))
"""What a sweep reads.

edge: mask of rows for the first and the last tile. full: mask of rows for the tiles between; None: all. needed: the rows whose tiles
between are needed: if none is, these tiles are skipped; None: never skip. BACK: read the tiles between in reverse, because the last ones
read are most likely still in the cache."""

Tile = namedtuple("Tile", "stored lanes column mask here written EVICT")
"""A tile of each tensor as it is stored, and its classes. column: class of each element, (BR or 1, BC). mask: which elements were read;
None: all. here: which classes exist; None: all. written: which classes may be written here; None: all."""


@triton.jit
def scaled(loss, index, weight_ptr, ignore, i, counted, classes, config):
    """Return the loss's scale over its divisor: the one in device memory, or with COUNT the number of rows i whose class index counts."""
    if config.COUNT:
        rows = count_rows(index.ptr, None, None, weight_ptr, i, counted, classes, ignore)
        scale = over(loss.scale, rows, config.EMPTY_IS_ZERO)
    else:
        scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    return scale


@triton.jit
def row_address(t, outer, row):
    """Return pointers to the begin of the rows of a tensor with s0 and s1."""
    return t.ptr + outer * t.s0 + row.to(tl.int64) * t.s1


@triton.jit
def element_address(t, outer, row, at):
    """Return pointers to elements `at` of the rows."""
    return t.ptr + (outer * t.s0 + row.to(tl.int64) * t.s1 + at.to(tl.int64) * t.s2)


@triton.jit
def row_start(t, outer, row, config):
    """Return the aligned offset of the rows in a tensor with s0, s1, s2, at or before class 0, and the distance from it to class 0."""
    offset = outer * t.s0 + row.to(tl.int64) * t.s1
    first = (offset * 0).to(tl.int32)
    if config.ALIGN > 1:
        offset = offset // config.ALIGN * config.ALIGN  # tells the compiler that offsets are multiples of ALIGN, to vectorise loads
    if config.SHIFT > 1:
        aligned = offset // config.SHIFT * config.SHIFT
        first = (offset - aligned).to(tl.int32)
        offset = aligned
    return offset, first


@triton.jit
def span_of(x, rows_outer, blocks, config):
    """Return the rows of this program; an outer index has rows_outer rows, in blocks of BR."""
    classes = x.classes
    if config.ALIGN > 1:
        classes = classes // config.ALIGN * config.ALIGN  # tells the compiler the same of the number of classes
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = program - outer * blocks
    if not config.WIDE:
        row = row.to(tl.int32)
    row = row * config.BR + tl.arange(0, config.BR)
    inside = row < rows_outer // config.MULTIPLE * config.MULTIPLE  # so MULTIPLE neighbours are all inside or all outside
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
    """Return the rows' indices among all rows."""
    return span.outer * span.rows_outer + span.row


@triton.jit
def columns(lanes, span, config):
    """Return the classes (BR or 1, BC) of lanes."""
    column = lanes[None, :]
    if config.SHIFT > 1:
        column = column - span.first[:, None]
    return column


@triton.jit
def class_offset(lane, stride, WIDE: tl.constexpr):
    """Return the offset of lanes within a row, in 64 bits with WIDE."""
    return lane.to(tl.int64) * stride if WIDE else lane * stride


@triton.jit
def start_of(t, span, config):
    """Return the offset of the rows in a tensor, at or before class 0. Called once, before branches and loops."""
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
    """Load elements (BR, BC) of a tensor as they lie in memory; `other` where the mask is false. If mask is None, all are read."""
    at = addresses(t, start, lanes, config)
    if mask is None:
        tile = tl.load(at, eviction_policy=EVICT)
    else:
        tile = tl.load(at, mask=mask, other=other, eviction_policy=EVICT)
    return tile


@triton.jit
def stored_tiles(tensors, starts, lanes, mask, other, EVICT, config):
    """Load a tile of each tensor, as stored_tile does."""
    TENSORS: tl.constexpr = config.TENSORS
    tiles = ()
    for i in tl.static_range(TENSORS):
        tiles = longer(tiles, stored_tile(tensors[i], starts[i], lanes, mask, other, EVICT, config))
    return tiles


@triton.jit
def store_tile(g, t, start, lanes, mask, EVICT, config):
    tl.store(addresses(t, start, lanes, config), g, mask=mask, eviction_policy=EVICT)


@triton.jit
def mask_out_of_range(x, tile, config):
    """Set classes outside of the row to -inf."""
    if config.SHIFT > 1 and tile.here is not None:
        x = tl.where(tile.here, x, float("-inf"))
    return x


@triton.jit
def write_tile(g, tile, of, config):
    """Store the elements of a tile that may be written, to of.gradient from of.rows.to on."""
    inside = of.rows.span.inside[:, None]
    if config.MULTIPLE > 1:  # neighbouring rows are read at once, including those not kept
        g = tl.where(of.rows.keep[:, None], g, 0.0)
    if tile.written is not None:
        store_tile(g, of.gradient, of.rows.to, tile.lanes, inside & tile.written, tile.EVICT, config)
    else:
        store_tile(g, of.gradient, of.rows.to, tile.lanes, None if config.BR == 1 else inside, tile.EVICT, config)


@triton.jit
def edge(at, inside, span, config):
    """Return, for the tile from lane `at`, which may extend beyond the row: lanes, classes, which classes exist, and the mask to read with.

    With SHIFT the mask covers all aligned vectors that hold a class of the row.
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
    """Process the tile that read_edge read. With SHIFT only aligned vectors within the row are written; `leftovers` writes the rest."""
    lanes, column, here, mask = edge(at, reading.edge, span, config)
    written = here
    if config.SHIFT > 1:
        begin = tl.cdiv(tl.max(span.first, 0), config.SHIFT) * config.SHIFT
        written = ((lanes >= begin) & (lanes < span.end // config.SHIFT * config.SHIFT))[None, :]
    return take(state, Tile(stored, lanes, column, mask, here, written, reading.EVICT), operation, config)


@triton.jit
def sweep(state, tensors, span, reading, take, operation, config):
    """Process all tiles of the tensors' rows: take(state, Tile, operation, config) → state.

    The last tile and the first, which may extend beyond the row, come first: they are read before it is known whether the row counts.
    A record that holds records with constants must hold no tensors or numbers, because Triton 3.6 loses the constants in a loop.
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
def no_state():
    """Return the state of a sweep that keeps none."""
    return tl.full([1], 0, tl.int32)


@triton.jit
def leftovers(tensors, of, write, config):
    """Write the gradient in the lanes of the rows before their first whole vector and after their last."""
    i = tl.arange(0, 2 * config.SHIFT)
    begin = tl.max(of.rows.span.first, 0)
    tail = of.rows.span.end // config.SHIFT * config.SHIFT
    lanes = tl.where(i < config.SHIFT, i, tail + i - config.SHIFT)
    # choose a number before the comparison: in Triton's interpreter a scalar condition joined with a block's is not a mask
    before, after = tl.where(begin > 0, begin, config.SHIFT), tl.where(tail >= config.SHIFT, of.rows.span.end, 0)
    left = tl.where(i < config.SHIFT, i >= before, lanes < after)[None, :]
    mask = of.rows.keep[:, None] & left
    stored = stored_tiles(tensors, starts_of(tensors, of.rows.span, config), lanes, mask, 0.0, "", config)
    write(no_state(), Tile(stored, lanes, columns(lanes, of.rows.span, config), mask, left, left, ""), of, config)


@triton.jit
def read_mask(keep, span, config):
    """Return which rows to read: the kept ones; where neighbouring rows are read at once, all."""
    return span.inside[:, None] if config.MULTIPLE > 1 else keep[:, None]


@triton.jit
def write_rows(tensors, of, write, BACK: tl.constexpr, config):
    """Write the gradient of whole rows in another sweep. of.rows has their span, and in `keep` which have a gradient."""
    mask = read_mask(of.rows.keep, of.rows.span, config)
    sweep(no_state(), tensors, of.rows.span, Reading(mask, mask, 0.0, "evict_first", None, BACK), write, of, config)
    if config.SHIFT > 1:
        leftovers(tensors, of, write, config)


@triton.jit
def read_one(tensors, span, keep, config):
    """Read the program's tile of rows; the grid's second axis is the tile's index."""
    mask = read_mask(keep, span, config)
    starts = starts_of(tensors, span, config)
    return read_edge(tl.program_id(1) * config.BC, tensors, starts, span, Reading(mask, None, 0.0, ""), config)


@triton.jit
def write_one(stored, tensors, of, write, config):
    """Write the gradient of the tile that read_one read. It is 0 in rows not kept, because their statistics are 0."""
    mask = read_mask(of.rows.keep, of.rows.span, config)
    at = tl.program_id(1) * config.BC
    take_edge(no_state(), stored, at, of.rows.span, Reading(mask, None, 0.0, ""), write, of, config)
    if config.SHIFT > 1:
        if tl.program_id(1) == 0:
            leftovers(tensors, of, write, config)


@triton.jit
def stats_at(ptr, i, span):
    rows = (tl.num_programs(0) // span.blocks).to(tl.int64) * span.rows_outer
    return ptr + i * rows + place_of(span)


@triton.jit
def store_stats(ptr, stats, span):
    """Store each row's statistics for backward, (statistics, rows)."""
    for i in tl.static_range(len(stats)):
        tl.store(stats_at(ptr, i, span), stats[i], mask=span.inside)


@triton.jit
def load_stat(ptr, i: tl.constexpr, span):
    return tl.load(stats_at(ptr, i, span), mask=span.inside, other=0.0)


@triton.jit
def load_stats(ptr, N: tl.constexpr, span):
    stats = ()
    for i in tl.static_range(N):
        stats = longer(stats, load_stat(ptr, i, span))
    return stats
