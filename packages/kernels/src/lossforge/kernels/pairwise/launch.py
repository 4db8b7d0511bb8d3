"""Host side of the matrices of pairs of boxes: tiles, and the launches."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided, constants
from lossforge.kernels.formulas import box, similarity
from lossforge.kernels.pairwise.kernel import Tile, pairwise_backward_kernel, pairwise_kernel

FORWARD, BACKWARD = (8, 128), (4, 128)
"""Rows and columns of a tile. Backward has a program for every few rows, which goes over all columns."""


def formula(name: str, derived: bool = False) -> Callable[..., Any]:
    """Return a similarity as a device function; derived: the loss 1 - similarity with its derivatives."""
    return getattr(box if derived else similarity, name)


def _tile(sizes: tuple[int, int], centered: bool) -> Tile:
    return constants(Tile(*sizes, centered))


def forward(boxes1: Tensor, boxes2: Tensor, name: str, eps: float, centered: bool) -> tuple[Tensor]:
    """Return the matrices (L, N, M) of boxes (L, N, 4) and (L, M, 4), in float32."""
    (batch, n, _), m = boxes1.shape, boxes2.shape[1]
    out = new_like(boxes1, ((batch, n, m), torch.float32))
    rows, columns = FORWARD
    grid = (batch * triton.cdiv(n, rows) * triton.cdiv(m, columns),)
    arguments = (as_strided(boxes1), as_strided(boxes2), out, n, m, eps, _tile(FORWARD, centered))
    Launch(pairwise_kernel, grid, arguments, similarity=formula(name), num_warps=4).start()
    return (out,)


def backward(boxes1: Tensor, boxes2: Tensor, grad: Tensor, gradient1: Tensor | None, gradient2: Tensor | None, *rest: Any) -> None:
    """Write the gradients of both boxes, where they are wanted, for that of the matrices. rest: name, eps, centered."""
    name, eps, centered = rest
    g0, g1, g2 = grad.stride()
    sides = ((boxes1, boxes2, gradient1, (g0, g1, g2), True), (boxes2, boxes1, gradient2, (g0, g2, g1), False))
    for own, other, gradient, strides, first in sides:
        if gradient is None:
            continue
        batch, n, _ = own.shape
        grid = (batch * triton.cdiv(n, BACKWARD[0]),)
        tensors = (as_strided(own), as_strided(other), as_strided(gradient), grad)
        arguments = (*tensors, *strides, n, other.shape[1], eps, _tile(BACKWARD, centered))
        Launch(pairwise_backward_kernel, grid, arguments, loss=formula(name, derived=True), FIRST=first, num_warps=4).start()
