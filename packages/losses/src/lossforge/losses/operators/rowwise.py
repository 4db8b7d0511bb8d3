"""lossforge::rowwise: a loss of rows of classes under a softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.operators.library import DEVICES, LIBRARY, Once, define, no_double_backward, register_autograd, save, saved
from lossforge.losses.reference import rowwise as reference


class Rowwise(NamedTuple):
    """Arguments of the operator, for logits x (N, C, d…) and class indices (N, d…) or probabilities (N, C, d…).

    The value is Σ (or, with reduction "none", each) loss · factor / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the class weights of the rows not ignored; with probabilities, the number of rows.
    """

    loss: str
    x: Tensor
    target: Tensor
    target_b: Tensor | None
    lam: Tensor | None
    weight: Tensor | None
    normalizer: Tensor | None
    hyper: list[float]
    ignore_index: int
    label_smoothing: float
    scale: float
    softcap: float | None
    z_loss: float
    factor: float
    reduction: str
    empty_is_zero: bool
    outputs: list[bool]  # z_loss, lse, entropy, correct


SCHEMA = (
    "str loss, Tensor x, Tensor target, Tensor? target_b, Tensor? lam, Tensor? weight, Tensor? normalizer, float[] hyper, "
    "int ignore_index, float label_smoothing, float scale, float? softcap, float z_loss, float factor, str reduction, "
    "bool empty_is_zero, bool[] outputs"
)
define(
    "rowwise",
    f"({SCHEMA}, bool gradient, bool keep) -> "
    "(Tensor loss, Tensor z_loss, Tensor lse, Tensor entropy, Tensor correct, Tensor stats, Tensor divisor, Tensor gradient)",
)
define(
    "rowwise_backward",
    f"({SCHEMA}, Tensor stats, Tensor divisor, Tensor row_entropy, Tensor? up_loss, Tensor? up_z_loss, Tensor? up_lse, "
    "Tensor? up_entropy) -> Tensor",
)


def _spec(a: Rowwise, divisor: Tensor | None) -> kernels.Spec:
    rows = a.x.numel() // a.x.shape[1]
    return kernels.Spec(
        FORMULAS[a.loss].kernel,
        a.target,
        a.target_b,
        None if a.lam is None else a.lam.expand(a.target.shape),
        a.weight,
        tuple(a.hyper),
        a.ignore_index,
        a.label_smoothing or None,
        None if a.scale == 1.0 else a.scale,
        a.softcap,
        a.z_loss if a.z_loss or a.outputs[0] else None,
        a.factor / rows if a.reduction == "mean" and divisor is None else a.factor,
        divisor,
        a.empty_is_zero,
    )


def _divisor(a: Rowwise) -> Tensor | None:
    if a.normalizer is not None or a.reduction != "mean" or a.target.is_floating_point():
        return a.normalizer
    return kernels.count(
        a.target,
        a.x.shape[1],
        a.ignore_index,
        target_b=a.target_b,
        lam=None if a.lam is None else a.lam.expand(a.target.shape),
        weight=a.weight,
    )


def forward(a: Rowwise, written: Tensor | None, keep: bool) -> tuple[Tensor, ...]:
    """(loss, z_loss, lse, entropy, correct, stats, divisor), and the gradient into `written` where it is given."""
    divisor = _divisor(a)
    z_loss, lse, entropy, correct = a.outputs
    results = kernels.rowwise(
        _spec(a, divisor),
        a.x,
        total=a.reduction != "none",
        z_loss=z_loss,
        lse=lse,
        entropy=entropy,
        correct=correct,
        stats=keep,
        gradient=written,
    )
    own = None if divisor is a.normalizer else divisor
    return tuple(a.x.new_empty(0) if t is None else t for t in (*results, own))


def backward(a: Rowwise, stats: Tensor, divisor: Tensor, row_entropy: Tensor, arriving: Sequence[Tensor | None], written: Tensor) -> None:
    """Write the gradient for what arrives at (loss, z_loss, lse, entropy)."""
    loss, z_loss, lse, entropy = arriving
    divisor_or_none = a.normalizer if a.normalizer is not None else divisor if divisor.numel() else None
    kernels.rowwise_backward(
        _spec(a, divisor_or_none), a.x, stats, loss=loss, z_loss=z_loss, lse=lse, entropy=entropy, row_entropy=row_entropy, gradient=written
    )


def _forward(*args):
    *arguments, gradient, keep = args
    a = Rowwise(*arguments)
    written = torch.empty_like(a.x) if gradient else None
    return (*forward(a, written, keep), a.x.new_empty(0) if written is None else written)


def _backward(*args):
    *arguments, stats, divisor, row_entropy, loss, z_loss, lse, entropy = args
    a = Rowwise(*arguments)
    written = torch.empty_like(a.x)
    backward(a, stats, divisor, row_entropy, (loss, z_loss, lse, entropy), written)
    return written


def _fake_forward(*args):
    *arguments, gradient, keep = args
    a = Rowwise(*arguments)
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
        new(keep, (4, rows)),
        new(counts, ()),
        torch.empty_like(a.x) if gradient else a.x.new_empty(0),
    )


def _setup(ctx, inputs, output):
    *arguments, gradient, _ = inputs
    _, _, _, entropy, _, stats, divisor, written = output
    ctx.once = Once(written) if gradient else None
    save(ctx, arguments, stats, divisor, entropy)


def _differentiate(ctx, loss, z_loss, lse, entropy, *_):
    nothing = (None,) * len(Rowwise._fields)
    asked = ctx.arguments[-1]
    z_loss, lse, entropy = (t if wanted else None for t, wanted in zip((z_loss, lse, entropy), asked, strict=False))
    arriving = (loss, z_loss, lse, entropy)
    if all(t is None for t in arriving):
        return (*nothing, None, None)
    gradient = None
    if ctx.once is not None and not torch.is_grad_enabled() and z_loss is None and lse is None and entropy is None:
        gradient = ctx.once.take(loss)
    if gradient is None:
        (stats, divisor, row_entropy), arguments = saved(ctx)
        a = Rowwise(*arguments)
        if torch.is_grad_enabled():
            wanted = [(o, u) for o, u in zip(reference(a), arriving, strict=False) if o is not None and u is not None]
            (gradient,) = torch.autograd.grad([o for o, _ in wanted], a.x, [u for _, u in wanted], create_graph=True)
        else:
            gradient = torch.ops.lossforge.rowwise_backward(*a, stats, divisor, row_entropy, *arriving)
    return (None, gradient, *nothing)


for device in DEVICES:
    LIBRARY.impl("rowwise", _forward, device)
    LIBRARY.impl("rowwise_backward", _backward, device)
torch.library.register_fake("lossforge::rowwise", _fake_forward, lib=LIBRARY)
torch.library.register_fake("lossforge::rowwise_backward", lambda *args: torch.empty_like(args[1]), lib=LIBRARY)
register_autograd("rowwise", _setup, _differentiate)
no_double_backward("rowwise_backward")
