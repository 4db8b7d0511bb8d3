"""ultralytics: the box, class and DFL losses of YOLO, and its task-aligned assignment, computed by ours.

    from lossforge.integrations import ultralytics

    ultralytics.patch()                       # then YOLO("yolo11n.yaml").train(...) as before

Methods of ultralytics' classes are replaced, so criteria keep their classes and attributes.

Tested with ultralytics 8.4.183 and 8.4.190.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lossforge.losses import (
    binary_cross_entropy_with_logits,
    complete_box_iou_loss,
    distribution_focal_loss,
    l1_loss,
    task_aligned_assign,
)
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "8.4.183 to 8.4.190"


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """torch's binary cross entropy, computed by ours."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits, in float32 under autocast, as torch does."""
        if torch.is_autocast_enabled(input.device.type):
            input, target = input.float(), target.float()
        given: dict[str, Any] = {name: getattr(self, name) for name in ("weight", "reduction", "pos_weight")}
        return binary_cross_entropy_with_logits(input, target, **given)


def _with_our_bce(own: Any) -> Any:
    """Return a constructor of a criterion whose class loss is ours, and which says whether its boxes alone depend on the foreground."""

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from ultralytics.utils.loss import v8DetectionLoss

        own(self, *args, **kwargs)
        if type(self.bce) is nn.BCEWithLogitsLoss:
            self.bce.__class__ = BCEWithLogitsLoss
        self.assigner.for_boxes_alone = type(self) is v8DetectionLoss

    return init


def _assign(
    self: Any, pd_scores: Tensor, pd_bboxes: Tensor, anc_points: Tensor, gt_labels: Tensor, gt_bboxes: Tensor, mask_gt: Tensor, **extra: Any
) -> Any:
    """Return ultralytics' targets. An anchor of alignment 0 is background here; there it is foreground of weight 0."""
    from ultralytics.utils.tal import TaskAlignedAssigner

    if type(self) is not TaskAlignedAssigner or extra:
        return "masks, keypoints and rotated boxes have an assignment of their own"
    if not getattr(self, "for_boxes_alone", False):
        return "masks and keypoints count anchors of alignment 0, which ours never assigns"
    if not gt_bboxes.shape[1]:
        return "no image of the batch has a box"
    self.bs, self.n_max_boxes = pd_scores.shape[0], gt_bboxes.shape[1]
    found = task_aligned_assign(
        pd_scores,
        pd_bboxes,
        anc_points,
        gt_labels.long(),
        gt_bboxes,
        mask_gt,
        topk=min(self.topk, pd_scores.shape[1]),
        topk2=None if self.topk2 == self.topk else self.topk2,
        alpha=self.alpha,
        beta=self.beta,
        eps=self.eps,
        min_side=self.stride_val,
        dense=False,
    )
    labels = found.labels.clamp(min=0)
    scores = torch.zeros_like(pd_scores, dtype=found.quality.dtype)  # float32, also where scores are half precision
    scores.scatter_(2, labels.unsqueeze(2), found.quality.unsqueeze(2))
    return labels, found.boxes, scores, found.foreground, found.box_index.clamp(min=0)


def _box_loss(
    self: Any,
    pred_dist: Tensor,
    pred_bboxes: Tensor,
    anchor_points: Tensor,
    target_bboxes: Tensor,
    target_scores: Tensor,
    target_scores_sum: Tensor,
    fg_mask: Tensor,
    imgsz: Tensor,
    stride: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sums over the foreground of CIoU and of DFL (or L1) losses, weighted by the targets, over target_scores_sum."""
    image, anchor = fg_mask.nonzero(as_tuple=True)
    boxes, sides, points = target_bboxes[image, anchor], pred_dist[image, anchor], anchor_points[anchor]
    weight = target_scores[image, anchor].sum(-1).to(boxes.dtype)
    predicted = pred_bboxes[image, anchor].to(boxes.dtype)
    overlap = complete_box_iou_loss(predicted, boxes, "sum", weight=weight)
    distances = torch.cat((points - boxes[:, :2], boxes[:, 2:] - points), 1)
    of_sides = weight[:, None].expand(-1, 4) / 4
    if self.dfl_loss:
        bins = self.dfl_loss.reg_max
        distances = distances.clamp(0, bins - 1 - 0.01)
        spread = distribution_focal_loss(sides.view(-1, 4, bins), distances, "sum", weight=of_sides)
    else:
        scale = stride[anchor] / imgsz[[1, 0, 1, 0]]
        spread = l1_loss(sides * scale, distances.to(sides.dtype) * scale, reduction="sum", weight=of_sides)
    return overlap / target_scores_sum, spread / target_scores_sum


def _dfl(self: Any, pred_dist: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of the four sides of each box, as (N, 1)."""
    target = target.clamp_(0, self.reg_max - 1 - 0.01)
    losses = distribution_focal_loss(pred_dist.view(*target.shape, self.reg_max), target, "none")
    return losses.mean(-1, keepdim=True)


def patch(force: bool = False) -> Patch:
    """Replace ultralytics' losses and its assignment by ours.

    Args:
        force: go on where ultralytics is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: ultralytics is not installed.
        IntegrationError: ultralytics' names or parameters are not those that were tested. Nothing was replaced.
    """
    boxes = "(self, pred_dist, pred_bboxes, anchor_points, target_bboxes, target_scores, target_scores_sum, fg_mask, imgsz, stride)"
    assigner = "(self, pd_scores, pd_bboxes, anc_points, gt_labels, gt_bboxes, mask_gt, **extra)"
    replacements = [
        Replacement("ultralytics.utils.loss:v8DetectionLoss.__init__", _with_our_bce, "(self, model, tal_topk=10, tal_topk2=None)"),
        Replacement("ultralytics.utils.loss:BboxLoss.forward", or_theirs("ultralytics", _box_loss), boxes),
        Replacement("ultralytics.utils.loss:DFLoss.__call__", or_theirs("ultralytics", _dfl), "(self, pred_dist, target)"),
        Replacement("ultralytics.utils.tal:TaskAlignedAssigner.forward", or_theirs("ultralytics", _assign), assigner),
    ]
    return patch_names("ultralytics", TESTED, replacements, force=force)
