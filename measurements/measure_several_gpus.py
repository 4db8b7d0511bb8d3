"""Measure train.py's trainer on several GPUs and on one: the same losses from the same samples, throughput, and a model that needs several.

It starts torchrun's processes, first one and then one a GPU. `--small` measures the least of it on two processes of the CPU.

Losses are compared in float32: one GPU takes the whole batch, and each of several its part. One GPU also trains from weights disturbed by
DISTURBANCE, about a rounding. This shows how far rounding alone drives two runs. Throughput is that of synthetic images of 224 pixels that
lie on the device. Then a model of bfloat16 ends in linear_cross_entropy over a large vocabulary: its rate, its memory, and how far its
gradients are from those of one GPU with the whole batch. Last comes a model whose weights, gradients and AdamW's state take more than one
GPU has. The status is 1 where losses differ by more than TOLERANCE, gradients by more than GRADIENT, or the large model's losses are not
finite. Cases that rounding alone drives further than TOLERANCE do not count.
"""

import copy
import math
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import timm
import torch
from beside_fsdp import EndsInLoss, gradients, train_steps
from measuring import Request, free_memory, groups, largest_difference, launched, peak_mib, relative, window
from torch.nn.parallel import DistributedDataParallel

from lab.config.settings import load
from lab.data.samples import Annotations
from lab.data.sets import Data, MemoryLoader, Norm, Split
from lab.processes import distributed
from lab.processes.parallel import shard
from lab.run.machine import pick_device, seed_all
from lab.tasks.classification.task import Classification
from lab.training.assemble import assemble
from lab.training.trainer import Trainer

TOLERANCE = 1e-4  # largest relative difference of a step's loss
GRADIENT = 1e-2  # largest difference of a gradient of bfloat16, relative by norm
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
FAST = """model=timm data=folder optim.lr=1e-4 optim.schedule.warmup_epochs=0 trainer.epochs=100 trainer.channels_last=true
trainer.amp=bf16 tracking=none"""
CLASSES = 1000
BYTES = 16  # of a parameter under AdamW: weight, gradient and two moments, of float32


@dataclass(frozen=True)
class Case:
    """A model whose steps are timed under an optimiser. batch: images a GPU. depth: blocks, None for the model's default."""

    model: str
    parallel: str
    batch: int
    optimizer: str = "adamw"
    depth: int | None = None


@dataclass(frozen=True)
class Sizes:
    """How much is measured. speed: model, parallel, images a GPU. large: a model whose blocks are repeated, and images a GPU.
    fused: the model that ends in a fused loss, and its tokens a GPU."""

    device: str = "auto"
    gpus: int = field(default_factory=torch.cuda.device_count)
    memory: int = field(default_factory=lambda: torch.cuda.get_device_properties(0).total_memory)  # bytes of one GPU
    losses: tuple[str, ...] = tuple(LOSSES)
    updates: int = 20
    speed: tuple[tuple[str, str, int], ...] = (
        *(("resnet50", "ddp", 256), ("vit_base_patch16_224", "ddp", 128)),
        *(("vit_large_patch16_224", parallel, batch) for batch in (64, 256) for parallel in ("ddp", "fsdp")),
    )
    large: tuple[str, int] = ("vit_7b_patch16_dinov3", 8)
    fused: tuple[int, int, int, int] = (4, 8192, 4096, 128256)  # blocks, tokens, features, classes
    pixels: int = 224
    images: int = 8192
    warmup: int = 15
    timed: int = 40


SMALL = Sizes(
    device="cpu",
    gpus=2,
    memory=2**23,
    losses=("class weights", "FSDP"),
    updates=2,
    speed=(("test_resnet", "ddp", 4), ("test_vit", "ddp", 4), ("test_vit", "fsdp", 4)),
    large=("test_vit", 2),
    fused=(1, 16, 8, 50),
    pixels=160,
    images=32,
    warmup=1,
    timed=2,
)


def cases(given: Sizes, ranks: int) -> list[Case]:
    """Return the timed cases. On one GPU a model is not spread, so that its ways to be spread are one case."""
    models = dict.fromkeys((model, parallel if ranks > 1 else "none", batch) for model, parallel, batch in given.speed)
    return [Case(*model, optimizer) for model in models for optimizer in ("sgd", "adamw")]


def large_case(given: Sizes) -> Case:
    """Return the model with the fewest blocks whose weights, gradients and state one GPU cannot hold."""
    model, batch = given.large
    one, two = (parameters(model, depth) for depth in (1, 2))
    return Case(model, "fsdp", batch, depth=1 + math.ceil((given.memory / BYTES - one) / (two - one)))


def parameters(model: str, depth: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(model, num_classes=CLASSES, depth=depth).parameters())


def losses_of(trainer: Any, updates: int) -> list[float]:
    """Train, and return the loss of each update."""
    found = []
    for group in islice(groups(trainer), updates):
        trainer.update(group)
        loss, finite, *_ = trainer.window.tolist()
        trainer._clear_window()
        found.append(loss / finite if finite else math.nan)
    return found


def losses(name: str, given: Sizes, ranks: int, folder: str, disturbance: float = 0.0) -> list[float]:
    """Return the losses of the first updates. folder: of the scenes. disturbance: of the first weights."""
    words, accumulate = LOSSES[name]
    parts = [f"trainer.device={given.device}", f"data.batch_size={WHOLE // ranks // accumulate}", f"trainer.accumulate={accumulate}"]
    root = [f"data.root={folder}"] if "task=detection" in words else []
    trainer = assemble(load([*EXACT, *words, *parts, *root]))
    generator = torch.Generator(trainer.device).manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters() if disturbance else ():
            weight.mul_(1 + disturbance * torch.randn(weight.shape, device=weight.device, generator=generator))
    return losses_of(trainer, given.updates)


def trainer_of(case: Case, given: Sizes, images: int) -> Any:
    """Make a trainer under bfloat16 autocast, on images that are random, the same on all GPUs and on the device."""
    words = [*FAST.split(), f"model.name={case.model}", f"optim={case.optimizer}", f"data.image_size={given.pixels}"]
    words += [f"model.args={{depth: {case.depth}}}"] if case.depth else []
    words += [f"trainer.parallel={case.parallel}"] if case.parallel != "none" else []
    settings = load(words)
    device = pick_device(given.device)
    seed_all(settings.config)
    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, given.pixels, given.pixels), dtype=torch.uint8, device=device, generator=generator)
    target = torch.randint(CLASSES, (images,), device=device, generator=generator)
    norm = Norm([0.5] * 3, [0.25] * 3)
    loader = MemoryLoader(Split(pixels, target, []), Annotations(), case.batch, device, norm).shuffled(0, None)
    data = Data([*map(str, range(CLASSES))], 3, norm, loader, loader, 0, torch.bincount(target, minlength=CLASSES))
    task = Classification(settings.config, data, device)
    with device:  # where a model of billions is made in seconds
        model = task.model()
    return Trainer(settings.config, task, data, model, device, settings.tree())


def speed(case: Case, given: Sizes, ranks: int) -> dict[str, Any]:
    """Measure the rate of steps, and the memory that they take."""
    free_memory()
    trainer = trainer_of(case, given, max(given.images, 2 * case.batch * ranks))
    endless = groups(trainer)
    window(trainer, endless, given.warmup)
    found = window(trainer, endless, given.timed)
    found["images_per_second"] *= ranks
    costs = {name: found[name] for name in ("images_per_second", "step_ms", "data_wait_share")}
    return asdict(case) | {"gpus": ranks} | costs | {"peak_mib": highest_peak(trainer.device)}


def large(case: Case, given: Sizes, ranks: int) -> dict[str, Any]:
    """Train a model that one GPU cannot hold on the same images again and again; return its losses, and its memory on each GPU."""
    free_memory()
    trainer = trainer_of(case, given, case.batch * ranks)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    first, began = losses_of(trainer, 1), time.perf_counter()
    found = first + losses_of(trainer, given.timed // 4 + 1)
    ms = (time.perf_counter() - began) / (len(found) - 1) * 1e3
    needs = {"parameters": count, "needed_mib": BYTES * count / 2**20, "gpu_mib": given.memory / 2**20}
    return asdict(case) | {"gpus": ranks} | needs | {"peak_mib": highest_peak(trainer.device), "step_ms": ms, "losses": found}


def fused(parallel: str, given: Sizes, ranks: int) -> dict[str, Any]:
    """Measure steps of a model that ends in a fused loss; on several GPUs its gradients, beside those of this GPU with the whole batch."""
    free_memory()
    device, (blocks, tokens, features, classes) = pick_device(given.device), given.fused
    torch.manual_seed(0)
    with device:
        model = EndsInLoss(blocks, features, classes).bfloat16()
        x = torch.randn(ranks * tokens, features, dtype=torch.bfloat16)
        target = torch.randint(classes, (ranks * tokens,))
    whole = copy.deepcopy(model)
    exact = gradients(whole, x, target) if ranks > 1 else []
    x, target = (each.chunk(ranks)[distributed.rank()].clone() for each in (x, target))
    trained = DistributedDataParallel(model) if parallel == "ddp" else model
    if parallel == "fsdp":
        shard(model, device)
    differences = [relative(ours, of_whole) for ours, of_whole in zip(gradients(trained, x, target), exact, strict=False)]
    del whole, exact
    free_memory()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=device.type == "cuda")

    train_steps(trained, optimizer, (x, target), given.warmup)
    seconds = train_steps(trained, optimizer, (x, target), given.timed) / 1e3
    row = {"parallel": parallel, "gpus": ranks, "blocks": blocks, "tokens": tokens, "features": features, "classes": classes}
    row |= {"step_ms": seconds * 1e3, "tokens_per_second": ranks * tokens / seconds, "peak_mib": highest_peak(device)}
    return row | {"gradient_difference": max(differences)} if ranks > 1 else row


def highest_peak(device: torch.device) -> float | None:
    """Return the most memory that any GPU had allocated."""
    return distributed.all_max({"peak": peak_mib() or 0.0}, device)["peak"] or None


def worker(given: Sizes, folder: str) -> dict[str, Any]:
    """Measure everything as one of torchrun's processes."""
    distributed.start(pick_device(given.device))
    ranks = distributed.ranks()
    found: dict[str, Any] = {"losses": {name: losses(name, given, ranks, folder) for name in given.losses}}
    if ranks == 1:
        found["disturbed"] = {name: losses(name, given, ranks, folder, DISTURBANCE) for name in given.losses}
    found["fused"] = [fused(parallel, given, ranks) for parallel in (("ddp", "fsdp") if ranks > 1 else ("none",))]
    found["speed"] = [speed(case, given, ranks) for case in cases(given, ranks)]
    if ranks > 1:
        found["large"] = large(large_case(given), given, ranks)
    distributed.stop()
    return found


def told(processes: int, given: Sizes, folder: str) -> dict[str, Any]:
    """Return what the first of so many workers found."""
    began = time.monotonic()
    found = launched(worker, processes, given, folder, threads=1 if given.device == "cpu" else 8)
    print(f"{processes} processes: {time.monotonic() - began:.0f} s", *found["fused"], *found["speed"], sep="\n", flush=True)
    return found


def several_gpus(request: Request) -> int:
    given = SMALL if request.small else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        one, several = (told(processes, given, folder) for processes in (1, given.gpus))
    rows = []
    for name, alone in one["losses"].items():
        together, disturbed = several["losses"][name], one["disturbed"][name]
        differences = {"largest_difference": largest_difference(together, alone), "of_rounding": largest_difference(disturbed, alone)}
        rows.append({"case": name, "updates": len(alone), **differences, "one": alone, "several": together, "disturbed": disturbed})
        print(name, differences, flush=True)
    report: dict[str, Any] = {
        **request.source("triton"),
        "gpus": given.gpus,
        "nccl": "none" if request.small else ".".join(map(str, torch.cuda.nccl.version())),
        "tolerance": TOLERANCE,
        "disturbance": DISTURBANCE,
        "losses": rows,
        "speed": with_scaling(one["speed"] + several["speed"], "images_per_second", "model", "batch", "optimizer"),
        "fused": with_scaling(one["fused"] + several["fused"], "tokens_per_second"),
        "large": several["large"],
    }
    request.save(report)
    differ = any(row["largest_difference"] > TOLERANCE >= row["of_rounding"] for row in rows)
    differ = differ or any(row["gradient_difference"] > GRADIENT for row in several["fused"])
    return int(differ or not all(map(math.isfinite, report["large"]["losses"])))


def with_scaling(rows: list[dict[str, Any]], rate: str, *same: str) -> list[dict[str, Any]]:
    """Return the rows with each rate a GPU, beside that of one GPU; `same`: the columns that tell which row is of the same work."""
    alone = {tuple(row[name] for name in same): row[rate] for row in rows if row["gpus"] == 1}
    return [row | {"scaling": row[rate] / (row["gpus"] * alone[tuple(row[name] for name in same)])} for row in rows]
