"""Losses with two sums of exponentials a row: one over the pairs that belong together, P, and one over the others, N.

For features a (N, D) and b (M, D), x = a bᵀ, and d, how far a pair is from where it should be:

    d = near - x in P, x - far in N        k = α in P, β in N
    p = ln Σ_P exp(k d),  n = ln Σ_N exp(k d)

    apart:  L = wₚ softplus(p) + wₙ softplus(n)        r = softplus(p) in P, softplus(n) in N
    circle: L = softplus(p + n), k = γ max(0, d + last), which has no gradient        r = p + softplus(-p - n), n + softplus(-p - n)
    ∂L/∂x = -w k exp(k d - r) in P, w k exp(k d - r) in N

`apart` with wₚ = 1/α, wₙ = 1/β is MultiSimilarity, and ProxyAnchor where a are the proxies. Mined, P are those with x - last below the
largest x of all negatives of the row, and N those with x + last above the smallest x of all its positives. A launch before the first finds
these. Tiles, labels and the gradient's products are those of kernel.py.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.features.similarity.kernel import JOINED, keep, part_of, products, related, tile_of
from lossforge.kernels.math import LOG2E, decay, exp2, log, log1p_unit


class Numbers(NamedTuple):
    """Numbers of the formula, as the file says. negative_ptr: 0-d, a factor of wₙ; or None."""

    alpha: float
    beta: float
    near: float
    far: float
    of_positives: float
    of_negatives: float
    last: float
    negative_ptr: Any = None


@triton.jit
def weighed(x, together, numbers, config):
    """Return k d and k."""
    d = tl.where(together, numbers.near - x, x - numbers.far)
    k = tl.where(together, numbers.alpha, numbers.beta)
    if config.CIRCLE:
        k = k * tl.maximum(d + numbers.last, 0.0, tl.PropagateNan.ALL)
    return k * d, k


@triton.jit
def chosen(x, counts, together, extremes_ptr, tile, rows, numbers, config):
    """Return which positives and which negatives of a tile are summed. A pair of nan is, so that nan stays nan."""
    positive, negative = counts & together, counts & ~together
    if config.MINED:
        lowest = tl.load(extremes_ptr + tile.row, mask=tile.row < rows, other=0.0)
        highest = tl.load(extremes_ptr + rows + tile.row, mask=tile.row < rows, other=0.0)
        positive = positive & ~(x - numbers.last >= highest[:, None])
        negative = negative & ~(x + numbers.last <= lowest[:, None])
    return positive, negative


@triton.jit
def pair_of(labels, tile, rows, columns, offset, config):
    """Return which elements of a tile count, and which of these belong together."""
    return related(labels, tile.row[:, None] < rows, tile, rows, columns, offset, 0, config)  # no guides


@triton.jit(do_not_specialize=("rows", "columns", "offset"))
def extremes_kernel(a, b, labels, parts_ptr, rows, columns, offset, depth, config):
    """Store the smallest x of a row's positives, and the largest of its negatives, in each tile."""
    tile = tile_of(rows, columns, config)
    x = products(a, b, tile, rows, columns, depth, config)
    counts, together = pair_of(labels, tile, rows, columns, offset, config)
    across = tl.cdiv(columns, config.BC)
    keep(parts_ptr, 0, across, tile.j, rows, tile.row, tl.min(tl.where(together, x, float("inf")), 1))
    keep(parts_ptr, 1, across, tile.j, rows, tile.row, tl.max(tl.where(counts & ~together, x, float("-inf")), 1))


@triton.jit(do_not_specialize=("rows", "columns", "offset"))
def pair_sums_kernel(a, b, labels, numbers, extremes_ptr, parts_ptr, rows, columns, offset, depth, config):
    """Store maximum and Σ exp of k d, of a row's positives and negatives in each tile.

    Args:
        a, b: rows of features, each contiguous, s0 elements from one to the next.
        extremes_ptr: (2, rows), with MINED.
        parts_ptr: (4, tiles across, rows): maxima of positives and of negatives, sums of positives and of negatives.
    """
    tile = tile_of(rows, columns, config)
    x = products(a, b, tile, rows, columns, depth, config)
    counts, together = pair_of(labels, tile, rows, columns, offset, config)
    positive, negative = chosen(x, counts, together, extremes_ptr, tile, rows, numbers, config)
    f, _ = weighed(x, together, numbers, config)
    top_p = tl.maximum(tl.max(tl.where(positive, f, float("-inf")), 1), LOWEST)
    top_n = tl.maximum(tl.max(tl.where(negative, f, float("-inf")), 1), LOWEST)
    e = exp2((f - tl.where(together, top_p[:, None], top_n[:, None])) * LOG2E)
    across = tl.cdiv(columns, config.BC)
    keep(parts_ptr, 0, across, tile.j, rows, tile.row, top_p)
    keep(parts_ptr, 1, across, tile.j, rows, tile.row, top_n)
    keep(parts_ptr, 2, across, tile.j, rows, tile.row, tl.sum(tl.where(positive, e, 0.0), 1))
    keep(parts_ptr, 3, across, tile.j, rows, tile.row, tl.sum(tl.where(negative, e, 0.0), 1))


LogSum = namedtuple("LogSum", "top rest")
"""The logarithm of a sum of exponentials, as the largest exponent and the logarithm of the sum beside it, -inf for that of nothing."""


@triton.jit
def log_sum(side, plane, across, rows, at, BLOCK: tl.constexpr):
    """Join the tiles of rows."""
    m = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, across, JOINED):
        tile = start + tl.arange(0, JOINED)
        tops = part_of(side, plane, across, tile, rows, at, LOWEST)
        top = tl.maximum(m, tl.max(tops, 0))
        sums = part_of(side, plane + 2, across, tile, rows, at, 0.0) * exp2((tops - top[None, :]) * LOG2E)
        s = s * exp2((m - top) * LOG2E) + tl.sum(sums, 0)
        m = top
    return LogSum(m, log(s))


@triton.jit
def softplus(t):
    return tl.maximum(t, 0.0, tl.PropagateNan.ALL) + log1p_unit(decay(t))


@triton.jit
def keep_subtrahend(lse_ptr, plane, at, rows, t, other, inside):
    """Store what is subtracted from exponents, max(t, -other) + ln(1 + exp(-|t + other|)), in two numbers, because one would round it."""
    total = t.top + t.rest + (other.top + other.rest)
    own = total > 0.0
    rest = tl.where(own, t.rest, -other.rest) + log1p_unit(decay(total))
    tl.store(lse_ptr + plane * rows + at, tl.where(own, t.top, -other.top), mask=inside)
    tl.store(lse_ptr + (plane + 1) * rows + at, rest, mask=inside)


@triton.jit
def subtrahend(lse_ptr, plane, at, rows, mask):
    """Load these two numbers, the latter in units of ln 2."""
    top = tl.load(lse_ptr + plane * rows + at, mask=mask, other=0.0)
    return top, tl.load(lse_ptr + (plane + 1) * rows + at, mask=mask, other=0.0) * LOG2E


@triton.jit
def factors(numbers):
    """Return wₚ and wₙ."""
    of_negatives = numbers.of_negatives
    if numbers.negative_ptr is not None:
        of_negatives = of_negatives * tl.load(numbers.negative_ptr).to(tl.float32)
    return numbers.of_positives, of_negatives


@triton.jit(do_not_specialize=("rows", "across"))
def pair_sums_join_kernel(
    side,
    numbers,
    sum,
    divisor_ptr,
    scale,
    rows,
    across,
    CIRCLE: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join the tiles of rows; add up the loss.

    Args:
        side: Side, whose lse takes r of positives and of negatives, in two numbers each, (4, rows).
        across: tiles.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, n = log_sum(side, 0, across, rows, at, BLOCK), log_sum(side, 1, across, rows, at, BLOCK)
    inside = at < rows
    if CIRCLE:
        loss = softplus(p.top + p.rest + (n.top + n.rest))
        keep_subtrahend(side.lse, 0, at, rows, p, n, inside)
        keep_subtrahend(side.lse, 2, at, rows, n, p, inside)
    else:
        of_positives, of_negatives = factors(numbers)
        loss = of_positives * softplus(p.top + p.rest) + of_negatives * softplus(n.top + n.rest)
        one = LogSum(0.0, 0.0)
        keep_subtrahend(side.lse, 0, at, rows, p, one, inside)
        keep_subtrahend(side.lse, 2, at, rows, n, one, inside)
    loss = tl.where(inside, loss, 0.0)
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    if side.loss is not None:
        tl.store(side.loss + at, loss * scale, mask=inside)
    finish(tl.sum(loss, 0), sum, scale)


@triton.jit(do_not_specialize=("rows", "columns", "offset"))
def pair_sums_gradient_kernel(
    a,
    b,
    labels,
    numbers,
    extremes_ptr,
    lse_ptr,
    grad_output_ptr,
    gradient,
    rows,
    columns,
    offset,
    depth,
    config,
):
    """Write the gradient of a block of rows of x, without the loss's own factor.

    Args:
        lse_ptr: r of positives and of negatives, in two numbers each, (4, rows).
        grad_output_ptr: one for each row with EACH.
        gradient: of x, (rows, columns), as a.
    """
    tile = tile_of(rows, columns, config)
    here, there = tile.row < rows, tile.column < columns
    x = products(a, b, tile, rows, columns, depth, config)
    top_p, rest_p = subtrahend(lse_ptr, 0, tile.row, rows, here)
    top_n, rest_n = subtrahend(lse_ptr, 2, tile.row, rows, here)
    counts, together = pair_of(labels, tile, rows, columns, offset, config)
    positive, negative = chosen(x, counts, together, extremes_ptr, tile, rows, numbers, config)
    f, k = weighed(x, together, numbers, config)
    of_positives, of_negatives = factors(numbers)
    top, rest = tl.where(together, top_p[:, None], top_n[:, None]), tl.where(together, rest_p[:, None], rest_n[:, None])
    g = k * exp2((f - top) * LOG2E - rest)
    g = tl.where(positive, -of_positives * g, tl.where(negative, of_negatives * g, 0.0))
    if config.EACH:
        g *= tl.load(grad_output_ptr + tile.row, mask=here, other=0.0).to(tl.float32)[:, None]
    to = gradient.ptr + tile.row.to(tl.int64)[:, None] * gradient.s0 + tile.column[None, :]
    tl.store(to, g, mask=here[:, None] & there[None, :])
