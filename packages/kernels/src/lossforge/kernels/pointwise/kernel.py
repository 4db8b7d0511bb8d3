"""The template of losses of two or three tensors, element by element, with a gradient for each.

A loss supplies a formula f(x, y, *hyper) → (value, dvalue/dx, dvalue/dy), or of three tensors f(x, y, z, *hyper) with a third derivative.
The template handles weights, reduction, scaling and addressing. One launch reads every tensor once. It gives the value, the gradients that
are asked for, or both.
"""

from typing import Any, NamedTuple

import triton

from lossforge.kernels.elementwise.kernel import coordinates, every_tile, settled, unless_zero, with_upstream
from lossforge.kernels.engine.layout import END, Strided, load, store
from lossforge.kernels.math import widened


class Three(NamedTuple):
    """The tensors of a call, of which z may be absent, and their gradients, of which each may be."""

    x: Strided
    y: Strided
    z: Strided
    dx: Strided
    dy: Strided
    dz: Strided
    end: Any = END


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add the values of one tile to `part`, and store gradients and values where they are asked for. rest: elements inside; None: all."""
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    x = widened(load(given.inputs.x, at, mask, 0.0))
    y = widened(load(given.inputs.y, at, mask, 0.0))
    w = 1.0
    if given.weight.ptr is not None:
        w = widened(load(given.weight, at, mask, 0.0))
    factor = with_upstream(w * given.factor, at, mask, given.outputs)
    if given.inputs.z.ptr is None:
        value, dx, dy = formula.value(x, y, *given.hyper)
    else:
        z = widened(load(given.inputs.z, at, mask, 0.0))
        value, dx, dy, dz = formula.value(x, y, z, *given.hyper)
        if given.inputs.dz.ptr is not None:
            store(given.inputs.dz, at, mask, unless_zero(dz * factor, w, given.weight))
    if given.inputs.dx.ptr is not None:
        store(given.inputs.dx, at, mask, unless_zero(dx * factor, w, given.weight))
    if given.inputs.dy.ptr is not None:
        store(given.inputs.dy, at, mask, unless_zero(dy * factor, w, given.weight))
    return settled(part, unless_zero(value * w, w, given.weight), None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def pointwise_kernel(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    every_tile(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n, one_tile)
