"""Compare a contender's value and gradients with float64, on the same tensors whose speed is measured."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import RECORDS, Case
from lossforge.bench.contenders import Contender, by_names
from lossforge.bench.inputs import IGNORE_INDEX, units
from lossforge.bench.record import Inputs, LinearInputs, Others

CHUNK, LOGITS = 2**25, 2**28
"""Elements in one part of the reference, and logits of a fused loss. float64 copies and what autograd saves for them must fit in memory
beside the case."""
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Largest relative error allowed for each dtype. Torch's own bfloat16 gradient for probability targets is off by 2e-2."""
LIMIT = 0.1
"""The same of a fused loss. Smaller errors are reported: libraries that sum in bfloat16 are off by some hundredths."""
ROW_TOLERANCE = 4
"""Factor on the tolerance for a single row of the gradient."""
NUDGES = 4
"""Random changes of the inputs by float32's rounding, which show how badly conditioned a row is."""
OF_LOGITS, OF_LAYER = ("value", "gradient"), ("value", "gradient of the input", "gradient of the weight")
Errors = dict[str, float]
"""Relative errors by what is compared, as these name it; nan where a result is not finite."""


@dataclass(frozen=True)
class Reference:
    """The float64 result of a case.

    Attributes:
        value: the loss in float64.
        gradients: of each leaf, for `upstream`, computed in float64, kept in float32; empty where none requires grad.
        upstream: the gradient given to backward; None for a scalar loss.
    """

    value: Tensor
    gradients: tuple[Tensor, ...]
    upstream: Tensor | None = None


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
    if isinstance(inputs, LinearInputs):
        return _of_layer(case, inputs)
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
    plain, values, gradient = by_names(RECORDS[case.loss].plain), [], torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for start in range(0, len(x), step):
        part = inputs.rows(start, start + step)
        wide = widened(part.x).requires_grad_()
        others = {k: widened(t) if t.is_floating_point() else t for k, t in part.others.items()}
        value = plain(Inputs(wide, others), **options) / divisor
        value.backward(None if upstream is None else upstream[start : start + step].double())
        assert wide.grad is not None
        gradient[start : start + step] = wide.grad
        values.append(value.detach())
    return Reference(torch.cat(values) if upstream is not None else torch.stack(values).sum(), (gradient,), upstream)


def _of_layer(case: Case, inputs: LinearInputs) -> Reference:
    """Compute a loss and its gradients; of a loss of both sides the mean of two, the second with input and weight exchanged."""
    layer, x, head = RECORDS[case.loss].layer, inputs.flat, inputs.head.detach()
    if layer.joined:
        joined = _one_side(case, inputs.joined())
        of_views, other_side = joined.gradients
        return Reference(joined.value, (of_views + other_side).split([len(x), len(head)]))
    found = _one_side(case, inputs)
    if not layer.both or not found.gradients:
        return found
    other = _one_side(case, LinearInputs(head[: len(x)].clone().requires_grad_(), inputs.others, x.clone()))
    of_input, of_head = (a / 2 for a in found.gradients)
    of_head[: len(x)] += other.gradients[0] / 2
    return Reference((found.value + other.value) / 2, (of_input + other.gradients[1] / 2, of_head))


def _one_side(case: Case, inputs: LinearInputs) -> Reference:
    """Compute each row's part of the loss in parts of the rows, then the loss of all rows, then the gradients in parts."""
    layer, x, head = RECORDS[case.loss].layer, inputs.flat, inputs.head.detach().double()
    step = max(1, LOGITS // len(head))
    parts = [(start, min(start + step, len(x))) for start in range(0, len(x), step)]
    with torch.no_grad():
        rows = torch.cat([layer.rows(F.linear(x[s:e].double(), head), _doubled(inputs.part(s, e))) for s, e in parts])
    others = {k: t.double() if t.is_floating_point() and t.ndim <= 2 and k != "teacher_head" else t for k, t in inputs.others.items()}
    if not inputs.x.requires_grad:
        return Reference(layer.total(rows, others), ())
    rows.requires_grad_()
    value = layer.total(rows, others)
    (upstream,) = torch.autograd.grad(value, rows)
    of_input = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    of_head = torch.zeros_like(head)
    for s, e in parts:
        part = x[s:e].double()
        logits = F.linear(part, head).requires_grad_()
        (gradient,) = torch.autograd.grad(layer.rows(logits, _doubled(inputs.part(s, e))), logits, upstream[s:e])
        of_input[s:e] = gradient @ head
        of_head.addmm_(gradient.t(), part)
    return Reference(value.detach(), (of_input, of_head.float()))


def _doubled(part: Others) -> Others:
    return {k: t.double() if t.is_floating_point() else t for k, t in part.items()}


def errors(contender: Contender, case: Case, inputs: Inputs, exact: Reference) -> Errors:
    """Return the relative errors of the value and of each gradient by norm, and of the worst row of the logits' gradient.

    A row is badly conditioned if the rounding of its inputs moves its exact gradient by more than the tolerance: for example that of two
    boxes that barely overlap. No computation in float32 can keep that tolerance, so its error is taken relative to this movement.
    """
    inputs.clear()
    value, *gradients = step(contender, case, fresh(contender, inputs), exact.upstream)
    found = {"value": error(value.detach().reshape(1, -1), exact.value.reshape(1, -1))}
    if isinstance(inputs, LinearInputs):
        pairs = zip(OF_LAYER[1:], gradients, exact.gradients, strict=False)
        return found | {what: error(ours.flatten(0, -2), wanted) for what, ours, wanted in pairs}
    unit, limit, (gradient,), (wanted,) = units(case, inputs), TOLERANCE[case.dtype], gradients, exact.gradients
    wrong = _distances(gradient, wanted, unit)
    size = _distances(wanted, wanted.new_zeros(()).expand_as(wanted), unit)
    if not wrong.isfinite().all():
        return found | {"gradient": math.nan, "gradient of a row": math.nan}
    found["gradient"] = (wrong.norm() / size.norm()).item() if size.any() else wrong.norm().item()
    worst = _worst(wrong, size)
    if worst > ROW_TOLERANCE * limit:
        for nudge in range(NUDGES):
            moved = _distances(reference(case, inputs, nudge).gradients[0], wanted, unit)
            size = torch.maximum(size, torch.where(moved.isfinite(), moved, 0.0) / limit)  # a nudged input may leave the loss's domain
        worst = _worst(wrong, size)
    return found | {"gradient of a row": worst}


def error(found: Tensor, wanted: Tensor) -> float:
    """Return a matrix's relative error by norm, computed in parts, because float64 copies of it all would take much memory."""
    off, size = 0.0, 0.0
    for a, b in zip(found.split(2**14), wanted.split(2**14), strict=True):
        off += (a.double() - b.double()).square().sum().item()
        size += b.double().square().sum().item()
    return float((off / size) ** 0.5) if size else float(off > 0)


def _distances(gradient: Tensor, wanted: Tensor, unit: Tensor) -> Tensor:
    """Return the norm of each row's difference in float64, part by part."""
    width = _row(gradient)
    rows, right, unit = (t.reshape(-1, width) for t in (gradient, wanted, unit))
    count = max(1, CHUNK // width)
    starts = range(0, len(rows), count)
    return torch.cat([((rows[i : i + count].double() - right[i : i + count]) * unit[i : i + count]).norm(dim=1) for i in starts])


def _worst(wrong: Tensor, size: Tensor) -> float:
    return torch.where(wrong == 0, 0.0, wrong / size).max().item()


def fault(case: Case, found: Errors) -> str:
    """Return why these errors are too large for a speed to be reported; empty if they are not."""
    for what, off in found.items():
        most = LIMIT if case.fused else TOLERANCE[case.dtype] * (ROW_TOLERANCE if what == "gradient of a row" else 1)
        if not off <= most:
            return f"wrong: the {what} is off by {off:.1e} of float64's, more than {most:.0e}"
    return ""


def fresh(contender: Contender, inputs: Inputs) -> Inputs:
    """Return the tensors for a call: as they are, or with an intermediate tensor over a copy if the contender overwrites its logits."""
    if not contender.destroys:
        return inputs
    x = inputs.x.detach()
    return replace(inputs, x=x + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True))


def step(contender: Contender, case: Case, inputs: Inputs, upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    """Run forward, and backward where a gradient is wanted, and return the loss and the gradients of the leaves."""
    if contender.destroys:
        before = torch.autograd.graph.get_gradient_edge(inputs.x)  # taken now, because the loss overwrites x
        value = contender.call(inputs, **case.options)
        return value, *torch.autograd.grad(value, before, upstream)
    value = contender.call(inputs, **case.options)
    if value.requires_grad:
        value.backward(upstream)
    return value, *(leaf.grad for leaf in inputs.leaves if leaf.grad is not None)


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
