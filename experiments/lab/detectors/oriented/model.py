"""A YOLO of oriented boxes: distances of the sides from an anchor along the box's own axes, and an angle.

Sources: Llerena et al., Gaussian Bounding Boxes and Probabilistic Intersection-over-Union, 2021 (arXiv 2106.06072); Li et al., Generalized
Focal Loss, 2020 (arXiv 2006.04388).
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.detectors.detection.boxes import rotated, unsuppressed
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.yolo import STRIDES, Branch, TaskAlignedHead, Yolo
from lab.detectors.detection.types import DetectionBatch, DetectorOutput
from lossforge.losses import probabilistic_box_iou


class TurnedCoder:
    """Boxes (cx, cy, w, h, angle) as distances of their sides from an anchor's centre along their axes, in strides, and the angle."""

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor:
        """Return distances (..., 4): left, top, right, bottom."""
        centre, stride = _centre_and_stride(anchors)
        x, y = rotated(boxes[..., :2] - centre, -boxes[..., 4])
        half = boxes[..., 2:4] / 2
        offset = torch.stack([x, y], -1)
        return torch.cat([half - offset, half + offset], -1) / stride

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        """Return boxes (..., 5) of distances and angle (..., 5)."""
        centre, stride = _centre_and_stride(anchors)
        first, second, angle = deltas[..., :2] * stride, deltas[..., 2:4] * stride, deltas[..., 4]
        x, y = rotated((second - first) / 2, angle)
        return torch.cat([centre + torch.stack([x, y], -1), first + second, angle[..., None]], -1)


def _centre_and_stride(anchors: Tensor) -> tuple[Tensor, Tensor]:
    return (anchors[..., :2] + anchors[..., 2:]) / 2, anchors[..., 2:3] - anchors[..., :1]


class OrientedHead(TaskAlignedHead):
    """A head with a branch for the angle of each anchor's box, in [-π/4, 3π/4), as YOLOv8's. `regression` is (N, A, 5)."""

    def __init__(self, channels: int, classes: int, convolutions: int, bins: int) -> None:
        super().__init__(channels, classes, convolutions, bins)
        self.angle_branch = Branch(channels, convolutions, len(STRIDES))
        self.angle = nn.Conv2d(channels, 1, 3, padding=1)
        nn.init.normal_(self.angle.weight, std=0.01)
        self.angle.bias = nn.Parameter(torch.full((1,), -math.log(3)))  # an angle of 0

    def forward(self, levels: Sequence[Tensor]) -> DetectorOutput:
        """Return the outputs of levels (N, channels, H, W), the finest first."""
        output = super().forward(levels)
        rows = [self.angle(self.angle_branch(level, number)).flatten(1) for number, level in enumerate(levels)]
        angles = (torch.cat(rows, 1).float().sigmoid() - 0.25) * math.pi
        return output._replace(regression=torch.cat([output.regression, angles[..., None]], -1))


class YoloOriented(Yolo):
    """A YOLO of oriented boxes, whose `regression` is distances and angle; backbone, classes, criterion, options: as Yolo's."""

    coder: Any
    overlap = "probiou"

    def __init__(self, backbone: nn.Module, classes: int, criterion: DetectionLoss, **options: Any) -> None:
        super().__init__(backbone, classes, criterion, head=OrientedHead, **options)
        self.coder = TurnedCoder()

    def true_boxes(self, batch: DetectionBatch) -> Tensor:
        return cast(Tensor, batch.turned)

    def boxes_of(self, cells: Tensor) -> Tensor:
        centre, stride = _centre_and_stride(cells)
        return torch.cat([centre, stride, stride, torch.zeros_like(stride)], -1)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Return boxes (D, 5), scores (D,) falling and labels (D,) of each image, after suppression by ProbIoU in each class, if any."""
        cells = torch.cat(self.anchors(*padded, output.logits.device))
        if not self.suppresses:
            boxes = self.coder.decode(output.regression.float(), cells)
            return unsuppressed(output, boxes, self.detections_per_img, self.score_thresh)
        found = []
        for logits, regression in zip(output.logits.float(), output.regression.float(), strict=True):
            flat = logits.sigmoid().flatten()
            sure = (flat > self.score_thresh).nonzero()[:, 0]
            scores, order = flat[sure].topk(min(len(sure), self.topk_candidates))
            index, labels = sure[order] // logits.shape[1], sure[order] % logits.shape[1]
            boxes = self.coder.decode(regression[index], cells[index])
            kept = _suppressed(near(boxes, labels, self.nms_thresh))[: self.detections_per_img]
            found.append({"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]})
        return found


def near(boxes: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Return whether boxes (..., D, 5) of one class overlap by more than `threshold`: (..., D, D) bool, rows for the earlier ones."""
    same = labels[..., :, None] == labels[..., None, :]
    return ((probabilistic_box_iou(boxes, boxes) > threshold) & same).triu(1)


def _suppressed(near: Tensor) -> Tensor:
    """Return the indices of boxes, in falling order of score, that are `near` (D, D) no better one that stays."""
    rows = near.cpu()
    kept = torch.ones(len(rows), dtype=torch.bool)
    for number, row in enumerate(rows):
        if kept[number]:
            kept &= ~row
    return kept.nonzero()[:, 0].to(near.device)
