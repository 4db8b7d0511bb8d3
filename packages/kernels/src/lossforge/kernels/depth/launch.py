"""Host side of the sums of depth maps: the launches."""

import functools

import torch
import triton
from torch import Tensor

from lossforge.kernels.depth.kernel import depth_gradient_kernel, depth_sums_kernel
from lossforge.kernels.engine.launch import Launch, computed, new_like
from lossforge.kernels.engine.layout import as_strided

BLOCK, PARTS = 1024, 1024
"""Pixels that a program takes at a time, and programs of all images."""


def sums(x: Tensor, target: Tensor) -> tuple[Tensor]:
    """Return Σ d, Σ d² and the number of valid pixels of each image, (N, 3). x, target: (N, M), contiguous."""
    images, pixels = x.shape
    parts = max(1, min(triton.cdiv(pixels, BLOCK), PARTS // images))
    out = new_like(x, ((images, parts, 3), torch.float32))
    Launch(depth_sums_kernel, (images, parts), (x, target, out, pixels), BLOCK=BLOCK, num_warps=4).start()
    return (computed(functools.partial(torch.sum, dim=1), out),)


def backward(x: Tensor, target: Tensor, grad: Tensor, gradient: Tensor) -> None:
    """Write the gradient at x for that of the sums, (N, 3)."""
    images, pixels = x.shape
    arguments = (x, target, as_strided(grad), gradient, pixels)
    programs = images * triton.cdiv(pixels, BLOCK)  # in one dimension, because the second of a grid ends at 65,535
    Launch(depth_gradient_kernel, (programs,), arguments, BLOCK=BLOCK, num_warps=4).start()
