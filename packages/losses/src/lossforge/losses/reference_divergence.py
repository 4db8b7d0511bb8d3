"""The divergence template in plain torch, as reference.py has the others: differentiable in logits, teacher and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.reference import reduced

if TYPE_CHECKING:
    from lossforge.losses.operators.divergence import Arguments


def divergence(a: Arguments) -> Tensor:
    dtype = torch.float64 if torch.float64 in (a.x.dtype, a.target.dtype) else torch.float32
    x, teacher = a.x.to(dtype), a.target.to(dtype)
    keep = torch.ones_like(x[:, 0], dtype=torch.bool)
    weight = None if a.weight is None else a.weight.to(dtype)
    if a.labels is not None:
        keep = keep & (a.labels != a.ignore_index)
    if weight is not None:
        keep = keep & (weight != 0)
    lp, lq = (torch.where(keep.unsqueeze(1), t, 0.0).div(a.temperature).log_softmax(1) for t in (x, teacher))
    values = FORMULAS[a.loss].twin(*((lq, lp) if a.swap else (lp, lq)), *a.hyper).sum(1)
    counts = keep.to(dtype) if weight is None else torch.where(keep, weight, 0.0)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = counts.sum()
    return reduced(values * counts, a.factor, divisor, a.reduction, a.empty_is_zero)
