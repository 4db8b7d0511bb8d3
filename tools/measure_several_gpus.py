"""Several GPUs against one, in train.py's own trainer: the same losses from the same samples, throughput, and a model that needs several.

`python tools/measure_several_gpus.py [FILE [COMMIT]]` on a machine with several GPUs; COMMIT where the sources are not a git checkout.
It starts torchrun itself, for one process and for one a GPU. `--smoke` runs the least of it on two processes of the CPU.

Losses are compared in float32: one GPU takes the whole batch and each of several its part. One GPU also trains from weights disturbed by
DISTURBANCE, about a rounding: how far apart rounding alone drives two runs. Throughput is that of synthetic images of 224 pixels that lie
on the device. Last comes a model whose weights, gradients and AdamW's state take more than one GPU has. The status is 1 where losses
differ by more than TOLERANCE or the large model's are not finite; cases that rounding alone drives further apart than TOLERANCE are shown,
not judged.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from lab.runs.files import write_text

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4  # largest relative difference of a step's loss
DISTURBANCE = 2.0**-23  # standard deviation, relative to each weight
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
CLASSES = 1000
BYTES = 16  # of a parameter under AdamW: weight, gradient and two moments, of float32


@dataclass(frozen=True)
class Case:
    """A model whose steps are timed under an optimiser."""

    model: str
    parallel: str
    batch: int  # images a GPU
    optimizer: str = "adamw"
    depth: int | None = None  # blocks, where they are not the model's own

    @property
    def name(self) -> str:
        return f"{self.model}, {self.parallel}, {self.optimizer}"

    @property
    def alone(self) -> tuple[str, int, str]:
        """What it shares with the case of one GPU."""
        return self.model, self.batch, self.optimizer


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    device: str
    gpus: int
    losses: tuple[str, ...]
    updates: int
    speed: tuple[tuple[str, str, int], ...]  # model, parallel, images a GPU and batch
    large: tuple[str, int]  # model whose blocks are repeated until one GPU cannot hold it, images a GPU and batch
    memory: int  # bytes of one GPU
    pixels: int
    images: int
    warmup: int
    timed: int


def sizes(smoke: bool) -> Sizes:
    import torch

    models = (
        ("resnet50", "ddp", 256),
        ("vit_base_patch16_224", "ddp", 128),
        ("vit_large_patch16_224", "ddp", 64),
        ("vit_large_patch16_224", "fsdp", 64),
    )
    if smoke:
        small = (("test_resnet", "ddp", 4), ("test_vit", "ddp", 4), ("test_vit", "fsdp", 4))
        return Sizes("cpu", 2, ("class weights", "FSDP"), 2, small, ("test_vit", 2), 2**23, 160, 32, 1, 2)
    properties = torch.cuda.get_device_properties(0)
    gpus = torch.cuda.device_count()
    return Sizes("cuda", gpus, tuple(LOSSES), 20, models, ("vit_7b_patch16_dinov3", 8), properties.total_memory, 224, 8192, 15, 40)


def cases(given: Sizes, ranks: int) -> list[Case]:
    """Those of so many GPUs; on one of them all ways to spread a model are none."""
    models = dict.fromkeys((model, parallel if ranks > 1 else "none", batch) for model, parallel, batch in given.speed)
    return [Case(*model, optimizer) for model in models for optimizer in ("sgd", "adamw")]


def large_case(given: Sizes) -> Case:
    """The fewest blocks with which one GPU cannot hold weights, gradients and state."""
    model, batch = given.large
    one, two = (parameters(model, depth) for depth in (1, 2))
    return Case(model, "fsdp", batch, depth=1 + math.ceil((given.memory / BYTES - one) / (two - one)))


def parameters(model: str, depth: int) -> int:
    import timm
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(model, num_classes=CLASSES, depth=depth).parameters())


def losses(name: str, given: Sizes, ranks: int, folder: Path, disturbance: float = 0.0) -> list[float]:
    """Those of the first updates."""
    import torch

    from lab.config.settings import load
    from lab.training.assemble import assemble

    words, accumulate = LOSSES[name]
    parts = [
        f"trainer.device={'auto' if given.device == 'cuda' else 'cpu'}",
        f"data.batch_size={WHOLE // ranks // accumulate}",
        f"trainer.accumulate={accumulate}",
    ]
    root = [f"data.root={folder}"] if "task=detection" in words else []
    trainer = assemble(load([*EXACT, *words, *parts, *root]))
    generator = torch.Generator(trainer.device).manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters() if disturbance else ():
            weight.mul_(1 + disturbance * torch.randn(weight.shape, device=weight.device, generator=generator))
    found: list[float] = []
    while len(found) < given.updates:
        trainer.data.train.begin(1 + len(found) // trainer.per_epoch)
        for group in islice(trainer.groups(), given.updates - len(found)):
            trainer.update(group)
            loss, finite, *_ = trainer.window.tolist()
            trainer._clear_window()
            found.append(loss / finite)
    return found


def trainer_of(case: Case, given: Sizes, images: int) -> Any:
    """A trainer under bfloat16 autocast, on images that are random, the same on all GPUs and on the device."""
    import torch

    from lab.config.settings import load
    from lab.data.samples import Annotations
    from lab.data.sets import Data, MemoryLoader, Norm, Split
    from lab.runs.machine import pick_device, seed_all
    from lab.tasks.classification.task import Classification
    from lab.training.trainer import Trainer

    words = ["model=timm", f"model.name={case.model}", f"optim={case.optimizer}", "data=folder", f"data.image_size={given.pixels}"]
    words += [f"model.args={{depth: {case.depth}}}"] if case.depth else []
    words += [f"trainer.parallel={case.parallel}"] if case.parallel != "none" else []
    words += ["optim.lr=1e-4", "optim.schedule.warmup_epochs=0", "trainer.epochs=100", "trainer.channels_last=true"]
    settings = load([*words, "trainer.amp=bf16", "tracking=none"])
    device = pick_device("auto" if given.device == "cuda" else "cpu")
    seed_all(settings.config)
    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, given.pixels, given.pixels), dtype=torch.uint8, device=device, generator=generator)
    target = torch.randint(CLASSES, (images,), device=device, generator=generator)
    norm = (torch.full((3,), 0.5), torch.full((3,), 0.25))
    loader = MemoryLoader(Split(pixels, target, []), Annotations(), case.batch, device, norm).shuffled(0, None)
    classes = [str(number) for number in range(CLASSES)]
    data = Data(classes, 3, Norm(norm[0].tolist(), norm[1].tolist()), loader, loader, 0, torch.bincount(target, minlength=CLASSES))
    task = Classification(settings.config, data, device)
    with device:  # where a model of billions is made in seconds
        model = task.model()
    return Trainer(settings.config, task, data, model, device, settings.tree())


def speed(case: Case, given: Sizes, ranks: int) -> dict[str, Any]:
    """The rate of steps, and the memory they take."""
    cuda = start_of_memory()
    trainer = trainer_of(case, given, max(given.images, 2 * case.batch * ranks))
    done, began = 0, 0.0
    while done < given.warmup + given.timed:
        for group in trainer.groups():
            trainer.update(group)
            done += 1
            if done == given.warmup:
                trainer.window.tolist()
                trainer.clock.restart()
                trainer._clear_window()
                began = time.perf_counter()
            if done == given.warmup + given.timed:
                break
    images = trainer.window.tolist()[-1]
    seconds = time.perf_counter() - began
    waited = trainer.clock.read(images)["train/data_wait_share"]
    rate = {"images_per_second": images / seconds, "step_ms": seconds / given.timed * 1e3, "data_wait_share": waited}
    return rate | {"peak_mib": peak_mib(trainer.device) if cuda else None}


def large(case: Case, given: Sizes, ranks: int) -> dict[str, Any]:
    """The losses of a model that one GPU cannot hold, on images that it sees again and again, and the memory it takes on each GPU."""
    cuda = start_of_memory()
    trainer = trainer_of(case, given, case.batch * ranks)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < given.timed // 4 + 2:
        for group in trainer.groups():
            trainer.update(group)
            loss, finite, *_ = trainer.window.tolist()
            trainer._clear_window()
            found.append(loss / finite if finite else math.nan)
            if len(found) == 1:
                began = time.perf_counter()
    seconds = (time.perf_counter() - began) / (len(found) - 1)
    shape = {"model": case.model, "depth": case.depth, "parameters": count, "optimizer": case.optimizer, "batch": case.batch, "gpus": ranks}
    needs = {"needed_mib": BYTES * count / 2**20, "gpu_mib": given.memory / 2**20}
    return shape | needs | {"peak_mib": peak_mib(trainer.device) if cuda else None, "step_ms": seconds * 1e3, "losses": found}


def start_of_memory() -> bool:
    """Let go of what an earlier case held; whether there is a GPU."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.is_available()


def peak_mib(device: Any) -> float:
    """The most that any GPU had allocated."""
    import torch

    from lab.processes import distributed

    return distributed.highest({"peak": torch.cuda.max_memory_allocated() / 2**20}, device)["peak"]


def worker(folder: Path, smoke: bool) -> None:
    """Measure everything as one of torchrun's processes; the first one writes."""
    from lab.processes import distributed
    from lab.runs.machine import pick_device

    given = sizes(smoke)
    distributed.start(pick_device("auto" if given.device == "cuda" else "cpu"))
    ranks = distributed.ranks()
    found: dict[str, Any] = {"losses": {}, "disturbed": {}, "speed": []}
    for name in given.losses:
        found["losses"][name] = losses(name, given, ranks, folder)
        if ranks == 1:
            found["disturbed"][name] = losses(name, given, ranks, folder, DISTURBANCE)
    for case in cases(given, ranks):
        found["speed"].append(speed(case, given, ranks))
        if distributed.rank() == 0:
            print(ranks, case.name, found["speed"][-1], flush=True)
    if ranks > 1:
        found["large"] = large(large_case(given), given, ranks)
    if distributed.rank() == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(found))
    distributed.stop()


def measured(given: Sizes, smoke: bool) -> list[dict[str, Any]]:
    """What one process found, and what several did."""
    with tempfile.TemporaryDirectory() as folder:
        for gpus in (1, given.gpus):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
            began = time.monotonic()
            command = [*torchrun, str(Path(__file__).resolve()), "--worker", folder, *(["--smoke"] if smoke else [])]
            subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1" if smoke else "8", **os.environ})
            print(f"{gpus} GPUs: {time.monotonic() - began:.0f} s", flush=True)
        return [json.loads((Path(folder) / f"{gpus}.json").read_text()) for gpus in (1, given.gpus)]


def difference(a: list[float], b: list[float]) -> float:
    """The largest, relative."""
    return max(abs(one - other) / abs(one) for one, other in zip(a, b, strict=True))


def main(arguments: list[str]) -> int:
    import torch
    import triton

    from lossforge.bench.run import current_commit

    smoke = "--smoke" in arguments
    arguments = [argument for argument in arguments if argument != "--smoke"]
    if not smoke and torch.cuda.device_count() < 2:
        print(f"several GPUs are needed; here are {torch.cuda.device_count()}.", file=sys.stderr)
        return 1
    given = sizes(smoke)
    one, several = measured(given, smoke)
    report: dict[str, Any] = {
        "gpu": "CPU" if smoke else torch.cuda.get_device_name(),
        "gpus": given.gpus,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": "none" if smoke else ".".join(map(str, torch.cuda.nccl.version())),
        "commit": arguments[1] if len(arguments) > 1 else current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "tolerance": TOLERANCE,
        "disturbance": DISTURBANCE,
        "losses": [],
        "speed": [],
        "large": several["large"],
    }
    for name, alone in one["losses"].items():
        together, disturbed = several["losses"][name], one["disturbed"][name]
        largest, of_rounding = difference(alone, together), difference(alone, disturbed)
        row = {"case": name, "updates": len(alone), "largest_difference": largest, "of_rounding": of_rounding}
        report["losses"].append(row | {"one": alone, "several": together, "disturbed": disturbed})
        print(name, len(alone), largest, of_rounding, flush=True)
    rates: dict[tuple[str, int, str], float] = {}
    for gpus, found in ((1, one), (given.gpus, several)):
        for case, rate in zip(cases(given, gpus), found["speed"], strict=True):
            alone_rate = rates.setdefault(case.alone, rate["images_per_second"])
            row = {"model": case.model, "optimizer": case.optimizer, "parallel": case.parallel, "batch": case.batch, "gpus": gpus}
            report["speed"].append(row | rate | {"scaling": rate["images_per_second"] / (gpus * alone_rate)})
    path = Path(arguments[0]) if arguments else ROOT / "results" / "several-gpus-h200.json"
    write_text(path, json.dumps(report, indent=1) + "\n")
    judged = (row for row in report["losses"] if row["of_rounding"] <= TOLERANCE)
    differ = any(row["largest_difference"] > TOLERANCE for row in judged)
    return int(differ or not all(map(math.isfinite, report["large"]["losses"])))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    sys.path.insert(0, str(ROOT / "experiments"))
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), "--smoke" in sys.argv)
    else:
        sys.exit(main(sys.argv[1:]))
