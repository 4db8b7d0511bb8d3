"""The exact Euclidean distance transform, one dimension after the other (Felzenszwalb, Huttenlocher 2012).

Along a line of pixels each takes the least of (i - j)² + fⱼ over the line's pixels j, with f the squared distance within the dimensions
before. The search goes outward from a block of pixels, and ends where (i - j)² alone exceeds what every pixel of the block has found.
So its cost is the distance, not the line's length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.plans import in_order

BLOCK, LINES, AHEAD = 64, 32, 8
"""Pixels of a line and lines that a program takes, and pixels between two questions whether it may end."""


def transform(mask: Tensor, spacing: tuple[float, ...], background: bool) -> tuple[Tensor]:
    """Return the distances of the pixels of masks (…, d…) to the nearest that is 0, in float32; with `background` to one that is not."""
    source = in_order(mask)
    shape = mask.shape[-len(spacing) :]
    step = 1
    for k, (length, size) in enumerate(zip(reversed(shape), reversed(spacing), strict=True)):
        out = new_like(mask, (mask.shape, torch.float32))
        lines = mask.numel() // length
        grid = (triton.cdiv(lines, LINES), triton.cdiv(length, BLOCK))
        arguments = (source, out, lines, length, step, float(size * size))
        constants = {"FIRST": k == 0, "BACKGROUND": background, "LAST": k == len(shape) - 1}
        Launch(distance_kernel, grid, arguments, **constants, BLOCK=BLOCK, LINES=LINES, AHEAD=AHEAD, num_warps=4).start()
        source, step = out, step * length
    return (source,)


@triton.jit
def value_at(source_ptr, line, j, length, step, inside, FIRST: tl.constexpr, BACKGROUND: tl.constexpr):
    """Return the squared distance so far at pixels j of lines, (1, lines); inf outside. FIRST: of a mask, from the pixels that are 0, with
    BACKGROUND from the others."""
    within = inside & (j >= 0) & (j < length)
    where = source_ptr + line + tl.maximum(j, 0).to(tl.int64) * step
    if FIRST:
        far = tl.load(where, mask=within, other=0) != 0
        if BACKGROUND:
            far = far == 0
        f = tl.where(within & (far == 0), 0.0, float("inf"))
    else:
        f = tl.load(where, mask=within, other=float("inf"))
    return f


@triton.jit(do_not_specialize=("lines", "length", "weight"))
def distance_kernel(
    source_ptr, out_ptr, lines, length, step, weight,
    FIRST: tl.constexpr, BACKGROUND: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store the distances after one more dimension, squared unless it is the LAST. weight: the pixels' distance, squared."""
    n = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    inside = (n < lines)[None, :]
    line = (n // step * step * length + n % step)[None, :]
    start = tl.program_id(1) * BLOCK
    i = (start + tl.arange(0, BLOCK))[:, None]
    best = tl.full([BLOCK, LINES], float("inf"), tl.float32)
    for j in range(start, tl.minimum(start + BLOCK, length)):
        d = (i - j).to(tl.float32)
        best = tl.minimum(best, weight * (d * d) + value_at(source_ptr, line, j, length, step, inside, FIRST, BACKGROUND))
    reach = 1
    counts = (i < length) & inside
    while (reach < length) & (weight * reach * reach < tl.max(tl.max(tl.where(counts, best, 0.0), 1), 0)):
        for further in tl.static_range(AHEAD):
            before, after = start - reach - further, start + BLOCK - 1 + reach + further
            d = (i - before).to(tl.float32)
            best = tl.minimum(best, weight * (d * d) + value_at(source_ptr, line, before, length, step, inside, FIRST, BACKGROUND))
            d = (after - i).to(tl.float32)
            best = tl.minimum(best, weight * (d * d) + value_at(source_ptr, line, after, length, step, inside, FIRST, BACKGROUND))
        reach += AHEAD
    if LAST:
        best = tl.sqrt_rn(best)
    tl.store(out_ptr + line + i.to(tl.int64) * step, best, mask=counts)
