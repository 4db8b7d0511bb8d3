"""RF-DETR by Roboflow: its matcher, and the losses of its classes, boxes and masks, computed by ours.

    from lossforge.integrations import rfdetr

    rfdetr.patch()                            # then RFDETRNano().train(...) as before

Methods of rfdetr's criterion and matcher are replaced, so that both keep their classes and attributes. The layers of the decoder are
matched together.

Tested with rfdetr 1.11.2.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.integrations.transformers_detection import _bce_of_masks, _classes, _dice, _matched
from lossforge.losses import (
    box_iou_loss,
    box_l1_loss,
    generalized_box_iou_loss,
    hungarian_match,
    ia_bce_loss,
    mask_matching_cost,
    matching_cost,
    sigmoid_focal_loss,
    varifocal_loss,
)
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "1.11.2"
Pairs = list[tuple[Tensor, Tensor]]
PADDED = 1e4
"""The cost of a box that only pads an image to a fixed number of them, as rfdetr has it."""


def _targets_of_matches(self: Any, targets: Any, indices: Any) -> Any:
    """Return queries, classes and boxes of the matches. The host waits once for the copy of their indices."""
    from rfdetr.models.criterion import _MatchedTargets

    return _MatchedTargets(*_matched(targets, indices, "labels"))


def _labels(
    self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Tensor, log: bool = True, matched_targets: Any = None
) -> dict[str, Tensor] | str:
    """Return the loss of classes; a padded box makes its query background."""
    counts = self._matched_valid_mask(targets, indices)
    if not self.ia_bce_loss and (self.use_position_supervised_loss or counts is not None):
        return "the loss of classes is position-supervised, or takes no padded boxes"
    logits = outputs["pred_logits"]
    where, classes, boxes = matched_targets or self._get_matched_targets(targets, indices)
    index = _classes(logits, where, classes if counts is None else torch.where(counts > 0, classes, -1), -1)
    if self.ia_bce_loss or self.use_varifocal_loss:
        overlap = 1 - box_iou_loss(outputs["pred_boxes"][where].detach().to(boxes.dtype), boxes, format="cxcywh")
        score = torch.zeros(logits.shape[:2], dtype=overlap.dtype, device=logits.device)
        score[where] = overlap
    if self.ia_bce_loss:
        loss = ia_bce_loss(logits, index, score, self.focal_alpha, 2.0, "sum")
    elif self.use_varifocal_loss:
        loss = varifocal_loss(logits, index, score, 1 - self.focal_alpha, 2.0, reduction="sum")
    else:
        loss = sigmoid_focal_loss(logits, index, self.focal_alpha, 2.0, "sum")
    losses = {"loss_ce": loss / num_boxes}
    if log:
        right = (logits[where].detach().argmax(-1) == classes).to(torch.float32)
        weight = torch.ones_like(right) if counts is None else counts
        losses["class_error"] = 100 - 100 * (right * weight).sum() / weight.sum().clamp(min=1)
    return losses


def _boxes(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Tensor, matched_targets: Any = None) -> dict[str, Tensor]:
    where, _, boxes = matched_targets or self._get_matched_targets(targets, indices)
    counts = self._matched_valid_mask(targets, indices)
    predicted = outputs["pred_boxes"][where].to(boxes.dtype)
    return {
        "loss_bbox": box_l1_loss(predicted, boxes, "sum", weight=counts) / num_boxes,
        "loss_giou": generalized_box_iou_loss(predicted, boxes, "sum", format="cxcywh", weight=counts) / num_boxes,
    }


def _cost(self: Any, logits: Tensor, boxes: Tensor, targets: Any, layers: int = 1) -> Tensor:
    """Return the costs of classes and boxes (Q, layers · T). logits: (layers · B, Q, C)."""
    labels, wanted = (torch.cat([each[name] for each in targets] * layers) for name in ("labels", "boxes"))
    weights = {"cost_class": self.cost_class, "cost_bbox": self.cost_bbox, "cost_giou": self.cost_giou, "alpha": self.focal_alpha}
    cost = matching_cost(logits, boxes, labels, wanted, [len(each["labels"]) for each in targets] * layers, **weights)
    if "valid" in targets[0]:
        cost = cost.masked_fill(~torch.cat([each["valid"] for each in targets] * layers).to(cost.device), PADDED)
    return cost


def _matches(cost: Tensor, targets: Any, group_detr: int, layers: int = 1) -> Pairs:
    if cost.shape[0] % group_detr:
        raise ValueError(f"num_queries ({cost.shape[0]}) must be divisible by group_detr ({group_detr})")
    return hungarian_match(cost.unflatten(0, (group_detr, -1)), [len(each["labels"]) for each in targets] * layers)


def _mask_cost(self: Any, masks: Any, targets: Any) -> Tensor:
    """Return the costs of masks (Q, T) at random points, which are drawn as rfdetr draws them: one set for all images."""
    from rfdetr.models.heads.segmentation import point_sample

    whole = isinstance(masks, Tensor)
    sampled = masks.flatten(0, 1).unsqueeze(1) if whole else masks["spatial_features"]
    count = sampled.shape[-2] * sampled.shape[-1] // self.mask_point_sample_ratio
    points = torch.rand(1, count, 2, device=sampled.device)
    logits = point_sample(sampled, points.expand(len(sampled), -1, -1), align_corners=False)
    if whole:
        logits = logits.squeeze(1).unflatten(0, masks.shape[:2])
    else:
        logits = torch.einsum("bcp,bnc->bnp", logits, masks["query_features"]) + masks["bias"]
    wanted = torch.cat([each["masks"] for each in targets]).to(logits.dtype).unsqueeze(1)
    wanted = point_sample(wanted, points.expand(len(wanted), -1, -1), align_corners=False, mode="nearest").squeeze(1)
    counts = [len(each["masks"]) for each in targets]
    return mask_matching_cost(logits, wanted, counts, cost_mask=self.cost_mask_ce, cost_dice=self.cost_mask_dice)


@torch.no_grad()
def _match(self: Any, outputs: Any, targets: Any, group_detr: int = 1, target_side_safety: Any = None) -> Pairs | str:
    if "pred_keypoints" in outputs and "keypoints" in targets[0]:
        return "keypoints have costs of their own"
    cost = _cost(self, outputs["pred_logits"], outputs["pred_boxes"], targets)
    if "masks" in targets[0]:
        cost = cost + _mask_cost(self, outputs["pred_masks"], targets)
    return _matches(cost, targets, group_detr)


@torch.no_grad()
def _match_layers(self: Any, outputs_list: Any, targets: Any, group_detr: int = 1, target_side_safety: Any = None) -> list[Pairs] | None:
    """Match all layers together, with one copy to the host; None where their matching is by forward, layer by layer."""
    shapes = {each["pred_logits"].shape for each in outputs_list}
    if len(shapes) > 1 or "masks" in targets[0] or ("pred_keypoints" in outputs_list[0] and "keypoints" in targets[0]):
        return None
    logits, boxes = (torch.cat([each[name] for each in outputs_list]) for name in ("pred_logits", "pred_boxes"))
    layers, images = len(outputs_list), len(targets)
    found = _matches(_cost(self, logits, boxes, targets, layers), targets, group_detr, layers)
    return [found[first : first + images] for first in range(0, layers * images, images)]


def patch(force: bool = False) -> Patch:
    """Replace the matcher and the losses of RF-DETR's criterion by ours.

    Args:
        force: go on where rfdetr is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: rfdetr is not installed.
        IntegrationError: rfdetr's names or parameters are not those that were tested. Nothing was replaced.
    """
    given = "(self, outputs, targets, indices, num_boxes"
    matched = "targets, group_detr=1, target_side_safety=None)"
    names: list[tuple[str, Any, str | None]] = [
        ("criterion:SetCriterion._get_matched_targets", _targets_of_matches, "(self, targets, indices)"),
        ("criterion:SetCriterion.loss_labels", _labels, f"{given}, log=True, matched_targets=None)"),
        ("criterion:SetCriterion.loss_boxes", _boxes, f"{given}, matched_targets=None)"),
        ("criterion:sigmoid_ce_loss_jit", _bce_of_masks, None),
        ("criterion:dice_loss_jit", _dice, None),
        ("matcher:HungarianMatcher.forward", _match, f"(self, outputs, {matched}"),
        ("matcher:HungarianMatcher._match_many", _match_layers, f"(self, outputs_list, {matched}"),
    ]
    replacements = [Replacement(f"rfdetr.models.{name}", or_theirs("rfdetr", ours), signature) for name, ours, signature in names]
    return patch_names("rfdetr", TESTED, replacements, force=force)
