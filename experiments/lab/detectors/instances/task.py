"""Segmentation of instances: the detection task with a mask of each object."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from PIL import Image
from torch import Tensor

from lab.base.drawing import colour_of, with_masks
from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection.data import FileLoader
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.task import Detection
from lab.detectors.detection.task import build as build_detection
from lab.detectors.detection.types import MASK_STRIDE, DetectionBatch, DetectorOutput, Matched
from lab.detectors.instances import InstancesConfig
from lab.detectors.instances.metrics import InstanceCounts
from lab.detectors.instances.model import DetrMasks, YoloMasks


class Instances(Detection):
    line = "held-out mask mAP {map:.4f} · mAP50 {map50:.4f} · box mAP {box_map:.4f} · loss {loss:.4f}"
    table: Mapping[str, str] = {
        f"held-out {title}": f"{{{name}:.4f}}" for title, name in (("mask mAP", "map"), ("mask mAP50", "map50"), ("box mAP", "box_map"))
    }

    @staticmethod
    def kinds(config: TrainConfig) -> dict[str, Callable[..., Detector]]:
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
