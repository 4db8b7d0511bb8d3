"""One training of the measurements beside this file."""

import gc
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(words: str, *more: str, whole: bool = False, runs: Path | None = None) -> dict[str, Any]:
    """One training: its tags, records, metrics, wall time and folder. whole: as a command of its own. runs: where its folder stays."""
    import torch

    with tempfile.TemporaryDirectory() if runs is None else nullcontext(runs) as place:
        before = set(Path(place).iterdir())
        given = [*words.split(), *more, f"trainer.runs={place}", "tracking=none"]
        began = time.monotonic()
        if whole:
            status = subprocess.run([sys.executable, str(ROOT / "experiments/train.py"), *given]).returncode
        else:
            from train import main as train

            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            status = train(given)
        seconds = time.monotonic() - began
        if status:
            raise RuntimeError(f"{words}: status {status}")
        (folder,) = {each for each in set(Path(place).iterdir()) - before if (each / "metrics.jsonl").exists()}
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gc.collect()
    start = next(r for r in records if r["kind"] == "start")
    values = [r["values"] for r in records if r["kind"] in ("metrics", "summary")]
    return {"tags": start["tags"], "records": records, "values": values, "seconds": seconds, "folder": folder}


def last(values: list[dict[str, float]], name: str) -> float | None:
    """None: too short a run to have it, or no GPU."""
    return next((each[name] for each in reversed(values) if name in each), None)
