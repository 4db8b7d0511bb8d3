"""What the loss changes in a whole step: a resnet50 at 224², and a language model's head, with peak memory beyond weights and inputs.

`python tools/measure_end_to_end.py [FILE [COMMIT]]` on a GPU; COMMIT where the sources are not a git checkout. A step's time is recorded
only if its loss, and for the head the gradient of the hidden states, agree with float32.
"""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.runs.files import write_text
from lossforge.bench.measure import Times, peak_mebibytes, times
from lossforge.bench.run import current_commit, new_report
from lossforge.losses import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
ROWS, HIDDEN, VOCABULARY = 8192, 4096, 128256
BATCH = 256
TOLERANCE = 2e-2

Loss = Callable[[Tensor, Tensor], Tensor]
ON_LOGITS: dict[str, Loss] = {
    "torch": F.cross_entropy,
    "lossforge": cross_entropy,
    "lossforge-inplace": partial(cross_entropy, inplace=True),
}


def resnet50(device: torch.device) -> list[dict[str, Any]]:
    """A training step of timm's resnet50 under bf16 autocast: forward, loss, backward, SGD."""
    import timm

    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(BATCH, 3, 224, 224, device=device, generator=generator).contiguous(memory_format=torch.channels_last)
    target = torch.randint(1000, (BATCH,), device=device, generator=generator)
    rows: list[dict[str, Any]] = []
    steps: list[Callable[[], Any]] = []
    for name, loss in ON_LOGITS.items():
        torch.manual_seed(0)
        model = timm.create_model("resnet50").to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step(loss: Loss = loss, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                value = loss(model(images), target)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        value = step().item()
        rows.append({"work": f"resnet50, 224², batch {BATCH}, bf16 autocast", "loss": name, "value": value})
        rows[-1]["error"] = _off(value, rows[0]["value"])
        steps.append(step)
    return _measured(rows, steps, device)


def head(device: torch.device) -> list[dict[str, Any]]:
    """Hidden states (8192, 4096) → logits of 128256 classes → loss, and back, in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device=device, generator=generator).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, device=device, generator=generator) * HIDDEN**-0.5).to(torch.bfloat16).requires_grad_()
    target = torch.randint(VOCABULARY, (ROWS,), device=device, generator=generator)
    exact, gradient = _in_float32(hidden, weight, target)
    rows: list[dict[str, Any]] = []
    steps: list[Callable[[], Any]] = []
    for name, loss in _head_losses().items():
        row: dict[str, Any] = {"work": f"head {ROWS}×{HIDDEN} → {VOCABULARY}, bf16", "loss": name}

        def step(loss: Any = loss) -> tuple[Tensor, Tensor]:
            value = loss(hidden, weight, target)
            of_hidden, _ = torch.autograd.grad(value, (hidden, weight))
            return value.detach(), of_hidden

        try:
            value, found = step()
            row["error"] = max(_off(value, exact), ((found.float() - gradient).norm() / gradient.norm()).item())
            del found
        except Exception as error:
            row["status"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rows.append(row)
        steps.append(step)
    del gradient
    return _measured(rows, steps, device)


def _measured(rows: list[dict[str, Any]], steps: list[Callable[[], Any]], device: torch.device) -> list[dict[str, Any]]:
    """In turns, three times: matrix products heat the chip, which then slows down, and nobody shall always come after the same one."""
    right = [(row, step) for row, step in zip(rows, steps, strict=True) if row.get("error", math.inf) <= TOLERANCE]
    found: list[list[Times]] = [[] for _ in right]
    for _ in range(3):
        for (_, step), turns in zip(right, found, strict=True):
            turns.append(times(step, device, 400.0))
    for (row, step), turns in zip(right, found, strict=True):
        torch.cuda.empty_cache()
        middle = sorted(turns, key=lambda t: t.median)[1]
        row |= {"status": "ok", "ms": middle.median, "low_ms": min(t.low for t in turns), "high_ms": max(t.high for t in turns)}
        row["peak_mib"] = peak_mebibytes(step, device)
    for row in rows:
        row.setdefault("status", f"wrong: off by {row.get('error', math.inf):.1e}")
    return rows


def _head_losses() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    found: dict[str, Any] = {name: (lambda h, w, t, loss=loss: loss(F.linear(h, w), t)) for name, loss in ON_LOGITS.items()}
    found["torch.compile"] = torch.compile(found["torch"])
    if find_spec("liger_kernel"):
        fused = import_module("liger_kernel.transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss()
        found["liger, fused with the layer"] = lambda h, w, t: fused(w, h, t)
    if find_spec("cut_cross_entropy"):
        found["cut-cross-entropy, fused with the layer"] = import_module("cut_cross_entropy").linear_cross_entropy
    return found


def _in_float32(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the hidden states, 1024 rows at a time."""
    wide, total = weight.detach().float(), torch.zeros((), device=hidden.device)
    gradients = []
    for rows, labels in zip(hidden.detach().split(1024), target.split(1024), strict=True):
        part = rows.float().requires_grad_()
        value = F.cross_entropy(part @ wide.T, labels, reduction="sum") / len(hidden)
        value.backward()
        assert part.grad is not None
        gradients.append(part.grad)
        total += value.detach()
    return total, torch.cat(gradients)


def _off(value: Any, exact: Any) -> float:
    return abs(float(value) - float(exact)) / abs(float(exact))


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("No CUDA GPU here: a step's time and memory cannot be measured.", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    report = new_report(device, arguments[1] if len(arguments) > 1 else current_commit(), {})
    rows: list[dict[str, Any]] = []
    found = {"gpu": report.gpu, "versions": report.versions, "commit": report.commit, "date": report.date, "rows": rows}
    for part in (head, resnet50):
        for row in part(device):
            print(row, flush=True)
            rows.append(row)
    path = Path(arguments[0]) if arguments else ROOT / "results" / "end-to-end-h200.json"
    write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
