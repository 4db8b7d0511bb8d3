"""Losses of masks at sampled points: logits and targets are read by bilinear interpolation, and no resized mask is ever in memory.

A point (x, y) in [0, 1]² is the position (x W - 1/2, y H - 1/2) among the centres of the pixels; pixels outside of the mask are 0. So for
logits and targets of different sizes, as in `grid_sample(align_corners=False)`.

Several points add to one pixel's gradient. The sums are of 64-bit integers, so that the order of the additions changes nothing.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic


@triton.jit
def corner(points_ptr, at, mask, height, width):
    """Return the row and column of the pixel above and left of each point, and the shares of those below and right."""
    x = tl.load(points_ptr + 2 * at, mask=mask, other=0.0) * width - 0.5
    y = tl.load(points_ptr + 2 * at + 1, mask=mask, other=0.0) * height - 0.5
    top, left = tl.floor(y), tl.floor(x)
    return top.to(tl.int32), left.to(tl.int32), y - top, x - left


@triton.jit
def inside_of(row, column, mask, height, width):
    return mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit
def sampled(t, n, points_ptr, at, mask, height, width):
    """Return mask n's values at the points, in float32."""
    top, left, below, right = corner(points_ptr, at, mask, height, width)
    value = tl.zeros([at.shape[0]], tl.float32)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            share = (below if i else 1.0 - below) * (right if j else 1.0 - right)
            inside = inside_of(top + i, left + j, mask, height, width)
            where = t.ptr + n * t.s0 + (top + i).to(tl.int64) * t.s1 + (left + j).to(tl.int64) * t.s2
            value += share * tl.load(where, mask=inside, other=0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=("count", "height", "width"))
def sample_kernel(x, points_ptr, out_ptr, count, height, width, BLOCK: tl.constexpr):
    """Store each mask's values at its points, (N, count)."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = n * count + k
    tl.store(out_ptr + at, sampled(x, n, points_ptr, at, k < count, height, width), mask=k < count)


@triton.jit(do_not_specialize=("masks", "count", "height", "width", "target_height", "target_width"))
def point_loss_kernel(x, target, points_ptr, out_ptr, masks, count, height, width, target_height, target_width, BLOCK: tl.constexpr):
    """Store (5, N): the mean cross entropy of each mask's points, its Dice loss, and Σ p y, Σ p and Σ y."""
    n = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    bce = tl.zeros([BLOCK], tl.float32)
    i = tl.zeros([BLOCK], tl.float32)
    p = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        mask = start + lane < count
        at = n * count + start + lane
        logit = sampled(x, n, points_ptr, at, mask, height, width)
        true = sampled(target, n, points_ptr, at, mask, target_height, target_width)
        probability, _, log1p = logistic(logit)
        share = tl.where(mask, 1.0, 0.0)
        bce += share * (tl.where(logit >= 0, 1.0 - true, true) * tl.abs(logit) + log1p)
        i += probability * true
        p += share * probability
        y += true
    shared, predicted, wanted = tl.sum(i, 0), tl.sum(p, 0), tl.sum(y, 0)
    tl.store(out_ptr + n, tl.sum(bce, 0) / count)
    tl.store(out_ptr + masks + n, (predicted + wanted - 2.0 * shared) / (predicted + wanted + 1.0))
    tl.store(out_ptr + 2 * masks + n, shared)
    tl.store(out_ptr + 3 * masks + n, predicted)
    tl.store(out_ptr + 4 * masks + n, wanted)


@triton.jit
def factors(grad, results_ptr, n, masks, count):
    """Return the factors c, a and b of a point's gradient c (p - y) + (a y + b) p (1 - p), and a bound of it, for y in [0, 1]."""
    shared = tl.load(results_ptr + 2 * masks + n)
    whole = tl.load(results_ptr + 3 * masks + n) + tl.load(results_ptr + 4 * masks + n) + 1.0
    of_bce = tl.load(grad.ptr + n * grad.s1) / count
    of_dice = tl.load(grad.ptr + grad.s0 + n * grad.s1) / whole
    return of_bce, -2.0 * of_dice, of_dice * ((2.0 * shared + 1.0) / whole), tl.abs(of_bce) + 0.5 * tl.abs(of_dice)


@triton.jit(do_not_specialize=("masks", "count", "height", "width", "target_height", "target_width", "one"))
def point_gradient_kernel(
    x, target, points_ptr, results_ptr, grad, sums_ptr, masks, count, height, width, target_height, target_width, one, BLOCK: tl.constexpr
):
    """Add the gradients of the points to those of the pixels around them, in parts of the bound; `one` stands for the bound itself."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = n * count + k
    c, a, b, bound = factors(grad, results_ptr, n, masks, count)
    # where the bound is 0, nan or infinite, store_gradient_kernel stores 0 or nan
    mask = k < tl.where((bound > 0.0) & (bound < float("inf")), count, 0)
    p, q, _ = logistic(sampled(x, n, points_ptr, at, mask, height, width))
    y = sampled(target, n, points_ptr, at, mask, target_height, target_width)
    g = c * (p - y) + (a * y + b) * p * q
    g = tl.where(mask, g / bound * one, 0.0)
    top, left, below, right = corner(points_ptr, at, mask, height, width)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            share = (below if i else 1.0 - below) * (right if j else 1.0 - right)
            inside = inside_of(top + i, left + j, mask, height, width)
            where = sums_ptr + (n * height + top + i) * width + left + j
            tl.atomic_add(where, (share * g).to(tl.int64), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=("masks", "count", "height", "width", "part"))
def store_gradient_kernel(sums_ptr, results_ptr, grad, out, masks, count, height, width, part, BLOCK: tl.constexpr):
    """Store the pixels' sums, of which 1 is `part` of the mask's bound, as floating numbers."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < height * width
    _, _, _, bound = factors(grad, results_ptr, n, masks, count)
    g = tl.load(sums_ptr + n * height * width + i, mask=mask, other=0).to(tl.float32) * part * bound
    where = out.ptr + n * out.s0 + (i // width).to(tl.int64) * out.s1 + (i % width).to(tl.int64) * out.s2
    tl.store(where, g, mask=mask)
