"""COCO's mean average precision, counted in pixels of the files."""

import json
import math
import os
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

# torchmetrics' defaults are float32: a recall of exactly 0.6 would be below the threshold 0.6
IOU = np.linspace(0.5, 0.95, 10).tolist()
RECALL = np.linspace(0, 1, 101).tolist()
DETECTIONS = [1, 10, 100]  # an image and class


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
    truth: CocoFile | None = None  # the true boxes

    def tree(self) -> dict[str, Any]:
        return {"per_class": self.per_class, "precision": {name: [round(p, 4) for p in curve] for name, curve in self.precision.items()}}

    def export_coco(self, path: Path) -> None:
        """Write the detections as COCO results."""
        write_text(path, json.dumps(self.rows()))

    def rows(self) -> list[dict[str, Any]]:
        """Return the detections as COCO results: image_id, category_id, bbox in xywh, score and segmentation, and the image's file_name."""
        assert self.truth is not None
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
        ratio = (batch.originals / batch.sizes).float().flip(1).repeat(1, 2)  # (N, 4) for x, y, x, y
        limit = batch.originals.float().flip(1).repeat(1, 2)
        for each, by, most in zip(detections, ratio, limit, strict=True):
            corners = torch.minimum((each["boxes"].float() * by).clamp_min(0), most)
            boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1)
            self.rows.append(torch.cat([boxes, each["scores"].float()[:, None], each["labels"].float()[:, None]], dim=1))
            self.lengths.append(len(boxes))
        self.index.append(batch.index)

    def result(self) -> DetectionResult:
        """Return the figures over all ranks; an image that is in several batches counts once."""
        found = self._gather()
        first = distributed.rank() == 0
        result = self._evaluate(found) if first else None
        if result is not None:
            result.found = {}  # too much to send to the other ranks
        result = distributed.broadcast(result)
        assert result is not None
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
        from torchmetrics.detection import MeanAveragePrecision

        metric = MeanAveragePrecision(
            "xywh",
            iou_thresholds=IOU,
            rec_thresholds=RECALL,
            max_detection_thresholds=DETECTIONS,
            extended_summary=True,
            backend="faster_coco_eval",
            sync_on_compute=False,  # this rank has all detections, and only it computes
        )
        metric.warn_on_many_detections = False
        # equal scores are ranked in the order of images, which COCO sorts by id
        for position in sorted(found, key=self.truth.image_ids.__getitem__):
            each, rows = found[position], self.truth.rows(position)
            truth = {
                "boxes": self.truth.boxes[rows],
                "labels": self.truth.labels[rows],
                "iscrowd": self.truth.crowd[rows].long(),
                "area": self.truth.areas[rows],
            }
            metric.update([{"boxes": each.boxes, "scores": each.scores, "labels": each.labels}], [truth])
        return self._figures(metric.compute() if found else {})

    def _figures(self, computed: dict[str, Any]) -> DetectionResult:
        names = {"map": "map", "map50": "map_50", "map75": "map_75", "mar100": "mar_100"}
        names |= {name: name for name in ("map_small", "map_medium", "map_large")}
        values = {name: _known(float(computed.get(theirs, -1))) for name, theirs in names.items()}
        per_class = dict.fromkeys(self.classes, math.nan)
        precision: dict[str, list[float]] = {}
        observed = (
            computed["classes"].view(-1).tolist() if "precision" in computed else []
        )  # torchmetrics returns a single class as a number
        for column, label in enumerate(observed):
            curves = computed["precision"][:, :, column, 0, -1]  # (IoU, recall), for all sizes and up to 100 detections
            if (curves > -1).any():
                per_class[self.classes[label]] = curves.mean().item()
                precision[self.classes[label]] = curves[0].tolist()
        return DetectionResult(values, per_class, precision, {}, self.category_ids)


def _known(value: float) -> float:
    """Replace -1, COCO's value without true boxes, by nan."""
    return math.nan if value < 0 else value
