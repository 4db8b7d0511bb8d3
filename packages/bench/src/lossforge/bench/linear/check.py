"""Compare a contender's value and gradients with float64, on the same tensors whose speed is measured."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender
from lossforge.bench.linear.inputs import LinearInputs
from lossforge.bench.linear.losses import LOSSES

CHUNK = 2**28
"""Logits in one part of the reference on a GPU."""
LIMIT = 0.1
"""Relative error beyond which a result is wrong. Smaller ones are reported: libraries that sum in bfloat16 are off by some hundredths."""


@dataclass(frozen=True)
class Reference:
    """The float64 result of a case.

    Attributes:
        value: the loss in float64.
        gradients: of input (N, H) and weight (C, H), computed in float64, kept in float32; or None.
    """

    value: Tensor
    gradients: tuple[Tensor, Tensor] | None


def reference(case: Case, inputs: LinearInputs) -> Reference:
    """Compute a loss and its gradients; of a loss of both sides the mean of two, the second with input and weight exchanged."""
    if LOSSES[case.loss].joined:
        joined = _one_side(case, inputs.joined())
        assert joined.gradients is not None
        of_views, other_side = joined.gradients
        of_input, of_head = (of_views + other_side).split([len(inputs.rows), len(inputs.head)])
        return Reference(joined.value, (of_input, of_head))
    found = _one_side(case, inputs)
    if not LOSSES[case.loss].both or found.gradients is None:
        return found
    x, head = inputs.rows, inputs.head.detach()
    exchanged = LinearInputs(head[: len(x)].clone().requires_grad_(), x.clone(), inputs.others)
    other = _one_side(case, exchanged)
    assert other.gradients is not None
    of_input, of_head = (a / 2 for a in found.gradients)
    of_head[: len(x)] += other.gradients[0] / 2
    return Reference((found.value + other.value) / 2, (of_input + other.gradients[1] / 2, of_head))


def _one_side(case: Case, inputs: LinearInputs) -> Reference:
    """Compute each row's part of the loss in parts of the rows, then the loss of all rows, then the gradients in parts."""
    loss, x, head = LOSSES[case.loss], inputs.rows, inputs.head.detach().double()
    step = max(1, CHUNK // len(head))
    parts = [(start, min(start + step, len(x))) for start in range(0, len(x), step)]
    with torch.no_grad():
        rows = torch.cat([loss.rows(F.linear(x[s:e].double(), head), _doubled(inputs.part(s, e))) for s, e in parts])
    others = {k: t.double() if t.is_floating_point() and t.ndim <= 2 and k != "teacher_head" else t for k, t in inputs.others.items()}
    if not inputs.input.requires_grad:
        return Reference(loss.total(rows, others), None)
    rows.requires_grad_()
    value = loss.total(rows, others)
    (upstream,) = torch.autograd.grad(value, rows)
    of_input = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    of_head = torch.zeros_like(head)
    for s, e in parts:
        part = x[s:e].double()
        logits = F.linear(part, head).requires_grad_()
        (gradient,) = torch.autograd.grad(loss.rows(logits, _doubled(inputs.part(s, e))), logits, upstream[s:e])
        of_input[s:e] = gradient @ head
        of_head.addmm_(gradient.t(), part)
    return Reference(value.detach(), (of_input, of_head.float()))


def _doubled(part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.double() if t.is_floating_point() else t for k, t in part.items()}


def step(contender: Contender, inputs: LinearInputs) -> Tensor:
    """Run forward, and backward where a gradient is wanted."""
    value = contender.call(inputs)
    if value.requires_grad:
        value.backward()
    return value.detach()


def errors(contender: Contender, inputs: LinearInputs, exact: Reference) -> list[float]:
    """Return the relative errors of the value and of each gradient, by norm; nan where a result is not finite."""
    inputs.clear()
    found = [error(step(contender, inputs).reshape(1, 1), exact.value.reshape(1, 1))]
    if exact.gradients is not None:
        for leaf, wanted in zip((inputs.input, inputs.head), exact.gradients, strict=True):
            assert leaf.grad is not None
            found.append(error(leaf.grad.flatten(0, -2), wanted))
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    """Return a matrix's relative error by norm, computed in parts, because float64 copies of it all would take much memory."""
    off, size = 0.0, 0.0
    for a, b in zip(found.split(2**14), wanted.split(2**14), strict=True):
        off += (a.double() - b.double()).square().sum().item()
        size += b.double().square().sum().item()
    return float((off / size) ** 0.5) if size else float(off > 0)


def fault(found: list[float]) -> str:
    """Return why these errors are too large for a speed to be reported; empty if they are not."""
    for what, off in zip(("value", "gradient of the input", "gradient of the weight"), found, strict=False):
        if not off <= LIMIT:
            return f"wrong: the {what} is off by {off:.1e} of float64's, more than {LIMIT:.0e}"
    return ""
