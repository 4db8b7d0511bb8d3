"""`python -m lossforge.bench FILE`: measure every case on this machine's GPU, print a table, and write the figures as JSON."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from lossforge.bench.cases import Call, Case, cases, small_cases
from lossforge.bench.measure import copy_rate, host_microseconds, milliseconds, peak_mebibytes


def error(case: Case, contender: Call, x: Tensor, target: Tensor) -> float:
    """Largest relative error of value and gradient against float64, on as many leading rows as float64 has room for."""
    rows = max(1, min(len(x), 2**25 // max(1, x[0].numel())))
    part = x.detach()[:rows].clone().requires_grad_()
    wide = part.detach().double().requires_grad_()
    labels = target[:rows]
    value = contender(part, labels)
    value.backward()
    exact = case.contenders["torch"](wide, labels.double() if labels.is_floating_point() else labels)
    exact.backward()
    assert part.grad is not None
    assert wide.grad is not None
    off = (value.detach().double() - exact.detach()).abs() / exact.detach().abs()
    return max(off.item(), ((part.grad.double() - wide.grad).norm() / wide.grad.norm()).item())


def measured(case: Case, device: torch.device, rate: float, host: bool) -> list[dict[str, Any]]:
    """One row a contender; one that is wrong gets its error, and no speed."""
    torch.manual_seed(0)
    x = torch.randn(case.shape, device=device).to(case.dtype).requires_grad_()
    target = case.target(x.detach())
    floor = case.floor_bytes() / rate * 1e3
    rows = []
    for name, contender in case.contenders.items():
        row: dict[str, Any] = {"case": case.name, "shape": case.shape, "dtype": str(case.dtype).removeprefix("torch."), "contender": name}
        row["error"] = error(case, contender, x, target)
        if row["error"] <= (1e-2 if case.dtype.itemsize == 2 else 1e-5):

            def call(contender: Call = contender) -> None:
                contender(x, target).backward()

            row |= {"ms": milliseconds(call, x), "floor_ms": floor, "peak_mib": peak_mebibytes(call, x)}
            if host:
                row["host_us"] = host_microseconds(call, x)
        x.grad = None
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) and k != "error" else v for k, v in row.items()}, flush=True)
    return rows


def provenance(device: torch.device, commit: str) -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
    }


def current_commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m lossforge.bench FILE [COMMIT]   (COMMIT where the sources are not a git checkout)", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("No CUDA GPU here: times of the kernels, memory and host time cannot be measured.", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    rate = copy_rate(device)
    found: dict[str, Any] = provenance(device, arguments[1] if len(arguments) > 1 else current_commit())
    found["copy_bytes_per_second"] = rate
    found["rows"] = [row for case in cases() for row in measured(case, device, rate, host=False)]
    found["rows"] += [row for case in small_cases() for row in measured(case, device, rate, host=True)]
    path = Path(arguments[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
