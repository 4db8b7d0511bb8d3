"""Compare losses under the presets of conf/experiment over several seeds, on the CPU: is what each loss's paper claims to be seen?

`python tools/measure_effects.py [FILE [PRESET ...]]` writes into FILE (results/effects.json) every run's command, seed and held-out
metrics, of all presets or of those named; it is renewed after each seed. A seed decides the split, the data that is drawn and the training;
the runs of a comparison share it. The metrics are the last epoch's: no epoch is chosen by what is held out.
"""

import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.runs.files import write_text

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2, 3, 4)
QUIET = "trainer.device=cpu trainer.eval_every=1000 trainer.save_every=1000"
DIGITS = "seed={seed} data.split_seed={seed}"

# of each preset: its metric, the words that a seed stands for, and what is compared, the baseline first
COMPARISONS: dict[str, dict[str, Any]] = {
    "long_tail": {
        "metric": "balanced_accuracy",
        "seeded": f"{DIGITS} data.corruption_seed={{seed}}",
        "runs": (
            "loss=ce",
            "loss=ce data.class_balance=0.99",
            "loss=focal",
            "loss=logit_adjusted_ce",
        ),
    },
    "multilabel": {
        "metric": "map",
        "seeded": f"{DIGITS} data.scene_seed={{seed}} data.workers=0",
        "runs": ("loss=bce", "loss=focal", "loss=asymmetric", "loss=asymmetric loss.gamma_pos=0"),
    },
    "noisy_labels": {
        "metric": "top1",
        "seeded": f"{DIGITS} data.corruption_seed={{seed}}",
        "runs": ("loss=ce", "loss=mae", "loss=generalized_ce"),
    },
    "distillation": {
        "metric": "top1",
        "seeded": DIGITS,
        "teacher": "experiment=teacher",
        "runs": ("task=classification", "task.teacher={teacher}"),
    },
    "preference": {
        "metric": "accuracy",
        "seeded": f"{DIGITS} data.pair_seed={{seed}}",
        "runs": ("loss=bradley_terry", "loss=preference_bce", "loss=preference_bce loss.group_weight=[1.0,0.1]"),
    },
}


def run(words: str, runs: Path) -> tuple[dict[str, Any], Path]:
    """One training: its last held-out metrics, recalls where it has a confusion matrix, seconds; and its folder."""
    from one_training import run as train

    done = train(words, *QUIET.split(), runs=runs)
    found = next(values for values in reversed(done["values"]) if "val/loss" in values)
    values = {name.removeprefix("val/"): value for name, value in found.items() if name.startswith("val/")}
    evaluation = next(r for r in reversed(done["records"]) if r["kind"] == "evaluation")
    if "confusion" in evaluation:
        values["recall"] = [row[i] / max(sum(row), 1) for i, row in enumerate(evaluation["confusion"])]
    return {"values": values, "seconds": done["seconds"]}, done["folder"]


def compare(preset: str, seed: int, runs: Path) -> list[dict[str, Any]]:
    """All runs of a preset's comparison under one seed."""
    what = COMPARISONS[preset]
    seeded, rows, teacher = what["seeded"].format(seed=seed), [], ""
    if "teacher" in what:
        found, folder = run(f"{what['teacher']} {seeded}", runs)
        teacher = str(folder / "checkpoints" / "last.pt")
        rows.append({"command": what["teacher"], "seed": seed, "role": "teacher", **found})
    for number, words in enumerate(what["runs"]):
        found, _ = run(f"experiment={preset} {words.format(teacher=teacher)} {seeded}", runs)
        command = f"experiment={preset} {words.format(teacher='CHECKPOINT')}"
        rows.append({"command": command, "seed": seed, "role": "contender" if number else "baseline", **found})
        print(preset, seed, words, found["values"][what["metric"]], f"{found['seconds']:.0f} s", flush=True)
    return rows


def provenance(preset: str) -> dict[str, Any]:
    """What is measured, and on what."""
    import timm
    import torch

    from lossforge.bench.run import current_commit

    return {
        "metric": COMPARISONS[preset]["metric"],
        "seeded": COMPARISONS[preset]["seeded"],
        "device": f"{_processor()}, one thread",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "commit": current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "runs": [],
    }


def main(arguments: list[str]) -> int:
    import torch

    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "tools")]
    path, presets = Path(arguments[0]) if arguments else ROOT / "results" / "effects.json", arguments[1:] or list(COMPARISONS)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= {preset: provenance(preset) for preset in presets}
    for seed in SEEDS:
        for preset in presets:
            with tempfile.TemporaryDirectory() as folder:
                found[preset]["runs"] += compare(preset, seed, Path(folder))
        text = json.dumps({name: found[name] for name in COMPARISONS if name in found}, indent=1)
        write_text(path, text + "\n")
    return 0


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "CPU"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
