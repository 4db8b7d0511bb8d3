"""The template of losses of two or three tensors, element by element, with a gradient for each.

A loss supplies a formula f(x, y, *hyper) → (value, dvalue/dx, dvalue/dy), or of three tensors f(x, y, z, *hyper) with a third derivative.
The template handles weights, reduction, scaling and addressing. One launch reads every tensor once. It gives the value, the gradients that
are asked for, or both.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.calls import PointwiseCall
from lossforge.kernels.elements.elementwise.kernel import (
    Given,
    Outputs,
    coordinates,
    every_tile,
    masked,
    settled,
    unless_masked,
    with_upstream,
)
from lossforge.kernels.elements.layout import geometry, launch_of_tiles
from lossforge.kernels.elements.mask import Counting, sum_of_mask
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import END, Results, Strided, Tensors, broadcast, load, store, strided
from lossforge.kernels.engine.reduce import scales
from lossforge.kernels.engine.template import OneLaunch, Wanted
from lossforge.kernels.math import widened
from lossforge.kernels.tiles import element_tiles, most_registers


class Three(NamedTuple):
    """The tensors of a call, of which z may be absent, their gradients, of which each may be, and which elements count."""

    x: Strided
    y: Strided
    z: Strided
    dx: Strided
    dy: Strided
    dz: Strided
    mask: Strided
    end: Any = END


def _make(call: PointwiseCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    each = (call.x, call.y, call.z, *wanted.gradients, call.mask, call.weight, wanted.upstream[0], wanted.out)
    g = geometry(call.x.shape, [broadcast(t.shape, t.stride(), call.x.shape) for t in each if t is not None], None)
    if g is None:
        return None
    steps = iter(g.strides)
    *tensors, weight, upstream, out = [strided(t, steps) for t in each]
    n = call.x.numel()
    read = sum(t is not None for t in (call.x, call.y, call.z, call.weight, call.mask))
    tiles = element_tiles(n, call.x.itemsize, read, False, False, False, formulas.special is not None, formulas.heavy)
    given, space = (Three(*tensors), weight, Outputs(upstream, out, Strided())), g.space(n, tiles.block, tiles.stages)
    limits = most_registers(tiles.warps, tiles.programs)
    return launch_of_tiles(pointwise_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps, **limits)


_LAUNCH: OneLaunch[PointwiseCall] = OneLaunch(_make, lambda call: call.x.shape)


def _divided(call: PointwiseCall, divisor: Tensor | None) -> PointwiseCall:
    """Return the call whose mean over a mask is a sum over its divisor. divisor: where it is known."""
    if not call.counted:
        return call
    assert call.mask is not None
    return call._replace(normalizer=sum_of_mask(Counting(call.mask), call.x.shape) if divisor is None else divisor, reduction="sum")


def forward(call: PointwiseCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
    """Compute the loss and its divisor as engine.template.Launches says."""
    divided = _divided(call, None)
    return *_LAUNCH.forward(divided, formulas, gradients, keep), divided.normalizer if call.counted else None


def backward(call: PointwiseCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """Write the gradients as engine.template.Launches says."""
    _LAUNCH.backward(_divided(call, kept[0]), formulas, kept, grad_outputs, gradients)


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
    counts = given.inputs.mask
    w = masked(w, counts, at, mask)
    factor = with_upstream(w * given.factor, at, mask, given.outputs)
    if given.inputs.z.ptr is None:
        value, dx, dy = formula.value(x, y, *given.hyper)
    else:
        z = widened(load(given.inputs.z, at, mask, 0.0))
        value, dx, dy, dz = formula.value(x, y, z, *given.hyper)
        if given.inputs.dz.ptr is not None:
            store(given.inputs.dz, at, mask, unless_masked(dz * factor, w, given.weight, counts))
    if given.inputs.dx.ptr is not None:
        store(given.inputs.dx, at, mask, unless_masked(dx * factor, w, given.weight, counts))
    if given.inputs.dy.ptr is not None:
        store(given.inputs.dy, at, mask, unless_masked(dy * factor, w, given.weight, counts))
    return settled(part, unless_masked(value * w, w, given.weight, counts), None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def pointwise_kernel(inputs, weight, outputs, hyper, scaling, sum, formula, special, applies, space, n):
    every_tile(Given(inputs, weight, outputs, hyper, space, *scales(scaling, None)), sum, formula, special, applies, n, one_tile)
