"""The template of losses of distributions over few bins, under a softmax, at a target that lies between two bins.

A loss adds a formula φ of z = -ln p as those of rows do, φ(z, *hyper) → (value, dφ/dz). With wⱼ = max(0, 1 - |j - t|), which is 0 but for
the two bins around the target t:

    L = Σⱼ wⱼ φ(zⱼ)        dL/dxⱼ = pⱼ Σₖ wₖ φ′(zₖ) - wⱼ φ′(zⱼ)

A program has tiles of many rows and all their bins in registers: one reading of the logits gives the value, the gradient or both.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.box.kernel import Boxes
from lossforge.kernels.element.kernel import Outputs, Space, all_tiles, coordinates, settled
from lossforge.kernels.engine.layout import END, Strided, address, load, load_tile
from lossforge.kernels.engine.reduce import finish, scales
from lossforge.kernels.math import LOG2E, exp2, log, reciprocal


class Bins(NamedTuple):
    """Logits, where their gradient goes, and targets; COUNT bins, in tiles of SIZE. WIDE: 32 bits do not hold the offsets of bins."""

    x: Boxes
    gradient: Boxes
    target: Strided
    COUNT: int
    SIZE: int
    WIDE: bool


class Given(NamedTuple):
    """All that a tile needs beside its place."""

    bins: Bins
    weight: Strided
    outputs: Outputs
    hyper: Any
    space: Space
    scale: Any
    factor: Any
    end: Any = END


@triton.jit
def of_bins(t, at, r, bins):
    """Where the bins of the rows `at` of `t` lie."""
    j = tl.arange(0, bins.SIZE)[None, :]
    if t.step is None:
        where = t.ptr + bins.COUNT * at.start + (bins.COUNT * r[:, None] + j)
    else:
        where = address(t, at)[:, None] + (j.to(tl.int64) if bins.WIDE else j) * t.step
    return where


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """part with the values of one tile; gradients and values are stored where they are asked for. rest: rows inside; None: all."""
    at = coordinates(start, r, 0, given.space)
    mask = None if rest is None else r < rest
    j = tl.arange(0, given.bins.SIZE)[None, :]
    inside = None if given.bins.SIZE == given.bins.COUNT else j < given.bins.COUNT
    if mask is not None:
        inside = mask[:, None] & (j < given.bins.COUNT)
    x = load_tile(of_bins(given.bins.x, at, r, given.bins), inside, float("-inf"), "").to(tl.float32)
    target = load(given.bins.target, at, mask, 0.0).to(tl.float32)
    w = tl.where((target >= 0.0) & (target <= given.bins.COUNT - 1.0), 1.0, float("nan"))
    if given.weight.ptr is not None:
        w *= load(given.weight, at, mask, 0.0).to(tl.float32)

    top = tl.max(x, 1)
    below = top[:, None] - x
    e = exp2(below * -LOG2E)
    sum = tl.sum(e, 1)
    value, slope = formula.value(below + log(sum)[:, None], *given.hyper)
    near = 1.0 - tl.abs(j - target[:, None])
    value = tl.where(near > 0.0, near * value, 0.0)  # elsewhere p may be 0, and φ inf
    slope = tl.where(near > 0.0, near * slope, 0.0)
    if given.bins.gradient.ptr is not None:
        factor = w * given.factor
        if given.outputs.grad_output.ptr is not None:
            factor *= load(given.outputs.grad_output, at, mask, 0.0).to(tl.float32)
        share = (tl.sum(slope, 1) * reciprocal(sum))[:, None]
        tl.store(of_bins(given.bins.gradient, at, r, given.bins), (e * share - slope) * factor[:, None], mask=inside)
    return settled(part, tl.sum(value, 1) * w, None, at, mask, given.outputs, given.scale)


@triton.jit(do_not_specialize=("n",))
def distribution_kernel(bins, weight, outputs, hyper, scaling, sum, formula, space, n):
    scale, factor = scales(scaling, None)
    part = tl.zeros([space.BLOCK], tl.float32)
    part = all_tiles(part, n, Given(bins, weight, outputs, hyper, space, scale, factor), formula, one_tile)
    if sum is not None:
        finish(tl.sum(part, 0), sum, scale)
