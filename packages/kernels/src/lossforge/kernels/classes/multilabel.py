"""The template of losses that compare a sample's positive classes with its negative ones, each set by one log-sum-exp.

Of a row of logits x whose positives are those with a target above ½:

    n = ln Σ exp(x / tn) over negatives,  p = ln Σ exp(-x / tp) over positives, each with one more term exp 0 where ZERO
    L = n + p, or with PAIRED h = tn n + tp p and L = softplus(h) for rows with a positive, else 0
    dL/dx = u exp(x / tn - n) of a negative, -u exp(-x / tp - p) of a positive, u = 1, or with PAIRED u = σ(h)

A mask w of the classes gives w exp(x / tn) and w exp(-x / tp). A class with w = 0 is a negative whose exponential is 0.

With PAIRED the loss is that of the rows plus that of the columns, taken as rows.

tn n is kept as the largest negative x, and the logarithm of the sum relative to it, as p is. h then has a difference of logits, to which a
common offset costs no digits.

A launch reads the rows once. It stores both sums, and adds up the losses, with PAIRED also the rows with a positive; another does so for
the columns. The last reads all again and writes the gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.call import scale_of
from lossforge.kernels.classes.calls import MultilabelCall
from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import END, Strided, Tensors, as_strided, broadcast, matrix_address, stepped
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.math import LOG2E, exp2, log, logistic
from lossforge.kernels.plans import computed


class Temperatures(NamedTuple):
    """What the logits of positives and of negatives are divided by: tp and tn."""

    positive: float
    negative: float


class Inputs(NamedTuple):
    """Matrices of logits, targets and how much each counts, which may be absent."""

    x: Strided
    target: Strided
    mask: Strided
    end: Any = END


class Stats(NamedTuple):
    """What a launch found of the rows, or of the columns: (4, count), and the divisor, if any."""

    ptr: Any = None
    divisor_ptr: Any = None


ELEMENTS = 1024
"""Of a tile."""


def _constants(call: MultilabelCall, strides: Sequence[int], rows: int, classes: int) -> dict[str, Any]:
    """Return the constants. A tile has whole rows where they fit, and is a square where neighbouring rows are adjacent in memory."""
    rows_adjacent = strides[0] < strides[1] and rows > 1
    width = min(triton.next_power_of_2(classes), 32 if rows_adjacent else ELEMENTS)
    return {"BR": ELEMENTS // width, "BC": width, "PAIRED": call.paired, "EMPTY_IS_ZERO": call.empty_is_zero, "num_warps": 4}


def _inputs(call: MultilabelCall, order: Sequence[int] = (0, 1)) -> Inputs:
    """Return the matrices of a call, with rows and columns in another order."""
    x, target, mask = [
        Strided() if t is None else Strided(t, *[broadcast(t.shape, t.stride(), call.x.shape)[d] for d in order])
        for t in (call.x, call.target, call.mask)
    ]
    return Inputs(x, target, mask)


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1.0)


def _losses(call: MultilabelCall, stats: Tensor | None, out: Tensor | None, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of the rows, or with dim 1 of the columns, taken as rows; store the sums of each in stats.

    Returns:
        Each loss, in `out`, or their sum; and its divisor, if that is counted.
    """
    order = (dim, 1 - dim)
    rows, classes = (call.x.shape[d] for d in order)
    total, constants = out is None, _constants(call, [call.x.stride(d) for d in order], rows, classes)
    sums = (sum_slots(0) if total else None, sum_slots(1) if total and call.paired else None)
    numbers = (scale_of(call, rows), Temperatures(call.tp, call.tn), rows, classes)
    arguments = (_inputs(call, order), out, stats, *sums, call.normalizer, *numbers)
    grid, totals = (triton.cdiv(rows, constants["BR"]),), total * (1 + call.paired)
    found = Launch(multilabel_kernel, grid, arguments, totals=totals, ZERO=not call.paired, **constants).start()
    if not call.counted:
        return found[0] if out is None else out, None
    divisor = computed(_at_least_one, found[1])
    return computed(torch.div, found[0], divisor), divisor


def _compute(call: MultilabelCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    value, _, of_rows, _, of_columns = call.shapes(keep)
    stats, column_stats, column_divisor = new_like(call.x, of_rows), new_like(call.x, of_columns), None
    loss, divisor = _losses(call, stats, new_like(call.x, value) if call.reduction == "none" else None)
    if call.paired:
        of_the_columns, column_divisor = _losses(call, column_stats, None, dim=1)
        loss = computed(torch.add, loss, of_the_columns)
    return (loss,), (divisor, stats, column_divisor, column_stats)


def _differentiate(call: MultilabelCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    divisor, stats, column_divisor, column_stats = kept
    if not call.counted:
        divisor = column_divisor = call.normalizer
    rows, classes = call.x.shape
    constants = _constants(call, call.x.stride(), rows, classes)
    of = (Stats(stats, divisor), Stats(column_stats, column_divisor) if call.paired else Stats())
    numbers = (scale_of(call, rows), Temperatures(call.tp, call.tn), rows, classes)
    arguments = (_inputs(call), as_strided(gradients[0]), *of, *stepped(grad_output), *numbers)
    grid = (triton.cdiv(rows, constants["BR"]), triton.cdiv(classes, constants["BC"]))
    Launch(multilabel_gradient_kernel, grid, arguments, **constants).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward


@triton.jit
def read(inputs, temperatures, row, column, rows, classes):
    """Return x of negatives and -x of positives, -inf elsewhere; and which classes are positives.

    A mask is a factor of the exponentials: x of a negative gets tn ln w, -x of a positive tp ln w.
    """
    inside = (row < rows)[:, None] & (column < classes)[None, :]
    logit = tl.load(matrix_address(inputs.x, row, column), mask=inside, other=0.0).to(tl.float32)
    positive = tl.load(matrix_address(inputs.target, row, column), mask=inside, other=0).to(tl.float32) > 0.5
    if inputs.mask.ptr is not None:
        count = tl.load(matrix_address(inputs.mask, row, column), mask=inside, other=0).to(tl.float32)
        positive = positive & (count != 0.0)
        if inputs.mask.ptr.dtype.element_ty != tl.int1:
            logit += log(count) * tl.where(positive, -temperatures.positive, temperatures.negative)
        logit = tl.where(count == 0.0, float("-inf"), logit)
    negative = inside & (positive == 0)
    return tl.where(negative, logit, float("-inf")), tl.where(positive, -logit, float("-inf")), positive


@triton.jit
def decayed(x, top, rate):
    """Return e^((x - top) rate) for x ≤ top, 1 where both are infinite."""
    return tl.where(x == top, 1.0, exp2((x - top) * (rate * LOG2E)))


@triton.jit
def add(top, total, x, rate):
    """Add an element to each sum that is kept as the maximum so far and the sum relative to it."""
    above = tl.maximum(top, x)
    return above, total * decayed(top, above, rate) + decayed(x, above, rate)


@triton.jit
def joined(top, total, rate, ZERO: tl.constexpr):
    """Join the lanes of each row, and with ZERO one more term: its maximum, and the logarithm of the sum relative to it."""
    above = tl.max(top, 1)
    if ZERO:
        above = tl.maximum(above, 0.0)
    sum = tl.sum(total * decayed(top, above[:, None], rate), 1)
    if ZERO:
        sum += exp2(-above * (rate * LOG2E))
    return above, log(sum)


@triton.jit
def upstream_of(n, p, temperatures, PAIRED: tl.constexpr):
    """Return the loss of each row, and u. n, p: what `joined` returns."""
    h = (n[0] + p[0]) + (temperatures.negative * n[1] + temperatures.positive * p[1])
    if PAIRED:
        slope, _, rest = logistic(h)
        value = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    else:
        value = h
        slope = tl.where(value == value, 1.0, value)
    return value, slope


@triton.jit(do_not_specialize=("rows",))
def multilabel_kernel(
    inputs, out_ptr, stats_ptr, sum, valid_sum, divisor_ptr, scale, temperatures, rows, classes,
    BR: tl.constexpr, BC: tl.constexpr, ZERO: tl.constexpr, PAIRED: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr,
):  # fmt: skip
    """Compute the rows' losses; stats: what `joined` returns of negatives and of positives, (4, rows)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    n_top, n_sum = tl.full([BR, BC], LOWEST, tl.float32), tl.zeros([BR, BC], tl.float32)
    p_top, p_sum = n_top, n_sum
    found = tl.zeros([BR, BC], tl.float32)
    for start in range(0, classes, BC):
        negatives, positives, positive = read(inputs, temperatures, row, start + tl.arange(0, BC), rows, classes)
        n_top, n_sum = add(n_top, n_sum, negatives, 1.0 / temperatures.negative)
        p_top, p_sum = add(p_top, p_sum, positives, 1.0 / temperatures.positive)
        found = tl.where(positive, 1.0, found)
    n = joined(n_top, n_sum, 1.0 / temperatures.negative, ZERO)
    p = joined(p_top, p_sum, 1.0 / temperatures.positive, ZERO)
    value, _ = upstream_of(n, p, temperatures, PAIRED)
    inside = row < rows
    if PAIRED:
        inside = inside & (tl.max(found, 1) > 0)
    value = tl.where(inside, value, 0.0)
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    tl.store(stats_ptr + row, n[0], mask=row < rows)
    tl.store(stats_ptr + rows + row, n[1], mask=row < rows)
    tl.store(stats_ptr + 2 * rows + row, tl.where(inside, p[0], 0.0), mask=row < rows)
    tl.store(stats_ptr + 3 * rows + row, tl.where(inside, p[1], float("-inf")), mask=row < rows)
    if out_ptr is not None:
        tl.store(out_ptr + row, value * scale, mask=row < rows)
    else:
        finish(tl.sum(value, 0), sum, scale)
        if PAIRED:
            finish(tl.sum(tl.where(inside, 1.0, 0.0), 0), valid_sum, 1.0)


@triton.jit
def slopes(stats, at, count, scale, temperatures, PAIRED: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr):
    """Return maximum and logarithm of the sum, of negatives and of positives, and the gradient's factor, of rows or columns."""
    n_top = tl.load(stats.ptr + at, mask=at < count, other=0.0)
    n_ls = tl.load(stats.ptr + count + at, mask=at < count, other=0.0)
    p_top = tl.load(stats.ptr + 2 * count + at, mask=at < count, other=0.0)
    p_ls = tl.load(stats.ptr + 3 * count + at, mask=at < count, other=0.0)
    _, slope = upstream_of((n_top, n_ls), (p_top, p_ls), temperatures, PAIRED)
    return n_top, n_ls, p_top, p_ls, slope * divided(scale, stats.divisor_ptr, EMPTY_IS_ZERO)


@triton.jit
def gradient_of(tile, of, temperatures):
    """Return a tile of the gradient of rows or columns. Of those without positives or negatives a logarithm is -inf, and the slope 0.

    tile: what `read` returns. of: what `slopes` returns, in the tile's dimensions.
    """
    negatives, positives, positive = tile
    n_top, n_ls, p_top, p_ls, slope = of
    of_positive, of_negative = (positives - p_top) / temperatures.positive - p_ls, (negatives - n_top) / temperatures.negative - n_ls
    share = exp2(tl.where(positive, of_positive, of_negative) * LOG2E)
    return tl.where(slope == 0.0, 0.0, slope * tl.where(positive, -share, share))


@triton.jit(do_not_specialize=("rows",))
def multilabel_gradient_kernel(
    inputs, gradient, of_rows, of_columns, grad_output_ptr, step, scale, temperatures, rows, classes,
    BR: tl.constexpr, BC: tl.constexpr, PAIRED: tl.constexpr, EMPTY_IS_ZERO: tl.constexpr,
):  # fmt: skip
    """Write one tile of the gradient. step: 1 where each row has an upstream gradient, 0 where all have one."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None] & (column < classes)[None, :]
    tile = read(inputs, temperatures, row, column, rows, classes)
    n_top, n_ls, p_top, p_ls, slope = slopes(of_rows, row, rows, scale, temperatures, PAIRED, EMPTY_IS_ZERO)
    if grad_output_ptr is not None:
        slope *= tl.load(grad_output_ptr + row * step, mask=row < rows, other=0.0).to(tl.float32)
    g = gradient_of(tile, (n_top[:, None], n_ls[:, None], p_top[:, None], p_ls[:, None], slope[:, None]), temperatures)
    if PAIRED:
        n_top, n_ls, p_top, p_ls, slope = slopes(of_columns, column, classes, scale, temperatures, PAIRED, EMPTY_IS_ZERO)
        if grad_output_ptr is not None:
            slope *= tl.load(grad_output_ptr).to(tl.float32)
        g += gradient_of(tile, (n_top[None, :], n_ls[None, :], p_top[None, :], p_ls[None, :], slope[None, :]), temperatures)
    tl.store(matrix_address(gradient, row, column), g, mask=inside)
