"""Segmentation of instances: the detection task with a mask of each object, counted, predicted and exported."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lab.base.drawing import colour_of, with_masks
from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection.boxes import rows_at
from lab.detectors.detection.data import FileLoader
from lab.detectors.detection.inference import boxes_of, exportable, predictor
from lab.detectors.detection.metrics import DetectionCounts, DetectionResult, Found
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.task import Detection
from lab.detectors.detection.task import build as build_detection
from lab.detectors.detection.types import MASK_STRIDE, DetectionBatch, DetectorOutput, Matched
from lab.detectors.instances import InstancesConfig
from lab.detectors.instances.loss import inside
from lab.detectors.instances.model import DetrMasks, YoloMasks, encoded_in_file
from lab.processes import distributed
from lab.run.export import Exportable
from lab.run.predict import Asked, Predictor

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


class Instances(Detection):
    line = "held-out mask mAP {map:.4f} · mAP50 {map50:.4f} · box mAP {box_map:.4f} · loss {loss:.4f}"
    table: Mapping[str, str] = {
        f"held-out {title}": f"{{{name}:.4f}}" for title, name in (("mask mAP", "map"), ("mask mAP50", "map50"), ("box mAP", "box_map"))
    }

    @staticmethod
    def kinds(config: TrainConfig) -> dict[str, Any]:
        task = cast(InstancesConfig, config.task)
        masks = partial(DetrMasks, prototypes=task.prototypes, points=task.points)
        return {"yolo": partial(YoloMasks, prototypes=task.prototypes), "detr": masks}

    def first_batch(self, batch: DetectionBatch) -> list[tuple[Image.Image, str]]:
        assert batch.masks is not None
        titled = super().first_batch(batch)
        found = []
        # the masks of one image at a time: at the images' size, those of a whole batch take gigabytes
        for (image, title), own, labels in zip(titled, batch.masks.cpu() > 127, batch.labels.tolist(), strict=False):
            there = [number for number, label in enumerate(labels) if label >= 0]
            large = own[there].repeat_interleave(MASK_STRIDE, 1).repeat_interleave(MASK_STRIDE, 2)
            found.append((with_masks(image, [(0, 0, mask) for mask in large], [colour_of(labels[number]) for number in there]), title))
        return found

    def losses(self, output: DetectorOutput, batch: DetectionBatch, matched: Matched, normalizer: Tensor) -> dict[str, Tensor]:
        masks = cast(YoloMasks | DetrMasks, self.detector).mask_loss(output, matched, batch)
        return super().losses(output, batch, matched, normalizer) | {"masks": self.settings.mask_factor * masks / normalizer}

    def counts(self, loader: FileLoader) -> InstanceCounts:
        return InstanceCounts(self.data.classes, self.data.category_ids, self.device, loader.file)


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Detection:
    return build_detection(config, device, saved, Instances, shapes="masks")


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the detector, and a function from an image to its instances."""

    def in_file(found: dict[str, Tensor], batch: DetectionBatch, image: Image.Image) -> tuple[Tensor, dict[str, Any]]:
        boxes, original = found["boxes"] * (batch.originals / batch.sizes).flip(1).repeat(1, 2), (image.height, image.width)
        masks = encoded_in_file(found["masks"], boxes, tuple(batch.sizes[0].tolist()), original)
        return boxes, {"instances": masks, "size": original}

    return predictor(config, classes, asked, Instances, in_file)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the detector, from images to boxes and masks, to export."""
    said = "detections: x1, y1, x2, y2 in pixels, score, class, then the mask's probabilities for 4 × 4 pixels each, row by row"
    return exportable(config, classes, norm, Instances, InstanceScenes, said)


class InstanceScenes(nn.Module):
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
