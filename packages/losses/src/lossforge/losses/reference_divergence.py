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
    teacher = a.target if a.values is None else a.values
    dtype = torch.float64 if torch.float64 in (a.x.dtype, teacher.dtype) else torch.float32
    x, teacher = a.x.to(dtype), teacher.to(dtype)
    keep = torch.ones_like(x[:, 0], dtype=torch.bool)
    weight = None if a.weight is None else a.weight.to(dtype)
    if a.labels is not None:
        keep = keep & (a.labels != a.ignore_index)
    if weight is not None and not weight.requires_grad:  # else what changes with a weight of 0 is its gradient
        keep = keep & (weight != 0)
    x, teacher = (torch.where(keep.unsqueeze(1), t, 0.0) for t in (x, teacher))
    lp = x.div(a.temperature).log_softmax(1)
    if a.values is None:
        lq = teacher.div(a.temperature).log_softmax(1)
        values = FORMULAS[a.loss].twin(*((lq, lp) if a.swap else (lp, lq)), *a.hyper).sum(1)
    else:
        values = _topk(a, lp, teacher, keep)
    counts = keep.to(dtype) if weight is None else torch.where(keep, weight, 0.0)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = counts.sum()
    return reduced(values * counts, a.factor, divisor, a.reduction, a.empty_is_zero)


def _topk(a: Arguments, lp: Tensor, given: Tensor, keep: Tensor) -> Tensor:
    renormalize, tail = a.hyper
    index = torch.where(keep.unsqueeze(1), a.target.long(), -1)
    classes = lp.shape[1]
    member = (index >= 0) & (index < classes)
    lq = torch.where(index == -1, -torch.inf, given)
    if renormalize:
        # a row without entries: nothing, rather than nan from a softmax of nothing
        some = (lq > -torch.inf).any(1, keepdim=True)
        lq = torch.where(some, torch.where(some, lq, 0.0).div(a.temperature).log_softmax(1), -torch.inf)
    own = torch.where(member, lp.gather(1, index.clamp(0, classes - 1)), -torch.inf)
    values = FORMULAS[a.loss].twin(own, lq, bool(tail)).sum(1)
    return torch.where(((index != -1) & ~member).any(1), torch.nan, values)
