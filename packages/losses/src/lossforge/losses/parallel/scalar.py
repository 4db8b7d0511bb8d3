"""A scalar loss over processes in three matrix products: the gradient is written in forward.

The product stores exponentials E of this process's logits, each row's relative to an offset c (lossforge.kernels.linear.exponentials).
After the exchange the log-sum-exp of all classes is known. The gradient of the logits is then E times one factor a row, exp(c - lse). The
target's entry differs: it is written such that the same factor holds for it.

A chunk of rows is exchanged at a time, before its two further products. An exchange of 12 bytes a row takes less time than the memory of a
second chunk, which would let it run beside the next chunk's product, is worth. rows.py exchanges the same rows in the same order, so that
a process may go this way while another, whose part is smaller or otherwise laid out, does not.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Head
from lossforge.kernels.rowwise.call import RowwiseCall
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.call import of_rows
from lossforge.losses.linear.engine import FUSED, Gradients, by_product, product_of, ranges
from lossforge.losses.parallel.rows import Joining, joined, rows_of_exchange, values_of
from lossforge.losses.reference import reduced, which_count
from lossforge.losses.state import plain
from lossforge.losses.templates.rowwise import ROWWISE

LEAST = 1e-30
"""The least factor of a row: of a smaller one the target's entry would be infinite."""


def in_three_products(finish: Any) -> Tensor | None:
    """Return the loss of a checked call by its `finish`, its gradients written; None where it takes four products.

    It does where gradient="backward" is asked for, where other results are wanted, and where the product stores no exponentials.
    """
    if torch.compiler.is_compiling() or not isinstance(finish, functools.partial) or finish.func is not joined:
        return None
    (joining,) = finish.args
    if not _applies(joining):
        return None
    found: Tensor = _Written.apply(joining, *joining.own.x[:3])
    return found


def _applies(joining: Joining) -> bool:
    own, whole, layer = joining.own, joining.whole, joining.own.x
    if not isinstance(layer, Head) or joining.mode == "backward" or whole.reduction == "none" or any(whole.outputs):
        return False
    if own.weight is not None or whole.target.is_floating_point() or whole.target_b is not None or not joining.shards.own:
        return False
    if not (torch.is_grad_enabled() and layer.requires_grad and plain(*layer.tensors, own.target)):
        return False
    product = product_of(own)
    return product is not None and product.exponentiates(own._replace(outputs=[False] * 7))


class _Written(torch.autograd.Function):
    """A scalar loss whose gradients are written in forward, and handed out once. A second backward computes them again."""

    @staticmethod
    def forward(ctx: Any, joining: Joining, *tensors: Tensor | None) -> Tensor:
        ctx.joining, ctx.wanted = joining, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*tensors)
        loss, ctx.written, ctx.gathered = _computed(joining, ctx.wanted, None)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors  # raises where one has been changed since
        written, ctx.written = ctx.written or _computed(ctx.joining, ctx.wanted, ctx.gathered)[1], None
        for t in written:
            if t is not None:
                kernels.scale_(t, grads[0])
        return None, *written


def _computed(joining: Joining, wanted: Sequence[bool], gathered: Tensor | None) -> tuple[Tensor, list[Tensor | None], Tensor]:
    """Return the loss, the gradients of input, weight and bias that are wanted, and what the processes exchanged.

    gathered: what they did exchange, so that a second backward exchanges nothing.
    """
    own, layer = joining.own, joining.own.x
    bias = None if layer.bias is None else layer.bias.detach()
    layer = Head(layer.input.detach(), layer.weight.detach(), bias, rows_of_exchange(own, joining.shards), layer.accumulate, layer.logits)
    written = [torch.empty_like(t) if want and t is not None else None for t, want in zip(layer[:3], wanted, strict=True)]
    keep, mine = which_count(joining.whole), own.target != own.ignore_index
    # -1, an index out of range, counts: a row has its sum, and no target here
    call = own._replace(x=layer, target=torch.where(mine, own.target, torch.where(keep, -1, own.ignore_index)), outputs=[False] * 7)
    divisor = joining.divisor(keep)
    sums = Gradients(call, written, False)
    memory, _ = sums.memory()
    exchanged = []
    for start, end in ranges(len(layer.input), layer.chunk):
        rows = slice(start, end)
        chunk = of_rows(FUSED[type(call)].fusing, call, start, end, layer.of_rows(start, end), None)
        of_whole = joining._replace(whole=joining.whole._replace(target=joining.whole.target[rows]))
        known = None if gathered is None else gathered[:, :, rows]
        e = memory[: end - start]
        found, factors = _exponentials(of_whole, chunk, keep[rows], mine[rows], known, e)
        scale = reduced(torch.ones_like(factors[0]), joining.whole.loss_scale, divisor, "sum", joining.whole.empty_is_zero)
        sums.add(start, end, e, factors * scale * own.logit_scale)
        exchanged.append(found)
    sums.finish()
    gathered = torch.cat(exchanged, 2)
    values, total = values_of(joining, keep, *gathered.unbind(1))
    z = torch.where(keep, joining.z_loss * total.square(), 0.0)
    return joining.reduced(values + z, divisor), written, gathered


def _exponentials(
    joining: Joining, call: RowwiseCall[Any], keep: Tensor, mine: Tensor, gathered: Tensor | None, e: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the processes exchanged of some rows, and these rows' factors. The gradient of a sum's logits is the factors times `e`.

    Args:
        call: of these rows and this process's classes.
        keep, mine: which rows count, and which have their target here.
        gathered: what was exchanged, if it was.
        e: memory, where this writes the exponentials.
    """
    results = by_product(product_of(call).exponentials_of, call, (e,), FORMULAS[call.loss].kernels, True, e)
    found = dict(zip((*ROWWISE.results, *ROWWISE.kept), results, strict=False))
    offset, log_sum, _ = found["stats"]
    loss = torch.where(mine, found["loss"], 0.0)
    if gathered is None:
        gathered = joining.shards.gathered([offset + log_sum, loss, mine.to(loss.dtype)])
    values, total = values_of(joining, keep, *gathered.unbind(1))
    # the gradient of the logits is the share of p, times p, less the target's
    share = torch.where(keep, (1.0 + 2.0 * joining.z_loss * total) * (offset - total).exp(), 0.0)
    share = torch.where(keep & (share.abs() < LEAST), LEAST, share) * torch.where(values.isnan(), torch.nan, 1.0)
    logit = offset + log_sum - loss  # of the target, capped
    of_target = (logit - offset).exp() - 1.0 / share
    if call.softcap is not None:
        of_target = of_target * (1.0 - (logit / call.softcap).square())
    at = call.target.clamp(min=0)[:, None]
    e.scatter_(1, at, torch.where(mine[:, None], of_target[:, None].to(e.dtype), e.gather(1, at)))
    return gathered, share
