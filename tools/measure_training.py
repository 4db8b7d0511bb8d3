"""Train on this machine's GPU: the digits under every loss of a classifier, every preset, and ours beside torch's own losses.

`python tools/measure_training.py [FILE [COMMIT]] [--smoke]`; COMMIT where the sources are not a git checkout. The first command is timed
as a whole; the others run one after the other in this process, which has imported everything. The file is written after every run, and
what it holds is not run again: remove a row, or the file, to measure anew.
--smoke: a few runs of a few updates, with or without a GPU.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.runs.files import write_text

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "loss=focal model=resnet50"
BESIDE = (
    "loss=custom loss.target=examples/my_loss.py:margin_bce loss.hyper.margin=0.5",
    "loss=ce loss.implementation=torch",
    "loss=focal loss.implementation=torch",
)
# but digit_scenes_large, which measure_detection.py measures; the teacher before its pupil
TEACHER, PUPIL, DETECTION = "experiment=teacher", "experiment=distillation", "task=detection trainer.epochs=8 trainer.eval_every=1000"
PRESETS = (
    *(f"experiment={name}" for name in ("quick", "fair_digits", "long_tail", "noisy_labels", "multilabel", "preference")),
    *(TEACHER, PUPIL, DETECTION),
)
EXACT = "model=vit_tiny trainer.tf32=false trainer.deterministic=true trainer.log_every=1"
PARITY = ("ce", "focal")
FEW_SCENES = "data.train_scenes=64 data.val_scenes=16"
SMOKE = "model=tiny_resnet trainer.epochs=1 trainer.max_updates=4 trainer.log_every=2 trainer.timing_warmup=0 data.batch_size=16"


def commands() -> list[str]:
    """Every loss of a classifier, and beside them a loss of one's own and torch's."""
    from lab.tasks.classification.spec import SPEC

    names = sorted(set(SPEC.losses) - {"custom"})
    return [f"{words} model=resnet18" for words in (*(f"loss={name}" for name in names), *BESIDE)]


def costs(done: dict[str, Any]) -> dict[str, Any]:
    from one_training import last

    names = {"loss_ms": "train/loss_ms", "peak_mib": "train/peak_allocated_mib", "step_ms": "step_ms"}
    names |= {"images_per_second": "images_per_second", "data_wait_share": "data_wait_share"}
    return {name: last(done["values"], theirs) for name, theirs in names.items()} | {"seconds": done["seconds"]}


def trained(words: str, *more: str) -> dict[str, Any]:
    from one_training import last, run

    done = run(words, *more, whole=words == WHOLE)
    top1 = last(done["values"], "val/top1")
    if top1 is None:
        raise RuntimeError(f"{words}: ended without an evaluation")
    return {"command": words, "whole": words == WHOLE, "top1": 100 * top1, "backend": done["tags"]["loss.backend"], **costs(done)}


def presets(chosen: Sequence[str], smoke: bool) -> Any:
    """What each of these presets costs, and how much of it is waiting for data."""
    from one_training import run

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        scenes = [f"data.root={folder}/data", *(FEW_SCENES.split() if smoke else [])]
        few = SMOKE.split()[1:] if smoke else []
        taught: Path | None = None
        for command in chosen:
            more = scenes if command in ("experiment=multilabel", DETECTION) else []
            if command == PUPIL:
                taught = taught or run(TEACHER, *few, runs=folder)["folder"]
                more = [f"task.teacher={taught}/checkpoints/last.pt"]
            done = run(command, *more, *few, runs=folder)
            if command == TEACHER:
                taught = done["folder"]
            yield {"command": command, **costs(done)}


def parity(loss: str, updates: int, more: list[str]) -> dict[str, Any]:
    """The largest relative difference of a training loss under ours and torch's."""
    from one_training import run

    ours, theirs = (
        [v["train/loss"] for v in run(f"loss={loss} loss.implementation={name} {EXACT}", *more)["values"] if "train/loss" in v]
        for name in ("lossforge", "torch")
    )
    if not len(ours) == len(theirs) >= 0.9 * updates:
        raise RuntimeError(f"{len(ours)} and {len(theirs)} losses of {updates} updates")
    largest = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return {"loss": loss, "steps": len(ours), "largest_difference": largest, "ours": ours, "torch": theirs}


def main(arguments: list[str]) -> int:
    import torch
    import triton

    from lossforge.bench.run import current_commit

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    smoke, places = "--smoke" in arguments, [word for word in arguments if not word.startswith("--")]
    path = Path(places[0]) if places else ROOT / "results" / "training-h200.json"
    commit = places[1] if len(places) > 1 else current_commit()
    about: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    kept = json.loads(path.read_text()) if path.exists() else {}
    if other := [name for name in ("gpu", "torch", "triton") if kept and kept[name] != about[name]]:
        print(f"{path}: of another {' and '.join(other)}: remove it to measure here", file=sys.stderr)
        return 1
    found = about | {part: kept.get(part, []) for part in ("runs", "presets", "parity")}

    def missing(part: str, commands: Sequence[str], name: str = "command") -> list[str]:
        return [each for each in commands if each not in {row[name] for row in found[part]}]

    def add(part: str, row: dict[str, Any]) -> None:
        found[part].append(row | {"commit": commit})
        print(json.dumps({name: value for name, value in row.items() if name not in ("ours", "torch")}), flush=True)
        write_text(path, json.dumps(found, indent=1) + "\n")

    few, updates = SMOKE.split() if smoke else [], 4 if smoke else 50
    for row in presets(missing("presets", PRESETS[-2:] if smoke else PRESETS), smoke):
        add("presets", row)
    for words in missing("runs", commands()[:1] if smoke else (WHOLE, *commands())):
        add("runs", trained(words, *few))
    for loss in missing("parity", PARITY, "loss"):
        add("parity", parity(loss, updates, [f"trainer.max_updates={updates}", *few[:1]]))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1:]))
