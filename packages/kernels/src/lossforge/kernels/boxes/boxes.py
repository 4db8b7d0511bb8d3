"""The template of losses of pairs of boxes.

A loss supplies a formula of both boxes' coordinates and of hyper-parameters, f(x1, y1, x2, y2, u1, v1, u2, v2, *hyper) → (value, its
derivatives in these eight). The template handles formats, weights, reduction, scaling and addressing. One launch gives the value, the
gradient of one box or of both, or all of these.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.elementwise.kernel import Given, Outputs, coordinates, every_tile, settled, unless_zero, with_upstream
from lossforge.kernels.elements.layout import Wide, arranged, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, address, constants, load, load_tile
from lossforge.kernels.engine.reduce import scales
from lossforge.kernels.engine.template import Launches, OneLaunch, Wanted
from lossforge.kernels.tiles import box_tiles


class Pairs(NamedTuple):
    """Pairs of boxes, and where their gradients go. CENTERED: boxes are given by centres and sides."""

    boxes1: Wide
    boxes2: Wide
    gradient1: Wide
    gradient2: Wide
    CENTERED: bool


def _make(call: BoxesCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.boxes1, call.boxes2, *wanted.gradients), (call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    boxes1, boxes2, gradient1, gradient2 = found.wide
    weight, grad_output, out = found.by_row
    n = call.boxes1.numel() // 4
    tiles = box_tiles(call.boxes1.itemsize)
    pairs = constants(Pairs(boxes1, boxes2, gradient1, gradient2, call.centered))
    given, space = (pairs, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, tiles.block)
    return launch_of_tiles(boxes_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.boxes1.shape[:-1])
forward, backward = _LAUNCH.forward, _LAUNCH.backward


@triton.jit
def load_sides(first, step, mask):
    """Load the four numbers of boxes as they are, in float32; 0 outside of the mask, None: all are inside."""
    a = load_tile(first, mask, 0.0, "").to(tl.float32)
    b = load_tile(first + step, mask, 0.0, "").to(tl.float32)
    c = load_tile(first + step + step, mask, 0.0, "").to(tl.float32)
    d = load_tile(first + step + step + step, mask, 0.0, "").to(tl.float32)
    return a, b, c, d


@triton.jit
def store_sides(first, step, mask, sides):
    a, b, c, d = sides
    tl.store(first, a, mask=mask)
    tl.store(first + step, b, mask=mask)
    tl.store(first + step + step, c, mask=mask)
    tl.store(first + step + step + step, d, mask=mask)


@triton.jit
def corners(a, b, c, d, CENTERED: tl.constexpr):
    """Return the corners of boxes that are given by them, or with CENTERED by centres and sides."""
    if CENTERED:
        a, b, c, d = a - 0.5 * c, b - 0.5 * d, a + 0.5 * c, b + 0.5 * d
    return a, b, c, d


@triton.jit
def load_boxes(t, at, rest, CENTERED: tl.constexpr):
    """Load the corners' coordinates as four tiles in float32. Where boxes are contiguous, a lane reads whole boxes."""
    N: tl.constexpr = at.lane.shape[0]
    if t.step is None:
        i = tl.arange(0, 4 * N)
        tile = load_tile(t.ptr + 4 * at.start + i, None if rest is None else i < 4 * rest, 0.0, "").to(tl.float32)
        even, odd = tl.split(tl.reshape(tile, [N, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        mask = None if rest is None else tl.arange(0, N) < rest
        a, b, c, d = load_sides(address(t, at), t.step, mask)
    return corners(a, b, c, d, CENTERED)


@triton.jit
def of_weight(a, b, c, d, w, weight):
    """Return derivatives; 0 where there is a weight and it is 0."""
    return unless_zero(a, w, weight), unless_zero(b, w, weight), unless_zero(c, w, weight), unless_zero(d, w, weight)


@triton.jit
def store_gradient(t, at, rest, factor, slopes, CENTERED: tl.constexpr):
    """Convert derivatives in the corners to the format of the boxes, multiply them by `factor`, and store them."""
    N: tl.constexpr = at.lane.shape[0]
    a, b, c, d = slopes
    if CENTERED:
        half = 0.5 * factor
        a, b, c, d = (a + c) * factor, (b + d) * factor, (c - a) * half, (d - b) * half
    else:
        a, b, c, d = a * factor, b * factor, c * factor, d * factor
    if t.step is None:
        i = tl.arange(0, 4 * N)
        tile = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * N])
        tl.store(t.ptr + 4 * at.start + i, tile, mask=None if rest is None else i < 4 * rest)
    else:
        mask = None if rest is None else tl.arange(0, N) < rest
        store_sides(address(t, at), t.step, mask, (a, b, c, d))


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add the values of one tile to `part`, and store gradients and values where they are asked for. rest: pairs inside; None: all."""
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    x1, y1, x2, y2 = load_boxes(given.inputs.boxes1, at, rest, given.inputs.CENTERED)
    u1, v1, u2, v2 = load_boxes(given.inputs.boxes2, at, rest, given.inputs.CENTERED)
    value, dx1, dy1, dx2, dy2, du1, dv1, du2, dv2 = formula.value(x1, y1, x2, y2, u1, v1, u2, v2, *given.hyper)
    w = 1.0
    if given.weight.ptr is not None:
        w = load(given.weight, at, mask, 0.0).to(tl.float32)
    factor = with_upstream(w * given.factor, at, mask, given.outputs)
    factor = unless_zero(factor, w, given.weight)
    if given.inputs.gradient1.ptr is not None:
        store_gradient(given.inputs.gradient1, at, rest, factor, of_weight(dx1, dy1, dx2, dy2, w, given.weight), given.inputs.CENTERED)
    if given.inputs.gradient2.ptr is not None:
        store_gradient(given.inputs.gradient2, at, rest, factor, of_weight(du1, dv1, du2, dv2, w, given.weight), given.inputs.CENTERED)
    return settled(part, unless_zero(value * w, w, given.weight), None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def boxes_kernel(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    every_tile(Given(inputs, weight, outputs, hyper, space, *scales(scaling, None)), sum, formula, special, applies, n, one_tile)
