"""Divergence from a teacher's top-K where the student's classes are spread over processes.

A process has the logits of its own among the K classes, and the log-sum-exp of all its classes. K + 1 numbers a row are exchanged; with
these each process computes the loss of all rows, and the gradient of its own numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import TopKCall
from lossforge.losses.base import checks
from lossforge.losses.base.checks import nonzero
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.engine.linear.entries import Entries, logits_and_sums
from lossforge.losses.engine.parallel.cross_entropy_rows import log_shares, log_sum
from lossforge.losses.engine.parallel.shards import Shards
from lossforge.losses.templates.divergence import TopKEntries, rows_that_count, top_k_values
from lossforge.losses.templates.plain_forms import reduced_call


def of_all_classes(shards: Shards, layer: Head) -> Head:
    """Return a layer of as many classes as all processes have together, without their values: what a call is checked with."""
    weight, bias = (None if t is None else t.detach()[:1].expand(shards.classes, *t.shape[1:]) for t in (layer.weight, layer.bias))
    assert weight is not None
    return Head(layer.input, weight, bias)


def over_processes(shards: Shards, layer: Head, checked: CheckedCall[TopKCall[Any], Any]) -> Any:
    """Compute a checked call of all classes, and return what its public function returns.

    layer: with the weight and the bias of this process's classes.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(over_processes)(shards, layer, checked)
    call, x = checked.call, checked.call.x
    checks.one_of("gradient with group", checked.options.get("gradient"), (None, "backward"))
    for name, t in (("values", call.target), ("loss_weight", call.weight)):
        if t is not None:
            checks.without_gradient(name, t)
    weight, keep = rows_that_count(call)
    entries = TopKEntries.of(call, keep, shards.classes)
    # a row that does not count may hold anything
    input = x.input if call.weight is None and call.labels is None else torch.where(keep.unsqueeze(1), x.input, 0.0)
    hard = None if call.hard_weight is None or call.labels is None else _Labels.of(entries, torch.where(keep, call.labels, 0).long())
    classes = entries.classes if hard is None else torch.cat([entries.classes, hard.asked], 1)
    temperatures = [call.temperature, *[1.0] * (hard is not None and nonzero(call.temperature - 1))]
    scaling = call.logit_scale, call.softcap
    asked = Entries(_own(shards, classes), temperatures, *scaling, call.outputs[0], not shards.own, shards.summing)
    logits, sums, entropy = logits_and_sums(Head(input, layer.weight, layer.bias, *x.numbers), asked)
    found = shards.gathered([*logits.unbind(1), *sums, *([] if entropy is None else [entropy])])
    count, k = classes.shape[1], entries.classes.shape[1]
    z = found[:, :count].sum(0).t()  # each from the one process that has it
    lse = log_sum(found[:, count])
    log_p = torch.where(entries.member, z[:, :k] / call.temperature - lse.unsqueeze(1), -torch.inf)
    values = top_k_values(call, log_p, entries)
    if hard is not None and call.hard_weight is not None:
        nll = hard.nll(z, log_sum(found[:, count + len(sums) - 1]), shards.classes)
        values = call.hard_weight * nll + (call.soft_weight * values if nonzero(call.soft_weight) else 0.0)
    values = torch.where(keep, values, 0.0)
    counts = keep.to(values.dtype) if weight is None else torch.where(keep, weight.to(values.dtype), 0.0)
    if entropy is not None:
        log_w = log_shares(found[:, count])
        w = log_w.exp()
        entropy = torch.where(keep, (w * (torch.where(w > 0, found[:, -1], 0.0) - log_w)).sum(0), 0.0).detach()
    return checked.finish([reduced_call(call, values, counts, counts.sum()), entropy])


class _Labels(NamedTuple):
    """The labels of rows, whose logits are asked for after the entries'.

    classes: (N,). among: (N, K), which entry a label is. asked: (N, 1), the label, -1 where an entry asks for it already.
    """

    classes: Tensor
    among: Tensor
    asked: Tensor

    @staticmethod
    def of(entries: TopKEntries, labels: Tensor) -> "_Labels":
        among = entries.classes == labels.unsqueeze(1)
        return _Labels(labels, among, torch.where(among.any(1), -1, labels).unsqueeze(1))

    def nll(self, z: Tensor, lse: Tensor, count: int) -> Tensor:
        """Return the cross entropy of each row's label, nan where it is not one of `count` classes. z: (N, K + 1), the logits asked for."""
        exists = torch.where((self.classes >= 0) & (self.classes < count), 1.0, torch.nan).to(z.dtype)
        return (lse - z[:, -1] - torch.where(self.among, z[:, :-1], 0.0).sum(1)) * exists


def _own(shards: Shards, classes: Tensor) -> Tensor:
    """Return class indices as this process counts them, -1 for those of other processes."""
    here = (classes >= shards.first) & (classes < shards.first + shards.own)
    return torch.where(here, classes - shards.first, -1)
