"""Train the digits classifiers on this machine's GPU under every loss: accuracy, time, memory, and agreement with torch's own losses.

`python results/measure_training.py [FILE [COMMIT]]`; COMMIT where the sources are not a git checkout. The first command is timed as a
whole; the others run one after the other in this process, which has imported everything.
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "loss=focal model=resnet50"
BESIDE = (
    "loss=custom loss.target=examples/my_loss.py:margin_bce loss.hyper.margin=0.5",
    "loss=ce loss.implementation=torch",
    "loss=focal loss.implementation=torch",
)
EXACT = "model=vit_tiny trainer.tf32=false trainer.deterministic=true trainer.log_every=1 trainer.max_updates=50"


def commands() -> list[str]:
    """Every loss of a classifier, and beside them a loss of one's own and torch's."""
    from lab.choices import CLASSIFIER_LOSSES

    names = sorted(set(CLASSIFIER_LOSSES) - {"custom"})
    return [f"{words} model=resnet18" for words in (*(f"loss={name}" for name in names), *BESIDE)]


def last(values: list[dict[str, float]], name: str) -> float:
    return next(v[name] for v in reversed(values) if name in v)


def main(arguments: list[str]) -> int:
    import torch
    import triton
    from one_training import run

    from lossforge.bench.run import current_commit

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments[1] if len(arguments) > 1 else current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "runs": [],
        "parity": [],
    }
    sys.path.insert(0, str(ROOT / "experiments"))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    for words in (WHOLE, *commands()):
        done = run(words, whole=words == WHOLE)
        found["runs"].append(
            {
                "command": words,
                "whole": words == WHOLE,
                "top1": 100 * last(done["values"], "val/top1"),
                "seconds": done["seconds"],
                "backend": done["tags"]["loss.backend"],
                "loss_ms": last(done["values"], "train/loss_ms"),
                "peak_mib": last(done["values"], "memory/peak_allocated_mib"),
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
