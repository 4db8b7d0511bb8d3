"""Losses of pairs of boxes (x1, y1, x2, y2) and (u1, v1, u2, v2), one formula each; the gradient is derived."""

import triton
import triton.language as tl

from lossforge.losses import boxes


@boxes(hyper={"constant": 12.8, "eps": 1e-7})
@triton.jit
def nwd(x1, y1, x2, y2, u1, v1, u2, v2, constant, eps):
    """Small objects (arXiv 2110.13389): L = 1 - exp(-W/C), W the Wasserstein distance of boxes taken for Gaussians."""
    across, down = x1 + x2 - u1 - u2, y1 + y2 - v1 - v2
    width, height = x2 - x1 - u2 + u1, y2 - y1 - v2 + v1
    distance = tl.sqrt(0.25 * (across * across + down * down + width * width + height * height) + eps)
    return 1.0 - tl.exp(-distance / constant)


@boxes(hyper={"ratio": 0.75, "eps": 1e-7})
@triton.jit
def inner_iou(x1, y1, x2, y2, u1, v1, u2, v2, ratio, eps):
    """L = 1 - IoU of both boxes, made smaller or larger about their centres by a ratio (arXiv 2311.02877)."""
    half_w, half_h = 0.5 * ratio * (x2 - x1), 0.5 * ratio * (y2 - y1)
    other_w, other_h = 0.5 * ratio * (u2 - u1), 0.5 * ratio * (v2 - v1)
    cx, cy, ox, oy = 0.5 * (x1 + x2), 0.5 * (y1 + y2), 0.5 * (u1 + u2), 0.5 * (v1 + v2)
    shared_w = tl.minimum(cx + half_w, ox + other_w) - tl.maximum(cx - half_w, ox - other_w)
    shared_h = tl.minimum(cy + half_h, oy + other_h) - tl.maximum(cy - half_h, oy - other_h)
    shared = tl.maximum(shared_w, 0.0) * tl.maximum(shared_h, 0.0)
    return 1.0 - shared / (4.0 * (half_w * half_h + other_w * other_h) - shared + eps)
