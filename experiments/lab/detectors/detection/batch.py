"""Batches of detection data."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lab.tasks.detection.types import Matched


@dataclass
class DetectionBatch:
    """Images of one padded size with their boxes; all images of the batch have K rows of boxes."""

    images: Tensor  # (N, 3, H, W) float, normalised
    boxes: Tensor  # (N, K, 4) xyxy in pixels of `images`, float32; 0 in rows without a box
    labels: Tensor  # (N, K) class indices; -1 in rows without a box
    sizes: Tensor  # (N, 2) height, width of the image inside the padding
    originals: Tensor  # (N, 2) height, width of the file
    index: Tensor  # (N,) positions in the data set
    image_ids: Tensor  # (N,) ids in the COCO file
    matched: Matched | None = None  # the targets of the task's anchors
    masks: Tensor | None = None  # (N, K, H / MASK_STRIDE, W / MASK_STRIDE) uint8: how much of each cell a mask covers, 0 to 255
    turned: Tensor | None = None  # (N, K, 5) oriented boxes in pixels of `images`: centre, width, height, angle in radians

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> "DetectionBatch":
        moved: dict[str, Any] = {name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def pin_memory(self) -> "DetectionBatch":
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self.tensors().items()}
        return replace(self, **pinned)

    def tensors(self) -> dict[str, Tensor]:
        return {item.name: value for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)}
