"""Host side of the template of the Lovász extension: tile sizes, the sort, and the launches."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, LovaszCall
from lossforge.kernels.elementwise.kernel import Formula
from lossforge.kernels.engine.launch import Launch, Launcher, computed, in_order, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, constants, stepped
from lossforge.kernels.lovasz.kernel import (
    Classes,
    Maps,
    Order,
    Tile,
    lovasz_counts_kernel,
    lovasz_errors_kernel,
    lovasz_gradient_kernel,
    lovasz_regions_kernel,
    lovasz_slopes_kernel,
)

ELEMENTS = 1024
"""Of a tile of classes and pixels."""
CHUNK = 2048
"""Pixels of a region's order in one program."""
SUMMED = 256
"""Chunks, or classes, that are added up at once."""


class Found(NamedTuple):
    """What the launches before the gradient write and read.

    Attributes:
        errors: (regions, pixels).
        labels: (N, pixels of an image), int32.
        order: the pixels of each region by descending error, int64; None before they are sorted.
        counts: pixels of the class in each chunk of the order, int32.
        parts: each chunk's part of the loss.
        totals: pixels of the class in each region, int32.
        slopes: as errors; None where there will be no gradient.
        weights: of the regions.
        out: the losses of the regions; None for their total.
    """

    errors: Tensor
    labels: Tensor
    order: Tensor | None
    counts: Tensor
    parts: Tensor
    totals: Tensor
    slopes: Tensor | None
    weights: Tensor
    out: Tensor | None


class Space(NamedTuple):
    """The tiles of logits, and how the regions lie in memory: pixels of an image, and the strides of images and classes."""

    tile: Tile
    grid: tuple[int]
    numbers: tuple[int, int, int]


def _space(call: LovaszCall) -> Space:
    images, classes, pixels = call.x.shape
    block = min(triton.next_power_of_2(classes), 32)
    tile = constants(Tile(classes, BC=block, BP=ELEMENTS // block, SOFTMAX=call.softmax))
    strides = (classes * pixels, pixels) if call.per_image else (pixels, images * pixels)
    return Space(tile, (images * triton.cdiv(pixels, ELEMENTS // block),), (pixels, *strides))


def _inputs(call: LovaszCall) -> tuple[Maps, Classes]:
    image, pixel = call.target.stride()
    return Maps(call.x, *call.x.stride()), Classes(call.target, image, pixel, call.first, call.ignore_index)


def _make_errors(call: LovaszCall, found: Found, formulas: Formulas) -> Launch:
    space = _space(call)
    arguments = (*_inputs(call), found.errors, found.labels, Formula(formulas.formula), space.tile, *space.numbers)
    return Launch(lovasz_errors_kernel, space.grid, arguments, num_warps=4)


def _order(call: LovaszCall, found: Found) -> tuple[Order, tuple[int, int, int]]:
    """Return the record, and pixels and chunks of a region, and the stride of images in labels."""
    numbers = call.region[1], found.counts.shape[1], call.x.shape[2] if call.per_image else 0
    return Order(found.order, found.errors, found.labels, found.counts, call.x.shape[1]), numbers


def _make_counts(call: LovaszCall, found: Found) -> Launch:
    order, numbers = _order(call, found)
    return Launch(lovasz_counts_kernel, (found.counts.numel(),), (order, *numbers), BLOCK=CHUNK, num_warps=4)


def _make_slopes(call: LovaszCall, found: Found) -> Launch:
    order, numbers = _order(call, found)
    arguments = (order, found.slopes, found.parts, found.totals, *numbers)
    return Launch(lovasz_slopes_kernel, (found.counts.numel(),), arguments, BLOCK=CHUNK, BK=SUMMED, num_warps=4)


def _make_regions(call: LovaszCall, found: Found) -> Launch:
    mean = call.reduction == "mean"
    scale = float(call.loss_scale / (call.x.shape[0] if mean and call.per_image else 1))
    total = None if found.out is not None else sum_slots()
    tensors = (found.parts, found.totals, call.included, found.weights, found.out, total, call.normalizer)
    how = {"MEAN": mean, "PRESENT": call.present, "EMPTY_IS_ZERO": call.empty_is_zero, "BK": SUMMED, "num_warps": 4}
    numbers = (scale, found.counts.shape[1], call.x.shape[1])
    return Launch(lovasz_regions_kernel, (call.region[0],), (*tensors, *numbers), totals=int(total is not None), **how)


class Gradient(NamedTuple):
    """What the last launch takes. grad_output: 0-d or one a region; None for 1."""

    slopes: Tensor
    weights: Tensor
    grad_output: Tensor | None
    step: int
    gradient: Tensor


def _make_gradient(call: LovaszCall, g: Gradient, formulas: Formulas) -> Launch:
    space, between = _space(call), call.x.shape[1] if call.per_image else 0
    maps = (*_inputs(call), Maps(g.gradient, *g.gradient.stride()))
    tensors = (*maps, g.slopes, g.weights, g.grad_output, g.step, between)
    arguments = (*tensors, Formula(formulas.formula), space.tile, *space.numbers)
    return Launch(lovasz_gradient_kernel, space.grid, arguments, num_warps=4)


ERRORS, COUNTS, SLOPES = Launcher(_make_errors), Launcher(_make_counts), Launcher(_make_slopes)
REGIONS, GRADIENT = Launcher(_make_regions), Launcher(_make_gradient)


def _descending(errors: Tensor) -> Tensor:
    """Return the order of each row, equal errors by their places, so that it is the same run after run."""
    return torch.argsort(errors, dim=1, descending=True, stable=True)


def _new(x: Any, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    found = new_like(x, (shape, dtype))
    assert found is not None
    return found


def forward(call: LovaszCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    x, (regions, pixels) = call.x, call.region
    chunks = (regions, triton.cdiv(pixels, CHUNK))
    found = Found(
        errors=_new(x, (regions, pixels)),
        labels=_new(x, call.target.shape, torch.int32),
        order=None,
        counts=_new(x, chunks, torch.int32),
        parts=_new(x, chunks),
        totals=_new(x, (regions,), torch.int32),
        slopes=_new(x, (regions, pixels)) if keep or gradients[0] is not None else None,
        weights=_new(x, (regions,)),
        out=new_like(x, call.shapes(keep)[0]) if call.reduction == "none" else None,
    )
    ERRORS.ready(call, found, formulas).start()
    found = found._replace(order=computed(_descending, found.errors))
    COUNTS.ready(call, found).start()
    SLOPES.ready(call, found).start()
    totals = REGIONS.ready(call, found).start()
    if gradients[0] is not None:
        assert found.slopes is not None
        GRADIENT.ready(call, Gradient(found.slopes, found.weights, None, 0, gradients[0]), formulas).start()
    kept = (found.slopes, found.weights) if keep else (None, None)
    return totals[0] if found.out is None else found.out, *kept


def backward(call: LovaszCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (slopes, weights), (grad_output,) = kept, grad_outputs
    if slopes is None or weights is None:
        _, slopes, weights = forward(call, formulas, [None], True)
    assert slopes is not None
    assert weights is not None
    assert gradients[0] is not None
    upstream, step = stepped(grad_output)
    GRADIENT.ready(call, Gradient(slopes, weights, in_order(upstream) if step else upstream, step, gradients[0]), formulas).start()
