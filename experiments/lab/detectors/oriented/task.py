"""Oriented boxes: the detection task with rectangles at any angle."""

from pathlib import Path
from typing import cast

import torch
from PIL import Image

from lab.base.drawing import colour_of, with_boxes
from lab.base.fonts import letters_of
from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection import DetectorConfig
from lab.detectors.detection.boxes import corners_of
from lab.detectors.detection.data import FileLoader
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.metrics import DetectionResult
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.plots import detections_picture, precision_recall_picture
from lab.detectors.detection.task import Detection, build_detector
from lab.detectors.detection.task import build as build_detection
from lab.detectors.detection.types import DetectionBatch
from lab.detectors.oriented.metrics import OrientedCounts
from lab.detectors.oriented.model import YoloOriented


class Oriented(Detection):
    own_loss = "probiou"

    def build(self, criterion: DetectionLoss, image_size: tuple[int, int]) -> Detector:
        return build_oriented(self.config, criterion, len(self.data.classes), image_size)

    def first_batch(self, batch: DetectionBatch) -> list[tuple[Image.Image, str]]:
        assert batch.turned is not None
        found, files = [], self.data.train.file.files
        for image, boxes, labels, index in zip(
            self.seen(batch), batch.turned.cpu(), batch.labels.cpu(), batch.index.tolist(), strict=False
        ):
            known = labels[labels >= 0].tolist()
            names, colours = [self.data.classes[label] for label in known], [colour_of(label) for label in known]
            found.append((with_boxes(image, corners_of(boxes[labels >= 0]).tolist(), names, colours), Path(files[index]).name))
        return found

    def counts(self, loader: FileLoader) -> OrientedCounts:
        return OrientedCounts(self.data.classes, self.data.category_ids, self.device, loader.file)

    def pictures(self, result: DetectionResult, folder: Path) -> list[Path]:
        """Draw the pictures, and write all detections."""
        found, curves, results = folder / "detections.png", folder / "precision_recall.png", folder / "detections.json"
        assert result.truth is not None
        detections_picture(result, result.truth, self.data.classes, found, images=self.settings.pictures)
        with letters_of(self.data.classes):
            precision_recall_picture(result, curves)
        result.export_coco(results)
        return [found, curves, results]


def build_oriented(config: TrainConfig, criterion: DetectionLoss, classes: int, image_size: tuple[int, int]) -> YoloOriented:
    """Return the detector of these settings."""
    return cast(YoloOriented, build_detector(cast(DetectorConfig, config.model), criterion, classes, image_size, yolo=YoloOriented))


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Detection:
    return build_detection(config, device, saved, Oriented, shapes="corners")
