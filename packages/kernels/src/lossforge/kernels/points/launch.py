"""Host side of the losses at sampled points: the launches."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, computed, in_order, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.points.kernel import point_gradient_kernel, point_loss_kernel, sample_kernel, store_gradient_kernel

BLOCK = 1024
"""Points, or pixels of a gradient, that a program takes at once."""


def sample(x: Tensor, points: Tensor) -> tuple[Tensor]:
    """Return the values (N, P) of masks (N, H, W) at points (N, P, 2), in float32."""
    (masks, height, width), count = x.shape, points.shape[1]
    out = new_like(x, ((masks, count), torch.float32))
    arguments = (as_strided(x), in_order(points), out, count, height, width)
    Launch(sample_kernel, (masks, triton.cdiv(count, BLOCK)), arguments, BLOCK=BLOCK, num_warps=8).start()
    return (out,)


def forward(x: Tensor, target: Tensor, points: Tensor) -> tuple[Tensor]:
    """Return both losses of each mask, and what backward takes: (5, N)."""
    masks, count = points.shape[:2]
    out = new_like(x, ((5, masks), torch.float32))
    arguments = (as_strided(x), as_strided(target), in_order(points), out, masks, count, *x.shape[1:], *target.shape[1:])
    Launch(point_loss_kernel, (masks,), arguments, BLOCK=BLOCK, num_warps=8).start()
    return (out,)


def backward(x: Tensor, target: Tensor, points: Tensor, results: Tensor, grad: Tensor, gradient: Tensor) -> None:
    """Write the logits' gradient for that of the losses, (5, N)."""
    (masks, height, width), count = x.shape, points.shape[1]
    sums = computed(_zeros, x)
    one = 2.0 ** (61 - count.bit_length())  # the sum of all points' parts stays below 2^62
    size = (masks, count, height, width)
    arguments = (as_strided(x), as_strided(target), in_order(points), results, as_strided(grad), sums, *size, *target.shape[1:], one)
    Launch(point_gradient_kernel, (masks, triton.cdiv(count, BLOCK)), arguments, BLOCK=BLOCK, num_warps=8).start()
    arguments = (sums, results, as_strided(grad), as_strided(gradient), *size, 1.0 / one)
    Launch(store_gradient_kernel, (masks, triton.cdiv(height * width, BLOCK)), arguments, BLOCK=BLOCK, num_warps=8).start()


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.int64, device=x.device)
