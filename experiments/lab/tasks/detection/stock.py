"""A detector's loss by torchvision's ways, to compare with: dense one-hot targets, copies of the rows that count, waits for the device."""

from typing import Any

import torch
import torch.nn.functional as F
import torchvision.ops
from torch import Tensor

from lab.tasks.detection.types import IGNORED, Coder, DetectorOutput, Matched
from lossforge.losses.registry import Loss

STOCK_BOXES = {
    "giou": torchvision.ops.generalized_box_iou_loss,
    "diou": torchvision.ops.distance_box_iou_loss,
    "ciou": torchvision.ops.complete_box_iou_loss,
}
ENCODED = {"box_l1": F.l1_loss, "box_smooth_l1": F.smooth_l1_loss}


class StockLoss:
    """Sums over the batch of each part's loss, in the logits' precision under autocast as torchvision's training has it."""

    def __init__(self, classes: Loss, hyper: dict[str, Any], boxes: Loss, box_hyper: dict[str, Any]) -> None:
        self.classes = classes.judged() or classes.reference
        self.hyper, self.boxes, self.box_hyper = hyper, boxes, box_hyper

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
        if self.boxes.name in ENCODED:
            return ENCODED[self.boxes.name](deltas, coder.encode(anchors, boxes), reduction="sum", **self.box_hyper)
        predicted = coder.decode(deltas, anchors)
        # what torchvision does not have, such as EIoU or a loss of one's own, by our reference
        function = STOCK_BOXES.get(self.boxes.name, self.boxes.reference)
        return function(predicted, boxes, reduction="sum", **self.box_hyper)
