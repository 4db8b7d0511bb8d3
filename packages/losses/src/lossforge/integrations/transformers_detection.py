"""transformers' detectors: the matchers and losses of DETR and its successors, and of MaskFormer and Mask2Former, computed by ours.

    from lossforge.integrations import transformers_detection

    transformers_detection.patch()                       # then DetrForObjectDetection, RTDetrForObjectDetection … as before

Methods of transformers' criteria are replaced, so their classes, their attributes and the names in a model's loss_dict stay.

    model.loss_function = transformers_detection.loss_function

computes all layers of one model at once, so that nothing waits for the device. Its loss_dict has the sums over the layers.

Both compare transformers with what was tested, `loss_function` at its first call. Tested with transformers 4.57.6, which has no LW-DETR
and no DEIMv2, 5.0, 5.23 and 5.24.
"""

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses import (
    DenoisingQueries,
    DetrCriterion,
    binary_cross_entropy_with_logits,
    box_iou_loss,
    box_l1_loss,
    cross_entropy,
    dice_loss,
    distribution_focal_loss,
    generalized_box_iou_loss,
    hungarian_match,
    ia_bce_loss,
    kl_div_with_logits,
    mal_loss,
    mask_matching_cost,
    matching_cost,
    sigmoid_focal_loss,
    varifocal_loss,
)
from lossforge.losses.detection.counts import to_device
from lossforge.losses.templates.plain_forms import corners
from lossforge.patch.patching import IntegrationError, Patch, Replacement, once, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "4.57.6 to 5.24"
ClassCost = Literal["focal", "softmax"]
MaskCost = Literal["bce", "focal"]


def _matched(targets: Any, indices: Any, labels: str = "class_labels") -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return where the matched queries are in (B, Q), and the classes and boxes that they were matched with.

    Indices of the host become one tensor, so that the host waits once for their copy, not twice an image.
    """
    classes, boxes = (torch.cat([target[name] for target in targets]) for name in (labels, "boxes"))
    first, parts = 0, []
    for i, (target, (queries, chosen)) in enumerate(zip(targets, indices, strict=True)):
        parts.append(torch.stack([torch.full_like(queries, i), queries, chosen.to(queries) + first]))
        first += len(target["boxes"])
    image, query, box = torch.cat(parts, 1).to(boxes.device)
    return (image, query), classes[box], boxes[box]


def _classes(logits: Tensor, where: tuple[Tensor, Tensor], classes: Tensor, background: int) -> Tensor:
    """Return the class of each query (B, Q)."""
    index = torch.full(logits.shape[:2], background, dtype=torch.int64, device=logits.device)
    index[where] = classes.to(torch.int64)
    return index


def _labels_of_softmax(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any) -> dict[str, Any]:
    logits = outputs["logits"]
    where, classes, _ = _matched(targets, indices)
    index = _classes(logits, where, classes, self.num_classes)
    return {"loss_ce": cross_entropy(logits.flatten(0, 1), index.flatten(), self.empty_weight)}


def _labels_of_focal(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any) -> dict[str, Tensor]:
    logits = outputs["logits"]
    where, classes, _ = _matched(targets, indices)
    index = _classes(logits, where, classes, -1)
    return {"loss_ce": sigmoid_focal_loss(logits, index, self.focal_alpha, 2.0, "sum") / num_boxes}


def _matched_quality(outputs: Any, targets: Any, indices: Any) -> tuple[Tensor, Tensor]:
    """Return the class of each query (B, Q), -1 of those without a box, and the IoU of matched ones, else 0."""
    logits = outputs["logits"]
    where, classes, boxes = _matched(targets, indices)
    overlap = 1 - box_iou_loss(outputs["pred_boxes"][where].detach().to(boxes.dtype), boxes, format="cxcywh")
    score = torch.zeros(logits.shape[:2], dtype=overlap.dtype, device=logits.device)
    score[where] = overlap
    return _classes(logits, where, classes, -1), score


def _labels_of_varifocal(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any, log: bool = True) -> dict[str, Tensor]:
    index, score = _matched_quality(outputs, targets, indices)
    rule: dict[str, Any] = {"hold_weight": True, "positive_at_zero": True, "reduction": "sum"}
    return {"loss_vfl": varifocal_loss(outputs["logits"], index, score, self.alpha, self.gamma, **rule) / num_boxes}


def _labels_of_mal(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any) -> dict[str, Tensor]:
    index, score = _matched_quality(outputs, targets, indices)
    alpha = 1.0 if self.mal_alpha is None else self.mal_alpha
    return {"loss_mal": mal_loss(outputs["logits"], index, score, self.gamma, alpha, "sum") / num_boxes}


def _labels_of_ia_bce(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any) -> dict[str, Tensor]:
    index, score = _matched_quality(outputs, targets, indices)
    return {"loss_ce": ia_bce_loss(outputs["logits"], index, score, self.focal_alpha, 2.0, "sum") / num_boxes}


def _boxes(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any) -> dict[str, Tensor]:
    where, _, boxes = _matched(targets, indices)
    predicted = outputs["pred_boxes"][where].to(boxes.dtype)
    return {
        "loss_bbox": box_l1_loss(predicted, boxes, "sum") / num_boxes,
        "loss_giou": generalized_box_iou_loss(predicted, boxes, "sum", format="cxcywh") / num_boxes,
    }


def _distribution(
    self: Any,
    pred: Tensor,
    label: Tensor,
    weight_right: Tensor,
    weight_left: Tensor,
    weight: Tensor | None = None,
    reduction: Any = "sum",
    avg_factor: Any = None,
) -> Tensor:
    """Return D-FINE's loss of sides. Its two weights sum to 1, so that the target lies at label + weight_right."""
    target = label.long() + weight_right.reshape(-1)
    weight = None if weight is None else weight.float()
    if avg_factor is not None:
        return distribution_focal_loss(pred, target, "sum", weight=weight) / avg_factor
    losses = distribution_focal_loss(pred, target, "none", weight=weight)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _local(self: Any, outputs: Any, targets: Any, indices: Any, num_boxes: Any, T: float = 5) -> dict[str, Tensor]:
    """Return D-FINE's losses of distributions: of matched sides, and of all sides by the last layer's (decoupled distillation, DDF).

    DDF is the sum of two means of w T² KL, over sides of matched queries and over the others, weighted by the roots of their numbers. One
    weight a side says so, and equal distributions, of the last layer itself, have the loss 0: nothing waits for the device.
    """
    if "pred_corners" not in outputs:
        return {}
    from transformers.loss.loss_d_fine import bbox2distance

    where, _, boxes = _matched(targets, indices)
    student, bins = outputs["pred_corners"], self.max_num_bins + 1
    with torch.no_grad():
        points = outputs["ref_points"][where]
        self.fgl_targets = bbox2distance(points, corners(boxes), self.max_num_bins, self.reg_scale, self.up)
        overlap = 1 - box_iou_loss(outputs["pred_boxes"][where].to(boxes.dtype), boxes, format="cxcywh")
        weight = outputs["teacher_logits"].sigmoid().amax(-1)
        weight[where] = overlap.to(weight.dtype)
        matched = torch.zeros_like(weight, dtype=torch.bool)
        matched[where] = True
        number = 4 * torch.stack([matched.sum(), (~matched).sum()])
        share = (number / len(matched)).sqrt()  # of a side's mean
        self.num_pos, self.num_neg = share
        share = share / share.sum() / number.clamp(min=1)
        weight = weight * torch.where(matched, share[0], share[1])
    sides, right, left = self.fgl_targets
    fine = self.unimodal_distribution_focal_loss(
        student[where].reshape(-1, bins), sides, right, left, overlap.repeat_interleave(4), avg_factor=num_boxes
    )
    teacher = outputs["teacher_corners"].detach().reshape(-1, bins)
    decoupled = kl_div_with_logits(student.reshape(-1, bins), teacher, T, "sum", weight=weight.reshape(-1, 1).expand(-1, 4).flatten())
    return {"loss_fgl": fine, "loss_ddf": decoupled}


def _match(class_cost: ClassCost, self: Any, outputs: Any, targets: Any, group_detr: int = 1) -> list[tuple[Tensor, Tensor]]:
    counts = [len(target["class_labels"]) for target in targets]
    labels, boxes = (torch.cat([target[name] for target in targets]) for name in ("class_labels", "boxes"))
    cost = matching_cost(
        outputs["logits"],
        outputs["pred_boxes"],
        labels,
        boxes,
        counts,
        class_cost=class_cost,
        cost_class=self.class_cost,
        cost_bbox=self.bbox_cost,
        cost_giou=self.giou_cost,
        alpha=getattr(self, "alpha", 0.25),
        gamma=getattr(self, "gamma", 2.0),
    )
    return hungarian_match(cost.unflatten(0, (group_detr, -1)), counts)


def _match_by_either(self: Any, outputs: Any, targets: Any) -> list[tuple[Tensor, Tensor]]:
    return _match("focal" if self.use_focal_loss else "softmax", self, outputs, targets)


def _match_masks(
    self: Any, classes: Tensor, class_labels: Sequence[Tensor], masks: Tensor, mask_labels: Tensor, mask_cost: MaskCost
) -> list[tuple[Tensor, Tensor]]:
    """Match masks (B, Q, P) with those of all images (T, P) by the softmax cost of their classes and the masks' own, with one copy."""
    counts = [len(labels) for labels in class_labels]
    cost = matching_cost(classes, None, torch.cat(list(class_labels)), None, counts, class_cost="softmax", cost_class=self.cost_class)
    weights = {"cost_mask": self.cost_mask, "cost_dice": self.cost_dice}
    return hungarian_match(cost + mask_matching_cost(masks, mask_labels, counts, mask_cost=mask_cost, **weights), counts)


def _match_sampled_masks(
    self: Any, masks_queries_logits: Tensor, class_queries_logits: Tensor, mask_labels: Any, class_labels: Any
) -> list[tuple[Tensor, Tensor]]:
    """Match at Mask2Former's random points, which are drawn as there: one set an image."""
    from transformers.models.mask2former.modeling_mask2former import sample_point

    predicted: list[Tensor] = []
    wanted: list[Tensor] = []
    for logits, masks in zip(masks_queries_logits, mask_labels, strict=True):
        points = torch.rand(1, self.num_points, 2, device=logits.device)
        for each, sampled in ((logits, predicted), (masks.to(logits), wanted)):
            sampled.append(sample_point(each[:, None], points.expand(len(each), -1, -1), align_corners=False).squeeze(1))
    return _match_masks(self, class_queries_logits, class_labels, torch.stack(predicted), torch.cat(wanted), "bce")


def _match_masks_of_pixels(
    self: Any, masks_queries_logits: Tensor, class_queries_logits: Tensor, mask_labels: Any, class_labels: Any
) -> list[tuple[Tensor, Tensor]]:
    """Match at every pixel of MaskFormer's predictions."""
    size = masks_queries_logits.shape[-2:]
    wanted = torch.cat([F.interpolate(masks[:, None], size=size, mode="nearest")[:, 0] for masks in mask_labels])
    return _match_masks(self, class_queries_logits, class_labels, masks_queries_logits, wanted, "focal")


def _focal_of_masks(inputs: Tensor, targets: Tensor, num_boxes: Any, alpha: float = 0.25, gamma: float = 2) -> Tensor | str:
    if inputs.ndim < 2 or targets.shape != inputs.shape or not targets.is_floating_point() or targets.requires_grad:
        return "the targets are not numbers of the logits' shape, or require grad"
    return sigmoid_focal_loss(inputs, targets, alpha, gamma, "sum") / inputs.shape[1] / num_boxes


def _dice(inputs: Tensor, labels: Tensor, num_masks: Any) -> Tensor | str:
    if labels.shape != inputs.flatten(1).shape or labels.requires_grad:
        return "the masks are not of the logits' shape, or require grad"
    one_class = inputs.flatten(1).unsqueeze(1), labels.to(inputs.dtype).unsqueeze(1)
    return dice_loss(*one_class, activation="sigmoid", smooth_nr=1.0, smooth_dr=1.0, reduction="sum") / num_masks


def _bce_of_masks(inputs: Tensor, labels: Tensor, num_masks: Any) -> Tensor | str:
    if inputs.ndim < 2 or labels.shape != inputs.shape or labels.requires_grad:
        return "the masks are not of the logits' shape, or require grad"
    return binary_cross_entropy_with_logits(inputs, labels, reduction="sum") / inputs.shape[1] / num_masks


def _dice_of_boxes(inputs: Tensor, targets: Tensor, num_boxes: Any) -> Tensor | str:
    return _dice(inputs, targets, num_boxes)


CLASS_LOSSES: dict[str, Any] = {
    "detr": "cross_entropy",
    **dict.fromkeys(("conditional_detr", "deformable_detr"), "focal"),
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), "varifocal"),
    "lw_detr": "ia_bce",
}
"""The loss of classes of each of transformers' detectors, by config.model_type."""


def loss_function(
    logits: Tensor,
    labels: Sequence[Mapping[str, Tensor]],
    device: Any,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    enc_outputs_class: Tensor | None = None,
    enc_outputs_coord: Tensor | None = None,
    *,
    enc_topk_logits: Tensor | None = None,
    enc_topk_bboxes: Tensor | None = None,
    denoising_meta_values: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]] | None]:
    """Loss of transformers' detectors by `DetrCriterion`: `model.loss_function = transformers_detection.loss_function`.

    For DETR, Conditional and Deformable DETR, RT-DETR and LW-DETR, with the options of the model's config. The models call it.

    Args:
        logits: (B, Q, C), of the last layer.
        labels: of each image "class_labels" (N,) and "boxes" (N, 4).
        device: of the model.
        pred_boxes: (B, Q, 4), of the last layer.
        config: the model's.
        outputs_class: logits of all layers, (L, B, Q, C), of RT-DETR (B, L, Q, C).
        outputs_coord: boxes of all layers.
        enc_outputs_class: logits of LW-DETR's encoder.
        enc_outputs_coord: boxes of LW-DETR's encoder.
        enc_topk_logits: logits of the queries that RT-DETR selects.
        enc_topk_bboxes: boxes of the queries that RT-DETR selects.
        denoising_meta_values: which of RT-DETR's queries are made from boxes with noise.

    Returns:
        the loss; its parts summed over the layers, "loss_class", "loss_bbox" and "loss_giou"; and the auxiliary layers' predictions.

    Raises:
        IntegrationError: transformers' names or parameters are not those that were tested, or its RT-DETR has another loss.
        ValueError: the model is another one, or its config has use_focal_loss=False.
    """
    _check()
    kind = config.model_type
    if kind not in CLASS_LOSSES:
        raise ValueError(f"config.model_type must be one of {', '.join(map(repr, CLASS_LOSSES))}, got {kind!r}")
    counts, denoising, noisy = [len(each["class_labels"]) for each in labels], None, 0
    if denoising_meta_values is not None:
        noisy = denoising_meta_values["dn_num_split"][0]
        if not _leaves_noise_out():
            raise IntegrationError(
                "the loss of RT-DETR's last layer counts denoising queries in this version of transformers, and ours does not: use patch() "
                "in the place of loss_function, or a newer transformers, such as 5.23"
            )
    others: list[tuple[Tensor, Tensor]] = []
    if config.auxiliary_loss and outputs_class is not None and outputs_coord is not None:
        if kind.startswith("rt_detr"):
            outputs_class, outputs_coord = outputs_class.transpose(0, 1), outputs_coord.transpose(0, 1)
        if denoising_meta_values is not None:
            groups = denoising_meta_values["dn_num_group"]
            box = _boxes_of_noise(denoising_meta_values["dn_positive_idx"], counts, groups, noisy)
            denoising = DenoisingQueries(outputs_class[:, :, :noisy], outputs_coord[:, :, :noisy], box, groups)
            outputs_class, outputs_coord = outputs_class[:, :, noisy:], outputs_coord[:, :, noisy:]
        others += zip(outputs_class[:-1], outputs_coord[:-1], strict=True)
        if enc_topk_logits is not None and enc_topk_bboxes is not None:
            others.append((enc_topk_logits, enc_topk_bboxes))
    layers = [*others, (logits[:, noisy:], pred_boxes[:, noisy:])]
    if enc_outputs_class is not None and enc_outputs_coord is not None:
        layers.append((enc_outputs_class, enc_outputs_coord))
    every_logits, every_boxes = (torch.stack(each) for each in zip(*layers, strict=True))
    classes, boxes = (torch.cat([each[name] for each in labels]) for name in ("class_labels", "boxes"))
    losses = _criterion(config, every_logits)(
        every_logits, every_boxes, classes, boxes, counts, denoising=denoising, normalizer=_mean_of_processes(kind, len(classes), device)
    )
    auxiliary = [{"logits": x, "pred_boxes": b} for x, b in others] if config.auxiliary_loss else None
    return sum(losses.values(), logits.new_zeros(())), losses, auxiliary


@torch.compiler.assume_constant_result
@functools.cache
def _leaves_noise_out() -> bool:
    """Return whether transformers' RT-DETR takes the denoising queries from its last layer, as it does from the others."""
    from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

    return "torch.split(logits," in inspect.getsource(RTDetrForObjectDetectionLoss)


@torch.compiler.assume_constant_result
@functools.cache
def _counts_by_torch() -> bool:
    """Return whether transformers counts LW-DETR's boxes over torch's processes; accelerate's before."""
    from transformers.loss import loss_lw_detr

    return hasattr(loss_lw_detr, "dist")


def _criterion(config: Any, logits: Tensor) -> DetrCriterion:
    """Return the criterion of a model's config."""
    class_loss = CLASS_LOSSES[config.model_type]
    if class_loss != "varifocal":
        costs = {"cost_class": config.class_cost, "cost_bbox": config.bbox_cost, "cost_giou": config.giou_cost}
        coefficients = {"bbox_coef": config.bbox_loss_coefficient, "giou_coef": config.giou_loss_coefficient}
        if class_loss == "cross_entropy":
            return DetrCriterion(class_loss, background_weight=config.eos_coefficient, **costs, **coefficients)
        if class_loss == "focal":
            return DetrCriterion(class_loss, alpha=config.focal_alpha, **costs, **coefficients)
        coefficients["class_coef"] = getattr(config, "class_loss_coefficient", 1.0)  # transformers 5.0 has none
        groups = config.group_detr if logits.shape[2] == config.num_queries * config.group_detr else 1  # else of evaluation
        return DetrCriterion(class_loss, alpha=config.focal_alpha, num_groups=groups, **costs, **coefficients)
    if not config.use_focal_loss:
        raise ValueError("config.use_focal_loss must be True, got False, a matching by the softmax of the classes")
    return DetrCriterion(
        class_loss,
        class_coef=config.weight_loss_vfl,
        bbox_coef=config.weight_loss_bbox,
        giou_coef=config.weight_loss_giou,
        cost_class=config.matcher_class_cost,
        cost_bbox=config.matcher_bbox_cost,
        cost_giou=config.matcher_giou_cost,
        cost_alpha=config.matcher_alpha,
        cost_gamma=config.matcher_gamma,
        alpha=config.focal_loss_alpha,
        gamma=config.focal_loss_gamma,
    )


def _boxes_of_noise(places: Sequence[Tensor], counts: Sequence[int], groups: int, queries: int) -> Tensor:
    """Return the box of each of RT-DETR's denoising queries (B, D). places: of each image those of its boxes, of all groups."""
    start, box, first = [], [], 0
    for image, count in enumerate(counts):
        start += [image * queries] * (count * groups)
        box += [*range(first, first + count)] * groups
        first += count
    of_all = torch.cat([place for place, count in zip(places, counts, strict=True) if count])
    starts, boxes = to_device(torch.tensor([start, box], device="cpu"), of_all.device)
    found = torch.full((len(counts) * queries,), -1, device=of_all.device)
    return found.index_put((of_all + starts,), boxes).view(len(counts), queries)


def _mean_of_processes(kind: str, total: int, device: Any) -> float | Tensor:
    """Return what transformers' criteria divide by: RT-DETR's the boxes of this process, the others' a number of all processes' boxes."""
    number = float(total)
    by_torch = kind == "lw_detr" and _counts_by_torch()
    if by_torch and dist.is_available() and dist.is_initialized():
        shared = torch.full((), number, device=device)
        dist.all_reduce(shared)
        return shared / dist.get_world_size()
    if not by_torch and not kind.startswith("rt_detr") and "accelerate.state" in sys.modules:
        from accelerate import PartialState
        from accelerate.utils import reduce

        if PartialState._shared_state:
            shared = reduce(torch.full((), number, device=device))
            return shared / PartialState().num_processes
    return number


OF_CRITERION = "(self, outputs, targets, indices, num_boxes)"
OF_MATCHER = "(self, outputs, targets)"
OF_GROUPS = "(self, outputs, targets, group_detr)"
OF_MASKS = "(self, masks_queries_logits, class_queries_logits, mask_labels, class_labels)"
DISTRIBUTED = "(self, pred, label, weight_right, weight_left, weight=None, reduction='sum', avg_factor=None)"
NAMES: dict[str, tuple[Any, str]] = {
    "loss.loss_for_object_detection:HungarianMatcher.forward": (functools.partial(_match, "softmax"), OF_MATCHER),
    "loss.loss_for_object_detection:ImageLoss.loss_labels": (_labels_of_softmax, OF_CRITERION),
    "loss.loss_for_object_detection:ImageLoss.loss_boxes": (_boxes, OF_CRITERION),
    "loss.loss_for_object_detection:sigmoid_focal_loss": (_focal_of_masks, "(inputs, targets, num_boxes, alpha=0.25, gamma=2)"),
    "loss.loss_for_object_detection:dice_loss": (_dice_of_boxes, "(inputs, targets, num_boxes)"),
    "loss.loss_deformable_detr:DeformableDetrImageLoss.loss_labels": (_labels_of_focal, OF_CRITERION),
    "loss.loss_deformable_detr:DeformableDetrHungarianMatcher.forward": (functools.partial(_match, "focal"), OF_MATCHER),
    "loss.loss_rt_detr:RTDetrLoss.loss_labels_vfl": (_labels_of_varifocal, OF_CRITERION[:-1] + ", log=True)"),
    "loss.loss_rt_detr:RTDetrLoss.loss_boxes": (_boxes, OF_CRITERION),
    "loss.loss_rt_detr:RTDetrHungarianMatcher.forward": (_match_by_either, OF_MATCHER),
    "loss.loss_deimv2:Deimv2Loss.loss_labels_mal": (_labels_of_mal, OF_CRITERION),
    "loss.loss_lw_detr:LwDetrHungarianMatcher.forward": (functools.partial(_match, "focal"), OF_GROUPS),
    "loss.loss_lw_detr:LwDetrImageLoss.loss_labels": (_labels_of_ia_bce, OF_CRITERION),
    "loss.loss_lw_detr:LwDetrImageLoss.loss_boxes": (_boxes, OF_CRITERION),
    "loss.loss_d_fine:DFineLoss.loss_local": (_local, OF_CRITERION[:-1] + ", T=5)"),
    "loss.loss_d_fine:DFineLoss.unimodal_distribution_focal_loss": (_distribution, DISTRIBUTED),
    "models.maskformer.modeling_maskformer:MaskFormerHungarianMatcher.forward": (_match_masks_of_pixels, OF_MASKS),
    "models.mask2former.modeling_mask2former:Mask2FormerHungarianMatcher.forward": (_match_sampled_masks, OF_MASKS),
    "models.mask2former.modeling_mask2former:dice_loss": (_dice, "(inputs, labels, num_masks)"),
    "models.mask2former.modeling_mask2former:sigmoid_cross_entropy_loss": (_bce_of_masks, "(inputs, labels, num_masks)"),
}
SINCE_5 = ("loss.loss_deimv2:", "loss.loss_lw_detr:")
"""Modules that transformers 4.57 lacks."""
REPLACED = [
    Replacement(f"transformers.{name}", or_theirs("transformers", ours), signature, optional=name.startswith(SINCE_5))
    for name, (ours, signature) in NAMES.items()
]
_check = once("transformers", TESTED, REPLACED)


def patch(force: bool = False) -> Patch:
    """Replace the matchers and losses of transformers' detectors by ours.

    Args:
        force: go on where transformers is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        IntegrationError: transformers' names or parameters are not those that were tested. Nothing was replaced.
    """
    return patch_names("transformers", TESTED, REPLACED, force=force)
