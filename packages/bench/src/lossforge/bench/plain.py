"""Each loss in a few lines of plain torch, as someone without a kernel writes it: what others' speed and everyone's result is judged by.

The functions take the logits, the target, further tensors and options by the names that the loss gives them; any floating dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[..., Tensor]


def eager(loss: str) -> Call:
    """Torch's own computation, which is also the reference in float64."""
    return _EAGER[loss]


def one_hot(x: Tensor, target: Tensor) -> Tensor:
    """A background row has no class."""
    return target if target.is_floating_point() else (target.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)).to(x.dtype)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.mean()


def _cross_entropy(
    x: Tensor, target: Tensor, *, target_b: Tensor | None = None, lam: float = 1.0, weight: Tensor | None = None, **options: Any
) -> Tensor:
    value = F.cross_entropy(x, target, weight, **options)
    return value if target_b is None else lam * value + (1 - lam) * F.cross_entropy(x, target_b, weight, **options)


def _focal(x: Tensor, target: Tensor, *, alpha: float, gamma: float, reduction: str) -> Tensor:
    """torchvision.ops.sigmoid_focal_loss's arithmetic, so that measuring needs no torchvision."""
    y = one_hot(x, target)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    return _reduced((alpha * y + (1 - alpha) * (1 - y)) * entropy * (1 - p_t) ** gamma, reduction)


def _preference_bce(x: Tensor, target: Tensor, *, preference: Tensor, reduction: str = "mean") -> Tensor:
    return F.binary_cross_entropy_with_logits(x, target, preference, reduction=reduction)


def _bce_smoothed(x: Tensor, target: Tensor, *, smoothing: float, reduction: str) -> Tensor:
    y = one_hot(x, target) * (1 - smoothing) + smoothing / x.shape[-1]
    return F.binary_cross_entropy_with_logits(x, y, reduction=reduction)


def _asymmetric(x: Tensor, target: Tensor, *, gamma_neg: float, gamma_pos: float, clip: float, reduction: str) -> Tensor:
    p = x.sigmoid()
    s = (p - clip).clamp(min=0)
    entropy = target * F.logsigmoid(x) + (1 - target) * torch.log1p(-s)
    base = target * (1 - p) + (1 - target) * s
    return _reduced(-(base ** (gamma_pos * target + gamma_neg * (1 - target))) * entropy, reduction)


def _poly_bce(x: Tensor, target: Tensor, *, epsilon: float, reduction: str) -> Tensor:
    p = x.sigmoid()
    values = F.binary_cross_entropy_with_logits(x, target, reduction="none") + epsilon * (1 - p * target - (1 - p) * (1 - target))
    return _reduced(values, reduction)


def _scored(x: Tensor, target: Tensor, score: Tensor) -> Tensor:
    return one_hot(x, target) * score.unsqueeze(-1)


def _quality_focal(x: Tensor, target: Tensor, *, score: Tensor, beta: float, reduction: str) -> Tensor:
    y = _scored(x, target, score)
    values = (y - x.sigmoid()).abs() ** beta * F.binary_cross_entropy_with_logits(x, y, reduction="none")
    return _reduced(values, reduction)


def _varifocal(x: Tensor, target: Tensor, *, score: Tensor, alpha: float, gamma: float, reduction: str) -> Tensor:
    y = _scored(x, target, score)
    factor = torch.where(y > 0, y, alpha * x.sigmoid() ** gamma)
    return _reduced(factor * F.binary_cross_entropy_with_logits(x, y, reduction="none"), reduction)


def _siglip(x: Tensor, *, reduction: str = "mean") -> Tensor:
    labels = 2 * torch.eye(len(x), x.shape[1], dtype=x.dtype, device=x.device) - 1
    return -F.logsigmoid(labels * x).sum() / (len(x) if reduction == "mean" else 1)


_EAGER: dict[str, Call] = {
    "ce": _cross_entropy,
    "focal": _focal,
    "mae": F.l1_loss,
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "preference_bce": _preference_bce,
    "bce_smoothed": _bce_smoothed,
    "asymmetric": _asymmetric,
    "poly_bce": _poly_bce,
    "quality_focal": _quality_focal,
    "varifocal": _varifocal,
    "siglip": _siglip,
}
