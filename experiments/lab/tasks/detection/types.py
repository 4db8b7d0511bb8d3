"""Types that a detector, its matching and its loss share. A is the number of anchors of an image over all levels."""

from typing import NamedTuple, Protocol

from torch import Tensor

BACKGROUND, IGNORED = -1, -2
"""Labels of anchors without an object, as lossforge's losses of class indices take them."""


class DetectorOutput(NamedTuple):
    """The head's raw outputs over all levels; only FCOS has centerness, YOLO sides, DETR earlier layers."""

    logits: Tensor  # (N, A, C)
    regression: Tensor  # (N, A, 4) encoded boxes
    centerness: Tensor | None = None  # (N, A) logits
    sides: Tensor | None = None  # (N, A, 4, bins) logits of each side's distance, in strides
    earlier_logits: Tensor | None = None  # (layers · N, A, C) of the layers before, in training
    earlier_regression: Tensor | None = None  # (layers · N, A, 4)


class Matched(NamedTuple):
    """The anchors' targets. The box of an anchor that is not positive is the anchor itself, so that every row encodes to finite numbers."""

    labels: Tensor  # (N, A) int64: class, BACKGROUND or IGNORED
    boxes: Tensor  # (N, A, 4)
    positive: Tensor  # (N, A) bool
    positives: Tensor  # () float32: how many of the batch's anchors are positive
    anchors: Tensor  # (A, 4)
    scores: Tensor | None = None  # (N, A) float32, of task-aligned matching: the target in the class of a positive; else 0


class Coder(Protocol):
    """Encode boxes as regression targets, and decode them: boxes (..., 4), and anchors that broadcast to them."""

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor: ...

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor: ...
