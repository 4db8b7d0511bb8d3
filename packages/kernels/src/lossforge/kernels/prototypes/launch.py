"""Host side of the masks of prototypes: the launches."""

from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, in_order, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.prototypes.kernel import Maps, Masks, prototype_gradient_kernel, prototype_loss_kernel

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
