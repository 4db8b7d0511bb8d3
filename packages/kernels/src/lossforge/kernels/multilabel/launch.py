"""Host side of the template of samples with several labels: tile sizes, and the launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, MultilabelCall, scale_of
from lossforge.kernels.engine.launch import Launch, computed, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Tensors, as_strided, stepped
from lossforge.kernels.multilabel.kernel import multilabel_gradient_kernel, multilabel_kernel

ELEMENTS = 1024
"""Of a tile."""


def _constants(call: MultilabelCall) -> dict[str, Any]:
    """Return the constants. A tile has whole rows where they fit, and is a square where neighbouring rows are adjacent in memory."""
    x = call.x
    rows_adjacent = x.stride(0) < x.stride(1) and x.shape[0] > 1
    classes = min(triton.next_power_of_2(x.shape[1]), 32 if rows_adjacent else ELEMENTS)
    return {"BR": ELEMENTS // classes, "BC": classes, "PAIRED": call.paired, "EMPTY_IS_ZERO": call.empty_is_zero, "num_warps": 4}


def _numbers(call: MultilabelCall) -> tuple[float, ...]:
    return scale_of(call, call.x.shape[0]), call.tp, call.tn, *call.x.shape


def _write_gradient(
    call: MultilabelCall, stats: Tensor | None, divisor: Tensor | None, grad_output: tuple[Tensor | None, int], gradient: Tensor
) -> None:
    """Write the gradient. divisor: what is counted. grad_output: 0-d or one a row, None for 1; and its step, see engine.layout.stepped."""
    constants, (rows, classes) = _constants(call), call.x.shape
    divisor = divisor if call.counted else call.normalizer
    arguments = (as_strided(call.x), as_strided(call.target), as_strided(gradient), stats, *grad_output, divisor, *_numbers(call))
    grid = (triton.cdiv(rows, constants["BR"]), triton.cdiv(classes, constants["BC"]))
    Launch(multilabel_gradient_kernel, grid, arguments, **constants).start()


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1.0)


def forward(call: MultilabelCall, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
    """As elementwise.launch.forward."""
    value, _, kept = call.shapes(keep)
    total, constants = call.reduction != "none", _constants(call)
    loss, stats, divisor = None if total else new_like(call.x, value), new_like(call.x, kept), None
    sums = (sum_slots(0) if total else None, sum_slots(1) if total and call.paired else None)
    arguments = (as_strided(call.x), as_strided(call.target), loss, stats, *sums, call.normalizer, *_numbers(call))
    grid = (triton.cdiv(call.x.shape[0], constants["BR"]),)
    totals = Launch(multilabel_kernel, grid, arguments, totals=total * (1 + call.paired), ZERO=not call.paired, **constants).start()
    if total:
        loss = totals[0]
    if call.counted:
        divisor = computed(_at_least_one, totals[1])
        loss = computed(torch.div, totals[0], divisor)
    if gradients[0] is not None:
        _write_gradient(call, stats, divisor, (None, 0), gradients[0])
    return loss, divisor, stats


def backward(call: MultilabelCall, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Sequence[Tensor]) -> None:
    """As elementwise.launch.backward."""
    divisor, stats = kept
    if stats is None or (call.counted and divisor is None):
        _, divisor, stats = forward(call, formulas, [None], True)
    _write_gradient(call, stats, divisor, stepped(grad_outputs[0]), gradients[0])
