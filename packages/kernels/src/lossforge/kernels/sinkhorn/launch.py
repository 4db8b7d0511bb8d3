"""Host side of Sinkhorn-Knopp scaling: tiles, and two launches an iteration."""

import math

import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.sinkhorn.kernel import sinkhorn_columns_kernel, sinkhorn_rows_kernel

BR, BC = 64, 64
"""Rows and columns of a tile."""
JOIN = 64
"""Rows that a program joins."""


def center(x: Tensor, temperature: float, iterations: int) -> tuple[Tensor]:
    """Return what the scaling of exp(x / temperature) subtracts from each column of scores x (N, C), in float32."""
    rows, columns = x.shape
    blocks = triton.cdiv(columns, BC)
    scale = math.log2(math.e) / temperature
    u: Tensor | None = None
    for _ in range(iterations - 1):
        v, parts, sums = new_like(x, ((columns,), FLOAT)), new_like(x, ((2, blocks, rows), FLOAT)), new_like(x, ((rows,), FLOAT))
        Launch(sinkhorn_columns_kernel, (blocks,), (as_strided(x), u, v, parts, rows, columns, scale), BR=BR, BC=BC, num_warps=4).start()
        Launch(sinkhorn_rows_kernel, (triton.cdiv(rows, JOIN),), (parts, sums, rows, blocks), BR=JOIN, num_warps=4).start()
        u = sums
    out = new_like(x, ((columns,), FLOAT))
    Launch(sinkhorn_columns_kernel, (blocks,), (as_strided(x), u, out, None, rows, columns, scale), BR=BR, BC=BC, num_warps=4).start()
    return (out,)
