"""Train detectors here: each loss on digit scenes, a larger preset, and RetinaNet under ours and torchvision's losses.

The parts are retinanet, large, tables, more, detectors and steps. `detectors` trains RetinaNet, FCOS, YOLO head and DETR on the same small
scenes, several at once, each in a process of its own. `steps` times a step of each of them with resnet50 on a GPU, alone. The file is
written after every run. `large` runs in a new process, and its time includes the scenes that it draws; --with gives it further settings,
such as trainer.epochs=8 optim.lr=2e-3. The others run one after another in this process.
"""

import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from measuring import Request, Training, train

DETECTORS = tuple(f"model={name}_tiny" for name in ("retinanet", "fcos", "yolo", "detr"))
SEEDS = (0, 1, 2)
LAST_ONLY = "data.workers=0 trainer.eval_every=1000 trainer.save_every=1000"
PARTS = ("retinanet", "large", "tables", "more", "detectors", "steps")
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
FEW = "trainer.epochs=1 trainer.max_updates=2 trainer.log_every=1 data.train_scenes=8 data.val_scenes=4 data.batch_size=4 data.workers=0"
TINY = "model.name=test_resnet model.channels=64 model.convolutions=1 model.fixed_size=[64,64] trainer.amp=off trainer.channels_last=false"


def trainings(part: str, small: bool, settings: tuple[str, ...] = ()) -> list[tuple[str, list[str]]]:
    """Return each training of a part: the command that is compared, and its further settings."""
    few = FEW.split() if small else []
    if part == "large":
        return [(" ".join([LARGE, *settings]), [*few, *(TINY.split() if small else [])])]
    chosen = TABLES if part == "tables" else MORE
    return [(words, [*BASE.split(), *few]) for words in (chosen[-1:] if small else chosen)]


def measured(part: str, request: Request) -> Iterator[dict[str, Any]]:
    """Yield what each run of a part found, as it ends."""
    import detection_step

    alone = {"retinanet": detection_step.contenders, "steps": detection_step.detectors, "detectors": detectors}
    if part in alone:
        yield from alone[part](request.small)
        return
    with tempfile.TemporaryDirectory() as scenes:
        for command, more in trainings(part, request.small, request.settings):
            done = train(command, *more, f"data.root={scenes}", own_process=part == "large")
            yield {"command": command, **reached(done), **done.costs(), "backend": done.backend}


def reached(done: Training) -> dict[str, float | None]:
    return {name: done.last(f"val/{name}") for name in ("map", "map50", "map75")}


def detectors(small: bool) -> Iterator[dict[str, Any]]:
    """Yield what each detector reached under each seed, which decides the scenes and the training."""
    cases = [(command, seed) for seed in SEEDS[: 1 if small else None] for command in DETECTORS]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        yield from pool.map(functools.partial(detector, small), *zip(*cases, strict=True))


def detector(small: bool, command: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scenes:
        seeded = f"seed={seed} data.split_seed={seed} data.scene_seed={seed} data.root={scenes}"
        done = train(f"experiment=detectors {command}", *f"{LAST_ONLY} {seeded} {FEW if small else ''}".split(), own_process=True)
    return {"command": f"experiment=detectors {command}", "seed": seed, **reached(done), "seconds": done.seconds, "backend": done.backend}


def detection(request: Request) -> int:
    found, about, failed = request.saved(), request.source("triton", "torchvision"), []
    for part in request.parts or PARTS:
        began, runs = time.monotonic(), []
        try:
            for done in measured(part, request):
                runs.append(done)
                found[part] = {**about, "runs": runs}
                print(json.dumps(done), flush=True)
                request.save(found)
        except Exception:  # the other parts are still wanted
            traceback.print_exc()
            failed.append(part)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))
