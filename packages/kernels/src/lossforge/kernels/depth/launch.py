"""Host side of the sums of depth maps: the launches."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.depth.kernel import depth_gradient_kernel, depth_join_kernel, depth_sums_kernel
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided

BLOCK, PARTS = 1024, 1024
"""Pixels that a program takes at a time, and programs of all images."""


def sums(x: Tensor, target: Tensor) -> tuple[Tensor]:
    """Return Σ d, Σ (d - mean d)² and the number of valid pixels of each image, (N, 3). x, target: (N, M), contiguous."""
    images, pixels = x.shape
    parts = max(1, min(triton.cdiv(pixels, BLOCK), PARTS // images))
    of_parts, out = new_like(x, ((images, parts, 3), torch.float32)), new_like(x, ((images, 3), torch.float32))
    Launch(depth_sums_kernel, (images, parts), (x, target, of_parts, pixels), BLOCK=BLOCK, num_warps=4).start()
    Launch(depth_join_kernel, (images,), (of_parts, out, parts), BLOCK=PARTS, num_warps=4).start()
    return (out,)


def backward(x: Tensor, target: Tensor, totals: Tensor, grad: Tensor, gradient: Tensor) -> None:
    """Write the gradient at x. totals: the sums, (N, 3); grad: the gradient at them."""
    images, pixels = x.shape
    arguments = (x, target, totals, as_strided(grad), gradient, pixels)
    programs = images * triton.cdiv(pixels, BLOCK)  # in one dimension, because the second of a grid ends at 65,535
    Launch(depth_gradient_kernel, (programs,), arguments, BLOCK=BLOCK, num_warps=4).start()
