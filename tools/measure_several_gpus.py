"""Two GPUs against one, in train.py's own trainer: the same losses from the same samples in float32, and how throughput scales.

`python tools/measure_several_gpus.py [FILE [COMMIT]]` on a machine with two GPUs; COMMIT where the sources are not a git checkout.
It starts torchrun itself, for one process and for two. In float32 one GPU takes the whole batch and each of two half of it. One GPU also
trains from weights disturbed by DISTURBANCE, about a rounding: how far apart rounding alone drives two runs. Throughput is that of
synthetic images of 224 pixels that lie on the device. The status is 1 where losses differ by more than TOLERANCE; cases that rounding
alone drives further apart than that are shown, not judged.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GPUS = (1, 2)
TOLERANCE = 1e-4  # largest relative difference of a step's loss
DISTURBANCE = 2.0**-23  # standard deviation, relative to each weight
UPDATES = 20
WHOLE = 64
EXACT = ("trainer.tf32=false", "trainer.deterministic=true", "data.augment=false", "optim=sgd", "optim.lr=0.02", "tracking=none")
VIT = ("model=vit_tiny", "loss=ce", "loss.class_weight=[1,2,1,1,3,1,1,1,0.5,1]")
SCENES = ("task=detection", "model.frozen_norm=true", "data.train_scenes=256", "data.val_scenes=8", "data.workers=4", "trainer.epochs=10")
NORMED = ("model=resnet18", "loss=focal", "trainer.sync_batchnorm=true")
LOSSES: dict[str, tuple[tuple[str, ...], int]] = {  # settings, and over how many batches an update's samples are spread
    "class weights": (VIT, 1),
    "accumulated": (VIT, 4),
    "FSDP": ((*VIT, "trainer.parallel=fsdp"), 1),
    "synchronised batch norm": ((*NORMED, "optim.lr=0.002"), 1),
    "synchronised batch norm, learning rate 0.02": (NORMED, 1),
    "detection": ((*SCENES, "optim.lr=0.002"), 1),
    "detection, learning rate 0.02": (SCENES, 1),
}
SPEED = {  # model, parallel, images a GPU and batch
    "resnet50": ("resnet50", "ddp", 256),
    "vit_base": ("vit_base_patch16_224", "ddp", 128),
    "vit_base, FSDP": ("vit_base_patch16_224", "fsdp", 128),
}
IMAGES, CLASSES, WARMUP, TIMED = 8192, 1000, 15, 40


def losses(words: tuple[str, ...], accumulate: int, ranks: int, folder: Path, disturbance: float = 0.0) -> list[float]:
    """Of the first updates."""
    import torch

    from lab.config.settings import load
    from lab.train.assemble import assemble

    parts = [f"data.batch_size={WHOLE // ranks // accumulate}", f"trainer.accumulate={accumulate}"]
    root = [f"data.root={folder}"] if "task=detection" in words else []
    trainer = assemble(load([*EXACT, *words, *parts, *root]))
    generator = torch.Generator(trainer.device).manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters() if disturbance else ():
            weight.mul_(1 + disturbance * torch.randn(weight.shape, device=weight.device, generator=generator))
    found: list[float] = []
    while len(found) < UPDATES:
        trainer.data.train.begin(1 + len(found) // trainer.per_epoch)
        for group in islice(trainer.groups(), UPDATES - len(found)):
            trainer.update(group)
            loss, finite, *_ = trainer.window.tolist()
            trainer._clear_window()
            found.append(loss / finite)
    return found


def speed(name: str, parallel: str, batch: int) -> dict[str, Any]:
    """Steps of the trainer under bfloat16 autocast, on images that are random and the same on all GPUs."""
    import torch

    from lab.config.settings import load
    from lab.data.samples import Annotations
    from lab.data.sets import Data, MemoryLoader, Norm, Split
    from lab.runs.machine import pick_device, seed_all
    from lab.tasks.classification.task import Classification
    from lab.train import distributed
    from lab.train.trainer import Trainer

    words = ["model=timm", f"model.name={name}", f"trainer.parallel={parallel}", "data=folder", "optim=sgd", "tracking=none"]
    settings = load([*words, "trainer.amp=bf16", "trainer.channels_last=true", "trainer.epochs=100"])
    device = pick_device("auto")
    seed_all(settings.config)
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator(device).manual_seed(0)
    count = max(IMAGES, 2 * batch * distributed.ranks())
    pixels = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8, device=device, generator=generator)
    target = torch.randint(CLASSES, (count,), device=device, generator=generator)
    norm = (torch.full((3,), 0.5), torch.full((3,), 0.25))
    loader = MemoryLoader(Split(pixels, target, []), Annotations(), batch, device, norm).shuffled(0, None)
    classes = [str(number) for number in range(CLASSES)]
    data = Data(classes, 3, Norm(norm[0].tolist(), norm[1].tolist()), loader, loader, 0, torch.bincount(target, minlength=CLASSES))
    task = Classification(settings.config, data, device)
    trainer = Trainer(settings.config, task, data, task.model(), device, settings.tree())
    done, began = 0, 0.0
    while done < WARMUP + TIMED:
        for group in trainer.groups():
            trainer.update(group)
            done += 1
            if done == WARMUP:
                trainer.window.tolist()
                trainer.clock.restart()
                trainer._clear_window()
                began = time.perf_counter()
            if done == WARMUP + TIMED:
                break
    images = trainer.window.tolist()[-1]
    seconds = time.perf_counter() - began
    peak = distributed.highest({"peak": torch.cuda.max_memory_allocated() / 2**20}, device)["peak"]
    waited = trainer.clock.read(images)["train/data_wait_share"]
    return {"images_per_second": images / seconds, "step_ms": seconds / TIMED * 1e3, "peak_mib": peak, "data_wait_share": waited}


def worker(folder: Path) -> None:
    """One of torchrun's processes: everything, one after the other; the first one writes."""
    import gc

    import torch

    from lab.runs.machine import pick_device
    from lab.train import distributed

    distributed.start(pick_device("auto"))
    ranks = distributed.ranks()
    found: dict[str, Any] = {"losses": {}, "disturbed": {}, "speed": {}}
    for name, (words, accumulate) in LOSSES.items():
        found["losses"][name] = losses(words, accumulate, ranks, folder)
        if ranks == 1:
            found["disturbed"][name] = losses(words, accumulate, ranks, folder, DISTURBANCE)
    for name, (model, parallel, batch) in SPEED.items():
        gc.collect()
        torch.cuda.empty_cache()
        found["speed"][name] = speed(model, parallel, batch)
        if distributed.rank() == 0:
            print(ranks, name, found["speed"][name], flush=True)
    if distributed.rank() == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(found))
    distributed.stop()


def measured() -> dict[int, dict[str, Any]]:
    """What the processes found, by the number of GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        for gpus in GPUS:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
            began = time.monotonic()
            command = [*torchrun, str(Path(__file__).resolve()), "--worker", folder]
            subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "8", **os.environ})
            print(f"{gpus} GPUs: {time.monotonic() - began:.0f} s", flush=True)
        return {gpus: json.loads((Path(folder) / f"{gpus}.json").read_text()) for gpus in GPUS}


def difference(a: list[float], b: list[float]) -> float:
    """The largest, relative."""
    return max(abs(one - other) / abs(one) for one, other in zip(a, b, strict=True))


def main(arguments: list[str]) -> int:
    import torch
    import triton

    from lossforge.bench.run import current_commit

    if torch.cuda.device_count() < max(GPUS):
        print(f"{max(GPUS)} GPUs are needed; here are {torch.cuda.device_count()}.", file=sys.stderr)
        return 1
    one, two = measured().values()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "commit": arguments[1] if len(arguments) > 1 else current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "tolerance": TOLERANCE,
        "disturbance": DISTURBANCE,
        "losses": [],
        "speed": [],
    }
    for name, alone in one["losses"].items():
        together, disturbed = two["losses"][name], one["disturbed"][name]
        largest, of_rounding = difference(alone, together), difference(alone, disturbed)
        row = {"case": name, "updates": len(alone), "largest_difference": largest, "of_rounding": of_rounding}
        report["losses"].append(row | {"one": alone, "two": together, "disturbed": disturbed})
        print(name, len(alone), largest, of_rounding, flush=True)
    for name, (model, parallel, batch) in SPEED.items():
        for gpus, found in ((1, one), (2, two)):
            scaling = found["speed"][name]["images_per_second"] / (gpus * one["speed"][name]["images_per_second"])
            row = {"case": name, "model": model, "parallel": parallel if gpus > 1 else "none", "batch": batch, "gpus": gpus}
            report["speed"].append(row | found["speed"][name] | {"scaling": scaling})
    path = Path(arguments[0]) if arguments else ROOT / "results" / "several-gpus-h200.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    judged = (row for row in report["losses"] if row["of_rounding"] <= TOLERANCE)
    return int(any(row["largest_difference"] > TOLERANCE for row in judged))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    sys.path.insert(0, str(ROOT / "experiments"))
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
