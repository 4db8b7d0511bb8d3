"""A scalar loss over processes in three matrix products: the gradient is written in forward.

The product stores exponentials E of this process's logits, each row's relative to an offset c (lossforge.kernels.linear.exponentials).
After the exchange the log-sum-exp of all classes is known. The gradient of the logits is then E times one factor a row, exp(c - lse). The
target's entry differs: it is written such that the same factor holds for it. One kernel does so (lossforge.kernels.linear.sharded_rows).

A chunk of rows is exchanged at a time, before its two further products. An exchange of 12 bytes a row takes less time than the memory of a
second chunk, which would let it run beside the next chunk's product, is worth. The gradient of the input is summed over the processes in
forward, beside the last chunk's product of the weight's gradient. So all processes must go this way, or none: what decides is the same in
all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base.state import plain
from lossforge.losses.engine.gradients import new_gradients
from lossforge.losses.engine.linear.call import of_rows
from lossforge.losses.engine.linear.engine import FUSED, Gradients, addressable, by_product, product_of, ranges
from lossforge.losses.engine.parallel.cross_entropy_rows import Joining, log_shares, rows_of_exchange
from lossforge.losses.engine.parallel.shards import all_gathered
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import which_count, with_weight
from lossforge.losses.templates.rowwise import BY_PROBABILITY, ROWWISE


def in_three_products(joining: Joining) -> tuple[Tensor, Tensor | None] | None:
    """Return the loss, its gradients written, and the cross entropy of each row if it is wanted; None where it takes four products.

    It does where gradient="backward" is asked for, where other results are wanted, and where the product stores no exponentials.
    """
    if torch.compiler.is_compiling() or not _asked_for(joining):
        return None
    joining = joining._replace(own=joining.own._replace(x=addressable(joining.own.x)))
    if not _applies(joining):
        return None
    found: Any = _Written.apply(joining, *joining.own.x.parts)
    return found


def _asked_for(joining: Joining) -> bool:
    """Return whether a scalar and its gradient are all that is wanted, of classes that every process has."""
    own, whole, layer = joining.own, joining.whole, joining.own.x
    if not isinstance(layer, Head) or joining.mode == "backward" or whole.reduction == "none" or any(whole.outputs):
        return False
    if own.weight is not None or own.label_smoothing or whole.target.is_floating_point() or whole.target_b is not None:
        return False
    of_rows = [own.target] if joining.weight is None else [own.target, joining.weight]
    if not joining.shards.all_own or (joining.weight is not None and joining.weight.requires_grad):
        return False
    return torch.is_grad_enabled() and layer.requires_grad and plain(*layer.tensors, *of_rows)


def _applies(joining: Joining) -> bool:
    """Return whether the product stores exponentials. All processes decide the same, from the number of classes that they share."""
    product = product_of(joining.own)
    return product is not None and product.exponentiates(joining.own._replace(outputs=[False] * 7), joining.shards.size)


class _Written(torch.autograd.Function):
    """A scalar loss whose gradients are written in forward, and handed out once. A second backward computes them again."""

    @staticmethod
    def forward(ctx: Any, joining: Joining, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ctx.joining, ctx.wanted = joining, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*tensors)
        loss, ctx.written, ctx.gathered = _computed(joining, ctx.wanted, None)
        each = _each_row(joining, ctx.gathered) if joining.each_row else None
        if each is not None:
            ctx.mark_non_differentiable(each)
        return loss, each

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors  # raises where one has been changed since
        written, ctx.written = ctx.written or _computed(ctx.joining, ctx.wanted, ctx.gathered)[1], None
        kernels.scale_(grads[0], *[t for t in written if t is not None])
        return None, *written


def _computed(joining: Joining, wanted: Sequence[bool], gathered: Tensor | None) -> tuple[Tensor, list[Tensor | None], Tensor]:
    """Return the loss, the gradients of input, weight and bias that are wanted, and what the processes exchanged.

    gathered: what they did exchange, so that a second backward only sums the gradient of the input again.
    """
    own, whole, shards, layer = joining.own, joining.whole, joining.shards, joining.own.x
    bias = None if layer.bias is None else layer.bias.detach()
    layer = Head(layer.input.detach(), layer.weight.detach(), bias, rows_of_exchange(own, shards), layer.accumulate, layer.logits)
    written = new_gradients(layer.parts, wanted)
    # a class of another process is out of range: a row has its sum, and no target here
    target, ignored = whole.target - shards.first, whole.ignore_index - shards.first
    if joining.weight is not None:
        target = torch.where(joining.weight == 0, ignored, target)
    call = own._replace(x=layer, target=target, ignore_index=ignored, lam=None, outputs=[False] * 7)
    divisor, held = joining.divisor(which_count(whole)), whole.loss == BY_PROBABILITY
    sums = Gradients(call, written, True, summing=shards.summing)
    memory, _ = sums.memory()
    exchanged, totals = [], []
    for start, end in ranges(len(layer.input), layer.chunk):
        e = memory[: end - start]
        chunk = of_rows(FUSED[type(call)].fusing, call, start, end, layer.of_rows(start, end), None)
        stats = _exponentials(chunk, e)
        known = all_gathered(stats, shards.group, shards.world) if gathered is None else gathered[:, :, start:end]
        chunk = chunk._replace(loss_scale=whole.loss_scale, normalizer=divisor, reduction="sum", z_loss=joining.z_loss)
        chunk = chunk._replace(lam=None if joining.weight is None else joining.weight[start:end])
        formulas = FORMULAS[call.loss].kernels
        total, factors = by_product(product_of(call).sharded_rows_of, chunk, (known, e), formulas, known, e, shards.rank, held)
        sums.add(end, factors)
        exchanged.append(known)
        totals.append(total)
    sums.finish()
    loss = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    return loss, written, exchanged[0] if len(exchanged) == 1 else torch.cat(exchanged, 2)


def _each_row(joining: Joining, gathered: Tensor) -> Tensor:
    """Return the cross entropy of each row, 0 in those that do not count, from what the processes exchanged."""
    keep = with_weight(which_count(joining.whole), joining.weight)
    offsets, sums, losses = gathered.unbind(1)
    log_w = log_shares(torch.where(keep, offsets + sums, 0.0))
    there = ~losses.isnan()  # which process has the target
    values = torch.where(there, losses - log_w, 0.0).sum(0)
    return torch.where(keep, torch.where(there.any(0), values, torch.nan), 0.0)


def _exponentials(call: RowwiseCall[Any], e: Tensor) -> Tensor:
    """Write the exponentials of some rows, and return of each row the offset, the log-sum, and the loss: nan without the target."""
    results = by_product(product_of(call).exponentials_of, call, (e,), FORMULAS[call.loss].kernels, True, e, False)
    found = dict(zip((*ROWWISE.results, *ROWWISE.kept), results, strict=False))
    stats: Tensor = found["stats"]
    stats[2].copy_(found["loss"])
    return stats
