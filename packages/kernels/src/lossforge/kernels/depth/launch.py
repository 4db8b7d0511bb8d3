"""Host side of the loss of depth maps: the launches."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.depth.kernel import depth_gradient_kernel, depth_loss_kernel, depth_sums_kernel
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided

BLOCK, PARTS, JOINED = 1024, 2048, 1024
"""Pixels that a program takes at a time, programs of all images, and parts that are joined at a time."""


def loss(x: Tensor, target: Tensor, lambd: float, eps: float, root: bool, per_image: bool) -> tuple[Tensor]:
    """Return the loss of each image or of all, with a and b of its gradient, (N or 1, 3). x, target: (N, M), contiguous."""
    images, pixels = x.shape
    parts = max(1, min(triton.cdiv(pixels, BLOCK), PARTS // images))
    sums = new_like(x, ((images, parts, 3), torch.float32))
    out = new_like(x, ((images if per_image else 1, 3), torch.float32))
    Launch(depth_sums_kernel, (images, parts), (x, target, sums, pixels), BLOCK=BLOCK, num_warps=4).start()
    joined = parts if per_image else images * parts
    Launch(depth_loss_kernel, (len(out),), (sums, out, joined, lambd, eps), ROOT=root, BLOCK=JOINED, num_warps=4).start()
    return (out,)


def backward(x: Tensor, target: Tensor, found: Tensor, grad: Tensor, gradient: Tensor) -> None:
    """Write the gradient at x. found: the result of `loss`; grad: the gradient at `found`, whose first column alone is read."""
    images, pixels = x.shape
    arguments = (x, target, found, as_strided(grad), gradient, pixels)
    programs = images * triton.cdiv(pixels, BLOCK)  # in one dimension, because the second of a grid ends at 65,535
    Launch(depth_gradient_kernel, (programs,), arguments, EACH=len(found) > 1, BLOCK=BLOCK, num_warps=4).start()
