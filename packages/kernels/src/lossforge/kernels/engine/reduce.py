"""Sums over a launch: each program stores its part, and the last program adds the parts in their order. No float atomics are used."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.launch import PROGRAMS_A_GROUP, Launch, sum_slots
from lossforge.kernels.plans import computed, in_order
from lossforge.kernels.tiles import COUNTED

PART = tl.constexpr(1024)
GROUP = tl.constexpr(PROGRAMS_A_GROUP)


@triton.jit
def add_up(parts_ptr, programs):
    parts = tl.zeros([PART], tl.float32)
    for start in range(0, programs, PART):
        i = start + tl.arange(0, PART)
        parts += tl.load(parts_ptr + i, mask=i < programs, other=0.0, cache_modifier=".cg")
    return tl.sum(parts, 0)


@triton.jit
def finish(part, sum, scale):
    """Store this program's `part`. The last program to finish stores the total times `scale`.

    Programs first count themselves within a group; then the last program of each group counts the groups. Atomic additions to one address
    run one after another, so with a single counter 16 thousand programs would take longer than reading 16 thousand rows.
    """
    programs = tl.num_programs(0)
    if programs == 1:
        tl.store(sum.total, part * scale)
    else:
        group = tl.program_id(0) // GROUP
        size = tl.minimum(programs - group * GROUP, GROUP)
        tl.store(sum.parts + tl.program_id(0), part)
        tl.debug_barrier()
        finished = tl.atomic_add(sum.ticket + 1 + group, 1, sem="acq_rel", scope="gpu")
        if finished == size - 1:
            i = tl.arange(0, GROUP)
            parts = tl.load(sum.parts + group * GROUP + i, mask=i < size, other=0.0, cache_modifier=".cg")
            tl.store(sum.parts + programs + group, tl.sum(parts, 0))
            tl.store(sum.ticket + 1 + group, 0)
            tl.debug_barrier()
            groups = tl.cdiv(programs, GROUP)
            if tl.atomic_add(sum.ticket, 1, sem="acq_rel", scope="gpu") == groups - 1:
                tl.store(sum.total, add_up(sum.parts + programs, groups) * scale)
                tl.store(sum.ticket, 0)


@triton.jit
def over(scale, divisor, EMPTY_IS_ZERO: tl.constexpr):
    """Return scale / divisor. A divisor of 0 gives inf, or 0 with EMPTY_IS_ZERO, for a mean over nothing."""
    scale = scale / divisor
    if EMPTY_IS_ZERO:
        scale = tl.where(divisor == 0.0, 0.0, scale)
    return scale


@triton.jit
def divided(scale, divisor_ptr, EMPTY_IS_ZERO: tl.constexpr):
    """Return `scale`, divided by the divisor in device memory if there is one."""
    if divisor_ptr is not None:
        scale = over(scale, tl.load(divisor_ptr).to(tl.float32), EMPTY_IS_ZERO)
    return scale


class Scaling(NamedTuple):
    """Factors of values and gradients: values are multiplied by scale / divisor, gradients also by the upstream gradient.

    Attributes:
        scale: a number.
        divisor_ptr: 0-d, or None.
        grad_output_ptr: 0-d, or None for 1.
        EMPTY_IS_ZERO: whether a divisor of 0 gives the factor 0.
    """

    scale: Any
    divisor_ptr: Any = None
    grad_output_ptr: Any = None
    EMPTY_IS_ZERO: Any = False


@triton.jit
def scales(scaling, count):
    """Return the factors of values and of gradients. `count`, unless None, replaces the divisor."""
    if count is None:
        scale = divided(scaling.scale, scaling.divisor_ptr, scaling.EMPTY_IS_ZERO)
    else:
        scale = over(scaling.scale, count, scaling.EMPTY_IS_ZERO)
    factor = scale
    if scaling.grad_output_ptr is not None:
        factor *= tl.load(scaling.grad_output_ptr).to(tl.float32)
    return scale, factor


@triton.jit
def scale_tiles(x_ptr, n, factor, BLOCK: tl.constexpr):
    """Multiply this program's part of x by a factor in place."""
    tiles = tl.cdiv(n, BLOCK * tl.num_programs(0))
    first = tl.program_id(0).to(tl.int64) * tiles
    for tile in range(tiles):
        start = (first + tile) * BLOCK
        i = start + tl.arange(0, BLOCK)
        if start + BLOCK <= n:
            tl.store(x_ptr + i, tl.load(x_ptr + i).to(tl.float32) * factor)
        else:
            tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32) * factor, mask=i < n)


@triton.jit(do_not_specialize=("n_a", "n_b", "n_c"))
def scale_kernel(factor_ptr, a_ptr, b_ptr, c_ptr, n_a, n_b, n_c, BLOCK: tl.constexpr):
    """Multiply a, b and c, None for none, by `factor` in place; return at once where the factor is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        scale_tiles(a_ptr, n_a, factor, BLOCK)
        if b_ptr is not None:
            scale_tiles(b_ptr, n_b, factor, BLOCK)
        if c_ptr is not None:
            scale_tiles(c_ptr, n_c, factor, BLOCK)


@triton.jit
def counted(index_ptr, weight_ptr, i, mask, classes, ignore):
    """Return what each row's class index adds to a mean's divisor: its class weight, 1 without weights, 0 where ignored."""
    t = tl.load(index_ptr + i, mask=mask, other=ignore)
    counts = mask & (t != ignore)
    w = tl.where(counts, 1.0, 0.0)
    if weight_ptr is not None:
        w = tl.load(weight_ptr + t, mask=counts & (t >= 0) & (t < classes), other=0.0).to(tl.float32)
    return w


@triton.jit
def count_rows(a_ptr, b_ptr, lam_ptr, weight_ptr, i, n, classes, ignore):
    """Return the sum that rows i of n add to a mean's divisor."""
    mask = i < n
    w = counted(a_ptr, weight_ptr, i, mask, classes, ignore)
    if b_ptr is not None:
        w_b = counted(b_ptr, weight_ptr, i, mask, classes, ignore)
        if lam_ptr is None:
            w = tl.maximum(w, w_b)
        else:
            lam = tl.load(lam_ptr + i, mask=mask, other=1.0).to(tl.float32)
            w = lam * w + (1.0 - lam) * w_b
    return tl.sum(w, 0)


@triton.jit(do_not_specialize=("n",))
def count_kernel(a_ptr, b_ptr, lam_ptr, weight_ptr, sum, n, classes, ignore, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    finish(count_rows(a_ptr, b_ptr, lam_ptr, weight_ptr, i, n, classes, ignore), sum, scale)


def counts_itself(target: Tensor, target_b: Tensor | None) -> bool:
    """Return whether every program of a launch counts these class indices itself, which costs less than another launch if they are few."""
    return target_b is None and target.numel() <= COUNTED and target.is_contiguous()


def _expanded(shape: Sequence[int], t: Tensor) -> Tensor:
    return t.expand(shape).clone(memory_format=torch.contiguous_format)


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
    """Return the divisor of a mean over rows with class indices, 0-d: Σ of class weights (1 without) over rows not ignored, times scale.

    A mixup pair adds λ and 1 - λ of its two weights. Without `lam`, a row counts once unless both its indices are ignored.
    """
    if lam is not None and lam.shape != target.shape:
        lam = computed(functools.partial(_expanded, target.shape), lam)
    n, tensors = target.numel(), (in_order(target), in_order(target_b), in_order(lam), weight)
    arguments = (*tensors, sum_slots(), n, classes, ignore_index, scale)
    return Launch(count_kernel, (triton.cdiv(n, 4096),), arguments, totals=1, BLOCK=4096, num_warps=8).start()[0]


def scale_(factor: Tensor, *tensors: Tensor) -> None:
    """Multiply dense tensors in place by a 0-d factor on their device. Where it is 1, they are neither read nor written."""
    for t in tensors:
        if factor.get_device() != t.get_device():
            raise ValueError(f"factor must be on the device of the tensors, {t.device}, got {factor.device}")
    for start in range(0, len(tensors), 3):
        some = tensors[start : start + 3]
        absent, numbers = (None,) * (3 - len(some)), [t.numel() for t in some]
        tiles = triton.cdiv(max(numbers), 4096 * 2048)  # few programs, so that a launch with the factor 1 costs almost nothing
        grid = (triton.cdiv(max(numbers), 4096 * tiles),)
        Launch(scale_kernel, grid, (factor, *some, *absent, *numbers, *[0] * len(absent)), BLOCK=4096, num_warps=8).start()
