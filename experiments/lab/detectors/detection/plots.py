"""Pictures of a detection evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.base.drawing import Colour, colour_of, with_boxes, with_masks
from lab.base.files import save_figure
from lab.base.formats import visible
from lab.data.rle import framed
from lab.detectors.annotations.coco_file import CocoFile
from lab.detectors.detection.boxes import corners_of, turned_boxes
from lab.detectors.detection.metrics import DetectionResult

EDGE = 480  # pixels of an image's longer side in the picture
CROWD = (127, 127, 127)
LONGEST = 28  # letters of a file's name in a title
MOST = 12  # most detections that are drawn in an image: more would hide it and each other's names


def detections_picture(
    result: DetectionResult, truth: CocoFile, classes: list[str], path: Path, *, images: int = 6, score: float = 0.3
) -> None:
    """Draw images twice, side by side: with their true boxes, and with the detections that score at least `score`.

    The first images that have boxes are taken, and others only where these are too few.

    Only the MOST highest-scoring detections are drawn, because a detector that has learned little finds a hundred everywhere.
    """
    from matplotlib.figure import Figure

    there = [i for i, image_id in enumerate(truth.image_ids) if image_id in result.found]
    bare = {i for i in there if truth.offsets[i] == truth.offsets[i + 1]}
    positions = sorted(there, key=bare.__contains__)[:images]
    columns = 2 if len(positions) < 4 else 4
    rows = -(-2 * len(positions) // columns)
    figure = Figure(figsize=(3.5 * columns, 3.7 * max(rows, 1)), layout="constrained")
    cells = figure.subplots(max(rows, 1), columns, squeeze=False).flatten()
    for cell in cells:
        cell.axis("off")
    for place, position in enumerate(positions):
        image_id, own = truth.image_ids[position], truth.rows(position)
        found = result.found[image_id]
        count = int((found.scores >= score).sum())
        sure = found.scores.argsort(descending=True)[: min(count, MOST)].flip(0)  # the highest-scoring are drawn last, on top
        text = [
            f"{classes[label]} {value:.2f}" for label, value in zip(found.labels[sure].tolist(), found.scores[sure].tolist(), strict=True)
        ]
        left, right = cells[2 * place : 2 * place + 2]
        masks = None if truth.masks is None else truth.masks[own]
        boxes = truth.boxes[own] if truth.corners is None else turned_boxes(truth.corners[own])
        left.imshow(_drawn(truth, position, boxes, *true_boxes(truth, position, classes), masks))
        left.set_title(f"{_shortened(Path(truth.files[position]).name)}: truth", fontsize=9)
        colours = [colour_of(label) for label in found.labels[sure].tolist()]
        masks = None if found.masks is None else [found.masks[number] for number in sure.tolist()]
        right.imshow(_drawn(truth, position, found.boxes[sure], colours, text, masks))
        right.set_title(_counted(count, score, found.scores), fontsize=9)
    save_figure(figure, path, dpi=110)


def _counted(count: int, score: float, scores: Tensor) -> str:
    """Return how many of an image's detections are drawn."""
    if count:
        return f"the surest {MOST} of {count} detections from score {score:g}" if count > MOST else f"detections from score {score:g}"
    return f"no detection from score {score:g}" + (f"; the surest has {float(scores.max()):.2f}" if len(scores) else "")


def precision_recall_picture(result: DetectionResult, path: Path) -> None:
    """Draw precision against recall at IoU 0.5, a line for each class and their mean; the legend names at most ten classes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    recall = torch.linspace(0, 1, 101).tolist()
    named = len(result.precision) <= 10
    for name, curve in result.precision.items():
        style: dict[str, Any] = {"label": f"{name} ({result.per_class[name]:.3f})"} if named else {"color": "grey", "alpha": 0.3}
        axes.plot(recall, curve, linewidth=1, **style)
    if result.precision:
        mean = torch.tensor(list(result.precision.values())).mean(0)
        axes.plot(recall, mean.tolist(), color="black", linewidth=2, label="mean of the classes")
        axes.legend(fontsize=8, title="class (AP, IoU 0.5 to 0.95)" if named else None, loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.set(xlabel="recall", ylabel="precision at IoU 0.5", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(f"mAP {result.values['map']:.4f} · mAP50 {result.values['map50']:.4f} · mAP75 {result.values['map75']:.4f}")
    save_figure(figure, path, dpi=110)


def true_boxes(truth: CocoFile, position: int, classes: list[str]) -> tuple[list[Colour], list[str]]:
    """Return colour and text of each true box of an image; a crowd, which detections need not find, is grey and marked as such."""
    own = truth.rows(position)
    boxes = list(zip(truth.labels[own].tolist(), truth.crowd[own].tolist(), strict=True))
    return (
        [CROWD if crowd else colour_of(label) for label, crowd in boxes],
        [f"{classes[label]} (crowd)" if crowd else classes[label] for label, crowd in boxes],
    )


def _shortened(name: str) -> str:
    return visible(name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[-LONGEST // 2 :]}")


def _drawn(
    truth: CocoFile, position: int, boxes: Tensor, colours: list[Colour], text: list[str], masks: Sequence[bytes] | None = None
) -> np.ndarray:
    """Return the image with its boxes (B, 4) xywh, or (B, 5) oriented, and masks, (H, W, 3) uint8."""
    image = truth.open(position)
    if masks is not None:
        image = with_masks(image, framed(masks, truth.sizes[position]), colours)
    ratio = EDGE / max(image.size)
    image = image.resize((max(1, round(image.width * ratio)), max(1, round(image.height * ratio))))
    corners = corners_of(boxes) if boxes.shape[1] == 5 else torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
    return np.asarray(with_boxes(image, (corners * ratio).tolist(), text, colours))
