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
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from measuring import Request, free_memory, largest_difference, peak_mib
from torch import Tensor, nn

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
    """How much is measured. speed: model, parallel, images a GPU and batch. large: a model whose blocks are repeated, and its batch.
    fused: blocks, tokens a GPU, features and classes of the model that ends in a fused loss."""

    device: str
    gpus: int
    losses: tuple[str, ...]
    updates: int
    speed: tuple[tuple[str, str, int], ...]
    large: tuple[str, int]
    memory: int  # bytes of one GPU
    pixels: int
    images: int
    warmup: int
    timed: int
    fused: tuple[int, int, int, int]


def sizes(small: bool) -> Sizes:
    if small:
        models = (("test_resnet", "ddp", 4), ("test_vit", "ddp", 4), ("test_vit", "fsdp", 4))
        return Sizes("cpu", 2, ("class weights", "FSDP"), 2, models, ("test_vit", 2), 2**23, 160, 32, 1, 2, (1, 16, 8, 50))
    vit = "vit_large_patch16_224"
    of_vit = tuple((vit, parallel, batch) for batch in (64, 256) for parallel in ("ddp", "fsdp"))
    models = (("resnet50", "ddp", 256), ("vit_base_patch16_224", "ddp", 128), *of_vit)
    gpus, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
    return Sizes("auto", gpus, tuple(LOSSES), 20, models, ("vit_7b_patch16_dinov3", 8), memory, 224, 8192, 15, 40, (4, 8192, 4096, 128256))


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
    import timm

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(model, num_classes=CLASSES, depth=depth).parameters())


def groups(trainer: Any) -> Iterator[list[Tensor]]:
    """Yield the batches of each update, epoch after epoch."""
    while True:
        yield from trainer.groups()


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
    from lab.config.settings import load
    from lab.training.assemble import assemble

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
    for group in islice(endless, given.warmup):
        trainer.update(group)
    trainer.window.tolist()
    trainer.clock.restart()
    trainer._clear_window()
    began = time.perf_counter()
    for group in islice(endless, given.timed):
        trainer.update(group)
    images = trainer.window.tolist()[-1]
    seconds = time.perf_counter() - began
    waited = trainer.clock.read(images)["train/data_wait_share"]
    rate = {"images_per_second": images / seconds, "step_ms": seconds / given.timed * 1e3, "data_wait_share": waited}
    return asdict(case) | {"gpus": ranks} | rate | {"peak_mib": highest_peak(trainer.device)}


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


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class EndsInLoss(nn.Module):
    """Its forward gives the loss, so that the head's weight is whole when the loss takes it."""

    def __init__(self, blocks: int, features: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(features) for _ in range(blocks)], nn.LayerNorm(features))
        self.head = nn.Linear(features, classes, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        from lossforge.losses import linear_cross_entropy

        return linear_cross_entropy(self.blocks(x), self.head.weight, target)


def fused(parallel: str, given: Sizes, ranks: int) -> dict[str, Any]:
    """Measure steps of a model that ends in a fused loss; on several GPUs its gradients, beside those of this GPU with the whole batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from lab.processes import distributed
    from lab.runs.machine import pick_device

    free_memory()
    blocks, tokens, features, classes = given.fused
    device, rank = pick_device(given.device), distributed.rank()
    torch.manual_seed(0)
    with device:
        model = EndsInLoss(blocks, features, classes).bfloat16()
        x = torch.randn(ranks * tokens, features, dtype=torch.bfloat16)
        target = torch.randint(classes, (ranks * tokens,))
    exact: dict[str, Tensor] = {}
    if ranks > 1:
        whole = copy.deepcopy(model)
        whole(x, target).backward()
        exact = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
        del whole
    x, target = (each.chunk(ranks)[rank].clone() for each in (x, target))
    trained: nn.Module = model
    if parallel == "ddp":
        trained = DistributedDataParallel(model)
    elif parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        trained = fully_shard(model)
    trained(x, target).backward()
    difference = 0.0
    for name, each in model.named_parameters():
        gradient: Any = each.grad.full_tensor() if parallel == "fsdp" else each.grad
        if exact:
            difference = max(difference, ((gradient.float() - exact[name].float()).norm() / exact[name].float().norm()).item())
    del exact
    gradient = None
    free_memory()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=device.type == "cuda")

    def steps(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            optimizer.zero_grad()
            loss = trained(x, target)
            loss.backward()
            optimizer.step()
        loss.item()
        return (time.perf_counter() - began) / number

    steps(given.warmup)
    seconds = steps(given.timed)
    row: dict[str, Any] = {"parallel": parallel, "gpus": ranks}
    row |= {"blocks": blocks, "tokens": tokens, "features": features, "classes": classes}
    row |= {"step_ms": seconds * 1e3, "tokens_per_second": ranks * tokens / seconds, "peak_mib": highest_peak(device)}
    return row | ({"gradient_difference": difference} if ranks > 1 else {})


def highest_peak(device: torch.device) -> float | None:
    """Return the most memory that any GPU had allocated."""
    from lab.processes import distributed

    return distributed.highest({"peak": peak_mib() or 0.0}, device)["peak"] or None


def worker(small: bool, folder: str) -> dict[str, Any]:
    """Measure everything as one of torchrun's processes."""
    from lab.processes import distributed
    from lab.runs.machine import pick_device

    given = sizes(small)
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


def launched(processes: int, small: bool, folder: str) -> dict[str, Any]:
    """Start workers as torchrun does, and return what the first one found."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1" if small else "8")
    began = time.monotonic()
    alone = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0}
    found = elastic_launch(LaunchConfig(nproc_per_node=processes, **alone), worker)(small, folder)
    print(f"{processes} processes: {time.monotonic() - began:.0f} s", *found[0]["fused"], *found[0]["speed"], sep="\n", flush=True)
    return found[0]


def several_gpus(request: Request) -> int:
    given = sizes(request.small)
    with tempfile.TemporaryDirectory() as folder:
        one, several = (launched(processes, request.small, folder) for processes in (1, given.gpus))
    report: dict[str, Any] = {
        **request.source("triton"),
        "gpus": given.gpus,
        "nccl": "none" if request.small else ".".join(map(str, torch.cuda.nccl.version())),
        "tolerance": TOLERANCE,
        "disturbance": DISTURBANCE,
        "losses": [],
        "speed": one["speed"] + several["speed"],
        "fused": one["fused"] + several["fused"],
        "large": several["large"],
    }
    for name, alone in one["losses"].items():
        together, disturbed = several["losses"][name], one["disturbed"][name]
        differences = {"largest_difference": largest_difference(together, alone), "of_rounding": largest_difference(disturbed, alone)}
        row = {"case": name, "updates": len(alone), **differences}
        print(row, flush=True)
        report["losses"].append(row | {"one": alone, "several": together, "disturbed": disturbed})
    rates = {(row["model"], row["batch"], row["optimizer"]): row["images_per_second"] for row in one["speed"]}
    for row in report["speed"]:
        row["scaling"] = row["images_per_second"] / (row["gpus"] * rates[row["model"], row["batch"], row["optimizer"]])
    alone = one["fused"][0]["tokens_per_second"]
    for row in report["fused"]:
        row["scaling"] = row["tokens_per_second"] / (row["gpus"] * alone)
    request.save(report)
    counted = (row for row in report["losses"] if row["of_rounding"] <= TOLERANCE)
    differ = any(row["largest_difference"] > TOLERANCE for row in counted)
    differ = differ or any(row["gradient_difference"] > GRADIENT for row in several["fused"])
    return int(differ or not all(map(math.isfinite, report["large"]["losses"])))
