"""The overlap template in plain torch: see reference.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.reference import _accurate, reduced

if TYPE_CHECKING:
    from lossforge.losses.operators.overlap import Arguments


def overlap(a: Arguments) -> Tensor:
    x = _accurate(a.x)
    classes = x.shape[1]
    hard = not a.target.is_floating_point()
    counts = torch.ones((), dtype=torch.bool, device=x.device)
    if hard:
        index = a.target.long()
        keep = index != a.ignore_index
        counts = keep.unsqueeze(1)
        index = index - a.first
        columns = torch.arange(classes, device=x.device).view(1, -1, *(1,) * (x.ndim - 2))
        y = (counts & (index.unsqueeze(1) == columns)).to(x.dtype)
        invalid = (keep & ((index < -a.first) | (index >= classes))).unsqueeze(1)
        x = torch.where(counts, x, 0.0)
    else:
        y = a.target.to(x.dtype)
    p = x.softmax(1) if a.activation == "softmax" else x.sigmoid() if a.activation == "sigmoid" else x
    if hard:
        p = torch.where(counts, p * torch.where(invalid, torch.nan, 1.0), 0.0)

    def summed(t: Tensor) -> Tensor:
        """(N, classes that are included), or (classes,) of the batch."""
        sums = (t.flatten(2).sum(2) if t.ndim > 2 else t)[:, a.skip :]
        return sums.sum(0) if a.batch else sums

    sums = [summed(t) for t in (p * y, p * p if a.squared_pred else p, y * y if a.squared_pred else y)]
    if a.present_only:
        absent = (sums[2] == 0) & ~sums[1].isnan()
        sums = [torch.where(absent, 1.0, s) for s in sums]
    values = FORMULAS[a.loss].twin(*sums, *a.hyper)
    if a.present_only:
        values = torch.where(absent, 0.0, values)
    weight = None if a.weight is None else a.weight.to(x.dtype)
    if weight is not None:
        values = values * weight[a.skip :]
    divisor = a.normalizer
    if a.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=x.device)
    result = reduced(values, a.factor, divisor, a.reduction, a.empty_is_zero)
    return result if a.lambda_ce is None else result + _cross_entropy(a, x, y, counts, weight)


def _cross_entropy(a: Arguments, x: Tensor, y: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    """λ times the cross entropy of softmax, or the binary one of sigmoid; a mean over pixels, or over elements."""
    assert a.lambda_ce is not None
    w = torch.ones((), dtype=x.dtype, device=x.device) if weight is None else weight.view(1, -1, *(1,) * (x.ndim - 2))
    if a.activation == "softmax":
        log_p = x.log_softmax(1)
        values = -w * y * torch.where((y == 0) & log_p.isinf(), 0.0, log_p)
        count = w * y if a.counted_ce else torch.ones_like(x[:, 0])
    else:
        values = torch.where(counts, w * F.binary_cross_entropy_with_logits(x, y, reduction="none"), 0.0)
        count = counts.expand(x.shape)
    return reduced(values, a.lambda_ce, count.sum() if a.reduction == "mean" else None, a.reduction, a.empty_is_zero)
