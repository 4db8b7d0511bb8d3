"""Host side of the cost of matching: its memory, tiles, and the launch."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.matching.kernel import Logits, Problem, Weights, matching_kernel
from lossforge.kernels.pairwise.kernel import Boxes

TILE = (16, 32)
"""Queries and targets of a tile."""


def costs(
    logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: Tensor, weights: Weights, centered: bool
) -> tuple[Tensor]:
    """Return the costs (Q, T) of all targets, in float32. labels and counts: contiguous."""
    (images, queries, classes), count = logits.shape, len(targets)
    out = new_like(logits, ((queries, count), torch.float32))
    assert out is not None
    problem = Problem(Logits(logits, *logits.stride()), Boxes(boxes, *boxes.stride()), Boxes(targets, 0, *targets.stride()), labels, counts)
    rows, columns = TILE
    grid = (triton.cdiv(queries, rows) * triton.cdiv(count, columns),)
    sizes = {"CENTERED": centered, "ROWS": rows, "COLUMNS": columns, "IMAGES": triton.next_power_of_2(images)}
    Launch(matching_kernel, grid, (problem, out, queries, count, images, classes, weights), **sizes, num_warps=4).start()
    return (out,)
