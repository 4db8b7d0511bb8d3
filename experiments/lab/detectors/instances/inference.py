"""Predictions and exports of instances with their masks."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection.boxes import rows_at
from lab.detectors.detection.inference import boxes_of, exportable, predictor
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.types import MASK_STRIDE, DetectionBatch
from lab.detectors.instances import task as tasks
from lab.detectors.instances.loss import inside
from lab.detectors.instances.model import encoded_in_file
from lab.run.export import Exportable
from lab.run.predict import Asked, Predictor


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the detector, and a function from an image to its instances."""

    def in_file(found: dict[str, Tensor], batch: DetectionBatch, image: Image.Image) -> tuple[Tensor, dict[str, Any]]:
        boxes, original = found["boxes"] * (batch.originals / batch.sizes).flip(1).repeat(1, 2), (image.height, image.width)
        masks = encoded_in_file(found["masks"], boxes, tuple(batch.sizes[0].tolist()), original)
        return boxes, {"instances": masks, "size": original}

    return predictor(config, classes, asked, tasks.Instances, in_file)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the detector, from images to boxes and masks, to export."""
    said = "detections: x1, y1, x2, y2 in pixels, score, class, then the mask's probabilities for 4 × 4 pixels each, row by row"
    return exportable(config, classes, norm, tasks.Instances, Instances, said)


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
