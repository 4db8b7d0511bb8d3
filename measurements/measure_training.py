"""Train on this machine's GPU: the digits under every loss of a classifier, every preset, and ours beside torch's losses.

The first run starts a new process, so that its time is that of a whole command. The others run one after the other in this process,
which has imported everything. The file is written after every run, and what it holds is not run again: remove a row, or the file, to
measure it again.
"""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measuring import Request, largest_difference, train

WHOLE = "loss=focal model=resnet50"
BESIDE = (
    "loss=custom loss.target=examples/my_loss.py:margin_bce loss.hyper.margin=0.5",
    "loss=ce loss.implementation=torch",
    "loss=focal loss.implementation=torch",
)
# all but digit_scenes_large, which measure_detection.py trains; the pupil trains its teacher itself
TEACHER, PUPIL, DETECTION = "experiment=teacher", "experiment=distillation", "task=detection trainer.epochs=8 trainer.eval_every=1000"
PRESETS = (
    *(
        f"experiment={name}"
        for name in ("quick", "fair_digits", "long_tail", "noisy_labels", "multilabel", "preference", "instances", "oriented")
    ),
    *(TEACHER, PUPIL, DETECTION),
)
SCENES = (*(f"experiment={name}" for name in ("multilabel", "instances", "oriented")), DETECTION)
"""Presets that draw scenes, in a folder."""
EXACT = "model=vit_tiny trainer.tf32=false trainer.deterministic=true trainer.log_every=1"
PARITY = ("ce", "focal")
FEW_SCENES = ("data.train_scenes=64", "data.val_scenes=16")
TINY = "model=tiny_resnet"
FEW = "trainer.epochs=1 trainer.max_updates=4 trainer.log_every=2 trainer.timing_warmup=0 data.batch_size=16"


def commands() -> list[str]:
    """Return a run of every loss of a classifier, and beside them runs of a custom loss and of torch's."""
    from lab.tasks.classification import SPEC

    names = sorted(set(SPEC.losses) - {"custom"})
    return [f"{words} model=resnet18" for words in (*(f"loss={name}" for name in names), *BESIDE)]


def classifier(command: str, small: bool) -> dict[str, Any]:
    done = train(command, *([TINY, *FEW.split()] if small else []), own_process=command == WHOLE)
    top1 = 100 * done.last("val/top1")
    return {"command": command, "whole": command == WHOLE, "top1": top1, "backend": done.backend, **done.costs()}


def preset(command: str, small: bool) -> dict[str, Any]:
    """Measure what a preset costs, and how much of it is waiting for data."""
    few, more = FEW.split() if small else [], []
    with tempfile.TemporaryDirectory() as folder:
        if command == PUPIL:
            more = [f"task.teacher={train(TEACHER, *few, runs=Path(folder)).folder}/checkpoints/last.pt"]
        elif command in SCENES:
            more = [f"data.root={folder}", *(FEW_SCENES if small else ())]
        return {"command": command, **train(command, *more, *few).costs()}


def parity(loss: str, small: bool) -> dict[str, Any]:
    """Measure the largest relative difference of a training loss under ours and torch's."""
    updates = 4 if small else 50
    more = [f"trainer.max_updates={updates}", *([TINY] if small else [])]
    ours, theirs = (
        [v["train/loss"] for v in train(f"loss={loss} loss.implementation={name} {EXACT}", *more).values if "train/loss" in v]
        for name in ("lossforge", "torch")
    )
    if not len(ours) == len(theirs) >= 0.9 * updates:
        raise RuntimeError(f"{len(ours)} and {len(theirs)} losses of {updates} updates")
    return {"loss": loss, "steps": len(ours), "largest_difference": largest_difference(ours, theirs), "ours": ours, "torch": theirs}


def training(request: Request) -> int:
    about, kept, small = request.source("triton"), request.saved(), request.small
    if other := [name for name in ("gpu", "torch", "triton") if kept and kept[name] != about[name]]:
        print(f"{request.out}: of another {' and '.join(other)}: remove it to measure here", file=sys.stderr)
        return 1
    commit = about.pop("commit")
    found: dict[str, Any] = about | {part: kept.get(part, []) for part in ("runs", "presets", "parity")}

    def add(part: str, names: Iterable[str], measure: Any) -> None:
        """Measure those that the file does not have, by the name in the first column of their rows."""
        for name in names:
            if all(name not in (row.get("command"), row.get("loss")) for row in found[part]):
                row = measure(name, small)
                found[part].append(row | {"commit": commit})
                print(json.dumps({name: value for name, value in row.items() if name not in ("ours", "torch")}), flush=True)
                request.save(found)

    add("presets", PRESETS[-2:] if small else PRESETS, preset)
    add("runs", commands()[:1] if small else (WHOLE, *commands()), classifier)
    add("parity", PARITY, parity)
    return 0
