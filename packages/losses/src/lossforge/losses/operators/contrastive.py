"""lossforge::contrastive: a loss over a matrix of similarities in which row i and column i + offset belong together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.losses.operators.library import Once, define, placeholders, plain, present, register, save, saved
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


def _pairs(a: Arguments) -> kernels.Pairs:
    scale = a.factor / a.x.shape[0] if a.reduction == "mean" and a.normalizer is None else a.factor
    return kernels.Pairs(a.offset, None if a.scale == 1.0 else a.scale, scale, a.normalizer, a.empty_is_zero)


def counted(a: Arguments) -> bool:
    """Whether a mean divides by what is counted on the device: the number of pairs is known."""
    return False


def counts_itself(a: Arguments) -> bool:
    return False


def find_divisor(a: Arguments) -> Tensor | None:
    return a.normalizer


def forward(a: Arguments, written: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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
    others = a[1 + len(a.tensors) :]

    def total(tensors: Sequence[Any], divisor: Tensor | None, written: Tensor | None) -> Tensor:
        return forward(Arguments(a.loss, *tensors, *others), written)[0]

    return total


def _keep(ctx, a: Arguments, results: Sequence[Tensor | None], written: Tensor | None) -> None:
    ctx.once = None if written is None else Once(written)
    save(ctx, a.loss, a.tensors, a[1 + len(a.tensors) :], *results)


def gradient(ctx, upstream: Tensor | None) -> Tensor | None:
    if upstream is None:
        return None
    if ctx.once is not None and not torch.is_grad_enabled():
        gradient = ctx.once.take(upstream)
        if gradient is not None:
            return gradient
    a, rest = saved(ctx, Arguments)
    row_lse, column_lse = rest if len(rest) == 2 else (None, None)
    if torch.is_grad_enabled():
        return torch.autograd.grad(reference(a), a.x, upstream, create_graph=True)[0]
    if not plain(a.x, upstream):
        return torch.ops.lossforge.contrastive_backward(*a, row_lse, column_lse, upstream)
    return _backward(*a, row_lse, column_lse, upstream)


class Direct(torch.autograd.Function):
    """The operator without the dispatcher, for plain tensors."""

    @staticmethod
    def forward(ctx, x, a, in_forward):
        written = torch.empty_like(x) if in_forward else None
        loss, *statistics = forward(a, written)
        _keep(ctx, a, statistics, written)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        return gradient(ctx, upstream), None, None


def direct(a: Arguments, in_forward: bool) -> Tensor:
    """The operator's loss, where library.plain holds for its tensors."""
    if a.x.requires_grad and torch.is_grad_enabled():
        return Direct.apply(a.x, a, in_forward)
    return forward(a, None)[0]


def _forward(*args):
    a = Arguments(*args[:-1])
    written = torch.empty_like(a.x) if args[-1] else None
    return placeholders(a.x, (*forward(a, written), written))


def _backward(*args):
    *arguments, row_lse, column_lse, upstream = args
    a = Arguments(*arguments)
    written = torch.empty_like(a.x)
    backward(a, row_lse, column_lse, upstream, written)
    return written


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


def _setup(ctx, inputs, output):
    *arguments, gradient = inputs
    _, row_lse, column_lse, written = output
    _keep(ctx, Arguments(*arguments), (row_lse, column_lse), written.detach() if gradient else None)


def _differentiate(ctx, upstream, *_):
    return None, gradient(ctx, upstream), *(None,) * len(Arguments._fields)


register("contrastive", _forward, _backward, _fake, _setup, _differentiate)
