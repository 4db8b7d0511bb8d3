"""Divergences of a layer's logits from a teacher's where the classes of both are spread over processes.

Each process computes a chunk's logits of its own classes, student's and teacher's, and of each row their maxima and log-sums. Joined over
the processes, these give p and q of its classes. The row's divergence is a sum over all classes, and so is Σ h, which the gradient
(hⱼ - pⱼ Σ h) / T of the logits needs (lossforge.kernels.classes.divergence). So an exchange of four numbers a row and one of two are all
that travels; with hard_weight and the entropy one number more each, and one more where a row is a function of two sums (BLENDED).

By kernels, a scalar loss writes its gradient in forward, as on one process. Else backward computes the logits again, and only sums the
gradient of the input.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import BLENDED, ELSEWHERE, MOST_MORE, DivergenceCall
from lossforge.kernels.plans import by_plan, call_key, layouts
from lossforge.losses.base import checks
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.base.state import gradient_in_forward
from lossforge.losses.engine.linear.engine import FUSED, Chunks, Gradients, divisor_of, is_wide
from lossforge.losses.engine.parallel.cross_entropy_rows import rows_of_exchange
from lossforge.losses.engine.parallel.shards import NO_CLASS, Shards, is_dtensor, local_part
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.divergence import capped, hard_weights, labels_of_classes
from lossforge.losses.templates.plain_forms import largest, reduced, with_weight

Call = DivergenceCall[Any, Any]


def own_part(shards: Shards, t: Tensor, dim: int, name: str) -> Tensor:
    """Return the part of a teacher's tensor that has this process's classes, without padding."""
    checks.floating(name, t)
    return shards.trimmed(local_part(t, shards.group, dim % t.ndim, name) if is_dtensor(t) else t, dim)


NOWHERE = -2
"""In place of a label's class that no process has."""


def over_processes(shards: Shards, hard: float, temperature_squared: bool, checked: CheckedCall[Any, Any]) -> Any:
    """Compute the checked call of this process's classes, and return what its public function returns for those of all.

    hard: the option hard_weight, which the call does not have yet, because its labels are of all classes.
    """
    if torch.compiler.is_compiling():
        # a graph breaks here; not by a decorator, whose import of torch.compile takes long
        return torch.compiler.disable(over_processes)(shards, hard, temperature_squared, checked)
    call: Call = checked.call
    if weights := hard_weights(hard, call.temperature, temperature_squared):
        call = call._replace(**weights, **_own_labels(shards, call))
    for name, t in (("loss_weight", call.weight), *[("teacher", t) for t in _tensors(call.target)], ("teacher_lse", call.target_lse)):
        if t is not None:
            checks.without_gradient(name, t)
    in_forward = gradient_in_forward(checked.options.get("gradient"), call.x, call.reduction)
    sharded = ShardedCall(shards, call, in_forward and FUSED[type(call)].computed_by_kernel(call))
    return checked.finish(_Divergence.apply(sharded, *call.x.parts))


def _own_labels(shards: Shards, call: Call) -> dict[str, Any]:
    """Return the fields of a call that say which class of this process each row's label names."""
    labels = labels_of_classes(call.labels, call.x.input, shards.classes, call.ignore_index, call.x.shape[:1])
    exists = (labels >= 0) & (labels < shards.classes)
    here = exists & (labels >= shards.first) & (labels < shards.first + shards.own)
    own = torch.where(here, labels - shards.first, torch.where(exists, ELSEWHERE, NOWHERE))
    return {
        "labels": torch.where(labels == call.ignore_index, NO_CLASS, own),
        "ignore_index": NO_CLASS,
        "some_classes": True,
    }


def _tensors(teacher: Tensor | Head) -> list[Tensor]:
    return [teacher] if isinstance(teacher, Tensor) else teacher.tensors


class ShardedCall(NamedTuple):
    """How the classes of a call are spread, the call of this process's, and whether its gradient is written in forward."""

    shards: Shards
    call: Call
    in_forward: bool


class _Divergence(torch.autograd.Function):
    """A divergence. Gradients that forward wrote are handed out once; a second backward computes them again, with the same bits."""

    @staticmethod
    def forward(ctx: Any, sharded: ShardedCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.sharded, ctx.wanted = sharded, ctx.needs_input_grad[1:]
        results, stats, written = _computed(sharded, ctx.wanted if sharded.in_forward else [False] * 3)
        ctx.mark_non_differentiable(*[t for t in results[1:] if t is not None])
        ctx.written = written if sharded.in_forward else None
        ctx.save_for_backward(stats, *tensors, *_tensors(sharded.call.target))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        stats, *_ = ctx.saved_tensors  # raises where one has been changed since
        if not ctx.sharded.in_forward:
            return None, *_computed(ctx.sharded, ctx.wanted, stats, grads[0])[2]
        written, ctx.written = ctx.written or _computed(ctx.sharded, ctx.wanted, stats)[2], None
        kernels.scale_(grads[0], *[t for t in written if t is not None])
        return None, *written


def _computed(
    sharded: ShardedCall, wanted: Sequence[bool], stats: Tensor | None = None, grad_output: Tensor | None = None
) -> tuple[tuple[Tensor | None, ...], Tensor, list[Tensor | None]]:
    """Return the loss, entropies and acceptances, the rows' statistics, as the kernels keep them, and the gradients of input, weight and
    bias that are wanted.

    Args:
        stats: of all classes, where they are known; the results are then not computed.
        grad_output: the gradient of the loss; None: 1.
    """
    shards, call, wide = sharded.shards, sharded.call, is_wide(sharded.call.x)
    layer = call.x
    bias = None if layer.bias is None else layer.bias.detach()
    rows = rows_of_exchange(call, shards, wide)
    layer = Head(layer.input.detach(), layer.weight.detach(), bias, layer.chunk if wide else rows, layer.accumulate, layer.logits)
    call = call._replace(x=layer)
    new = torch.empty_like if len(layer.input) else torch.zeros_like  # without rows nothing is written
    gradients = [new(t) if want and t is not None else None for t, want in zip(layer.parts, wanted, strict=True)]
    chunks, sums = Chunks(call, *divisor_of(call)), Gradients(call, gradients, summing=shards.summing, chunk=rows)
    x = call.x.input
    dtype = torch.float64 if torch.float64 in (x.dtype, *[t.dtype for t in _tensors(call.target)]) else torch.float32
    values, known = torch.zeros(len(x), dtype=dtype, device=x.device), stats is not None
    planes = 5 + (call.hard_weight is not None) + 2 * (call.loss in BLENDED)
    stats = torch.empty((planes, len(x)), dtype=dtype, device=x.device) if stats is None else stats
    beside = [torch.empty_like(values) if asked else None for asked in call.outputs]
    grad = torch.ones((), dtype=dtype, device=x.device) if grad_output is None else grad_output
    for start, end, chunk, to in chunks.along(0, *sums.memory()):
        if not known:
            values[start:end], stats[:, start:end], *of_chunk = _joined(chunks, chunk, shards)
            for whole, part in zip(beside, of_chunk, strict=True):
                if whole is not None and part is not None:
                    whole[start:end] = part
        if any(wanted):
            of_rows, upstream = stats[:, start:end].contiguous(), grad[start:end] if call.reduction == "none" else grad
            if chunks.by_kernel:
                chunks.backward(chunk, (None, of_rows), [upstream], to)
            else:
                _write_gradient(chunk, of_rows, upstream, to)
            if not shards.own:
                to.zero_()
            sums.add(end)
    sums.finish()
    every = chunks.all
    loss = reduced(values, every.loss_scale, every.normalizer, every.reduction, every.empty_is_zero)
    return (loss, *beside), stats, gradients


def _joined(chunks: Chunks, call: Call, shards: Shards) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the losses of a chunk's rows times their weights, the rows' statistics, their entropies and acceptances, of all classes."""
    call = call._replace(reduction="none", normalizer=None, loss_scale=1.0)
    own, entropy = _statistics(chunks, call) if chunks.by_kernel else _statistics_by_reference(call)
    if not shards.own:  # maxima too: a larger one than those of the classes would cost digits
        own.fill_(-torch.inf)
    further = [] if entropy is None else [entropy]
    found = shards.gathered([*own[:4], *own[5:], *further])
    of_logits, of_teacher = call.inverses
    log_sum, total, beside = _total(own[0], found[:, 0], found[:, 1], of_logits)
    if entropy is not None:
        log_w = beside + found[:, 1] - total
        w = log_w.exp()
        entropy = (w * torch.where(w > 0, found[:, -1] - log_w, 0.0)).sum(0)
    if call.hard_weight is not None:
        own[5] = _total(own[0], found[:, 0], found[:, 4], call.factors[0])[0]
    own[1], (own[3], total_of_teacher, _) = log_sum, _total(own[2], found[:, 2], found[:, 3], of_teacher)
    _, weight = _counts(call, own.dtype)
    if entropy is not None:
        entropy = torch.where(weight == 0, 0.0, entropy)
    if call.loss in BLENDED:
        log_sum_of_teacher = total_of_teacher + found[:, 2].amax(0) * of_teacher
        value, own, acceptance = _blended(chunks, call, own, log_sum_of_teacher, shards)
        return value, own, entropy, acceptance if call.outputs[1] else None
    value = _by_kernel(chunks, call, own) if chunks.by_kernel else _by_reference(call, own)
    sums = torch.stack((value, own[4])) if shards.own else torch.zeros_like(own[:2])
    value, own[4] = shards.gathered([*sums]).sum(0)
    return value, own, entropy, None


PARTS = {
    "draft_lk": ("kl", "total_variation"),
    "draft_log_tv": (None, "draft_overlap"),
    "draft_tv": (None, "total_variation"),
    "draft_kl": ("kl", "draft_overlap"),
    "draft_ce": ("soft_cross_entropy", "draft_overlap"),
}
"""The formulas of the two sums that a row of a BLENDED divergence is a function of; None: of one sum."""


def _blended(chunks: Chunks, call: Call, own: Tensor, log_sum: Tensor, shards: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of a chunk's rows times their weights, their statistics, and their acceptances.

    own: the statistics of the softmaxes of all classes. log_sum: of the teacher, relative to no maximum.
    """
    keep, weight = _counts(call, own.dtype)
    mass = _mass(call, log_sum, keep)
    plain = call._replace(weight=None if call.weight is None else keep, hyper=[], outputs=[False, False], target_lse=None)
    soft = plain._replace(hard_weight=None, soft_weight=1.0, some_classes=False)
    of_mean, of_sum = PARTS[call.loss]
    sums = torch.zeros((4, len(weight)), dtype=own.dtype, device=own.device)  # mean, total, Σ h, and the labels' cross entropy
    if shards.own:
        if of_mean is not None:
            sums[0] = _summed(chunks, soft._replace(loss=of_mean), own[:5].clone())
        of_all = own[:5].clone()
        of_all[3] -= mass.log()
        sums[1] = _summed(chunks, soft._replace(loss=of_sum), of_all)
        sums[2] = of_all[4]
        if call.hard_weight is not None:
            sums[3] = _summed(chunks, plain._replace(loss="total_variation", soft_weight=0.0), own.clone())
    mean, total, h_sum, hard = shards.gathered([*sums]).sum(0)
    value, acceptance, by_mean, by_sum = _of_sums(call, mean, total, mass)
    if call.hard_weight is not None:
        value = (call.soft_weight * value if call.soft_weight else 0.0) + hard
    counted = [torch.where(keep, t, 0.0) for t in (value * weight, acceptance.clamp(0, 1), h_sum, by_mean, by_sum)]
    own[4] = counted[2]
    return counted[0], torch.cat((own, torch.stack(counted[3:]))), counted[1]


def _summed(chunks: Chunks, call: Call, stats: Tensor) -> Tensor:
    return _by_kernel(chunks, call, stats) if chunks.by_kernel else _by_reference(call, stats)


def _mass(call: Call, log_sum: Tensor, keep: Tensor) -> Tensor:
    """Return the teacher's probability of all processes' classes, whose log-sum this is, as the kernels do."""
    if call.target_lse is None:
        return torch.ones_like(log_sum)
    more = torch.where(keep, log_sum - call.target_lse.to(log_sum.dtype), 0.0)
    return torch.where(more > MOST_MORE, torch.nan, more.exp().clamp(max=1))


def _of_sums(call: Call, mean: Tensor, total: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the values of rows, their acceptances, and the derivatives of the values by both sums, as the kernels' `blend` does."""
    one, zero = torch.ones_like(total), torch.zeros_like(total)
    if call.loss in ("draft_kl", "draft_ce"):
        return mean, total, one, zero
    if call.loss == "draft_log_tv":
        return -total.log(), total, zero, torch.where(total < torch.finfo(total.dtype).tiny, 0.0, 1 / total)
    distance = total + 0.5 * (1 - mass)
    if call.loss == "draft_tv":
        return distance, 1 - distance, zero, one
    kl_scale, eta = call.hyper
    share = kl_scale * torch.exp(-eta * (1 - distance))
    return torch.where(share == 0, 0.0, share * mean) + (1 - share) * distance, 1 - distance, share, 1 - share


def _total(own: Tensor, tops: Tensor, log_sums: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum of all classes relative to this process's maximum, then relative to the largest one. And the differences of the
    processes' maxima to the largest, times the rate.

    own: this process's maxima. tops, log_sums: of each process, (world, rows), log-sums relative to its own maximum.
    """
    top = tops.amax(0)
    beside = (tops - top) * rate
    total = (beside + log_sums).logsumexp(0)
    return total + (top - own) * rate, total, beside


def _statistics(chunks: Chunks, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the statistics of this process's classes, and the entropies. Those of KL take one sweep over the logits."""
    call = call._replace(loss="kl", hyper=[], reduction="sum", target_lse=None, outputs=[call.outputs[0], False])
    tensors, numbers = chunks.template.flat(call)
    key = call_key(chunks.template.name, call.loss, tensors, numbers), "statistics"
    forward = chunks.template.launches.forward
    _, entropy, *_, stats = by_plan(key, tensors, forward, lambda: (call, FORMULAS["kl"].kernels, [None], True))
    return stats, entropy


def _by_kernel(chunks: Chunks, call: Call, stats: Tensor) -> Tensor:
    """Return the losses over this process's classes, and store their Σ h in the statistics."""
    tensors, numbers = chunks.template.flat(call)
    key = call_key(chunks.template.name, call.loss, tensors, numbers), "sums", *layouts((stats,))
    sums_of = kernels.load("classes.divergence.launch").sums_of
    (value,) = by_plan(key, (*tensors, stats), sums_of, lambda: (call, FORMULAS[call.loss].kernels, stats))
    found: Tensor = value
    return found


def _counts(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return which rows count, and their weights, 0 for the others."""
    keep = torch.ones(len(call.x), dtype=torch.bool, device=call.x.device)
    if call.labels is not None:
        keep = call.labels != call.ignore_index
    if call.weight is None:
        return keep, keep.to(dtype)
    keep = with_weight(keep, call.weight)
    return keep, torch.where(keep, call.weight.to(dtype), 0.0)


def _wide(call: Call, stats_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits and the teacher's as the statistics know them, 0 in rows that do not count, and the rows' weights."""
    keep, weight = _counts(call, stats_dtype)
    each = (call.x, call.logit_scale, call.softcap), (call.target, call.target_scale, call.target_softcap)
    read = [t.to(stats_dtype) if cap is None else capped(t.to(stats_dtype), scale, cap) for t, scale, cap in each]
    x, t = (torch.where(keep[:, None], each, 0.0) for each in read)
    return x, t, weight


def _statistics_by_reference(call: Call) -> tuple[Tensor, Tensor | None]:
    dtype = torch.float64 if torch.float64 in (call.x.dtype, call.target.dtype) else torch.float32
    x, t, _ = _wide(call, dtype)
    of_logits, of_teacher = call.inverses
    tops = [largest(each, 1) for each in (x, t)]
    z, y = (x - tops[0]) * of_logits, (t - tops[1]) * of_teacher
    rows = [tops[0][:, 0], z.logsumexp(1), tops[1][:, 0], y.logsumexp(1), torch.zeros_like(x[:, 0])]
    if call.hard_weight is not None:
        rows.append((z * call.temperature).logsumexp(1))
    p = z.softmax(1)
    entropy = rows[1] - (p * torch.where(p > 0, z, 0.0)).sum(1) if call.outputs[0] else None
    return torch.stack(rows), entropy


def _teacher(call: Call, stats: Tensor) -> Tensor:
    """Return q of this process's classes."""
    _, t, _ = _wide(call, stats.dtype)
    return ((t - stats[2, :, None]) * call.inverses[1] - stats[3, :, None]).exp()


def _slopes(call: Call, stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ln p and h of this process's classes, the rows' sums of the formula, and their weights."""
    x, t, weight = _wide(call, stats.dtype)
    of_logits, of_teacher = call.inverses
    lp = ((x - stats[0, :, None]) * of_logits - stats[1, :, None]).requires_grad_()
    lq = (t - stats[2, :, None]) * of_teacher - stats[3, :, None]
    with torch.enable_grad():
        value = FORMULAS[call.loss].reference(*((lq, lp) if call.swap else (lp, lq)), *call.hyper).sum(1)
        (h,) = torch.autograd.grad(value.sum(), lp)
    return lp.detach(), h, value.detach(), weight


def _hard_part(call: Call, stats: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' cross entropies, 0 where another process has the label's class, and their derivatives by the logits as read."""
    assert call.labels is not None
    x, _, _ = _wide(call, stats.dtype)
    factor = call.factors[0]
    log_p = (x - stats[0, :, None]) * factor - stats[5, :, None]
    here = (torch.arange(x.shape[1], device=x.device) == call.labels[:, None]).to(x.dtype)
    exists = torch.where(call.labels == NOWHERE, torch.nan, 1.0).to(x.dtype)
    nll = -torch.where(here == 1, log_p, 0.0).sum(1)
    return nll * exists, (log_p.exp() - here) * (exists * factor)[:, None]


def _by_reference(call: Call, stats: Tensor) -> Tensor:
    """Do what _by_kernel does."""
    _, h, value, weight = _slopes(call, stats)
    stats[4] = torch.where(weight == 0, 0.0, h.sum(1))
    if call.hard_weight is not None:
        soft = call.soft_weight * value if call.soft_weight else torch.zeros_like(value)
        value = soft + call.hard_weight * _hard_part(call, stats)[0]
    return torch.where(weight == 0, 0.0, value * weight)


def _write_gradient(call: Call, stats: Tensor, grad_output: Tensor, to: Tensor) -> None:
    part, of_all, q = call, stats, torch.zeros((), dtype=stats.dtype, device=stats.device)
    if call.loss in BLENDED:
        part, of_all = call._replace(loss=PARTS[call.loss][1], hyper=[]), stats.clone()
        log_sum = stats[2] * call.inverses[1] + stats[3]
        of_all[3] -= _mass(call, log_sum, _counts(call, stats.dtype)[0]).log()
        q = _teacher(call, stats)
    lp, h, _, weight = _slopes(part, of_all)
    share = weight * reduced(grad_output.to(stats.dtype), call.loss_scale, call.normalizer, "none", call.empty_is_zero)
    gradient = h - lp.exp() * stats[4, :, None]
    if call.loss in BLENDED:
        gradient = gradient * stats[-1, :, None] + (lp.exp() - q) * stats[-2, :, None]
    gradient = gradient * call.inverses[0]
    if call.hard_weight is not None:
        soft = call.soft_weight * gradient if call.soft_weight else torch.zeros_like(gradient)
        gradient = soft + call.hard_weight * _hard_part(call, stats)[1]
    gradient = gradient * share[:, None]
    if call.softcap is not None:
        slope = 1 - capped(call.x.to(stats.dtype), call.logit_scale, call.softcap).div(call.softcap).square()
        gradient = gradient * slope * call.logit_scale
    to.copy_(torch.where(weight[:, None] == 0, 0.0, gradient))
