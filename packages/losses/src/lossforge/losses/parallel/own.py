"""The results of this process's classes, where the gradient of a layer's input is the sum over the processes.

Backward writes this process's part of that gradient first. The sum runs beside the last product, that of the weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.losses.autograd import ExecutionSpec, Kernels, recalled, remember
from lossforge.losses.base.record import CheckedCall, Several
from lossforge.losses.linear.engine import backward
from lossforge.losses.parallel.shards import Shards, SummedGradient
from lossforge.losses.run import compute, executor_of


def compute_own(shards: Shards, checked: CheckedCall[Any, Any]) -> Any:
    """Compute the checked call of this process's classes, and return what its public function returns for those of all."""
    layer = checked.call.x
    if not (shards.sums_input and torch.is_grad_enabled() and layer.input.requires_grad):
        return compute(checked)
    executor, tensors = executor_of(checked)
    if isinstance(executor, Kernels):
        return checked.finish(_Own.apply(executor.spec, tensors, shards, *tensors[:3]))
    call = checked.call._replace(x=layer.with_input(SummedGradient.apply(layer.input, shards.group)))
    return compute(CheckedCall(call, checked.options, checked.finish))


class _Own(torch.autograd.Function):
    """A call of this process's classes, with a result a row: the results that were asked for."""

    @staticmethod
    def forward(ctx: Any, spec: ExecutionSpec[Any], tensors: Several, shards: Shards, *inputs: Tensor | None) -> Several:
        none = [None] * len(inputs)
        results, kept = spec.split(spec.forward(None, tensors, tensors, none, True))
        remember(ctx, spec, tensors, kept, none)
        ctx.shards = shards
        ctx.mark_non_differentiable(*[t for t in results[spec.template.graded :] if t is not None])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        tensors, kept = recalled(ctx)
        grads = [t if present else None for t, present in zip(grad_outputs[: ctx.spec.template.graded], ctx.spec.present, strict=False)]
        wanted = ctx.needs_input_grad[3:]
        written = [torch.empty_like(t) if want and t is not None else None for t, want in zip(tensors, wanted, strict=False)]
        backward(ctx.spec.call(tensors), None, kept, grads, written, ctx.shards.summing)
        return None, None, None, *written
