"""Host side of the distance transform: a launch a dimension."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.distance.kernel import distance_kernel
from lossforge.kernels.engine.launch import Launch, in_order, new_like

BLOCK, LINES, AHEAD = 64, 32, 8
"""Pixels of a line and lines that a program takes, and pixels between two questions whether it may end."""


def transform(mask: Tensor, spacing: tuple[float, ...], background: bool) -> tuple[Tensor]:
    """Return the distances of the pixels of masks (…, d…) to the nearest that is 0, in float32; with `background` to one that is not."""
    source = in_order(mask)
    shape = mask.shape[-len(spacing) :]
    step = 1
    for k, (length, size) in enumerate(zip(reversed(shape), reversed(spacing), strict=True)):
        out = new_like(mask, (mask.shape, torch.float32))
        lines = mask.numel() // length
        grid = (triton.cdiv(lines, LINES), triton.cdiv(length, BLOCK))
        arguments = (source, out, lines, length, step, float(size * size))
        constants = {"FIRST": k == 0, "BACKGROUND": background, "LAST": k == len(shape) - 1}
        Launch(distance_kernel, grid, arguments, **constants, BLOCK=BLOCK, LINES=LINES, AHEAD=AHEAD, num_warps=4).start()
        source, step = out, step * length
    return (source,)
