"""A margin on the logit of each row's target, in plain torch."""

import math

import torch
from torch import Tensor

NARROW = 1e-7
"""The least square of a sine."""


def with_margin(x: Tensor, target: Tensor, angle: float | Tensor, margin: float | Tensor, margins: Tensor | None = None) -> Tensor:
    """Return cosines (N, C, d…) in which that of each row's class, cos θ, is cos(θ + angle) - margin - margins[class].

    angle: a number, or one a row, (N, 1, d…).
    """
    index = target.long().clamp(0, x.shape[1] - 1).unsqueeze(1)
    own = x.gather(1, index)
    margin = margin if margins is None else margin + margins.to(x.dtype)[index]
    cos, sin = (f(angle) if isinstance(angle, Tensor) else getattr(math, f.__name__)(angle) for f in (torch.cos, torch.sin))
    sine = (1 - own.clamp(-1, 1).square()).clamp(min=NARROW).sqrt()
    return x.scatter(1, index, torch.where(own > -cos, own * cos - sine * sin, own - angle * sin) - margin)
