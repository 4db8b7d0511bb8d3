"""The loss of relations: how the softmaxes p of rows of logits and q of a teacher's correlate, along rows and along classes.

For each row i and each class j, with sums of products of differences from their means, pp = Σ (p - mean p)² and so on:

    ρ = pq / (√pp √qq + 1e-8),  L = T² (β/N Σᵢ (1 - ρᵢ) + γ/C Σⱼ (1 - ρⱼ))
    dρ/dp = d (q - mean q) + a (p - mean p),  d = 1 / (√pp √qq + 1e-8),  a = -pq d² √qq / √pp

A program walks over some rows, R at a time, and holds all their classes. Each of its lanes keeps the means and sums of what it has met
(Welford), because sums of squares would lose the digits of a class whose probability hardly varies. Lanes, and then programs in a second
launch, are joined about their means, which are exact where all are equal. The sums do not depend on the order of the programs.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.reduce import add_up, finish
from lossforge.kernels.math import exp2, product, widened

EPS = tl.constexpr(1e-8)
LANES = 1024
"""Fewest lanes of a tile: several rows of few classes share one."""
IN_FLIGHT = 528 * LANES
"""Lanes of all programs: four tiles of LANES a multiprocessor of an H200."""
BP, BC = 64, 16
"""Programs and classes of a tile that is joined."""


class Walk(NamedTuple):
    """How programs walk over rows: their number, the rows of each, and the constants of a tile."""

    programs: int
    per: int
    constants: dict[str, int]


def _walk(x: Tensor, target: Tensor) -> Walk:
    rows, classes = x.shape
    block = triton.next_power_of_2(classes)
    at_once = max(1, LANES // block)
    lanes = at_once * block
    per = triton.cdiv(triton.cdiv(rows, max(1, IN_FLIGHT // lanes)), at_once) * at_once
    vector = math.gcd(classes, 16 // min(x.itemsize, target.itemsize))
    return Walk(triton.cdiv(rows, per), per, {"R": at_once, "BLOCK": block, "VEC": vector, "num_warps": lanes // 256})


def forward(x: Tensor, target: Tensor, beta: float, gamma: float, temperature: float) -> tuple[Tensor]:
    """Return the loss of logits (N, C), and after it what backward takes of the classes: 1 + 4 C numbers. x, target: contiguous."""
    rows, classes = x.shape
    programs, per, constants = _walk(x, target)
    parts, of_rows = new_like(x, ((5, programs, classes), torch.float32)), new_like(x, ((programs,), torch.float32))
    out = new_like(x, ((1 + 4 * classes,), torch.float32))
    scale = math.log2(math.e) / temperature
    Launch(relations_kernel, (programs,), (x, target, parts, of_rows, rows, per, classes, scale), **constants).start()
    slope = -temperature * gamma / classes if rows > 1 else 0.0  # one row does not vary, but the two launches may round its p differently
    weights = temperature**2 * beta / rows, temperature**2 * gamma / classes, slope
    arguments = (parts, of_rows, sum_slots()._replace(total=out), rows, per, programs, classes, *weights)
    Launch(relations_join_kernel, (triton.cdiv(classes, BC),), arguments, totals=1, BP=BP, BC=BC, num_warps=4).start()
    return (out,)


def backward(x: Tensor, target: Tensor, result: Tensor, grad: Tensor, gradient: Tensor, beta: float, temperature: float) -> None:
    """Write the gradient at x. result: of forward; grad: the gradient at it, whose first number is that of the loss."""
    rows, classes = x.shape
    programs, per, constants = _walk(x, target)
    scale, slope = math.log2(math.e) / temperature, -temperature * beta / rows
    arguments = (x, target, result, grad, gradient, rows, per, classes, scale, slope)
    Launch(relations_gradient_kernel, (programs,), arguments, **constants).start()


@triton.jit
def softmaxes(x, y, scale, here, classes):
    """Return the softmaxes of rows of x and y, and their differences from the mean 1/C: (e - mean e) / Σ e, exactly 0 for equal logits.

    Both are computed as one tile, because the warps then exchange two sums in the time of one.
    """
    z = tl.join(widened(x), widened(y))
    top = tl.max(z, 1)[:, None, :]
    e = exp2((z - tl.where(tl.abs(top) == float("inf"), 0.0, top)) * scale)
    total = tl.sum(e, 1)[:, None, :]
    inverse = 1.0 / total
    p, q = tl.split(product(e, tl.broadcast_to(inverse, e.shape)))  # rounded, so that the mean of equal p is p
    u, v = tl.split((e - tl.div_rn(total, classes * 1.0)) * inverse)
    return p, q, tl.where(here, u, 0.0), tl.where(here, v, 0.0)


@triton.jit
def correlation(pp, qq, pq):
    """Return 1 - ρ, and the factors d and a of its derivative; a is 0 where p does not vary."""
    p, q = tl.sqrt(pp), tl.sqrt(qq)
    d = 1.0 / (p * q + EPS)
    rho = pq * d
    return 1.0 - rho, d, tl.where(p == 0.0, 0.0, -rho * d * q / tl.where(p == 0.0, 1.0, p))


@triton.jit
def along_rows(u, v):
    """Return the sums pp, qq and pq of each row's differences from its means."""
    pp, qq = tl.split(tl.sum(tl.join(u * u, v * v), 1))
    return pp, qq, tl.sum(u * v, 1)


@triton.jit
def mean_of(mean, count, whole):
    """Return the mean of several rows of means."""
    first = tl.sum(tl.where((tl.arange(0, mean.shape[0]) == 0)[:, None], mean, 0.0), 0)
    return first + tl.sum(count * (mean - first[None, :]), 0) / whole


@triton.jit
def addresses(start, rows, classes, R: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of R rows' classes. Rows beyond the last are the last one."""
    row = tl.minimum(start + tl.arange(0, R), rows - 1)
    return row.to(tl.int64)[:, None] * classes + tl.arange(0, BLOCK)[None, :]


@triton.jit
def read(ptr, at, here):
    return tl.load(ptr + at, mask=here, other=float("-inf"))


@triton.jit(do_not_specialize=("rows", "per"))
def relations_kernel(
    x_ptr, y_ptr, parts_ptr, of_rows_ptr, rows, per, classes, scale, R: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Store each program's sum of 1 - ρ over its `per` rows, and their classes' mean p, mean q, pp, qq and pq, (5, programs, classes)."""
    classes = classes // VEC * VEC  # tells the compiler that it is a multiple of VEC, to vectorise loads
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    end = tl.minimum((program + 1) * per, rows)
    here = (tl.arange(0, BLOCK) < classes)[None, :]
    total = tl.zeros([R], tl.float32)
    count = tl.zeros([R, 1], tl.float32)
    mean_p = tl.zeros([R, BLOCK], tl.float32)
    mean_q = tl.zeros([R, BLOCK], tl.float32)
    pp = tl.zeros([R, BLOCK], tl.float32)
    qq = tl.zeros([R, BLOCK], tl.float32)
    pq = tl.zeros([R, BLOCK], tl.float32)
    at = addresses(program * per, rows, classes, R, BLOCK)
    x, y = read(x_ptr, at, here), read(y_ptr, at, here)
    for start in range(program * per, end, R):
        at = addresses(start + R, rows, classes, R, BLOCK)
        next_x, next_y = read(x_ptr, at, here), read(y_ptr, at, here)
        p, q, u, v = softmaxes(x, y, scale, here, classes)
        inside = start + tl.arange(0, R) < end
        of_rows, _, _ = correlation(*along_rows(u, v))
        total += tl.where(inside, of_rows, 0.0)
        met = tl.where(inside, 1.0, 0.0)[:, None]
        count += met
        share = met / tl.maximum(count, 1.0)
        of_p, of_q = met * (p - mean_p), met * (q - mean_q)
        mean_p += share * of_p
        mean_q += share * of_q
        pp += of_p * (p - mean_p)
        qq += of_q * (q - mean_q)
        pq += of_p * (q - mean_q)
        x, y = next_x, next_y
    tl.store(of_rows_ptr + program, tl.sum(total, 0))
    size = programs * classes
    j = tl.arange(0, BLOCK)
    to, here = parts_ptr + program * classes + j, j < classes
    whole = tl.sum(count, 0)
    p, q = mean_of(mean_p, count, whole), mean_of(mean_q, count, whole)
    if R > 1:
        beside_p, beside_q = mean_p - p[None, :], mean_q - q[None, :]
        pp += count * beside_p * beside_p
        qq += count * beside_q * beside_q
        pq += count * beside_p * beside_q
    tl.store(to, p, mask=here)
    tl.store(to + size, q, mask=here)
    tl.store(to + 2 * size, tl.sum(pp, 0), mask=here)
    tl.store(to + 3 * size, tl.sum(qq, 0), mask=here)
    tl.store(to + 4 * size, tl.sum(pq, 0), mask=here)


@triton.jit
def part_of(parts_ptr, start, j, rows, per, programs, classes, BP: tl.constexpr):
    """Return pointers to classes j of the programs from `start` on, which of them exist, and the rows of each."""
    part = (start + tl.arange(0, BP)).to(tl.int64)
    mask = (part < programs)[:, None] & (j < classes)[None, :]
    count = tl.where(mask, tl.minimum(rows - part * per, per).to(tl.float32)[:, None], 0.0)
    return parts_ptr + part[:, None] * classes + j[None, :], mask, count


@triton.jit(do_not_specialize=("rows", "per", "programs"))
def relations_join_kernel(
    parts_ptr, of_rows_ptr, sum, rows, per, programs, classes, of_rows, of_classes, slope, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Store the loss at sum.total, and after it of each class mean p, mean q, and slope times d and a, (4, classes).

    Args:
        of_rows, of_classes: the weights of Σᵢ (1 - ρᵢ) and Σⱼ (1 - ρⱼ).
    """
    j = tl.program_id(0) * BC + tl.arange(0, BC)
    size = programs * classes
    first_p = tl.load(parts_ptr + j, mask=j < classes, other=0.0)
    first_q = tl.load(parts_ptr + size + j, mask=j < classes, other=0.0)
    mean_p = tl.zeros([BC], tl.float32)
    mean_q = tl.zeros([BC], tl.float32)
    for start in range(0, programs, BP):
        at, mask, count = part_of(parts_ptr, start, j, rows, per, programs, classes, BP)
        mean_p += tl.sum(count * (tl.load(at, mask=mask, other=0.0) - first_p[None, :]), 0)
        mean_q += tl.sum(count * (tl.load(at + size, mask=mask, other=0.0) - first_q[None, :]), 0)
    mean_p, mean_q = first_p + mean_p / rows, first_q + mean_q / rows
    pp = tl.zeros([BC], tl.float32)
    qq = tl.zeros([BC], tl.float32)
    pq = tl.zeros([BC], tl.float32)
    for start in range(0, programs, BP):
        at, mask, count = part_of(parts_ptr, start, j, rows, per, programs, classes, BP)
        p = tl.load(at, mask=mask, other=0.0) - mean_p[None, :]
        q = tl.load(at + size, mask=mask, other=0.0) - mean_q[None, :]
        pp += tl.sum(tl.load(at + 2 * size, mask=mask, other=0.0) + count * p * p, 0)
        qq += tl.sum(tl.load(at + 3 * size, mask=mask, other=0.0) + count * q * q, 0)
        pq += tl.sum(tl.load(at + 4 * size, mask=mask, other=0.0) + count * p * q, 0)
    found, d, a = correlation(pp, qq, pq)
    to = sum.total + 1 + j
    tl.store(to, mean_p, mask=j < classes)
    tl.store(to + classes, mean_q, mask=j < classes)
    tl.store(to + 2 * classes, slope * d, mask=j < classes)
    tl.store(to + 3 * classes, slope * a, mask=j < classes)
    value = of_classes * tl.sum(tl.where(j < classes, found, 0.0), 0)
    if tl.program_id(0) == 0:
        value += of_rows * add_up(of_rows_ptr, programs)
    finish(value, sum, 1.0)


@triton.jit(do_not_specialize=("rows", "per"))
def relations_gradient_kernel(
    x_ptr, y_ptr, result_ptr, grad_ptr, gradient_ptr, rows, per, classes, scale, slope,
    R: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Store the gradient at x, p (h - Σ p h), with the derivative h at p.

    Args:
        result_ptr: what the join stored.
        slope: factor of the rows' d and a.
    """
    classes = classes // VEC * VEC
    j = tl.arange(0, BLOCK)
    here = (j < classes)[None, :]
    grad = tl.load(grad_ptr)
    of_class = result_ptr + 1 + j
    mean_p = tl.load(of_class, mask=j < classes, other=0.0)[None, :]
    mean_q = tl.load(of_class + classes, mask=j < classes, other=0.0)[None, :]
    d_class = grad * tl.load(of_class + 2 * classes, mask=j < classes, other=0.0)[None, :]
    a_class = grad * tl.load(of_class + 3 * classes, mask=j < classes, other=0.0)[None, :]
    first = tl.program_id(0).to(tl.int64) * per
    end = tl.minimum(first + per, rows)
    at = addresses(first, rows, classes, R, BLOCK)
    x, y = read(x_ptr, at, here), read(y_ptr, at, here)
    for start in range(first, end, R):
        ahead = addresses(start + R, rows, classes, R, BLOCK)
        next_x, next_y = read(x_ptr, ahead, here), read(y_ptr, ahead, here)
        p, q, u, v = softmaxes(x, y, scale, here, classes)
        _, d, a = correlation(*along_rows(u, v))
        h = d_class * (q - mean_q) + a_class * (p - mean_p) + grad * slope * (d[:, None] * v + a[:, None] * u)
        inside = (start + tl.arange(0, R) < end)[:, None]
        tl.store(gradient_ptr + at, p * (h - tl.sum(p * h, 1)[:, None]), mask=here & inside)
        x, y, at = next_x, next_y, ahead
