"""The template of losses that are the Lovász extension of the Jaccard index: a weighted sum of a region's errors, the largest first.

A region is one class of one image, or of the batch. Each pixel has an error e(v, y) of its value v, the class's probability or a logit, and
y, 1 where it is of the class, else 0. With the errors in descending order, the region's Y pixels of the class, and T_k of these among the
first k:

    L = Σ g_k max(e_k, 0),  U_k = Y + k - T_k
    g_k = 1 / U_k for a pixel of the class, (Y - T_k) / (U_k (U_k - 1)) for another; of a region without any 1 for the first, else 0

which are the differences J_k - J_(k-1) of the Jaccard loss J_k = 1 - (Y - T_k) / U_k without their cancellation. Ignored pixels have the
error -1, so that they come after all that count.

The first launch writes the errors, torch sorts them, the second counts T in chunks of the order, the third writes each pixel's g and adds
up the chunks, the fourth weighs and adds up the regions. The last writes the gradient, for which it reads the logits again.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.call import FLOAT, Formulas
from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.elements.elementwise.kernel import Formula
from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, as_strided, constants, stepped
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.masks.calls import LovaszCall
from lossforge.kernels.math import LOG2E, exp2
from lossforge.kernels.plans import computed


class Classes(NamedTuple):
    """Class indices (N, P) with their strides. first: the class of channel 0."""

    ptr: Any
    image: Any
    pixel: Any
    first: Any
    ignore: Any


class Tile(NamedTuple):
    """How many classes there are, and the classes and pixels of a tile. SOFTMAX: values are probabilities, else logits."""

    classes: Any
    BC: Any
    BP: Any
    SOFTMAX: Any


class Order(NamedTuple):
    """The pixels of each region by descending error; errors (regions, pixels), labels (N, pixels of an image), counts (regions, chunks).

    The label of a pixel is its channel, -1 of none. A region of all images has the labels of all, one image after the other.
    """

    ptr: Any
    errors: Any
    labels: Any
    counts: Any
    classes: Any


ELEMENTS = 1024
"""Of a tile of classes and pixels."""
CHUNK = 2048
"""Pixels of a region's order in one program."""
SUMMED = 256
"""Chunks, or classes, that are added up at once."""


def _inputs(call: LovaszCall) -> tuple[Any, ...]:
    image, pixel = call.target.stride()
    return as_strided(call.x), Classes(call.target, image, pixel, call.first(), call.ignore_index)


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


@triton.jit
def place(pixels, BP: tl.constexpr):
    """Return the image and the pixels of a program."""
    tiles = tl.cdiv(pixels, BP)
    number = tl.program_id(0).to(tl.int64)
    return number // tiles, (number % tiles) * BP + tl.arange(0, BP)


@triton.jit
def map_address(t, n, pixel, c):
    """Return pointers to the classes c of pixels of image n, in logits (N, C, P) or their gradient."""
    return t.ptr + n * t.s0 + (c.to(tl.int64) * t.s1)[:, None] + (pixel * t.s2)[None, :]


@triton.jit
def read(x, n, pixel, c, keep, tile):
    at = map_address(x, n, pixel, c)
    outside: tl.constexpr = float("-inf") if tile.SOFTMAX else 0.0
    here = (c < tile.classes)[:, None]
    logits = tl.load(at, mask=here & keep[None, :], other=0.0).to(tl.float32)
    return tl.where(here, logits, outside)


@triton.jit
def labels_of(target, n, pixel, pixels, classes):
    """Return each pixel's channel, -1 where it has none; whether it counts, and whether its index is valid."""
    inside = pixel < pixels
    t = tl.load(target.ptr + n * target.image + pixel * target.pixel, mask=inside, other=0).to(tl.int64)
    keep = inside & (t != target.ignore)
    valid = (t >= 0) & (t < classes + target.first)
    return tl.where(keep & valid, t - target.first, -1).to(tl.int32), keep, valid


@triton.jit
def softmax_of(x, n, pixel, keep, tile):
    """Return the maximum of each pixel's logits and the sum of exp(x - maximum)."""
    top, total = tl.full([tile.BP], LOWEST, tl.float32), tl.zeros([tile.BP], tl.float32)
    if tile.SOFTMAX:
        for start in range(0, tile.classes, tile.BC):
            logits = read(x, n, pixel, start + tl.arange(0, tile.BC), keep, tile)
            above = tl.maximum(top, tl.max(logits, 0))
            total = total * exp2((top - above) * LOG2E) + tl.sum(exp2((logits - above[None, :]) * LOG2E), 0)
            top = above
    return top, total


@triton.jit
def values_of(x, n, pixel, c, keep, top, total, tile):
    """Return the probabilities or logits of the classes c."""
    v = read(x, n, pixel, c, keep, tile)
    if tile.SOFTMAX:
        v = exp2((v - top[None, :]) * LOG2E) / total[None, :]
    return v


@triton.jit
def places_of(n, pixel, c, image, channel):
    """Return where the errors of the classes c are."""
    return n * image + (c.to(tl.int64) * channel)[:, None] + pixel[None, :]


@triton.jit(do_not_specialize=("pixels", "image", "channel"))
def lovasz_errors_kernel(x, target, errors_ptr, labels_ptr, formula, tile, pixels, image, channel):
    """Write the errors of BP pixels in all classes, and their labels. image, channel: their strides in errors."""
    n, pixel = place(pixels, tile.BP)
    label, keep, valid = labels_of(target, n, pixel, pixels, tile.classes)
    inside = pixel < pixels
    tl.store(labels_ptr + n * pixels + pixel, label, mask=inside)
    top, total = softmax_of(x, n, pixel, keep, tile)
    for start in range(0, tile.classes, tile.BC):
        c = start + tl.arange(0, tile.BC)
        v = values_of(x, n, pixel, c, keep, top, total, tile)
        error, _ = formula.value(v, tl.where(label[None, :] == c[:, None], 1.0, 0.0))
        error = tl.where(keep[None, :], tl.where(valid[None, :], error, float("nan")), -1.0)
        tl.store(errors_ptr + places_of(n, pixel, c, image, channel), error, mask=(c < tile.classes)[:, None] & inside[None, :])


@triton.jit
def chunk_of(order, pixels, chunks, image, BLOCK: tl.constexpr):
    """Return a program's region and chunk; its places in the order, which exist, their pixels, and which are of the class."""
    number = tl.program_id(0).to(tl.int64)
    region, chunk = number // chunks, (number % chunks).to(tl.int32)
    k = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = k < pixels
    pixel = tl.load(order.ptr + region * pixels + k, mask=inside, other=0)
    label = tl.load(order.labels + (region // order.classes) * image + pixel, mask=inside, other=-1)
    return region, chunk, k, inside, pixel, label == (region % order.classes).to(tl.int32)


@triton.jit(do_not_specialize=("pixels", "chunks", "image"))
def lovasz_counts_kernel(order, pixels, chunks, image, BLOCK: tl.constexpr):
    """Count the pixels of the class in each chunk of each region's order.

    image: the stride of images in labels, 0 where a region is of all images.
    """
    _, _, _, _, _, own = chunk_of(order, pixels, chunks, image, BLOCK)
    tl.store(order.counts + tl.program_id(0), tl.sum(own.to(tl.int32), 0))


@triton.jit(do_not_specialize=("pixels", "chunks", "image"))
def lovasz_slopes_kernel(
    order, slopes_ptr, parts_ptr, totals_ptr, pixels, chunks, image, BLOCK: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Write g of each pixel of a chunk where it is asked for, the chunk's part of the region's loss, and the region's count."""
    region, chunk, k, inside, pixel, own = chunk_of(order, pixels, chunks, image, BLOCK)
    before, every = tl.zeros([BK], tl.int32), tl.zeros([BK], tl.int32)
    for start in range(0, chunks, BK):
        j = start + tl.arange(0, BK)
        counts = tl.load(order.counts + region * chunks + j, mask=j < chunks, other=0)
        every += counts
        before += tl.where(j < chunk, counts, 0)
    total = tl.sum(every, 0)
    rest = total - tl.sum(before, 0) - tl.cumsum(own.to(tl.int32), 0)
    union = (rest + k + 1).to(tl.float32)
    g = tl.where(own, 1.0, tl.where(union == 1.0, 1.0, rest.to(tl.float32) / tl.maximum(union - 1.0, 1.0))) / union
    error = tl.load(order.errors + region * pixels + pixel, mask=inside, other=-1.0)
    g = tl.where(error <= 0.0, 0.0, g)
    if slopes_ptr is not None:
        tl.store(slopes_ptr + region * pixels + pixel, g, mask=inside)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(tl.where(error <= 0.0, 0.0, error * g), 0))
    tl.store(totals_ptr + region, total, mask=chunk == 0)


@triton.jit
def counted(c, region, included_ptr, totals_ptr, classes, PRESENT: tl.constexpr):
    """Return how often each of the classes c counts, in the image of a region."""
    here = c < classes
    often = tl.where(here, 1.0, 0.0)
    if included_ptr is not None:
        often = tl.load(included_ptr + c, mask=here, other=0.0)
    elif PRESENT:
        first = (region // classes) * classes
        often = tl.where(tl.load(totals_ptr + first + c, mask=here, other=0) > 0, 1.0, 0.0)
    return often


@triton.jit(do_not_specialize=("chunks",))
def lovasz_regions_kernel(
    parts_ptr, totals_ptr, included_ptr, weights_ptr, out_ptr, sum, divisor_ptr, scale, chunks, classes,
    MEAN: tl.constexpr, PRESENT: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add up a region's chunks; write its weight, and its loss or the weighted total."""
    region = tl.program_id(0).to(tl.int64)
    parts, often = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    for start in range(0, chunks, BK):
        j = start + tl.arange(0, BK)
        parts += tl.load(parts_ptr + region * chunks + j, mask=j < chunks, other=0.0)
    if MEAN:
        for start in range(0, classes, BK):
            often += counted(start + tl.arange(0, BK), region, included_ptr, totals_ptr, classes, PRESENT)
    own = tl.sum(counted(region % classes + tl.zeros([1], tl.int32), region, included_ptr, totals_ptr, classes, PRESENT), 0)
    weight = tl.where(own == 0.0, 0.0, own * divided(scale, divisor_ptr, EMPTY_IS_ZERO))
    if MEAN:
        weight /= tl.maximum(tl.sum(often, 0), 1.0)
    tl.store(weights_ptr + region, weight)
    value = tl.where(own == 0.0, 0.0, tl.sum(parts, 0) * weight)
    if out_ptr is not None:
        tl.store(out_ptr + region, value)
    else:
        finish(value, sum, 1.0)


@triton.jit
def slope_of(x, here, c, slopes_ptr, at, formula, tile):
    """Return the values of the classes c and the loss's derivatives by them, (BC, BP).

    here: the image, and its pixels with their labels, whether they count, and what `softmax_of` returns of them.
    """
    n, pixel, label, keep, top, total = here
    v = values_of(x, n, pixel, c, keep, top, total, tile)
    _, slope = formula.value(v, tl.where(label[None, :] == c[:, None], 1.0, 0.0))
    g = tl.load(slopes_ptr + at, mask=(c < tile.classes)[:, None] & keep[None, :], other=0.0)
    return v, tl.where(g == 0.0, 0.0, g * slope)


@triton.jit
def factors(c, n, weights_ptr, grad_output_ptr, step, between, classes):
    """Return what the classes' losses in an image are multiplied by."""
    at = n * between + c
    w = tl.load(weights_ptr + at, mask=c < classes, other=0.0)
    if grad_output_ptr is not None:
        w *= tl.load(grad_output_ptr + at * step, mask=c < classes, other=0.0).to(tl.float32)
    return w[:, None]


@triton.jit(do_not_specialize=("pixels", "image", "channel"))
def lovasz_gradient_kernel(
    x, target, gradient, slopes_ptr, weights_ptr, grad_output_ptr, step, between, formula, tile, pixels, image, channel
):  # fmt: skip
    """Write the gradient of BP pixels.

    step: 1 where each region has an upstream gradient, 0 where all have one. between: the stride of images in weights, 0 where
    a region is of all images. image, channel: the same of slopes.
    """
    n, pixel = place(pixels, tile.BP)
    label, keep, valid = labels_of(target, n, pixel, pixels, tile.classes)
    top, total = softmax_of(x, n, pixel, keep, tile)
    here = (n, pixel, label, keep, top, total)
    mixed = tl.zeros([tile.BP], tl.float32)
    if tile.SOFTMAX:
        for start in range(0, tile.classes, tile.BC):
            c = start + tl.arange(0, tile.BC)
            at = places_of(n, pixel, c, image, channel)
            p, slope = slope_of(x, here, c, slopes_ptr, at, formula, tile)
            mixed += tl.sum(p * slope * factors(c, n, weights_ptr, grad_output_ptr, step, between, tile.classes), 0)
    for start in range(0, tile.classes, tile.BC):
        c = start + tl.arange(0, tile.BC)
        at = places_of(n, pixel, c, image, channel)
        p, slope = slope_of(x, here, c, slopes_ptr, at, formula, tile)
        g = slope * factors(c, n, weights_ptr, grad_output_ptr, step, between, tile.classes)
        if tile.SOFTMAX:
            g = p * (g - mixed[None, :])
        g = tl.where(keep[None, :], tl.where(valid[None, :], g, float("nan")), 0.0)
        to = map_address(gradient, n, pixel, c)
        tl.store(to, g, mask=(c < tile.classes)[:, None] & (pixel < pixels)[None, :])
