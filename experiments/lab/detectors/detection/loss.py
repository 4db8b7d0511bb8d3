"""The loss of a dense detector, chosen by the names of its parts."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lab.base.errors import unknown
from lab.config.loss_settings import BOX_LOSSES, ORIENTED_LOSSES
from lab.detectors.detection import LOSSES as DETECTION_LOSSES
from lab.detectors.detection.types import Coder, DetectorOutput, Matched
from lossforge.losses.registry import LOSSES, Loss

SCORED = ("quality_focal", "varifocal", "mal", "ia_bce")
"""Losses whose target of a positive is the IoU of its box."""
ENCODED = {"l1": "box_l1", "smooth_l1": "box_smooth_l1"}
"""Losses of encoded boxes, with their names in the registry."""
DECODED = tuple(name for name in BOX_LOSSES if name not in ENCODED)
IMPLEMENTATIONS = ("lossforge", "torch")


class DetectionLoss:
    """Losses of classes, boxes and, if the detector has it, centerness.

    Kernels take class indices directly, with one launch over the complete batch for each part; nothing waits for the device.

    Args:
        name: the classification loss, one of DETECTION_LOSSES, or a custom element-wise loss.
        box_loss: one of ENCODED, DECODED or ORIENTED_LOSSES, or a custom loss of pairs of boxes.
        hyper, box_hyper: the losses' hyper-parameters, by the registry's names.
        box_weight: factor of the boxes' loss.
        side_weight: factor of the loss of the sides' distributions, if the detector has them.
        l1_weight: factor of an L1 loss of the encoded boxes beside the boxes' loss.
        implementation: "torch" computes in plain torch, for comparison.

    Raises:
        UserError: a name is unknown.
    """

    def __init__(
        self,
        name: str | Loss = "focal",
        box_loss: str | Loss = "giou",
        *,
        hyper: Mapping[str, Any] | None = None,
        box_hyper: Mapping[str, Any] | None = None,
        box_weight: float = 1.0,
        side_weight: float = 0.25,
        l1_weight: float = 0.0,
        implementation: str = "lossforge",
    ) -> None:
        _check("loss.implementation", implementation, IMPLEMENTATIONS)
        self.classes = _loss("loss", name, DETECTION_LOSSES)
        self.boxes = _loss("box_loss", box_loss, (*ENCODED, *DECODED, *ORIENTED_LOSSES))
        self.hyper, self.box_hyper, self.box_weight = dict(hyper or {}), dict(box_hyper or {}), box_weight
        self.side_weight, self.l1_weight = side_weight, l1_weight
        for key in self.hyper:
            _check("loss.hyper", key, tuple(self.classes.hyper))
        for key in self.box_hyper:
            _check("box_loss.hyper", key, tuple(self.boxes.hyper))
        self.scored, self.encoded = self.classes.name in SCORED, self.boxes.name in ENCODED.values()
        self.plain = implementation == "torch"

    def __call__(self, output: DetectorOutput, matched: Matched, coder: Coder, normalizer: Tensor) -> dict[str, Tensor]:
        """Return 0-d losses "classification" and "boxes", and "centerness", "sides" or "l1" where the detector has them.

        Each is a sum over the batch, divided by `normalizer` ().
        """
        score = matched.scores
        if self.scored and score is None:
            with torch.no_grad():  # the IoU of each positive's predicted box with its target, (N, A)
                score = overlap(coder.decode(_of_positives(output.regression, matched), matched.anchors), matched.boxes)
        of_classes: dict[str, Any] = {} if score is None else {"score": score}
        if matched.weight is not None:
            of_classes["weight"] = matched.weight[..., None]
        total: dict[str, Any] = {"reduction": "sum", "normalizer": normalizer}
        deltas = _of_positives(output.regression, matched)
        weight = matched.positive.float() if matched.scores is None else matched.scores
        weight = weight if matched.weight is None else weight * matched.weight
        encoded = coder.encode(matched.anchors, matched.boxes)
        first, second = (deltas, encoded) if self.encoded else (coder.decode(deltas, matched.anchors), matched.boxes)
        losses = {
            "classification": self._of(self.classes)(output.logits, matched.labels, **self.hyper, **of_classes, **total),
            "boxes": self.box_weight * self._of(self.boxes)(first, second, weight=weight, **self.box_hyper, **total),
        }
        if output.centerness is not None:
            target = centerness(encoded)
            logits = torch.where(matched.positive, _wide(output.centerness), 0.0)
            losses["centerness"] = self._of(LOSSES["bce"])(logits, target, weight=weight, **total)
        if self.l1_weight:
            losses["l1"] = self.l1_weight * self._of(LOSSES["box_l1"])(deltas, encoded, weight=weight, **total)
        if output.sides is not None:
            distance = encoded.clamp(0, output.sides.shape[-1] - 1)
            sides = torch.where(matched.positive[..., None, None], output.sides, 0.0)
            of_sides = self._of(LOSSES["distribution_focal"])(sides, distance, weight=weight[..., None], **total)
            losses["sides"] = self.side_weight * of_sides
        return losses

    def _of(self, loss: Loss) -> Callable[..., Tensor]:
        """Return the loss's function, or its plain-torch form where no kernels are wanted."""
        return loss.reference if self.plain else loss.function


def _of_positives(regression: Tensor, matched: Matched) -> Tensor:
    """Return deltas (N, A, 4), 0 where not positive, because values there must not count, even if they overflow."""
    return torch.where(matched.positive[..., None], _wide(regression), 0.0)


def _wide(outputs: Tensor) -> Tensor:
    """Return the outputs as float32, or as float64 where they have it."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the IoU of pairs of boxes (..., 4), (...).

    For boxes that do not overlap it is exactly 0, unlike 1 - box_iou_loss; varifocal loss then takes the class as a negative by default.
    """
    corner, opposite = torch.maximum(boxes[..., :2], others[..., :2]), torch.minimum(boxes[..., 2:], others[..., 2:])
    intersection = (opposite - corner).clamp(min=0).prod(-1)
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1) + (others[..., 2:] - others[..., :2]).prod(-1)
    return intersection / (areas - intersection).clamp(min=1e-7)


def centerness(distances: Tensor) -> Tensor:
    """Return how near each point is to its box's centre, 1 in the centre and 0 at an edge: (...) from distances to the edges (..., 4)."""
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
