"""The template of losses between several views of a sample: the Jensen-Shannon divergence of their softmaxes.

For the S views of a sample, with p of each, m = Σ p / S and its logarithm of at least 1e-7:

    L = Σₛ Σⱼ p (ln p - ln max(m, 1e-7)) / S
    dL/dx = p (g - Σⱼ p g) / S with g = ln p - ln max(m, 1e-7), and 1 more where m is below 1e-7

A program has one sample, and its tiles hold all views of some classes. The first launch sweeps twice over them, the second time from the
cache: for the log-sum-exps, and for the loss and Σ p g. The second launch writes the gradient, a tile a program.
"""

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.classes.calls import ViewsCall
from lossforge.kernels.classes.rowwise.rows import LOWEST, add_exponential
from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, as_strided, load_matrix, matrix_address
from lossforge.kernels.engine.reduce import finish
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.math import LOG2E, exp2, log

FLOOR = tl.constexpr(1e-7)
ELEMENTS = 2048
"""Of a tile, at most."""


def _constants(call: ViewsCall) -> dict[str, int]:
    views = triton.next_power_of_2(call.splits)
    classes = min(triton.next_power_of_2(call.x.shape[1]), max(1, ELEMENTS // views))
    return {"S": call.splits, "SP": views, "BC": classes, "num_warps": 4}


def _numbers(call: ViewsCall) -> tuple[float, int, int]:
    samples = call.x.shape[0] // call.splits
    return float(call.loss_scale / samples), samples, call.x.shape[1]


def _compute(call: ViewsCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    stats, numbers = new_like(call.x, call.shapes(keep)[1]), _numbers(call)
    arguments = (as_strided(call.x), stats, sum_slots(), *numbers)
    return Launch(views_kernel, (numbers[1],), arguments, totals=1, **_constants(call)).start(), (stats,)


def _differentiate(call: ViewsCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    numbers, constants = _numbers(call), _constants(call)
    grid = (numbers[1], triton.cdiv(call.x.shape[1], constants["BC"]))
    arguments = (as_strided(call.x), as_strided(gradients[0]), *kept, grad_output, *numbers)
    Launch(views_gradient_kernel, grid, arguments, **constants).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward


@triton.jit
def read(x, sample, view, column, samples, classes, S: tl.constexpr):
    """Load a tile of all views of a sample, `samples` rows from a view to the next; -inf outside. Return its rows and which exist, too."""
    inside = (view < S)[:, None] & (column < classes)[None, :]
    row = view.to(tl.int64) * samples + sample
    return row, inside, load_matrix(x, row, column, inside, float("-inf"))


@triton.jit
def compared(tile, top, ls, S: tl.constexpr):
    """Return p, ln p - ln max(m, 1e-7), which is 0 where p is, and g. top + ls: the log-sum-exp, whose sum would lose digits."""
    log_p = (tile - top[:, None]) - ls[:, None]
    p = exp2(log_p * LOG2E)
    mean = tl.sum(p, 0) / S
    bounded = tl.minimum(tl.maximum(mean, FLOOR, propagate_nan=tl.PropagateNan.ALL), 1.0, propagate_nan=tl.PropagateNan.ALL)
    term = tl.where(p == 0.0, 0.0, log_p - log(bounded)[None, :])
    return p, term, term + tl.where(mean < FLOOR, 1.0, 0.0)[None, :]


@triton.jit(do_not_specialize=("samples",))
def views_kernel(
    x, stats_ptr, sum, scale, samples, classes, S: tl.constexpr, SP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Add up the loss; stats: of each row the maximum, the logarithm of the sum relative to it, and Σ p g, (3, S, samples)."""
    sample = tl.program_id(0).to(tl.int64)
    view = tl.arange(0, SP)
    top, total = tl.full([SP, BC], LOWEST, tl.float32), tl.zeros([SP, BC], tl.float32)
    for start in range(0, classes, BC):
        _, _, tile = read(x, sample, view, start + tl.arange(0, BC), samples, classes, S)
        top, total = add_exponential(top, total, tile)
    whole = tl.max(top, 1)
    ls = tl.where(view < S, log(tl.sum(total * exp2((top - whole[:, None]) * LOG2E), 1)), 0.0)
    value, dot = tl.zeros([SP, BC], tl.float32), tl.zeros([SP, BC], tl.float32)
    for start in range(0, classes, BC):
        _, _, tile = read(x, sample, view, start + tl.arange(0, BC), samples, classes, S)
        p, term, slope = compared(tile, whole, ls, S)
        value += p * term
        dot += p * slope
    at = stats_ptr + view.to(tl.int64) * samples + sample
    rows = samples.to(tl.int64) * S
    tl.store(at, whole, mask=view < S)
    tl.store(at + rows, ls, mask=view < S)
    tl.store(at + 2 * rows, tl.sum(dot, 1), mask=view < S)
    finish(tl.sum(tl.sum(value, 1), 0) / S, sum, scale)


@triton.jit(do_not_specialize=("samples",))
def views_gradient_kernel(
    x, gradient, stats_ptr, grad_output_ptr, scale, samples, classes, S: tl.constexpr, SP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    view, column = tl.arange(0, SP), tl.program_id(1) * BC + tl.arange(0, BC)
    at = stats_ptr + view.to(tl.int64) * samples + sample
    rows = samples.to(tl.int64) * S
    top = tl.load(at, mask=view < S, other=0.0)
    ls = tl.load(at + rows, mask=view < S, other=0.0)
    dot = tl.load(at + 2 * rows, mask=view < S, other=0.0)
    factor = scale / S
    if grad_output_ptr is not None:
        factor *= tl.load(grad_output_ptr).to(tl.float32)
    row, inside, tile = read(x, sample, view, column, samples, classes, S)
    p, _, slope = compared(tile, top, ls, S)
    tl.store(matrix_address(gradient, row, column), factor * p * (slope - dot[:, None]), mask=inside)
