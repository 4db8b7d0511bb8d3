"""Train detectors here: each loss on digit scenes, a larger preset, and RetinaNet under ours and torchvision's losses.

`python tools/measure_detection.py [FILE [COMMIT]] [parts=retinanet,large,tables,more] [with=SETTING,SETTING] [--smoke]`

COMMIT where the sources are not a git checkout. The file is written after every run, and keeps the parts that are not measured now. `large`
is timed as a command of its own, scenes drawn by it included, with the settings of `with` beside it (with=trainer.epochs=8,optim.lr=2e-3);
the others run one after another in this process. --smoke: a few updates, with or without a GPU.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.runs.files import write_text

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "tools")]
PARTS = ("retinanet", "large", "tables", "more")
GIOU = "box_loss=giou"
TABLES = (
    *(f"loss={name} {GIOU}" for name in ("focal", "quality_focal", "varifocal")),
    *(f"loss=focal box_loss={name}" for name in ("diou", "ciou")),
    "model=retinanet_tiny loss=focal",
)
MORE = (
    *(f"loss={name} {GIOU}" for name in ("bce", "asymmetric", "poly_bce")),
    *(f"loss=focal box_loss={name}" for name in ("iou", "eiou")),
    f"loss=focal {GIOU} loss.implementation=torch",
)
# the last epoch's detector counts: choosing the best by the held-out scenes would flatter it
BASE = "task=detection data.workers=12 trainer.eval_every=1000"
LARGE = "experiment=digit_scenes_large"
SMOKE = "trainer.epochs=1 trainer.max_updates=2 trainer.log_every=1 data.train_scenes=8 data.val_scenes=4 data.batch_size=4 data.workers=0"
SMALLER = (
    "model.name=test_resnet model.channels=64 model.convolutions=1 model.fixed_size=[64,64] trainer.amp=off trainer.channels_last=false"
)


def figures_of(words: str, *more: str, whole: bool = False) -> dict[str, Any]:
    """One training: command, held-out figures and costs."""
    from one_training import last, run

    done = run(words, *more, whole=whole)
    values = done["values"]
    figures = {name: last(values, f"val/{name}") for name in ("map", "map50", "map75")}
    costs = {"loss_ms": "train/loss_ms", "step_ms": "step_ms", "images_per_second": "images_per_second"}
    costs |= {"data_wait_ms": "train/data_wait_ms", "peak_mib": "train/peak_allocated_mib"}
    figures |= {name: last(values, theirs) for name, theirs in costs.items()}
    return {"command": words, **figures, "seconds": done["seconds"], "backend": done["tags"]["loss.backend"]}


def trainings(part: str, smoke: bool, changed: str = "") -> list[tuple[str, list[str], bool]]:
    """(what is compared, further words, whether as a command of its own) of each training of a part."""
    few = SMOKE.split() if smoke else []
    if part == "large":
        return [(f"{LARGE} {changed}".strip(), [*few, *(SMALLER.split() if smoke else [])], True)]
    chosen = TABLES if part == "tables" else MORE
    return [(words, [*BASE.split(), *few], False) for words in (chosen[-1:] if smoke else chosen)]


def main(arguments: list[str]) -> int:
    smoke, parts = "--smoke" in arguments, list(PARTS)
    for word in [word for word in arguments if word.startswith("parts=")]:
        parts = word.removeprefix("parts=").split(",")
    changed = " ".join(word.removeprefix("with=").replace(",", " ") for word in arguments if word.startswith("with="))
    places = [word for word in arguments if not word.startswith(("parts=", "with=", "--"))]
    path = Path(places[0]) if places else ROOT / "results" / "detection.json"
    if unknown := sorted({*parts} - {*PARTS}) or sorted({word for word in arguments if word.startswith("--")} - {"--smoke"}):
        print(f"{unknown[0]}: unknown; parts are {', '.join(PARTS)}", file=sys.stderr)
        return 1
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    found = json.loads(path.read_text()) if path.exists() else {}
    from lossforge.bench.run import current_commit

    about = provenance(places[1] if len(places) > 1 else current_commit())
    failed = []
    for part in parts:
        began = time.monotonic()
        runs: list[dict[str, Any]] = []
        try:
            for done in measured(part, smoke, changed):
                runs.append(done)
                found[part] = {**about, "runs": runs}
                print(json.dumps(done), flush=True)
                write_text(path, json.dumps(found, indent=1) + "\n")
        except Exception:  # the other parts are still wanted
            traceback.print_exc()
            failed.append(part)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def measured(part: str, smoke: bool, changed: str) -> Any:
    """What each run of a part found, as it ends."""
    if part == "retinanet":
        from detection_step import contenders

        yield from contenders(smoke)
        return
    with tempfile.TemporaryDirectory() as scenes:
        for words, more, whole in trainings(part, smoke, changed):
            yield figures_of(words, *more, f"data.root={scenes}", whole=whole)


def provenance(commit: str) -> dict[str, str]:
    import torch
    import torchvision
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} CPU cores"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "torchvision": torchvision.__version__}
    return {"gpu": gpu, **versions, "commit": commit, "date": datetime.now(UTC).date().isoformat()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
