"""Batches and detectors for the tests of detection, and torchvision's own detectors beside them."""

from types import SimpleNamespace
from typing import Any

import torch
from torchvision.models import detection
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.backbone import Pyramid, backbone
from lab.detectors.detection.models.dense import FCOS, RetinaNet
from lab.detectors.detection.types import DetectorOutput
from lossforge.losses import plain_torch

HEIGHT, WIDTH, CLASSES = 64, 96, 3
ANCHOR_SIZES = (16, 32, 64, 96, 128)
DETECTORS = {"retinanet": RetinaNet, "fcos": FCOS}  # those that torchvision has too
KINDS = sorted(DETECTORS)


def pyramid(seed: int = 0, *, aggregated: bool = False) -> Pyramid:
    torch.manual_seed(seed)
    return backbone("test_resnet", (HEIGHT, WIDTH), channels=64, aggregated=aggregated)


def detector(kind: str, criterion: DetectionLoss, body: Pyramid, **options: Any) -> RetinaNet | FCOS:
    sizes: dict[str, Any] = {"anchor_sizes": ANCHOR_SIZES} if kind == "retinanet" else {}
    torch.manual_seed(1)
    return DETECTORS[kind](body, CLASSES, criterion, **sizes, **options)


def stock(kind: str, body: Pyramid, **options: Any) -> Any:
    """torchvision's detector with a head whose predictions are far from those it starts with."""
    torch.manual_seed(2)
    if kind == "fcos":
        model = detection.FCOS(body, CLASSES, **options)
    else:
        sizes = tuple((size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in ANCHOR_SIZES)
        generator = detection.anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
        model = detection.RetinaNet(body, CLASSES, anchor_generator=generator, **options)
    for parameter in model.head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def batch(counts: tuple[int, ...] = (4, 0, 7), *, seed: int = 0, rows: int | None = None) -> SimpleNamespace:
    """Images with these numbers of boxes, of 8 to 56 pixels a side and classes at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(counts) if rows is None else rows
    boxes, labels = torch.zeros(len(counts), rows, 4), torch.full((len(counts), rows), -1)
    for image, count in enumerate(counts):
        sides = 8 + 48 * torch.rand(count, 2, generator=generator)
        corner = torch.rand(count, 2, generator=generator) * (torch.tensor([WIDTH, HEIGHT]) - sides)
        boxes[image, :count] = torch.cat([corner, corner + sides], 1)
        labels[image, :count] = torch.randint(0, CLASSES, (count,), generator=generator)
    images = torch.randn(len(counts), 3, HEIGHT, WIDTH, generator=generator)
    sizes = torch.tensor([[HEIGHT - 8 * (image % 2), WIDTH] for image in range(len(counts))])
    return SimpleNamespace(images=images, boxes=boxes, labels=labels, sizes=sizes)


def targets(batch: SimpleNamespace) -> list[dict[str, torch.Tensor]]:
    """As torchvision takes them."""
    kept = [label >= 0 for label in batch.labels]
    return [{"boxes": b[keep], "labels": label[keep]} for b, label, keep in zip(batch.boxes, batch.labels, kept, strict=True)]


def stock_outputs(model: Any, batch: SimpleNamespace) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[int]]:
    """Head outputs, anchors of each image, and how many anchors each level has."""
    features = list(model.backbone(batch.images).values())
    shapes = [(int(height), int(width)) for height, width in batch.sizes]
    anchors = model.anchor_generator(ImageList(batch.images, shapes), features)
    each = model.anchor_generator.num_anchors_per_location()[0]
    return model.head(features), anchors, [level.shape[-2] * level.shape[-1] * each for level in features]


def stock_losses(model: Any, batch: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Its own computation, under the names of ours."""
    outputs, anchors, counts = stock_outputs(model, batch)
    more = (counts,) if "bbox_ctrness" in outputs else ()
    losses = model.compute_loss(targets(batch), outputs, anchors, *more)
    names = {"classification": "classification", "bbox_regression": "boxes", "bbox_ctrness": "centerness"}
    return {names[name]: value for name, value in losses.items()}


def learn(model: Any, data: SimpleNamespace, steps: int, *, lr: float = 2e-3, clip: float = 1.0) -> None:
    """Train on one batch; then each box's best detection is of its class and covers it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    given = (data.boxes, data.labels) if model.takes_targets else ()
    for _ in range(steps):
        output = model(data.images, *given)
        with plain_torch():  # kernels take most of the time under the interpreter
            loss = sum(model.loss(output, model.match(data, output), torch.tensor(5.0)).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    # batch norm's own statistics are those of so few steps
    found = model.detections(model(data.images), data.sizes, (HEIGHT, WIDTH))
    for detections, boxes, labels in zip(found, data.boxes, data.labels, strict=True):
        for box, label in zip(boxes[labels >= 0], labels[labels >= 0], strict=True):
            near = box_iou(box[None], detections["boxes"])[0] > 0.5
            assert near.any()
            assert detections["labels"][near][0] == label, "detections are in the order of their scores"


def trained_without_boxes(model: Any) -> tuple[DetectorOutput, dict[str, torch.Tensor]]:
    """Return outputs and losses of images without a box; gradients are finite, and no loss but the classes' is there."""
    data = batch((0, 0))
    output = model(data.images, *((data.boxes, data.labels) if model.takes_targets else ()))
    matched = model.match(data, output)
    losses = model.loss(output, matched, torch.ones(()))
    sum(losses.values()).backward()
    assert matched.positives == sum(value for name, value in losses.items() if name != "classification") == 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    return output, losses
