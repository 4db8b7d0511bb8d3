"""Mean average precision of oriented boxes, by COCO's rule with the exact IoU of turned rectangles."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.detectors.detection.boxes import corners_of, turned_boxes
from lab.detectors.detection.metrics import DETECTIONS, IOU, RECALL, DetectionCounts, DetectionResult, Found
from lossforge.losses import rotated_box_iou


class OrientedResult(DetectionResult):
    """Figures of oriented boxes."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the detections with `rbox`, centre, width, height and angle in radians, and `poly`, the corners, in place of `bbox`."""
        found = []
        for row in super().rows():
            box = row.pop("bbox")
            found.append(row | {"rbox": box, "poly": corners_of(torch.tensor([box]))[0].tolist()})
        return found


class OrientedCounts(DetectionCounts):
    """Collect oriented detections on the device; only the result waits for it."""

    def in_file(self, boxes: Tensor, size: Tensor, original: Tensor) -> Tensor:
        """Return boxes (D, 5) in pixels of the file. size, original: (2,) height and width of the image and of its file."""
        return boxes * scale_of((original / size).float())

    def _evaluate(self, found: dict[int, Found]) -> DetectionResult:
        assert self.truth.corners is not None
        curves: dict[str, np.ndarray] = {}
        order = sorted(found, key=self.truth.image_ids.__getitem__)
        for label, name in enumerate(self.classes):
            images = []
            for position in order:
                own, each = self.truth.rows(position), found[position]
                wanted = (self.truth.labels[own] == label) & ~self.truth.crowd[own]
                chosen = (each.labels == label).nonzero()[:, 0]
                chosen = chosen[each.scores[chosen].argsort(descending=True, stable=True)[: DETECTIONS[-1]]]
                truth = turned_boxes(self.truth.corners[own][wanted])
                images.append((each.scores[chosen].numpy(), rotated_box_iou(each.boxes[chosen].double(), truth).numpy()))
            if sum(iou.shape[1] for _, iou in images):
                curves[name] = precision(images)
        average = {name: float(curves[name].mean()) if name in curves else math.nan for name in self.classes}
        whole = np.stack(list(curves.values())) if curves else np.full((1, len(IOU), 1), math.nan)
        values = {"map": float(whole.mean()), "map50": float(whole[:, 0].mean()), "map75": float(whole[:, IOU.index(0.75)].mean())}
        return OrientedResult(values, average, {name: curve[0].tolist() for name, curve in curves.items()}, {}, self.category_ids)


def scale_of(ratio: Tensor) -> Tensor:
    """Return the factors (5,) of an oriented box where an image is resized by `ratio` (2,) of height and width, which are nearly equal."""
    return torch.cat([ratio.flip(0), ratio.mean()[None].expand(2), torch.ones_like(ratio[:1])])


def precision(images: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return COCO's interpolated precision (IoU thresholds, recalls) of a class.

    A detection, the highest-scoring first, takes the true box that it overlaps most among those that are free.

    Args:
        images: of each image the scores (D,), falling, and the IoU (D, G) of detections and true boxes, of which some image has one.
    """
    total = sum(iou.shape[1] for _, iou in images)
    order = np.argsort(-np.concatenate([scores for scores, _ in images]), kind="stable")
    curves = np.zeros((len(IOU), len(RECALL)))
    for row, threshold in enumerate(IOU):
        hits = np.concatenate([_hits(iou, threshold) for _, iou in images])[order].cumsum()
        if not len(hits):
            continue
        precise = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
        place = np.searchsorted(hits / total, RECALL, side="left")
        there = place < len(hits)
        curves[row, there] = precise[place[there]]
    return curves


def _hits(iou: np.ndarray, threshold: float) -> np.ndarray:
    """Return whether each detection (D,) takes a true box."""
    free = np.ones(iou.shape[1], dtype=bool)
    hits = np.zeros(len(iou), dtype=bool)
    for number, row in enumerate(iou):
        best = np.where(free, row, -1.0)
        if best.size and best.max() >= threshold:
            hits[number], free[best.argmax()] = True, False
    return hits
