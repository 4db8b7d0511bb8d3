"""The template of losses of rows of vectors: two or three vectors a row, by at most three sums over their elements.

A loss supplies three functions: `terms`, of an element of each vector, which are summed; the value of the sums and of the row's label, with
its derivatives in the sums; and `slopes`, the derivatives in an element of each vector, from those of the sums. The template handles
labels, weights, reduction, scaling and addressing. One launch gives the value, the gradients that are asked for, or both.

A program holds tiles of rows. Vectors that fit a tile are read once. Longer ones are read by parts, once for the sums and once, mostly
from the cache, for the gradients.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.boxes.kernel import Boxes
from lossforge.kernels.distribution.kernel import of_bins
from lossforge.kernels.elementwise.kernel import Outputs, Space, all_tiles, coordinates, settled
from lossforge.kernels.engine.layout import END, Strided, load
from lossforge.kernels.engine.reduce import finish, scales


class Formula(NamedTuple):
    """A loss's functions."""

    value: Any = None
    terms: Any = None
    slopes: Any = None
    background: Any = None


class Vectors(NamedTuple):
    """The vectors of a call, of which z may be absent, and their gradients, of which each may be.

    Attributes:
        COUNT: elements of a vector.
        SIZE: of them in a tile.
        WIDE: whether their offsets need 64 bits.
    """

    x: Boxes
    y: Boxes
    z: Boxes
    dx: Boxes
    dy: Boxes
    dz: Boxes
    COUNT: int
    SIZE: int
    WIDE: bool


class Given(NamedTuple):
    """All that a tile needs, except its position."""

    vectors: Vectors
    label: Strided
    weight: Strided
    outputs: Outputs
    hyper: Any
    space: Space
    scale: Any
    factor: Any
    end: Any = END


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
def store_slopes(x, y, z, of_sums, at, r, j, inside, factor, given, formula):
    da, db, dc = of_sums
    dx, dy, dz = formula.slopes(x, y, z, da[:, None], db[:, None], dc[:, None], *given.hyper)
    factor = factor[:, None]
    if given.vectors.dx.ptr is not None:
        tl.store(of_bins(given.vectors.dx, at, r, j, given.vectors), dx * factor, mask=inside)
    if given.vectors.dy.ptr is not None:
        tl.store(of_bins(given.vectors.dy, at, r, j, given.vectors), dy * factor, mask=inside)
    if given.vectors.dz.ptr is not None:
        tl.store(of_bins(given.vectors.dz, at, r, j, given.vectors), dz * factor, mask=inside)


@triton.jit
def value_of(a, b, c, at, mask, given, formula):
    label = a * 0.0
    if given.label.ptr is not None:
        label = load(given.label, at, mask, 0.0).to(tl.float32)
    return formula.value(a, b, c, label, *given.hyper)


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add the values of one tile to `part`, and store gradients and values where they are asked for. rest: rows inside; None: all."""
    WRITES: tl.constexpr = given.vectors.dx.ptr is not None or given.vectors.dy.ptr is not None or given.vectors.dz.ptr is not None
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    exists = (r >= 0 if rest is None else r < rest)[:, None]
    w = 1.0 + 0.0 * r.to(tl.float32)
    if given.weight.ptr is not None:
        w = load(given.weight, at, mask, 0.0).to(tl.float32)
    factor = w * given.factor
    if given.outputs.grad_output.ptr is not None:
        factor *= load(given.outputs.grad_output, at, mask, 0.0).to(tl.float32)
    j = tl.arange(0, given.vectors.SIZE)[None, :]
    inside = exists & (j < given.vectors.COUNT)
    if given.vectors.SIZE >= given.vectors.COUNT:
        x, y, z = parts_of(at, r, j, inside, given.vectors)
        a, b, c = summed_terms(x, y, z, inside, given.hyper, formula)
        value, da, db, dc = value_of(a, b, c, at, mask, given, formula)
        if WRITES:
            store_slopes(x, y, z, (da, db, dc), at, r, j, inside, factor, given, formula)
    else:
        a = tl.zeros([given.space.BLOCK], tl.float32)
        b, c = a, a
        for begin in range(0, given.vectors.COUNT, given.vectors.SIZE):
            inside = exists & (begin + j < given.vectors.COUNT)
            x, y, z = parts_of(at, r, begin + j, inside, given.vectors)
            more_a, more_b, more_c = summed_terms(x, y, z, inside, given.hyper, formula)
            a, b, c = a + more_a, b + more_b, c + more_c
        value, da, db, dc = value_of(a, b, c, at, mask, given, formula)
        if WRITES:
            for begin in range(0, given.vectors.COUNT, given.vectors.SIZE):
                inside = exists & (begin + j < given.vectors.COUNT)
                x, y, z = parts_of(at, r, begin + j, inside, given.vectors)
                store_slopes(x, y, z, (da, db, dc), at, r, begin + j, inside, factor, given, formula)
    return settled(part, value * w, None, at, mask, given.outputs, given.scale)


@triton.jit
def all_rows(given, formula, special, applies, n):
    part = tl.zeros([given.space.BLOCK], tl.float32)
    if applies is not None and applies(*given.hyper):
        part = all_tiles(part, n, given, special, one_tile)
    else:
        part = all_tiles(part, n, given, formula, one_tile)
    return part


@triton.jit(do_not_specialize=("n",))
def vectors_kernel(vectors, label, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    scale, factor = scales(scaling, None)
    part = all_rows(Given(vectors, label, weight, outputs, hyper, space, scale, factor), formula, special, applies, n)
    if sum is not None:
        finish(tl.sum(part, 0), sum, scale)
