"""The template of losses of distributions over few bins, under a softmax. The target lies between two bins.

A loss supplies a formula φ of z = -ln p, as row-wise losses do: φ(z, *hyper) → (value, dφ/dz). The weights wⱼ = max(0, 1 - |j - t|) are 0
except for the two bins around the target t:

    L = Σⱼ wⱼ φ(zⱼ)        dL/dxⱼ = pⱼ Σₖ wₖ φ′(zₖ) - wⱼ φ′(zⱼ)

A program holds tiles of many rows with all their bins in registers, so that one reading of the logits gives the value, the gradient or
both. The two bins around the target are read again, from the cache, so that the formula is computed for two numbers a row, not for every
bin.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.call import Formulas
from lossforge.kernels.classes.calls import DistributionCall
from lossforge.kernels.elements.elementwise.kernel import Given, Outputs, coordinates, every_tile, settled, unless_zero, with_upstream
from lossforge.kernels.elements.layout import Wide, arranged, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, address, constants, load, load_tile, longer
from lossforge.kernels.engine.reduce import scales
from lossforge.kernels.engine.template import Launches, OneLaunch, Wanted
from lossforge.kernels.math import LOG2E, exp2, log, reciprocal
from lossforge.kernels.tiles import bin_tiles


class Bins(NamedTuple):
    """Logits, where their gradient goes, and targets.

    Attributes:
        COUNT: number of bins.
        SIZE, TAIL: bins of the first tile and of the second, which may extend beyond the last bin.
        WIDE: offsets of bins need 64 bits.
    """

    x: Wide
    gradient: Wide
    target: Strided
    COUNT: int
    SIZE: int
    TAIL: int
    WIDE: bool


def _make(call: DistributionCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.x, *wanted.gradients), (call.target, call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    x, gradient = found.wide
    target, weight, grad_output, out = found.by_row
    count = call.x.shape[-1]
    n, tiles = call.x.numel() // count, bin_tiles(count)
    far = (tiles.bins + tiles.tail) * found.furthest >= 2**31
    bins = constants(Bins(x, gradient, target, COUNT=count, SIZE=tiles.bins, TAIL=tiles.tail, WIDE=far))
    given, space = (bins, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, tiles.rows)
    return launch_of_tiles(distribution_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.target.shape)
forward, backward = _LAUNCH.forward, _LAUNCH.backward


@triton.jit
def of_bins(t, at, r, j, bins):
    """Return pointers to the bins j, (rows or 1, …), of the rows `at` of `t`."""
    if t.step is None:
        where = t.ptr + bins.COUNT * at.start + (bins.COUNT * r[:, None] + j)
    else:
        where = address(t, at)[:, None] + (j.to(tl.int64) if bins.WIDE else j) * t.step
    return where


@triton.jit
def numbered(i: tl.constexpr, bins):
    """Return the bins of tile i: the first SIZE, or the TAIL."""
    if i == 0:
        j = tl.arange(0, bins.SIZE)[None, :]
    else:
        j = bins.SIZE + tl.arange(0, bins.TAIL)[None, :]
    return j


@triton.jit
def exists(i: tl.constexpr, j, mask, bins):
    """Return which of the bins j of a tile exist; a single True where all do."""
    WHOLE: tl.constexpr = bins.SIZE + (bins.TAIL if i else 0) <= bins.COUNT
    inside = tl.full([1, 1], True, tl.int1) if WHOLE else j < bins.COUNT
    if mask is not None:
        inside = inside & mask[:, None]
    return inside


@triton.jit
def load_all(t, at, r, mask, bins):
    """Load the tiles of all bins in float32; -inf for bins that do not exist."""
    TILES: tl.constexpr = 2 if bins.TAIL else 1
    tiles = ()
    for i in tl.static_range(TILES):
        j = numbered(i, bins)
        tiles = longer(tiles, load_tile(of_bins(t, at, r, j, bins), exists(i, j, mask, bins), float("-inf"), "").to(tl.float32))
    return tiles


@triton.jit
def exponentials(tile, top):
    return exp2((tile - top[:, None]) * LOG2E)


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add the values of one tile to `part`, and store gradients and values where they are asked for. rest: rows inside; None: all."""
    TILES: tl.constexpr = 2 if given.inputs.TAIL else 1
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    target = load(given.inputs.target, at, mask, 0.0).to(tl.float32)
    valid = (target >= 0.0) & (target <= given.inputs.COUNT - 1.0)
    w = tl.where(valid, 1.0, float("nan"))
    own_weight = w
    if given.weight.ptr is not None:
        own_weight = load(given.weight, at, mask, 0.0).to(tl.float32)
        w *= own_weight

    tiles = load_all(given.inputs.x, at, r, mask, given.inputs)
    low = tl.minimum(tl.where(valid, target, 0.0).to(tl.int32), given.inputs.COUNT - 2)
    two = tl.arange(0, 2)[None, :]
    at_two = of_bins(given.inputs.x, at, r, low[:, None] + two, given.inputs)
    near = load_tile(at_two, None if mask is None else mask[:, None] & (two < 2), 0.0, "").to(tl.float32)

    top = tl.max(tiles[0], 1)
    for i in tl.static_range(1, TILES):
        top = tl.maximum(top, tl.max(tiles[i], 1))
    sum = tl.sum(exponentials(tiles[0], top), 1)
    for i in tl.static_range(1, TILES):
        sum += tl.sum(exponentials(tiles[i], top), 1)
    share = 1.0 - tl.abs((low[:, None] + two).to(tl.float32) - target[:, None])
    value, slope = formula.value((top[:, None] - near) + log(sum)[:, None], *given.hyper)
    value = tl.where(share > 0.0, share * value, 0.0)  # a bin of share 0 may have p = 0 and φ = inf
    slope = tl.where(share > 0.0, share * slope, 0.0)
    if given.inputs.gradient.ptr is not None:
        factor = with_upstream(w * given.factor, at, mask, given.outputs)
        slope *= factor[:, None]
        first, second = tl.split(slope)
        of_p = (first + second) * reciprocal(sum)
        tl.debug_barrier()  # the gradient may overwrite logits that another thread reads for its two bins
        for i in tl.static_range(TILES):
            j = numbered(i, given.inputs)
            own = tl.where(j == low[:, None], first[:, None], tl.where(j == low[:, None] + 1, second[:, None], 0.0))
            g = exponentials(tiles[i], top) * of_p[:, None] - own
            g = unless_zero(g, own_weight[:, None], given.weight)
            tl.store(of_bins(given.inputs.gradient, at, r, j, given.inputs), g, mask=exists(i, j, mask, given.inputs))
    return settled(part, unless_zero(tl.sum(value, 1) * w, own_weight, given.weight), None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def distribution_kernel(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    every_tile(Given(inputs, weight, outputs, hyper, space, *scales(scaling, None)), sum, formula, special, applies, n, one_tile)
