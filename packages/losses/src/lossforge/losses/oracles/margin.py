"""Losses of cosines with a margin by angles and one-hot targets, as the papers write them, without any code of ours."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
