"""COCO's mean average precision, counted in pixels of the files."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.base.files import write_text
from lab.data.rle import as_coco
from lab.detectors.annotations.coco_file import CocoFile
from lab.detectors.detection.types import DetectionBatch
from lab.processes import distributed
from lab.tasks.metrics import Counts

IOU = np.linspace(0.5, 0.95, 10).tolist()
RECALL = np.linspace(0, 1, 101).tolist()
DETECTIONS = [1, 10, 100]  # an image and class
FIGURES = {"map": 0, "map50": 1, "map75": 2, "mar100": 8, "map_small": 3, "map_medium": 4, "map_large": 5}
"""Places of figures in COCO's summary."""


@dataclass
class Found:
    """Detections in one image, on the host, in pixels of its file."""

    boxes: Tensor  # (D, 4) xywh, or (D, 5) oriented: centre, width, height, angle in radians
    scores: Tensor  # (D,)
    labels: Tensor  # (D,)
    masks: list[bytes] | None = None  # (D) of instances, as lab.data.rle encodes them


@dataclass
class DetectionResult:
    values: dict[str, float]  # nan without true boxes
    per_class: dict[str, float]  # average precision
    precision: dict[str, list[float]]  # at IoU 0.5 and the recalls 0, 0.01 to 1
    found: dict[int, Found]  # by image id; on rank 0 only
    category_ids: list[int]
    truth: Any = None  # the true boxes, a CocoFile

    def tree(self) -> dict[str, Any]:
        return {"per_class": self.per_class, "precision": {name: [round(p, 4) for p in curve] for name, curve in self.precision.items()}}

    def export_coco(self, path: Path) -> None:
        """Write the detections as COCO results."""
        write_text(path, json.dumps(self.rows()))

    def rows(self) -> list[dict[str, Any]]:
        """Return the detections as COCO results: image_id, category_id, bbox in xywh, score and segmentation, and the image's file_name."""
        files = {
            image_id: os.path.relpath(file, self.truth.folder).replace(os.sep, "/")
            for image_id, file in zip(self.truth.image_ids, self.truth.files, strict=True)
        }
        sizes = dict(zip(self.truth.image_ids, self.truth.sizes, strict=True))
        found = []
        for image_id, each in self.found.items():
            image = {"image_id": image_id, "file_name": files[image_id]}
            for box, score, label in zip(each.boxes.tolist(), each.scores.tolist(), each.labels.tolist(), strict=True):
                found.append(image | {"category_id": self.category_ids[label], "bbox": box, "score": score})
            for row, mask in zip(found[-len(each.masks) :], each.masks, strict=True) if each.masks else ():
                row["segmentation"] = as_coco(mask, sizes[image_id])
        return found


def confusion_of(result: DetectionResult, truth: CocoFile, score: float, overlap: float = 0.5) -> Tensor:
    """Return (C + 1, C + 1): how many boxes of each true class were found as each class; the last row and column are "nothing".

    A true box belongs to the detection that overlaps it most, of any class, and each to one at most. Crowds, and what is found in them, do
    not count.

    Args:
        result: the detections.
        truth: the true boxes.
        score: the lowest score of a detection that counts.
        overlap: the lowest IoU of a true box with its detection.
    """
    from torchvision.ops import box_iou

    classes = len(truth.classes)
    counts = torch.zeros(classes + 1, classes + 1, dtype=torch.int64)
    for position, image_id in enumerate(truth.image_ids):
        if image_id not in result.found:
            continue
        each, rows = result.found[image_id], truth.rows(position)
        sure, single = each.scores >= score, ~truth.crowd[rows]
        found, wanted = (torch.cat([box[:, :2], box[:, :2] + box[:, 2:]], 1).double() for box in (each.boxes[sure], truth.boxes[rows]))
        guess, label = each.labels[sure], truth.labels[rows][single]
        iou = box_iou(wanted, found)
        in_crowd = (iou[~single] > 0).any(0)
        iou = iou[single]
        owner = torch.full((len(found),), classes)
        free = torch.ones(len(label), dtype=torch.bool)
        for place in iou.flatten().argsort(descending=True, stable=True).tolist() if iou.numel() else ():
            row, column = divmod(place, iou.shape[1])
            if iou[row, column] < overlap:
                break
            if free[row] and owner[column] == classes:
                free[row], owner[column] = False, label[row]
        counted = (owner < classes) | ~in_crowd
        counts.index_put_((owner[counted], guess[counted]), torch.ones((), dtype=torch.int64), accumulate=True)
        counts[:, classes] += torch.bincount(label[free], minlength=classes + 1)
    return counts


def entries(boxes: Tensor, masks: Sequence[bytes] | None, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Return an image's objects as COCO writes them: by their masks, or without such by their boxes. size: height and width of its file."""
    return [{"bbox": box} for box in boxes.tolist()] if masks is None else [{"segmentation": as_coco(mask, size)} for mask in masks]


class DetectionCounts(Counts):
    """Collect detections on the device; only the result waits for it.

    Args:
        classes: the classes' names.
        category_ids: the file's ids, by class.
        device: the device of the detections.
        truth: the annotations of the evaluated images, with crowds.
    """

    def __init__(self, classes: list[str], category_ids: list[int], device: torch.device, truth: CocoFile) -> None:
        super().__init__(device)
        self.classes, self.category_ids, self.truth = classes, category_ids, truth
        self.rows: list[Tensor] = []  # (D, 6) xywh, score, label
        self.lengths: list[int] = []
        self.index: list[Tensor] = []

    def add(self, detections: list[dict[str, Tensor]], batch: DetectionBatch) -> None:
        """Count one batch.

        Args:
            detections: for each image boxes (D, 4) xyxy in pixels of `batch.images`, scores (D,) and labels (D,).
            batch: where the images come from.
        """
        for each, size, original in zip(detections, batch.sizes, batch.originals, strict=True):
            boxes = self.in_file(each["boxes"].float(), size, original)
            self.rows.append(torch.cat([boxes, each["scores"].float()[:, None], each["labels"].float()[:, None]], dim=1))
            self.lengths.append(len(boxes))
        self.index.append(batch.index)

    def in_file(self, boxes: Tensor, size: Tensor, original: Tensor) -> Tensor:
        """Return boxes (D, 4) in pixels of an image as xywh in pixels of its file. size, original: (2,) height and width of both."""
        ratio, most = (original / size).float().flip(0).repeat(2), original.float().flip(0).repeat(2)
        corners = torch.minimum((boxes * ratio).clamp_min(0), most)
        return torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1)

    def result(self) -> DetectionResult:
        """Return the figures over all ranks; an image that is in several batches counts once."""
        found = self._gather()
        first = distributed.rank() == 0
        result: DetectionResult = distributed.broadcast(self._evaluate(found) if first else None)
        result.truth = self.truth
        result.values["loss"] = self.mean_loss()
        if first:
            result.found = {self.truth.image_ids[position]: each for position, each in found.items()}
        return result

    def _gather(self) -> dict[int, Found]:
        """Return the detections of all ranks by position in the data set."""
        rows = torch.cat(self.rows).cpu() if self.rows else torch.empty(0, 6)
        index = torch.cat(self.index).tolist() if self.index else []
        found: dict[int, Found] = {}
        for positions, lengths, table in distributed.gathered((index, self.lengths, rows.numpy())):
            for position, part in zip(positions, torch.from_numpy(table).split(lengths), strict=True):
                part = part[part.isfinite().all(1)]
                found[position] = Found(part[:, :-2], part[:, -2], part[:, -1].long())
        return found

    def _evaluate(self, found: dict[int, Found]) -> DetectionResult:
        return self._figures(found)

    def true_boxes(self, rows: slice) -> Tensor:
        """Return an image's true boxes, in the form of `in_file`."""
        return self.truth.boxes[rows]

    def evaluator(self) -> Any:
        """Return the class that compares what was found with the truth."""
        from faster_coco_eval import COCOeval_faster

        return COCOeval_faster

    def _figures(self, found: dict[int, Found], *, of_masks: bool = False) -> DetectionResult:
        """Return COCO's figures of boxes, or of masks."""
        stats, curves = self._compared(found, of_masks) if found else (np.full(12, -1.0), np.full((1, 1, len(self.classes)), -1.0))
        values = {name: _known(float(stats[place])) for name, place in FIGURES.items()}
        per_class = dict.fromkeys(self.classes, math.nan)
        precision: dict[str, list[float]] = {}
        for label, name in enumerate(self.classes):
            if (own := curves[:, :, label]).max() > -1:
                per_class[name], precision[name] = float(own.mean()), own[0].tolist()
        return DetectionResult(values, per_class, precision, {}, self.category_ids)

    def _compared(self, found: dict[int, Found], of_masks: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return COCO's figures, and the precision (IoU thresholds, recalls, classes) for boxes of all sizes; -1 without true boxes."""
        from faster_coco_eval import COCO

        images: list[dict[str, Any]] = []
        truth: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        # equal scores are ranked in the order of images, which COCO sorts by id
        for position in sorted(found, key=self.truth.image_ids.__getitem__):
            size, own, each = self.truth.sizes[position], self.truth.rows(position), found[position]
            image = {"image_id": self.truth.image_ids[position]}
            images.append({"id": image["image_id"], "height": size[0], "width": size[1]})
            columns = (column.tolist() for column in (self.truth.labels[own], self.truth.crowd[own].long(), self.truth.areas[own]))
            true = entries(self.true_boxes(own), self.truth.masks[own] if of_masks and self.truth.masks is not None else None, size)
            for label, crowd, area, shape in zip(*columns, true, strict=True):
                truth.append(image | shape | {"id": len(truth) + 1, "category_id": label, "iscrowd": crowd, "area": area})
            guessed = entries(each.boxes, each.masks if of_masks else None, size)
            for label, score, shape in zip(each.labels.tolist(), each.scores.tolist(), guessed, strict=True):
                rows.append(image | shape | {"category_id": label, "score": score})
        tree = {"images": images, "categories": [{"id": label, "name": name} for label, name in enumerate(self.classes)]}
        known = COCO(tree | {"annotations": truth})
        guesses = known.loadRes(rows) if rows else COCO(tree | {"annotations": []})
        evaluation = self.evaluator()(known, guesses, "segm" if of_masks else "bbox", print_function=lambda *_: None)
        evaluation.params.iouThrs, evaluation.params.recThrs, evaluation.params.maxDets = np.array(IOU), np.array(RECALL), DETECTIONS
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        return np.asarray(evaluation.stats), np.asarray(evaluation.eval["precision"])[:, :, :, 0, -1]


def _known(value: float) -> float:
    """Replace -1, COCO's value without true boxes, by nan."""
    return math.nan if value < 0 else value
