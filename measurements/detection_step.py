"""Training steps of detectors on random images: RetinaNet beside torchvision's loss, and each detector under our losses and plain torch."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from measuring import free_memory, peak_mib, relative, window
from torch import Tensor
from torchvision.ops import box_iou

from lab.config.settings import load
from lab.data.sets import Norm
from lab.detectors.detection.task import Detection
from lab.detectors.detection.types import DetectionBatch, DetectorOutput, Matched
from lab.run.machine import pick_device, seed_all
from lab.training.trainer import Trainer
from lossforge.bench.measure import idle

STEP = "task=detection model=retinanet_resnet50 loss=focal model.fixed_size=[800,1344] data.batch_size=16"
FAST = "trainer.amp=bf16 trainer.channels_last=true optim.lr=1e-4 trainer.epochs=1"
SMALL = "model=retinanet_tiny model.fixed_size=[64,96] data.batch_size=2 trainer.amp=off trainer.channels_last=false"
STEPS = "task=detection model={}_resnet50 model.fixed_size=[640,640] data.batch_size=16"
STEPS_SMALL = "task=detection model={}_tiny model.fixed_size=[64,64] data.batch_size=2"
CLASSES = 80
BOXES = (12, 28)  # of an image, at least and at most
WARM_UP, WINDOWS, UPDATES = 10, 5, 8
CONTENDERS = ("lossforge", "torchvision", "loss.implementation=torch")
AGREE, AGREE_GRADIENT = 1e-3, 1e-2
"""Of the value, and of the gradients, which are as wide as the outputs: bfloat16 rounds by up to 4e-3."""


@dataclass
class StockBatch(DetectionBatch):
    """A batch with what torchvision's loss takes of each image: boxes and labels, anchors, and the box that each anchor predicts."""

    targets: tuple[dict[str, Tensor], ...] = ()
    anchors: tuple[Tensor, ...] = ()
    indices: tuple[Tensor, ...] = ()

    def image(self, number: int) -> "StockBatch":
        """Return a batch of one image of this one."""
        one: dict[str, Any] = {name: value[number : number + 1] for name, value in self.tensors().items()}
        return replace(self, **one, targets=self.targets[number : number + 1], matched=None)


class Scenes:
    """Random images and boxes, on the device before the clock starts; the same for every contender."""

    def __init__(self, words: list[str]) -> None:
        config: Any = load(words).config
        self.device, batch_size = pick_device(config.trainer.device), config.data.batch_size
        self.samples = batch_size * len(self)
        self.batches = [random_batch(batch_size, tuple(config.model.fixed_size), self.device, seed) for seed in range(2)]

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
    """Detection by torchvision's matching and loss."""

    def prepare(self, batch: Any, *, training: bool) -> Any:
        return batch

    def normalizer(self, batch: Any) -> Tensor:
        return stock_match(self.detector, batch)

    def loss(self, output: DetectorOutput, batch: Any, normalizer: Tensor) -> Tensor:
        """Compute it under autocast, as torchvision's training does; each image's loss is divided by the image's positives."""
        with torch.autocast(output.logits.device.type, torch.bfloat16, enabled=output.logits.dtype == torch.bfloat16):
            return stock_loss(self.detector, output, batch)

    def scores(self, output: DetectorOutput, batch: Any) -> Tensor:
        return torch.stack([(each >= 0).sum() for each in batch.indices]).sum()[None]


def stock_match(detector: Any, batch: StockBatch) -> Tensor:
    """Match boxes to anchors, as the first half of torchvision's RetinaNet.compute_loss; return how many anchors are positive."""
    height, width = batch.images.shape[-2:]
    batch.anchors = (torch.cat(detector.anchors(height, width, batch.images.device)),) * len(batch)
    overlaps = (box_iou(target["boxes"], anchors) for target, anchors in zip(batch.targets, batch.anchors, strict=True))
    batch.indices = tuple(detector.proposal_matcher(each) for each in overlaps)
    return torch.stack([(each >= 0).sum() for each in batch.indices]).sum()


def stock_loss(detector: Any, output: DetectorOutput, batch: StockBatch) -> Tensor:
    """Compute the loss of torchvision's heads, as the second half does."""
    heads = {"cls_logits": output.logits, "bbox_regression": output.regression}
    losses = detector.head.compute_loss(list(batch.targets), heads, list(batch.anchors), list(batch.indices))
    return losses["classification"] + losses["bbox_regression"]


def contenders(small: bool) -> Iterator[dict[str, Any]]:
    """Yield step time, loss time and peak memory under each loss, and whether the losses are the same."""
    words = [*STEP.split(), *FAST.split(), *(SMALL.split() if small else [])]
    scenes = Scenes(words)
    for name in CONTENDERS:
        trainer, task = assembled(name, words, scenes)
        yield {"command": f"{STEP} {FAST}", "loss": name, **timed(trainer, small), **against_torchvision(trainer, task, scenes.batches[0])}
        free_memory()


def detectors(small: bool) -> Iterator[dict[str, Any]]:
    """Yield what a step of each detector takes, and its loss and assignment, under our losses and under plain torch."""
    for name in ("retinanet", "fcos", "yolo", "detr"):
        words = [*(STEPS_SMALL if small else STEPS).format(name).split(), *FAST.split(), *(SMALL.split()[3:] if small else [])]
        scenes = Scenes(words)
        for loss in (CONTENDERS[0], CONTENDERS[-1]):
            trainer, task = assembled(loss, words, scenes)
            found = timed(trainer, small)
            matching = 0.0 if task.detector.matches_output else match_milliseconds(task, scenes.batches[0], 1 if small else 20)
            rate = {"images_per_second": len(scenes.batches[0]) / found["step_ms"] * 1e3, "match_ms": matching}
            checked = against_float64(trainer, task, scenes.batches[0])
            yield {"command": " ".join(words), "model": f"{name}_resnet50", "loss": loss, **found, **rate, **checked}
            del trainer, task
            free_memory()


def assembled(name: str, words: list[str], scenes: Scenes) -> tuple[Trainer, Detection]:
    settings: Any = load([*words, *([name] if "=" in name else [])])
    seed_all(settings.config)
    classes, norm = {"classes": [*map(str, range(CLASSES))], "category_ids": [*range(CLASSES)]}, Norm([0.0] * 3, [1.0] * 3)
    data: Any = SimpleNamespace(**classes, norm=norm, counts=None, notes=[], train=scenes, val=scenes)
    kind = Stock if name == "torchvision" else Detection
    task = kind(settings.config, data, tuple(settings.config.model.fixed_size), scenes.device)
    return Trainer(settings.config, task, data, task.model(), scenes.device, settings.tree()), task


def timed(trainer: Trainer, small: bool) -> dict[str, Any]:
    """Return a step's and its loss's time, as the median and the range of windows, and the most memory that was allocated."""
    trainer.model.train()
    window(trainer, trainer.groups(), 1 if small else WARM_UP)
    free_memory()
    windows = [window(trainer, trainer.groups(), 1 if small else UPDATES) for _ in range(1 if small else WINDOWS)]
    found: dict[str, Any] = {"peak_mib": peak_mib(), "nonfinite": int(trainer.guard.total)}
    for figure in ("step_ms", "loss_ms"):
        values = sorted(each[figure] for each in windows)
        found |= {figure: values[len(values) // 2], f"{figure}_range": [values[0], values[-1]]}
    return found


def match_milliseconds(task: Detection, batch: StockBatch, times: int) -> float:
    """Return the time of an assignment that does not depend on what is predicted, which the clock of the loss leaves out."""
    task.prepare(batch, training=True)
    return idle(lambda: [task.prepare(batch, training=True) for _ in range(times)], batch.images.device) / times


Loss = Callable[[DetectorOutput], Tensor]


def compared(output: DetectorOutput, ours: Loss, exactly: Loss) -> dict[str, Any]:
    """Compare the loss of a batch's outputs, and its gradients, with those of the same outputs in float64.

    Raises:
        RuntimeError: they differ by more than AGREE or AGREE_GRADIENT.
    """
    value, found = value_and_gradients(ours, output)
    exact, gradients = value_and_gradients(exactly, DetectorOutput(*map(doubled, output)))
    difference, off = abs(value - exact) / abs(exact), {name: relative(found[name], of) for name, of in gradients.items()}
    if not (difference <= AGREE and max(off.values()) <= AGREE_GRADIENT):
        raise RuntimeError(f"the loss is off by {difference:.1e} of float64's, its gradients by {off}")
    return {"value": value, "exact": exact, "difference": difference, "gradient_difference": off}


def output_of(trainer: Trainer, batch: StockBatch) -> DetectorOutput:
    with torch.no_grad(), trainer.autocast():
        return trainer.forward(trainer.laid_out(batch))


def against_torchvision(trainer: Trainer, task: Detection, batch: StockBatch) -> dict[str, Any]:
    """Compare the loss of one batch with torchvision's in float64, of as many positives."""
    output, positives = output_of(trainer, batch), int(stock_match(task.detector, batch))
    found = compared(output, lambda given: by_image(task, given, batch), lambda given: stock_loss(task.detector, given, batch))
    matched = int(task.normalizer(task.prepare(batch, training=True)))
    if matched != positives:
        raise RuntimeError(f"{matched} positives where torchvision has {positives}")
    return found | {"positives": positives}


def against_float64(trainer: Trainer, task: Detection, batch: StockBatch) -> dict[str, Any]:
    """Compare the loss of one batch with plain torch in float64.

    Both losses are of the same targets. `other_targets` counts those of YOLO and DETR, which follow from the outputs, that plain torch
    chooses otherwise.
    """
    detector, output, prepared = task.detector, output_of(trainer, batch), task.prepare(batch, training=True)
    matched = detector.match(prepared, output) if prepared.matched is None else prepared.matched
    normalizer = task.normalizer(prepared).clamp(min=1)
    exact = copy.copy(detector)
    exact.criterion = plain(detector.criterion)

    def loss(detector: Any, output: DetectorOutput, matched: Matched, normalizer: Tensor) -> Tensor:
        return torch.stack(list(detector.loss(output, matched, normalizer).values())).sum()

    found = compared(
        output,
        lambda given: loss(detector, given, matched, normalizer),
        lambda given: loss(exact, given, Matched(*map(doubled, matched)), normalizer.double()),
    )
    wide = DetectorOutput(*map(doubled, output))
    other = (exact.match(batch, wide if detector.matches_output else None).labels != matched.labels).sum().item()
    return found | {"positives": int(matched.positives), "other_targets": other}


def plain(criterion: Any) -> Any:
    """Return the criterion in plain torch."""
    made = copy.copy(criterion)
    made.plain = True
    return made


def doubled(tensor: Tensor | None) -> Any:
    return tensor.double() if tensor is not None and tensor.is_floating_point() else tensor


def value_and_gradients(loss: Loss, output: DetectorOutput) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and its gradient by each output that the detector has."""
    leaves = {name: each.detach().requires_grad_() for name, each in output._asdict().items() if each is not None}
    value = loss(DetectorOutput(**leaves))
    return value.item(), dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def by_image(task: Detection, output: DetectorOutput, batch: StockBatch) -> Tensor:
    """Return the mean of the images' losses: torchvision divides each by the positives of its image, ours by those of the batch."""
    losses = []
    for number in range(len(batch)):
        one = task.prepare(batch.image(number), training=True)
        part = DetectorOutput(output.logits[number : number + 1], output.regression[number : number + 1])
        losses.append(task.loss(part, one, task.normalizer(one)))
    return torch.stack(losses).mean()
