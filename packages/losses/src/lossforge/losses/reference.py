"""The templates in plain torch: any device and floating dtype, differentiable in every floating argument, as often as one likes.

This is what runs where the kernels do not, and what they are tested against. Arguments are those of the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.checks import nonzero
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.formulas.softmax import focused

if TYPE_CHECKING:
    from lossforge.losses.operators.boxes import Arguments as Boxes
    from lossforge.losses.operators.contrastive import Arguments as Contrastive
    from lossforge.losses.operators.elementwise import Arguments as Elementwise
    from lossforge.losses.operators.rowwise import Arguments as Rowwise


ROW_MEAN = "mean of rows"
"""The reduction of element-wise losses that sums over the classes and takes the mean of the rows not ignored."""


def _accurate(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def reduced(values: Tensor, scale: float, divisor: Tensor | None, reduction: str, empty_is_zero: bool) -> Tensor:
    # by a number, torch.func.jvp gives the sum of float32 a tangent of float64
    factor = torch.full((), scale, dtype=values.dtype, device=values.device)
    result = (values if reduction == "none" else values.sum()) * factor
    if divisor is None:
        return result
    divisor = divisor.to(values.dtype)
    if not empty_is_zero:
        return result / divisor
    nothing = divisor == 0
    return torch.where(nothing, 0.0, result / torch.where(nothing, 1.0, divisor))


def _one_hot(index: Tensor, classes: int, ignore_index: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y along `dim`, and per row whether it counts; nan where an index is out of range."""
    index = index.long()
    counts = index != ignore_index
    columns = torch.arange(classes, device=index.device)
    y = (index.unsqueeze(-1) == columns).to(dtype)
    y = torch.where((counts & ((index < -1) | (index >= classes))).unsqueeze(-1), torch.nan, y)
    return y.movedim(-1, dim), counts.unsqueeze(dim)


def _diagonal(x: Tensor, dim: int, offset: int) -> Tensor:
    """y of a matrix x: 1 in column row + offset along `dim`."""
    rows, columns = (torch.arange(n, device=x.device) for n in (x.shape[1 - dim % 2], x.shape[dim]))
    return (rows.unsqueeze(dim) + offset == columns.unsqueeze(1 - dim % 2)).to(x.dtype)


def elementwise(a: Elementwise) -> Tensor:
    x = _accurate(a.x)
    indices = a.target is not None and not a.target.is_floating_point()
    if a.target is None:
        y, counts = _diagonal(x, a.dim, a.offset), None
    elif indices:
        classes, dim = x.shape[a.dim], a.dim % x.ndim
        y, counts = _one_hot(a.target, classes, a.ignore_index, dim, x.dtype)
        if a.target_b is None and a.lam is not None:
            y = torch.where(y == 1, a.lam.to(x.dtype).unsqueeze(dim), y)
        elif a.target_b is not None and a.lam is not None:
            y_b, counts_b = _one_hot(a.target_b, classes, a.ignore_index, dim, x.dtype)
            lam = a.lam.to(x.dtype).unsqueeze(dim)
            y = torch.where(counts, lam * y, 0.0) + torch.where(counts_b, (1 - lam) * y_b, 0.0)
            counts = counts | counts_b
        x = torch.where(counts, x, 0.0)
    else:
        y, counts = a.target.to(x.dtype), None
    hyper = a.hyper if a.parameter is None else [*a.hyper, a.parameter.to(x.dtype)]
    values = FORMULAS[a.loss].twin(x, y, *hyper)
    if indices:
        values = torch.where(y.isnan(), torch.nan, values)
    if a.weight is not None:
        values = values * a.weight
    if a.group is not None and a.group_weight is not None:
        group = a.group.long()
        exists = (group >= 0) & (group < len(a.group_weight))
        values = values * torch.where(exists, a.group_weight[group.clamp(0, len(a.group_weight) - 1)], torch.nan)
    if counts is not None:
        values = torch.where(counts, values, 0.0)
    divisor = a.normalizer
    if divisor is None and a.reduction in ("mean", ROW_MEAN):
        divisor = torch.tensor(x.numel(), device=x.device) if counts is None else counts.expand(x.shape).sum()
    result = reduced(values, a.factor, divisor, a.reduction, a.empty_is_zero)
    return result.to(a.x.dtype) if a.reduction == "none" else result


def _corners(b: Tensor) -> Tensor:
    center, half = b[..., :2], b[..., 2:] / 2
    return torch.cat([center - half, center + half], -1)


def boxes(a: Boxes) -> Tensor:
    boxes1 = _accurate(a.boxes1)
    boxes2 = a.boxes2.to(boxes1.dtype)
    if a.centered:
        boxes1, boxes2 = _corners(boxes1), _corners(boxes2)
    values = FORMULAS[a.loss].twin(boxes1, boxes2, *a.hyper)
    if a.weight is not None:
        values = values * a.weight.to(values.dtype)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=values.device)
    return reduced(values, a.scale, divisor, a.reduction, a.empty_is_zero)


class RowResult(NamedTuple):
    loss: Tensor
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None


def _entropy(x: Tensor) -> Tensor:
    log_p = x.log_softmax(1)
    p = log_p.exp()
    return torch.where(p.isnan(), torch.nan, torch.where(p > 0, -p * torch.where(p > 0, log_p, 0.0), 0.0)).sum(1)


def _correct(x: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """Whether the first of the largest logits is the row's class."""
    columns = torch.arange(x.shape[1], device=x.device).view(1, -1, *(1,) * (x.ndim - 2))
    best = torch.where(x == x.amax(1, keepdim=True), columns, x.shape[1]).amin(1)
    return keep & (best == target)


def row_weight(index: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Of each row the weight of its class; 0 where it is ignored or out of range."""
    index = index.long()
    classes = len(weight)
    valid = (index >= 0) & (index < classes) & (index != ignore_index)
    return torch.where(valid, weight[index.clamp(0, classes - 1)], 0.0)


def _hard(log_p: Tensor, index: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Per row: -ln p of its class, nan where the index is out of range, and the class's weight, 0 where ignored."""
    index = index.long()
    counts = index != ignore_index
    classes = log_p.shape[1]
    valid = (index >= 0) & (index < classes)
    nll = -log_p.gather(1, index.clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
    w = counts.to(nll.dtype) if weight is None else row_weight(index, weight, ignore_index).to(nll.dtype)
    return torch.where(counts & ~valid, torch.nan, nll), w


def _weighted(formula: Callable[..., Tensor], hyper: list[float], nll: Tensor, w: Tensor) -> Tensor:
    """φ(nll) · w, 0 where a class of weight 0 has a logit of -inf; each factor keeps its derivative where the other is 0."""
    return formula(torch.where((w == 0) & nll.isinf(), 0.0, nll), *hyper) * w


def rowwise(a: Rowwise) -> RowResult:
    x = _accurate(a.x) * a.scale
    if a.softcap is not None:
        x = a.softcap * torch.tanh(x / a.softcap)
    per_class = (1, -1) + (1,) * (x.ndim - 2)
    if a.bias is not None:
        x = x + a.tau * a.bias.to(x.dtype).view(per_class)
    weight = None if a.weight is None else a.weight.to(x.dtype)
    want_z_loss, want_lse, want_entropy, want_correct = a.outputs
    lse = x.logsumexp(1) if nonzero(a.z_loss) or want_z_loss or want_lse else None
    dense, formula = None, FORMULAS[a.loss].twin
    divisor: Tensor | None
    if a.target.is_floating_point():
        log_p, dense = x.log_softmax(1), a.target.to(x.dtype) * (1 - a.label_smoothing)
        values = torch.zeros_like(x[:, 0])
        keep, divisor = torch.ones_like(values, dtype=torch.bool), torch.tensor(values.numel(), device=x.device)
    else:
        keep = a.target != a.ignore_index
        if a.target_b is not None:
            keep = keep | (a.target_b != a.ignore_index)
        log_p = torch.where(keep.unsqueeze(1), x, 0.0).log_softmax(1)
        nll, w = _hard(log_p, a.target, weight, a.ignore_index)
        if a.target_b is not None and a.lam is not None:
            lam = a.lam.to(x.dtype)
            nll_b, w_b = _hard(log_p, a.target_b, weight, a.ignore_index)
            w, w_b = lam * w, (1 - lam) * w_b
            values = _weighted(formula, a.hyper, nll, w) + _weighted(formula, a.hyper, nll_b, w_b)
            w = w + w_b
        else:
            values = _weighted(formula, a.hyper, nll, w)
        values, divisor = values * (1 - a.label_smoothing), w.sum()
        if nonzero(a.spread):
            values = values + w * (a.spread * focused(-log_p, a.focus)).sum(1)
        if a.mean_of_rows:
            divisor = keep.sum()
    if nonzero(a.label_smoothing) or dense is not None:
        q = torch.zeros_like(x) if dense is None else dense
        q = q + a.label_smoothing / x.shape[1]
        if weight is not None:
            q = q * weight.view(per_class)
        values = values - (q * torch.where((q == 0) & log_p.isinf(), 0.0, log_p)).sum(1)
    z_loss = None if lse is None else torch.where(keep, a.z_loss * lse.square(), 0.0)
    if nonzero(a.z_loss) and z_loss is not None:
        values = values + z_loss
    values = torch.where(keep, values, 0.0)
    if a.normalizer is not None:
        divisor = a.normalizer
    elif a.reduction != "mean":
        divisor = None

    def total(v: Tensor) -> Tensor:
        return reduced(v, a.factor, divisor, a.reduction, a.empty_is_zero)

    return RowResult(
        total(values),
        total(z_loss) if want_z_loss and z_loss is not None else None,
        lse if want_lse else None,
        _entropy(x) if want_entropy else None,
        _correct(x, a.target, keep) if want_correct else None,
    )


def contrastive(a: Contrastive) -> Tensor:
    x = _accurate(a.x) * a.scale
    pairs = x.shape[0]
    own = x.diagonal(a.offset)[:pairs]
    columns = x[:, a.offset : a.offset + pairs]
    values = 0.5 * (x.logsumexp(1) - own) + 0.5 * (columns.logsumexp(0) - own) if x.numel() else x.sum(1)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = torch.tensor(pairs, device=x.device)
    return reduced(values, a.factor, divisor, a.reduction, a.empty_is_zero)
