"""YOLO in its anchor-free form: path aggregation, a decoupled head, sides as distributions, task-aligned assignment."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection._utils import BoxLinearCoder

from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.loss import DetectionLoss
from lab.tasks.detection.models.dense import Detector
from lab.tasks.detection.types import DetectorOutput, Matched
from lossforge.losses import plain_torch, task_aligned_assign

STRIDES = (8, 16, 32)
PRIOR = 0.01
"""Probability of each class at the start."""


class SideCoder(BoxLinearCoder):
    """Boxes as the distances of their sides from an anchor's centre, in strides."""

    def __init__(self) -> None:
        super().__init__(normalize_by_size=True)

    def decode_single(self, distances: Tensor, anchors: Tensor) -> Tensor:
        """Return boxes (A, 4); torchvision's post-processing calls it so."""
        return self.decode(distances, anchors)


class Branch(nn.Module):
    """Convolutions that all levels share, with norms and SiLU of each level's own.

    Source: Lyu et al., RTMDet, 2022 (arXiv 2212.07784).
    """

    def __init__(self, channels: int, convolutions: int, levels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(convolutions))
        self.norms = nn.ModuleList(nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(convolutions)) for _ in range(levels))

    def forward(self, x: Tensor, level: int) -> Tensor:
        """Return features of one level, as large as x (N, channels, H, W)."""
        for convolution, norm in zip(self.convolutions, cast(nn.ModuleList, self.norms[level]), strict=True):
            x = F.silu(norm(convolution(x)))
        return x


class TaskAlignedHead(nn.Module):
    """A branch for the classes and one for the sides, of which each is a distribution over `bins` distances."""

    def __init__(self, channels: int, classes: int, convolutions: int, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self.class_branch, self.side_branch = (Branch(channels, convolutions, len(STRIDES)) for _ in range(2))
        self.cls_logits = nn.Conv2d(channels, classes, 3, padding=1)
        self.side_logits = nn.Conv2d(channels, 4 * bins, 3, padding=1)
        for layer in (self.cls_logits, self.side_logits):
            nn.init.normal_(layer.weight, std=0.01)
        self.cls_logits.bias = nn.Parameter(torch.full((classes,), -math.log(1 / PRIOR - 1)))
        start = -torch.arange(bins).div(3).repeat(4)  # boxes of about five strides
        self.side_logits.bias = nn.Parameter(start)

    def forward(self, levels: Sequence[Tensor]) -> DetectorOutput:
        """Return the outputs of levels (N, channels, H, W), the finest first."""
        logits, sides = [], []
        for number, level in enumerate(levels):
            logits.append(_rows(self.cls_logits(self.class_branch(level, number))))
            sides.append(_rows(self.side_logits(self.side_branch(level, number))))
        distributions = torch.cat(sides, 1).unflatten(-1, (4, self.bins))
        distances = torch.arange(self.bins, dtype=torch.float32, device=distributions.device)
        expected = distributions.float().softmax(-1) @ distances
        return DetectorOutput(torch.cat(logits, 1), expected, sides=distributions)


def _rows(level: Tensor) -> Tensor:
    """Return (N, H · W, C) of (N, C, H, W)."""
    return level.flatten(2).transpose(1, 2)


class Yolo(Detector):
    """A detector with one anchor a cell, matched by how well it predicts class and box together.

    Sources: Feng et al., TOOD, 2021 (arXiv 2108.07755); Li et al., Generalized Focal Loss, 2020 (arXiv 2006.04388).

    Args:
        backbone: returns a dict of the levels of strides 8, 16 and 32, with `out_channels` each.
        classes: the number of classes.
        criterion: the loss.
        convolutions: the number in each branch of the head before its output.
        bins: distances of a side, 0 to bins - 1 strides.
        candidates: anchors that a box may have.
        alpha, beta: exponents of the class's probability and of the IoU in the alignment of an anchor with a box.
        score_thresh, nms_thresh, detections_per_img, topk_candidates: as torchvision's detectors.
    """

    strides = STRIDES
    matches_output = True
    postprocess_detections = detection.RetinaNet.postprocess_detections

    def __init__(
        self,
        backbone: nn.Module,
        classes: int,
        criterion: DetectionLoss,
        *,
        convolutions: int = 2,
        bins: int = 17,
        candidates: int = 10,
        alpha: float = 1.0,
        beta: float = 6.0,
        score_thresh: float = 0.05,
        nms_thresh: float = 0.6,
        detections_per_img: int = 100,
        topk_candidates: int = 1000,
    ) -> None:
        super().__init__()
        self.backbone, self.criterion = backbone, criterion
        self.head = TaskAlignedHead(cast(int, backbone.out_channels), classes, convolutions, bins)
        self.coder = self.box_coder = SideCoder()
        self.candidates, self.alpha, self.beta = candidates, alpha, beta
        self.score_thresh, self.nms_thresh = score_thresh, nms_thresh
        self.detections_per_img, self.topk_candidates = detections_per_img, topk_candidates

    def outputs(self, levels: list[Tensor]) -> DetectorOutput:
        return cast(DetectorOutput, self.head(levels))

    def get_classifier(self) -> nn.Module:
        return cast(nn.Module, self.head.cls_logits)

    def anchors(self, height: int, width: int, device: torch.device) -> list[Tensor]:
        """Return the cells (Aₗ, 4) of each level, as boxes."""
        return [cells_of(height, width, stride, device) for stride in self.strides]

    @torch.no_grad()
    def match(self, batch: DetectionBatch, output: DetectorOutput | None = None) -> Matched:
        assert output is not None
        height, width = batch.images.shape[-2:]
        cells = torch.cat(self.anchors(height, width, batch.boxes.device))
        predicted = self.coder.decode(output.regression.float(), cells)
        with plain_torch() if self.criterion.plain else nullcontext():
            found = task_aligned_assign(
                output.logits,
                predicted,
                (cells[:, :2] + cells[:, 2:]) / 2,
                batch.labels,
                batch.boxes.float(),
                batch.labels >= 0,
                topk=self.candidates,
                alpha=self.alpha,
                beta=self.beta,
                iou="iou",  # of CIoU, a box that no prediction comes near has none above 0, and would never be learned
                from_logits=True,
                dense=False,
            )
        boxes = torch.where(found.foreground[..., None], found.boxes, cells)
        return Matched(found.labels, boxes, found.foreground, found.foreground.sum(dtype=torch.float32), cells, found.quality)


def cells_of(height: int, width: int, stride: int, device: torch.device) -> Tensor:
    """Return the cells (A, 4) of a level as boxes, row by row."""
    rows, columns = (torch.arange(0, side, stride, dtype=torch.float32, device=device) for side in (height, width))
    top, left = torch.meshgrid(rows, columns, indexing="ij")
    corner = torch.stack([left, top], -1).flatten(0, 1)
    return torch.cat([corner, corner + stride], -1)
