"""From checked arguments to the kernels, through the operators or in place, or to the plain-torch reference."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.losses import reference, reference_divergence
from lossforge.losses.operators import boxes as boxes_operator
from lossforge.losses.operators import contrastive as contrastive_operator
from lossforge.losses.operators import divergence as divergence_operator
from lossforge.losses.operators import elementwise as elementwise_operator
from lossforge.losses.operators import overlap as overlap_operator
from lossforge.losses.operators import rowwise as rowwise_operator
from lossforge.losses.operators.boxes import Arguments as Boxes
from lossforge.losses.operators.contrastive import Arguments as Contrastive
from lossforge.losses.operators.divergence import Arguments as Divergence
from lossforge.losses.operators.elementwise import Arguments as Elementwise
from lossforge.losses.operators.library import KERNEL_DTYPES, Once, direct, gradient_in_forward, kernels_apply
from lossforge.losses.operators.numbers import call, for_reference
from lossforge.losses.operators.overlap import Arguments as Overlap
from lossforge.losses.operators.rowwise import Arguments as Rowwise
from lossforge.losses.reference_overlap import overlap as overlap_reference
from lossforge.losses.repeat import note


def elementwise(a: Elementwise, mode: str | None, inplace: bool) -> Tensor:
    if not kernels_apply(a.x, a.target, a.lam, a.weight, a.group_weight, a.parameter, a.normalizer):
        return reference.elementwise(for_reference(a))
    return _single(elementwise_operator, "elementwise", a, mode, inplace)


def boxes(a: Boxes, mode: str | None) -> Tensor:
    if not kernels_apply(a.boxes1, a.weight, a.normalizer):
        return reference.boxes(for_reference(a))
    first, second = (torch.is_grad_enabled() and b.requires_grad for b in (a.boxes1, a.boxes2))
    forward = gradient_in_forward(mode, a.boxes1 if first else a.boxes2, a.reduction)
    if direct(a):
        if not second:  # a kept call has the gradient of one tensor
            note(boxes_operator, a, forward)
        return boxes_operator.direct(a, forward)
    return call("boxes", a, forward and first, forward and second)[0]


def rowwise(a: Rowwise, mode: str | None, inplace: bool) -> Sequence[Tensor | None]:
    """(loss, z_loss, lse, entropy, correct), None where not asked for."""
    if not kernels_apply(a.x, a.target, a.lam, a.weight, a.bias, a.normalizer):
        return reference.rowwise(for_reference(a))
    forward = gradient_in_forward(mode, a.x, a.reduction)
    if inplace and _overwrites(a.x):
        return InPlaceRowwise.apply(a.x, a, forward)
    if direct(a):
        note(rowwise_operator, a, forward)
        return rowwise_operator.direct(a, forward)
    results = call("rowwise", a, forward, a.x.requires_grad and torch.is_grad_enabled() and rowwise_operator.keeps_stats(a, forward))
    return [results[0], *(t if asked else None for t, asked in zip(results[1:5], a.outputs, strict=True))]


def contrastive(a: Contrastive, mode: str | None, inplace: bool) -> Tensor:
    if not kernels_apply(a.x, a.normalizer):
        return reference.contrastive(for_reference(a))
    return _single(contrastive_operator, "contrastive", a, mode, inplace)


def overlap(a: Overlap, mode: str | None, inplace: bool) -> Tensor:
    if not kernels_apply(a.x, a.target, a.weight, a.normalizer):
        return overlap_reference(for_reference(a))
    return _single(overlap_operator, "overlap", a, mode, inplace)


def divergence(a: Divergence, mode: str | None, inplace: bool) -> Tensor:
    teacher = a.target if a.values is None else a.values
    if teacher.dtype not in KERNEL_DTYPES or not kernels_apply(a.x, teacher, a.weight, a.normalizer):
        return reference_divergence.divergence(for_reference(a))
    return _single(divergence_operator, "divergence", a, mode, inplace, keeps=True)


def _single(template: Any, name: str, a: Any, mode: str | None, inplace: bool, keeps: bool = False) -> Tensor:
    """By the operator `name` of operators.single; keeps: whether it asks if backward will need statistics."""
    forward = gradient_in_forward(mode, a.x, a.reduction)
    if inplace and _overwrites(a.x):
        return InPlace.apply(a.x, a, forward, template)
    if direct(a):
        note(template, a, forward)
        return template.direct(a, forward)
    flags = (forward, a.x.requires_grad and torch.is_grad_enabled() and not forward) if keeps else (forward,)
    return call(name, a, *flags)[0]


def _overwrites(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


_SPENT = "inplace=True: the gradient took the memory of the logits; {}. Call the loss with inplace=False."


class InPlace(torch.autograd.Function):
    """An operator with its gradient in the logits' memory, written in forward or in backward; template: the operator's module."""

    @staticmethod
    def forward(ctx, x, a, in_forward, template):
        _keep(ctx, x, a, in_forward)
        ctx.template = template
        value, *ctx.kept = template.forward(ctx.a, ctx.a.x if in_forward else None, not in_forward)
        return value

    @staticmethod
    def backward(ctx, upstream):
        gradient = _take(ctx, upstream)
        if gradient is None:
            gradient = _overwrite(ctx)
            ctx.template.backward(ctx.a, *ctx.kept, upstream, gradient)
        return gradient, None, None, None


class InPlaceRowwise(torch.autograd.Function):
    """The operator with its gradient in the logits' memory, written in forward or in backward."""

    @staticmethod
    def forward(ctx, x, a, in_forward):
        _keep(ctx, x, a, in_forward)
        *results, ctx.stats, ctx.divisor = rowwise_operator.forward(ctx.a, ctx.a.x if in_forward else None, not in_forward)
        ctx.row_entropy = None if results[3] is None else results[3].detach()
        if results[4] is not None:
            ctx.mark_non_differentiable(results[4])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, loss, z_loss, lse, entropy, _):
        if ctx.once is not None and (z_loss is not None or lse is not None or entropy is not None):
            raise RuntimeError(_SPENT.format('z_loss, lse and entropy can then be differentiated only with gradient="backward"'))
        gradient = _take(ctx, loss)
        if gradient is None:
            gradient = _overwrite(ctx)
            rowwise_operator.backward(ctx.a, ctx.stats, ctx.divisor, ctx.row_entropy, (loss, z_loss, lse, entropy), gradient)
        return gradient, None, None


class Overwritten(torch.autograd.Function):
    """Tell autograd that the logits were overwritten: what is computed from them from now on cannot be differentiated.

    The loss hands its gradient to what the logits came from; only a later use of them sends one here.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, upstream):
        if upstream is not None:
            raise RuntimeError(
                _SPENT.format(
                    "what was computed from the logits after the loss cannot be differentiated, for they no longer held their values"
                )
            )


def _spend(x: Tensor) -> None:
    """Make later differentiable uses of x, of its base and of other views raise, as well as earlier uses that saved it."""
    with torch.enable_grad():
        Overwritten.apply(x)


def _keep(ctx, x: Tensor, a: Any, in_forward: bool) -> None:
    ctx.a, ctx.once = a._replace(x=x.detach()), None
    if not in_forward:
        ctx.save_for_backward(x)
        ctx.x = x  # what save_for_backward returns is another tensor to autograd
        return
    try:
        _spend(x)  # within forward, whose graph already leads to what x came from; before the launch, since autograd can refuse
    except RuntimeError as refused:
        raise ValueError(f"inplace=True needs logits that autograd allows to be overwritten: {refused}") from None
    ctx.once = Once(ctx.a.x)


def _overwrite(ctx) -> Tensor:
    """The logits' memory, for the gradient that is written in backward."""
    _ = ctx.saved_tensors  # raises where the logits have been overwritten since forward
    x, ctx.x = ctx.x, None
    try:
        _spend(x)
    except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
        torch.autograd.graph.increment_version(x)
    return ctx.a.x


def _take(ctx, upstream: Tensor) -> Tensor | None:
    """The gradient written in forward, None where it is to be written now."""
    if torch.is_grad_enabled():
        raise RuntimeError(_SPENT.format("it cannot be differentiated again"))
    if ctx.once is None:
        return None
    gradient = ctx.once.take(upstream)
    if gradient is None:
        raise RuntimeError(_SPENT.format("backward can run only once"))
    return gradient
