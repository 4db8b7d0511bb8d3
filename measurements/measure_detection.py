"""Train detectors here: a preset of large scenes, four detectors over seeds, and steps of each of them.

The parts are retinanet, large, detectors and steps. `detectors` trains RetinaNet, FCOS, YOLO head and DETR on the same small scenes,
several at once, each in a process of its own. `steps` times a step of each of them with resnet50 on a GPU, alone, and `retinanet` one
beside torchvision's losses. The file is written after every run. `large` runs in a new process, and its time includes the scenes that it
draws; --with gives it further settings, such as trainer.epochs=8 optim.lr=2e-3.
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
PARTS = ("retinanet", "large", "detectors", "steps")
LARGE = "experiment=digit_scenes_large"
FEW = "trainer.epochs=1 trainer.max_updates=2 trainer.log_every=1 data.train_scenes=8 data.val_scenes=4 data.batch_size=4 data.workers=0"
TINY = "model.name=test_resnet model.channels=64 model.convolutions=1 model.fixed_size=[64,64] trainer.amp=off trainer.channels_last=false"


def measured(part: str, request: Request) -> Iterator[dict[str, Any]]:
    """Yield what each run of a part found, as it ends."""
    import detection_step

    small = request.small
    if part == "large":
        words = [LARGE, *request.settings]
        with tempfile.TemporaryDirectory() as scenes:
            done = train(" ".join(words), *f"{FEW} {TINY}".split() * small, f"data.root={scenes}", own_process=True)
        yield {"command": " ".join(words), **reached(done), **done.costs(), "backend": done.backend}
    else:
        yield from {"retinanet": detection_step.contenders, "steps": detection_step.detectors, "detectors": detectors}[part](small)


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
