"""A scalar loss over processes in three matrix products: the gradient is written in forward.

The product stores exponentials E of this process's logits, each row's relative to an offset c (lossforge.kernels.linear.exponentials).
After the exchange the log-sum-exp of all classes is known. The gradient of the logits is then E times one factor a row, exp(c - lse). The
target's entry differs: it is written such that the same factor holds for it.

The exchange is the one of rows.py, so that a process may go this way while another, whose part is smaller or otherwise laid out, does not.
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
from lossforge.losses.linear.engine import Gradients, by_product, product_of, rows_of_chunks
from lossforge.losses.parallel.rows import Joining, joined, values_of
from lossforge.losses.reference import reduced, which_count
from lossforge.losses.state import plain
from lossforge.losses.templates.rowwise import ROWWISE

LEAST = 1e-30
"""The least factor of a row: of a smaller one the target's entry would be infinite."""


def in_three_products(finish: Any) -> Tensor | None:
    """Return the loss of a checked call by its `finish`, its gradients written; None where it takes four products.

    It does unless gradient="forward" is asked for, where other results are wanted, and where one chunk does not hold all rows.
    """
    if torch.compiler.is_compiling() or not isinstance(finish, functools.partial) or finish.func is not joined:
        return None
    (joining,) = finish.args
    if not (_applies(joining) and _fits(joining.own)):
        return None
    found: Tensor = _Written.apply(joining, *joining.own.x[:3])
    return found


def _applies(joining: Joining) -> bool:
    own, whole, layer = joining.own, joining.whole, joining.own.x
    if not isinstance(layer, Head) or joining.mode != "forward" or whole.reduction == "none" or any(whole.outputs):
        return False
    if own.weight is not None or whole.target.is_floating_point() or whole.target_b is not None or not joining.shards.own:
        return False
    if not (torch.is_grad_enabled() and layer.requires_grad and plain(*layer.tensors, own.target)):
        return False
    product = product_of(own)
    return product is not None and product.exponentiates(own._replace(outputs=[False] * 7))


def _fits(own: RowwiseCall[Any]) -> bool:
    """Return whether one chunk holds all rows."""
    weight = own.x.weight
    return rows_of_chunks(own, weight if weight.requires_grad else None, False)[0] == len(own.x.input)


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
    own, whole, layer = joining.own, joining.whole, joining.own.x
    bias = None if layer.bias is None else layer.bias.detach()
    layer = Head(layer.input.detach(), layer.weight.detach(), bias, layer.chunk, layer.accumulate, layer.logits)
    written = [torch.empty_like(t) if want and t is not None else None for t, want in zip(layer[:3], wanted, strict=True)]
    keep, mine = which_count(whole), own.target != own.ignore_index
    # -1, an index out of range, counts: a row has its sum, and no target here
    call = own._replace(x=layer, target=torch.where(mine, own.target, torch.where(keep, -1, own.ignore_index)), outputs=[False] * 7)
    sums = Gradients(call, written, False)
    e, _ = sums.memory()
    formulas = FORMULAS[own.loss].kernels
    results = by_product(product_of(call).exponentials_of, call, (e,), formulas, True, e)
    found = dict(zip((*ROWWISE.results, *ROWWISE.kept), results, strict=False))
    offset, log_sum, _ = found["stats"]
    loss = torch.where(mine, found["loss"], 0.0)
    if gathered is None:
        gathered = joining.shards.gathered([offset + log_sum, loss, mine.to(loss.dtype)])
    values, total = values_of(joining, keep, *gathered.unbind(1))
    z = torch.where(keep, joining.z_loss * total.square(), 0.0)
    divisor = joining.divisor(keep)
    scale = reduced(torch.ones_like(total[0]), whole.loss_scale, divisor, "sum", whole.empty_is_zero)
    # the gradient of the logits is scale · (share of p · p - the target)
    share = torch.where(keep, (1.0 + 2.0 * joining.z_loss * total) * (offset - total).exp(), 0.0)
    share = torch.where(keep & (share.abs() < LEAST), LEAST, share) * torch.where(values.isnan(), torch.nan, 1.0)
    logit = offset + log_sum - loss  # of the target, capped
    of_target = (logit - offset).exp() - 1.0 / share
    if own.softcap is not None:
        of_target = of_target * (1.0 - (logit / own.softcap).square())
    at = own.target.clamp(min=0)[:, None]
    e.scatter_(1, at, torch.where(mine[:, None], of_target[:, None].to(e.dtype), e.gather(1, at)))
    sums.add(0, len(e), e, share * scale * own.logit_scale)
    sums.finish()
    return joining.reduced(values + z, divisor), written, gathered
