"""lossforge::contrastive: a loss over a matrix of similarities in which row i and column i + offset belong together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.lazy import kernels
from lossforge.losses.operators.library import define, present
from lossforge.losses.operators.single import single, unplanned
from lossforge.losses.reference import contrastive as reference


class Arguments(NamedTuple):
    """Arguments of the operator, for similarities x (N, M).

    The value is Σ (or, with reduction "none", each) loss · factor / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of pairs, N.
    """

    loss: str
    x: Tensor
    normalizer: Tensor | None
    offset: int
    scale: float
    factor: float
    reduction: str
    empty_is_zero: bool

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[1:3]


SCHEMA = "str loss, Tensor x, Tensor? normalizer, int offset, float scale, float factor, str reduction, bool empty_is_zero"
define("contrastive", f"({SCHEMA}, bool gradient) -> (Tensor loss, Tensor row_lse, Tensor column_lse, Tensor gradient)")
define("contrastive_backward", f"({SCHEMA}, Tensor? row_lse, Tensor? column_lse, Tensor upstream) -> Tensor")


def _pairs(a: Arguments) -> "kernels.Pairs":
    scale = a.factor / a.x.shape[0] if a.reduction == "mean" and a.normalizer is None else a.factor
    return kernels.Pairs(a.offset, None if a.scale == 1.0 else a.scale, scale, a.normalizer, a.empty_is_zero)


def counted(a: Arguments) -> bool:
    """Whether a mean divides by what is counted on the device: the number of pairs is known."""
    return False


def counts_itself(a: Arguments) -> bool:
    return False


def find_divisor(a: Arguments) -> Tensor | None:
    return a.normalizer


def forward(a: Arguments, written: Tensor | None, keep: bool = True, itself: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ln Σ exp of rows and of columns), and the gradient into `written` where it is given."""
    pairs = _pairs(a)
    loss, row_lse, column_lse = kernels.contrastive(pairs, a.x, each=a.reduction == "none")
    if written is not None:
        kernels.contrastive_backward(pairs, a.x, row_lse, column_lse, None, written)
    return loss, row_lse, column_lse


def backward(a: Arguments, row_lse: Tensor | None, column_lse: Tensor | None, upstream: Tensor, written: Tensor) -> None:
    """Write the gradient. Without the statistics, forward is computed again for them."""
    if present(row_lse) is None or present(column_lse) is None:
        _, row_lse, column_lse = forward(a, None)
    assert row_lse is not None
    assert column_lse is not None
    kernels.contrastive_backward(_pairs(a), a.x, row_lse, column_lse, upstream, written)


def prepared(a: Arguments, divisor: Tensor | None, written: Tensor | None) -> Callable[..., Tensor]:
    """(tensors, divisor, written) → total, as `forward` computes it, for tensors laid out as these and the same other arguments."""
    return unplanned(a, lambda a, divisor, written: forward(a, written)[0])


def _fake(*args):
    a, gradient = Arguments(*args[:-1]), args[-1]
    rows, columns = a.x.shape

    def new(*shape):
        return a.x.new_empty(shape, dtype=torch.float32)

    return (
        new(rows) if a.reduction == "none" else new(),
        new(rows),
        new(columns),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


gradient, direct = single("contrastive", Arguments, ("row_lse", "column_lse"), forward, backward, reference, _fake)
