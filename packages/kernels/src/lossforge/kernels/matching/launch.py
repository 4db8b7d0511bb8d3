"""Host side of matching: memory, tiles, and the launches."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import Strided, as_strided
from lossforge.kernels.matching.call import Weights
from lossforge.kernels.matching.hungarian import Assignments, hungarian_kernel
from lossforge.kernels.matching.kernel import Problem, matching_kernel

TILE = (16, 32)
"""Queries and targets of a tile."""
LANES_A_WARP = 128
"""Queries that a warp of the Hungarian method holds in registers."""


def costs(
    logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: Tensor, weights: Weights, centered: bool, softmax: bool
) -> tuple[Tensor]:
    """Return the costs (T, Q) of all targets, in float32. labels and counts: contiguous. softmax: logits are probabilities already."""
    (images, queries, classes), count = logits.shape, len(targets)
    out = new_like(logits, ((count, queries), torch.float32))
    problem = Problem(as_strided(logits), as_strided(boxes), Strided(targets, 0, *targets.stride()), labels, counts)
    rows, columns = TILE
    grid = (triton.cdiv(queries, rows) * triton.cdiv(count, columns),)
    sizes = {"ROWS": rows, "COLUMNS": columns, "IMAGES": triton.next_power_of_2(images)}
    arguments = (problem, out, queries, count, images, classes, weights)
    Launch(matching_kernel, grid, arguments, CENTERED=centered, SOFTMAX=softmax, **sizes, num_warps=4).start()
    return (out,)


def assign(cost: Tensor, counts: Tensor) -> tuple[Tensor]:
    """Return the box of each query (B, G, Q) at the least total cost, int64, or -1. cost: (G, Q, T). counts: (B,), contiguous."""
    (groups, queries, count), images = cost.shape, len(counts)
    out = new_like(cost, ((images, groups, queries), torch.int64))
    lanes = triton.next_power_of_2(queries)
    sizes = {"LANES": lanes, "IMAGES": triton.next_power_of_2(images)}
    arguments = (Assignments(as_strided(cost), counts, out), queries, count, images, groups)
    warps = min(max(lanes // LANES_A_WARP, 1), 16)
    Launch(hungarian_kernel, (images * groups,), arguments, **sizes, num_warps=warps).start()
    return (out,)
