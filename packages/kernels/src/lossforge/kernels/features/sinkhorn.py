"""Sinkhorn-Knopp scaling of exp(x / T) by its columns and rows, in logarithms: nothing of the size of x is written.

For scores x (N, C) in units of T ln 2, u (N,) and v (C,) to base 2:

    vⱼ = -log₂ Σᵢ 2^(xᵢⱼ + uᵢ)        uᵢ = -log₂ Σⱼ 2^(xᵢⱼ + vⱼ)

A program of the first kernel has the columns of a block: it reads them once for v, and once more, in part from the cache, for the sums of
the rows over its block. The second kernel joins the blocks. Where the rows are spread over processes, v is that of all: its two sweeps are
two launches then, and the processes add up between them.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.call import FLOAT
from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.math import LOG2E, exp2, log

JOINED = tl.constexpr(32)  # blocks that are joined at once
BR, BC = 64, 64
"""Rows and columns of a tile."""
JOIN = 64
"""Rows that a program joins."""


def center(x: Tensor, temperature: float, iterations: int) -> tuple[Tensor]:
    """Return what the scaling of exp(x / temperature) subtracts from each column of scores x (N, C), in float32."""
    u: Tensor | None = None
    for _ in range(iterations - 1):
        (u,) = _of_rows(x, u, None, temperature)
    return of_columns(x, u, temperature)


def of_columns(x: Tensor, u: Tensor | None, temperature: float) -> tuple[Tensor]:
    """Return -v T ln 2 (C,) of these rows, from their u; None for 0."""
    out = new_like(x, ((x.shape[1],), FLOAT))
    _columns(x, u, None, out, None, temperature)
    return (out,)


def of_rows(x: Tensor, known: Tensor, temperature: float) -> tuple[Tensor]:
    """Return u (N,) from `known`, the -v T ln 2 of the rows of all processes."""
    return _of_rows(x, None, known, temperature)


def _of_rows(x: Tensor, u: Tensor | None, known: Tensor | None, temperature: float) -> tuple[Tensor]:
    rows, blocks = x.shape[0], triton.cdiv(x.shape[1], BC)
    parts, sums = new_like(x, ((2, blocks, rows), FLOAT)), new_like(x, ((rows,), FLOAT))
    _columns(x, u, known, None, parts, temperature)
    Launch(sinkhorn_rows_kernel, (triton.cdiv(rows, JOIN),), (parts, sums, rows, blocks), BR=JOIN, num_warps=4).start()
    return (sums,)


def _columns(x: Tensor, u: Tensor | None, known: Tensor | None, out: Tensor | None, parts: Tensor | None, temperature: float) -> None:
    rows, columns = x.shape
    given = as_strided(x), u, known, out, parts, rows, columns, math.log2(math.e) / temperature
    Launch(sinkhorn_columns_kernel, (triton.cdiv(columns, BC),), given, BR=BR, BC=BC, num_warps=4).start()


@triton.jit
def scores(x, i, j, rows, columns, scale):
    """Load a tile of scores to base 2; -inf outside."""
    at = i.to(tl.int64)[:, None] * x.s0 + j[None, :] * x.s1
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(x.ptr + at, mask=inside, other=float("-inf")).to(tl.float32) * scale


@triton.jit(do_not_specialize=("rows",))
def sinkhorn_columns_kernel(x, u_ptr, known_ptr, out_ptr, parts_ptr, rows, columns, scale, BR: tl.constexpr, BC: tl.constexpr):
    """Compute v of a block of columns, and the parts of the rows' sums over it.

    Args:
        u_ptr: (rows,), or None for 0.
        known_ptr: (columns,), -v / scale where it is known; None to compute it.
        out_ptr: where -v / scale is stored; None not to store it.
        parts_ptr: (2, blocks, rows): maximum and sum; None not to compute them.
    """
    block = tl.program_id(0).to(tl.int64)
    j = block * BC + tl.arange(0, BC)
    if known_ptr is None:
        m = tl.full([BC], LOWEST, tl.float32)
        s = tl.zeros([BC], tl.float32)
        for start in range(0, rows, BR):
            i = start + tl.arange(0, BR)
            t = scores(x, i, j, rows, columns, scale)
            if u_ptr is not None:
                t += tl.load(u_ptr + i, mask=i < rows, other=0.0)[:, None]
            top = tl.maximum(m, tl.max(t, 0))
            s = s * exp2(m - top) + tl.sum(exp2(t - top[None, :]), 0)
            m = top
        total = m + log(s) * LOG2E
    else:
        total = tl.load(known_ptr + j, mask=j < columns, other=0.0) * scale
    if out_ptr is not None:
        tl.store(out_ptr + j, total / scale, mask=j < columns)
    if parts_ptr is not None:
        blocks = tl.num_programs(0)
        for start in range(0, rows, BR):
            i = start + tl.arange(0, BR)
            t = scores(x, i, j, rows, columns, scale) - tl.where(j < columns, total, 0.0)[None, :]
            top = tl.maximum(tl.max(t, 1), LOWEST)
            tl.store(parts_ptr + block * rows + i, top, mask=i < rows)
            tl.store(parts_ptr + (blocks + block) * rows + i, tl.sum(exp2(t - top[:, None]), 1), mask=i < rows)


@triton.jit(do_not_specialize=("rows",))
def sinkhorn_rows_kernel(parts_ptr, u_ptr, rows, blocks, BR: tl.constexpr):
    """Join the parts of the rows' sums, and store u."""
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    m = tl.full([BR], LOWEST, tl.float32)
    s = tl.zeros([BR], tl.float32)
    for start in range(0, blocks, JOINED):
        block = start + tl.arange(0, JOINED)
        at = block.to(tl.int64)[:, None] * rows + i[None, :]
        inside = (block < blocks)[:, None] & (i < rows)[None, :]
        tops = tl.load(parts_ptr + at, mask=inside, other=LOWEST)
        sums = tl.load(parts_ptr + tl.cast(blocks, tl.int64) * rows + at, mask=inside, other=0.0)
        top = tl.maximum(m, tl.max(tops, 0))
        s = s * exp2(m - top) + tl.sum(sums * exp2(tops - top[None, :]), 0)
        m = top
    tl.store(u_ptr + i, -m - log(s) * LOG2E, mask=i < rows)
