"""The templates in plain torch: any device and floating dtype, differentiable in every floating argument, as often as one likes.

This is what runs where the kernels do not, and what they are tested against.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import BoxCall, DivergenceCall, ElementCall, OverlapCall, PairsCall, RowCall, TopKCall, end_of_tensors
from lossforge.losses.checks import nonzero
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.call import Fused

Form = TypeVar("Form", bound=Callable[[Any], Any])

_REFERENCES: dict[type, Callable[[Any], Tensor | tuple[Tensor | None, ...]]] = {}


def computes(*records: type) -> Callable[[Form], Form]:
    """Enter a template's plain-torch form: the function from a call of one of `records` to its results."""

    def enter(function: Form) -> Form:
        _REFERENCES.update(dict.fromkeys(records, function))
        return function

    return enter


def reference(call: Any) -> tuple[Tensor | None, ...]:
    """Return the results of a call."""
    if isinstance(call, Fused):
        teacher = call.teacher_layer
        return reference(call.on(F.linear(*call.layer), None if teacher is None else F.linear(*teacher)))
    found = _REFERENCES[type(call)](_of_dtype(call) if torch.compiler.is_compiling() else call)
    return (found,) if isinstance(found, Tensor) else found


def _of_dtype(call: Any) -> Any:
    """Return the call with numbers that are tensors in the dtype that the formulas are computed in."""
    end = end_of_tensors(call)
    wide = any(t is not None and t.dtype == torch.float64 for t in call[1:end])

    def value(v: Any) -> Any:
        if isinstance(v, list):
            return [value(each) for each in v]
        return v.to(torch.float64 if wide else torch.float32) if isinstance(v, Tensor) else v

    return type(call)(*call[:end], *[value(v) for v in call[end:]])


def accurate(t: Tensor) -> Tensor:
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


@computes(ElementCall)
def _elementwise(a: ElementCall) -> Tensor:
    x = accurate(a.x)
    indices = a.by_class
    if a.target is None:
        y, counts = _diagonal(x, a.dim, a.offset), None
    elif a.by_class:
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
    values = FORMULAS[a.loss].reference(x, y, *hyper)
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
    if divisor is None and a.mean:
        divisor = torch.tensor(x.numel(), device=x.device) if counts is None else counts.expand(x.shape).sum()
    result = reduced(values, a.factor, divisor, a.reduction, a.empty_is_zero)
    return result.to(a.x.dtype) if a.reduction == "none" else result


def _corners(b: Tensor) -> Tensor:
    center, half = b[..., :2], b[..., 2:] / 2
    return torch.cat([center - half, center + half], -1)


@computes(BoxCall)
def _boxes(a: BoxCall) -> Tensor:
    boxes1 = accurate(a.boxes1)
    boxes2 = a.boxes2.to(boxes1.dtype)
    if a.centered:
        boxes1, boxes2 = _corners(boxes1), _corners(boxes2)
    values = FORMULAS[a.loss].reference(boxes1, boxes2, *a.hyper)
    if a.weight is not None:
        values = values * a.weight.to(values.dtype)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=values.device)
    return reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)


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


def which_count(call: Any) -> Tensor:
    """Return which rows with class indices are not ignored; of a mixup pair, not both."""
    found: Tensor = call.target != call.ignore_index
    return found if call.target_b is None else found | (call.target_b != call.ignore_index)


def row_weights(call: RowCall, weight: Tensor | None) -> Tensor:
    """Return of each row the weight of its class, of a mixup pair both by their shares; without weights 1, 0 where it is ignored."""

    def of(index: Tensor) -> Tensor:
        return (index != call.ignore_index).float() if weight is None else row_weight(index, weight, call.ignore_index)

    if call.target_b is None or call.lam is None:
        return of(call.target)
    return call.lam * of(call.target) + (1 - call.lam) * of(call.target_b)


def _hard(log_p: Tensor, index: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Per row: -ln p of its class, nan where the index is out of range, and the class's weight, 0 where ignored."""
    index = index.long()
    counts = index != ignore_index
    classes = log_p.shape[1]
    valid = (index >= 0) & (index < classes)
    nll = -log_p.gather(1, index.clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
    w = counts.to(nll.dtype) if weight is None else row_weight(index, weight, ignore_index).to(nll.dtype)
    return torch.where(counts & ~valid, torch.nan, nll), w


def weighted(formula: Callable[..., Tensor], hyper: list[float], nll: Tensor, w: Tensor) -> Tensor:
    """φ(nll) · w, 0 where a class of weight 0 has a logit of -inf; each factor keeps its derivative where the other is 0."""
    return formula(torch.where((w == 0) & nll.isinf(), 0.0, nll), *hyper) * w


def focused(z: Tensor, gamma: float) -> Tensor:
    """p^γ z, 0 where p is; z itself at γ = 0."""
    if not isinstance(gamma, Tensor) and gamma == 0:
        return z
    near = z.clamp(max=1e30)
    return torch.exp(-gamma * near) * near


@computes(RowCall)
def _rowwise(a: RowCall) -> tuple[Tensor | None, ...]:
    x = accurate(a.x) * a.logit_scale
    if a.softcap is not None:
        x = a.softcap * torch.tanh(x / a.softcap)
    per_class = (1, -1) + (1,) * (x.ndim - 2)
    if a.bias is not None:
        x = x + a.tau * a.bias.to(x.dtype).view(per_class)
    weight = None if a.weight is None else a.weight.to(x.dtype)
    want_z_loss, want_lse, want_entropy, want_correct = a.outputs
    lse = x.logsumexp(1) if nonzero(a.z_loss) or want_z_loss or want_lse else None
    dense, formula = None, FORMULAS[a.loss].reference
    divisor: Tensor | None
    if a.target.is_floating_point():
        log_p, dense = x.log_softmax(1), a.target.to(x.dtype) * (1 - a.label_smoothing)
        values = torch.zeros_like(x[:, 0])
        keep, divisor = torch.ones_like(values, dtype=torch.bool), torch.tensor(values.numel(), device=x.device)
    else:
        keep = which_count(a)
        log_p = torch.where(keep.unsqueeze(1), x, 0.0).log_softmax(1)
        nll, w = _hard(log_p, a.target, weight, a.ignore_index)
        if a.target_b is not None and a.lam is not None:
            lam = a.lam.to(x.dtype)
            nll_b, w_b = _hard(log_p, a.target_b, weight, a.ignore_index)
            w, w_b = lam * w, (1 - lam) * w_b
            values = weighted(formula, a.hyper, nll, w) + weighted(formula, a.hyper, nll_b, w_b)
            w = w + w_b
        else:
            values = weighted(formula, a.hyper, nll, w)
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
        return reduced(v, a.loss_scale, divisor, a.reduction, a.empty_is_zero)

    return (
        total(values),
        total(z_loss) if want_z_loss and z_loss is not None else None,
        lse if want_lse else None,
        _entropy(x) if want_entropy else None,
        _correct(x, a.target, keep) if want_correct else None,
    )


@computes(PairsCall)
def _contrastive(a: PairsCall) -> Tensor:
    x = accurate(a.x) * a.logit_scale
    pairs = x.shape[0]
    own = x.diagonal(a.offset)[:pairs]
    columns = x[:, a.offset : a.offset + pairs]
    values = 0.5 * (x.logsumexp(1) - own) + 0.5 * (columns.logsumexp(0) - own) if x.numel() else x.sum(1)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = torch.tensor(pairs, device=x.device)
    return reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)


@computes(DivergenceCall, TopKCall)
def _divergence(a: DivergenceCall | TopKCall) -> Tensor:
    dtype = torch.float64 if torch.float64 in (a.x.dtype, a.target.dtype) else torch.float32
    x, teacher = a.x.to(dtype), a.target.to(dtype)
    keep = torch.ones_like(x[:, 0], dtype=torch.bool)
    weight = None if a.weight is None else a.weight.to(dtype)
    if a.labels is not None:
        keep = keep & (a.labels != a.ignore_index)
    if weight is not None and not weight.requires_grad:  # else what changes with a weight of 0 is its gradient
        keep = keep & (weight != 0)
    x, teacher = (torch.where(keep.unsqueeze(1), t, 0.0) for t in (x, teacher))
    lp = x.div(a.temperature).log_softmax(1)
    if isinstance(a, DivergenceCall):
        lq = teacher.div(a.temperature).log_softmax(1)
        values = FORMULAS[a.loss].reference(*((lq, lp) if a.swap else (lp, lq)), *a.hyper).sum(1)
    else:
        values = _topk(a, lp, teacher, keep)
    counts = keep.to(dtype) if weight is None else torch.where(keep, weight, 0.0)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = counts.sum()
    return reduced(values * counts, a.loss_scale, divisor, a.reduction, a.empty_is_zero)


def _topk(a: TopKCall, lp: Tensor, given: Tensor, keep: Tensor) -> Tensor:
    index = torch.where(keep.unsqueeze(1), a.indices.long(), -1)
    classes = lp.shape[1]
    member = (index >= 0) & (index < classes)
    lq = torch.where(index == -1, -torch.inf, given)
    if a.renormalize:
        # a row without entries: nothing, rather than nan from a softmax of nothing
        some = (lq > -torch.inf).any(1, keepdim=True)
        lq = torch.where(some, torch.where(some, lq, 0.0).div(a.temperature).log_softmax(1), -torch.inf)
    own = torch.where(member, lp.gather(1, index.clamp(0, classes - 1)), -torch.inf)
    values = FORMULAS[a.loss].reference(own, lq, a.tail).sum(1)
    return torch.where(((index != -1) & ~member).any(1), torch.nan, values)


@computes(OverlapCall)
def _overlap(a: OverlapCall) -> Tensor:
    x = accurate(a.x)
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
    values = FORMULAS[a.loss].reference(*sums, *a.hyper)
    if a.present_only:
        values = torch.where(absent, 0.0, values)
    weight = None if a.weight is None else a.weight.to(x.dtype)
    if weight is not None:
        values = values * weight[a.skip :]
    divisor = a.normalizer
    if a.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=x.device)
    result = reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)
    return result if a.lambda_ce is None else result + _cross_entropy(a, x, y, counts, weight)


def _cross_entropy(a: OverlapCall, x: Tensor, y: Tensor, counts: Tensor, weight: Tensor | None) -> Tensor:
    """λ times the cross entropy of softmax, or the binary one of sigmoid; a mean over pixels, or over elements."""
    assert a.lambda_ce is not None
    w = torch.ones((), dtype=x.dtype, device=x.device) if weight is None else weight.view(1, -1, *(1,) * (x.ndim - 2))
    if a.activation == "softmax":
        log_p = x.log_softmax(1)
        values = -w * y * torch.where((y == 0) & log_p.isinf(), 0.0, log_p)
        count = w * y if a.counted else torch.ones_like(x[:, 0])
    else:
        values = torch.where(counts, w * F.binary_cross_entropy_with_logits(x, y, reduction="none"), 0.0)
        count = counts.expand(x.shape)
    return reduced(values, a.lambda_ce, count.sum() if a.reduction == "mean" else None, a.reduction, a.empty_is_zero)
