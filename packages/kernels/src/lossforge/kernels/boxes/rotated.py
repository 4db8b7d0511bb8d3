"""The template of losses of pairs of rotated boxes (cx, cy, w, h, angle).

A loss supplies a formula of both boxes' numbers and of hyper-parameters, f(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, *hyper) → (value, its
derivatives in these ten). The template handles weights, reduction, scaling and addressing. One launch gives the value, the gradient of
one box or of both, or all of these.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.boxes.calls import WIDTH, RotatedCall
from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.elementwise.kernel import Given, Outputs, coordinates, every_tile, settled, unless_zero, with_upstream
from lossforge.kernels.elements.layout import Wide, arranged, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, address, constants, load, load_tile
from lossforge.kernels.engine.reduce import scales
from lossforge.kernels.engine.template import Launches, OneLaunch, Wanted


class RotatedPairs(NamedTuple):
    """Pairs of rotated boxes, and where their gradients go."""

    boxes1: Wide
    boxes2: Wide
    gradient1: Wide
    gradient2: Wide
    WIDTH: int


PAIRS, WARPS = 128, 4
"""Pairs of a tile: a lane has one, because a formula and its ten derivatives take most of its registers."""


def _make(call: RotatedCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.boxes1, call.boxes2, *wanted.gradients), (call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    boxes1, boxes2, gradient1, gradient2 = found.wide
    weight, grad_output, out = found.by_row
    n = call.boxes1.numel() // WIDTH
    pairs = constants(RotatedPairs(boxes1, boxes2, gradient1, gradient2, WIDTH))
    given, space = (pairs, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, PAIRS)
    # products are rounded before they are added, so that areas of equal boxes are equal and their loss is 0
    return launch_of_tiles(rotated_kernel, call, wanted, given, formulas, space, n, num_warps=WARPS, enable_fp_fusion=False)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.boxes1.shape[:-1])
forward, backward = _LAUNCH.forward, _LAUNCH.backward


@triton.jit
def of_number(t, at, i: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to the i-th number of the boxes `at`."""
    if t.step is None:
        where = t.ptr + WIDTH * at.start + (WIDTH * at.lane + i)
    else:
        where = address(t, at)
        for _ in tl.static_range(i):  # a product of i and the stride may not fit 32 bits
            where += t.step
    return where


@triton.jit
def load_number(t, at, mask, i: tl.constexpr, WIDTH: tl.constexpr):
    return load_tile(of_number(t, at, i, WIDTH), mask, 0.0, "").to(tl.float32)


@triton.jit
def load_rotated(t, at, mask, WIDTH: tl.constexpr):
    """Load the five numbers of boxes in float32; 0 outside of the mask, None: all are inside."""
    return (
        load_number(t, at, mask, 0, WIDTH),
        load_number(t, at, mask, 1, WIDTH),
        load_number(t, at, mask, 2, WIDTH),
        load_number(t, at, mask, 3, WIDTH),
        load_number(t, at, mask, 4, WIDTH),
    )


@triton.jit
def store_slopes(t, at, mask, factor, slopes, w, weight, WIDTH: tl.constexpr):
    """Store the derivatives times `factor`; 0 where there is a weight and it is 0."""
    for i in tl.static_range(WIDTH):
        tl.store(of_number(t, at, i, WIDTH), unless_zero(slopes[i], w, weight) * factor, mask=mask)


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add the values of one tile to `part`, and store gradients and values where they are asked for. rest: pairs inside; None: all."""
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    x1, y1, w1, h1, t1 = load_rotated(given.inputs.boxes1, at, mask, given.inputs.WIDTH)
    x2, y2, w2, h2, t2 = load_rotated(given.inputs.boxes2, at, mask, given.inputs.WIDTH)
    value, a1, b1, c1, d1, e1, a2, b2, c2, d2, e2 = formula.value(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, *given.hyper)
    w = 1.0
    if given.weight.ptr is not None:
        w = load(given.weight, at, mask, 0.0).to(tl.float32)
    factor = with_upstream(w * given.factor, at, mask, given.outputs)
    factor = unless_zero(factor, w, given.weight)
    if given.inputs.gradient1.ptr is not None:
        store_slopes(given.inputs.gradient1, at, mask, factor, (a1, b1, c1, d1, e1), w, given.weight, given.inputs.WIDTH)
    if given.inputs.gradient2.ptr is not None:
        store_slopes(given.inputs.gradient2, at, mask, factor, (a2, b2, c2, d2, e2), w, given.weight, given.inputs.WIDTH)
    return settled(part, unless_zero(value * w, w, given.weight), None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def rotated_kernel(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    every_tile(Given(inputs, weight, outputs, hyper, space, *scales(scaling, None)), sum, formula, special, applies, n, one_tile)
