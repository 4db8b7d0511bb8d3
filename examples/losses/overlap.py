"""Losses of pairs of boxes (x1, y1, x2, y2) and (u1, v1, u2, v2), the second the target; one formula each, whose gradient is derived."""

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.formulas.box import overlap
from lossforge.kernels.math import hold
from lossforge.losses import box_iou_loss, boxes


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


@triton.jit
def scaled_distance(x1, y1, x2, y2, u1, v1, u2, v2, across, down, eps):
    """Return (across · dx² + down · dy²) / c² of the centres' offsets dx, dy and the diagonal c of the smallest box around both."""
    dx, dy = 0.5 * (x1 + x2 - u1 - u2), 0.5 * (y1 + y2 - v1 - v2)
    w, h = tl.maximum(x2, u2) - tl.minimum(x1, u1), tl.maximum(y2, v2) - tl.minimum(y1, v1)
    return (across * dx * dx + down * dy * dy) / (w * w + h * h + eps)


@boxes(hyper={"width": 640.0, "height": 640.0, "eps": 1e-7})
@triton.jit
def mpdiou(x1, y1, x2, y2, u1, v1, u2, v2, width, height, eps):
    """L = 1 - IoU + (d₁² + d₂²) / (W² + H²), d₁, d₂ the distances of both corners, W and H the image's sides (arXiv 2307.07662)."""
    first = (x1 - u1) * (x1 - u1) + (y1 - v1) * (y1 - v1)
    second = (x2 - u2) * (x2 - u2) + (y2 - v2) * (y2 - v2)
    return overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps) + (first + second) / (width * width + height * height)


@boxes(hyper={"scale": 0.0, "eps": 1e-7})
@triton.jit
def shape_iou(x1, y1, x2, y2, u1, v1, u2, v2, scale, eps):
    """L = 1 - IoU + distance + Ω/2, both weighed by the shape of the target; scale: that of its data set (arXiv 2312.17663)."""
    w, h, target_w, target_h = x2 - x1, y2 - y1, u2 - u1, v2 - v1
    share = 2.0 * tl.sigmoid(scale * (tl.log(target_w) - tl.log(target_h)))  # 2 wˢ / (wˢ + hˢ) of the target
    width = (2.0 - share) * tl.abs(w - target_w) / tl.maximum(w, target_w)
    height = share * tl.abs(h - target_h) / tl.maximum(h, target_h)
    a, b = 1.0 - tl.exp(-width), 1.0 - tl.exp(-height)
    distance = scaled_distance(x1, y1, x2, y2, u1, v1, u2, v2, 2.0 - share, share, eps)
    return overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps) + distance + 0.5 * (a * a * a * a + b * b * b * b)


@boxes(hyper={"lam": 1.3, "eps": 1e-7})
@triton.jit
def piou_v2(x1, y1, x2, y2, u1, v1, u2, v2, lam, eps):
    """L = 3 λq exp(-(λq)²) [1 - IoU + 1 - exp(-P²)], q = exp(-P), P the mean distance of the edges in sides of the target (Powerful-IoU,
    Liu et al. 2024, doi 10.1016/j.neunet.2023.11.041)."""
    p = 0.25 * ((tl.abs(x1 - u1) + tl.abs(x2 - u2)) / (u2 - u1) + (tl.abs(y1 - v1) + tl.abs(y2 - v2)) / (v2 - v1))
    focus = lam * tl.exp(-p)
    return 3.0 * focus * tl.exp(-focus * focus) * (overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps) + 1.0 - tl.exp(-p * p))


@boxes(hyper={"low": 0.0, "high": 0.95, "eps": 1e-7})
@triton.jit
def focaler_iou(x1, y1, x2, y2, u1, v1, u2, v2, low, high, eps):
    """L = 1 - (IoU - d) / (u - d), kept in [0, 1]: only boxes whose IoU lies between d and u count (arXiv 2401.10525)."""
    iou = 1.0 - overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    return 1.0 - tl.clamp((iou - low) / (high - low), 0.0, 1.0)


@boxes(hyper={"alpha": 3.0, "eps": 1e-7})
@triton.jit
def alpha_iou(x1, y1, x2, y2, u1, v1, u2, v2, alpha, eps):
    """L = 1 - IoU^α: above 1, boxes that overlap well weigh more (arXiv 2110.13675)."""
    iou = 1.0 - overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    return 1.0 - tl.exp(alpha * tl.log(tl.maximum(iou, 1e-7)))


@boxes(hyper={"eps": 1e-7})
@triton.jit
def wiou_v1(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """L = exp(ρ²/c²) (1 - IoU), ρ the distance of the centres, c the diagonal of the smallest box around both, held (arXiv 2301.10051)."""
    dx, dy = 0.5 * (x1 + x2 - u1 - u2), 0.5 * (y1 + y2 - v1 - v2)
    w, h = tl.maximum(x2, u2) - tl.minimum(x1, u1), tl.maximum(y2, v2) - tl.minimum(y1, v1)
    return tl.exp((dx * dx + dy * dy) / hold(w * w + h * h + eps)) * overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps)


def wiou_v2(input: Tensor, target: Tensor, mean: Tensor, gamma: float = 0.5) -> Tensor:
    """Return the mean of WIoU v1, each times (L*/mean)^γ, held: L* = 1 - IoU, and `mean` (), its running mean, which the caller keeps."""
    outlier = box_iou_loss(input.detach(), target) / mean
    return wiou_v1(input, target, weight=outlier**gamma)


def wiou_v3(input: Tensor, target: Tensor, mean: Tensor, alpha: float = 1.9, delta: float = 3.0) -> Tensor:
    """Return the mean of WIoU v1, each times β / (δ α^(β - δ)), held, β = (1 - IoU) / mean: boxes of middling quality weigh most."""
    outlier = box_iou_loss(input.detach(), target) / mean
    return wiou_v1(input, target, weight=outlier / (delta * alpha ** (outlier - delta)))
