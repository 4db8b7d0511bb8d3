"""Masks: thin structures whose connection counts, and small regions. Both take logits (N, 2, …) and class indices (N, …)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses import tversky_loss


def eroded(p: Tensor) -> Tensor:
    """Return the least of each pixel's neighbours along the axes."""
    pool = F.max_pool2d if p.ndim == 4 else F.max_pool3d
    windows = [tuple(3 if axis == own else 1 for axis in range(p.ndim - 2)) for own in range(p.ndim - 2)]
    return torch.stack([-pool(-p, size, 1, tuple(n // 2 for n in size)) for size in windows]).amin(0)


def soft_skeleton(p: Tensor, iterations: int) -> Tensor:
    """Return what each erosion loses that a dilation does not give back. p: (N, C, H, W) or (N, C, D, H, W)."""
    dilated = F.max_pool2d if p.ndim == 4 else F.max_pool3d
    skeleton = torch.zeros_like(p)
    for _ in range(iterations + 1):
        smaller = eroded(p)
        thin = F.relu(p - dilated(smaller, 3, 1, 1))
        skeleton = skeleton + F.relu(thin - skeleton * thin)
        p = smaller
    return skeleton


def soft_cldice_loss(input: Tensor, target: Tensor, iterations: int = 3, smooth: float = 1.0) -> Tensor:
    """Return 1 - 2 T S / (T + S), T = (Σ sk(p) y + s) / (Σ sk(p) + s), S = (Σ sk(y) p + s) / (Σ sk(y) + s) (clDice, arXiv 2003.07311).

    T is the precision and S the sensitivity of the skeletons sk of class 1 in each image; s: smooth. The result is the mean of all images.
    iterations: at least the largest radius of the structures, in pixels.
    """
    p, y = input.softmax(1)[:, 1:], target[:, None].to(input.dtype)
    predicted, true = soft_skeleton(p, iterations), soft_skeleton(y, iterations)
    right, found, of_skeleton, of_target = (t.flatten(1).sum(1) + smooth for t in (predicted * y, true * p, predicted, true))
    precision, sensitivity = right / of_skeleton, found / of_target
    return (1 - 2 * precision * sensitivity / (precision + sensitivity)).mean()


def unified_focal_loss(input: Tensor, target: Tensor, weight: float = 0.5, delta: float = 0.7, gamma: float = 0.5) -> Tensor:
    """Return λ F + (1 - λ) T, the asymmetric unified focal loss (arXiv 2102.04525) of background 0 and foreground 1; λ: weight.

    F is the mean over pixels and both classes of (1 - δ) (1 - p)^γ (-ln p) where y = 0 and δ (-ln p) where y = 1. T is the mean over
    images and both classes of the Tversky loss with α = 1 - δ and β = δ, to the power 1 - γ for class 1.
    """
    background, foreground = tversky_loss(
        input, target, alpha=1 - delta, beta=delta, smooth_nr=1e-7, smooth_dr=1e-7, reduction="none"
    ).unbind(1)
    tversky = 0.5 * (background + foreground ** (1 - gamma)).mean()
    nll = F.cross_entropy(input, target, reduction="none")
    share = torch.where(target == 1, delta, (1 - delta) * (-torch.expm1(-nll)) ** gamma)
    return weight * 0.5 * (share * nll).mean() + (1 - weight) * tversky
