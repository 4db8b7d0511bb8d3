"""Host side of the template of samples with several labels: tile sizes, and the launches."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, MultilabelCall
from lossforge.kernels.engine.launch import Launch, Launcher, computed, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, stepped
from lossforge.kernels.multilabel.kernel import Matrix, multilabel_gradient_kernel, multilabel_kernel

ELEMENTS = 1024
"""Of a tile."""


def _tile(x: Any) -> tuple[int, int]:
    """Return rows and classes of a tile: whole rows where they fit, squares where neighbouring rows are adjacent in memory."""
    rows_adjacent = x.stride(0) < x.stride(1) and x.shape[0] > 1
    classes = min(triton.next_power_of_2(x.shape[1]), 32 if rows_adjacent else ELEMENTS)
    return ELEMENTS // classes, classes


def _matrix(t: Any) -> Matrix:
    row, column = t.stride()
    return Matrix(t, row, column)


class Results(NamedTuple):
    """What the first launch writes. out: of each row; None for the total."""

    out: Tensor | None
    stats: Tensor | None


def _scale(call: MultilabelCall) -> float:
    known = call.reduction == "mean" and call.normalizer is None and not call.counted
    return float(call.loss_scale / call.x.shape[0] if known else call.loss_scale)


def _constants(call: MultilabelCall) -> dict[str, Any]:
    rows, classes = _tile(call.x)
    return {"BR": rows, "BC": classes, "PAIRED": call.paired, "EMPTY_IS_ZERO": call.empty_is_zero, "num_warps": 4}


def _make(call: MultilabelCall, results: Results) -> Launch:
    total = results.out is None
    sums = (sum_slots(0) if total else None, sum_slots(1) if total and call.paired else None)
    numbers = (_scale(call), call.tp, call.tn, *call.x.shape)
    arguments = (_matrix(call.x), _matrix(call.target), results.out, results.stats, *sums, call.normalizer, *numbers)
    constants = _constants(call)
    grid = (triton.cdiv(call.x.shape[0], constants["BR"]),)
    return Launch(multilabel_kernel, grid, arguments, totals=total * (1 + call.paired), ZERO=not call.paired, **constants)


class Gradient(NamedTuple):
    """What the second launch takes. grad_output: 0-d or one a row; None for 1. divisor: 0-d, or None."""

    stats: Tensor
    divisor: Tensor | None
    grad_output: Tensor | None
    step: int
    gradient: Tensor


def _make_gradient(call: MultilabelCall, g: Gradient) -> Launch:
    numbers = (_scale(call), call.tp, call.tn, *call.x.shape)
    matrices = (_matrix(call.x), _matrix(call.target), _matrix(g.gradient))
    arguments = (*matrices, g.stats, g.grad_output, g.step, g.divisor, *numbers)
    constants = _constants(call)
    rows, classes = call.x.shape
    grid = (triton.cdiv(rows, constants["BR"]), triton.cdiv(classes, constants["BC"]))
    return Launch(multilabel_gradient_kernel, grid, arguments, **constants)


FORWARD, GRADIENT = Launcher(_make), Launcher(_make_gradient)


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1.0)


def forward(
    call: MultilabelCall, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False
) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    value, _, stats = call.shapes(keep)
    results = Results(new_like(call.x, value) if call.reduction == "none" else None, new_like(call.x, stats))
    totals = FORWARD.ready(call, results).start()
    divisor, loss = None, results.out
    if loss is None:
        loss = totals[0]
        if call.counted:
            divisor = computed(_at_least_one, totals[1])
            loss = computed(torch.div, loss, divisor)
    if gradients[0] is not None and results.stats is not None:
        GRADIENT.ready(call, Gradient(results.stats, divisor if call.counted else call.normalizer, None, 0, gradients[0])).start()
    return loss, divisor, results.stats


def backward(call: MultilabelCall, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (divisor, stats), (grad_output,) = kept, grad_outputs
    if stats is None or (call.counted and divisor is None):
        _, divisor, stats = forward(call, formulas, [None], True)
    assert stats is not None
    assert gradients[0] is not None
    GRADIENT.ready(call, Gradient(stats, divisor if call.counted else call.normalizer, *stepped(grad_output), gradients[0])).start()
