"""Sums over the valid pixels of depth maps, of d = ln x - ln y: Σ d, Σ (d - mean d)² and their number; and the gradient of these at x.

Σ d² - (Σ d)² / n would lose all digits where the d of an image are nearly equal. So each lane sums differences from its first d, and what
lanes and programs have is joined about their means.
"""

import triton
import triton.language as tl


@triton.jit
def log_difference(x_ptr, target_ptr, at, mask):
    """Return x, d and which pixels are valid: those with a target above 0. Elsewhere x is 1 and d is 0."""
    y = tl.load(target_ptr + at, mask=mask, other=0.0).to(tl.float32)
    valid = y > 0.0
    x = tl.where(valid, tl.load(x_ptr + at, mask=mask, other=1.0).to(tl.float32), 1.0)
    return x, tl.log(x) - tl.log(tl.where(valid, y, 1.0)), valid


@triton.jit
def joined(total, square, count):
    """Return the sums of all pixels, from those of several parts of them."""
    whole, number = tl.sum(total, 0), tl.sum(count, 0)
    beside = total / tl.maximum(count, 1.0) - whole / tl.maximum(number, 1.0)
    return whole, tl.sum(square + count * beside * beside, 0), number


@triton.jit(do_not_specialize=("pixels",))
def depth_sums_kernel(x_ptr, target_ptr, out_ptr, pixels, BLOCK: tl.constexpr):
    """Store the three sums of every part of an image, (N, parts, 3). Programs (n, part) take each parts-th block of pixels."""
    n = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    first = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(part * BLOCK, pixels, parts * BLOCK):
        i = start + tl.arange(0, BLOCK)
        _, d, valid = log_difference(x_ptr, target_ptr, n * pixels + i, i < pixels)
        first = tl.where(count == 0.0, d, first)
        beside = tl.where(valid, d - first, 0.0)
        total += beside
        square += beside * beside
        count += tl.where(valid, 1.0, 0.0)
    square = tl.maximum(square - total * total / tl.maximum(count, 1.0), 0.0, tl.PropagateNan.ALL)
    total, square, count = joined(total + count * first, square, count)
    to = out_ptr + (n * parts + part) * 3
    tl.store(to, total)
    tl.store(to + 1, square)
    tl.store(to + 2, count)


@triton.jit(do_not_specialize=("parts",))
def depth_join_kernel(parts_ptr, out_ptr, parts, BLOCK: tl.constexpr):
    """Store the sums of an image, (N, 3), from those of at most BLOCK parts."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    at, here = parts_ptr + (n * parts + part) * 3, part < parts
    total, square = tl.load(at, mask=here, other=0.0), tl.load(at + 1, mask=here, other=0.0)
    total, square, count = joined(total, square, tl.load(at + 2, mask=here, other=0.0))
    tl.store(out_ptr + 3 * n, total)
    tl.store(out_ptr + 3 * n + 1, square)
    tl.store(out_ptr + 3 * n + 2, count)


@triton.jit(do_not_specialize=("pixels",))
def depth_gradient_kernel(x_ptr, target_ptr, sums_ptr, grad, gradient_ptr, pixels, BLOCK: tl.constexpr):
    """Store the gradient at x, of those of the first two sums of each image, grad (N, 3)."""
    blocks = tl.cdiv(pixels, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at, mask = n * pixels + i, i < pixels
    x, d, valid = log_difference(x_ptr, target_ptr, at, mask)
    mean = tl.load(sums_ptr + 3 * n) / tl.maximum(tl.load(sums_ptr + 3 * n + 2), 1.0)
    of_total, of_square = tl.load(grad.ptr + n * grad.s0), tl.load(grad.ptr + n * grad.s0 + grad.s1)
    tl.store(gradient_ptr + at, tl.where(valid, (of_total + 2.0 * of_square * (d - mean)) / x, 0.0), mask=mask)
