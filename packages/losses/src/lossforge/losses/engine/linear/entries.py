"""Logits of K classes a row and the row's log-sum-exps, from a layer's input, by chunks of logits: what losses of a few classes need.

Backward computes the logits again: four matrix products, and memory for one chunk. The gradient of a chunk's logits is softmax times that
of the log-sum-exp; the K entries are then overwritten, computed in float32 and rounded once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base.record import Several
from lossforge.losses.engine.gradients import new_gradients
from lossforge.losses.engine.linear.engine import Chunks, Gradients, Summing
from lossforge.losses.engine.parallel.shards import Shards, all_gathered

NOTHING = -100
BLOCK = 64
"""Classes whose largest logit is found first, where the likeliest classes are looked for."""


class Entries(NamedTuple):
    """What is asked of a layer's logits, scaled and capped.

    Attributes:
        classes: (N, K), class indices; those outside of the layer's classes have logit 0 and no gradient.
        temperatures: of the log-sum-exps.
        scale, softcap: how logits are read, before they are divided by a temperature.
        entropy: whether the entropy at the first temperature is wanted, without gradient.
        padding: whether the layer has no class but padding.
        summing: what starts to sum the gradient of the input over processes.
    """

    classes: Tensor
    temperatures: Sequence[float]
    scale: float = 1.0
    softcap: float | None = None
    entropy: bool = False
    padding: bool = False
    summing: Summing | None = None

    def calls(self, x: Any) -> list[RowwiseCall[Any]]:
        """Return a call for each temperature, whose log-sum-exps are its results."""
        nothing = torch.full((x.shape[0],), NOTHING, dtype=torch.int64, device=x.device)
        outputs = [[False, True, self.entropy and not i, *[False] * 4] for i in range(len(self.temperatures))]
        of = [(self.scale / t, None if self.softcap is None else self.softcap / t) for t in self.temperatures]
        return [
            RowwiseCall("cross_entropy", x, nothing, logit_scale=scale, softcap=cap, reduction="none", outputs=asked)
            for (scale, cap), asked in zip(of, outputs, strict=True)
        ]

    def there(self, count: int) -> Tensor:
        """Return which entries are classes of the layer."""
        return (self.classes >= 0) & (self.classes < (0 if self.padding else count))

    def read(self, logits: Tensor, start: int, end: int) -> Tensor:
        """Return the logits of some rows at their entries, scaled and capped, in float32 at least."""
        near = logits.gather(1, self.classes[start:end].clamp(0, logits.shape[1] - 1))
        z = near.to(torch.promote_types(near.dtype, torch.float32)) * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def logits_and_sums(layer: Head, entries: Entries) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logits at the entries (N, K), log-sum-exps (temperatures, N), both differentiable, and entropies (N,)."""
    found: Any = _LogitsAndSums.apply(layer, entries, *layer.parts)
    return found


class _LogitsAndSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Head, entries: Entries, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.entries, ctx.numbers, ctx.wanted = entries, layer.numbers, ctx.needs_input_grad[2:]
        own = Head(layer.input.detach(), layer.weight.detach(), None if layer.bias is None else layer.bias.detach(), *layer.numbers)
        (first, *others), rows = entries.calls(own), len(own.input)
        chunks = Chunks(first, None, 1.0)
        dtype = torch.promote_types(own.dtype, torch.float32)
        found = torch.empty(entries.classes.shape, dtype=dtype, device=own.device)
        sums = torch.full((1 + len(others), rows), -torch.inf, dtype=dtype, device=own.device)
        entropy = sums.new_zeros(rows) if entries.entropy else None
        for start, end, chunk, _ in chunks.along(0, *Gradients(first, [None] * 3).memory()):
            found[start:end] = entries.read(chunk.x, start, end)
            for i, each in enumerate(_softened(chunk, [first, *others])):
                _, _, lse, of_rows, *_ = chunks.forward(each, None, True)
                if lse is not None and not entries.padding:
                    sums[i, start:end] = lse
                    if entropy is not None and of_rows is not None:
                        entropy[start:end] = of_rows
        logits = torch.where(entries.there(own.shape[1]), found, 0.0)
        ctx.save_for_backward(sums, *tensors)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logits, sums, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        sums, *tensors = ctx.saved_tensors
        entries: Entries = ctx.entries
        own = Head(*tensors, *ctx.numbers)
        first, *others = entries.calls(own)
        written = new_gradients(tensors, ctx.wanted)
        chunks, gradients = Chunks(first, None, 1.0), Gradients(first, written, summing=entries.summing)
        there, of_logits, of_sums = entries.there(own.shape[1]), *grads[:2]
        for start, end, chunk, to in chunks.along(0, *gradients.memory()):
            of_chunk = of_sums[:, start:end]
            at = _at_entries(entries, chunk.x, slice(start, end), of_logits[start:end], sums[:, start:end], of_chunk)
            calls = _softened(chunk, [first, *others])
            beside = [_softmax_times(chunks, each, torch.empty_like(to), g) for each, g in zip(calls[1:], of_chunk[1:], strict=True)]
            _softmax_times(chunks, calls[0], to, of_chunk[0])  # last, because it may take the place of the logits
            for each in beside:
                to.add_(each)
            _overwrite(to, entries.classes[start:end], there[start:end], at)
            if entries.padding:
                to.zero_()
            gradients.add(end)
        gradients.finish()
        return None, None, *written


def _softened(chunk: RowwiseCall, calls: Sequence[RowwiseCall[Any]]) -> list[RowwiseCall]:
    """Return a chunk's call at each temperature."""
    return [chunk._replace(logit_scale=each.logit_scale, softcap=each.softcap, outputs=each.outputs) for each in calls]


def _softmax_times(chunks: Chunks, chunk: RowwiseCall, to: Tensor, of_sum: Tensor) -> Tensor:
    """Write the gradient of a chunk's logits for that of their log-sum-exps."""

    def slopes(results: Several) -> Sequence[Tensor | None]:
        return [None, None, of_sum.contiguous(), None]

    chunks.differentiated(chunk._replace(outputs=[False, True, *[False] * 5]), to, slopes)
    return to


def _at_entries(entries: Entries, logits: Tensor, rows: slice, of_logits: Tensor, sums: Tensor, of_sums: Tensor) -> Tensor:
    """Return the gradient of the layer's output at the entries of some rows."""
    z = entries.read(logits, rows.start, rows.stop)
    found = of_logits
    for temperature, lse, of_sum in zip(entries.temperatures, sums, of_sums, strict=True):
        found = found + (z / temperature - lse[:, None]).exp() * (of_sum / temperature)[:, None]
    return found * entries.scale if entries.softcap is None else found * entries.scale * (1 - (z / entries.softcap).square())


def _overwrite(to: Tensor, index: Tensor, there: Tensor, values: Tensor) -> None:
    """Write values at the entries that are there. Those of a row that are not there write what its first one writes."""
    near = index.clamp(0, to.shape[1] - 1)
    first = there.to(torch.uint8).argmax(1, keepdim=True)
    values = torch.where(there.any(1, keepdim=True), values.to(to.dtype), to.gather(1, near))
    # of a row without any, the entries need not be the same class, and each keeps its value
    same = there | ~there.any(1, keepdim=True)
    to.scatter_(1, torch.where(same, near, near.gather(1, first)), torch.where(same, values, values.gather(1, first)))


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the classes of the k largest logits of each row, largest first.

    They lie in the k blocks of classes with the largest maxima. torch's topk of all classes took as long as the product on an H200.
    """
    classes = logits.shape[1]
    whole = classes // BLOCK * BLOCK
    if classes < 4 * k * BLOCK:
        return logits.topk(k, 1).indices
    block = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(2).topk(k, 1).indices
    each = torch.arange(classes, device=logits.device)
    there = (block.unsqueeze(2) * BLOCK + each[:BLOCK]).flatten(1)
    there = torch.cat([there, each[whole:].expand(len(there), -1)], 1)
    return there.gather(1, logits.gather(1, there).topk(k, 1).indices)


def top_k_of(layer: Head, k: int, scale: float, softcap: float | None, group: Shards | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities (N, K) of the likeliest classes of each row, the classes, and the log-sum-exps (N,), without gradient.

    scale, softcap: of the softened logits. group: how the classes of all processes are spread.
    """
    if torch.compiler.is_compiling():  # a graph breaks here
        return torch.compiler.disable(top_k_of)(layer, k, scale, softcap, group)
    rows, own = len(layer.input), layer.weight.shape[0]
    asked = Entries(torch.empty((rows, 0), dtype=torch.int64, device=layer.device), [1.0], scale, softcap)
    (call,) = asked.calls(layer)
    chunks = Chunks(call, None, 1.0)
    dtype = torch.promote_types(layer.dtype, torch.float32)
    values = torch.full((rows, k), -torch.inf, dtype=dtype, device=layer.device)
    classes = torch.zeros((rows, k), dtype=torch.int64, device=layer.device)
    sums = torch.full((rows,), -torch.inf, dtype=dtype, device=layer.device)
    found = 0 if group is not None and not group.own else min(k, own)
    for start, end, chunk, _ in chunks.along(0, *Gradients(call, [None] * 3).memory()):
        if found:
            lse = chunks.forward(chunk, None, True)[2]
            assert lse is not None
            sums[start:end] = lse
            classes[start:end, :found] = _likeliest(chunk.x, found)
            values[start:end, :found] = asked._replace(classes=classes).read(chunk.x, start, end)[:, :found]
    if group is not None:
        each, at = group.gathered([*values.unbind(1), sums]), all_gathered(classes + group.first, group.group, group.world)
        sums = each[:, k].logsumexp(0)
        of_all, at = each[:, :k].permute(2, 0, 1).flatten(1), at.transpose(0, 1).flatten(1)
        values, place = of_all.topk(k, 1)
        classes = at.gather(1, place)
    return values - sums.unsqueeze(1), classes, sums
