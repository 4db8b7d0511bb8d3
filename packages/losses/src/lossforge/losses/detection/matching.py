"""The costs of giving each box or mask of a batch to each query of its image, as DETR has them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.assignment.calls import Weights
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import BoxFormat
from lossforge.losses.base.state import KERNEL_DTYPES, kernels_apply, without_autocast
from lossforge.losses.detection.counts import counts_on_device, counts_on_host
from lossforge.losses.engine.operators import define, launched
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.boxes import FORMATS
from lossforge.losses.templates.plain_forms import accurate, corners

__all__ = ["mask_matching_cost", "matching_cost"]

CLASS_COSTS = ("focal", "softmax")
MASK_COSTS = ("bce", "focal")


@checks.named
def matching_cost(
    logits: Tensor,
    boxes: Tensor | None,
    labels: Tensor,
    target_boxes: Tensor | None,
    counts: Sequence[int] | Tensor,
    *,
    class_cost: Literal["focal", "softmax"] = "focal",
    cost_class: float = 2.0,
    cost_bbox: float = 5.0,
    cost_giou: float = 2.0,
    alpha: float = 0.25,
    gamma: float = 2.0,
    format: BoxFormat = "cxcywh",
) -> Tensor:
    """Cost of giving each box to each query of its image, as DETR (Carion et al. 2020, arXiv 2005.12872) and Deformable DETR have it.

    C = c₁ C_class + c₂ Σ |b - b̂| - c₃ GIoU with C_class of the box's class: α (1 - p)^γ (-ln p) - (1 - α) p^γ (-ln(1 - p)), p = σ(x), or
    -p with class_cost="softmax", p the softmax over the classes. One launch computes the pairs of a whole batch, and no pair of one image's
    query with another's box; the softmax is a launch before it.

    Deformable DETR, DINO and RT-DETR take the focal cost. DETR takes the softmax, and c₁ = 1 with it; so do MaskFormer and Mask2Former,
    without boxes, beside `mask_matching_cost`.

    The layers of a decoder can share that launch, and that of `hungarian_assign`: stack their predictions along the batch, and repeat
    labels, boxes and counts. `DetrCriterion` does.

    Args:
        logits: (B, Q, C), before the sigmoid or softmax, of any floating dtype and strides. DETR's last class is background.
        boxes: (B, Q, 4), predicted; None where classes alone count, as target_boxes is then.
        labels: (T,), the classes of all images' boxes one after the other, of any integer dtype. On CPU a class that does not exist raises.
            On CUDA its costs are nan.
        target_boxes: (T, 4), the boxes; or None.
        counts: how many boxes each image has: B numbers, or a tensor (B,) on the device of the logits, whose sum is not checked.
        class_cost: "focal" or "softmax".
        cost_class: c₁, the weight of the class.
        cost_bbox: c₂, the weight of the distance, of boxes as `format` has them.
        cost_giou: c₃, the weight of the overlap.
        alpha: α in [0, 1], of the focal cost.
        gamma: γ of at least 0, of the focal cost.
        format: of all boxes: "cxcywh" (centre, width, height), or "xyxy". DETR's are fractions of the image.

    Returns:
        (Q, T), float32 (float64 for float64), without gradient: column t has the costs of box t for the queries of its image.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hungarian_match, matching_cost
        >>> logits, boxes, counts = torch.randn(2, 100, 7), torch.rand(2, 100, 4), [3, 1]
        >>> cost = matching_cost(logits, boxes, torch.tensor([0, 4, 6, 2]), torch.rand(4, 4), counts)
        >>> (queries, targets), _ = hungarian_match(cost, counts)
    """
    checks.whole("logits", logits)
    checks.fits("logits", logits, logits.ndim == 3 and logits.shape[2] > 0, "have shape (B, Q, C)")
    images, queries, classes = logits.shape
    checks.integer("labels", labels)
    checks.beside("labels", labels, logits, "logits")
    if boxes is None and target_boxes is None:
        checks.fits("labels", labels, labels.ndim == 1, "have shape (T,)")
        nothing = logits.new_zeros(())
        boxes, target_boxes = nothing.expand(images, queries, 4), nothing.expand(len(labels), 4)
        cost_bbox = cost_giou = 0.0
    if boxes is None or target_boxes is None:
        raise TypeError(f"boxes and target_boxes go together, got only {'boxes' if target_boxes is None else 'target_boxes'}")
    for name, t in (("boxes", boxes), ("target_boxes", target_boxes)):
        checks.floating_beside(name, t, logits, "logits")
    checks.one_of("format", format, FORMATS)
    checks.one_of("class_cost", class_cost, CLASS_COSTS)
    checks.fits("boxes", boxes, boxes.shape == (images, queries, 4), "have shape {}", (images, queries, 4))
    checks.fits("target_boxes", target_boxes, target_boxes.ndim == 2 and target_boxes.shape[1] == 4, "have shape (T, 4)")
    checks.fits("labels", labels, labels.shape == target_boxes.shape[:1], "have shape ({},)", len(target_boxes))
    if checks.known(labels) and labels.device.type == "cpu":
        checks.in_range("labels", labels, 0, classes, None)
    of_image = counts_on_device(counts, images, len(target_boxes), logits, "logits")
    numbers = [checks.number(name, v) for name, v in (("cost_class", cost_class), ("cost_bbox", cost_bbox), ("cost_giou", cost_giou))]
    numbers += [checks.number("alpha", alpha, 0.0, 1.0), checks.number("gamma", gamma, 0.0)]
    tensors = [*(t.detach().resolve_neg() for t in (logits, boxes, labels, target_boxes)), of_image]
    softmax = class_cost == "softmax"
    if softmax:
        tensors[0] = tensors[0].softmax(2, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, centered = Weights(*numbers), format == "cxcywh"
    narrow = boxes.dtype in KERNEL_DTYPES and target_boxes.dtype in KERNEL_DTYPES
    if narrow and kernels_apply(tensors[0]) and len(target_boxes) and not any(isinstance(n, Tensor) for n in numbers):
        found: Tensor = OPERATORS.matching_cost(*tensors, *weights, centered, softmax)
        return found
    return matching_cost_reference(*tensors, weights=weights, centered=centered, softmax=softmax)


def matching_cost_reference(
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    targets: Tensor,
    counts: Tensor,
    *,
    weights: Weights,
    centered: bool,
    softmax: bool,
) -> Tensor:
    """Compute the costs in plain torch. softmax: logits are probabilities already."""
    t = torch.arange(len(targets), device=targets.device)
    image = (counts.cumsum(0) <= t.unsqueeze(1)).sum(1)
    exists = (image < logits.shape[0]) & (labels >= 0) & (labels < logits.shape[2])
    image, label = torch.where(exists, image, 0), torch.where(exists, labels.long(), 0)
    x = accurate(logits)[image, :, label].T
    positive, negative = (-x, 0.0) if softmax else _focal(x, weights.alpha, weights.gamma)
    value = weights.classes * (positive - negative)
    own, other = accurate(boxes)[image].transpose(0, 1), accurate(targets)
    value = value + weights.corners * (own - other).abs().sum(-1)
    if centered:
        own, other = corners(own), corners(other)
    value = value + weights.overlap * (FORMULAS["giou"].reference(own, other.expand_as(own), 1e-7) - 1)
    return torch.where(exists, value, torch.nan)


def _focal(x: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the focal losses of logits as positives and as negatives."""
    return alpha * (-x).sigmoid() ** gamma * -F.logsigmoid(x), (1 - alpha) * x.sigmoid() ** gamma * -F.logsigmoid(-x)


@checks.named
def mask_matching_cost(
    mask_logits: Tensor,
    target_masks: Tensor,
    counts: Sequence[int] | Tensor,
    *,
    mask_cost: Literal["bce", "focal"] = "bce",
    cost_mask: float = 1.0,
    cost_dice: float = 1.0,
    alpha: float = 0.25,
    gamma: float = 2.0,
) -> Tensor:
    """Cost of giving each mask to each query of its image (MaskFormer, arXiv 2107.06278; Mask2Former, arXiv 2112.01527).

    C = c₁ 1/P Σ L(x, y) + c₂ [1 - (2 Σ p y + 1) / (Σ p + Σ y + 1)], the sums over the P pixels or sampled points, p = σ(x), with L the
    binary cross entropy, or the focal loss with mask_cost="focal". It is linear in the masks, so that two products of matrices an image
    compute it, in plain PyTorch on every device. Add it to `matching_cost`.

    Mask2Former takes the cross entropy of 12,544 random points, MaskFormer the focal loss of all pixels.

    Args:
        mask_logits: (B, Q, P) or (B, Q, H, W), of any floating dtype. Sums are in float32 at least.
        target_masks: (T, P) or (T, H, W), the masks of all images one after the other, in [0, 1], of any dtype.
        counts: how many masks each image has: B numbers. A tensor (B,) is read, which waits for its device.
        mask_cost: "bce" or "focal".
        cost_mask: c₁.
        cost_dice: c₂.
        alpha: α in [0, 1], of focal loss.
        gamma: γ of at least 0, of focal loss.

    Returns:
        (Q, T), float32 (float64 for float64), without gradient: column t has the costs of mask t for the queries of its image.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hungarian_match, mask_matching_cost, matching_cost
        >>> logits, masks, counts = torch.randn(2, 100, 8), torch.randn(2, 100, 32, 32), [3, 1]
        >>> cost = matching_cost(logits, None, torch.tensor([0, 4, 6, 2]), None, counts, class_cost="softmax")
        >>> cost += mask_matching_cost(masks, torch.rand(4, 32, 32) > 0.5, counts, cost_mask=5.0, cost_dice=5.0)
        >>> (queries, targets), _ = hungarian_match(cost, counts)
    """
    checks.whole("mask_logits", mask_logits)
    checks.fits("mask_logits", mask_logits, mask_logits.ndim in (3, 4), "have shape (B, Q, P) or (B, Q, H, W)")
    checks.real("target_masks", target_masks)
    checks.beside("target_masks", target_masks, mask_logits, "mask_logits")
    pixels = mask_logits.shape[2:]
    wanted = f"have shape (T, {', '.join(map(str, pixels))})"
    checks.fits("target_masks", target_masks, target_masks.shape[1:] == pixels, wanted)
    checks.one_of("mask_cost", mask_cost, MASK_COSTS)
    numbers = [checks.number("cost_mask", cost_mask), checks.number("cost_dice", cost_dice)]
    alpha, gamma = checks.number("alpha", alpha, 0.0, 1.0), checks.number("gamma", gamma, 0.0)
    found = [mask_logits.new_empty(mask_logits.shape[1], 0, dtype=accurate(mask_logits[:0]).dtype)]
    of_image = counts_on_host(counts, len(mask_logits), len(target_masks))
    for logits, masks in zip(mask_logits.detach(), target_masks.detach().split(of_image), strict=True):
        x = accurate(logits.flatten(1))
        y = masks.flatten(1).to(x.dtype)
        p = x.sigmoid()
        positive, negative = _focal(x, alpha, gamma) if mask_cost == "focal" else (-F.logsigmoid(x), -F.logsigmoid(-x))
        with without_autocast(x):  # which would round both factors of the products
            differences, shared = (positive - negative) @ y.T, p @ y.T
        of_pixels = (differences + negative.sum(1, keepdim=True)) / max(x.shape[1], 1)
        dice = 1 - (2 * shared + 1) / (p.sum(1, keepdim=True) + y.sum(1) + 1)
        found.append(numbers[0] * of_pixels + numbers[1] * dice)
    return torch.cat(found, 1)


def _cost(*arguments: Any) -> Tensor:
    logits, boxes, labels, targets, counts, *numbers, centered, softmax = arguments
    tensors = logits, boxes, labels.contiguous(), targets, counts.contiguous()
    found: tuple[Tensor] = launched("assignment.matching", "costs", tensors, Weights(*numbers), centered, softmax)
    return found[0].mT


def _fake(logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty((targets.shape[0], logits.shape[1]), dtype=torch.float32).mT


define(
    "matching_cost(Tensor logits, Tensor boxes, Tensor labels, Tensor targets, Tensor counts, float cost_class, float cost_bbox, "
    "float cost_giou, float alpha, float gamma, bool centered, bool softmax) -> Tensor",
    _cost,
    _fake,
)
