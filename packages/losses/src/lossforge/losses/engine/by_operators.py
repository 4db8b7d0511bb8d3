"""Calls by the dispatcher's operators: under torch.compile, transforms and modes, and for subclasses of tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.record import Several
from lossforge.losses.engine.spec import ExecutionSpec

ABSENT = math.nan
"""What stands in the place of a number that is in the operator's vector of numbers."""


def arguments(spec: ExecutionSpec[Any], tensors: Several) -> list[Any]:
    """Return an operator's arguments of a call."""
    numbers: list[Tensor] = []

    def place(v: Any) -> Any:
        if isinstance(v, list):
            return [place(each) for each in v]
        if isinstance(v, Tensor):
            numbers.append(v)
            return ABSENT
        return v

    others = [place(v) for v in spec.numbers]
    return [torch.stack(numbers) if numbers else None, spec.formula, *tensors, *others]


def results(spec: ExecutionSpec[Any], tensors: Several, *differentiable: Tensor | None) -> Several:
    """Return the results of a call, None for what was not asked for."""
    written = [spec.in_forward and want for want in spec.wanted]
    keep = True in spec.wanted and spec.keeps
    operator = getattr(OPERATORS, spec.template.name)
    found = operator(*arguments(spec, tensors), *written, keep)
    return tuple([t if one else None for t, one in zip(found[: len(spec.present)], spec.present, strict=True)])


def losses(spec: ExecutionSpec[Any], tensors: Several) -> Tensor:
    """Return the loss of each row, whose exponentials are kept for backward."""
    found: Tensor = getattr(OPERATORS, f"{spec.template.name}_exponentials")(*arguments(spec, tensors))[0]
    return found


def gradients(
    spec: ExecutionSpec[Any], tensors: Several, kept: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the first tensors for those of the results. kept: what forward kept for backward, perhaps None."""
    operator = getattr(OPERATORS, f"{spec.template.name}_backward")
    found = operator(spec.vector, spec.formula, *tensors, *spec.numbers, *kept, *grads, *wanted)
    return [g if want else None for g, want in zip((found,) if isinstance(found, Tensor) else found, wanted, strict=True)]


def written(spec: ExecutionSpec[Any], tensors: Several, which: Sequence[bool]) -> Sequence[Tensor | None]:
    """Return the gradients that forward writes."""
    found = getattr(OPERATORS, spec.template.name)(spec.vector, spec.formula, *tensors, *spec.numbers, *which, False)
    return found[-len(which) :]
