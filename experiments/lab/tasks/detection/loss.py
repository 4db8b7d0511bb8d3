"""The loss of a dense detector, by the names of its parts."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lab.config.errors import unknown
from lab.config.loss_settings import BOX_LOSSES
from lab.tasks.detection.spec import LOSSES as DETECTION_LOSSES
from lab.tasks.detection.stock import StockLoss
from lab.tasks.detection.types import Coder, DetectorOutput, Matched
from lossforge.losses import binary_cross_entropy_with_logits
from lossforge.losses.registry import LOSSES, Loss

SCORED = ("quality_focal", "varifocal")
"""Losses whose target of a positive is the IoU of its box."""
ENCODED = {"l1": "box_l1", "smooth_l1": "box_smooth_l1"}
"""Losses of encoded boxes, with their names in the registry."""
DECODED = tuple(name for name in BOX_LOSSES if name not in ENCODED)
IMPLEMENTATIONS = ("lossforge", "torch")


class DetectionLoss:
    """Losses of classes, boxes and, where the detector has it, centerness.

    Class indices go into the kernels as they are, one launch over the whole batch for each part; nothing waits for the device.

    Args:
        name: of the classification loss, one of DETECTION_LOSSES, or an element-wise loss of one's own.
        box_loss: one of ENCODED or DECODED, or a loss of pairs of boxes of one's own.
        hyper, box_hyper: the losses' hyper-parameters, as the registry names them.
        box_weight: factor of the boxes' loss.
        implementation: "torch" computes by torchvision's ways, to compare with.

    Raises:
        UserError: a name is not known.
    """

    def __init__(
        self,
        name: str | Loss = "focal",
        box_loss: str | Loss = "giou",
        *,
        hyper: Mapping[str, Any] | None = None,
        box_hyper: Mapping[str, Any] | None = None,
        box_weight: float = 1.0,
        implementation: str = "lossforge",
    ) -> None:
        _check("loss.implementation", implementation, IMPLEMENTATIONS)
        self.classes = _loss("loss", name, DETECTION_LOSSES)
        self.boxes = _loss("box_loss", box_loss, (*ENCODED, *DECODED))
        self.hyper, self.box_hyper, self.box_weight = dict(hyper or {}), dict(box_hyper or {}), box_weight
        for key in self.hyper:
            _check("loss.hyper", key, tuple(self.classes.hyper))
        for key in self.box_hyper:
            _check("box_loss.hyper", key, tuple(self.boxes.hyper))
        self.scored, self.encoded = self.classes.name in SCORED, self.boxes.name in ENCODED.values()
        self.stock = StockLoss(self.classes, self.hyper, self.boxes, self.box_hyper) if implementation == "torch" else None

    def __call__(self, output: DetectorOutput, matched: Matched, coder: Coder, normalizer: Tensor) -> dict[str, Tensor]:
        """0-d losses "classification", "boxes" and with centerness "centerness": sums over the batch divided by `normalizer` ()."""
        score = self._score(output, matched, coder) if self.scored else None
        if self.stock is not None:
            losses = {part: value / normalizer for part, value in self.stock(output, matched, coder, score).items()}
        else:
            losses = self._parts(output, matched, coder, score, {"reduction": "sum", "normalizer": normalizer})
        return losses | {"boxes": self.box_weight * losses["boxes"]}

    def _parts(
        self, output: DetectorOutput, matched: Matched, coder: Coder, score: Tensor | None, total: dict[str, Any]
    ) -> dict[str, Tensor]:
        scores = {} if score is None else {"score": score}
        deltas, weight = _of_positives(output.regression, matched), matched.positive.float()
        if self.encoded:
            first, second = deltas, coder.encode(matched.anchors, matched.boxes)
        else:
            first, second = coder.decode(deltas, matched.anchors), matched.boxes
        losses = {
            "classification": self.classes.function(output.logits, matched.labels, **self.hyper, **scores, **total),
            "boxes": self.boxes.function(first, second, weight=weight, **self.box_hyper, **total),
        }
        if output.centerness is not None:
            target = centerness(coder.encode(matched.anchors, matched.boxes))
            logits = torch.where(matched.positive, output.centerness.float(), 0.0)
            losses["centerness"] = binary_cross_entropy_with_logits(logits, target, weight, **total)
        return cast(dict[str, Tensor], losses)

    @torch.no_grad()
    def _score(self, output: DetectorOutput, matched: Matched, coder: Coder) -> Tensor:
        """(N, A) IoU of each positive's predicted box with its own."""
        predicted = coder.decode(_of_positives(output.regression, matched), matched.anchors)
        return overlap(predicted, matched.boxes)


def _of_positives(regression: Tensor, matched: Matched) -> Tensor:
    """(N, A, 4) deltas, 0 where not positive: what is regressed there counts for nothing, not even if it overflows."""
    return torch.where(matched.positive[..., None], regression.float(), 0.0)


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """(...) IoU of pairs of boxes (..., 4).

    Where they are apart it is exactly 0, which 1 - box_iou_loss need not be, and which makes the class a negative of varifocal loss.
    """
    corner, opposite = torch.maximum(boxes[..., :2], others[..., :2]), torch.minimum(boxes[..., 2:], others[..., 2:])
    intersection = (opposite - corner).clamp(min=0).prod(-1)
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1) + (others[..., 2:] - others[..., :2]).prod(-1)
    return intersection / (areas - intersection).clamp(min=1e-7)


def centerness(distances: Tensor) -> Tensor:
    """How near to its box's centre each point is: 1 in the centre, 0 at an edge; (...) from distances to the edges (..., 4)."""
    left, top, right, bottom = distances.unbind(-1)
    across = torch.minimum(left, right) / torch.maximum(left, right)
    down = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    return (across * down).sqrt()


def _loss(setting: str, given: str | Loss, choices: tuple[str, ...]) -> Loss:
    if isinstance(given, Loss):
        return given
    _check(setting, given, choices)
    return LOSSES[ENCODED.get(given, given) if setting == "box_loss" else given]


def _check(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise unknown(setting, value, choices)
