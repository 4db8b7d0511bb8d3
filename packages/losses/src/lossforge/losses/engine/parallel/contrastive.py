"""Losses of all pairs of two sets of features whose rows are spread over processes.

Each process has rows of a and of b that belong together. The parts of b go round a ring (ring.py). Each process computes its rows of a
against the part that is here, by the kernels of the template. It keeps maximum and sum of exponentials of its rows; those of columns, for a
loss of both sides, follow their part. Backward goes round once more, and the gradient of each part follows it.

A loss of sigmoids needs nothing of other pairs. Its gradient is written in forward, so that one round is all.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.features.calls import SimilarityCall
from lossforge.kernels.product import add_product
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.base.state import gradient_in_forward, kernels_apply
from lossforge.losses.engine.parallel.agreement import RefusedByAllError, agreed
from lossforge.losses.engine.parallel.ring import Part, Ring
from lossforge.losses.engine.parallel.shards import all_gathered
from lossforge.losses.templates.plain_forms import reduced
from lossforge.losses.templates.similarity import NOWHERE, products, related

LOWEST, TINY = torch.finfo(torch.float32).min, torch.finfo(torch.float32).tiny
"""The least maximum of a row, and the least size of a scale: as the kernels have them."""


def over_processes(group: Any, checked: CheckedCall[SimilarityCall], of: str, distinct: bool = False) -> Tensor:
    """Compute a checked call of this process's rows against those of all processes.

    Args:
        group: a process group, or a DeviceMesh of one dimension.
        checked: the call, with as many columns that belong to rows as it has rows.
        of: what the loss calls the features, in messages.
        distinct: whether equal labels of two processes mean two things.
    """
    call = checked.call
    if checked.options.get("gradient") == "forward" and call.loss != "sigmoid":
        raise ValueError('gradient="forward" with group is served by siglip_loss_from_features alone: a softmax takes a second round')
    sharded = _sharded(group, call, checked.options, of, distinct)
    call = sharded.call
    return checked.finish((_OverProcesses.apply(sharded, call.a, call.b, call.scale, call.bias),))


class ShardedCall(NamedTuple):
    """A call whose columns are spread over processes.

    Attributes:
        ring: the processes.
        call: of this process's rows and its own columns, with reduction "none" or "sum".
        travels: whether gradients follow the parts.
        in_forward: whether the gradient is written in forward.
        by_kernels: whether the kernels compute it.
    """

    ring: Ring
    call: SimilarityCall
    travels: bool
    in_forward: bool
    by_kernels: bool

    def against(self, origin: int, part: Part) -> SimilarityCall | None:
        """Return the call of this process's rows against another's part; None where one of them is empty."""
        if not (len(self.call.a) and len(part.features)):
            return None
        offset = 0 if origin == self.ring.rank else -NOWHERE  # from above it would overwrite the products of pairs
        return self.call._replace(b=part.features, column_labels=part.labels, offset=offset, pairs=self.ring.rows[origin])

    def size(self) -> tuple[Tensor, Tensor]:
        """Return the sign of the scale and its size, 0-d."""
        dtype = wide(self.call.a)
        scale = torch.full((), self.call.logit_scale, dtype=dtype, device=self.call.a.device)
        scale = scale if self.call.scale is None else scale * self.call.scale.to(dtype)
        return scale.sign(), scale.abs().clamp(min=TINY)


def wide(t: Tensor) -> torch.dtype:
    """Return the dtype of sums and statistics of features."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _sharded(group: Any, call: SimilarityCall, options: Any, of: str, distinct: bool) -> ShardedCall:
    tensors = [t for t in (call.a, call.b, call.scale, call.bias) if t is not None]
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    wanted = torch.is_grad_enabled() and call.b.requires_grad
    in_forward = call.loss == "sigmoid" and graded and gradient_in_forward(options.get("gradient"), _first_graded(tensors), call.reduction)
    group, rank, rows, columns, travels, writing = agreed(group, of, call.a, len(call.b), graded, (wanted, in_forward))
    if len(set(writing)) > 1:
        raise RefusedByAllError("gradient must be the same in all processes of group, got several")
    if call.row_labels is not None and call.column_labels is not None:
        shift = sum(rows[:rank]) if distinct else 0
        of_rows, of_columns = (t.long() + shift for t in (call.row_labels, call.column_labels))
        call = call._replace(row_labels=of_rows, column_labels=of_columns)
    factor, reduction = call.loss_scale, "none" if call.reduction == "none" else "sum"
    if call.reduction == "mean" and call.normalizer is None:
        total = sum(rows)
        factor = factor / total if total else 0.0 if call.empty_is_zero else float("nan")
    call = call._replace(reduction=reduction, loss_scale=factor)
    by_kernels = kernels_apply(call.a.detach())
    return ShardedCall(Ring(group, rank, rows, columns), call, any(travels), in_forward, by_kernels)


def _first_graded(tensors: Sequence[Tensor]) -> Tensor:
    return next(t for t in tensors if t.requires_grad)


class Sums(NamedTuple):
    """The gradients of a, b, scale and bias without the factors that all of their elements share, in float32; None where not wanted."""

    of_a: Tensor | None
    of_b: Tensor | None
    of_scale: Tensor | None
    of_bias: Tensor | None


Kept = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What forward keeps for backward: the log-sum-exp of rows, their shares, and the log-sum-exp of columns."""


class _OverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: ShardedCall, *tensors: Tensor | None) -> Tensor:
        ctx.sharded = sharded
        wanted = ctx.needs_input_grad[1:]
        values, kept, ctx.sums = (_sigmoids if sharded.call.loss == "sigmoid" else _softmaxes)(sharded, wanted)
        ctx.save_for_backward(*kept, *tensors)
        call, ring = sharded.call, sharded.ring
        if call.reduction == "none":
            return values * call.loss_scale
        total = all_gathered(values.sum().view(1), ring.group, ring.world).sum()  # in the same order in each process
        return reduced(total, call.loss_scale, call.normalizer, "sum", call.empty_is_zero)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # once_differentiable would refuse it only where the upstream gradient requires grad
            raise RuntimeError("a contrastive loss with group has no second derivative: call backward without create_graph=True")
        *kept, a, _, scale, bias = ctx.saved_tensors  # raises where one has been changed since
        sharded, wanted = ctx.sharded, ctx.needs_input_grad[1:]
        call: SimilarityCall = sharded.call
        each = grads[0].contiguous() if call.reduction == "none" else None
        sums: Sums = ctx.sums or _gradients(sharded, (kept[0], kept[1], kept[2]), each, wanted)
        upstream = torch.ones_like(grads[0].sum())
        if each is None:  # the loss of each process is that of all, and what each process does with it counts
            upstream = grads[0].clone()
            dist.all_reduce(upstream, group=sharded.ring.group)
        factor = reduced(upstream, call.loss_scale, call.normalizer, "sum", call.empty_is_zero)
        of_similarity = factor * call.logit_scale if scale is None else factor * call.logit_scale * scale.to(factor.dtype)
        found: list[Tensor | None] = [None] * 4
        for place, of_features in ((0, sums.of_a), (1, sums.of_b)):
            if wanted[place] and of_features is not None:
                found[place] = torch.mul(of_features, of_similarity, out=torch.empty_like(of_features, dtype=a.dtype))
        if sums.of_scale is not None:
            found[2] = (sums.of_scale * (call.logit_scale * factor)).to(scale.dtype)
        if sums.of_bias is not None:
            found[3] = (sums.of_bias * factor).to(bias.dtype)
        return None, *found


def _softmaxes(sharded: ShardedCall, wanted: Sequence[bool]) -> tuple[Tensor, Kept, None]:
    """Return the loss of each row, and what backward needs."""
    call, ring, (sign, size) = sharded.call, sharded.ring, sharded.size()
    labelled, both = call.labelled, call.loss == "both_sides"
    of_pairs = sign.new_zeros(len(call.a))
    of_rows = _nothing(4 if labelled else 2, len(call.a), sign)

    def step(origin: int, part: Part) -> Tensor | None:
        nonlocal of_rows
        own = sharded.against(origin, part)
        columns = _nothing(2, len(part.features), sign)
        if own is not None:
            rows, tiles = _parts_of(sharded, own, None if labelled else of_pairs)
            of_rows = _joined(torch.cat((of_rows.unsqueeze(1), rows), 1), size)
            columns = columns if tiles is None else _joined(tiles, size)
        return columns.t().contiguous() if both else None

    def add(before: Tensor, own: Tensor) -> Tensor:
        return _joined(torch.stack((before.t(), own.t()), 1), size).t().contiguous()

    of_columns = ring.around(Part(call.b.contiguous(), call.column_labels), step, add)
    top, total = of_rows[0], of_rows[1].log()
    share = None
    if labelled:
        inside, share = of_rows[3] > 0, 1.0 / of_rows[3].clamp(min=1.0)
        values = torch.where(inside, total - of_rows[2] * share * size, 0.0)
        row_lse = torch.stack((torch.where(inside, sign * top, 0.0), torch.where(inside, total, torch.inf)))
    else:
        values = (top - of_pairs) * size + total
        row_lse = torch.stack((sign * top, total))
    if of_columns is None:
        return values, (row_lse, share, None), None
    top, total = of_columns[:, 0], of_columns[:, 1].log()
    paired = len(call.a)
    values = 0.5 * (values + (top[:paired] - of_pairs) * size + total[:paired])
    total[paired:] = torch.inf  # what belongs to no row takes no part in the gradient: exp(x - inf) is 0
    return values, (row_lse, None, torch.stack((sign * top, total))), None


def _sigmoids(sharded: ShardedCall, wanted: Sequence[bool]) -> tuple[Tensor, Kept, Sums | None]:
    """Return the loss of each row, and the gradients where they are written in forward."""
    call = sharded.call
    values = sharded.size()[0].new_zeros(len(call.a))
    gradient = _Gradient(sharded, (None, None, None), None, wanted) if sharded.in_forward else None

    def step(origin: int, part: Part) -> Tensor | None:
        own = sharded.against(origin, part)
        if own is not None:
            values.add_(_parts_of(sharded, own, None)[0][0].sum(0))
        return None if gradient is None else gradient.step(origin, part)

    of_b = sharded.ring.around(Part(call.b.contiguous()), step, torch.add)
    return values, (None, None, None), None if gradient is None else gradient.sums(of_b)


def _gradients(sharded: ShardedCall, kept: Kept, each: Tensor | None, wanted: Sequence[bool]) -> Sums:
    """Return the gradients. each: the upstream gradient of each row, or None for 1."""
    call, (_, _, column_lse) = sharded.call, kept
    of_pairs = None
    if each is not None and column_lse is not None:
        of_pairs = torch.cat((each, each.new_zeros(len(call.b) - len(each))))
    gradient = _Gradient(sharded, kept, each, wanted)
    part = Part(call.b.contiguous(), call.column_labels, column_lse, of_pairs)
    return gradient.sums(sharded.ring.around(part, gradient.step, torch.add))


class _Gradient:
    """The gradients of a round, summed over the parts.

    Attributes:
        of_a: (N, D), None where a needs none.
        of_numbers: of scale and of bias, 0-d, None where they need none.
    """

    def __init__(self, sharded: ShardedCall, kept: Kept, each: Tensor | None, wanted: Sequence[bool]) -> None:
        self.sharded, self.kept, self.each = sharded, kept, each
        a = sharded.call.a
        self.dtype = wide(a)
        self.of_a = torch.zeros(a.shape, dtype=self.dtype, device=a.device) if wanted[0] else None
        self.of_numbers = [torch.zeros((), dtype=self.dtype, device=a.device) if want else None for want in wanted[2:]]

    def step(self, origin: int, part: Part) -> Tensor | None:
        """Add the gradients of this process's rows against a part, and return that of the part."""
        sharded, features = self.sharded, part.features
        own = sharded.against(origin, part)
        of_part = torch.zeros(features.shape, dtype=self.dtype, device=features.device) if sharded.travels else None
        if own is None:
            return of_part
        upstream = None if self.each is None else (self.each, self.each if part.grads is None else part.grads)
        totals = [t is not None for t in self.of_numbers]
        for start, end, gradient, *sums in _blocks_of(sharded, own, (*self.kept[:2], part.lse), upstream, totals):
            if self.of_a is not None:
                add_product(self.of_a[start:end], gradient, features.to(gradient.dtype), False)
            if of_part is not None:
                add_product(of_part, gradient.t(), own.a[start:end].to(gradient.dtype), False)
            for number, each in zip(self.of_numbers, sums, strict=True):
                if number is not None:
                    number += each.sum()
        return of_part

    def sums(self, of_b: Tensor | None) -> Sums:
        return Sums(self.of_a, of_b, *self.of_numbers)


def _nothing(planes: int, length: int, like: Tensor) -> Tensor:
    """Return the statistics of rows before any column: see _joined."""
    found = like.new_zeros((planes, length))
    found[0] = LOWEST
    return found


def _joined(parts: Tensor, size: Tensor) -> Tensor:
    """Return the statistics (planes, length) of several tiles, (planes, tiles, length).

    The planes are, with x the products times the scale's sign, and `size` the scale's: the largest x, m; Σ exp((x - m) size); and with
    labels Σ (x - m) over the positives, and their number.
    """
    top = parts[0].amax(0)
    found = [top, (parts[1] * ((parts[0] - top) * size).exp()).sum(0)]
    if len(parts) == 4:
        near = torch.where(parts[3] == 0, 0.0, parts[2] + parts[3] * (parts[0] - top))
        found += [near.sum(0), parts[3].sum(0)]
    return torch.stack(found)


def _parts_of(sharded: ShardedCall, call: SimilarityCall, own: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the statistics of each tile's rows and columns; of a sigmoid the rows' losses. own: where products of pairs are written."""
    if sharded.by_kernels:
        found: tuple[Tensor, Tensor | None] = kernels.load("features.similarity.launch").parts_of(call, own)
        return found
    x, scale, bias = products(call)
    counts, together = related(call, x)
    if call.loss == "sigmoid":
        x = x * scale + bias
        return -torch.nn.functional.logsigmoid(torch.where(together, x, -x)).sum(1).view(1, 1, -1), None
    sign, size = sharded.size()
    x = torch.where(counts, x * sign, -torch.inf)
    planes = []
    for dim in (1, 0):
        top = x.amax(dim, keepdim=True).clamp(min=LOWEST)
        planes.append([top.squeeze(dim), ((x - top) * size).exp().sum(dim)])
        if call.labelled:
            planes[-1] += [torch.where(together, x - top, 0.0).sum(dim), together.sum(dim).to(x.dtype)]
    if own is not None and call.offset == 0:
        own.copy_(x.diagonal()[: len(own)])
    rows, columns = (torch.stack(each).unsqueeze(1) for each in planes)
    return rows, columns if call.loss == "both_sides" else None


def _blocks_of(
    sharded: ShardedCall, call: SimilarityCall, kept: Kept, upstream: tuple[Tensor, Tensor] | None, totals: Sequence[bool]
) -> Iterator[Any]:
    """Return blocks of rows of the gradient of the similarities: their first row and last, the gradient, and sums for scale and bias.

    Args:
        kept: log-sum-exp of rows, shares, and log-sum-exp of columns.
        upstream: the gradients of each row's loss, and of that of each column.
        totals: whether the sums for scale and for bias are wanted.
    """
    if sharded.by_kernels:
        launches = kernels.load("features.similarity.launch")
        found: Iterator[Any] = launches.blocks_of(call, kept, None if upstream is None else launches.Upstream(*upstream), totals)
        return found
    g, x = _gradient_by_reference(call, kept, upstream)
    return iter([(0, len(g), g, (g * x).sum() if totals[0] else None, g.sum())])


def _gradient_by_reference(call: SimilarityCall, kept: Kept, upstream: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of the similarities, as kernels/features/similarity/kernel.py has it, and the products of features."""
    x, scale, bias = products(call)
    counts, together = related(call, x)
    row_lse, share, column_lse = kept
    if row_lse is None:
        g = (x * scale + bias).sigmoid() - together.to(x.dtype)
    else:
        (m, ls), shares = row_lse.unsqueeze(2), 1.0 if share is None else share.unsqueeze(1)
        g = ((x - m) * scale - ls).exp() - torch.where(together & ls.isfinite(), shares, 0.0)
    if upstream is not None:
        g = g * upstream[0].unsqueeze(1)
    if column_lse is not None:
        m, ls = column_lse.unsqueeze(1)
        q = ((x - m) * scale - ls).exp() - together.to(x.dtype)
        g = 0.5 * (g + (q if upstream is None else q * upstream[1]))
    return torch.where(counts, g, 0.0), x
