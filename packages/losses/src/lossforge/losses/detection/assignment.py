"""Assign boxes to the anchors that predict them: task-aligned assignment, on the device alone."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.losses import checks
from lossforge.losses.detection.pairwise import pairwise_reference
from lossforge.losses.operators import define, launched
from lossforge.losses.reference import accurate
from lossforge.losses.state import KERNEL_DTYPES, kernels_apply

__all__ = ["Assignment", "task_aligned_assign"]

STYLES = ("yolo", "tood")
IOUS = ("iou", "giou", "diou", "ciou")
MOST = 64
"""The most anchors that a box may choose: a program holds them in registers."""


class Assignment(NamedTuple):
    """What each anchor of each image must predict.

    Attributes:
        labels: (B, A), int64: the class, -1 for background, as our losses take them.
        boxes: (B, A, 4): the box, zeros for background.
        scores: (B, A, C), in the dtype of the predicted scores: `quality` at the class, 0 elsewhere; None unless dense=True.
        foreground: (B, A), bool: whether a box is assigned.
        box_index: (B, A), int64: which of the image's boxes, -1 for background.
        quality: (B, A), float32 (float64 for float64 scores): the alignment, scaled so that a box's best anchor has its best overlap; 0
            for background.
    """

    labels: Tensor
    boxes: Tensor
    scores: Tensor | None
    foreground: Tensor
    box_index: Tensor
    quality: Tensor


@checks.named
def task_aligned_assign(
    scores: Tensor,
    boxes: Tensor,
    anchors: Tensor,
    labels: Tensor,
    target_boxes: Tensor,
    mask: Tensor | None = None,
    *,
    topk: int = 10,
    alpha: float = 0.5,
    beta: float = 6.0,
    eps: float = 1e-9,
    margin: float = 1e-9,
    iou: Literal["iou", "giou", "diou", "ciou"] = "ciou",
    style: Literal["yolo", "tood"] = "yolo",
    from_logits: bool = False,
    dense: bool = True,
) -> Assignment:
    """Assign boxes to anchors by how well the predictions fit them (Feng et al. 2021, arXiv 2108.07755), as YOLOv8 and TOOD do.

    t = sᵅ uᵝ with s the predicted score of the box's class and u the overlap of predicted box and box, at least 0. Each box chooses the
    `topk` anchors inside it with the largest t. An anchor that several boxes chose goes to the one that overlaps its prediction most. The
    target is t, scaled for each box so that its largest is its largest u.

    It does not wait for the device, and takes no memory of anchors × boxes. Anchors with t = 0 are never chosen (in YOLOv8 they are, where
    fewer than topk others are inside; their target is 0). Ties go to the anchor and the box that come first. The same input gives the same
    result to the bit. No gradient goes through any of it.

    Args:
        scores: (B, A, C), predicted, in [0, 1]; or logits, see from_logits. Of any floating dtype and strides.
        boxes: (B, A, 4), predicted (x1, y1, x2, y2), in the units of the anchors.
        anchors: (A, 2), the points (x, y) of the anchors.
        labels: (B, G) or (B, G, 1), the classes of the boxes, of any integer dtype. On CPU a class that does not exist raises. On CUDA its
            box is left out.
        target_boxes: (B, G, 4), the boxes (x1, y1, x2, y2), each image's padded to the same number.
        mask: (B, G) or (B, G, 1), nonzero where a box is one, 0 where it is padding; None: all are.
        topk: how many anchors a box chooses, 1 to 64. YOLOv8 takes 10, TOOD 13.
        alpha: α of at least 0, the exponent of the score. YOLOv8 takes 0.5, TOOD 1.
        beta: β of at least 0, the exponent of the overlap.
        eps: of at least 0, added to the divisor of the targets' scale.
        margin: how far from a box's sides an anchor must be to be inside, in the units of the boxes. TOOD in mmdetection takes 0.01.
        iou: "ciou" as YOLOv8, "iou" as TOOD and PP-YOLOE, "giou" or "diou". Negative values are 0.
        style: "yolo" as ultralytics, mmyolo and PP-YOLOE: the topk of the anchors inside; an anchor that several chose may go to any box
            that it lies in. "tood" as mmdetection: the topk of all anchors, of which those outside are then dropped; an anchor that several
            chose goes to one of them.
        from_logits: whether scores are logits, whose sigmoid is then taken where it is read.
        dense: whether to write `scores`, which take most of the memory. Without them give our losses `labels` and `score=quality`.

    Returns:
        an Assignment: labels, boxes, scores, foreground, box_index and quality of each anchor.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import task_aligned_assign, varifocal_loss
        >>> y, x = torch.meshgrid(torch.arange(4.0, 64, 8), torch.arange(4.0, 64, 8), indexing="ij")
        >>> anchors = torch.stack([x, y], -1).view(-1, 2)
        >>> logits = torch.randn(2, 64, 3, requires_grad=True)
        >>> boxes = torch.cat([anchors - 8, anchors + 8], 1).expand(2, 64, 4)
        >>> labels, targets = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[[8.0, 8, 40, 40], [30, 30, 60, 60]]]).expand(2, 2, 4)
        >>> mask = torch.tensor([[1, 1], [1, 0]])
        >>> found = task_aligned_assign(logits, boxes, anchors, labels, targets, mask, from_logits=True, dense=False)
        >>> loss = varifocal_loss(logits, found.labels, found.quality, normalizer=found.quality.sum())
    """
    tensors = _checked(scores, boxes, anchors, labels, target_boxes, mask)
    topk = checks.whole_number("topk", topk)
    if not 1 <= topk <= MOST:
        raise ValueError(f"topk must be 1 to {MOST}, got {topk}")
    positive = {"alpha": alpha, "beta": beta, "eps": eps, "margin": margin}
    positive = {name: checks.number(name, value, 0.0) for name, value in positive.items()}
    checks.one_of("iou", iou, IOUS)
    checks.one_of("style", style, STYLES)
    flags = style == "tood", from_logits, dense
    numbers: tuple[Any, ...] = (topk, *positive.values(), iou, *flags)
    narrow = all(t.dtype in KERNEL_DTYPES for t in (tensors[1], tensors[2], tensors[4]))
    if narrow and kernels_apply(tensors[0]) and tensors[4].numel() and not any(isinstance(n, Tensor) for n in numbers):
        found = torch.ops.lossforge.task_aligned_assign(*tensors, *numbers)
    else:
        found = assignment_reference(*tensors, *numbers)
    label, box, score, quality, foreground, index = found
    return Assignment(label, box, score if dense else None, foreground, index, quality)


def _checked(scores: Tensor, boxes: Tensor, anchors: Tensor, labels: Tensor, target_boxes: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """Check the tensors; return them without gradient, labels and mask as (B, G)."""
    checks.whole("scores", scores)
    for name, t in (("boxes", boxes), ("anchors", anchors), ("target_boxes", target_boxes)):
        checks.floating_beside(name, t, scores, "scores")
    checks.integer("labels", labels)
    checks.beside("labels", labels, scores, "scores")
    checks.fits("scores", scores, scores.ndim == 3 and scores.shape[2] > 0, "have shape (B, A, C)")
    batch, count, classes = scores.shape
    checks.fits("target_boxes", target_boxes, target_boxes.shape == (batch, *target_boxes.shape[1:2], 4), "have shape ({}, G, 4)", batch)
    several = target_boxes.shape[1]
    for name, t, shape in (("boxes", boxes, (batch, count, 4)), ("anchors", anchors, (count, 2))):
        checks.fits(name, t, t.shape == shape, "have shape {}", shape)
    mask = torch.ones(batch, several, dtype=torch.bool, device=scores.device) if mask is None else mask
    flat = []
    for name, t in (("labels", labels), ("mask", mask)):
        checks.tensor(name, t)
        checks.beside(name, t, scores, "scores")
        if t.shape != (batch, several) and t.shape != (batch, several, 1):  # `in` is False for a traced size
            raise ValueError(f"{name} must have shape ({batch}, {several}) or ({batch}, {several}, 1), got {tuple(t.shape)}")
        flat.append(t.reshape(batch, several))
    if checks.known(labels) and labels.device.type == "cpu":
        checks.in_range("labels", torch.where(flat[1] != 0, flat[0].long(), 0), 0, classes, None)
    scores, boxes, anchors, target_boxes = (t.detach().resolve_neg() for t in (scores, boxes, anchors, target_boxes))
    return scores, boxes, anchors, flat[0], target_boxes, (flat[1] != 0).to(torch.int8)


def assignment_reference(
    scores: Tensor,
    boxes: Tensor,
    anchors: Tensor,
    labels: Tensor,
    targets: Tensor,
    mask: Tensor,
    topk: int,
    alpha: float,
    beta: float,
    eps: float,
    margin: float,
    iou: str,
    tood: bool,
    logits: bool,
    dense: bool,
) -> tuple[Tensor, ...]:
    """Assign in plain torch, by matrices (B, G, A)."""
    (batch, count, classes), several = scores.shape, targets.shape[1]
    counts = (mask != 0) & (labels >= 0) & (labels < classes)
    label = labels.long().clamp(0, classes - 1)
    s = accurate(scores).sigmoid() if logits else accurate(scores)
    s = s.mT.gather(1, label.unsqueeze(2).expand(-1, -1, count))
    low, high = (accurate(corner).unsqueeze(2) for corner in (targets[..., :2], targets[..., 2:]))
    points = accurate(anchors)
    inside = torch.minimum(points - low, high - points).amin(3) > margin
    u = pairwise_reference(targets, boxes, iou, 1e-7, False).nan_to_num(nan=0.0).clamp(min=0)
    t = torch.where((s > 0) & (u > 0) & counts.unsqueeze(2), s**alpha * u**beta, 0.0)
    best, order = torch.sort(t if tood else torch.where(inside, t, 0.0), dim=2, descending=True, stable=True)
    chose = torch.zeros_like(inside).scatter(2, order[..., :topk], best[..., :topk] > 0) & inside
    if several == 0 or count == 0:
        index = torch.full((batch, count), -1, device=scores.device)
        label_of, box_of = index, targets.new_zeros(batch, count, 4)
        quality = torch.zeros(batch, count, dtype=t.dtype, device=scores.device)
    else:
        claims = inside & counts.unsqueeze(2) if not tood else chose
        claims = torch.where(chose.sum(1, keepdim=True) > 1, claims, chose)
        index = torch.where(claims, u, -1.0).argmax(1)
        foreground = chose.any(1)
        mine = foreground.unsqueeze(1) & (index.unsqueeze(1) == torch.arange(several, device=index.device).view(1, -1, 1))
        t, u = torch.where(mine, t, 0.0), torch.where(mine, u, 0.0)
        quality = (t * u.amax(2, keepdim=True) / (t.amax(2, keepdim=True) + eps)).sum(1)
        label_of = torch.where(foreground, label.gather(1, index), -1)
        box_of = torch.where(foreground.unsqueeze(2), targets.gather(1, index.unsqueeze(2).expand(-1, -1, 4)), 0.0)
        index = torch.where(foreground, index, -1)
    columns = torch.arange(classes, device=scores.device)
    score = torch.where(label_of.unsqueeze(2) == columns, quality.unsqueeze(2), 0.0).to(scores.dtype) if dense else scores.new_empty(0)
    return label_of, box_of, score, quality.to(s.dtype), index >= 0, index


def _assign(*arguments: Any) -> tuple[Tensor, ...]:
    numbers = kernels.of_folder("assignment").Numbers(*arguments[6:])
    found: tuple[Tensor, ...] = launched("assignment", "assign", arguments[:6], numbers)
    return found


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    scores, targets, dense = arguments[0], arguments[4], arguments[-1]
    shape = scores.shape[:2]
    score = scores.new_empty(scores.shape if dense else 0)
    index = scores.new_empty(shape, dtype=torch.int64)
    quality, foreground = scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.bool)
    return index, targets.new_empty((*shape, 4)), score, quality, foreground, torch.empty_like(index)


define(
    "task_aligned_assign(Tensor scores, Tensor boxes, Tensor anchors, Tensor labels, Tensor targets, Tensor mask, int topk, float alpha, "
    "float beta, float eps, float margin, str iou, bool tood, bool logits, bool dense) "
    "-> (Tensor labels, Tensor boxes, Tensor scores, Tensor quality, Tensor foreground, Tensor index)",
    _assign,
    _fake,
)
