"""Measure what the loss changes in a whole step: a resnet50 at 224², and a language model's head, with memory beyond weights and inputs.

A step's time is recorded only if its loss, and for the head the gradient of the hidden states, agree with float64.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure_precision import FULL, contenders, exactly
from measuring import Request, relative
from torch import Tensor

from lossforge.bench.measure import peak_mebibytes, times
from lossforge.bench.report import said
from lossforge.bench.run import new_report
from lossforge.losses import cross_entropy

ROWS, HIDDEN, VOCABULARY = 8192, 4096, 128256
BATCH = 256
TOLERANCE = 2e-2

ON_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": F.cross_entropy,
    "lossforge": cross_entropy,
    "lossforge-inplace": partial(cross_entropy, inplace=True),
}


def resnet50(device: torch.device) -> list[dict[str, Any]]:
    """Measure a training step of timm's resnet50 under bf16 autocast: forward, loss, backward, SGD."""
    import timm

    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(BATCH, 3, 224, 224, device=device, generator=generator).contiguous(memory_format=torch.channels_last)
    target = torch.randint(1000, (BATCH,), device=device, generator=generator)
    values: list[float] = []

    def step(loss: Any, model: Any, optimizer: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(model(images), target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    def error(value: Tensor) -> dict[str, float]:
        values.append(value.item())
        return {"value": values[-1], "error": abs(values[-1] / values[0] - 1)}

    steps = {}
    for name, loss in ON_LOGITS.items():
        torch.manual_seed(0)
        model = timm.create_model("resnet50").to(device, memory_format=torch.channels_last)
        steps[name] = partial(step, loss, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    return measured(f"resnet50, 224², batch {BATCH}, bf16 autocast", steps, error, device)


def head(device: torch.device) -> list[dict[str, Any]]:
    """Measure hidden states (8192, 4096) → logits of 128256 classes → loss, and back, in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device=device, generator=generator).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, device=device, generator=generator) * HIDDEN**-0.5).to(torch.bfloat16).requires_grad_()
    target = torch.randint(VOCABULARY, (ROWS,), device=device, generator=generator)
    values, gradient = exactly(hidden.detach(), weight.detach(), target, torch.full((ROWS,), -1 / ROWS, device=device))[:2]
    exact = -values.mean()

    def step(loss: Any) -> tuple[Tensor, Tensor]:
        value = loss(hidden, weight, target)
        return value.detach(), torch.autograd.grad(value, (hidden, weight))[0]

    def error(found: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"error": max(relative(found[0], exact), relative(found[1], gradient))}

    losses: dict[str, Any] = {name: (lambda h, w, t, loss=loss: loss(F.linear(h, w), t)) for name, loss in ON_LOGITS.items()}
    losses["torch.compile"] = torch.compile(losses["torch"])
    peers = contenders("linear_ce", FULL)
    losses |= {f"{name}, fused with the layer": peers[name] for name in ("liger", "cut-cross-entropy")}
    steps = {name: partial(step, loss) for name, loss in losses.items()}
    return measured(f"head {ROWS}×{HIDDEN} → {VOCABULARY}, bf16", steps, error, device)


def measured(work: str, steps: dict[str, Any], error: Any, device: torch.device) -> list[dict[str, Any]]:
    """Measure steps in turns, three times. Matrix products heat the chip, which then slows down: no step may always follow the same one."""
    rows: list[dict[str, Any]] = []
    for name, step in steps.items():
        rows.append({"work": work, "loss": name})
        try:
            rows[-1] |= error(step())
            off = rows[-1]["error"]
            rows[-1]["status"] = "ok" if off <= TOLERANCE else f"wrong: off by {off:.1e}"
        except Exception as problem:
            rows[-1]["status"] = f"failed: {said(problem)}"
    right = {row["loss"]: row for row in rows if row["status"] == "ok"}
    turns = [{name: times(steps[name], device, 400.0) for name in right} for _ in range(3)]
    for name, row in right.items():
        found = [turn[name] for turn in turns]
        row["ms"] = statistics.median(each.median for each in found)
        row["low_ms"], row["high_ms"] = min(each.low for each in found), max(each.high for each in found)
        torch.cuda.empty_cache()
        row["peak_mib"] = peak_mebibytes(steps[name], device)
    return rows


def end_to_end(request: Request) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    report = new_report(device, request.commit, {})
    rows = head(device) + resnet50(device)
    print(*rows, sep="\n")
    request.save({"gpu": report.gpu, "versions": report.versions, "commit": report.commit, "date": report.date, "rows": rows})
    return 0
