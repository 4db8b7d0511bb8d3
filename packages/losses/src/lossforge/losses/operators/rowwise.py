"""lossforge::rowwise: a loss of rows of classes under a softmax."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.lazy import kernels
from lossforge.losses.operators.library import Once, define, placeholders, plain, present, register, save, saved
from lossforge.losses.operators.numbers import backward_of
from lossforge.losses.operators.single import unplanned
from lossforge.losses.reference import rowwise as reference


class Arguments(NamedTuple):
    """Arguments of the operator, for logits x (N, C, d…) and class indices (N, d…) or probabilities (N, C, d…).

    The value is Σ (or, with reduction "none", each) loss · factor / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the class weights of the rows not ignored, or with mean_of_rows their number; with probabilities, the number of rows.
    bias: (C,), of which tau times is added to the logits. With class indices, every class adds spread · p^focus (-ln p) to a row, times
    the weights of the row's targets.
    """

    loss: str
    x: Tensor
    target: Tensor
    target_b: Tensor | None
    lam: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    normalizer: Tensor | None
    hyper: list[float]
    ignore_index: int
    label_smoothing: float
    scale: float
    softcap: float | None
    tau: float
    spread: float
    focus: float
    z_loss: float
    factor: float
    reduction: str
    empty_is_zero: bool
    mean_of_rows: bool
    outputs: list[bool]  # z_loss, lse, entropy, correct

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[1:8]


SCHEMA = (
    "str loss, Tensor x, Tensor target, Tensor? target_b, Tensor? lam, Tensor? weight, Tensor? bias, Tensor? normalizer, "
    "float[] hyper, int ignore_index, float label_smoothing, float scale, float? softcap, float tau, float spread, float focus, "
    "float z_loss, float factor, str reduction, bool empty_is_zero, bool mean_of_rows, bool[] outputs"
)
define(
    "rowwise",
    f"({SCHEMA}, bool gradient, bool keep) -> "
    "(Tensor loss, Tensor z_loss, Tensor lse, Tensor entropy, Tensor correct, Tensor stats, Tensor divisor, Tensor gradient)",
)
define(
    "rowwise_backward",
    f"({SCHEMA}, Tensor? stats, Tensor? divisor, Tensor? row_entropy, Tensor? up_loss, Tensor? up_z_loss, Tensor? up_lse, "
    "Tensor? up_entropy) -> Tensor",
)


def _spec(a: Arguments, divisor: Tensor | None) -> "kernels.Spec":
    rows = a.x.numel() // a.x.shape[1]
    return kernels.Spec(
        FORMULAS[a.loss].kernel,
        a.target,
        a.target_b,
        a.lam,
        a.weight,
        tuple(a.hyper),
        a.ignore_index,
        a.label_smoothing or None,
        None if a.scale == 1.0 else a.scale,
        a.softcap,
        a.z_loss if a.z_loss or a.outputs[0] else None,
        a.bias,
        a.tau,
        a.spread or None,
        a.focus if a.spread else None,
        a.factor / rows if a.reduction == "mean" and divisor is None and not counted(a) else a.factor,
        divisor,
        a.empty_is_zero,
        divisor is None and counted(a),
    )


def counted(a: Arguments) -> bool:
    """Whether a mean divides by what is counted on the device: the class weights of the rows not ignored, or their number."""
    return a.reduction == "mean" and not a.target.is_floating_point()


def find_divisor(a: Arguments) -> Tensor | None:
    if a.normalizer is not None or not counted(a):
        return a.normalizer
    return kernels.count(
        a.target,
        a.x.shape[1],
        a.ignore_index,
        target_b=a.target_b,
        lam=None if a.mean_of_rows else a.lam,
        weight=None if a.mean_of_rows else a.weight,
    )


def counts_itself(a: Arguments) -> bool:
    """Whether one launch finds the divisor, too."""
    by_weight = a.weight is not None and a.mean_of_rows
    return a.normalizer is None and counted(a) and not by_weight and kernels.counts_itself(a.target, a.target_b)


def forward(a: Arguments, written: Tensor | None, keep: bool, itself: bool = False) -> tuple[Tensor | None, ...]:
    """(loss, z_loss, lse, entropy, correct, stats, divisor where it was computed), and the gradient into `written` where it is given.

    itself: one launch may do it all.
    """
    by = None if itself and counts_itself(a) else find_divisor(a)
    z_loss, lse, entropy, correct = a.outputs
    results = kernels.rowwise(
        _spec(a, by),
        a.x,
        total=a.reduction != "none",
        z_loss=z_loss,
        lse=lse,
        entropy=entropy,
        correct=correct,
        stats=keep,
        gradient=written,
    )
    return *results, None if a.normalizer is not None else by


def keeps_stats(a: Arguments, in_forward: bool) -> bool:
    """Whether backward needs the rows' statistics: not where the gradient of the only result is there already."""
    z_loss, lse, entropy, _ = a.outputs
    return not in_forward or z_loss or lse or entropy


def prepared(a: Arguments, divisor: Tensor | None, written: Tensor | None) -> Callable[..., Tensor]:
    """(tensors, divisor, written) → total, as `forward` computes it, for tensors laid out as these and the same other arguments."""
    planned = kernels.planned_rowwise(_spec(a, divisor), a.x, written)
    if planned is not None:
        return planned
    return unplanned(a, lambda a, divisor, written: kernels.rowwise(_spec(a, divisor), a.x, gradient=written).loss)


def backward(
    a: Arguments,
    stats: Tensor | None,
    divisor: Tensor | None,
    row_entropy: Tensor | None,
    arriving: Sequence[Tensor | None],
    written: Tensor,
) -> None:
    """Write the gradient for what arrives at (loss, z_loss, lse, entropy). Without stats, forward is computed again for them."""
    loss, z_loss, lse, entropy = arriving
    spec = _spec(a, divisor if present(divisor) is not None else find_divisor(a))
    if present(stats) is None:
        stats = kernels.rowwise(spec, a.x, stats=True).stats
    assert stats is not None
    kernels.rowwise_backward(
        spec, a.x, stats, loss=loss, z_loss=z_loss, lse=lse, entropy=entropy, row_entropy=row_entropy, gradient=written
    )


def _keep(ctx, a: Arguments, results: Sequence[Tensor | None], written: Tensor | None) -> None:
    """results: of `forward`."""
    _, _, _, entropy, _, stats, divisor = results
    ctx.once = None if written is None else Once(written)
    save(ctx, a.loss, a.tensors, a[1 + len(a.tensors) :], divisor, stats, entropy)


def gradient(ctx, upstream: Tensor | None) -> Tensor | None:
    """The gradient for what arrives at the loss alone."""
    return _gradient(ctx, (upstream, None, None, None))


def _gradient(ctx, arriving: Sequence[Tensor | None]) -> Tensor | None:
    """arriving: at (loss, z_loss, lse, entropy), of which those not asked for are no results."""
    loss, *others = arriving
    others = [t if asked else None for t, asked in zip(others, ctx.others[1][-1], strict=False)]
    alone = others[0] is None and others[1] is None and others[2] is None
    if alone and loss is None:
        return None
    if alone and ctx.once is not None and not torch.is_grad_enabled():
        gradient = ctx.once.take(loss)
        if gradient is not None:
            return gradient
    a, (divisor, *rest) = saved(ctx, Arguments)
    stats, row_entropy = rest or (None, None)
    if torch.is_grad_enabled():
        wanted = [(o, u) for o, u in zip(reference(a), (loss, *others), strict=False) if o is not None and u is not None]
        return torch.autograd.grad([o for o, _ in wanted], a.x, [u for _, u in wanted], create_graph=True)[0]
    if not plain(a.x, loss, *others):
        return backward_of(ctx, "rowwise")(*a, stats, divisor, row_entropy, loss, *others)
    return _backward(*a, stats, divisor, row_entropy, loss, *others)


class Direct(torch.autograd.Function):
    """The operator without the dispatcher, for plain tensors."""

    @staticmethod
    def forward(ctx, x, a, in_forward):
        written = torch.empty_like(x) if in_forward else None
        results = forward(a, written, keeps_stats(a, in_forward), itself=True)
        _keep(ctx, a, results, written)
        if results[4] is not None:
            ctx.mark_non_differentiable(results[4])
        return results[:5]

    @staticmethod
    def backward(ctx, *arriving):
        return _gradient(ctx, arriving[:4]), None, None


def direct(a: Arguments, in_forward: bool) -> Sequence[Tensor | None]:
    """The operator's (loss, z_loss, lse, entropy, correct), where library.plain holds for its tensors; None where not asked for."""
    if a.x.requires_grad and torch.is_grad_enabled():
        return Direct.apply(a.x, a, in_forward)
    return forward(a, None, False, itself=True)[:5]


def _forward(*args):
    *arguments, gradient, keep = args
    a = Arguments(*arguments)
    written = torch.empty_like(a.x) if gradient else None
    return placeholders(a.x, (*forward(a, written, keep), written))


def _backward(*args):
    *arguments, stats, divisor, row_entropy, loss, z_loss, lse, entropy = args
    a = Arguments(*arguments)
    written = torch.empty_like(a.x)
    backward(a, stats, divisor, row_entropy, (loss, z_loss, lse, entropy), written)
    return written


def _fake(*args):
    *arguments, gradient, keep = args
    a = Arguments(*arguments)
    z_loss, lse, entropy, correct = a.outputs
    per_row = (a.x.shape[0], *a.x.shape[2:])
    rows = a.x.numel() // a.x.shape[1]
    total = per_row if a.reduction == "none" else ()
    counts = a.normalizer is None and a.reduction == "mean" and not a.target.is_floating_point()

    def new(wanted: bool, shape, dtype=torch.float32):
        return a.x.new_empty(shape, dtype=dtype) if wanted else a.x.new_empty(0)

    return (
        new(True, total),
        new(z_loss, total),
        new(lse, per_row),
        new(entropy, per_row),
        new(correct, per_row, torch.bool),
        new(keep, (3, rows)),
        new(counts, ()),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


def _setup(ctx, inputs, output):
    *arguments, gradient, _ = inputs
    *results, written = output
    _keep(ctx, Arguments(*arguments), results, written.detach() if gradient else None)


def _differentiate(ctx, *arriving):
    return None, _gradient(ctx, arriving[:4]), *(None,) * len(Arguments._fields)


register("rowwise", _forward, _backward, _fake, _setup, _differentiate)
