"""COCO's mean average precision of masks, beside that of their boxes."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.data.rle import as_coco
from lab.detectors.detection.metrics import DETECTIONS, IOU, RECALL, DetectionCounts, DetectionResult, Found
from lab.detectors.detection.types import DetectionBatch
from lab.detectors.instances.model import encoded_in_file
from lab.processes import distributed

BOXES = ("map", "map50", "map75")
"""Figures of boxes that are reported beside those of the masks."""


class InstanceCounts(DetectionCounts):
    """Collect detections on the device, and their masks on the host."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.masks: list[list[bytes]] = []  # of each image

    def add(self, detections: list[dict[str, Tensor]], batch: DetectionBatch) -> None:
        """Count one batch; detections: as in DetectionCounts.add, with masks as YoloMasks.detections returns them."""
        finite = [found["boxes"].isfinite().all(1) for found in detections]
        detections = [{name: value[rows] for name, value in found.items()} for found, rows in zip(detections, finite, strict=True)]
        super().add(detections, batch)
        for found, size, original in zip(detections, batch.sizes.tolist(), batch.originals.tolist(), strict=True):
            ratio = found["boxes"].new_tensor([original[1] / size[1], original[0] / size[0]]).repeat(2)
            self.masks.append(encoded_in_file(found["masks"], found["boxes"] * ratio, tuple(size), tuple(original)))

    def _gather(self) -> dict[int, Found]:
        found: dict[int, Found] = super()._gather()
        index = torch.cat(self.index).tolist() if self.index else []
        whole: dict[int, Found] = {}
        for positions, masks in distributed.gathered((index, self.masks)):
            for position, own in zip(positions, masks, strict=True):
                whole[position] = replace(found[position], masks=own)
        return whole

    def _evaluate(self, found: dict[int, Found]) -> DetectionResult:
        boxes = super()._evaluate(found)
        masks = self._figures(self._computed(found) if found else {})
        values = masks.values | {f"box_{name}": boxes.values[name] for name in BOXES}
        return DetectionResult(values, masks.per_class, masks.precision, {}, self.category_ids)

    def _computed(self, found: dict[int, Found]) -> dict[str, Any]:
        """Return the figures of the masks under torchmetrics' names, by COCO's own evaluation of encodings."""
        from faster_coco_eval import COCO, COCOeval_faster

        images: list[dict[str, Any]] = []
        truth: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        assert self.truth.masks is not None
        for position in sorted(found, key=self.truth.image_ids.__getitem__):
            size, own, each = self.truth.sizes[position], self.truth.rows(position), found[position]
            image = {"image_id": self.truth.image_ids[position]}
            images.append({"id": image["image_id"], "height": size[0], "width": size[1]})
            columns = (self.truth.labels[own], self.truth.crowd[own].long(), self.truth.areas[own], self.truth.boxes[own])
            for label, crowd, area, box, mask in zip(*(column.tolist() for column in columns), self.truth.masks[own], strict=True):
                entry = {"id": len(truth) + 1, "category_id": label, "iscrowd": crowd, "area": area, "bbox": box}
                truth.append(image | entry | {"segmentation": as_coco(mask, size)})
            for label, score, mask in zip(each.labels.tolist(), each.scores.tolist(), each.masks or [], strict=True):
                rows.append(image | {"category_id": label, "score": score, "segmentation": as_coco(mask, size)})
        categories = [{"id": label, "name": name} for label, name in enumerate(self.classes)]
        tree = {"images": images, "categories": categories}
        known = COCO(tree | {"annotations": truth})
        evaluation = COCOeval_faster(
            known, known.loadRes(rows) if rows else COCO(tree | {"annotations": []}), "segm", print_function=lambda *_: None
        )
        evaluation.params.iouThrs, evaluation.params.recThrs, evaluation.params.maxDets = np.array(IOU), np.array(RECALL), DETECTIONS
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        names = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10", "mar_100")
        figures = dict(zip(names, evaluation.stats, strict=False))
        return figures | {"classes": torch.arange(len(self.classes)), "precision": torch.as_tensor(evaluation.eval["precision"])}
