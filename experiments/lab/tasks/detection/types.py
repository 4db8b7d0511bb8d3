"""What travels between a detector, its matching and its loss. A is the number of anchors of an image over all levels."""

from typing import NamedTuple, Protocol

from torch import Tensor

BACKGROUND, IGNORED = -1, -2
"""Labels of anchors without an object, as lossforge's losses of class indices take them."""


class DetectorOutput(NamedTuple):
    """The head's raw outputs over all levels; centerness is FCOS's."""

    logits: Tensor  # (N, A, C)
    regression: Tensor  # (N, A, 4) encoded boxes
    centerness: Tensor | None = None  # (N, A) logits


class Matched(NamedTuple):
    """What each anchor shall predict. An anchor that is not positive has itself as its box, so that every row encodes to finite numbers."""

    labels: Tensor  # (N, A) int64: class, BACKGROUND or IGNORED
    boxes: Tensor  # (N, A, 4)
    positive: Tensor  # (N, A) bool
    positives: Tensor  # () float32: how many of the batch's anchors are positive
    anchors: Tensor  # (A, 4)


class Targets(Protocol):
    """What matching reads of a batch."""

    @property
    def images(self) -> Tensor: ...  # (N, 3, H, W)

    @property
    def boxes(self) -> Tensor: ...  # (N, K, 4)

    @property
    def labels(self) -> Tensor: ...  # (N, K) int64, -1 where there is no box


class Coder(Protocol):
    """From boxes to what the head regresses, and back, for boxes (..., 4) and anchors that broadcast to them."""

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor: ...

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor: ...
