"""Host side of decoupled distillation: tiles, and the launches."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.decoupled.kernel import decoupled_gradient_kernel, decoupled_kernel
from lossforge.kernels.divergence.call import LOG2E
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.tiles import RowTiles, divergence_tiles

MOST = 4096
"""Classes that a program reads at once, at most."""


def _tiles(x: Tensor, teacher: Tensor) -> tuple[RowTiles, dict[str, int]]:
    """Return the tiles, and the constants of both kernels that follow from them."""
    classes = x.shape[1]
    tiles = divergence_tiles(min(classes, MOST), min(x.itemsize, teacher.itemsize), rows_adjacent=False, lean=False)
    return tiles, {"C": classes, "BR": tiles.rows, "BC": tiles.classes, "num_warps": tiles.warps}


def forward(x: Tensor, teacher: Tensor, target: Tensor, alpha: float, beta: float, temperature: float) -> tuple[Tensor]:
    """Return the loss of each row, and what backward takes: (9, N). x, teacher: (N, C), contiguous; target: (N,), contiguous."""
    rows = len(x)
    out = new_like(x, ((9, rows), torch.float32))
    tiles, constants = _tiles(x, teacher)
    arguments = (x, teacher, target, out, rows, alpha, beta, temperature, LOG2E / temperature)
    Launch(decoupled_kernel, (triton.cdiv(rows, tiles.rows),), arguments, **constants).start()
    return (out,)


def backward(
    x: Tensor,
    teacher: Tensor,
    target: Tensor,
    results: Tensor,
    grad: Tensor,
    of_x: Tensor | None,
    of_teacher: Tensor | None,
    temperature: float,
) -> None:
    """Write the gradients at x and teacher that are not None. results: of forward; grad: of the losses, (N,)."""
    rows, classes = x.shape
    tiles, constants = _tiles(x, teacher)
    programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(classes, tiles.classes)
    arguments = (x, teacher, target, results, as_strided(grad), of_x, of_teacher, rows, LOG2E / temperature)
    Launch(decoupled_gradient_kernel, (programs,), arguments, **constants).start()
