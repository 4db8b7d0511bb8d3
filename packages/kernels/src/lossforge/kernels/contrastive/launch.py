"""Host side of the contrastive template: tile sizes, and the launches."""

from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT, scale_of
from lossforge.kernels.contrastive.call import ContrastiveCall
from lossforge.kernels.contrastive.kernel import Config, Matrix, Side, contrastive_backward_kernel, contrastive_kernel
from lossforge.kernels.engine.launch import PROGRAMS_A_GROUP, Launch, computed, in_order, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, constants
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.tiles import MatrixTiles, contrastive_tiles, similarity_gradient_tiles


def _matrix(t: Any, scale: float = 1.0) -> Matrix:
    """Of a dimension of size 1 the stride is the one that leaves elements next to each other along one dimension."""
    (rows, columns), (s0, s1) = t.shape, t.stride()
    if rows == 1:
        s0 = 0
    return Matrix(t, s0, s1 if columns > 1 else int(s0 != 1), None if scale == 1.0 else scale)


def _config(call: ContrastiveCall, tiles: MatrixTiles, *matrices: Tensor, each: bool = False) -> Any:
    wide = any(max(t.stride()) * 256 >= 2**31 for t in matrices)
    return constants(Config(tiles.rows, tiles.columns, wide, call.empty_is_zero, EACH=each))


def _grid(call: ContrastiveCall, tiles: MatrixTiles) -> tuple[int, int]:
    """Return tiles down and across."""
    rows, columns = call.x.shape
    return triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)


def _compute(call: ContrastiveCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    rows, columns = call.x.shape
    tiles = contrastive_tiles(rows, columns)
    down, across = _grid(call, tiles)
    shapes = [(2, across, rows), (2, down, columns), (2, rows), (2, columns)]
    row_parts, column_parts, *kept = (new_like(call.x, (s, FLOAT)) for s in shapes)
    losses = [new_like(call.x, ((rows,), FLOAT)) if call.reduction == "none" else None for _ in kept]
    sides = Side(row_parts, kept[0], losses[0]), Side(column_parts, kept[1], losses[1])
    factors = (sum_slots(), call.normalizer, scale_of(call, rows))
    sizes = (rows, columns, call.offset, across, down, _config(call, tiles, call.x))
    counting = PROGRAMS_A_GROUP * (down + across)  # a ticket for each row and column of tiles
    arguments = (_matrix(call.x, call.logit_scale), *sides, *factors, *sizes)
    (value,) = Launch(contrastive_kernel, (down * across,), arguments, totals=1, counting=counting, num_warps=tiles.warps).start()
    if losses[0] is not None and losses[1] is not None:
        value = computed(torch.add, losses[0], losses[1])
    return (value,), kept


def _differentiate(call: ContrastiveCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    (gradient,) = gradients
    assert gradient is not None
    tiles = similarity_gradient_tiles()
    down, across = _grid(call, tiles)
    config = _config(call, tiles, call.x, gradient, each=grad_output is not None and grad_output.ndim == 1)
    matrices = (_matrix(call.x, call.logit_scale), _matrix(gradient))
    factors = (in_order(grad_output), call.normalizer, scale_of(call, call.x.shape[0]))
    arguments = (*matrices, *kept, *factors, *call.x.shape, call.offset, across, config)
    Launch(contrastive_backward_kernel, (down * across,), arguments, num_warps=tiles.warps).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward
