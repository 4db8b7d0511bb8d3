"""Host side of the template of samples with several labels: tile sizes, and the launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import scale_of
from lossforge.kernels.engine.launch import Launch, computed, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, as_strided, stepped
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.multilabel.call import MultilabelCall
from lossforge.kernels.multilabel.kernel import Stats, Temperatures, multilabel_gradient_kernel, multilabel_kernel

ELEMENTS = 1024
"""Of a tile."""


def _constants(call: MultilabelCall, strides: Sequence[int], rows: int, classes: int) -> dict[str, Any]:
    """Return the constants. A tile has whole rows where they fit, and is a square where neighbouring rows are adjacent in memory."""
    rows_adjacent = strides[0] < strides[1] and rows > 1
    width = min(triton.next_power_of_2(classes), 32 if rows_adjacent else ELEMENTS)
    return {"BR": ELEMENTS // width, "BC": width, "PAIRED": call.paired, "EMPTY_IS_ZERO": call.empty_is_zero, "num_warps": 4}


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1.0)


def _losses(call: MultilabelCall, stats: Tensor | None, out: Tensor | None, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of the rows, or with dim 1 of the columns, taken as rows; store the sums of each in stats.

    Returns:
        Each loss, in `out`, or their sum; and its divisor, if that is counted.
    """
    order = (dim, 1 - dim)
    rows, classes = (call.x.shape[d] for d in order)
    x, target = (Strided(t, *[t.stride(d) for d in order]) for t in (call.x, call.target))
    total, constants = out is None, _constants(call, [call.x.stride(d) for d in order], rows, classes)
    sums = (sum_slots(0) if total else None, sum_slots(1) if total and call.paired else None)
    arguments = (x, target, out, stats, *sums, call.normalizer, scale_of(call, rows), Temperatures(call.tp, call.tn), rows, classes)
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
    arguments = (*[as_strided(t) for t in (call.x, call.target, gradients[0])], *of, *stepped(grad_output), *numbers)
    grid = (triton.cdiv(rows, constants["BR"]), triton.cdiv(classes, constants["BC"]))
    Launch(multilabel_gradient_kernel, grid, arguments, **constants).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward
