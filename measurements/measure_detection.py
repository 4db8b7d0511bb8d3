"""Train detectors here: a preset of large scenes, four detectors and their variants over seeds, steps of each of them, and exports.

The parts are retinanet, large, detectors, variants, steps and export. `detectors` trains RetinaNet, FCOS, YOLO head and DETR on the same
small scenes, several at once, each in a process of its own. `variants` trains YOLO head and DETR with each loss, with and without the
one-to-one head and denoising queries, seed by seed, several at once in a few processes that share the GPU. `steps` times a step of each
detector with resnet50 on a GPU, alone, and `retinanet` one beside torchvision's losses. `export` trains YOLO head and DETR briefly,
exports them, and compares what the programs find on the CPU and on the GPU. The file is written after every run. `large` runs in a new
process, and its time includes the scenes that it draws; --with gives it further settings, such as trainer.epochs=8 optim.lr=2e-3.
"""

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from measuring import ROOT, Request, Training, measure_parts, train

DETECTORS = tuple(f"model={name}_tiny" for name in ("retinanet", "fcos", "yolo", "detr"))
SEEDS, VARIANT_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
HELD = "loss=varifocal loss.hold_weight=true loss.positive_at_zero=true"
YOLO = ("loss=focal", "loss=varifocal", "loss=bce", "loss=mal")
DETR = ("loss=focal", HELD, "loss=mal")
VARIANTS = (
    *(f"model=yolo_tiny {loss}" for loss in YOLO),
    *(f"model=yolo_tiny {loss} model.one_to_one=true" for loss in YOLO[:3]),
    *(f"model=detr_tiny {loss}" for loss in (*DETR, "loss=varifocal")),
    *(f"model=detr_tiny {loss} model.denoising=60" for loss in DETR),
)
"""What the defaults of the detectors are chosen from; the first of a model is the one that its others are compared with."""
LAST_ONLY = "data.workers=0 trainer.eval_every=1000 trainer.save_every=1000"
PARTS = ("retinanet", "large", "detectors", "variants", "steps", "export")
LARGE = "experiment=digit_scenes_large"
FEW = "trainer.epochs=1 trainer.max_updates=2 trainer.log_every=1 data.train_scenes=8 data.val_scenes=4 data.batch_size=4 data.workers=0"
TINY = "model.name=test_resnet model.channels=64 model.convolutions=1 model.fixed_size=[64,64] trainer.amp=off trainer.channels_last=false"


def measured(part: str, request: Request) -> Iterator[dict[str, Any]]:
    """Yield what each run of a part found, as it ends."""
    import detection_export
    import detection_step

    small = request.small
    if part == "large":
        words = [LARGE, *request.settings]
        with tempfile.TemporaryDirectory() as scenes:
            done = train(" ".join(words), *f"{FEW} {TINY}".split() * small, f"data.root={scenes}", own_process=True)
        yield {"command": " ".join(words), **reached(done), **done.costs(), "backend": done.backend}
    else:
        parts = {"retinanet": detection_step.contenders, "steps": detection_step.detectors, "export": detection_export.exports}
        yield from (parts | {"detectors": detectors, "variants": variants})[part](small)


def reached(done: Training) -> dict[str, float | None]:
    return {name: done.last(f"val/{name}") for name in ("map", "map50", "map75")}


def detectors(small: bool) -> Iterator[dict[str, Any]]:
    """Yield what each detector reached under each seed, which decides the scenes and the training."""
    cases = [(command, seed) for seed in SEEDS[: 1 if small else None] for command in DETECTORS]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        yield from pool.map(functools.partial(detector, small), *zip(*cases, strict=True))


def variants(small: bool) -> Iterator[dict[str, Any]]:
    """Yield what each variant reached under each seed, all variants of a seed first."""
    cases = [(command, seed) for seed in VARIANT_SEEDS[: 1 if small else None] for command in VARIANTS]
    workers = min(len(VARIANTS), max(1, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare) as pool:
        yield from pool.map(functools.partial(detector, small, own_process=False), *zip(*cases, strict=True))


def _prepare() -> None:
    """Give a process of several on a machine one thread."""
    import torch

    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT / "experiments")]


def detector(small: bool, command: str, seed: int, own_process: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scenes:
        seeded = f"seed={seed} data.split_seed={seed} data.scene_seed={seed} data.root={scenes}"
        done = train(f"experiment=detectors {command}", *f"{LAST_ONLY} {seeded} {FEW if small else ''}".split(), own_process=own_process)
    return {"command": f"experiment=detectors {command}", "seed": seed, **reached(done), "seconds": done.seconds, "backend": done.backend}


def detection(request: Request) -> int:
    parts = {part: functools.partial(measured, part, request) for part in PARTS}
    return int(bool(measure_parts(request, parts, request.source("triton", "torchvision"))[1]))
