"""Sums over the valid pixels of depth maps, of d = ln x - ln y: Σ d, Σ d² and their number; and the gradient of these at x."""

import triton
import triton.language as tl


@triton.jit
def log_difference(x_ptr, target_ptr, at, mask):
    """Return x, d and which pixels are valid: those with a target above 0. Elsewhere x is 1 and d is 0."""
    y = tl.load(target_ptr + at, mask=mask, other=0.0).to(tl.float32)
    valid = y > 0.0
    x = tl.where(valid, tl.load(x_ptr + at, mask=mask, other=1.0).to(tl.float32), 1.0)
    return x, tl.log(x) - tl.log(tl.where(valid, y, 1.0)), valid


@triton.jit(do_not_specialize=("pixels",))
def depth_sums_kernel(x_ptr, target_ptr, out_ptr, pixels, BLOCK: tl.constexpr):
    """Store the three sums of every part of an image, (N, parts, 3). Programs (n, part) take each parts-th block of pixels."""
    n = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(part * BLOCK, pixels, parts * BLOCK):
        i = start + tl.arange(0, BLOCK)
        _, d, valid = log_difference(x_ptr, target_ptr, n * pixels + i, i < pixels)
        total += d
        square += d * d
        count += tl.where(valid, 1.0, 0.0)
    to = out_ptr + (n * parts + part) * 3
    tl.store(to, tl.sum(total, 0))
    tl.store(to + 1, tl.sum(square, 0))
    tl.store(to + 2, tl.sum(count, 0))


@triton.jit(do_not_specialize=("pixels",))
def depth_gradient_kernel(x_ptr, target_ptr, grad, gradient_ptr, pixels, BLOCK: tl.constexpr):
    """Store the gradient at x, of those of Σ d and Σ d² of each image, grad (N, 3)."""
    blocks = tl.cdiv(pixels, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at, mask = n * pixels + i, i < pixels
    x, d, valid = log_difference(x_ptr, target_ptr, at, mask)
    of_total, of_square = tl.load(grad.ptr + n * grad.s0), tl.load(grad.ptr + n * grad.s0 + grad.s1)
    tl.store(gradient_ptr + at, tl.where(valid, (of_total + 2.0 * of_square * d) / x, 0.0), mask=mask)
