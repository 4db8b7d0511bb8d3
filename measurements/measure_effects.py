"""Compare losses under the presets of conf/experiment over several seeds, on the CPU: does each loss do what its paper claims?

--parts names the presets. The file is written after each seed: every run's command, seed and held-out metrics. A seed decides the split,
the data that is drawn and the training; the runs of a comparison share it. The metrics are the last epoch's: no epoch is chosen by what
is held out. cpu_seconds are the process's own, which other work on the machine changes little; seconds are those of the clock.
"""

import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Request, train

QUIET = "trainer.device=cpu trainer.eval_every=1000 trainer.save_every=1000"
DIGITS = "seed={seed} data.split_seed={seed}"
CORRUPTED = f"{DIGITS} data.corruption_seed={{seed}}"
SCENES = f"{DIGITS} data.scene_seed={{seed}} data.workers=0"
PAIRED = ("clip", "siglip")
RATES = ((64, "1e-3", "1e-3"), (256, "1e-2", "1e-3"), (1024, "3e-3", "1e-3"), (4096, "1e-3", "3e-4"))
"""Batch sizes, and the learning rate of each loss of PAIRED: the best of a search on another seed, on docs/benchmarks/effects.md."""


class Comparison(NamedTuple):
    """A comparison under a preset.

    Args:
        metric: what is compared.
        seeded: the settings that a seed stands for.
        runs: what is compared, the baseline first.
        teacher: a run before the others, for {teacher}.
        also: a second metric, compared as the first.
        seeds: how many seeds, from 0.
        each: how many runs share a baseline, which is the first of them; 0: all runs share one.
    """

    metric: str
    seeded: str
    runs: tuple[str, ...]
    teacher: str = ""
    also: str = ""
    seeds: int = 5
    each: int = 0

    def role(self, number: int) -> str:
        """Return whether the run of this number is a baseline or a contender."""
        return "contender" if (number % self.each if self.each else number) else "baseline"


COMPARISONS = {
    "few_digits": Comparison(
        *("top1", CORRUPTED),
        runs=("loss=ce", "loss=bce", "loss=softmax_focal", "loss=poly_ce loss.epsilon=1", "loss=poly_ce loss.epsilon=-1"),
    ),
    "label_smoothing": Comparison(
        *("probe_top1", CORRUPTED), runs=("loss=ce", "loss.label_smoothing=0.1", "loss.label_smoothing=0.3"), also="top1", seeds=15
    ),
    "long_tail": Comparison(
        *("balanced_accuracy", CORRUPTED),
        runs=("loss=ce", "loss=ce data.class_balance=0.99", "loss=softmax_focal", "loss=focal", "loss=logit_adjusted_ce", "loss=seesaw"),
    ),
    "detectors": Comparison(*("map", SCENES), runs=tuple(f"box_loss={name}" for name in ("giou", "iou", "diou", "ciou", "eiou", "siou"))),
    "multilabel": Comparison("map", SCENES, runs=("loss=bce", "loss=focal", "loss=asymmetric", "loss=asymmetric loss.gamma_pos=0")),
    "noisy_labels": Comparison("top1", CORRUPTED, ("loss=ce", "loss=mae", "loss=generalized_ce")),
    "distillation": Comparison("top1", DIGITS, ("task=classification", "task.teacher={teacher}"), teacher="experiment=teacher"),
    "preference": Comparison(
        *("accuracy", f"{DIGITS} data.pair_seed={{seed}}"),
        runs=("loss=bradley_terry", "loss=preference_bce", "loss=preference_bce loss.group_weight=[1.0,0.1]"),
    ),
    "image_text": Comparison(
        *("recall1", f"{DIGITS} data.pair_seed={{seed}}"),
        runs=tuple(
            f"loss={loss} data.batch_size={size} optim.lr={lr}" for size, *rates in RATES for loss, lr in zip(PAIRED, rates, strict=True)
        ),
        each=len(PAIRED),
    ),
}
PARTS = tuple(COMPARISONS)


def run(command: str, runs: Path) -> tuple[dict[str, Any], Path]:
    """Train once; return the last held-out metrics, with recalls where there is a confusion matrix, and the run's folder."""
    began = time.process_time()
    done = train(command, *QUIET.split(), runs=runs)
    cpu_seconds = time.process_time() - began
    found = next(values for values in reversed(done.values) if "val/loss" in values)
    values: dict[str, Any] = {name.removeprefix("val/"): value for name, value in found.items() if name.startswith("val/")}
    if (probe := done.last("probe/top1")) is not None:
        values["probe_top1"] = probe
    evaluation = next(record for record in reversed(done.records) if record["kind"] == "evaluation")
    if "confusion" in evaluation:
        values["recall"] = [row[i] / max(sum(row), 1) for i, row in enumerate(evaluation["confusion"])]
    return {"values": values, "seconds": done.seconds, "cpu_seconds": cpu_seconds}, done.folder


def compare(preset: str, seed: int, runs: Path) -> list[dict[str, Any]]:
    """Run all of a preset's comparison under one seed."""
    what = COMPARISONS[preset]
    seeded, rows, teacher = what.seeded.format(seed=seed), [], ""
    if what.teacher:
        found, folder = run(f"{what.teacher} {seeded}", runs)
        teacher = str(folder / "checkpoints" / "last.pt")
        rows.append({"command": what.teacher, "seed": seed, "role": "teacher", **found})
    for number, words in enumerate(what.runs):
        found, _ = run(f"experiment={preset} {words.format(teacher=teacher)} {seeded}", runs)
        command = f"experiment={preset} {words.format(teacher='CHECKPOINT')}"
        rows.append({"command": command, "seed": seed, "role": what.role(number), **found})
        print(preset, seed, words, found["values"][what.metric], f"{found['seconds']:.0f} s", flush=True)
    return rows


def effects(request: Request) -> int:
    torch.set_num_threads(1)
    processor = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    source = {"device": f"{processor[1] if processor else 'CPU'}, one thread", **request.source("timm")}
    del source["gpu"]
    presets = request.parts or PARTS
    found = request.saved()
    for preset in presets:
        what = COMPARISONS[preset]
        also = {"also": what.also} if what.also else {}
        found[preset] = {"metric": what.metric, **also, "seeded": what.seeded, **source, "runs": []}
    for seed in range(max(COMPARISONS[preset].seeds for preset in presets)):
        for preset in (each for each in presets if seed < COMPARISONS[each].seeds):
            with tempfile.TemporaryDirectory() as folder:
                found[preset]["runs"] += compare(preset, seed, Path(folder))
        request.save({name: found[name] for name in PARTS if name in found})
    return 0
