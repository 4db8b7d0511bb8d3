"""Gradients of a plain-torch formula whose values are multiplied by an infinite factor: the slope times that factor.

Autograd sends the factor through each term of the formula, where infinities of both signs meet, or one meets a 0, and give nan. The
kernels multiply the slope alone, as torch's own backward functions do.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.torch_internals import transformed
from lossforge.losses.base import checks
from lossforge.losses.templates.plain_forms import reduced


class _Passed(torch.autograd.Function):
    """Return t, and multiply its gradient by `factor`, or with `removes` take the factor out again: an infinite gradient's sign is left.

    factor: 1 where the true one is finite, else inf or nan.
    """

    @staticmethod
    def forward(t: Tensor, factor: Tensor, removes: bool) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        _, factor, ctx.removes = inputs
        ctx.save_for_backward(factor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        if ctx.removes:
            return torch.where(factor == 1, grad_output, grad_output.sign()), None, None
        return grad_output * factor, None, None

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, int | None, None], t: Tensor, factor: Tensor, removes: bool) -> tuple[Tensor, int]:
        # not generate_vmap_rule, under which a Function with a jvp cannot be differentiated forward twice
        of_t, of_factor, _ = in_dims
        missing = (t.ndim - (of_t is not None)) - (factor.ndim - (of_factor is not None))
        t = t.expand(info.batch_size, *t.shape) if of_t is None else t.movedim(of_t, 0)
        if of_factor is not None:
            factor = factor.movedim(of_factor, 0)
            factor = factor.reshape(len(factor), *[1] * max(missing, 0), *factor.shape[1:])
        return cls.apply(t, factor, removes), 0


class _PassedForward(_Passed):
    """Do the same in forward mode, where the tangent meets the factor after the formula. torch.compile refuses a Function with a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.view_as(tangent)


def with_factor(formula: Callable[..., Tensor], factor: Tensor, inputs: Sequence[Tensor], hyper: Sequence[Any]) -> Tensor:
    """Return values that the caller multiplies by `factor`: the gradient is then slope · factor for an infinite factor, too.

    Args:
        formula: (x, y, *hyper, parameter) to values.
        factor: of each value; broadcasts to x.
        inputs: the differentiable tensors x, y and perhaps a parameter, which broadcasts to x.
        hyper: numbers.
    """
    shape = inputs[0].shape
    expanded = [t.expand(shape) for t in inputs]
    return _around(lambda x, y, *parameter: formula(x, y, *hyper, *parameter), factor.expand(shape), expanded)


def with_call(
    formula: Callable[..., Tensor], call: Any, inputs: Sequence[Tensor], weight: Tensor | None = None, across: int | None = None
) -> Tensor:
    """Return values that `reduced_call` weighs and divides. Their gradient is slope · factor, also for an infinite weight or a
    normalizer of 0.

    Args:
        formula: of the inputs.
        call: with the normalizer.
        inputs: the differentiable tensors.
        weight: of each value; broadcasts to the values.
        across: the inputs' dimension that a value covers; None: each value is of one element, or the weight is None.
    """
    if weight is None and call.normalizer is None and not isinstance(call.loss_scale, Tensor) and call.loss_scale != math.inf:
        return formula(*inputs)
    weight = inputs[0].new_ones(()) if weight is None else weight.to(inputs[0].dtype)
    return _around(formula, reduced(weight, call.loss_scale, call.normalizer, "none", call.empty_is_zero), inputs, across)


def _finite(t: Tensor) -> bool:
    """Whether all of t is known to be finite, without a wait for a device."""
    return t.device.type == "cpu" and checks.known(t) and not transformed(t) and bool(t.isfinite().all())


def _around(formula: Callable[..., Tensor], factor: Tensor, inputs: Sequence[Tensor], across: int | None = None) -> Tensor:
    factor = factor.detach()
    if torch.jit.is_tracing() or _finite(factor):  # a trace that holds a Python function cannot be saved
        return formula(*inputs)
    factor = torch.where(factor.isfinite(), 1.0, factor.abs())
    of_inputs = factor if across is None or factor.ndim == 0 else factor.unsqueeze(across)
    function = _Passed if torch.compiler.is_compiling() else _PassedForward
    values: Tensor = function.apply(formula(*[function.apply(t, of_inputs, False) for t in inputs]), factor, True)
    return values
