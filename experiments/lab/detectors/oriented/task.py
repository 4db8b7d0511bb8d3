"""Oriented boxes: the detection task with rectangles at any angle."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection.boxes import corners_of
from lab.detectors.detection.data import FileLoader
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.task import Detection
from lab.detectors.detection.task import build as build_detection
from lab.detectors.detection.types import DetectionBatch
from lab.detectors.oriented.metrics import OrientedCounts
from lab.detectors.oriented.model import YoloOriented


class Oriented(Detection):
    own_loss = "probiou"

    @staticmethod
    def kinds(config: TrainConfig) -> dict[str, Callable[..., Detector]]:
        return {"yolo": YoloOriented}

    def outlines(self, batch: DetectionBatch) -> Tensor:
        boxes = cast(Tensor, batch.turned)
        return corners_of(boxes.flatten(0, 1)).unflatten(0, boxes.shape[:2])

    def counts(self, loader: FileLoader) -> OrientedCounts:
        return OrientedCounts(self.data.classes, self.data.category_ids, self.device, loader.file)


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Detection:
    return build_detection(config, device, saved, Oriented, shapes="corners")
