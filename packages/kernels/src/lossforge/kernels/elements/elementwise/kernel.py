"""The template of losses whose elements do not depend on each other.

A loss supplies a formula f(x, y, *hyper) → (value, dvalue/dx). The template handles targets, weights, ignored elements, reduction, scaling
and addressing. One launch gives the value, the gradient, or both.

A formula for targets of 0 and 1 is f(x, whether y is 1, w, v, *hyper) → (w value, v dvalue/dx). It multiplies w and v by its own factor of
each class before it chooses between the classes. This costs nothing an element, because w and v mostly belong to the row.
Tiles without an element of their rows' classes use the formula without this choice. In detection, and with thousands of classes, most
tiles are such background.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.elements.elementwise.targets import Targets, Where
from lossforge.kernels.engine.layout import END, Strided, load, longer, store
from lossforge.kernels.engine.reduce import count_rows, finish, scales
from lossforge.kernels.math import widened

WARP = tl.constexpr(32)


class Space(NamedTuple):
    """The launch's elements, counted as an (n0, n1, n2) tensor, or as (n0, COLUMNS) if that is given, in tiles of BLOCK.

    Attributes:
        FLAT: every tensor lies in this order in memory.
        BIG: coordinates need 64 bits.
        G: neighbouring elements of one row that form a group.
        STAGES: tiles in flight at once, where the kernel does not itself load one ahead.
    """

    n1: int
    n2: int
    COLUMNS: int | None
    FLAT: bool
    BIG: bool
    BLOCK: int
    G: int = 1
    STAGES: int = 1


At = namedtuple("At", "start lane row i0 i1 i2")
"""Positions of elements: start + lane in the order of the elements, or the coordinates (row + i0, i1, i2)."""


class Weights(NamedTuple):
    """Weights of the elements, which of them count, the group of each element, and the weight of each of `groups` groups."""

    weight: Strided
    mask: Strided
    group: Strided
    group_weight_ptr: Any
    groups: int
    end: Any = END


class Outputs(NamedTuple):
    """What a launch writes: the value of each element, and its gradient times the upstream gradient of each element."""

    grad_output: Strided
    out: Strided
    gradient: Strided
    end: Any = END


class Formula(NamedTuple):
    """A loss's formula, as its template takes it.

    Attributes:
        value: the formula; None if there is none.
        terms, slopes: of vectors, see features/vectors.py.
        background: for targets of 0 and 1, the same for tiles of only background; None if background has no formula.
    """

    value: Any = None
    terms: Any = None
    slopes: Any = None
    background: Any = None


class Given(NamedTuple):
    """All that a tile of `every_tile` needs, except its position. inputs: the template's own."""

    inputs: Any
    weight: Strided
    outputs: Outputs
    hyper: Any
    space: Space
    scale: Any
    factor: Any
    end: Any = END


class Inlined(NamedTuple):
    """Functions that the kernel inlines.

    Attributes:
        general: the formula.
        special: a faster formula for hyper-parameters for which `applies` is true; its fields are None if there is none.
        applies: (*hyper) → whether `special` can be used.
        load_target: see targets.py.
        BINARY: the formulas are for targets of 0 and 1.
    """

    general: Formula
    special: Formula
    applies: Any
    load_target: Any
    BINARY: bool


class Elements(NamedTuple):
    """All that a tile needs, except its position. Device code must not name a record with constants: it would turn them into tensors."""

    x: Strided
    targets: Targets
    weights: Weights
    parameter: Strided
    outputs: Outputs
    hyper: Any
    inlined: Inlined
    space: Space
    scale: Any
    factor: Any
    n: Any
    offset: Any
    end: Any = END


Ahead = namedtuple("Ahead", "x begins index")
"""A full tile, loaded ahead: x; for each of its rows where it begins, relative to the tile, and its class index."""


@triton.jit
def coordinates(start, r, c, space):
    """Return the positions of the elements start + r · G + c.

    The G elements of a group lie in one row, so that values of the row are computed once a group. A tile of at most COLUMNS elements lies
    in at most two rows, so that a comparison finds an element's row without a division.
    """
    lane = r * space.G + c
    row, i0, i1, i2 = start, lane, lane, lane * 0
    if not space.FLAT:
        if space.COLUMNS is not None:
            row = (start.to(tl.uint64) // space.COLUMNS).to(tl.int64)
            local = (start - row * space.COLUMNS).to(tl.int32) + r * space.G
            if r.shape[0] * space.G <= space.COLUMNS:
                i0 = (local >= space.COLUMNS).to(tl.int32)
            else:
                i0 = local // space.COLUMNS
            i1 = local - i0 * space.COLUMNS + c
            if space.BIG:
                i0, i1 = i0.to(tl.int64), i1.to(tl.int64)
        else:
            i = start + lane if space.BIG else start.to(tl.int32) + lane
            outer = i // space.n2
            row, i0, i1, i2 = start * 0, outer // space.n1, outer % space.n1, i - outer * space.n2
    return At(start, lane, row, i0, i1, i2)


@triton.jit
def weight_tile(weights, at, mask):
    """Return the weight of each element: its own times its group's, nan if the group does not exist; 0 where it does not count."""
    w = 1.0
    if weights.weight.ptr is not None:
        w = widened(load(weights.weight, at, mask, 0.0))
    if weights.group.ptr is not None:
        group = load(weights.group, at, mask, 0)
        exists = (group >= 0) & (group < weights.groups)
        share = tl.load(weights.group_weight_ptr + group, mask=exists, other=0.0).to(tl.float32)
        w = w * tl.where(exists, share, float("nan"))
    return masked(w, weights.mask, at, mask)


@triton.jit
def masked(w, counts, at, mask):
    """Return w times how much each element counts, and 0 where it does not, for any w."""
    if counts.ptr is not None:
        count = widened(load(counts, at, mask, 0.0))
        w = tl.where(count == 0.0, 0.0, w * count)
    return w


@triton.jit
def unless_zero(x, w, weight):
    """Return x; 0 where there is a weight and it is 0, for any x."""
    if weight.ptr is not None:
        x = tl.where(w == 0.0, 0.0, x)
    return x


@triton.jit
def unless_masked(x, w, weight, counts):
    """Return x; 0 where there is a weight or a mask, `counts`, and their product w is 0, for any x."""
    return unless_zero(unless_zero(x, w, weight), w, counts)


@triton.jit
def shared(w, share, INDEX: tl.constexpr):
    """Return w · share; 0 where the share is 0, for any w."""
    if INDEX:
        w = tl.where(share == 0.0, 0.0, w * share)
    return w


@triton.jit
def with_targets(x, w, hyper, r, at, mask, elements, formula: tl.constexpr):
    """Return weighted values and slopes of a tile with any targets."""
    INDEX: tl.constexpr = elements.targets.target.ptr is not None and elements.targets.target.ptr.dtype.element_ty.is_int()
    row = coordinates(at.start, r, tl.zeros([1, 1], tl.int32), elements.space)
    column = row.i1
    if elements.space.COLUMNS is not None and not elements.space.FLAT:
        if elements.space.BLOCK <= elements.space.COLUMNS:  # see targets.Where
            last = (tl.minimum(at.start + elements.space.BLOCK, elements.n) - 1) // elements.space.COLUMNS - row.row
            row = At(at.start, None, row.row, row.i0, last, row.i2)
    where = Where(at, row, column, tl.arange(0, elements.space.G)[None, :], mask)
    y, share = elements.inlined.load_target(elements.targets, elements.offset, where)
    if INDEX:
        x = tl.where(share == 0.0, 0.5, x)  # an ignored row may hold nan; 0.5 is harmless as a logit and as a probability
    of_value, factor = shared(w, share, INDEX), shared(w * elements.factor, share, INDEX)
    if elements.inlined.BINARY:
        value, slope = formula(x, y > 0.5, of_value, factor, *hyper)
    else:
        value, slope = formula(x, y, *hyper)
        value, slope = value * of_value, slope * factor
    weight, counts = elements.weights.weight, elements.weights.mask
    return unless_masked(value, w, weight, counts), unless_masked(slope, w, weight, counts)


@triton.jit
def read(start, r, elements):
    """Load a full tile."""
    at = coordinates(start, r, tl.arange(0, elements.space.G)[None, :], elements.space)
    row = (start.to(tl.uint64) // elements.space.COLUMNS).to(tl.int64)
    i = tl.arange(0, WARP)  # every warp loads the rows' indices, so that none waits for another
    begins = i * elements.space.COLUMNS - (start - row * elements.space.COLUMNS).to(tl.int32)
    return Ahead(
        load(elements.x, at, None, 0.0),
        begins,
        tl.load(elements.targets.target.ptr + (row + i) * elements.targets.target.s0, mask=begins < elements.space.BLOCK, other=-1),
    )


@triton.jit
def is_background(ahead, targets, BLOCK: tl.constexpr):
    """Return whether no element of a tile is in its row's class, and no row is ignored or invalid."""
    index, place = ahead.index, ahead.begins + ahead.index
    elsewhere = (index >= 0) & (index < targets.classes) & ((place < 0) | (place >= BLOCK))
    return tl.min(((index != targets.ignore) & ((index == -1) | elsewhere)).to(tl.int32), 0) > 0


@triton.jit
def with_upstream(factor, at, mask, outputs):
    """Return the factor times the upstream gradient of each element, where each has one."""
    if outputs.grad_output.ptr is not None:
        factor *= widened(load(outputs.grad_output, at, mask, 0.0))
    return factor


@triton.jit
def settled(part, value, slope, at, mask, outputs, scale):
    """Add the values of a tile to `part`, 0 where masked, and store gradient and values where they are asked for."""
    if outputs.gradient.ptr is not None:
        if outputs.grad_output.ptr is not None:
            slope *= widened(load(outputs.grad_output, at, mask, 0.0))
        store(outputs.gradient, at, mask, slope)
    if mask is not None:
        value = tl.where(mask, value, 0.0)
    if outputs.out.ptr is not None:
        store(outputs.out, at, mask, value * scale)
    return part + value


@triton.jit
def one_tile(part, ahead, start, r, rest, elements, formula):
    """Add the values of one tile to `part`. ahead: from `read`, or None. rest: elements inside; None: all."""
    mask = None if rest is None else r * elements.space.G < rest
    at = coordinates(start, r, tl.arange(0, elements.space.G)[None, :], elements.space)
    if ahead is None:
        x = widened(load(elements.x, at, mask, 0.0))
    else:
        x = widened(ahead.x)
    hyper = elements.hyper
    if elements.parameter.ptr is not None:
        hyper = longer(hyper, widened(load(elements.parameter, at, mask, 1.0)))
    w = weight_tile(elements.weights, at, mask)
    # settled in each branch, because after the branches join, 64 bytes of focal's registers spill, with the same number of instructions
    if ahead is not None and is_background(ahead, elements.targets, elements.space.BLOCK):
        value, slope = formula.background(x, False, w, w * elements.factor, *hyper)
        weight, counts = elements.weights.weight, elements.weights.mask
        value, slope = unless_masked(value, w, weight, counts), unless_masked(slope, w, weight, counts)
        part = settled(part, value, slope, at, mask, elements.outputs, elements.scale)
    else:
        value, slope = with_targets(x, w, hyper, r, at, mask, elements, formula.value)
        part = settled(part, value, slope, at, mask, elements.outputs, elements.scale)
    return part


@triton.jit
def all_tiles(part, n, given, formula, take: tl.constexpr):
    """Add this program's tiles to `part` with `take`: every `num_programs`-th full tile without masks; one program also takes the rest.

    given: what `take` needs, with a `space`; Elements, if the formula has one for background.
    """
    BLOCK: tl.constexpr = given.space.BLOCK
    r = tl.arange(0, part.shape[0])  # groups of the tile
    if len(part.shape) == 2:
        r = r[:, None]
    first = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    full = n // BLOCK + first * 0
    count = tl.cdiv(full - first, programs).to(tl.int32)
    if formula.background is None:
        for k in tl.range(count, num_stages=given.space.STAGES):
            part = take(part, None, (first + k * programs) * BLOCK, r, None, given, formula)
    else:
        if count > 0:
            ahead = read(first * BLOCK, r, given)
            for k in range(count):  # the next tile is loaded before this one is computed; num_stages was 2 to 14 % slower in bf16
                following = read(tl.minimum(first + (k + 1) * programs, full - 1) * BLOCK, r, given)
                part = take(part, ahead, (first + k * programs) * BLOCK, r, None, given, formula)
                ahead = following
    rest = (n - full * BLOCK).to(tl.int32)
    if (rest > 0) & (full % programs == first):
        part = take(part, None, full * BLOCK, r, rest, given, formula)
    return part


@triton.jit
def every_tile(given, sum, formula, special, applies, n, take: tl.constexpr):
    """Go over all tiles of a template whose one launch gives the value, the gradients, or both, and add up the values."""
    part = tl.zeros([given.space.BLOCK], tl.float32)
    if applies is not None and applies(*given.hyper):
        part = all_tiles(part, n, given, special, take)
    else:
        part = all_tiles(part, n, given, formula, take)
    if sum is not None:
        finish(tl.sum(part, 0), sum, given.scale)


@triton.jit
def all_elements(elements):
    part = tl.zeros([elements.space.BLOCK // elements.space.G, elements.space.G], tl.float32)
    # inside the loop this branch would cost registers and time
    if elements.inlined.special.value is not None and elements.inlined.applies(*elements.hyper):
        part = all_tiles(part, elements.n, elements, elements.inlined.special, one_tile)
    else:
        part = all_tiles(part, elements.n, elements, elements.inlined.general, one_tile)
    return part


@triton.jit(do_not_specialize=("n", "offset", "rows"))
def elementwise_kernel(x, targets, weights, parameter, outputs, hyper, scaling, sum, inlined, space, n, offset, rows, COUNT: tl.constexpr):
    """Compute the values of elements or their total, and the gradient.

    Args:
        x: Strided.
        parameter: Strided: replaces the formula's last hyper-parameter.
        n: elements. This and the next two are no fields, because Triton specialises on numbers in records.
        offset: of the diagonal, where it is the target.
        rows: of a class-index target, which the kernel counts with COUNT.
    """
    count = None
    if COUNT:
        counted = count_rows(targets.target.ptr, None, None, None, tl.arange(0, COUNT), rows, targets.classes, targets.ignore)
        count = counted * targets.classes
    scale, factor = scales(scaling, count)
    part = all_elements(Elements(x, targets, weights, parameter, outputs, hyper, inlined, space, scale, factor, n, offset))
    if sum is not None:
        finish(tl.sum(tl.sum(part, 1), 0), sum, scale)
