"""Sums over a launch: each program stores its part, and the last to finish adds the parts in their order. No float atomics."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.launch import launch, ticket

PART = tl.constexpr(1024)


class Sum(NamedTuple):
    """Where a launch adds up: one float32 part a program, the count of finished programs, and the 0-d total."""

    parts: Tensor
    ticket: Tensor
    total: Tensor


def new_sum(programs: int, device: torch.device, second: bool = False) -> Sum:
    """`second`: for another sum of the same launch, which needs a ticket of its own."""
    count = torch.zeros(1, dtype=torch.int32, device=device) if second else ticket(device)
    return Sum(torch.empty(programs, dtype=torch.float32, device=device), count, torch.empty((), dtype=torch.float32, device=device))


@triton.jit
def add_up(parts_ptr, programs):
    parts = tl.zeros([PART], tl.float32)
    for start in range(0, programs, PART):
        i = start + tl.arange(0, PART)
        parts += tl.load(parts_ptr + i, mask=i < programs, other=0.0, cache_modifier=".cg")
    return tl.sum(parts, 0)


@triton.jit
def finish(part, sum, scale):
    """Hand in this program's `part`; the last program stores the total times `scale`."""
    programs = tl.num_programs(0)
    if programs == 1:
        tl.store(sum.total, part * scale)
    else:
        tl.store(sum.parts + tl.program_id(0), part)
        tl.debug_barrier()
        finished = tl.atomic_add(sum.ticket, 1, sem="acq_rel", scope="gpu")
        if finished == programs - 1:
            tl.store(sum.total, add_up(sum.parts, programs) * scale)
            tl.store(sum.ticket, 0)


@triton.jit
def divided(scale, divisor_ptr, EMPTY_IS_ZERO: tl.constexpr):
    """`scale` over the device's divisor. A divisor of 0 gives inf, or 0 where a mean over nothing is to be 0."""
    if divisor_ptr is not None:
        divisor = tl.load(divisor_ptr).to(tl.float32)
        scale = scale / divisor
        if EMPTY_IS_ZERO:
            scale = tl.where(divisor == 0.0, 0.0, scale)
    return scale


@triton.jit
def scale_kernel(x_ptr, factor_ptr, n, tiles, BLOCK: tl.constexpr):
    """x ← factor · x, in place; returns at once where the factor is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * tiles
        for tile in range(tiles):
            i = (first + tile) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
            tl.store(x_ptr + i, x * factor, mask=i < n)


@triton.jit
def counted(index_ptr, weight_ptr, i, mask, classes, ignore):
    """What each row's class index adds to a mean's divisor: its class weight, 1 without weights, 0 where ignored."""
    t = tl.load(index_ptr + i, mask=mask, other=ignore)
    counts = mask & (t != ignore)
    w = tl.where(counts, 1.0, 0.0)
    if weight_ptr is not None:
        w = tl.load(weight_ptr + t, mask=counts & (t >= 0) & (t < classes), other=0.0).to(tl.float32)
    return w


@triton.jit
def count_kernel(a_ptr, b_ptr, lam_ptr, weight_ptr, sum, n, classes, ignore, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    w = counted(a_ptr, weight_ptr, i, mask, classes, ignore)
    if b_ptr is not None:
        w_b = counted(b_ptr, weight_ptr, i, mask, classes, ignore)
        if lam_ptr is None:
            w = tl.maximum(w, w_b)
        else:
            lam = tl.load(lam_ptr + i, mask=mask, other=1.0).to(tl.float32)
            w = lam * w + (1.0 - lam) * w_b
    finish(tl.sum(w, 0), sum, scale)


def count(
    target: Tensor,
    classes: int,
    ignore_index: int,
    *,
    target_b: Tensor | None = None,
    lam: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Divisor of a mean over rows with class indices, 0-d: Σ of the class weights (1 without) of rows not ignored, times scale.

    A mixup pair adds λ and 1 - λ of its two weights; without `lam`, a row counts once unless both its indices are ignored.
    """
    n = target.numel()
    block = 4096
    programs = triton.cdiv(n, block)
    sum = new_sum(programs, target.device)
    flat = [None if t is None else t.expand(target.shape).contiguous() for t in (target, target_b, lam)]
    launch(count_kernel, (programs,), target.device, *flat, weight, sum, n, classes, ignore_index, scale, BLOCK=block, num_warps=8)
    return sum.total


def scale_(x: Tensor, factor: Tensor) -> None:
    """x ← factor · x in place, for a dense x and a 0-d factor on its device; no pass over memory where the factor is 1."""
    n = x.numel()
    tiles = triton.cdiv(n, 4096 * 2048)  # few programs, so that finding a factor of 1 costs nothing
    launch(scale_kernel, (triton.cdiv(n, 4096 * tiles),), x.device, x, factor, n, tiles, BLOCK=4096, num_warps=8)
