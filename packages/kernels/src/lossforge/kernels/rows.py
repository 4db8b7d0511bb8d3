"""Device functions of the row-wise template: a tile of logits, a row's target, the online softmax, the gradient of a tile.

A tile has BR rows and BC classes. For a row with targets qⱼ (Σ over hard terms c[j = t] and dense terms dⱼ):

    m = max xⱼ,  ls = ln Σ exp(xⱼ - m),  lse = m + ls
    z = Σⱼ qⱼ (lse - xⱼ) = Σ c (m - x_t + ls) + Σ dⱼ (m - xⱼ + ls)
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.math import LOG2E, exp, tanh

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32: differences to it stay finite, as those to -inf do not


class Logits(NamedTuple):
    """x as (outer, rows, classes), scaled and soft-capped as it is read: x ← cap · tanh(scale · x / cap)."""

    ptr: Tensor
    outer: int
    row: int
    column: int
    rows: int
    classes: int
    scale: float | None
    softcap: float | None


class Labels(NamedTuple):
    """What the rows' targets share: class weights, the index that is ignored, and label smoothing."""

    weight_ptr: Tensor | None
    ignore: int
    smoothing: float | None


@triton.jit
def transform(seen, x):
    """Logits as the loss sees them."""
    if x.scale is not None:
        seen = seen * x.scale
    if x.softcap is not None:
        seen = x.softcap * tanh(seen / x.softcap)
    return seen


@triton.jit
def class_offset(column, stride, WIDE: tl.constexpr):
    """Offset of classes within a row; WIDE where 32 bits do not hold it."""
    return column.to(tl.int64) * stride if WIDE else column * stride


@triton.jit
def logit_tile(x, outer, row, column, keep, WIDE: tl.constexpr, EVICT: tl.constexpr):
    """Logits (BR, BC) in float32, -inf outside the tensor and in rows not kept."""
    mask = (keep & (row < x.rows))[:, None] & (column < x.classes)[None, :]
    base = x.ptr + (outer * x.outer + row.to(tl.int64) * x.row)[:, None]
    at = base + class_offset(column, x.column, WIDE)[None, :]
    tile = transform(tl.load(at, mask=mask, other=float("-inf"), eviction_policy=EVICT).to(tl.float32), x)
    if x.scale is not None or x.softcap is not None:
        tile = tl.where(mask, tile, float("-inf"))
    return tile


@triton.jit
def store_tile(g, gradient, x, outer, row, column, keep, WIDE: tl.constexpr):
    """Store a tile of the gradient, 0 in rows not kept."""
    base = gradient.ptr + (outer * gradient.s0 + row.to(tl.int64) * gradient.s1)[:, None]
    at = base + class_offset(column, gradient.s2, WIDE)[None, :]
    mask = (row < x.rows)[:, None] & (column < x.classes)[None, :]
    tl.store(at, tl.where(keep[:, None], g, 0.0), mask=mask, eviction_policy="evict_first")


@triton.jit
def hard_term(index, outer, row, inside, weight_ptr, ignore, x):
    """A class index per row: (class, class weight, counts, valid, the class's logit)."""
    t = tl.load(index.ptr + outer * index.s0 + row.to(tl.int64) * index.s1, mask=inside, other=ignore)
    counts = inside & (t != ignore)
    valid = (t >= 0) & (t < x.classes)
    safe = counts & valid
    w = tl.where(counts, 1.0, 0.0)
    if weight_ptr is not None:
        w = tl.load(weight_ptr + t, mask=safe, other=0.0).to(tl.float32)
    at = outer * x.outer + row.to(tl.int64) * x.row + t.to(tl.int64) * x.column
    logit = transform(tl.load(x.ptr + at, mask=safe, other=0.0).to(tl.float32), x)
    return tl.where(safe, t, -1).to(tl.int32), w, counts, valid | (t == ignore), logit


@triton.jit
def dense_tile(dense, labels, outer, row, column, x, WIDE: tl.constexpr):
    """Dense part dⱼ (BR, BC) of the targets: probabilities and label smoothing, times the class weights."""
    mask = (row < x.rows)[:, None] & (column < x.classes)[None, :]
    d = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    if dense.ptr is not None:
        base = dense.ptr + (outer * dense.s0 + row.to(tl.int64) * dense.s1)[:, None]
        d = tl.load(base + class_offset(column, dense.s2, WIDE)[None, :], mask=mask, other=0.0).to(tl.float32)
        if labels.smoothing is not None:
            d = d * (1.0 - labels.smoothing)
    if labels.smoothing is not None:
        d = d + tl.where(mask, labels.smoothing / x.classes, 0.0)
    if labels.weight_ptr is not None:
        d = d * tl.load(labels.weight_ptr + column, mask=column < x.classes, other=0.0).to(tl.float32)[None, :]
    return d


@triton.jit
def accumulate(m, s, u, d_sum, d_dot, x, d, ENTROPY: tl.constexpr, DENSE: tl.constexpr):
    """Take a tile into the running sums that each lane keeps relative to its own maximum m.

    s = Σ exp(x - m),  u = Σ exp(x - m)(x - m),  d_sum = Σ d,  d_dot = Σ d (x - m). One exponential an element.
    """
    step = x - m
    rises = step > 0
    e = tl.exp2(-tl.abs(step) * LOG2E)
    if ENTROPY:
        u = tl.where(rises, tl.where(s == 0, 0.0, e * (u - step * s)), u + tl.where(e > 0, e * step, 0.0))
    s = tl.where(rises, s * e + 1.0, s + e)
    if DENSE:
        d_dot = tl.where(rises, d_dot - tl.where(d_sum == 0, 0.0, step * d_sum), d_dot + tl.where(d == 0, 0.0, d * step))
        d_sum += d
    return tl.where(rises, x, m), s, u, d_sum, d_dot


@triton.jit
def merge(m, s, u, d_sum, d_dot, ENTROPY: tl.constexpr, DENSE: tl.constexpr):
    """Join the lanes of each row: (m, Σexp, u, d_sum, d_dot), each (BR,)."""
    top = tl.max(m, 1)
    step = m - top[:, None]
    e = tl.exp2(step * LOG2E)
    if ENTROPY:
        u = tl.where(s == 0, 0.0, e * (u + step * s))
    if DENSE:
        d_dot = d_dot + tl.where(d_sum == 0, 0.0, d_sum * step)
    return top, tl.sum(s * e, 1), tl.sum(u, 1), tl.sum(d_sum, 1), tl.sum(d_dot, 1)


@triton.jit
def gradient_tile(
    x,
    z,
    column,
    m,
    p_share,
    h_share,
    h_shift,
    a,
    q_a,
    b,
    q_b,
    q_share,
    d,
    ENTROPY: tl.constexpr,
    DENSE: tl.constexpr,
    HARD: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Gradient at the logits as they lie in memory, from per-row shares; e = exp(x - m), which is p up to the row's sum.

    e p_share - e h_share (x - m + h_shift) - q_a [j = a] - q_b [j = b] - q_share d, times dx/draw.
    """
    step = x - m[:, None]
    e = exp(step)
    g = e * p_share[:, None]
    if ENTROPY:
        g -= tl.where(e > 0, e * h_share[:, None] * (step + h_shift[:, None]), 0.0)
    if HARD:
        g -= tl.where(column[None, :] == a[:, None], q_a[:, None], 0.0)
    if PAIR:
        g -= tl.where(column[None, :] == b[:, None], q_b[:, None], 0.0)
    if DENSE:
        g -= q_share[:, None] * d
    if z.softcap is not None:
        t = x / z.softcap
        g *= 1.0 - t * t
    if z.scale is not None:
        g *= z.scale
    return g


@triton.jit
def row_terms(index_a, index_b, lam, labels, outer, row, x):
    """What the targets of the rows say: (a, c_a, logit_a, b, c_b, logit_b, keep, valid); absent terms name class -1 with c = 0."""
    keep = row < x.rows
    valid = keep
    a = tl.full(row.shape, -1, tl.int32)
    b = a
    c_a = tl.zeros(row.shape, tl.float32)
    c_b, logit_a, logit_b = c_a, c_a, c_a
    if index_a.ptr is not None:
        inside = row < x.rows
        a, c_a, keep, valid, logit_a = hard_term(index_a, outer, row, inside, labels.weight_ptr, labels.ignore, x)
        if index_b.ptr is not None:
            b, c_b, keep_b, valid_b, logit_b = hard_term(index_b, outer, row, inside, labels.weight_ptr, labels.ignore, x)
            share = tl.load(lam.ptr + outer * lam.s0 + row * lam.s1, mask=inside, other=1.0).to(tl.float32)
            c_a, c_b = share * c_a, (1.0 - share) * c_b
            keep, valid = keep | keep_b, valid & valid_b
        if labels.smoothing is not None:
            c_a, c_b = (1.0 - labels.smoothing) * c_a, (1.0 - labels.smoothing) * c_b
    return a, c_a, logit_a, b, c_b, logit_b, keep, valid


@triton.jit
def hard_part(c, m, ls, logit):
    """c (lse - x_t), 0 where c is."""
    return tl.where(c == 0.0, 0.0, c * (m - logit + ls))
