"""Hyper-parameters given as 0-d tensors under torch.compile: read when the graph runs, so that another value compiles nothing.

Operators take them as Python numbers. Beside each one there is another, `<name>_scheduled`, whose first argument is a vector of those
numbers that were tensors; in their own places it has nan.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.losses import checks

ABSENT = math.nan


def checked(value: Tensor, name: str, low: float, high: float, exclusive: bool) -> Tensor:
    """The operator `number`: what checks.number does, when the graph runs."""
    return torch.tensor(checks.number(name, value.item(), low, high, exclusive), dtype=torch.float64)


def filled(numbers: Tensor, arguments: Sequence[Any]) -> list[Any]:
    """An operator's arguments with the numbers in their places."""
    given = iter(numbers.tolist())

    def value(v: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return [value(each) for each in v]
        return next(given) if isinstance(v, float) and math.isnan(v) else v

    return [value(v) for v in arguments]


def _after_tensors(a: Any) -> int:
    """Where the tensors end: the normalizer is the last. Not by a.tensors, a property, which Dynamo of torch 2.9 cannot trace."""
    return a._fields.index("normalizer") + 1


def call(name: str, a: Any, *flags: bool) -> Any:
    """The operator `name` of the arguments `a`, or where numbers among them are tensors, its other form."""
    numbers: list[Tensor] = []

    def place(v: Any) -> Any:
        if isinstance(v, list):
            return [place(each) for each in v]
        if isinstance(v, Tensor):
            numbers.append(v)
            return ABSENT
        return v

    first = _after_tensors(a)
    others = [place(v) for v in a[first:]]
    if not numbers:
        return getattr(torch.ops.lossforge, name)(*a, *flags)
    return getattr(torch.ops.lossforge, f"{name}_scheduled")(torch.stack(numbers), *a[:first], *others, *flags)


def for_reference(a: Any) -> Any:
    """The arguments with numbers that are tensors in the dtype that the plain-torch reference computes in."""
    if not torch.compiler.is_compiling():
        return a
    wide = any(t is not None and t.dtype == torch.float64 for t in a[1 : _after_tensors(a)])

    def value(v: Any) -> Any:
        if isinstance(v, list):
            return [value(each) for each in v]
        return v.to(torch.float64 if wide else torch.float32) if isinstance(v, Tensor) else v

    first = _after_tensors(a)
    return type(a)(*a[:first], *[value(v) for v in a[first:]])


def backward_of(ctx: Any, name: str) -> Callable[..., Any]:
    """The backward operator for what a context saved: of the other form where its numbers are still unknown."""
    numbers = getattr(ctx, "numbers", None)
    if numbers is None:
        return getattr(torch.ops.lossforge, f"{name}_backward")
    operator = getattr(torch.ops.lossforge, f"{name}_backward_scheduled")
    return lambda *args: operator(numbers, *args)
