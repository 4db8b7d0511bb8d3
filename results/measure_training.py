"""Train the digits classifiers on this machine's GPU and write training-h200.json: accuracy, time, and agreement with torch's own losses.

`python results/measure_training.py [FILE [COMMIT]]`; COMMIT where the sources are not a git checkout.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "loss=focal model=resnet50",
    "loss=ce model=resnet18",
    "loss=ce model=resnet18 loss.implementation=torch",
    "loss=focal model=resnet18",
    "loss=focal model=resnet18 loss.implementation=torch",
    "loss=mae model=resnet18",
    "loss=bce model=resnet18",
    "loss=preference_bce model=resnet18",
)
EXACT = "model=vit_tiny trainer.tf32=false trainer.deterministic=true trainer.log_every=1 trainer.max_updates=50 tracking=none"


def run(words: str) -> dict[str, Any]:
    """One training: its records by kind, its output and its wall time."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, str(ROOT / "experiments/train.py"), *words.split(), f"trainer.runs={runs}"]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})
        seconds = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(f"{words}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        (folder,) = Path(runs).iterdir()
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start = next(r for r in records if r["kind"] == "start")
    values = [r["values"] for r in records if r["kind"] == "metrics"]
    print(done.stdout[-2500:], flush=True)
    return {"tags": start["tags"], "values": values, "seconds": seconds, "output": done.stdout}


def last(values: list[dict[str, float]], name: str) -> float:
    return next(v[name] for v in reversed(values) if name in v)


def main(arguments: list[str]) -> int:
    import torch
    import triton

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments[1] if len(arguments) > 1 else _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "runs": [],
        "parity": [],
    }
    for words in COMMANDS:
        done = run(words)
        backend = re.search(r"loss by (.+)", done["output"])
        found["runs"].append(
            {
                "command": words,
                "top1": 100 * last(done["values"], "val/top1"),
                "seconds": done["seconds"],
                "backend": backend.group(1).strip() if backend else "unknown",
                "figures": {k: v for k, v in done["values"][-1].items() if k.startswith(("run/", "kernels/", "memory/"))},
                "loss_ms": last(done["values"], "train/loss_ms"),
            }
        )
    for loss in ("ce", "focal"):
        ours, theirs = (
            [v["train/loss"] for v in run(f"loss={loss} loss.implementation={name} {EXACT}")["values"] if "train/loss" in v]
            for name in ("lossforge", "torch")
        )
        assert len(ours) == len(theirs) >= 45
        largest = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        found["parity"].append({"loss": loss, "steps": len(ours), "largest_difference": largest, "ours": ours, "torch": theirs})
        print(loss, len(ours), largest, flush=True)
    path = Path(arguments[0]) if arguments else ROOT / "results" / "training-h200.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
