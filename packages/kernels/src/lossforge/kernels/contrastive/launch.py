"""Host side of the contrastive template: tile sizes, and the launches."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import ContrastiveCall, Formulas
from lossforge.kernels.contrastive.kernel import Config, Matrix, Side, contrastive_backward_kernel, contrastive_kernel
from lossforge.kernels.engine.launch import PROGRAMS_A_GROUP, Launch, Launcher, computed, in_order, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, constants
from lossforge.kernels.tiles import contrastive_tiles, similarity_gradient_tiles


class Numbers(NamedTuple):
    """The call's numbers as the kernels take them. scale: of the loss; logit_scale: None where it changes nothing."""

    scale: float
    logit_scale: float | None

    @staticmethod
    def of(call: ContrastiveCall) -> "Numbers":
        known = call.reduction == "mean" and call.normalizer is None
        scale = float(call.loss_scale / call.x.shape[0] if known else call.loss_scale)
        return Numbers(scale, None if call.logit_scale == 1.0 else call.logit_scale)


def _matrix(t: Any, scale: Any = None) -> Matrix:
    """Of a dimension of size 1 the stride is the one that leaves elements next to each other along one dimension."""
    (rows, columns), (s0, s1) = t.shape, t.stride()
    if rows == 1:
        s0 = 0
    return Matrix(t, s0, s1 if columns > 1 else int(s0 != 1), scale)


def _wide(*tensors: Any) -> bool:
    return any(max(t.stride()) * 256 >= 2**31 for t in tensors)


def _grid(x: Any, tiles: Any) -> tuple[int, int]:
    """Tiles down and across."""
    rows, columns = x.shape
    return triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)


def _make(call: ContrastiveCall, of_rows: Side, of_columns: Side, numbers: Numbers) -> Launch:
    x = call.x
    rows, columns = x.shape
    tiles = contrastive_tiles(rows, columns)
    down, across = _grid(x, tiles)
    config = constants(Config(tiles.rows, tiles.columns, _wide(x), call.empty_is_zero))
    loss = (sum_slots(), call.normalizer, numbers.scale)
    arguments = (_matrix(x, numbers.logit_scale), of_rows, of_columns, *loss, rows, columns, call.offset, across, down, config)
    counting = PROGRAMS_A_GROUP * (down + across)  # a ticket for each row and column of tiles
    return Launch(contrastive_kernel, (down * across,), arguments, totals=1, counting=counting, num_warps=tiles.warps)


FORWARD = Launcher(_make)


class BackwardInputs(NamedTuple):
    """What the second launch takes beside the call. grad_output: 0-d for the total, (N,) for each; None for 1."""

    row_lse: Tensor | None
    column_lse: Tensor | None
    grad_output: Tensor | None
    gradient: Tensor | None


def _make_backward(call: ContrastiveCall, a: BackwardInputs, numbers: Numbers) -> Launch:
    x = call.x
    tiles = similarity_gradient_tiles()
    down, across = _grid(x, tiles)
    each = a.grad_output is not None and a.grad_output.ndim == 1
    config = constants(Config(tiles.rows, tiles.columns, _wide(x, a.gradient), call.empty_is_zero, EACH=each))
    matrices = (_matrix(x, numbers.logit_scale), _matrix(a.gradient))
    grad_output = (a.row_lse, a.column_lse, a.grad_output, call.normalizer, numbers.scale)
    arguments = (*matrices, *grad_output, *x.shape, call.offset, across, config)
    return Launch(contrastive_backward_kernel, (down * across,), arguments, num_warps=tiles.warps)


BACKWARD = Launcher(_make_backward)


def forward(
    call: ContrastiveCall, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False
) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    rows, columns = call.x.shape
    down, across = _grid(call.x, contrastive_tiles(rows, columns))
    shapes = [(2, across, rows), (2, down, columns), (rows,), (columns,)]
    row_parts, column_parts, row_lse, column_lse = (new_like(call.x, (s, torch.float32)) for s in shapes)
    each = ((rows,), torch.float32) if call.reduction == "none" else None
    row_loss, column_loss = new_like(call.x, each), new_like(call.x, each)
    numbers = Numbers.of(call)
    sides = Side(row_parts, row_lse, row_loss), Side(column_parts, column_lse, column_loss)
    (total,) = FORWARD.ready(call, *sides, numbers).start()
    if gradients[0] is not None:
        BACKWARD.ready(call, BackwardInputs(row_lse, column_lse, None, gradients[0]), numbers).start()
    value = total if row_loss is None or column_loss is None else computed(torch.add, row_loss, column_loss)
    return value, row_lse, column_lse


def backward(call: ContrastiveCall, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (row_lse, column_lse), (grad_output,) = kept, grad_outputs
    if row_lse is None or column_lse is None:
        _, row_lse, column_lse = forward(call, formulas, [None], True)
    assert grad_output is not None
    BACKWARD.ready(call, BackwardInputs(row_lse, column_lse, in_order(grad_output), gradients[0]), Numbers.of(call)).start()
