"""Calls that repeat: the checks of their arguments and the choice of their path are made once.

Everything that these depend on is in the key under which a call is kept: layouts and devices of its tensors, whether they require grad,
the values of all other arguments, and the state of torch (grad mode, modes, transforms, tracing). Only calls that went to the kernels
without the dispatcher (library.plain) are kept, for a scalar result whose gradient, where one is asked for, is written in forward.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.operators.library import Once, state
from lossforge.losses.torch_internals import ordinary

P = ParamSpec("P")
R = TypeVar("R")

KEPT = 1024
"""How many calls are kept: shapes may vary without end."""
SIMPLE = (int, float, bool, str, type(None))

_calls: dict[Any, "Total"] = {}
_noted = threading.local()


def repeated(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, a loss, with its calls kept and its keywords checked."""
    function = checks.named(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or checks.VALIDATE or kwargs.get("validate"):
            return function(*args, **kwargs)
        values: tuple[Any, ...] = (*args, *kwargs.values())
        key = [function, state(), *kwargs]
        for v in values:
            if ordinary(v):
                key += v.shape, v.stride(), v.dtype, v.get_device(), v.data_ptr() & 15, v.requires_grad
                if not v.shape and v.get_device() < 0:
                    key.append(v.item())  # a number of the host
            elif type(v) in SIMPLE:
                key += type(v), v
            else:
                return function(*args, **kwargs)
        found = tuple(key)
        known = _calls.get(found)
        if known is not None:
            return known(values)  # type: ignore[return-value]  # a Tensor: only calls that returned one are kept
        _noted.total = None
        try:
            result = function(*args, **kwargs)
        finally:
            noted, _noted.total = _noted.total, None  # it holds the call's tensors
        if noted is not None and isinstance(result, Tensor):
            _keep(found, values, *noted)
        return result

    return call


def note(template: Any, a: Any, in_forward: bool) -> None:
    """Say of the call being made that the operator module `template` computes `a` without the dispatcher."""
    _noted.total = template, a, in_forward


def _keep(key: Any, values: Sequence[Any], template: Any, a: Any, in_forward: bool) -> None:
    differentiated = a.x.requires_grad and torch.is_grad_enabled()
    if a.reduction == "none" or (differentiated and not in_forward) or any(getattr(a, "outputs", ())):
        return
    places = []
    for t in a.tensors:
        found = [i for i, v in enumerate(values) if v is t and t is not None]
        if t is not None and (len(found) != 1 or (t.device.type == "cpu" and not t.is_floating_point())):
            return  # made from the arguments, or one of two that are the same; or indices that are checked each time
        places.append(found[0] if found else None)
    if len(_calls) >= KEPT:
        _calls.clear()
    _calls[key] = Total(template, a, in_forward, places)


class Total:
    """A kept call: values of the arguments → scalar loss. places: of the operator's tensors among the values."""

    def __init__(self, template: Any, a: Any, in_forward: bool, places: Sequence[int | None]) -> None:
        self.template, self.in_forward, self.places = template, in_forward, places
        self.name, self.others = a.loss, a[1 + len(a.tensors) :]
        self.saved = self.name, self.others, 1
        self.counts = a.normalizer is None and template.counted(a) and not template.counts_itself(a)
        self.launch: Callable[..., Tensor] | None = None

    def __call__(self, values: Sequence[Any]) -> Tensor:
        tensors = [None if p is None else values[p] for p in self.places]
        if self.in_forward:
            return Differentiable.apply(tensors[0], self, tensors)
        return self.compute(tensors, None)[0]

    def compute(self, tensors: Sequence[Any], written: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(loss, divisor where it was computed), and the gradient into `written`."""
        counted = self.template.find_divisor(self.arguments(tensors)) if self.counts else None
        divisor = tensors[-1] if counted is None else counted
        if self.launch is None:
            self.launch = self.template.prepared(self.arguments(tensors), divisor, written)
        return self.launch(tensors, divisor, written), counted

    def arguments(self, tensors: Sequence[Any]) -> Any:
        return self.template.Arguments(self.name, *tensors, *self.others)


class Differentiable(torch.autograd.Function):
    """A kept call with the gradient written in forward; a second backward, and a second derivative, are the operator's."""

    @staticmethod
    def forward(ctx, x, total, tensors):
        written = torch.empty_like(x)
        value, divisor = total.compute(tensors, written)
        ctx.total, ctx.once, ctx.others = total, Once(written), total.saved
        ctx.save_for_backward(divisor, *tensors)
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx, upstream):
        if upstream is not None and not torch.is_grad_enabled():
            gradient = ctx.once.take(upstream)
            if gradient is not None:
                return gradient, None, None
        return ctx.total.template.gradient(ctx, upstream), None, None
