"""lossforge::divergence: a loss between the softmax of rows of logits and that of a teacher."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.lazy import kernels
from lossforge.losses.operators.library import define, present
from lossforge.losses.operators.single import single, unplanned
from lossforge.losses.reference_divergence import divergence as reference


class Arguments(NamedTuple):
    """Arguments of the operator, for logits x (N, C, d…).

    target: the teacher's logits (N, C, d…); with values (N, K, d…), the teacher's K classes, indices of that shape. labels, of which
    ignore_index leaves a row out, and weight, of which 0 does: (N, d…). swap: the logits play the part of the formula's q, the teacher
    that of p.
    The value is Σ (or, with reduction "none", each) loss · weight · factor / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the weights of the rows not left out.
    """

    loss: str
    x: Tensor
    target: Tensor
    values: Tensor | None
    labels: Tensor | None
    weight: Tensor | None
    normalizer: Tensor | None
    hyper: list[float]
    swap: bool
    temperature: float
    ignore_index: int
    factor: float
    reduction: str
    empty_is_zero: bool

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[1:7]


SCHEMA = (
    "str loss, Tensor x, Tensor target, Tensor? values, Tensor? labels, Tensor? weight, Tensor? normalizer, float[] hyper, bool swap, "
    "float temperature, int ignore_index, float factor, str reduction, bool empty_is_zero"
)
define("divergence", f"({SCHEMA}, bool gradient, bool keep) -> (Tensor loss, Tensor stats, Tensor divisor, Tensor gradient)")
define("divergence_backward", f"({SCHEMA}, Tensor? stats, Tensor? divisor, Tensor upstream) -> Tensor")


def _spec(a: Arguments, divisor: Tensor | None) -> "kernels.DivergenceSpec | kernels.TopKSpec":
    rows = a.x.numel() // a.x.shape[1]
    scale = a.factor / rows if a.reduction == "mean" and divisor is None and not counted(a) else a.factor
    shared = a.temperature, a.ignore_index, scale, divisor, a.empty_is_zero, divisor is None and counted(a)
    if a.values is not None:
        renormalize, tail = a.hyper
        return kernels.TopKSpec(a.target, a.values, a.labels, a.weight, bool(renormalize), bool(tail), *shared)
    return kernels.DivergenceSpec(FORMULAS[a.loss].kernel, a.target, a.labels, a.weight, tuple(a.hyper), a.swap, *shared)


def _launch(spec: "kernels.DivergenceSpec | kernels.TopKSpec", x: Tensor, **wanted: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(spec, kernels.TopKSpec):
        return kernels.topk_divergence(spec, x, **wanted)
    return kernels.divergence(spec, x, **wanted)


def counted(a: Arguments) -> bool:
    """Whether a mean divides by what is counted on the device: the weights of the rows not left out."""
    return a.reduction == "mean" and not (a.labels is None and a.weight is None)


def find_divisor(a: Arguments) -> Tensor | None:
    if a.normalizer is not None or not counted(a):
        return a.normalizer
    if a.weight is None:
        assert a.labels is not None
        return kernels.count(a.labels, a.x.shape[1], a.ignore_index)
    kept = a.weight if a.labels is None else torch.where(a.labels != a.ignore_index, a.weight, 0)
    return kept.sum(dtype=torch.float32)


def counts_itself(a: Arguments) -> bool:
    """Whether one launch finds the divisor, too."""
    return a.normalizer is None and counted(a) and a.weight is None and a.labels is not None and kernels.counts_itself(a.labels, None)


def forward(a: Arguments, written: Tensor | None, keep: bool, itself: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, stats, divisor where it was computed), and the gradient into `written` where it is given. itself: one launch may do it all."""
    by = None if itself and counts_itself(a) else find_divisor(a)
    loss, stats = _launch(_spec(a, by), a.x, total=a.reduction != "none", stats=keep, gradient=written)
    return loss, stats, None if a.normalizer is not None else by


def prepared(a: Arguments, divisor: Tensor | None, written: Tensor | None) -> Callable[..., Tensor]:
    """(tensors, divisor, written) → total, as `forward` computes it, for tensors laid out as these and the same other arguments."""
    spec = _spec(a, divisor)
    planned = None if isinstance(spec, kernels.TopKSpec) else kernels.planned_divergence(spec, a.x, written)
    if planned is not None:
        return planned
    return unplanned(a, lambda a, divisor, written: _launch(_spec(a, divisor), a.x, gradient=written)[0])


def backward(a: Arguments, stats: Tensor | None, divisor: Tensor | None, upstream: Tensor, written: Tensor) -> None:
    """Write the gradient for what arrives at the loss. Without stats, forward is computed again for them."""
    spec = _spec(a, divisor if present(divisor) is not None else find_divisor(a))
    if present(stats) is None:
        _, stats = _launch(spec, a.x, stats=True)
    assert stats is not None
    if isinstance(spec, kernels.TopKSpec):
        kernels.topk_divergence_backward(spec, a.x, stats, upstream, written)
    else:
        kernels.divergence_backward(spec, a.x, stats, upstream, written)


def _fake(*args):
    *arguments, gradient, keep = args
    a = Arguments(*arguments)
    per_row = (a.x.shape[0], *a.x.shape[2:]) if a.reduction == "none" else ()
    rows = a.x.numel() // a.x.shape[1]
    return (
        a.x.new_empty(per_row, dtype=torch.float32),
        a.x.new_empty((kernels.STATS if a.values is None else 2, rows), dtype=torch.float32) if keep else a.x.new_empty(0),
        a.x.new_empty((), dtype=torch.float32) if a.normalizer is None and counted(a) else a.x.new_empty(0),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


gradient, direct = single("divergence", Arguments, ("stats", "divisor"), forward, backward, reference, _fake, flags=2)
