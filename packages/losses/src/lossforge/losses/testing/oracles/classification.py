"""Losses of rows of classes from the references' formulas over one-hot targets, or from timm, without any code of ours."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _probability(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return (p_t, whether the row counts)."""
    keep = target != ignore_index
    one_hot = F.one_hot(torch.where(keep, target.long(), 0), x.shape[1]).movedim(-1, 1).to(x.dtype)
    return (x.softmax(1) * one_hot).sum(1), keep


def _of_class(values: Tensor | None, target: Tensor, keep: Tensor) -> Tensor | float:
    return 1.0 if values is None else values[torch.where(keep, target.long(), 0)]


def _reduced(loss: Tensor, keep: Tensor, divisor: Tensor, reduction: str) -> Tensor:
    loss = torch.where(keep, loss, 0.0)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / divisor


def _smoothed(x: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return (the target's probabilities, smoothed, whether the row counts)."""
    if target.is_floating_point():
        q, keep = target.to(x.dtype), torch.ones_like(x[:, 0], dtype=torch.bool)
    else:
        keep = target != ignore_index
        q = F.one_hot(torch.where(keep, target.long(), 0), x.shape[1]).movedim(-1, 1).to(x.dtype)
    return q * (1 - label_smoothing) + label_smoothing / x.shape[1], keep


def _by_class(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.ndim - 2))


def softmax_focal(x, target, alpha=None, gamma=2.0, reduction="none", weight=None, ignore_index=-100, label_smoothing=0.0):
    """Compute as kornia.losses.focal_loss does, summed over its classes, with the mean over the rows that count."""
    q, keep = _smoothed(x, target, ignore_index, label_smoothing)
    p = x.softmax(1)
    loss = q * (1 - p) ** gamma * -p.log()
    if weight is not None:
        loss = loss * _by_class(weight, x)
    if isinstance(alpha, Tensor):
        loss = loss * _by_class(alpha, x)
    elif alpha is not None:
        first = torch.arange(x.shape[1], device=x.device) == 0
        loss = loss * _by_class(torch.where(first, 1 - alpha, alpha), x)
    return _reduced(loss.sum(1), keep, keep.sum(), reduction)


def poly_ce(x, target, epsilon=2.0, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """Compute as the paper's code does: smooth the targets, then CE + ε Σ q (1 - p)."""
    q, keep = _smoothed(x, target, ignore_index, label_smoothing)
    p = x.softmax(1)
    each = q * (-p.log() + epsilon * (1 - p))
    if target.is_floating_point():
        return _reduced((each if weight is None else each * _by_class(weight, x)).sum(1), keep, keep.sum(), reduction)
    w = _of_class(weight, target, keep) * torch.where(keep, 1.0, 0.0)
    return _reduced(each.sum(1) * w, keep, w.sum(), reduction)


def generalized_ce(x, target, q=0.7, weight=None, ignore_index=-100, reduction="mean"):
    """Compute as the authors' code does: (1 - p_t^q) / q."""
    p, keep = _probability(x, target, ignore_index)
    w = _of_class(weight, target, keep) * torch.where(keep, 1.0, 0.0)
    return _reduced(((1 - p**q) / q if q else -p.log()) * w, keep, w.sum(), reduction)


def symmetric_ce(x, target, alpha=0.1, beta=1.0, log_zero=-4.0, weight=None, ignore_index=-100, reduction="mean"):
    """Compute as the authors' code does: the cross entropy, and that of the target, whose zeros are clamped, under the prediction."""
    p, keep = _probability(x, target, ignore_index)
    one_hot = F.one_hot(torch.where(keep, target.long(), 0), x.shape[1]).movedim(-1, 1).to(x.dtype)
    reverse = -(x.softmax(1) * one_hot.clamp(min=math.exp(log_zero)).log()).sum(1)
    w = _of_class(weight, target, keep) * torch.where(keep, 1.0, 0.0)
    return _reduced((alpha * -p.log() + beta * reverse) * w, keep, w.sum(), reduction)


def ohem_ce(x, target, threshold=0.7, min_kept=100_000, weight=None, ignore_index=-100, reduction="mean"):
    """Compute by sorting the probabilities of the rows that count, as segmentation libraries do."""
    p, keep = _probability(x, target, ignore_index)
    smallest = p[keep].sort().values
    least = smallest[min(min_kept, len(smallest)) - 1].item() if min_kept and len(smallest) else -1.0
    keep = keep & ((p < threshold) | (p <= least))
    w = _of_class(weight, target, keep) * torch.where(keep, 1.0, 0.0)
    return _reduced(-p.log() * w, keep, w.sum(), reduction)


def logit_adjusted_ce(x, target, log_prior=None, tau=1.0, scale=1.0, **options):
    """Compute as the authors' code does: torch's cross entropy of adjusted logits."""
    x = x * scale
    if log_prior is not None:
        x = x + tau * log_prior.view(-1, *(1,) * (x.ndim - 2))
    return F.cross_entropy(x, target, **options)


def asymmetric_single_label(x, target, reduction="mean", weight=None, ignore_index=-100, **options):
    """Compute timm.loss.AsymmetricLossSingleLabel of each row, and reduce here, because timm has no sum."""
    from timm.loss import AsymmetricLossSingleLabel

    keep = target != ignore_index
    index = torch.where(keep, target.long(), 0)
    w = torch.where(keep, 1.0 if weight is None else weight[index], 0.0)
    rows = AsymmetricLossSingleLabel(**options, reduction="none")(x.movedim(1, -1).flatten(0, -2), index.flatten())
    loss = torch.where(keep, rows.view(target.shape), 0.0) * w
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / w.sum()


def ldam(x, target, margin=None, scale=30.0, **options):
    """Compute as the authors' code does: cross entropy of cosines, from which the margins of the targets' classes are subtracted."""
    known = torch.where((target >= 0) & (target < x.shape[1]), target, 0).long()
    own = torch.zeros_like(known, dtype=x.dtype) if margin is None else margin.to(x.dtype)[known]
    return _cross_entropy(x, x - own.unsqueeze(1), target, scale, **options)


def _cross_entropy(x: Tensor, moved: Tensor, target: Tensor, scale: float, **options: Any) -> Tensor:
    """Return the cross entropy of scaled cosines, of which the target's is taken from `moved`."""
    known = torch.where((target >= 0) & (target < x.shape[1]), target, 0).long()
    own = F.one_hot(known, x.shape[1]).movedim(-1, 1).bool()
    return F.cross_entropy(scale * torch.where(own, moved, x), target.long(), **options)


def arcface(x: Tensor, target: Tensor, margin: float = 0.5, scale: float = 64.0, **options: Any) -> Tensor:
    """Add the margin to the angle, and beyond π - margin take the authors' straight line."""
    near = 1 - 5e-8  # whose sine is the least that counts
    theta = torch.acos(x.clamp(-near, near))
    moved = torch.where(theta < math.pi - margin, torch.cos(theta + margin), x - margin * math.sin(math.pi - margin))
    return _cross_entropy(x, moved, target, scale, **options)


def cosface(x: Tensor, target: Tensor, margin: float = 0.35, scale: float = 64.0, **options: Any) -> Tensor:
    return _cross_entropy(x, x - margin, target, scale, **options)
