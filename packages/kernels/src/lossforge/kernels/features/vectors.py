"""The template of losses of rows of vectors: two or three vectors a row, by at most three sums over their elements.

A loss supplies three functions: `terms`, of an element of each vector, which are summed; the value of the sums and of the row's label, with
its derivatives in the sums; and `slopes`, the derivatives in an element of each vector, from those of the sums. The template handles
labels, weights, reduction, scaling and addressing. One launch gives the value, the gradients that are asked for, or both.

A program holds tiles of rows. Vectors that fit a tile are read once. Longer ones are read by parts, once for the sums and once, mostly
from the cache, for the gradients.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.call import Formulas
from lossforge.kernels.classes.distribution import of_bins
from lossforge.kernels.elements.elementwise.kernel import Given, Outputs, coordinates, every_tile, settled, unless_zero, with_upstream
from lossforge.kernels.elements.layout import Wide, arranged, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, constants, load
from lossforge.kernels.engine.reduce import scales
from lossforge.kernels.engine.template import Launches, OneLaunch, Wanted
from lossforge.kernels.features.calls import VectorsCall
from lossforge.kernels.tiles import vector_tiles


class Vectors(NamedTuple):
    """The vectors of a call, of which z may be absent, and their gradients, of which each may be.

    Attributes:
        label: of each row, or absent.
        COUNT: elements of a vector.
        SIZE: of them in a tile.
        WIDE: whether their offsets need 64 bits.
    """

    x: Wide
    y: Wide
    z: Wide
    dx: Wide
    dy: Wide
    dz: Wide
    label: Strided
    COUNT: int
    SIZE: int
    WIDE: bool


def _make(call: VectorsCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.x, call.y, call.z, *wanted.gradients), (call.label, call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    x, y, z, dx, dy, dz = found.wide
    label, weight, grad_output, out = found.by_row
    count = call.x.shape[-1]
    n, tiles = call.x.numel() // count, vector_tiles(count)
    far = (count + tiles.columns) * found.furthest >= 2**31
    vectors = constants(Vectors(x, y, z, dx, dy, dz, label, COUNT=count, SIZE=tiles.columns, WIDE=far))
    given, space = (vectors, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, tiles.rows)
    return launch_of_tiles(vectors_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.x.shape[:-1])
forward, backward = _LAUNCH.forward, _LAUNCH.backward


@triton.jit
def part_of(t, at, r, j, inside, vectors):
    return tl.load(of_bins(t, at, r, j, vectors), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def parts_of(at, r, j, inside, vectors):
    """Load the elements j of the vectors of the rows `at`; x in the place of an absent z."""
    x = part_of(vectors.x, at, r, j, inside, vectors)
    y = part_of(vectors.y, at, r, j, inside, vectors)
    if vectors.z.ptr is None:
        z = x
    else:
        z = part_of(vectors.z, at, r, j, inside, vectors)
    return x, y, z


@triton.jit
def summed_terms(x, y, z, inside, hyper, formula):
    a, b, c = formula.terms(x, y, z, *hyper)
    return tl.sum(tl.where(inside, a, 0.0), 1), tl.sum(tl.where(inside, b, 0.0), 1), tl.sum(tl.where(inside, c, 0.0), 1)


@triton.jit
def store_slopes(elements, of_sums, place, factors, given, formula):
    """Store the gradients of elements. place: `at, r, j, inside` as for `parts_of`. factors: the rows' weights, and what slopes get."""
    x, y, z = elements
    da, db, dc = of_sums
    at, r, j, inside = place
    dx, dy, dz = formula.slopes(x, y, z, da[:, None], db[:, None], dc[:, None], *given.hyper)
    w, factor = factors[0][:, None], factors[1][:, None]
    if given.inputs.dx.ptr is not None:
        tl.store(of_bins(given.inputs.dx, at, r, j, given.inputs), unless_zero(dx * factor, w, given.weight), mask=inside)
    if given.inputs.dy.ptr is not None:
        tl.store(of_bins(given.inputs.dy, at, r, j, given.inputs), unless_zero(dy * factor, w, given.weight), mask=inside)
    if given.inputs.dz.ptr is not None:
        tl.store(of_bins(given.inputs.dz, at, r, j, given.inputs), unless_zero(dz * factor, w, given.weight), mask=inside)


@triton.jit
def value_of(a, b, c, at, mask, given, formula):
    label = a * 0.0
    if given.inputs.label.ptr is not None:
        label = load(given.inputs.label, at, mask, 0.0).to(tl.float32)
    return formula.value(a, b, c, label, *given.hyper)


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add the values of one tile to `part`, and store gradients and values where they are asked for. rest: rows inside; None: all."""
    WRITES: tl.constexpr = given.inputs.dx.ptr is not None or given.inputs.dy.ptr is not None or given.inputs.dz.ptr is not None
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    exists = (r >= 0 if rest is None else r < rest)[:, None]
    w = 1.0 + 0.0 * r.to(tl.float32)
    if given.weight.ptr is not None:
        w = load(given.weight, at, mask, 0.0).to(tl.float32)
    factor = with_upstream(w * given.factor, at, mask, given.outputs)
    j = tl.arange(0, given.inputs.SIZE)[None, :]
    inside = exists & (j < given.inputs.COUNT)
    if given.inputs.SIZE >= given.inputs.COUNT:
        x, y, z = parts_of(at, r, j, inside, given.inputs)
        a, b, c = summed_terms(x, y, z, inside, given.hyper, formula)
        value, da, db, dc = value_of(a, b, c, at, mask, given, formula)
        if WRITES:
            store_slopes((x, y, z), (da, db, dc), (at, r, j, inside), (w, factor), given, formula)
    else:
        a = tl.zeros([given.space.BLOCK], tl.float32)
        b, c = a, a
        for begin in range(0, given.inputs.COUNT, given.inputs.SIZE):
            inside = exists & (begin + j < given.inputs.COUNT)
            x, y, z = parts_of(at, r, begin + j, inside, given.inputs)
            more_a, more_b, more_c = summed_terms(x, y, z, inside, given.hyper, formula)
            a, b, c = a + more_a, b + more_b, c + more_c
        value, da, db, dc = value_of(a, b, c, at, mask, given, formula)
        if WRITES:
            for begin in range(0, given.inputs.COUNT, given.inputs.SIZE):
                inside = exists & (begin + j < given.inputs.COUNT)
                elements = parts_of(at, r, begin + j, inside, given.inputs)
                store_slopes(elements, (da, db, dc), (at, r, begin + j, inside), (w, factor), given, formula)
    return settled(part, unless_zero(value * w, w, given.weight), None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def vectors_kernel(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    every_tile(Given(inputs, weight, outputs, hyper, space, *scales(scaling, None)), sum, formula, special, applies, n, one_tile)
