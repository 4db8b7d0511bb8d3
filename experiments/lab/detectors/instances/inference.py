"""Predictions and exports of instances with their masks."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection import DetectorConfig
from lab.detectors.detection.boxes import rows_at
from lab.detectors.detection.data import size_of
from lab.detectors.detection.inference import batches, boxes_of, exportable
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.task import criterion
from lab.detectors.detection.types import MASK_STRIDE
from lab.detectors.instances.loss import inside
from lab.detectors.instances.model import DetrMasks, YoloMasks, encoded_in_file
from lab.detectors.instances.task import build_with_masks
from lab.detectors.schema import DetectionDataConfig
from lab.run.export import Exportable
from lab.run.predict import Asked, Prediction, Predictor


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the detector, and a function from an image to its instances."""
    scenes, architecture = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model)
    model = _detector(config, classes)
    model.score_thresh = min(architecture.score_threshold, asked.score)
    batch_of = batches(scenes, architecture.fixed_size, asked.norm)

    def predicted(image: Image.Image) -> Prediction:
        batch = batch_of(image).to(asked.device)
        (found,) = model.detections(model(batch.images), batch.sizes, (batch.images.shape[-2], batch.images.shape[-1]))
        sure = found["scores"] >= asked.score
        boxes = found["boxes"][sure] * (batch.originals / batch.sizes).flip(1).repeat(1, 2)
        original = image.height, image.width
        masks = encoded_in_file(found["masks"][sure], boxes, tuple(batch.sizes[0].tolist()), original)
        labels, scores = found["labels"][sure].tolist(), found["scores"][sure].tolist()
        named = [classes[label] for label in labels]
        return Prediction(named, scores, boxes.tolist(), numbers=labels, instances=masks, size=original)

    return model, predicted


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the detector, from images to boxes and masks, to export."""
    model = _detector(config, classes)
    said = "detections: x1, y1, x2, y2 in pixels, score, class, then the mask's probabilities for 4 × 4 pixels each, row by row"
    return exportable(config, norm, model, Instances(model, norm), said)


def _detector(config: TrainConfig, classes: list[str]) -> YoloMasks | DetrMasks:
    architecture = cast(DetectorConfig, config.model)
    size = size_of(cast(DetectionDataConfig, config.data), architecture.fixed_size)
    return build_with_masks(config, criterion(config.loss, config.box_loss, architecture), len(classes), size)


class Instances(nn.Module):
    """Map images (N, 3, H, W) of uint8 to detections (N, D, 6 + H · W / 16): those of `boxes_of`, with the probabilities of their masks.

    A mask has a number for each 4 × 4 pixels of the image, 0 outside of its box.
    """

    def __init__(self, model: Detector, norm: Norm) -> None:
        super().__init__()
        self.boxes = boxes_of(model, norm)

    def forward(self, images: Tensor) -> Tensor:
        boxes = self.boxes
        output = cast(Any, boxes.model)(boxes.normalised(images))
        found, index = boxes.found(output, images)
        # an index of a row without a detection may be that of an anchor that its level lacks
        rows = F.pad(output.coefficients.float(), (0, 0, 0, getattr(boxes.model, "topk_candidates", 0)))
        masks = torch.einsum("ndp,nphw->ndhw", rows_at(rows, index), output.prototypes.float()).sigmoid()
        masks = masks * inside(found[..., :4] / MASK_STRIDE, masks)
        return torch.cat([found, masks.flatten(2)], dim=-1)
