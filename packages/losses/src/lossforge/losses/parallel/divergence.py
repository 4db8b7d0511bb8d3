"""Divergences of a layer's logits from a teacher's where the classes of both are spread over processes.

Each process computes a chunk's logits of its own classes, student's and teacher's, and the log-sum-exps of each row. Joined over the
processes, these give p and q of its classes. The row's divergence is a sum over all classes, and so is Σ h, which the gradient
(hⱼ - pⱼ Σ h) / T of the logits needs (lossforge.kernels.divergence.kernel). So two exchanges of two numbers a row are all that travels.

By kernels, a scalar loss writes its gradient in forward, as on one process. Else backward computes the logits again, and exchanges nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Head
from lossforge.kernels.divergence.call import DivergenceCall
from lossforge.kernels.plans import call_key, layouts
from lossforge.losses import checks
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.engine import FUSED, Chunks, Gradients, by_plan, is_wide
from lossforge.losses.parallel.rows import rows_of_exchange
from lossforge.losses.parallel.shards import Shards, is_dtensor, local_part
from lossforge.losses.reference import reduced
from lossforge.losses.state import gradient_in_forward
from lossforge.losses.templates.divergence import capped

Call = DivergenceCall[Any, Any]


def own_part(shards: Shards, t: Tensor, dim: int, name: str) -> Tensor:
    """Return the part of a teacher's tensor that has this process's classes, without padding."""
    checks.floating(name, t)
    return shards.trimmed(local_part(t, shards.group, dim % t.ndim, name) if is_dtensor(t) else t, dim)


def over_processes(shards: Shards, checked: CheckedCall[Any, Any]) -> Any:
    """Compute the checked call of this process's classes, and return what its public function returns for those of all."""
    call: Call = checked.call
    for name, t in (("loss_weight", call.weight), *[("teacher", t) for t in _tensors(call.target)]):
        if t is not None:
            checks.without_gradient(name, t)
    in_forward = gradient_in_forward(checked.options.get("gradient"), call.x, call.reduction)
    spread = Spread(shards, call, in_forward and FUSED[type(call)].computed_by_kernel(call))
    return checked.finish((_Divergence.apply(spread, *call.x[:3]),))


def _tensors(teacher: Tensor | Head) -> list[Tensor]:
    return [teacher] if isinstance(teacher, Tensor) else teacher.tensors


class Spread(NamedTuple):
    """How the classes of a call are spread, the call of this process's, and whether its gradient is written in forward."""

    shards: Shards
    call: Call
    in_forward: bool


class _Divergence(torch.autograd.Function):
    """A divergence. Gradients that forward wrote are handed out once; a second backward computes them again, with the same bits."""

    @staticmethod
    def forward(ctx: Any, spread: Spread, *tensors: Tensor | None) -> Tensor:
        ctx.spread, ctx.wanted = spread, ctx.needs_input_grad[1:]
        loss, stats, written = _computed(spread, ctx.wanted if spread.in_forward else [False] * 3)
        ctx.written = written if spread.in_forward else None
        ctx.save_for_backward(stats, *tensors, *_tensors(spread.call.target))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        stats, *_ = ctx.saved_tensors  # raises where one has been changed since
        if not ctx.spread.in_forward:
            return None, *_computed(ctx.spread, ctx.wanted, stats, grads[0])[2]
        written, ctx.written = ctx.written or _computed(ctx.spread, ctx.wanted, stats)[2], None
        for t in written:
            if t is not None:
                kernels.scale_(t, grads[0])
        return None, *written


def _computed(
    spread: Spread, wanted: Sequence[bool], stats: Tensor | None = None, grad_output: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the loss, the rows' statistics (5, rows), and the gradients of input, weight and bias that are wanted.

    Args:
        stats: of all classes, where they are known; the loss is then not computed.
        grad_output: the gradient of the loss; None: 1.
    """
    shards, call, wide = spread.shards, spread.call, is_wide(spread.call.x)
    layer = call.x
    bias = None if layer.bias is None else layer.bias.detach()
    rows = rows_of_exchange(call, shards, wide)
    layer = Head(layer.input.detach(), layer.weight.detach(), bias, rows, layer.accumulate, layer.logits)
    call = call._replace(x=layer)
    new = torch.empty_like if len(layer.input) else torch.zeros_like  # without rows nothing is written
    gradients = [new(t) if want and t is not None else None for t, want in zip(layer[:3], wanted, strict=True)]
    chunks, sums = Chunks(call), Gradients(call, gradients, wide)
    x = call.x.input
    dtype = torch.float64 if torch.float64 in (x.dtype, *[t.dtype for t in _tensors(call.target)]) else torch.float32
    values, known = torch.zeros(len(x), dtype=dtype, device=x.device), stats is not None
    stats = torch.empty((5, len(x)), dtype=dtype, device=x.device) if stats is None else stats
    grad = torch.ones((), dtype=dtype, device=x.device) if grad_output is None else grad_output
    for start, end, chunk, to in chunks.along(0, *sums.memory()):
        if not known:
            values[start:end], stats[:, start:end] = _joined(chunks, chunk, shards)
        if any(wanted):
            of_rows, upstream = stats[:, start:end].contiguous(), grad[start:end] if chunks.each else grad
            if chunks.by_kernel:
                chunks.backward(chunk, (None, of_rows), [upstream], to)
            else:
                _write_gradient(chunk, of_rows, upstream, to)
            if not shards.own:
                to.zero_()
            sums.add(start, end, to)
    sums.finish()
    whole = chunks.all
    loss = reduced(values, whole.loss_scale, whole.normalizer, whole.reduction, whole.empty_is_zero)
    return loss, stats, gradients


def _joined(chunks: Chunks, call: Call, shards: Shards) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk's rows times their weights, and the rows' statistics, of all classes."""
    call = call._replace(reduction="none", normalizer=None, loss_scale=1.0)
    own = _statistics(chunks, call) if chunks.by_kernel else _statistics_by_reference(call)
    tops, log_sums = own[:4:2] / call.temperature, own[1:4:2]
    lse = tops + log_sums if shards.own else torch.full_like(tops, -torch.inf)
    total = shards.gathered([*lse]).logsumexp(0)
    own[1:4:2] = total - tops
    value = _by_kernel(chunks, call, own) if chunks.by_kernel else _by_reference(call, own)
    sums = torch.stack((value, own[4])) if shards.own else torch.zeros_like(tops)
    value, own[4] = shards.gathered([*sums]).sum(0)
    return value, own


def _statistics(chunks: Chunks, call: Call) -> Tensor:
    """Return the statistics of this process's classes. Those of KL take one sweep over the logits."""
    call = call._replace(loss="kl", hyper=[], reduction="sum")
    tensors, numbers = chunks.template.flat(call)
    key = call_key(chunks.template.name, call.loss, tensors, numbers), "statistics"
    _, _, stats = by_plan(key, tensors, chunks.template.launches.forward, call, FORMULAS["kl"].kernels, [None], True)
    found: Tensor = stats
    return found


def _by_kernel(chunks: Chunks, call: Call, stats: Tensor) -> Tensor:
    """Return the losses over this process's classes, and store their Σ h in the statistics."""
    tensors, numbers = chunks.template.flat(call)
    key = call_key(chunks.template.name, call.loss, tensors, numbers), "sums", *layouts((stats,))
    (value,) = by_plan(key, (*tensors, stats), kernels.of_folder("divergence").sums_of, call, chunks.formulas, stats)
    found: Tensor = value
    return found


def _counts(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return which rows count, and their weights, 0 for the others."""
    keep = torch.ones(len(call.x), dtype=torch.bool, device=call.x.device)
    if call.labels is not None:
        keep = call.labels != call.ignore_index
    if call.weight is None:
        return keep, keep.to(dtype)
    keep = keep & (call.weight != 0)
    return keep, torch.where(keep, call.weight.to(dtype), 0.0)


def _wide(call: Call, stats_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits and the teacher's, scaled and capped, over T, 0 in rows that do not count, and the rows' weights."""
    keep, weight = _counts(call, stats_dtype)
    numbers = (call.logit_scale, call.softcap), (call.target_scale, call.target_softcap)
    read = [capped(t.to(stats_dtype), *each) / call.temperature for t, each in zip((call.x, call.target), numbers, strict=True)]
    x, t = (torch.where(keep[:, None], each, 0.0) for each in read)
    return x, t, weight


def _statistics_by_reference(call: Call) -> Tensor:
    dtype = torch.float64 if torch.float64 in (call.x.dtype, call.target.dtype) else torch.float32
    x, t, _ = _wide(call, dtype)
    nothing = x.new_zeros(len(x))
    return torch.stack((nothing, x.logsumexp(1), nothing, t.logsumexp(1), nothing))


def _slopes(call: Call, stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ln p and h of this process's classes, the rows' sums of the formula, and their weights."""
    x, t, weight = _wide(call, stats.dtype)
    lp, lq = (x - stats[1, :, None]).requires_grad_(), t - stats[3, :, None]
    with torch.enable_grad():
        value = FORMULAS[call.loss].reference(*((lq, lp) if call.swap else (lp, lq)), *call.hyper).sum(1)
        (h,) = torch.autograd.grad(value.sum(), lp)
    return lp.detach(), h, value.detach(), weight


def _by_reference(call: Call, stats: Tensor) -> Tensor:
    """Do what _by_kernel does."""
    _, h, value, weight = _slopes(call, stats)
    stats[4] = torch.where(weight == 0, 0.0, h.sum(1))
    return torch.where(weight == 0, 0.0, value * weight)


def _write_gradient(call: Call, stats: Tensor, grad_output: Tensor, to: Tensor) -> None:
    lp, h, _, weight = _slopes(call, stats)
    share = weight * reduced(grad_output.to(stats.dtype), call.loss_scale, call.normalizer, "none", call.empty_is_zero) / call.temperature
    gradient = (h - lp.exp() * stats[4, :, None]) * share[:, None] * call.logit_scale
    if call.softcap is not None:
        gradient = gradient * (1 - capped(call.x.to(stats.dtype), call.logit_scale, call.softcap).div(call.softcap).square())
    to.copy_(torch.where(weight[:, None] == 0, 0.0, gradient))
