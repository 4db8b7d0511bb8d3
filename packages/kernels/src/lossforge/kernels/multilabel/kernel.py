"""The template of losses that compare a sample's positive classes with its negative ones, each set by one log-sum-exp.

Of a row of logits x whose positives are those with a target above ½:

    n = ln Σ exp(x / tn) over negatives,  p = ln Σ exp(-x / tp) over positives, each with one more term exp 0 where ZERO
    L = n + p, or with PAIRED h = tn n + tp p and L = softplus(h) for rows with a positive, else 0
    dL/dx = u exp(x / tn - n) of a negative, -u exp(-x / tp - p) of a positive, u = 1, or with PAIRED u = σ(h)

With PAIRED the loss is that of the rows plus that of the columns, taken as rows.

A launch reads the rows once. It stores n and p, and adds up the losses, with PAIRED also the rows with a positive; another does so for the
columns. The last reads all again and writes the gradient.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import matrix_address
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.math import LOG2E, exp2, log, logistic
from lossforge.kernels.rowwise.rows import LOWEST, add_exponential, relative


@triton.jit
def read(x, target, row, column, rows, classes, inverse_tp, inverse_tn):
    """Return x / tn of negatives and -x / tp of positives, -inf elsewhere; and which classes are positives."""
    inside = (row < rows)[:, None] & (column < classes)[None, :]
    logit = tl.load(matrix_address(x, row, column), mask=inside, other=0.0).to(tl.float32)
    positive = tl.load(matrix_address(target, row, column), mask=inside, other=0).to(tl.float32) > 0.5
    negative = inside & (positive == 0)
    return tl.where(negative, logit * inverse_tn, float("-inf")), tl.where(positive, -logit * inverse_tp, float("-inf")), positive


@triton.jit
def joined(top, total, ZERO: tl.constexpr):
    """Join the lanes of each row, and with ZERO one more term."""
    above = tl.max(top, 1)
    if ZERO:
        above = tl.maximum(above, 0.0)
    sum = tl.sum(total * relative(top, above[:, None]), 1)
    if ZERO:
        sum += exp2(-above * LOG2E)
    return above + log(sum)


@triton.jit
def upstream_of(n, p, tp, tn, PAIRED: tl.constexpr):
    """Return the loss of each row, and u."""
    if PAIRED:
        h = tn * n + tp * p
        slope, _, rest = logistic(h)
        value = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    else:
        value = n + p
        slope = tl.where(value == value, 1.0, value)
    return value, slope


@triton.jit(do_not_specialize=("rows",))
def multilabel_kernel(
    x, target, out_ptr, stats_ptr, sum, valid_sum, divisor_ptr, scale, tp, tn, rows, classes,
    BR: tl.constexpr, BC: tl.constexpr, ZERO: tl.constexpr, PAIRED: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr,
):  # fmt: skip
    """Compute the rows' losses; stats: n and p of each, (2, rows)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    n_top, n_sum = tl.full([BR, BC], LOWEST, tl.float32), tl.zeros([BR, BC], tl.float32)
    p_top, p_sum = n_top, n_sum
    found = tl.zeros([BR, BC], tl.float32)
    for start in range(0, classes, BC):
        negatives, positives, positive = read(x, target, row, start + tl.arange(0, BC), rows, classes, 1.0 / tp, 1.0 / tn)
        n_top, n_sum = add_exponential(n_top, n_sum, negatives)
        p_top, p_sum = add_exponential(p_top, p_sum, positives)
        found = tl.where(positive, 1.0, found)
    n, p = joined(n_top, n_sum, ZERO), joined(p_top, p_sum, ZERO)
    value, _ = upstream_of(n, p, tp, tn, PAIRED)
    inside = row < rows
    if PAIRED:
        inside = inside & (tl.max(found, 1) > 0)
    value = tl.where(inside, value, 0.0)
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    tl.store(stats_ptr + row, n, mask=row < rows)
    tl.store(stats_ptr + rows + row, tl.where(inside, p, float("-inf")), mask=row < rows)
    if out_ptr is not None:
        tl.store(out_ptr + row, value * scale, mask=row < rows)
    else:
        finish(tl.sum(value, 0), sum, scale)
        if PAIRED:
            finish(tl.sum(tl.where(inside, 1.0, 0.0), 0), valid_sum, 1.0)


class Stats(NamedTuple):
    """What a launch found of the rows, or of the columns: n and p of each, (2, count), and the divisor, if any."""

    ptr: Any = None
    divisor_ptr: Any = None


@triton.jit
def slopes(stats, at, count, scale, tp, tn, PAIRED: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr):
    """Return n and p of rows or columns, and the factor of their gradient."""
    n = tl.load(stats.ptr + at, mask=at < count, other=0.0)
    p = tl.load(stats.ptr + count + at, mask=at < count, other=0.0)
    _, slope = upstream_of(n, p, tp, tn, PAIRED)
    return n, p, slope * divided(scale, stats.divisor_ptr, EMPTY_IS_ZERO)


@triton.jit
def gradient_of(negatives, positives, positive, n, p, slope):
    """Return a tile of the gradient of rows or columns. Of those without positives or negatives n or p is -inf, and the slope 0."""
    share = exp2(tl.where(positive, positives - p, negatives - n) * LOG2E)
    return tl.where(slope == 0.0, 0.0, slope * tl.where(positive, -share, share))


@triton.jit(do_not_specialize=("rows",))
def multilabel_gradient_kernel(
    x, target, gradient, of_rows, of_columns, grad_output_ptr, step, scale, tp, tn, rows, classes,
    BR: tl.constexpr, BC: tl.constexpr, PAIRED: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr,
):  # fmt: skip
    """Write one tile of the gradient. step: 1 where each row has an upstream gradient, 0 where all have one."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None] & (column < classes)[None, :]
    negatives, positives, positive = read(x, target, row, column, rows, classes, 1.0 / tp, 1.0 / tn)
    n, p, slope = slopes(of_rows, row, rows, scale, tp, tn, PAIRED, EMPTY_IS_ZERO)
    if grad_output_ptr is not None:
        slope *= tl.load(grad_output_ptr + row * step, mask=row < rows, other=0.0).to(tl.float32)
    g = gradient_of(negatives, positives, positive, n[:, None], p[:, None], slope[:, None])
    if PAIRED:
        n, p, slope = slopes(of_columns, column, classes, scale, tp, tn, PAIRED, EMPTY_IS_ZERO)
        if grad_output_ptr is not None:
            slope *= tl.load(grad_output_ptr).to(tl.float32)
        g += gradient_of(negatives, positives, positive, n[None, :], p[None, :], slope[None, :])
    tl.store(matrix_address(gradient, row, column), g, mask=inside)
