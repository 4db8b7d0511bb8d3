"""Calls by the kernels, or by the engine of fused losses, on plain tensors.

The one autograd.Function differentiates them: the gradient is written in forward or in backward, in new memory or in that of the logits.
The operators differentiate all other calls by the same functions (gradients.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.plans import by_plan, layouts
from lossforge.losses.base.record import Several
from lossforge.losses.engine.gradients import gradients, handed_out, recalled, remember, scaled
from lossforge.losses.engine.spec import ExecutionSpec


def undifferentiated(spec: ExecutionSpec[Any], tensors: Several, *differentiable: Tensor | None) -> Several:
    """Return the results of a call that is not differentiated, None for what was not asked for."""
    none = [None] * len(spec.template.differentiable)
    forward = spec.template.launches.forward
    found = by_plan(spec.key_of(tensors), tensors, forward, lambda: (spec.call(tensors), spec.formulas, none, False, True))
    return spec.split(found)[0]


class LossFunction(torch.autograd.Function):
    """A call on plain tensors, differentiated: the results that were asked for. inputs: those of its tensors that are differentiated."""

    @staticmethod
    def forward(ctx: Any, spec: ExecutionSpec[Any], tensors: Several, *inputs: Tensor) -> Any:
        ctx.inplace = None
        written: list[Tensor | None]
        if spec.inplace:
            ctx.inplace = InPlace(inputs[0], spec.in_forward)
            tensors = (ctx.inplace.memory, *tensors[1:])
            written = [ctx.inplace.memory if spec.in_forward else None]
        elif spec.in_forward:
            written = [torch.empty_like(t) if want else None for t, want in zip(inputs, ctx.needs_input_grad[2:], strict=True)]
        else:
            written = [None] * len(inputs)
        given = tensors if spec.inplace else (*tensors, *written)  # in place the gradient's memory is the logits'
        forward, taken = spec.template.launches.forward, tensors
        found = by_plan(spec.key_of(tensors), given, forward, lambda: (spec.call(taken), spec.formulas, written, spec.keeps, True))
        results, kept = spec.split(found)
        if spec.inplace and spec.in_forward:  # backward takes nothing but the gradient
            tensors, kept = (), ()
        remember(ctx, spec, tensors, kept, written)
        if len(results) > 1:
            ctx.mark_non_differentiable(*[t for t in results[spec.template.graded :] if t is not None])
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.inplace is not None:
            return None, None, ctx.inplace.gradient(ctx, grad_outputs)
        wanted = ctx.needs_input_grad[2:]
        written, grad_output = handed_out(ctx, grad_outputs, wanted), grad_outputs[0]
        if grad_output is None or not written:
            return None, None, *gradients(ctx, grad_outputs, wanted)
        return None, None, *scaled(ctx.spec.chunked, written, grad_output)


DIFFERENTIATED = LossFunction.apply
"""The way of a call that is differentiated."""


class Overwritten(torch.autograd.Function):
    """Tell autograd that the logits were overwritten: what is computed from them from now on cannot be differentiated.

    The loss hands its gradient to what the logits came from; only a later use of them sends one here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> None:
        if grad_output is not None:
            raise _refused(
                "what was computed from the logits after the loss cannot be differentiated, for they no longer held their values"
            )


def _refused(why: str) -> RuntimeError:
    return RuntimeError(f"inplace=True: the gradient took the memory of the logits; {why}. Call the loss with inplace=False.")


def _spend(x: Tensor) -> None:
    """Make later differentiable uses of x, of its base and of other views raise, as well as earlier uses that saved it."""
    with torch.enable_grad():
        Overwritten.apply(x)


class InPlace:
    """The logits' memory, which their gradient takes in forward or in backward."""

    def __init__(self, x: Tensor, in_forward: bool) -> None:
        self.memory, self.in_forward = x.detach(), in_forward
        self.x: Tensor | None = None if in_forward else x
        if in_forward:
            try:
                _spend(x)  # within forward, whose graph already leads to what x came from; before the launch, since autograd can refuse
            except RuntimeError as refused:
                raise ValueError(f"inplace=True needs logits that autograd allows to be overwritten: {refused}") from None

    def gradient(self, ctx: Any, grad_outputs: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of the logits for those of the results."""
        spec = ctx.spec
        first, *others = [None if t is None else t.resolve_neg() for t in grad_outputs[: spec.template.graded]]
        if first is None and all(t is None for t in others):
            return None
        if self.in_forward and any(t is not None for t in others):
            raise _refused('z_loss, lse and entropy can then be differentiated only with gradient="backward"')
        if torch.is_grad_enabled():
            raise _refused("it cannot be differentiated again")
        if self.in_forward:
            assert first is not None
            gradient = ctx.precomputed[0].take()
            if gradient is None:
                raise _refused("backward can run only once")
            return scaled(spec.chunked, [gradient], first)[0]
        tensors, kept = recalled(ctx)  # raises where the logits have been overwritten since forward
        x, self.x = self.x, None
        assert x is not None
        try:
            _spend(x)
        except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
            torch.autograd.graph.increment_version(x)
        taken, grads = (self.memory, *tensors[1:]), [first, *others]
        given = (*taken, *kept, *grads)
        key, backward = spec.key_of(taken, "backward in place", *layouts(given)), spec.template.launches.backward
        by_plan(key, given, backward, lambda: (spec.call(taken), spec.formulas, kept, grads, [self.memory]))
        return self.memory
