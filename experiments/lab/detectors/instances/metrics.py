"""COCO's mean average precision of masks, beside that of their boxes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.detectors.detection.metrics import DetectionCounts, DetectionResult, Found
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
        boxes, masks = self._figures(found), self._figures(found, of_masks=True)
        masks.values |= {f"box_{name}": boxes.values[name] for name in BOXES}
        return masks
