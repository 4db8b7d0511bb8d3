"""Value and gradient of a contender against float64, on the tensors whose speed is measured, all of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender
from lossforge.bench.inputs import IGNORE_INDEX, Inputs
from lossforge.bench.plain import eager

CHUNK = 2**25
"""Elements of a part of the reference: float64 and what torch's own computation keeps of it must fit beside the case."""
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Torch's own bfloat16 gradient for probability targets is off by 2e-2."""
ROW_TOLERANCE = 4
"""How much further off than the whole gradient one row of it may be."""


@dataclass(frozen=True)
class Reference:
    """value: the loss in float64. gradient: dL/dx for `upstream`, computed in float64, kept in float32."""

    value: Tensor
    gradient: Tensor
    upstream: Tensor | None


def upstream_of(case: Case, inputs: Inputs) -> Tensor | None:
    """What arrives in backward: 1 for a scalar, else one random factor a row."""
    if case.options.get("reduction") != "none":
        return None
    generator = torch.Generator(inputs.x.device).manual_seed(1)
    return torch.rand(inputs.others["target"].shape, device=inputs.x.device, generator=generator) / len(inputs.x)


def reference(case: Case, inputs: Inputs) -> Reference:
    """Torch's own computation in float64, part by part unless the case is to stay whole."""
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
    """Relative errors of value and gradient by norm, and of the gradient's worst row. nan where something is not finite."""
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
    return value_error, (off / scale) ** 0.5, worst**0.5


def fault(case: Case, value_error: float, gradient_error: float, row_error: float) -> str:
    """Why the errors forbid a speed; empty where they do not."""
    limit = TOLERANCE[case.dtype]
    bounds = {"value": (value_error, limit), "gradient": (gradient_error, limit), "gradient of a row": (row_error, ROW_TOLERANCE * limit)}
    for what, (error, most) in bounds.items():
        if not error <= most:
            return f"wrong: the {what} is off by {error:.1e} of float64's, more than {most:.0e}"
    return ""


def fresh(contender: Contender, inputs: Inputs) -> Tensor:
    """The logits to call with: the leaf itself, or for who destroys them an intermediate result over a copy."""
    if not contender.destroys:
        inputs.x.grad = None
        return inputs.x
    x = inputs.x.detach()
    return x + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)


def step(contender: Contender, case: Case, x: Tensor, others: dict[str, Tensor], upstream: Tensor | None) -> tuple[Tensor, Tensor]:
    """Forward and backward: (loss, gradient)."""
    if contender.destroys:
        before = torch.autograd.graph.get_gradient_edge(x)  # of the logits, which x no longer holds after the loss
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
    """The target, where there is one, taken out of the further tensors."""
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
