"""Host side of the cost of matching: its memory, tiles, and the launch."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import Strided, as_strided
from lossforge.kernels.matching.kernel import Problem, Weights, matching_kernel

TILE = (16, 32)
"""Queries and targets of a tile."""


def costs(
    logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: Tensor, weights: Weights, centered: bool, softmax: bool
) -> tuple[Tensor]:
    """Return the costs (Q, T) of all targets, in float32. labels and counts: contiguous. softmax: logits are probabilities already."""
    (images, queries, classes), count = logits.shape, len(targets)
    out = new_like(logits, ((queries, count), torch.float32))
    problem = Problem(as_strided(logits), as_strided(boxes), Strided(targets, 0, *targets.stride()), labels, counts)
    rows, columns = TILE
    grid = (triton.cdiv(queries, rows) * triton.cdiv(count, columns),)
    sizes = {"ROWS": rows, "COLUMNS": columns, "IMAGES": triton.next_power_of_2(images)}
    arguments = (problem, out, queries, count, images, classes, weights)
    Launch(matching_kernel, grid, arguments, CENTERED=centered, SOFTMAX=softmax, **sizes, num_warps=4).start()
    return (out,)
