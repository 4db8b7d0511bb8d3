"""Host side of the contrastive template: tile sizes, and the launches."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, PairsCall
from lossforge.kernels.engine.launch import PROGRAMS_A_GROUP, Plan, Template, launch, new, sum_slots
from lossforge.kernels.engine.layout import constants
from lossforge.kernels.pairs.kernel import Config, Matrix, Side, contrastive_backward_kernel, contrastive_kernel
from lossforge.kernels.tiles import contrastive_tiles, similarity_gradient_tiles


class Numbers(NamedTuple):
    """The call's numbers as the kernels take them. scale: of the loss; logit_scale: None where it changes nothing."""

    scale: float
    logit_scale: float | None

    @staticmethod
    def of(call: PairsCall) -> "Numbers":
        known = call.reduction == "mean" and call.normalizer is None
        scale = float(call.loss_scale / call.x.shape[0] if known else call.loss_scale)
        return Numbers(scale, None if call.logit_scale == 1.0 else call.logit_scale)


class Wanted(NamedTuple):
    """What the first launch writes: see kernel.Side. row_loss, column_loss: the halves of each pair's loss, else there is a total."""

    row_parts: Tensor
    column_parts: Tensor
    row_lse: Tensor
    column_lse: Tensor
    row_loss: Tensor | None
    column_loss: Tensor | None


def _strides(t: Any) -> tuple[int, int]:
    """Of a dimension of size 1 the one that leaves elements next to each other along one dimension."""
    (rows, columns), (s0, s1) = t.shape, t.stride()
    if rows == 1:
        s0 = 0
    return s0, s1 if columns > 1 else int(s0 != 1)


def _wide(*tensors: Any) -> bool:
    return any(max(t.stride()) * 256 >= 2**31 for t in tensors)


def _grid(x: Any, tiles: Any) -> tuple[int, int]:
    """Tiles down and across."""
    rows, columns = x.shape
    return triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)


def _plan(call: PairsCall, wanted: Wanted, numbers: Numbers) -> Plan:
    x = call.x
    rows, columns = x.shape
    tiles = contrastive_tiles(rows, columns)
    down, across = _grid(x, tiles)
    return Plan(
        contrastive_kernel,
        (down * across,),
        (
            Matrix(x, *_strides(x), numbers.logit_scale),
            Side(wanted.row_parts, wanted.row_lse, wanted.row_loss),
            Side(wanted.column_parts, wanted.column_lse, wanted.column_loss),
            sum_slots(),
            call.normalizer,
            numbers.scale,
            rows,
            columns,
            call.offset,
            across,
            down,
            constants(Config(tiles.rows, tiles.columns, _wide(x), call.empty_is_zero)),
        ),
        totals=1,
        counting=PROGRAMS_A_GROUP * (down + across),  # a ticket for each row and column of tiles
        num_warps=tiles.warps,
    )


FORWARD = Template(_plan)


class Arriving(NamedTuple):
    """What the second launch takes beside the call. grad_output: 0-d for the total, (N,) for each; None for 1."""

    row_lse: Tensor
    column_lse: Tensor
    grad_output: Tensor | None
    gradient: Tensor


def _plan_backward(call: PairsCall, a: Arriving, numbers: Numbers) -> Plan:
    x = call.x
    tiles = similarity_gradient_tiles()
    down, across = _grid(x, tiles)
    each = a.grad_output is not None and a.grad_output.ndim == 1
    return Plan(
        contrastive_backward_kernel,
        (down * across,),
        (
            Matrix(x, *_strides(x), numbers.logit_scale),
            Matrix(a.gradient, *_strides(a.gradient)),
            a.row_lse,
            a.column_lse,
            a.grad_output,
            call.normalizer,
            numbers.scale,
            *x.shape,
            call.offset,
            across,
            constants(Config(tiles.rows, tiles.columns, _wide(x, a.gradient), call.empty_is_zero, EACH=each)),
        ),
        num_warps=tiles.warps,
    )


BACKWARD = Template(_plan_backward)


def _floats(shape: Sequence[int], x: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def forward(
    call: PairsCall,
    formulas: Formulas | None,
    gradients: Sequence[Tensor | None],
    keep: bool,
    alone: bool = False,
) -> tuple[Tensor | None, ...]:
    """As element.launch.forward."""
    rows, columns = call.x.shape
    down, across = _grid(call.x, contrastive_tiles(rows, columns))
    shapes = [(2, across, rows), (2, down, columns), (rows,), (columns,)]
    row_parts, column_parts, row_lse, column_lse = (new(call.x, functools.partial(_floats, s)) for s in shapes)
    halves = torch.empty((2, rows), dtype=torch.float32, device=call.x.device) if call.reduction == "none" else None
    row_loss, column_loss = (None, None) if halves is None else halves
    numbers = Numbers.of(call)
    (total,) = launch(FORWARD, call, Wanted(row_parts, column_parts, row_lse, column_lse, row_loss, column_loss), numbers)
    if gradients[0] is not None:
        launch(BACKWARD, call, Arriving(row_lse, column_lse, None, gradients[0]), numbers)
    return total if halves is None else halves.sum(0), row_lse, column_lse


def backward(
    call: PairsCall,
    formulas: Formulas | None,
    kept: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
) -> None:
    """As element.launch.backward."""
    row_lse, column_lse = kept
    (arriving,) = grad_outputs
    if row_lse is None or column_lse is None:
        _, row_lse, column_lse = forward(call, formulas, [None], True)
    assert row_lse is not None
    assert column_lse is not None
    assert arriving is not None
    launch(BACKWARD, call, Arriving(row_lse, column_lse, arriving.contiguous(), gradients[0]), Numbers.of(call))
