"""Compare a contender's value and gradient with float64, on the same tensors whose speed is measured."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender
from lossforge.bench.inputs import IGNORE_INDEX, Inputs, units
from lossforge.bench.plain import eager

CHUNK = 2**25
"""Elements in one part of the reference. float64 copies and what autograd saves for them must fit in memory beside the case."""
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Largest relative error allowed for each dtype. Torch's own bfloat16 gradient for probability targets is off by 2e-2."""
ROW_TOLERANCE = 4
"""Factor on the tolerance for a single row of the gradient."""
NUDGES = 4
"""Random changes of the inputs by float32's rounding, which show how badly conditioned a row is."""


@dataclass(frozen=True)
class Reference:
    """The float64 result of a case.

    Attributes:
        value: the loss in float64.
        gradient: dL/dx for `upstream`, computed in float64, kept in float32.
        upstream: the gradient given to backward; None for a scalar loss.
    """

    value: Tensor
    gradient: Tensor
    upstream: Tensor | None


def upstream_of(case: Case, inputs: Inputs) -> Tensor | None:
    """Return the upstream gradient for backward: None (1) for a scalar loss, else one random factor a row."""
    if case.options.get("reduction") != "none":
        return None
    generator = torch.Generator(inputs.x.device).manual_seed(1)
    return torch.rand(inputs.others["target"].shape, device=inputs.x.device, generator=generator) / len(inputs.x)


def reference(case: Case, inputs: Inputs, nudge: int | None = None) -> Reference:
    """Compute the loss with torch in float64, part by part unless `case.whole`.

    Args:
        case: what is computed.
        inputs: its tensors.
        nudge: a seed; each number of every floating input is changed by float32's epsilon, at random up or down. None leaves them.
    """
    x, upstream = inputs.x, upstream_of(case, inputs)
    generator = None if nudge is None else torch.Generator(x.device).manual_seed(nudge)

    def widened(t: Tensor) -> Tensor:
        wide = t.detach().double()
        if generator is None:
            return wide
        sign = 2 * torch.randint(2, t.shape, device=t.device, generator=generator) - 1
        return wide * (1 + torch.finfo(torch.float32).eps * sign)

    divisor = 1.0 if case.whole else _divisor(case, inputs)
    options = case.options | ({} if case.whole or upstream is not None else {"reduction": "sum"})
    step = len(x) if case.whole else max(1, CHUNK // max(1, x[0].numel()))
    values, gradient = [], torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for start in range(0, len(x), step):
        part = inputs.rows(start, start + step)
        wide = widened(part.x).requires_grad_()
        others = {k: widened(t) if t.is_floating_point() else t for k, t in part.others.items()}
        value = eager(case.loss)(wide, *positional(others), **others, **options) / divisor
        value.backward(None if upstream is None else upstream[start : start + step].double())
        assert wide.grad is not None
        gradient[start : start + step] = wide.grad
        values.append(value.detach())
    return Reference(torch.cat(values) if upstream is not None else torch.stack(values).sum(), gradient, upstream)


def errors(contender: Contender, case: Case, inputs: Inputs, exact: Reference) -> tuple[float, float, float]:
    """Return the relative errors of value and gradient by norm, and of the gradient's worst row; nan where a result is not finite.

    A row is badly conditioned if the rounding of its inputs moves its exact gradient by more than the tolerance: for example that of two
    boxes that barely overlap. No computation in float32 can keep that tolerance, so its error is taken relative to this movement.
    """
    value, gradient = step(contender, case, fresh(contender, inputs), inputs.others, exact.upstream)
    value = value.detach().double()
    value_error = ((value - exact.value).norm() / exact.value.norm()).item()
    unit, limit = units(case, inputs), TOLERANCE[case.dtype]
    wrong = _distances(gradient, exact.gradient, unit)
    size = _distances(exact.gradient, exact.gradient.new_zeros(()).expand_as(exact.gradient), unit)
    if not wrong.isfinite().all():
        return value_error, float("nan"), float("nan")
    gradient_error = (wrong.norm() / size.norm()).item() if size.any() else wrong.norm().item()
    worst = _worst(wrong, size)
    if worst > ROW_TOLERANCE * limit:
        for nudge in range(NUDGES):
            moved = _distances(reference(case, inputs, nudge).gradient, exact.gradient, unit)
            size = torch.maximum(size, torch.where(moved.isfinite(), moved, 0.0) / limit)  # a nudged input may leave the loss's domain
        worst = _worst(wrong, size)
    return value_error, gradient_error, worst


def _distances(gradient: Tensor, wanted: Tensor, unit: Tensor) -> Tensor:
    """Return the norm of each row's difference in float64, part by part."""
    width = _row(gradient)
    rows, right, unit = (t.reshape(-1, width) for t in (gradient, wanted, unit))
    count = max(1, CHUNK // width)
    starts = range(0, len(rows), count)
    return torch.cat([((rows[i : i + count].double() - right[i : i + count]) * unit[i : i + count]).norm(dim=1) for i in starts])


def _worst(wrong: Tensor, size: Tensor) -> float:
    return torch.where(wrong == 0, 0.0, wrong / size).max().item()


def fault(case: Case, value_error: float, gradient_error: float, row_error: float) -> str:
    """Return why these errors are too large for a speed to be reported; empty if they are not."""
    limit = TOLERANCE[case.dtype]
    bounds = {"value": (value_error, limit), "gradient": (gradient_error, limit), "gradient of a row": (row_error, ROW_TOLERANCE * limit)}
    for what, (error, most) in bounds.items():
        if not error <= most:
            return f"wrong: the {what} is off by {error:.1e} of float64's, more than {most:.0e}"
    return ""


def fresh(contender: Contender, inputs: Inputs) -> Tensor:
    """Return the logits for a call: the leaf itself, or an intermediate tensor over a copy if the contender overwrites its logits."""
    if not contender.destroys:
        inputs.x.grad = None
        return inputs.x
    x = inputs.x.detach()
    return x + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)


def step(contender: Contender, case: Case, x: Tensor, others: dict[str, Tensor], upstream: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run forward and backward, and return (loss, gradient)."""
    if contender.destroys:
        before = torch.autograd.graph.get_gradient_edge(x)  # taken now, because the loss overwrites x
        value = call(contender, case, x, others)
        (gradient,) = torch.autograd.grad(value, before, upstream)
        return value, gradient
    value = call(contender, case, x, others)
    value.backward(upstream)
    assert x.grad is not None
    return value, x.grad


def call(contender: Contender, case: Case, x: Tensor, others: dict[str, Tensor]) -> Tensor:
    others = dict(others)
    return contender.call(x, *positional(others), **others, **case.options)


def positional(others: dict[str, Tensor]) -> list[Tensor]:
    """Remove the target from the other tensors, and return it in a list; an empty list if there is none."""
    return [others.pop("target")] if "target" in others else []


def _divisor(case: Case, inputs: Inputs) -> Tensor | float:
    reduction = case.options.get("reduction", "mean")
    if reduction == "batchmean":
        return float(len(inputs.x))
    if reduction != "mean":
        return 1.0
    target = inputs.others["target"]
    if case.loss != "ce":
        return float(inputs.x.numel())
    if target.is_floating_point():
        return float(target.numel() // inputs.x.shape[1])
    counted = target[target != IGNORE_INDEX]
    weight = inputs.others.get("weight")
    return float(counted.numel()) if weight is None else weight.double()[counted].sum()


def _row(gradient: Tensor) -> int:
    if gradient.ndim > 1:
        return gradient.shape[-1]
    return math.gcd(len(gradient), 4096) if len(gradient) > 4096 else len(gradient)
