"""Matrices of how well each box of one set matches each of another, and their gradients.

A program computes one tile of a matrix. In backward a program sums over all boxes of the other set, so that the order of a sum is fixed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.boxes.boxes import corners, load_sides, store_sides
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided, constants
from lossforge.kernels.formulas import box, similarity


class Tile(NamedTuple):
    """ROWS boxes of one set against COLUMNS of the other. CENTERED: boxes are (cx, cy, w, h)."""

    ROWS: int
    COLUMNS: int
    CENTERED: bool


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


@triton.jit
def load_boxes(t, batch, i, mask, CENTERED: tl.constexpr):
    """Load the corners of the boxes `i` of (L, N, 4) as four float32 tensors; 0 outside of the mask."""
    a, b, c, d = load_sides(t.ptr + batch * t.s0 + i.to(tl.int64) * t.s1, t.s2, mask)
    return corners(a, b, c, d, CENTERED)


@triton.jit(do_not_specialize=("n", "m", "eps"))
def pairwise_kernel(boxes1, boxes2, out_ptr, n, m, eps, tile, similarity: tl.constexpr):
    """Store similarity(boxes1[i], boxes2[j]) in out (L, n, m)."""
    across, down = tl.cdiv(m, tile.COLUMNS), tl.cdiv(n, tile.ROWS)
    program = tl.program_id(0).to(tl.int64)
    batch = program // (across * down)
    i = (program // across % down).to(tl.int32) * tile.ROWS + tl.arange(0, tile.ROWS)[:, None]
    j = (program % across).to(tl.int32) * tile.COLUMNS + tl.arange(0, tile.COLUMNS)[None, :]
    x1, y1, x2, y2 = load_boxes(boxes1, batch, i, i < n, tile.CENTERED)
    u1, v1, u2, v2 = load_boxes(boxes2, batch, j, j < m, tile.CENTERED)
    value = similarity(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    tl.store(out_ptr + (batch * n + i) * m + j, value, mask=(i < n) & (j < m))


@triton.jit(do_not_specialize=("n", "m", "eps"))
def pairwise_backward_kernel(own, other, gradient, grad_ptr, g0, g1, g2, n, m, eps, tile, loss: tl.constexpr, FIRST: tl.constexpr):
    """Store the gradient of `own` (L, n, 4), from that of the matrix by its strides, g1 along `own`. FIRST: own is boxes1.

    loss: the formula whose value is 1 - similarity, with its derivatives.
    """
    down = tl.cdiv(n, tile.ROWS)
    program = tl.program_id(0).to(tl.int64)
    batch = program // down
    i = (program % down).to(tl.int32) * tile.ROWS + tl.arange(0, tile.ROWS)
    row = i[:, None]
    x1, y1, x2, y2 = load_boxes(own, batch, row, row < n, tile.CENTERED)
    a = tl.zeros([tile.ROWS], tl.float32)
    b, c, d = a, a, a
    for start in range(0, m, tile.COLUMNS):
        j = start + tl.arange(0, tile.COLUMNS)[None, :]
        mask = (row < n) & (j < m)
        u1, v1, u2, v2 = load_boxes(other, batch, j, j < m, tile.CENTERED)
        upstream = tl.load(grad_ptr + batch * g0 + row.to(tl.int64) * g1 + j.to(tl.int64) * g2, mask=mask, other=0.0).to(tl.float32)
        if FIRST:
            _, da, db, dc, dd, _, _, _, _ = loss(x1, y1, x2, y2, u1, v1, u2, v2, eps)
        else:
            _, _, _, _, _, da, db, dc, dd = loss(u1, v1, u2, v2, x1, y1, x2, y2, eps)
        a -= tl.sum(tl.where(mask, da * upstream, 0.0), 1)
        b -= tl.sum(tl.where(mask, db * upstream, 0.0), 1)
        c -= tl.sum(tl.where(mask, dc * upstream, 0.0), 1)
        d -= tl.sum(tl.where(mask, dd * upstream, 0.0), 1)
    if tile.CENTERED:
        a, b, c, d = a + c, b + d, 0.5 * (c - a), 0.5 * (d - b)
    first = gradient.ptr + batch * gradient.s0 + i.to(tl.int64) * gradient.s1
    store_sides(first, gradient.s2, i < n, (a, b, c, d))
