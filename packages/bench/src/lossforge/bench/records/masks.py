"""Losses of maps of classes: overlaps of regions, their boundaries, and the Lovász extension."""

from __future__ import annotations

from typing import Any

from lossforge.bench.record import F, Tensor, loss, reduced, summed, torch, whole, wide
from lossforge.bench.records.classes import MAPS, SEGMENTATION

OVERLAP: Any = {"template": "overlap", "late": True}
SMOOTH = 1e-5
"""Added to numerator and denominator, as in MONAI."""


def maps(options: dict[str, Any] | None = None, other: dict[str, Any] | None = None) -> Any:
    return summed(SEGMENTATION, MAPS, "classes", (options or {}) | {"reduction": "mean"}, other, whole=True)


def regions(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ p y, Σ p and Σ y over the pixels of each class of each image."""
    p = x.softmax(1)
    y = torch.zeros_like(p).scatter_(1, target.unsqueeze(1), 1.0)
    return (p * y).sum((2, 3)), p.sum((2, 3)), y.sum((2, 3))


@loss("dice", "Dice", maps(), **OVERLAP)
def dice(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as monai.losses.DiceLoss does (arXiv 1606.04797)."""
    i, p, y = regions(x, target)
    return reduced(1 - (2 * i + SMOOTH) / (p + y + SMOOTH), reduction)


@loss("jaccard", "Jaccard", maps(), **OVERLAP)
def jaccard(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    i, p, y = regions(x, target)
    return reduced(1 - (i + SMOOTH) / (p + y - i + SMOOTH), reduction)


def tversky_index(x: Tensor, target: Tensor, alpha: float, beta: float) -> Tensor:
    i, p, y = regions(x, target)
    return (i + SMOOTH) / (i + alpha * (p - i) + beta * (y - i) + SMOOTH)


@loss("tversky", "Tversky", maps({"alpha": 0.3, "beta": 0.7}, {"alpha": 0.5}), **OVERLAP)
def tversky(x: Tensor, target: Tensor, *, alpha: float, beta: float, reduction: str) -> Tensor:
    """Compute as monai.losses.TverskyLoss does (arXiv 1706.05721)."""
    return reduced(1 - tversky_index(x, target, alpha, beta), reduction)


@loss("focal_tversky", "focal Tversky", maps({"alpha": 0.3, "beta": 0.7, "gamma": 0.75}, {"gamma": 0.5}), **OVERLAP)
def focal_tversky(x: Tensor, target: Tensor, *, alpha: float, beta: float, gamma: float, reduction: str) -> Tensor:
    """Compute as the authors' code does (arXiv 1810.07842)."""
    return reduced((1 - tversky_index(x, target, alpha, beta)) ** gamma, reduction)


@loss("dice_ce", "Dice + cross entropy", maps({"lambda_dice": 1.0, "lambda_ce": 1.0}, {"lambda_ce": 0.5}), **OVERLAP)
def dice_ce(x: Tensor, target: Tensor, *, lambda_dice: float, lambda_ce: float, reduction: str) -> Tensor:
    """Compute as monai.losses.DiceCELoss does."""
    return lambda_dice * dice(x, target, reduction=reduction) + lambda_ce * F.cross_entropy(x, target, reduction=reduction)


@loss("generalized_dice", "generalised Dice", maps(), function="generalized_dice_loss", **OVERLAP)
def generalized_dice(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as monai.losses.GeneralizedDiceLoss does (arXiv 1707.03237)."""
    i, p, y = regions(x, target)
    w = 1 / y.square()
    w = torch.where(w.isinf(), torch.where(w.isinf(), 0.0, w).amax(1, keepdim=True), w)
    return reduced(1 - (2 * (w * i).sum(1) + SMOOTH) / ((w * (p + y)).sum(1) + SMOOTH), reduction)


@loss("mcc", "Matthews correlation", maps(), function="mcc_loss", **OVERLAP)
def mcc(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as monai.losses.MCCLoss does (arXiv 2010.13454), in shares of the pixels, whose products do not overflow."""
    m = target[0].numel()
    i, p, y = (sums / m for sums in regions(x, target))
    return reduced(1 - (i - p * y) / (p * y * (1 - p) * (1 - y) + SMOOTH / m**4).sqrt(), reduction)


@loss("boundary", "boundary, maps given", summed(SEGMENTATION, MAPS, "distance maps"), function="boundary_loss")
def boundary(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 1812.07032, of maps that a data loader computed."""
    return reduced((wide(x).softmax(1) * target).mean((2, 3)), reduction)


def lovasz(errors: Tensor, own: Tensor) -> Tensor:
    """Compute the authors' loss of regions (…, pixels), with their weights as fractions: as differences in float32 they are a tenth off."""
    errors, order = errors.sort(descending=True, stable=True)
    own = own.gather(-1, order)
    total = own.sum(-1, keepdim=True)
    rest = total - own.cumsum(-1)
    union = (rest + torch.arange(1, own.shape[-1] + 1, device=own.device)).to(errors.dtype)
    return (errors.relu() * torch.where(own, 1 / union, rest / (union * (union - 1).clamp(min=1)))).sum(-1)


@loss("lovasz_softmax", "Lovász-softmax", whole(SEGMENTATION, MAPS, "classes"), late=True)
def lovasz_softmax(x: Tensor, target: Tensor) -> Tensor:
    classes = torch.arange(x.shape[1], device=x.device).view(1, -1, *(1,) * (x.ndim - 2))
    own = target.unsqueeze(1) == classes
    errors, own = (t.transpose(0, 1).flatten(1) for t in ((wide(x).softmax(1) - own.to(x.dtype)).abs(), own))
    present = own.any(1)
    return torch.where(present, lovasz(errors, own), 0.0).sum() / present.sum().clamp(min=1)


@loss("lovasz_hinge", "Lovász hinge", whole("masks-512", (32, 512, 512), "mask", {"per_image": True}), late=True)
def lovasz_hinge(x: Tensor, target: Tensor, *, per_image: bool) -> Tensor:
    assert per_image
    return lovasz((1 - wide(x) * (2 * target - 1)).flatten(1), (target == 1).flatten(1)).mean()
