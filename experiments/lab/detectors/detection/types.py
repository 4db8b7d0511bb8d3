"""Types that the data, a detector, its matching and its loss share. A is the number of anchors of an image over all levels."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

BACKGROUND, IGNORED = -1, -2
"""Labels of anchors without an object, as lossforge's losses of class indices take them."""


MASK_STRIDE = 4
"""Pixels of an image a side for each number of a mask."""


class DetectorOutput(NamedTuple):
    """The head's raw outputs over all levels; only FCOS has centerness, YOLO sides.

    In training a DETR has also its earlier layers' outputs and those of denoising queries, and a YOLO with two heads the other head's.
    """

    logits: Tensor  # (N, A, C)
    regression: Tensor  # (N, A, 4) encoded boxes; (N, A, 5) with an angle
    centerness: Tensor | None = None  # (N, A) logits
    sides: Tensor | None = None  # (N, A, 4, bins) logits of each side's distance, in strides
    earlier_logits: Tensor | None = None  # (layers · N, A, C) of the layers before, or of the head whose boxes need suppression
    earlier_regression: Tensor | None = None  # (layers · N, A, 4)
    earlier_sides: Tensor | None = None  # (N, A, 4, bins)
    earlier_coefficients: Tensor | None = None  # (layers · N, A, P)
    noisy_logits: Tensor | None = None  # (layers · N, D, C) of denoising queries
    noisy_regression: Tensor | None = None  # (layers · N, D, 4)
    coefficients: Tensor | None = None  # (N, A, P): with the prototypes, an anchor's mask is σ(coefficients · prototypes)
    prototypes: Tensor | None = None  # (N, P, H / MASK_STRIDE, W / MASK_STRIDE)


class Matched(NamedTuple):
    """The anchors' targets; of a DETR those of all rows of `rows_of`, without N.

    The box of an anchor that is not positive is the anchor itself, so that every row encodes to finite numbers.
    """

    labels: Tensor  # (N, A) int64: class, BACKGROUND or IGNORED
    boxes: Tensor  # (N, A, 4)
    positive: Tensor  # (N, A) bool
    positives: Tensor  # () float32: how many of the batch's anchors are positive
    anchors: Tensor  # (A, 4)
    scores: Tensor | None = None  # (N, A) float32, of task-aligned matching: the target in the class of a positive; else 0
    box_index: Tensor | None = None  # (N, A) int64, of YOLO and DETR: which of the image's boxes; -1 if not positive
    weight: Tensor | None = None  # (N, A) float32, a factor of each anchor's losses; None for 1


def rows_of(output: DetectorOutput) -> DetectorOutput:
    """Return the outputs of all layers, of the last one last, and of denoising queries after them, as rows (R, …)."""
    logits, regression = (
        torch.cat([part.flatten(0, 1) for part in parts if part is not None])
        for parts in (
            (output.earlier_logits, output.logits, output.noisy_logits),
            (output.earlier_regression, output.regression, output.noisy_regression),
        )
    )
    return DetectorOutput(logits, regression)


class Coder(Protocol):
    """Encode boxes as regression targets, and decode them: boxes (..., 4), and anchors that broadcast to them."""

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor: ...

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor: ...


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
