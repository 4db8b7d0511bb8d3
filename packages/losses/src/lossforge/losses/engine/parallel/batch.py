"""A batch whose rows are spread over processes: sums over all rows, and the rows of all.

The loss of the batch is in every process. Its gradient is that of the sum of what all processes return, as the gradients of InfoNCE are.
Two kinds of values occur on the way to it. A value of this process's rows is a part of what all have together; a common value is the same
in every process, and each computes the same from it. Between them, with the gradients that follow:

    part -> common     `summed`: the gradient of each part is that of the sum
    common -> part     `for_own_rows`: the gradient is the sum of the processes'
    own -> all rows    `gathered`, for a part: the gradient is the sum of the processes' for this process's rows
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.engine.calls import compute
from lossforge.losses.engine.parallel.agreement import RefusedByAllError, agreed
from lossforge.losses.engine.parallel.shards import SummedGradient, all_gathered
from lossforge.losses.templates.plain_forms import reduced


class Batch(NamedTuple):
    """The rows of a batch.

    Attributes:
        rows: of each process, how many it has.
        group: the process group; None where this process has all rows.
        rank: of this process in the group.
    """

    rows: Sequence[int]
    group: Any = None
    rank: int = 0

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def first(self) -> int:
        """The place of this process's first row among all."""
        return sum(self.rows[: self.rank])

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum of the parts of all processes, a common value."""
        return part if self.group is None else _Summed.apply(part, self.group)

    def for_own_rows(self, common: Tensor) -> Tensor:
        """Return a common value for a computation with this process's rows, or for the caller of the loss."""
        return common if self.group is None else SummedGradient.apply(common, self.group)

    def gathered(self, own: Tensor) -> Tensor:
        """Return the rows of all processes in their order, for a part. own: this process's, (N, …)."""
        return own if self.group is None else _Gathered.apply(own, self)

    def largest(self, own: Tensor) -> Tensor:
        """Return the largest of all processes' values, element by element, without a gradient."""
        found = own.detach()
        if self.group is not None:
            found = found.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return found

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over all rows, for a computation with this process's rows."""
        return self.for_own_rows(self.summed(x.sum(0))) / self.total

    def logsumexp(self, own: Tensor) -> Tensor:
        """Return the log-sum-exp over all rows, without a gradient."""
        found = own.logsumexp(0)
        return found if self.group is None else all_gathered(found.unsqueeze(0), self.group, len(self.rows)).flatten(0, 1).logsumexp(0)


def batch_of(group: Any, of: str, x: Tensor, other: Tensor | None = None, least: int = 0) -> Batch:
    """Return the batch to which a process's rows x (N, D) belong.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None.
        of: what the loss calls x, in messages.
        other: a tensor beside x that may have a gradient of its own, and has as many rows as x or as many in each process.
        least: how many rows a batch must have.
    """
    if group is None:
        found = Batch([len(x)])
    else:
        both = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, other)]
        known = agreed(group, of, x, len(x if other is None else other), both[0], (both[1], False))
        if len(set(known.first)) > 1:
            raise RefusedByAllError(f"tensors beside {of} must need gradients in all processes of group or in none, got {known.first}")
        if known.columns != known.rows and len(set(known.columns)) > 1:
            raise RefusedByAllError(f"tensors beside {of} must have as many rows in all processes of group, got {[*known.columns]}")
        found = Batch(known.rows, known.group, known.rank)
    if found.total < least:
        kind, over = (ValueError, "") if group is None else (RefusedByAllError, " in all processes of group together")
        raise kind(f"{of} must have shape (N, D) with at least {least} rows{over}, got {found.total}")
    return found


def loss_of_rows(batch: Batch, checked: CheckedCall[Any], rows: int) -> Tensor:
    """Compute a checked call of this process's rows, and add it up over the processes.

    Args:
        batch: the processes.
        checked: the call, whose columns are those of all processes.
        rows: how many rows all processes have together, by which a mean divides.
    """
    call = checked.call
    if call.reduction == "none":
        return compute(checked)
    factor = call.loss_scale
    if call.reduction == "mean" and call.normalizer is None:
        factor = factor / rows if rows else 0.0 if call.empty_is_zero else float("nan")
    own = compute(CheckedCall(call._replace(reduction="sum", normalizer=None, loss_scale=1.0), checked.options, first))
    total = batch.summed(own.view(1)).sum()
    return checked.finish((batch.for_own_rows(reduced(total, factor, call.normalizer, "sum", call.empty_is_zero)),))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, batch: Batch) -> Tensor:
        ctx.batch = batch
        most, world = max(batch.rows), len(batch.rows)
        padded = F.pad(own, (*(0, 0) * (own.ndim - 1), 0, most - len(own))).contiguous()
        parts = all_gathered(padded, batch.group, world)
        return torch.cat([part[:n] for part, n in zip(parts, batch.rows, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        batch: Batch = ctx.batch
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total = grads[0].to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=batch.group)
        return total[batch.first : batch.first + batch.rows[batch.rank]].to(grads[0].dtype), None
