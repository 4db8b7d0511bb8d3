"""YOLO in its anchor-free form: path aggregation, a decoupled head, sides as distributions, task-aligned assignment."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection._utils import BoxLinearCoder

from lab.detectors.detection.boxes import clipped, unsuppressed
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.types import DetectionBatch, DetectorOutput, Matched
from lossforge.losses import plain_torch, task_aligned_assign

STRIDES = (8, 16, 32)
PRIOR = 0.01
"""Probability of each class at the start."""
BEST = 7
"""How many anchors a box chooses under the head that gives it one; it keeps the best of those that no other box took. As in YOLO26."""


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
        expected = (distributions.float().softmax(-1) * distances).sum(-1)  # autocast would round a product of matrices
        return DetectorOutput(torch.cat(logits, 1), expected, sides=distributions)


def _rows(level: Tensor) -> Tensor:
    """Return (N, H · W, C) of (N, C, H, W)."""
    return level.flatten(2).transpose(1, 2)


class Yolo(Detector):
    """A detector with one anchor a cell, matched by how well it predicts class and box together.

    With `one_to_one` a second head gives each box one anchor, and predicts without suppression. The first head, whose boxes have several,
    then only trains the features: the second one's gradient ends at them.

    Sources: Feng et al., TOOD, 2021 (arXiv 2108.07755); Li et al., Generalized Focal Loss, 2020 (arXiv 2006.04388); Wang et al., YOLOv10,
    2024 (arXiv 2405.14458), for the two heads, with the choice of YOLO26 (ultralytics 8.4) among a box's best anchors.

    Args:
        backbone: returns a dict of the levels of strides 8, 16 and 32, with `out_channels` each.
        classes: the number of classes.
        criterion: the loss.
        convolutions: the number in each branch of the head before its output.
        bins: distances of a side, 0 to bins - 1 strides.
        candidates: anchors that a box may have.
        alpha, beta: exponents of the class's probability and of the IoU in the alignment of an anchor with a box.
        one_to_one: whether there is a second head, whose boxes have one anchor.
        head: makes a head of channels, classes, convolutions and bins.
        score_thresh, nms_thresh, detections_per_img, topk_candidates: as torchvision's detectors.
    """

    strides = STRIDES
    matches_output = True
    overlap: Any = "iou"  # of CIoU, a box that no prediction comes near has none above 0, and would never be learned
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
        one_to_one: bool = False,
        head: Callable[[int, int, int, int], TaskAlignedHead] = TaskAlignedHead,
        score_thresh: float = 0.05,
        nms_thresh: float = 0.6,
        detections_per_img: int = 100,
        topk_candidates: int = 1000,
    ) -> None:
        super().__init__()
        self.backbone, self.criterion = backbone, criterion
        heads = [head(cast(int, backbone.out_channels), classes, convolutions, bins) for _ in range(1 + one_to_one)]
        self.head, self.one_to_one = heads[0], heads[1] if one_to_one else None
        self.suppresses = not one_to_one
        self.coder = self.box_coder = SideCoder()
        self.candidates, self.alpha, self.beta = candidates, alpha, beta
        self.score_thresh, self.nms_thresh = score_thresh, nms_thresh
        self.detections_per_img, self.topk_candidates = detections_per_img, topk_candidates

    def outputs(self, levels: list[Tensor]) -> DetectorOutput:
        """Return the outputs of the head that predicts, and in training those of the other one as the earlier ones."""
        if self.one_to_one is None:
            return cast(DetectorOutput, self.head(levels))
        output = cast(DetectorOutput, self.one_to_one([level.detach() for level in levels]))
        if not self.training:
            return output
        first = self.head(levels)
        earlier = {f"earlier_{name}": getattr(first, name) for name in ("logits", "regression", "sides", "coefficients")}
        return output._replace(**earlier)

    def get_classifier(self) -> nn.Module:
        if self.one_to_one is not None:
            return nn.ModuleList([self.head.cls_logits, self.one_to_one.cls_logits])
        return cast(nn.Module, self.head.cls_logits)

    def anchors(self, height: int, width: int, device: torch.device) -> list[Tensor]:
        """Return the cells (Aₗ, 4) of each level, as boxes."""
        return [cells_of(height, width, stride, device) for stride in self.strides]

    @torch.no_grad()
    def match(self, batch: DetectionBatch, output: DetectorOutput | None = None) -> Matched:
        """Return the targets of `both(output)`: of the head with several anchors a box, where it is there, and of the other one."""
        assert output is not None
        height, width = batch.images.shape[-2:]
        cells = torch.cat(self.anchors(height, width, batch.boxes.device))
        if self.one_to_one is None:
            return self._assigned(batch, output, cells, self.candidates)
        found = self._assigned(batch, output, cells, BEST, 1)
        if output.earlier_logits is None or output.earlier_regression is None:
            return found
        first = self._assigned(batch, DetectorOutput(output.earlier_logits, output.earlier_regression), cells, self.candidates)
        labels, boxes, positive, scores, index = (
            torch.cat([getattr(each, name) for each in (first, found)]) for name in ("labels", "boxes", "positive", "scores", "box_index")
        )
        return Matched(labels, boxes, positive, first.positives + found.positives, cells, scores, index)

    def _assigned(self, batch: DetectionBatch, output: DetectorOutput, cells: Tensor, topk: int, topk2: int | None = None) -> Matched:
        """Return the targets of a head's anchors. topk, topk2: how many anchors a box chooses, and keeps."""
        with plain_torch() if self.criterion.plain else nullcontext():
            found = task_aligned_assign(
                output.logits,
                self.coder.decode(output.regression.float(), cells),
                (cells[:, :2] + cells[:, 2:]) / 2,
                batch.labels,
                self.true_boxes(batch),
                batch.labels >= 0,
                topk=topk,
                topk2=topk2,
                alpha=self.alpha,
                beta=self.beta,
                iou=self.overlap,
                from_logits=True,
                dense=False,
            )
        boxes = torch.where(found.foreground[..., None], found.boxes, self.boxes_of(cells))
        return Matched(
            found.labels, boxes, found.foreground, found.foreground.sum(dtype=torch.float32), cells, found.quality, found.box_index
        )

    def true_boxes(self, batch: DetectionBatch) -> Tensor:
        """Return a batch's boxes, as the coder decodes them."""
        return batch.boxes.float()

    def boxes_of(self, cells: Tensor) -> Tensor:
        """Return cells (A, 4) as boxes, as the coder decodes them."""
        return cells

    def loss(self, output: DetectorOutput, matched: Matched, normalizer: Tensor) -> dict[str, Tensor]:
        """Return sums over the batch and both heads, divided by `normalizer`."""
        return self.criterion(both(output), matched, self.coder, normalizer)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Return each image's detections; see Detector.detections."""
        if self.suppresses:
            return super().detections(output, sizes, padded)
        cells = torch.cat(self.anchors(*padded, output.logits.device))
        boxes = clipped(self.coder.decode(output.regression.float(), cells), sizes)
        return unsuppressed(output, boxes, self.detections_per_img, self.score_thresh)


def both(output: DetectorOutput) -> DetectorOutput:
    """Return the outputs of both heads as one batch, (2 N, A); of one head as they are. The second one trains no prototypes."""
    if output.earlier_logits is None:
        return output
    pairs = [(getattr(output, f"earlier_{name}"), getattr(output, name)) for name in ("logits", "regression", "sides", "coefficients")]
    if output.prototypes is not None:
        pairs.append((output.prototypes, output.prototypes.detach()))
    logits, regression, sides, *masks = (None if last is None else torch.cat([first, last]) for first, last in pairs)
    names = dict(zip(("coefficients", "prototypes"), masks, strict=False))
    return DetectorOutput(cast(Tensor, logits), cast(Tensor, regression), sides=sides, **names)


def cells_of(height: int, width: int, stride: int, device: torch.device) -> Tensor:
    """Return the cells (A, 4) of a level as boxes, row by row."""
    rows, columns = (torch.arange(0, side, stride, dtype=torch.float32, device=device) for side in (height, width))
    top, left = torch.meshgrid(rows, columns, indexing="ij")
    corner = torch.stack([left, top], -1).flatten(0, 1)
    return torch.cat([corner, corner + stride], -1)
