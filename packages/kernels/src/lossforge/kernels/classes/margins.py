"""The template of losses of the differences between the logits of a row's targets and those of its other classes.

A loss supplies a formula φ(d, *hyper) → (value, dφ/dd) of one difference. Of a row with targets T, each with its weight w:

    L = 1/C Σ w_j φ(x_j - x_i)      the sum over j in T and over i not in T
    dL/dx_i = -1/C Σ_j w_j φ′(x_j - x_i)        dL/dx_j = w_j/C Σ_i φ′(x_j - x_i)

A row has one target, or a list that ends before its first -1; a class that it names twice counts twice. A program holds tiles of rows with
all their classes in registers, so that one reading of the logits gives the value, the gradient or both. The targets' logits are read
again, from the cache. Rows with one target that are longer than a tile are swept by tiles of classes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.call import Formulas
from lossforge.kernels.classes.calls import MarginsCall
from lossforge.kernels.elements.elementwise.kernel import Formula
from lossforge.kernels.engine.launch import Launch, sum_slots
from lossforge.kernels.engine.layout import END, Strided, as_strided, constants
from lossforge.kernels.engine.reduce import finish, scales
from lossforge.kernels.engine.template import Launches, OneLaunch, Wanted
from lossforge.kernels.plans import in_order
from lossforge.kernels.tiles import PROGRAMS, margin_tiles

PART = tl.constexpr(32)
"""Classes of a list that are read at once."""


class Targets(NamedTuple):
    """Class indices (N, most), contiguous, and a weight of each class, if any. LISTS: whether a row has a list of targets."""

    ptr: Any
    weight_ptr: Any
    most: int
    LISTS: bool


class Tile(NamedTuple):
    """Rows and classes of a tile, and of the logits. WIDE: offsets of classes need 64 bits."""

    classes: int
    ROWS: int
    CLASSES: int
    WIDE: bool


class Given(NamedTuple):
    """All that a tile needs, except its position."""

    x: Strided
    gradient: Strided
    grad_output: Strided
    out: Strided
    targets: Targets
    hyper: Any
    tile: Tile
    scale: Any
    factor: Any
    n: Any
    end: Any = END


def _make(call: MarginsCall, wanted: Wanted, formulas: Formulas) -> Launch:
    (gradient,), (n, classes) = wanted.gradients, call.x.shape
    lists = call.target.ndim == 2
    tiles = margin_tiles(classes, lists)
    reach = max((tiles.columns + classes) * t.stride(1) for t in (call.x, gradient) if t is not None)
    arguments = (
        *[as_strided(t) for t in (call.x, gradient, wanted.upstream[0], wanted.out)],
        constants(Targets(call.target, call.weight, call.target.shape[1] if lists else 1, LISTS=lists)),
        tuple(call.hyper),
        wanted.scaling(call),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula),
        constants(Tile(classes, ROWS=tiles.rows, CLASSES=tiles.columns, WIDE=reach >= 2**31)),
        n,
    )
    take = whole_rows if tiles.columns >= classes else swept_row
    grid = (min(triton.cdiv(n, tiles.rows), PROGRAMS),)
    return Launch(margins_kernel, grid, arguments, totals=int(wanted.total), take=take, num_warps=tiles.warps)


def _prepared(call: MarginsCall) -> MarginsCall:
    """Return the call with tensors that the kernel addresses, and the loss over the number of classes."""
    scale = call.loss_scale / call.x.shape[1]
    return call._replace(target=in_order(call.target), weight=in_order(call.weight), loss_scale=scale)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.x.shape[:1], _prepared)
forward, backward = _LAUNCH.forward, _LAUNCH.backward


@triton.jit
def places(t, rows, columns, WIDE: tl.constexpr):
    """Return pointers to the classes `columns` of `rows` of a matrix."""
    return t.ptr + (rows * t.s0)[:, None] + (columns.to(tl.int64) if WIDE else columns) * t.s1


@triton.jit
def target_of(rows, k, exists, given):
    """Return the k-th class index of each row; -1 where there is none."""
    return tl.load(given.targets.ptr + rows * given.targets.most + k, mask=exists, other=-1).to(tl.int64)


@triton.jit
def lengths(rows, exists, given):
    """Return how many targets each row lists before its first -1. Most lists are short, so that one part has all of them."""
    most = given.targets.most
    length = tl.where(exists, most, 0)
    begin = 0
    while tl.max(length, 0) > begin:
        columns = begin + tl.arange(0, PART)[None, :]
        listed = columns < length[:, None]
        index = tl.load(given.targets.ptr + (rows * most)[:, None] + columns, mask=listed, other=-1)
        length = tl.minimum(length, tl.min(tl.where(listed & (index == -1), columns, most), 1))
        begin += PART
    return length


@triton.jit
def members(rows, columns, exists, given):
    """Return which classes are targets of a row, how many targets it has, and 1 for each row, nan where an index is out of range."""
    member = (columns < 0) & exists[:, None]
    valid = tl.zeros([given.tile.ROWS], tl.float32) + 1.0
    length = lengths(rows, exists, given) if given.targets.LISTS else exists.to(tl.int32)
    for k in range(tl.max(length, 0)):
        going = k < length
        index = target_of(rows, k, exists & going, given)
        inside = (index >= 0) & (index < given.tile.classes)
        valid = tl.where(going & ~inside, float("nan"), valid)
        member = member | ((columns == index[:, None]) & (going & inside)[:, None])
    return member, length, valid


@triton.jit
def weighed(x, w):
    """Return x · w of rows, 0 where x is: a pair beyond the margin adds nothing, whatever the weight of its row."""
    return tl.where(x == 0.0, 0.0, x * w[:, None])


@triton.jit
def pairs(x, counts, rows, k, exists, given, formula):
    """Return weighted values and slopes of the pairs of each row's k-th target with the classes that count, and the target's index."""
    index = target_of(rows, k, exists, given)
    inside = exists & (index >= 0) & (index < given.tile.classes)
    index = tl.where(inside, index, -1)
    own = tl.load(given.x.ptr + rows * given.x.s0 + index * given.x.s1, mask=inside, other=0.0).to(tl.float32)
    value, slope = formula.value(own[:, None] - x, *given.hyper)
    if given.targets.weight_ptr is not None:
        w = tl.load(given.targets.weight_ptr + index, mask=inside, other=0.0).to(tl.float32)
        value, slope = weighed(value, w), weighed(slope, w)
    counts = counts & inside[:, None]
    return tl.where(counts, value, 0.0), tl.where(counts, slope, 0.0), index


@triton.jit
def factors(rows, exists, valid, given):
    """Return the factor of each row's gradient, nan where an index is out of range."""
    factor = valid * given.factor
    if given.grad_output.ptr is not None:
        factor *= tl.load(given.grad_output.ptr + rows * given.grad_output.s0, mask=exists, other=0.0).to(tl.float32)
    return factor


@triton.jit
def summed(part, value, rows, exists, given):
    """Add the values of rows to `part`, and store them where they are asked for."""
    if given.out.ptr is not None:
        tl.store(given.out.ptr + rows * given.out.s0, value * given.scale, mask=exists)
    return part + tl.where(exists, value, 0.0)


@triton.jit
def whole_rows(part, number, given, formula):
    """Add the values of the tile `number` of rows, with all their classes, to `part`."""
    rows = number * given.tile.ROWS + tl.arange(0, given.tile.ROWS)
    columns = tl.arange(0, given.tile.CLASSES)[None, :]
    exists = rows < given.n
    inside = exists[:, None] & (columns < given.tile.classes)
    x = tl.load(places(given.x, rows, columns, given.tile.WIDE), mask=inside, other=0.0).to(tl.float32)
    member, length, valid = members(rows, columns, exists, given)
    counts = inside & ~member
    value = tl.zeros([given.tile.ROWS], tl.float32)
    gradient = tl.zeros([given.tile.ROWS, given.tile.CLASSES], tl.float32)
    for k in range(tl.max(length, 0)):
        of_pairs, slope, index = pairs(x, counts, rows, k, exists & (k < length), given, formula)
        value += tl.sum(of_pairs, 1)
        if given.gradient.ptr is not None:
            gradient += tl.where(columns == index[:, None], tl.sum(slope, 1)[:, None], -slope)
    if given.gradient.ptr is not None:
        factor = factors(rows, exists, valid, given)
        tl.store(places(given.gradient, rows, columns, given.tile.WIDE), gradient * factor[:, None], mask=inside)
    return summed(part, value * valid, rows, exists, given)


@triton.jit
def swept_row(part, number, given, formula):
    """Add the value of the row `number`, which has one target, to `part`, by tiles of its classes."""
    rows = number + tl.arange(0, 1).to(tl.int64)
    exists = rows < given.n
    target = target_of(rows, 0, exists, given)
    valid = tl.where((target >= 0) & (target < given.tile.classes), 1.0, float("nan"))
    factor = factors(rows, exists, valid, given)
    value = tl.zeros([1, given.tile.CLASSES], tl.float32)
    slopes = tl.zeros([1, given.tile.CLASSES], tl.float32)
    for start in range(0, given.tile.classes, given.tile.CLASSES):
        columns = start + tl.arange(0, given.tile.CLASSES)[None, :]
        inside = columns < given.tile.classes
        x = tl.load(places(given.x, rows, columns, given.tile.WIDE), mask=inside, other=0.0).to(tl.float32)
        counts = inside & (columns != target[:, None])
        of_pairs, slope, _ = pairs(x, counts, rows, 0, exists, given, formula)
        value += of_pairs
        if given.gradient.ptr is not None:
            slopes += slope
            tl.store(places(given.gradient, rows, columns, given.tile.WIDE), -slope * factor[:, None], mask=counts)
    if given.gradient.ptr is not None:
        at = given.gradient.ptr + rows * given.gradient.s0 + target * given.gradient.s1
        tl.store(at, tl.sum(slopes, 1) * factor, mask=(target >= 0) & (target < given.tile.classes))
    return summed(part, tl.sum(value, 1) * valid, rows, exists, given)


@triton.jit
def all_rows(given, formula, take: tl.constexpr):
    part = tl.zeros([given.tile.ROWS], tl.float32)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for i in range((tl.cdiv(given.n, given.tile.ROWS) - first + programs - 1) // programs):
        part = take(part, first + i * programs, given, formula)
    return part


@triton.jit(do_not_specialize=("n",))
def margins_kernel(x, gradient, grad_output, out, targets, hyper, scaling, sum, formula, tile, n, take: tl.constexpr):
    scale, factor = scales(scaling, None)
    part = all_rows(Given(x, gradient, grad_output, out, targets, hyper, tile, scale, factor, n), formula, take)
    if sum is not None:
        finish(tl.sum(part, 0), sum, scale)
