"""Compare a contender's value and gradient with float64, on the same tensors whose speed is measured."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender
from lossforge.bench.inputs import IGNORE_INDEX, Inputs
from lossforge.bench.plain import eager

CHUNK = 2**25
"""Elements in one part of the reference. float64 copies and what autograd saves for them must fit in memory beside the case."""
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Largest relative error allowed for each dtype. Torch's own bfloat16 gradient for probability targets is off by 2e-2."""
ROW_TOLERANCE = 4
"""Factor on the tolerance for a single row of the gradient."""


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


def reference(case: Case, inputs: Inputs) -> Reference:
    """Compute the loss with torch in float64, part by part unless `case.whole`."""
    x, upstream = inputs.x, upstream_of(case, inputs)
    divisor = 1.0 if case.whole else _divisor(case, inputs)
    options = case.options | ({} if case.whole or upstream is not None else {"reduction": "sum"})
    step = len(x) if case.whole else max(1, CHUNK // max(1, x[0].numel()))
    values, gradient = [], torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for start in range(0, len(x), step):
        part = inputs.rows(start, start + step)
        wide = part.x.detach().double().requires_grad_()
        others = {k: t.double() if t.is_floating_point() else t for k, t in part.others.items()}
        value = eager(case.loss)(wide, *positional(others), **others, **options) / divisor
        value.backward(None if upstream is None else upstream[start : start + step].double())
        assert wide.grad is not None
        gradient[start : start + step] = wide.grad
        values.append(value.detach())
    return Reference(torch.cat(values) if upstream is not None else torch.stack(values).sum(), gradient, upstream)


def errors(contender: Contender, case: Case, inputs: Inputs, exact: Reference) -> tuple[float, float, float]:
    """Return the relative errors of value and gradient by norm, and of the gradient's worst row; nan where a result is not finite."""
    value, gradient = step(contender, case, fresh(contender, inputs), inputs.others, exact.upstream)
    value = value.detach().double()
    value_error = ((value - exact.value).norm() / exact.value.norm()).item()
    rows, wanted = gradient.reshape(-1, _row(gradient)), exact.gradient.reshape(-1, _row(gradient))
    off, scale, worst = 0.0, 0.0, 0.0
    count = max(1, CHUNK // rows.shape[1])
    for start in range(0, len(rows), count):
        right = wanted[start : start + count].double()
        wrong = (rows[start : start + count].double() - right).square().sum(1)
        size = right.square().sum(1)
        relative = torch.where(size > 0, wrong / size, torch.where(wrong == 0, 0.0, torch.inf))
        relative = torch.where(wrong.isnan(), torch.nan, relative)
        worst = max(worst, relative.max().item()) if relative.isfinite().all() else float("nan")
        if worst != worst:
            return value_error, float("nan"), worst
        off, scale = off + wrong.sum().item(), scale + size.sum().item()
    return value_error, (off / scale) ** 0.5 if scale else off, worst**0.5


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
