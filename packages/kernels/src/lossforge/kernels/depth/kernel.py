"""The loss of depth maps, of d = ln x - ln y over the valid pixels, and its gradient.

    V = Σ (d - m)² / n + (1 - λ) m² + eps with m = Σ d / n,  L = √V or V,  ∂L/∂x = a (d - b) / x with b = λ m, a = 1 / (n √V) or 2 / n

Σ d² - (Σ d)² / n would lose all digits where the d of an image are nearly equal. So each lane sums differences from its first d, and what
lanes and programs have is joined about their means.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, TINY, log2_nearest, log2_subnormal


@triton.jit
def log2_of(x):
    """Return log₂ x, also of numbers that are not normal."""
    return tl.where((x >= TINY) & (x < float("inf")), log2_nearest(x), log2_subnormal(x))


@triton.jit
def log_difference(x_ptr, target_ptr, i, pixels):
    """Return x, d and which pixels are valid: those with a target above 0. Elsewhere x is 1 and d is 0."""
    y = tl.load(target_ptr + i, mask=i < pixels, other=0.0).to(tl.float32)
    valid = y > 0.0
    x = tl.where(valid, tl.load(x_ptr + i, mask=i < pixels, other=1.0).to(tl.float32), 1.0)
    return x, LN2 * (log2_of(x) - log2_of(tl.where(valid, y, 1.0))), valid


@triton.jit
def joined(total, square, count):
    """Return the sums of all pixels, from those of several parts of them."""
    whole, number = tl.sum(total, 0), tl.sum(count, 0)
    beside = total / tl.maximum(count, 1.0) - whole / tl.maximum(number, 1.0)
    return whole, tl.sum(square + count * beside * beside, 0), number


@triton.jit
def depth_sums_kernel(x_ptr, target_ptr, out_ptr, pixels, BLOCK: tl.constexpr):
    """Store Σ d, Σ (d - mean d)² and n of every part of an image, (N, parts, 3). Programs (n, part) take each parts-th block of pixels."""
    n = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    first = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(part * BLOCK, pixels, parts * BLOCK):
        _, d, valid = log_difference(x_ptr + n * pixels, target_ptr + n * pixels, start + tl.arange(0, BLOCK), pixels)
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


@triton.jit(do_not_specialize=("parts", "lambd", "eps"))
def depth_loss_kernel(parts_ptr, out_ptr, parts, lambd, eps, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    """Store the loss of some neighbouring parts, `parts` a program, with a and b of its gradient: (programs, 3)."""
    n = tl.program_id(0).to(tl.int64)
    whole, square, number = 0.0, 0.0, 0.0
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        at, here = parts_ptr + (n * parts + part) * 3, part < parts
        total, squares = tl.load(at, mask=here, other=0.0), tl.load(at + 1, mask=here, other=0.0)
        total, squares, count = joined(total, squares, tl.load(at + 2, mask=here, other=0.0))
        beside = total / tl.maximum(count, 1.0) - whole / tl.maximum(number, 1.0)
        square += squares + beside * beside * (number * (count / tl.maximum(number + count, 1.0)))
        whole += total
        number += count
    mean = whole / number
    value = square / number + (1.0 - lambd) * mean * mean + eps
    a = 2.0 / number
    if ROOT:
        value = tl.sqrt_rn(value)
        a = tl.where(value == 0.0, 0.0, 1.0 / (number * value))
    tl.store(out_ptr + 3 * n, value)
    tl.store(out_ptr + 3 * n + 1, a)
    tl.store(out_ptr + 3 * n + 2, lambd * mean)


@triton.jit
def depth_gradient_kernel(x_ptr, target_ptr, loss_ptr, grad, gradient_ptr, pixels, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient at x. loss_ptr: what the forward pass stored; EACH: whether each image has its own."""
    blocks = tl.cdiv(pixels, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x, d, valid = log_difference(x_ptr + n * pixels, target_ptr + n * pixels, i, pixels)
    of = n * EACH
    a, b = tl.load(loss_ptr + 3 * of + 1), tl.load(loss_ptr + 3 * of + 2)
    a *= tl.load(grad.ptr + of * grad.s0)
    tl.store(gradient_ptr + n * pixels + i, tl.where(valid, a * (d - b) / x, 0.0), mask=i < pixels)
