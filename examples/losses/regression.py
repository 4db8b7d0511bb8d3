"""Losses of differences d = x - y, one formula each; the gradient is derived."""

import triton
import triton.language as tl

from lossforge.losses import elementwise


@elementwise(hyper={"width": 10.0, "epsilon": 2.0})
@triton.jit
def wing(x, y, width, epsilon):
    """Landmarks (arXiv 1711.06753): L = w ln(1 + |d|/ε) where |d| < w, else |d| - w + w ln(1 + w/ε)."""
    d = tl.abs(x - y)
    near = width * tl.log(1.0 + d / epsilon)
    return tl.where(d < width, near, d - width + width * tl.log(1.0 + width / epsilon))


@elementwise(hyper={"omega": 14.0, "theta": 0.5, "epsilon": 1.0, "alpha": 2.1})
@triton.jit
def adaptive_wing(x, y, omega, theta, epsilon, alpha):
    """Heatmaps (arXiv 1904.07399): L = ω ln(1 + (|d|/ε)^(α - y)) where |d| < θ, else the tangent at θ."""
    d, p = tl.abs(x - y), alpha - y
    near = omega * tl.log(1.0 + tl.exp(p * tl.log(tl.maximum(d / epsilon, 1e-12))))
    end = tl.exp(p * tl.log(theta / epsilon))  # (θ/ε)^p
    slope = omega * p * end / (theta * (1.0 + end))
    return tl.where(d < theta, near, slope * (d - theta) + omega * tl.log(1.0 + end))


@elementwise(hyper={"threshold": 0.2})
@triton.jit
def berhu(x, y, threshold):
    """Depth (arXiv 1606.00373): L = |d| up to c, else (d² + c²) / 2c. There c is a fifth of the batch's largest |d|."""
    d = tl.abs(x - y)
    return tl.where(d <= threshold, d, (d * d + threshold * threshold) / (2.0 * threshold))


@elementwise(hyper={"tau": 0.7})
@triton.jit
def expectile(x, y, tau):
    """Newey and Powell 1987; implicit Q-learning (arXiv 2110.06169): L = |τ - [y < x]| d²."""
    d = x - y
    return tl.where(d > 0.0, 1.0 - tau, tau) * d * d


@elementwise(hyper={"epsilon": 1e-3})
@triton.jit
def charbonnier(x, y, epsilon):
    """Super-resolution (arXiv 1704.03915): L = sqrt(d² + ε²)."""
    d = x - y
    return tl.sqrt(d * d + epsilon * epsilon)


@elementwise
@triton.jit
def log_l1(x, y):
    """Depth (arXiv 1803.08673): L = ln(1 + |d|)."""
    return tl.log(1.0 + tl.abs(x - y))
