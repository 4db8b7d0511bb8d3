"""Cross entropy of rows whose classes are spread over processes, from each process's own results.

Process r has lse_r, the log-sum-exp of its own logits, and L_r = Σ qⱼ (lse_r - xⱼ) over its own classes, where qⱼ is the target's share of
class j, times its weight. With Q_r = Σ qⱼ of its own classes:

    lse = ln Σ_r exp lse_r,  w_r = exp(lse_r - lse),  L = Σ_r (L_r + Q_r (lse - lse_r)),  H = Σ_r w_r (H_r - ln w_r)

Gradients need no rule of their own: L_r, lse_r and H_r are differentiable results of one call, and its backward is one pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.engine.linear.engine import rows_of_chunks
from lossforge.losses.engine.parallel.shards import Shards
from lossforge.losses.templates.plain_forms import accurate, reduced, row_weights, which_count, with_weight
from lossforge.losses.templates.rowwise import BY_PROBABILITY

LOWEST = -1e30
"""In place of the difference of two log-sum-exps where that is -inf."""
ROWS = 1024
"""Rows of features at a time whose largest logits are computed again."""


class Joining(NamedTuple):
    """What makes the results of all classes from each process's own.

    Attributes:
        shards: how the classes are spread.
        whole: the call as one process would have it, but for its logits and class weights.
        own: the call of this process's classes.
        z_loss: coefficient of lse².
        factor: of this process's loss, which has a label smoothing of its own.
        mode: when the gradient is written: the option `gradient`.
        weight: of the rows: the option `token_weight` as a tensor. whole.loss and whole.entropy_weight say the others.
        each_row: whether the cross entropy of each row, without its weight, is a further result, without gradient.
    """

    shards: Shards
    whole: RowwiseCall[Any]
    own: RowwiseCall[Any]
    z_loss: float
    factor: float
    mode: str | None
    weight: Tensor | None = None
    each_row: bool = False

    def reduced(self, v: Tensor, divisor: Tensor | None) -> Tensor:
        """Return values of rows as the call reduces them."""
        return reduced(v, self.whole.loss_scale, divisor, self.whole.reduction, self.whole.empty_is_zero)

    def divisor(self, keep: Tensor, weights: Tensor | None = None) -> Tensor | None:
        """Return what the loss is divided by. keep: which rows count. weights: of the rows' classes, where classes have weights."""
        whole = self.whole
        if whole.normalizer is not None or whole.reduction != "mean":
            return whole.normalizer
        if weights is not None:
            return weights.detach().sum()
        return keep.sum(dtype=torch.float32) if whole.target_b is None else row_weights(whole, None).sum()


def joined(joining: Joining, results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the results of all classes, in the template's order, from those of this process's."""
    shards, whole, own = joining.shards, joining.whole, joining.own
    loss, _, lse, entropy, _, argmax, log_p2, mean_logit = results
    assert loss is not None
    assert lse is not None
    dense = whole.target.is_floating_point()
    counts = torch.ones_like(lse, dtype=torch.bool) if dense else which_count(whole)
    weight = joining.weight if joining.weight is None else joining.weight.to(lse.dtype)
    keep = with_weight(counts, weight)
    if not shards.own:  # a class of padding alone, whose gradient is 0
        nothing = torch.zeros_like(keep)
        loss, lse = torch.where(nothing, loss, 0.0), torch.where(nothing, lse, -torch.inf)
    share = _shares(own, counts) if shards.own else torch.zeros_like(lse)
    if joining.factor != 1.0:
        loss, share = loss * joining.factor, share * joining.factor
    rows = {"lse": lse, "loss": loss, "share": share}
    if own.weight is not None and not dense:
        rows["weight"] = row_weights(own, accurate(own.weight))
    rows |= {name: t for name, t in (("entropy", entropy), ("log_p2", log_p2), ("mean", mean_logit)) if t is not None}
    if argmax is not None:
        rows |= {"class": argmax, "top": _logits_at(own, argmax) if shards.own else torch.full_like(lse, -torch.inf)}
    exchanged = shards.gathered([t.to(lse.dtype) for t in rows.values()], rows_of_exchange(own, shards))
    of = dict(zip(rows, exchanged.unbind(1), strict=True))
    lse = of["lse"]
    # a row that does not count has loss and share 0, and may have any log-sum-exp
    counted = lse if dense else torch.where(keep, lse + _nan_outside(whole, shards.classes), 0.0)
    values = (of["loss"] - of["share"] * log_shares(counted)).sum(0)
    divisor = joining.divisor(counts, of.get("weight"))
    _, want_lse, want_entropy, want_correct, want_argmax, want_log_p2, want_mean = whole.outputs
    each = [values.detach()] if joining.each_row else []
    log_w = log_shares(lse) if want_entropy or want_log_p2 else values
    total = log_sum(lse) if want_lse or want_correct else values
    entropy = None
    if want_entropy:
        w = log_w.exp()
        entropy = (w * (torch.where(w > 0, of["entropy"], 0.0) - log_w)).sum(0)
    if whole.entropy_weight and entropy is not None:
        weight = (whole.entropy_weight * entropy).clamp(max=1.0).detach()
    elif whole.loss == BY_PROBABILITY:
        of_class = of["weight"].sum(0) if "weight" in of else torch.ones_like(values)
        weight = (-values / torch.where(of_class == 0, 1.0, of_class)).exp().detach()
        values = torch.where(weight == 0, 0.0, values)  # of a probability of 0 the loss is infinite
    if weight is not None:
        values = torch.where(keep, weight, 0.0) * values
    total_loss = joining.reduced(values, divisor)
    found: list[Tensor | None] = [total_loss, *[None] * 7]
    if joining.z_loss or whole.outputs[0]:
        of_weights = whole.reduction == "mean" and whole.normalizer is None and "weight" in of
        z = torch.where(keep, joining.z_loss * torch.where(keep, lse, 0.0).logsumexp(0).square(), 0.0)
        z = joining.reduced(z, counts.sum() if of_weights else divisor)
        found[0] = total_loss + z
        found[1] = z if whole.outputs[0] else None
    found[2] = total if want_lse else None
    found[3] = entropy
    if want_correct or want_argmax:
        largest = _class_of_largest(shards, of["class"], of["top"])
        found[4] = keep & (largest == whole.target) & ~total.isnan() if want_correct else None
        found[5] = largest if want_argmax else None
    if want_log_p2:
        found[6] = (of["log_p2"] + 2 * log_w).detach().logsumexp(0)
    found[7] = _mean(shards, of["mean"].detach()) if want_mean else None
    return [*found, *each]


def rows_of_exchange(call: Any, shards: Shards, wide: bool = False) -> int:
    """Return how many rows of a layer processes exchange at a time: those of a chunk; 0 for logits, all at once.

    It follows from what all processes have in common: a process's own free memory and number of classes do not matter.

    Args:
        call: of this process's classes.
        wide: as in rows_of_chunks.
    """
    layer = call.x
    if not isinstance(layer, Head) or torch.compiler.is_compiling():
        return 0
    rows, features = layer.input.shape
    x, weight = (torch.empty((n, features), dtype=layer.input.dtype, device="meta") for n in (rows, max(shards.size, 1)))
    common = Head(x, weight, None, layer.chunk, layer.accumulate, layer.logits)
    return rows_of_chunks(call._replace(x=common), weight, wide).chunk


def _mean(shards: Shards, means: Tensor) -> Tensor:
    """Return the mean logit from each process's."""
    sizes = [min(max(shards.classes - r * shards.size, 0), shards.size) for r in range(shards.world)]
    of_process = torch.tensor(sizes, dtype=means.dtype).div_(shards.classes).to(means.device, non_blocking=True)
    of_process = of_process.view(-1, *(1,) * (means.ndim - 1))
    return torch.where(of_process > 0, means * of_process, 0.0).sum(0)


def log_shares(lse: Tensor) -> Tensor:
    """Return ln w of each process, from each process's log-sum-exp (world, …)."""
    return torch.threshold(lse, LOWEST, LOWEST).log_softmax(0)  # as clamp, but the gradient of nan is nan


def log_sum(lse: Tensor) -> Tensor:
    """Return the log-sum-exp of all classes, from each process's (world, …)."""
    top = lse.detach().amax(0).clamp(min=LOWEST)
    return top + (lse - top).clamp(min=LOWEST).exp().sum(0).log()


def _shares(own: RowwiseCall[Any], counts: Tensor) -> Tensor:
    """Return Q_r of each row: the target's share of this process's classes, times their weights. counts: which rows are not ignored."""
    dtype = torch.float64 if own.x.dtype == torch.float64 else torch.float32
    weight = None if own.weight is None else own.weight.to(dtype)
    if own.target.is_floating_point():
        target = own.target.to(dtype)
        by_class = (1, -1) + (1,) * (target.ndim - 2)
        of_target = (target if weight is None else target * weight.view(by_class)).sum(1)
    else:
        lam = own.lam if own.lam is None else own.lam.to(dtype)
        of_target = row_weights(own._replace(lam=lam), weight).to(dtype)
        if own.target_b is not None:
            of_target = torch.where(counts, of_target, 0.0)
    smoothing = own.label_smoothing
    if not smoothing:
        return of_target
    return (1.0 - smoothing) * of_target + torch.where(counts, smoothing * (1.0 if weight is None else weight.mean()), 0.0)


def _nan_outside(whole: RowwiseCall[Any], classes: int) -> Tensor:
    """Return 0, nan in rows whose class does not exist, and in ignored ones. Added to what is differentiated, it gives the gradient too."""

    def exists(index: Tensor) -> Tensor:
        return index == index.clamp(0, classes - 1)

    inside = exists(whole.target)
    if whole.target_b is not None:  # of a pair one may be ignored
        inside = (inside | (whole.target == whole.ignore_index)) & (exists(whole.target_b) | (whole.target_b == whole.ignore_index))
    return torch.where(inside, 0.0, torch.nan)


def _class_of_largest(shards: Shards, classes: Tensor, tops: Tensor) -> Tensor:
    """Return the class of the largest logit, the first of equal ones, from each process's."""
    tops = torch.where(tops.isnan(), -torch.inf, tops)
    first = torch.arange(shards.world, device=classes.device).view(-1, *(1,) * (classes.ndim - 1)) * shards.size
    return torch.where(tops == tops.amax(0), classes.long() + first, shards.classes).amin(0)


@torch.no_grad()
def _logits_at(own: RowwiseCall[Any], index: Tensor) -> Tensor:
    """Return the logit of one class a row, scaled and capped, but not by row_scale, which changes no order within a row."""
    x = own.x
    if isinstance(x, Head):
        parts = zip(x.input.split(ROWS), index.split(ROWS), strict=True)
        z = torch.cat([(accurate(rows) * accurate(x.weight[at])).sum(1) for rows, at in parts])
        z = z if x.bias is None else z + accurate(x.bias[index])
    else:
        z = accurate(x.gather(1, index.unsqueeze(1)).squeeze(1))
    z = z * own.logit_scale
    return z if own.softcap is None else own.softcap * torch.tanh(z / own.softcap)
