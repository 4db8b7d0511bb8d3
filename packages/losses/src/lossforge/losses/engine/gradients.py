"""What backward does for a call, whichever way forward took: it hands out the gradients that forward wrote, or computes them.

The kernels compute them on plain tensors, the plain-torch reference where they are differentiated again, the operators elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.plans import by_plan, layouts
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses.base.record import Several
from lossforge.losses.base.state import backend, plain
from lossforge.losses.engine import by_operators
from lossforge.losses.engine.spec import ExecutionSpec
from lossforge.losses.templates import reference


class PrecomputedGrad:
    """A gradient written in forward, to be handed out once: whoever gets it may change it."""

    __slots__ = ("__weakref__", "gradient")

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient

    def take(self) -> Tensor | None:
        """Return the gradient, None the second time."""
        gradient, self.gradient = self.gradient, None
        return gradient


def remember(ctx: Any, spec: ExecutionSpec[Any], tensors: Several, kept: Several, written: Sequence[Tensor | None]) -> None:
    """Keep a call for backward, tensors as autograd saves them. written: gradients that forward wrote."""
    ctx.spec = spec
    ctx.precomputed = [None if g is None else PrecomputedGrad(g) for g in written]
    ctx.save_for_backward(*kept, *tensors)
    ctx.set_materialize_grads(False)


def recalled(ctx: Any) -> tuple[Several, Several]:
    """Return the call's tensors that `remember` kept, and what its forward kept for backward."""
    template, saved = ctx.spec.template, ctx.saved_tensors
    count = len(template.kept) + len(template.saved)
    return saved[count:], tuple([None if t is None or t.numel() == 0 else t for t in saved[:count]])


def of_results(spec: ExecutionSpec[Any], grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the results that may be differentiated, None where none arrives."""
    return [t if present else None for t, present in zip(grad_outputs[: spec.template.graded], spec.present, strict=False)]


def gradients(ctx: Any, grad_outputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    """Return the gradients of the differentiable tensors for those of the results."""
    spec = ctx.spec
    grads = of_results(spec, grad_outputs)
    if all(t is None for t in grads):
        return [None] * len(wanted)
    if written := handed_out(ctx, grads, wanted):
        assert grads[0] is not None
        return scaled(spec.chunked, written, grads[0])
    tensors, kept = recalled(ctx)
    if torch.is_grad_enabled():
        return of_reference(spec, tensors, grads, wanted)
    if not plain(*tensors, *grads):
        return by_operators.gradients(spec, tensors, kept, grads, wanted)
    found = new_gradients(tensors, wanted)
    taken = (*tensors, *kept, *grads)  # what autograd saved may have another layout, by hooks such as save_on_cpu
    key = spec.key_of(tensors, "backward", *layouts(taken), *wanted)
    backward = spec.template.launches.backward
    by_plan(key, (*taken, *found), backward, lambda: (spec.call(tensors), spec.formulas, kept, grads, found))
    return found


def handed_out(ctx: Any, grad_outputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that forward wrote, to be multiplied by that of the loss; [] where it did not, or where they do not suffice.

    They suffice where nothing arrives but the gradient of the loss, and where they are not differentiated again.
    """
    if grad_outputs[0] is None or torch.is_grad_enabled():
        return []
    for t in grad_outputs[1:]:
        if t is not None:
            return []
    found: list[Tensor | None] = []
    for one, want in zip(ctx.precomputed, wanted, strict=True):
        if want and one is None:
            return []
        found.append(one.take() if want else None)
    if any(want and g is None for g, want in zip(found, wanted, strict=True)):
        again = _written_again(ctx, [one is not None for one in ctx.precomputed])
        return [g if want else None for g, want in zip(again, wanted, strict=True)]
    return found


def _written_again(ctx: Any, which: Sequence[bool]) -> Sequence[Tensor | None]:
    """Return the gradients that forward wrote, by the launches that wrote them, so that they have the same bits."""
    spec, (tensors, _) = ctx.spec, recalled(ctx)
    if not plain(*tensors):
        return by_operators.written(spec, tensors, which)
    written = new_gradients(tensors, which)
    key, forward = spec.key_of(tensors, "written again", *layouts(tensors), *which), spec.template.launches.forward
    by_plan(key, (*tensors, *written), forward, lambda: (spec.call(tensors), spec.formulas, written, spec.keeps, True))
    return written


def new_gradients(tensors: Several, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return memory for the gradients that are wanted of the first tensors."""
    return [torch.empty_like(t) if want and t is not None else None for t, want in zip(tensors, wanted, strict=False)]


def of_reference(
    spec: ExecutionSpec[Any], tensors: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients by the plain-torch reference, which autograd differentiates as often as it is asked to."""
    count = len(wanted)  # views, because one of the tensors may be another, or computed from it
    tensors = (*[None if t is None else t.view_as(t) for t in tensors[:count]], *tensors[count:])
    pairs = [(r, g) for r, g in zip(reference(spec.call(tensors)), grads, strict=False) if r is not None and g is not None]
    inputs = [t for t, want in zip(tensors, wanted, strict=False) if want and t is not None]
    found = iter(torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], create_graph=True))
    return [next(found) if want else None for want in wanted]


def scaled(chunked: bool, gradients: Sequence[Tensor | None], grad_output: Tensor) -> list[Tensor | None]:
    """Return gradients times `grad_output`: in their own memory by a kernel; in new memory where they are traced, because then nothing may
    change, and where no kernel runs."""
    present = [g for g in gradients if g is not None]
    by_kernel = ordinary(grad_output) and not (chunked and backend(present[0]) == "torch")
    for g in present:
        by_kernel = by_kernel and ordinary(g)
    if not by_kernel:
        return [g if g is None else times(g, grad_output) for g in gradients]
    key: list[Any] = ["scale", grad_output.dtype, grad_output.shape, grad_output.get_device(), grad_output.data_ptr() & 15]
    for g in present:
        key += g.numel(), g.dtype, g.get_device(), g.data_ptr() & 15
    given = grad_output, *present
    by_plan(tuple(key), given, kernels.scale_, lambda: given)
    return list(gradients)


def times(gradient: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient times `grad_output` in new memory."""
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * grad_output).to(gradient.dtype)
