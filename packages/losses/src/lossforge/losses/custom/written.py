"""A gradient that a formula writes, in plain torch: autograd returns it, in place of the value's derivative."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.torch_internals import transformed
from lossforge.losses.base.namespace import NAMESPACE, OPERATORS
from lossforge.losses.engine.operators import ANY_DEVICE, LIBRARY, define


class SecondDerivativeError(RuntimeError):
    """A second derivative of a loss whose gradient is written in its formula."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: it has no second derivative, because the formula writes its gradient. Return the value alone, with "
            "lossforge.kernels.math.hold around factors that the gradient takes for constants: then the gradient is derived, and can be "
            "differentiated again."
        )


class _Last(torch.autograd.Function):
    """Return t; differentiating it, or what it follows from, raises.

    What it follows from is an input so that a second derivative comes here: by t alone, which has no graph, it would be 0 in silence.
    """

    @staticmethod
    def forward(name: str, t: Tensor, *follows_from: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> None:
        raise SecondDerivativeError(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise SecondDerivativeError(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], name: str, *tensors: Tensor) -> tuple[Tensor, int]:
        return _Last.apply(name, *_batched(info.batch_size, in_dims[1:], tensors)), 0


def _slopes(ctx: Any) -> list[Tensor]:
    """Return the slopes by the value itself, 1, and by each variable, from the tensors of a call that `_save` kept."""
    n, tensors = ctx.count, ctx.saved_tensors
    variables, slopes, others = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
    every = [torch.ones_like(slopes[0]), *slopes]
    if torch.compiler.is_compiling():  # it refuses second derivatives itself, and a Function within a backward
        return every
    # the value may be differentiated again by other tensors than the variables, so its 1 depends on the variables alone
    return [_Last.apply(ctx.name, slope, *variables, *(others if i else ())) for i, slope in enumerate(every)]


def _save(ctx: Any, name: str, count: int, tensors: Sequence[Tensor]) -> None:
    ctx.name, ctx.count = name, count
    ctx.save_for_backward(*tensors)


class _Written(torch.autograd.Function):
    """Return a formula's value, differentiated by its variables as the slopes say, and by all else as it is itself.

    tensors: the variables, as many slopes, and what else the slopes follow from; all in one shape.
    """

    @staticmethod
    def forward(name: str, variables: int, value: Tensor, *tensors: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        name, count, _, *tensors = inputs
        _save(ctx, name, count, tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        constant = (None,) * (len(ctx.saved_tensors) - ctx.count)
        return None, None, *[grad_output * slope for slope in _slopes(ctx)], *constant

    @classmethod
    def vmap(
        cls, info: Any, in_dims: tuple[int | None, ...], name: str, variables: int, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        return cls.apply(name, variables, *_batched(info.batch_size, in_dims[2:], (value, *tensors))), 0


class _WrittenForward(_Written):
    """Do the same in forward mode, too. torch.compile refuses a Function with a jvp."""

    @staticmethod
    def jvp(ctx: Any, _name: None, _variables: None, *tangents: Tensor | None) -> Tensor:
        pairs = zip(_slopes(ctx), tangents, strict=False)  # the last tangents are those of the slopes, which have none
        return torch.stack([slope * tangent for slope, tangent in pairs if tangent is not None]).sum(0)


def _batched(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with the batch as their first dimension."""
    return [t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for dim, t in zip(dims, tensors, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    name, _, variables, slopes, others = inputs
    _save(ctx, name, len(variables), (*variables, *slopes, *others))


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    of_value, *of_variables = [grad_output * slope for slope in _slopes(ctx)]
    others = len(ctx.saved_tensors) - 2 * ctx.count
    return None, of_value, of_variables, [None] * ctx.count, [None] * others


# _Written as an operator, which traced modules can be saved with, and which torch.compile does not look into
define(
    "written(str loss, Tensor value, Tensor[] variables, Tensor[] slopes, Tensor[] others) -> Tensor",
    lambda loss, value, *tensors: value.clone(),
    lambda loss, value, *tensors: value.clone(),
    ANY_DEVICE,
)
torch.library.register_autograd(f"{NAMESPACE}::written", _differentiate, setup_context=_setup, lib=LIBRARY)


def with_written_gradient(name: str, compute: Callable[..., Sequence[Any]], variables: Sequence[Tensor], others: Sequence[Any]) -> Tensor:
    """Return a formula's value, whose gradient by the variables is the written one.

    Args:
        name: of the loss, for the error of a second derivative.
        compute: (*variables, *others) → value and its derivative by each variable, as tensors or numbers.
        variables: of one shape.
        others: the target, and hyper-parameters, by which the value is differentiated as autograd does.

    Raises:
        SecondDerivativeError: in a second derivative.
    """
    shape = variables[0].shape

    def whole(t: Any) -> Tensor:
        return torch.as_tensor(t, dtype=variables[0].dtype, device=variables[0].device).expand(shape)

    value, *slopes = map(whole, compute(*[v.detach() for v in variables], *others))
    slopes = [slope.detach() for slope in slopes]
    given = [whole(t) for t in others if isinstance(t, Tensor) and t.is_floating_point()]
    compiling = torch.compiler.is_compiling()
    found: Tensor
    if (compiling or torch.jit.is_tracing()) and not transformed(*variables):
        found = OPERATORS.written(name, value, [*variables], slopes, given)
    else:
        found = (_Written if compiling else _WrittenForward).apply(name, len(variables), value, *variables, *slopes, *given)
    return found
