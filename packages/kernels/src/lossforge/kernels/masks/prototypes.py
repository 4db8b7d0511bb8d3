"""Cross entropy of masks that are products, coefficients · prototypes, within their boxes. No mask is ever in memory.

The first launch has a program for each mask. It computes the logits in the mask's box from all prototypes, a tile of pixels at a time, and
with the loss also its gradient at the coefficients. The gradient at the prototypes has a program for each tile of an image, which goes over
the image's masks, some at a time, and leaves out those whose boxes lie elsewhere. Each sum has one order, so that it is the same bit for
bit each time.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import END, as_strided
from lossforge.kernels.math import logistic
from lossforge.kernels.plans import in_order


class Maps(NamedTuple):
    """A tensor of four dimensions, as a kernel sees it."""

    ptr: Any
    s0: int
    s1: int
    s2: int
    s3: int


class Masks(NamedTuple):
    """What the kernels read of each mask.

    Attributes:
        coefficients: Strided (N, K).
        boxes_ptr: (N, 4), float32, in pixels.
        image_ptr: (N,), int64, the image of each mask; `images` or more: none, so that loss and gradient are nan.
        target: Strided (T, H, W).
        index_ptr: (N,), int64, the target of each mask; -1: none, so that loss and gradient are 0.
        label_ptr: (N,), int64, the number of the mask's pixels in its target; None: the target is the mask itself.
    """

    coefficients: Any
    boxes_ptr: Any
    image_ptr: Any
    target: Any
    index_ptr: Any
    label_ptr: Any
    end: Any = END


BLOCK, TILE = 2048, 4096
"""Elements of the prototypes that a program takes at a time: of a mask's box, and of an image. They hold addresses of 64 bits as well."""
GROUP, COLUMNS = 16, 16
"""Masks at a time, and columns of a tile of an image."""


def _records(
    coefficients: Tensor, prototypes: Tensor, boxes: Tensor, images: Tensor, target: Tensor, index: Tensor, label: Tensor | None
) -> tuple[Masks, Maps, int]:
    """Return the masks and prototypes as the kernels see them, and the width of a tile of all prototypes."""
    masks = Masks(as_strided(coefficients), in_order(boxes), in_order(images), as_strided(target), in_order(index), in_order(label))
    return masks, Maps(prototypes, *prototypes.stride()), max(16, triton.next_power_of_2(coefficients.shape[1]))


def forward(*read: Any) -> tuple[Tensor]:
    """Return the loss of each mask, and its gradient at the coefficients: (N, 1 + K). read: what _records takes."""
    coefficients, prototypes, _, _, target, *_ = read
    out = new_like(coefficients, ((len(coefficients), 1 + coefficients.shape[1]), torch.float32))
    masks, maps, k = _records(*read)
    arguments = (masks, maps, out, len(prototypes), len(target), *prototypes.shape[1:])
    Launch(prototype_loss_kernel, (len(coefficients),), arguments, K=k, BLOCK=max(BLOCK // k, 16), num_warps=4).start()
    return (out,)


def backward(grad: Tensor, ends: Tensor, order: Tensor | None, gradient: Tensor, *read: Any) -> None:
    """Write the prototypes' gradient.

    Args:
        grad: that of each loss, (N,).
        ends: (B,), int64, where the masks of each image end, in `order`.
        order: (N,), int64, the masks of the first image first; None: as they are. Masks that it has behind the last end are left out.
        gradient: like the prototypes.
        read: what _records takes.
    """
    masks, maps, k = _records(*read)
    images, count, height, width = gradient.shape
    sizes = (images, len(read[4]), count, height, width)
    rows = max(TILE // k // COLUMNS, 1)
    grid = (triton.cdiv(height, rows) * triton.cdiv(width, COLUMNS), images)
    arguments = (masks, maps, Maps(gradient, *gradient.stride()), as_strided(grad), in_order(ends), in_order(order), *sizes)
    Launch(prototype_gradient_kernel, grid, arguments, K=k, GROUP=GROUP, ROWS=rows, COLUMNS=COLUMNS, num_warps=8).start()


@triton.jit
def first_pixel(edge, size):
    """Return the first of `size` pixels that is not before an edge; 0 for nan."""
    return tl.where(edge > 0.0, tl.where(edge < size, tl.ceil(edge), size * 1.0), 0.0).to(tl.int32)


@triton.jit
def labels(masks, t, label, row, column, targets, inside):
    """Return the targets y of pixels, in float32; nan of a target t that does not exist."""
    exists = (t >= 0) & (t < targets)
    where = tl.where(exists, t, 0) * masks.target.s0 + row.to(tl.int64) * masks.target.s1 + column.to(tl.int64) * masks.target.s2
    y = tl.load(masks.target.ptr + where, mask=inside & exists, other=0)
    if masks.label_ptr is not None:
        y = tl.where(y.to(tl.int64) == label, 1, 0)
    return tl.where(exists, y.to(tl.float32), float("nan"))


@triton.jit
def area_scale(x1, y1, x2, y2):
    """Return 1 / area of boxes, 0 of those without area."""
    area = (x2 - x1) * (y2 - y1)
    return tl.where(area <= 0.0, 0.0, 1.0 / tl.where(area <= 0.0, 1.0, area))


@triton.jit(do_not_specialize=("images", "targets", "height", "width"))
def prototype_loss_kernel(masks, prototypes, out_ptr, images, targets, count, height, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Store (N, 1 + count): each mask's loss, and its gradient at the coefficients."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K)
    own = tl.load(masks.coefficients.ptr + n * masks.coefficients.s0 + k * masks.coefficients.s1, mask=k < count, other=0.0)
    own = own.to(tl.float32)[:, None]
    x1, y1 = tl.load(masks.boxes_ptr + 4 * n), tl.load(masks.boxes_ptr + 4 * n + 1)
    x2, y2 = tl.load(masks.boxes_ptr + 4 * n + 2), tl.load(masks.boxes_ptr + 4 * n + 3)
    b, t, label = tl.load(masks.image_ptr + n), tl.load(masks.index_ptr + n), 0
    given = t != -1
    t = tl.where(b < images, t, targets)
    if masks.label_ptr is not None:
        label = tl.load(masks.label_ptr + n)
    left, top = first_pixel(x1, width), first_pixel(y1, height)
    across = tl.maximum(first_pixel(x2, width) - left, 0)
    pixels = tl.where(given, across * tl.maximum(first_pixel(y2, height) - top, 0), 0)
    image = prototypes.ptr + tl.where(b < images, b, 0) * prototypes.s0
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([K, BLOCK], tl.float32)
    for start in range(0, pixels, BLOCK):
        i = start + lane
        inside = i < pixels
        row, column = top + i // across, left + i % across
        where = image + (row.to(tl.int64) * prototypes.s2 + column.to(tl.int64) * prototypes.s3)[None, :]
        where += k.to(tl.int64)[:, None] * prototypes.s1
        tile = tl.load(where, mask=(k < count)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        x = tl.sum(own * tile, 0)
        y = labels(masks, t, label, row, column, targets, inside)
        p, _, log1p = logistic(x)
        total += tl.where(inside, tl.where(x >= 0, 1.0 - y, y) * tl.abs(x) + log1p, 0.0)
        slope += tile * tl.where(inside, p - y, 0.0)[None, :]
    scale = tl.where(given, area_scale(x1, y1, x2, y2), 0.0)
    to = out_ptr + n * (count + 1)
    tl.store(to, tl.sum(total, 0) * scale)
    tl.store(to + 1 + k, tl.where(scale == scale, tl.sum(slope, 1) * scale, 0.0), mask=k < count)


@triton.jit(do_not_specialize=("images", "targets", "height", "width"))
def prototype_gradient_kernel(
    masks, prototypes, gradient, grad, ends_ptr, order_ptr, images, targets, count, height, width,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of an image's prototypes.

    order_ptr: (N,), the masks to go over, of the first image first; None: all, as they are. GROUP: masks at a time.
    """
    b = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(width, COLUMNS)
    top, left = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS
    lane, k, each = tl.arange(0, ROWS * COLUMNS), tl.arange(0, K), tl.arange(0, GROUP)
    row, column = top + lane // COLUMNS, left + lane % COLUMNS
    inside = (row < height) & (column < width)
    of_image = row.to(tl.int64) * prototypes.s2 + column.to(tl.int64) * prototypes.s3
    where = prototypes.ptr + b * prototypes.s0 + k.to(tl.int64)[:, None] * prototypes.s1 + of_image[None, :]
    exists = (k < count)[:, None] & inside[None, :]
    tile = tl.load(where, mask=exists, other=0.0).to(tl.float32)
    total = tl.zeros([K, ROWS * COLUMNS], tl.float32)
    first = tl.load(ends_ptr + b - 1, mask=b > 0, other=0)
    end = tl.load(ends_ptr + b)
    for start in range(first, end, GROUP):
        n = start + each
        here = n < end
        if order_ptr is not None:
            n = tl.load(order_ptr + n, mask=here, other=0)
        x1, y1 = tl.load(masks.boxes_ptr + 4 * n, mask=here, other=0.0), tl.load(masks.boxes_ptr + 4 * n + 1, mask=here, other=0.0)
        x2, y2 = tl.load(masks.boxes_ptr + 4 * n + 2, mask=here, other=0.0), tl.load(masks.boxes_ptr + 4 * n + 3, mask=here, other=0.0)
        meets = (x1 < left + COLUMNS) & (x2 > left) & (y1 < top + ROWS) & (y2 > top)
        if tl.max(meets.to(tl.int32), 0) > 0:
            of_own = n[:, None] * masks.coefficients.s0 + k[None, :] * masks.coefficients.s1
            own = tl.load(masks.coefficients.ptr + of_own, mask=here[:, None] & (k < count)[None, :], other=0.0).to(tl.float32)
            scale = area_scale(x1, y1, x2, y2)
            own = tl.where((scale == 0.0)[:, None], 0.0, own)  # which may be nan
            x = tl.dot(own, tile, input_precision="ieee")
            t, label = tl.load(masks.index_ptr + n, mask=here, other=0), n
            if masks.label_ptr is not None:
                label = tl.load(masks.label_ptr + n, mask=here, other=0)
            within = (column[None, :] >= x1[:, None]) & (column[None, :] < x2[:, None])
            within &= (row[None, :] >= y1[:, None]) & (row[None, :] < y2[:, None]) & inside[None, :]
            y = labels(masks, t[:, None], label[:, None], row[None, :], column[None, :], targets, within)
            p, _, _ = logistic(x)
            up = tl.load(grad.ptr + n * grad.s0, mask=here, other=0.0) * scale
            total += tl.dot(tl.trans(own), tl.where(within, (p - y) * up[:, None], 0.0), input_precision="ieee")
    to = gradient.ptr + b * gradient.s0 + k.to(tl.int64)[:, None] * gradient.s1
    to += (row.to(tl.int64) * gradient.s2 + column.to(tl.int64) * gradient.s3)[None, :]
    tl.store(to, total, mask=exists)
