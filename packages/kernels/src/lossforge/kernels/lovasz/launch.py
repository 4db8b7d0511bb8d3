"""Host side of the template of the Lovász extension: tile sizes, the sort, and the launches."""

from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT, Formulas
from lossforge.kernels.elementwise.kernel import Formula
from lossforge.kernels.engine.launch import Launch, computed, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, as_strided, constants, stepped
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.lovasz.call import LovaszCall
from lossforge.kernels.lovasz.kernel import (
    Classes,
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


def _inputs(call: LovaszCall) -> tuple[Any, ...]:
    image, pixel = call.target.stride()
    return as_strided(call.x), Classes(call.target, image, pixel, call.first, call.ignore_index)


def _space(call: LovaszCall, formulas: Formulas) -> tuple[tuple[int], tuple[Any, ...]]:
    """Return the grid of the tiles of logits, and the last arguments of their kernels.

    These are the formula, the tile, the pixels of an image, and the strides of images and classes where regions lie in memory.
    """
    images, classes, pixels = call.x.shape
    block = min(triton.next_power_of_2(classes), 32)
    tile = constants(Tile(classes, BC=block, BP=ELEMENTS // block, SOFTMAX=call.softmax))
    strides = (classes * pixels, pixels) if call.per_image else (pixels, images * pixels)
    return (images * triton.cdiv(pixels, ELEMENTS // block),), (Formula(formulas.formula), tile, pixels, *strides)


def _descending(errors: Tensor) -> Tensor:
    """Return the order of each row, equal errors by their places, so that it is the same run after run."""
    return torch.argsort(errors, dim=1, descending=True, stable=True)


def _compute(call: LovaszCall, formulas: Formulas, keep: bool) -> tuple[Tensors, Tensors]:
    x, (regions, pixels), classes = call.x, call.region, call.x.shape[1]
    chunks = triton.cdiv(pixels, CHUNK)
    errors, labels = new_like(x, ((regions, pixels), FLOAT)), new_like(x, (call.target.shape, torch.int32))
    grid, space = _space(call, formulas)
    Launch(lovasz_errors_kernel, grid, (*_inputs(call), errors, labels, *space), num_warps=4).start()

    counts = new_like(x, ((regions, chunks), torch.int32))
    order = Order(computed(_descending, errors), errors, labels, counts, classes)
    numbers, grid = (pixels, chunks, x.shape[2] if call.per_image else 0), (regions * chunks,)
    Launch(lovasz_counts_kernel, grid, (order, *numbers), BLOCK=CHUNK, num_warps=4).start()

    slopes = new_like(x, (errors.shape, FLOAT)) if keep else None
    parts, totals = new_like(x, ((regions, chunks), FLOAT)), new_like(x, ((regions,), torch.int32))
    Launch(lovasz_slopes_kernel, grid, (order, slopes, parts, totals, *numbers), BLOCK=CHUNK, BK=SUMMED, num_warps=4).start()

    mean, weights = call.reduction == "mean", new_like(x, ((regions,), FLOAT))
    out = new_like(x, call.shapes(keep)[0]) if call.reduction == "none" else None
    scale = float(call.loss_scale / (x.shape[0] if mean and call.per_image else 1))
    tensors = (parts, totals, call.included, weights, out, sum_slots() if out is None else None, call.normalizer)
    how = {"MEAN": mean, "PRESENT": call.present, "EMPTY_IS_ZERO": call.empty_is_zero, "BK": SUMMED, "num_warps": 4}
    total = Launch(lovasz_regions_kernel, (regions,), (*tensors, scale, chunks, classes), totals=int(out is None), **how).start()
    return (total[0] if out is None else out,), (slopes, weights)


def _differentiate(call: LovaszCall, formulas: Formulas, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    upstream, step = stepped(grad_output)
    grid, space = _space(call, formulas)
    between = call.x.shape[1] if call.per_image else 0
    arguments = (*_inputs(call), as_strided(gradients[0]), *kept, upstream, step, between, *space)
    Launch(lovasz_gradient_kernel, grid, arguments, num_warps=4).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward
