"""A training step of RetinaNet-resnet50 on images at random, under this repository's loss and under torchvision's own, in one trainer."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from lab.config.settings import load
from lab.data.sets import Norm
from lab.runs.machine import pick_device, seed_all
from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.task import Detection
from lab.tasks.detection.types import DetectorOutput
from lab.training.trainer import Trainer

STEP = "task=detection model=retinanet_resnet50 loss=focal model.fixed_size=[800,1344] data.batch_size=16"
FAST = "trainer.amp=bf16 trainer.channels_last=true optim.lr=1e-4 trainer.epochs=1"
SMOKE = "model=retinanet_tiny model.fixed_size=[64,96] data.batch_size=2 trainer.amp=off trainer.channels_last=false"
CLASSES = 80
BOXES = (12, 28)  # of an image, at least and at most
WARM_UP, WINDOWS, UPDATES = 10, 5, 8
CONTENDERS = ("lossforge", "torchvision", "loss.implementation=torch")
AGREE = 1e-3


@dataclass
class StockBatch(DetectionBatch):
    """A batch with what torchvision's loss takes of each image: boxes and labels, anchors, and the box that each anchor shall predict."""

    targets: tuple[dict[str, Tensor], ...] = ()
    anchors: tuple[Tensor, ...] = ()
    indices: tuple[Tensor, ...] = ()


class Scenes:
    """Images and boxes at random, on the device before the clock starts; the same for every contender."""

    def __init__(self, batch_size: int, size: tuple[int, int], device: torch.device) -> None:
        self.samples = batch_size * (WARM_UP + WINDOWS * UPDATES)
        self.batches = [random_batch(batch_size, size, device, seed) for seed in range(2)]

    def __len__(self) -> int:
        return WARM_UP + WINDOWS * UPDATES

    def __iter__(self) -> Iterator[StockBatch]:
        for batches in repeat(self.batches):
            yield from batches


def random_batch(count: int, size: tuple[int, int], device: torch.device, seed: int) -> StockBatch:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor([size[1], size[0]])
    boxes, labels = torch.zeros(count, 32, 4), torch.full((count, 32), -1)
    for image in range(count):
        number = int(torch.randint(BOXES[0], BOXES[1] + 1, (), generator=generator))
        sides = (16 * (edges / 32) ** torch.rand(number, 2, generator=generator)).clamp(max=0.9 * min(size))  # 16 pixels to half the image
        corner = torch.rand(number, 2, generator=generator) * (edges - sides)
        boxes[image, :number] = torch.cat([corner, corner + sides], 1)
        labels[image, :number] = torch.randint(CLASSES, (number,), generator=generator)
    images = torch.randn(count, 3, *size, generator=generator)
    index, sizes = torch.arange(count), torch.tensor([size] * count)
    boxes, labels = boxes.to(device), labels.to(device)
    targets = tuple({"boxes": b[there], "labels": label[there]} for b, label, there in zip(boxes, labels, labels >= 0, strict=True))
    fixed = (sizes.to(device), sizes.to(device), index.to(device), index.to(device))
    return StockBatch(images.to(device), boxes, labels, *fixed, targets=targets)


class Stock(Detection):
    """Detection by torchvision's own matching and loss."""

    def prepare(self, batch: Any, *, training: bool) -> Any:
        return batch

    def normalizer(self, batch: Any) -> Tensor:
        return stock_match(self.detector, batch)

    def loss(self, output: DetectorOutput, batch: Any, normalizer: Tensor) -> Tensor:
        """Under autocast, as torchvision's training has it; each image's loss is divided by its own positives."""
        with torch.autocast(output.logits.device.type, torch.bfloat16, enabled=output.logits.dtype == torch.bfloat16):
            return stock_loss(self.detector, output, batch)

    def scores(self, output: DetectorOutput, batch: Any) -> Tensor:
        return torch.stack([(each >= 0).sum() for each in batch.indices]).sum()[None]


def stock_match(detector: Any, batch: StockBatch) -> Tensor:
    """The first half of torchvision's RetinaNet.compute_loss: the box of each anchor; returns how many anchors are positive."""
    height, width = batch.images.shape[-2:]
    batch.anchors = (torch.cat(detector.anchors(height, width, batch.images.device)),) * len(batch)
    overlaps = (box_iou(target["boxes"], anchors) for target, anchors in zip(batch.targets, batch.anchors, strict=True))
    batch.indices = tuple(detector.proposal_matcher(each) for each in overlaps)
    return torch.stack([(each >= 0).sum() for each in batch.indices]).sum()


def stock_loss(detector: Any, output: DetectorOutput, batch: StockBatch) -> Tensor:
    """Its second half: the loss of torchvision's heads."""
    heads = {"cls_logits": output.logits, "bbox_regression": output.regression}
    losses = detector.head.compute_loss(list(batch.targets), heads, list(batch.anchors), list(batch.indices))
    return losses["classification"] + losses["bbox_regression"]


def contenders(smoke: bool) -> Iterator[dict[str, Any]]:
    """Step time, loss time and peak memory under each loss, and whether the losses are the same."""
    words = [*STEP.split(), *FAST.split(), *(SMOKE.split() if smoke else [])]
    first = load(words).config
    device = pick_device(first.trainer.device)
    fixed: Any = first.model
    scenes = Scenes(first.data.batch_size, tuple(fixed.fixed_size), device)
    for name in CONTENDERS:
        yield {"command": f"{STEP} {FAST}", "loss": name, **measured(name, words, scenes, device, smoke)}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def assembled(name: str, words: list[str], scenes: Scenes, device: torch.device) -> tuple[Trainer, Detection]:
    settings = load([*words, *([name] if "=" in name else [])])
    config, model = settings.config, settings.config.model
    seed_all(config)
    classes = [str(number) for number in range(CLASSES)]
    data: Any = SimpleNamespace(
        classes=classes, category_ids=list(range(CLASSES)), norm=Norm([0.0] * 3, [1.0] * 3), train=scenes, val=scenes, counts=None
    )
    size: Any = model
    task = (Stock if name == "torchvision" else Detection)(config, data, tuple(size.fixed_size), device)
    return Trainer(config, task, data, task.model(), device, settings.tree()), task


def measured(name: str, words: list[str], scenes: Scenes, device: torch.device, smoke: bool) -> dict[str, Any]:
    trainer, task = assembled(name, words, scenes, device)
    trainer.model.train()
    window(trainer, 1 if smoke else WARM_UP)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    windows = [window(trainer, 1 if smoke else UPDATES) for _ in range(1 if smoke else WINDOWS)]
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    middle = {figure: sorted(each[f"train/{figure}"] for each in windows)[len(windows) // 2] for figure in ("step_ms", "loss_ms")}
    ranges = {f"{figure}_range": [f(each[f"train/{figure}"] for each in windows) for f in (min, max)] for figure in middle}
    return {**middle, **ranges, "peak_mib": peak, "nonfinite": int(trainer.guard.total), **agreement(trainer, task, scenes)}


def window(trainer: Trainer, updates: int) -> dict[str, float]:
    trainer.clock.restart()
    images = 0
    for group in islice(trainer.groups(), updates):
        trainer.update(group)
        images += sum(len(batch) for batch in group)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return trainer.clock.read(images)


def agreement(trainer: Trainer, task: Detection, scenes: Scenes) -> dict[str, Any]:
    """The contender's value and gradient of one batch's outputs, against torchvision's loss in float64 of the same outputs.

    Ours divides by the positives of all images, torchvision's each image by its own: so ours is taken an image at a time, and the mean.
    """
    batch = scenes.batches[0]
    with torch.no_grad(), trainer.autocast():
        output = trainer.forward(trainer.laid_out(batch))
    positives = int(stock_match(task.detector, batch))
    wide = DetectorOutput(output.logits.double(), output.regression.double())
    exact, gradients = value_and_gradients(lambda given: stock_loss(task.detector, given, batch), wide)
    if isinstance(task, Stock):
        value, found = value_and_gradients(lambda given: task.loss(given, batch, torch.ones(())), output)
    else:
        value, found = value_and_gradients(lambda given: by_image(task, given, batch), output)
        matched = int(task.normalizer(batch))
        if matched != positives:
            raise RuntimeError(f"{matched} positives where torchvision has {positives}")
    off = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, gradients, strict=True)]
    difference = abs(value - exact) / abs(exact)
    return {
        "positives": positives,
        "value": value,
        "exact": exact,
        "difference": difference,
        "agrees": difference <= AGREE,
        "gradient_difference": {"logits": off[0], "regression": off[1]},
    }


def value_and_gradients(loss: Any, output: DetectorOutput) -> tuple[float, list[Tensor]]:
    leaves = [output.logits.detach().requires_grad_(), output.regression.detach().requires_grad_()]
    value = loss(DetectorOutput(*leaves))
    return value.item(), list(torch.autograd.grad(value, leaves))


def by_image(task: Detection, output: DetectorOutput, batch: DetectionBatch) -> Tensor:
    task.prepare(batch, training=True)
    matched = batch.matched
    assert matched is not None
    losses = []
    for image in range(len(batch)):
        one = slice(image, image + 1)
        positives = matched.positive[one].sum().float()
        labels, boxes, positive = matched.labels[one], matched.boxes[one], matched.positive[one]
        of_image = matched._replace(labels=labels, boxes=boxes, positive=positive, positives=positives)
        parts = task.detector.loss(DetectorOutput(output.logits[one], output.regression[one]), of_image, positives.clamp(min=1))
        losses.append(torch.stack(list(parts.values())).sum())
    return torch.stack(losses).mean()
