"""A detector's loss by torchvision's ways, to compare with: dense one-hot targets, copies of the rows that count, waits for the device."""

from typing import Any

import torch
import torch.nn.functional as F
import torchvision.ops
from torch import Tensor

from lab.detection_types import IGNORED, Coder, DetectorOutput, Matched
from lossforge.losses import box_iou_loss, efficient_box_iou_loss, plain_torch
from lossforge.losses.registry.common import Loss

STOCK_BOXES = {
    "giou": torchvision.ops.generalized_box_iou_loss,
    "diou": torchvision.ops.distance_box_iou_loss,
    "ciou": torchvision.ops.complete_box_iou_loss,
}
ENCODED = {"l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}
OTHERS = {"iou": box_iou_loss, "eiou": efficient_box_iou_loss}
"""Losses that torchvision does not have: by our reference."""


class StockLoss:
    """Sums over the batch of each part's loss, in the logits' precision under autocast as torchvision's training has it."""

    def __init__(self, classes: Loss, hyper: dict[str, Any], box_loss: str, box_hyper: dict[str, Any]) -> None:
        self.classes = classes.judged() or classes.reference
        self.hyper, self.box_loss, self.box_hyper = hyper, box_loss, box_hyper

    def __call__(self, output: DetectorOutput, matched: Matched, coder: Coder, score: Tensor | None) -> dict[str, Tensor]:
        dtype = output.logits.dtype
        with torch.autocast(output.logits.device.type, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            losses = {"classification": self._classification(output, matched, score), "boxes": self._boxes(output, matched, coder)}
            if output.centerness is not None:
                left, top, right, bottom = coder.encode(matched.anchors, matched.boxes)[matched.positive].unbind(-1)
                across = torch.minimum(left, right) / torch.maximum(left, right)
                down = torch.minimum(top, bottom) / torch.maximum(top, bottom)
                logits = output.centerness[matched.positive]
                losses["centerness"] = F.binary_cross_entropy_with_logits(logits.float(), torch.sqrt(across * down), reduction="sum")
        return losses

    def _classification(self, output: DetectorOutput, matched: Matched, score: Tensor | None) -> Tensor:
        losses = []
        for image, (logits, labels) in enumerate(zip(output.logits, matched.labels, strict=True)):
            positive = labels >= 0
            target = torch.zeros_like(logits)
            target[positive, labels[positive]] = 1.0 if score is None else score[image][positive].to(target.dtype)
            if output.centerness is None:  # only RetinaNet ignores anchors
                counts = labels != IGNORED
                logits, target = logits[counts], target[counts]
            losses.append(self.classes(logits, target, **self.hyper, reduction="none").sum())
        return torch.stack(losses).sum()

    def _boxes(self, output: DetectorOutput, matched: Matched, coder: Coder) -> Tensor:
        positive, boxes = matched.positive, matched.boxes[matched.positive]
        deltas = output.regression[positive].float()
        anchors = matched.anchors.expand_as(matched.boxes)[positive]
        if self.box_loss in ENCODED:
            return ENCODED[self.box_loss](deltas, coder.encode(anchors, boxes), reduction="sum", **self.box_hyper)
        predicted = coder.decode(deltas, anchors)
        if self.box_loss in STOCK_BOXES:
            return STOCK_BOXES[self.box_loss](predicted, boxes, reduction="sum", **self.box_hyper)
        with plain_torch():
            return OTHERS[self.box_loss](predicted, boxes, "sum", **self.box_hyper)
