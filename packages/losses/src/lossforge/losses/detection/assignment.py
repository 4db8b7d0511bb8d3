"""Assign boxes to the anchors that predict them: task-aligned assignment, on the device alone."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.assignment.calls import Numbers
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.state import KERNEL_DTYPES, kernels_apply
from lossforge.losses.detection.pairwise import box_terms, overlap_of_pairs
from lossforge.losses.engine.operators import ANY_DEVICE, define, launched
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate

__all__ = ["Assignment", "task_aligned_assign"]

STYLES = ("yolo", "tood")
IOUS = ("iou", "giou", "diou", "ciou", "probiou")
MOST = 64
"""The most anchors that a box may choose: a program holds them in registers."""
AT_ONCE = 1 << 18
"""Pairs of box and anchor that plain torch compares at once."""


class Assignment(NamedTuple):
    """What each anchor of each image must predict.

    Attributes:
        labels: (B, A), int64: the class, -1 for background, as our losses take them; -100 where max_iou_assign ignores an anchor.
        boxes: (B, A, 4), or (B, A, 5) for rotated boxes: the box, zeros for background.
        scores: (B, A, C), in the dtype of the predicted scores: `quality` at the class, 0 elsewhere; of task_aligned_assign(dense=True)
            alone, else None.
        foreground: (B, A), bool: whether a box is assigned.
        box_index: (B, A), int64: which of the image's boxes, -1 for background, -2 where max_iou_assign ignores an anchor.
        quality: (B, A), float32 (float64 for float64 scores): the alignment, scaled so that a box's best anchor has its best overlap;
            of other assigners the IoU with the box. 0 for background.
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
    topk2: int | None = None,
    alpha: float = 0.5,
    beta: float = 6.0,
    eps: float = 1e-9,
    margin: float = 1e-9,
    min_side: float = 0.0,
    iou: Literal["iou", "giou", "diou", "ciou", "probiou"] = "ciou",
    style: Literal["yolo", "tood"] = "yolo",
    from_logits: bool = False,
    dense: bool = True,
) -> Assignment:
    """Assign boxes to anchors by how well the predictions fit them (Feng et al. 2021, arXiv 2108.07755), as YOLO and TOOD do.

    t = sᵅ uᵝ with s the predicted score of the box's class and u the overlap of predicted box and box, at least 0. Each box chooses the
    `topk` anchors inside it with the largest t. An anchor that several boxes chose goes to the one that overlaps its prediction most. The
    target is t, scaled for each box so that its largest is its largest u.

    It is the assigner of ultralytics. Since 8.4 theirs counts a box of few pixels as one of a least size, as `min_side` does here, and lets
    a box of YOLO26's one-to-one head keep only some of its anchors, `topk2`.

    It does not wait for the device, and takes no memory of anchors × boxes; in float64 and in plain torch it waits. Anchors with t = 0 are
    never chosen (in YOLOv8 they are, where fewer than topk others are inside; their target is 0). Ties go to the anchor and the box that
    come first. The same input gives the same result to the bit. No gradient goes through any of it.

    Args:
        scores: (B, A, C), predicted, in [0, 1]; or logits, see from_logits. Of any floating dtype and strides.
        boxes: (B, A, 4), predicted (x1, y1, x2, y2), in the units of the anchors; with iou="probiou" rotated boxes (B, A, 5), (cx, cy,
            w, h, angle in radians).
        anchors: (A, 2), the points (x, y) of the anchors.
        labels: (B, G) or (B, G, 1), the classes of the boxes, of any integer dtype. On CPU a class that does not exist raises. On CUDA its
            box is left out.
        target_boxes: (B, G, 4), the boxes (x1, y1, x2, y2), or (B, G, 5) as boxes, each image's padded to the same number.
        mask: (B, G) or (B, G, 1), nonzero where a box is one, 0 where it is padding; None: all are.
        topk: how many anchors a box chooses, 1 to 64. YOLOv8 takes 10, TOOD 13.
        topk2: how many of the anchors that it got a box keeps, those with the largest t, 1 to 64; None, or as many as topk: all. YOLO26's
            one-to-one head takes 1 of topk=7.
        alpha: α of at least 0, the exponent of the score. YOLOv8 takes 0.5, TOOD 1.
        beta: β of at least 0, the exponent of the overlap.
        eps: of at least 0, added to the divisor of the targets' scale.
        margin: how far from a box's sides an anchor must be to be inside, in the units of the boxes. TOOD in mmdetection takes 0.01.
        min_side: of at least 0: a shorter side of a box counts as this long, from its centre, where it is decided which anchors are inside.
            ultralytics from 8.4 on takes the second stride, 16, so that small boxes have anchors.
        iou: "ciou" as YOLOv8, "iou" as TOOD and PP-YOLOE, "giou" or "diou", whose negative values are 0. "probiou" takes rotated boxes,
            as ultralytics' RotatedTaskAlignedAssigner: an anchor is inside where it lies in the turned rectangle.
        style: "yolo" as ultralytics before 8.4, mmyolo and PP-YOLOE: the topk of the anchors inside; an anchor that several chose may go to
            any box that it lies in. "tood" as mmdetection: the topk of all anchors, of which those outside are then dropped; an anchor that
            several chose goes to one of them.
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
        >>> loss = varifocal_loss(logits, found.labels, found.quality, normalizer=found.quality.sum().clamp(min=1))
    """
    checks.one_of("iou", iou, IOUS)
    tensors = _checked(scores, boxes, anchors, labels, target_boxes, mask, 5 if iou == "probiou" else 4)
    topk = _choices("topk", topk)
    topk2 = topk if topk2 is None else _choices("topk2", topk2)
    checks.one_of("style", style, STYLES)
    numbers = Numbers(
        topk=topk,
        topk2=0 if topk2 == topk else topk2,
        alpha=checks.number("alpha", alpha, 0.0),
        beta=checks.number("beta", beta, 0.0),
        eps=checks.number("eps", eps, 0.0),
        margin=checks.number("margin", margin, 0.0),
        min_side=checks.number("min_side", min_side, 0.0),
        iou=iou,
        tood=style == "tood",
        logits=from_logits,
        dense=dense,
    )
    narrow = all(t.dtype in KERNEL_DTYPES for t in (tensors[1], tensors[2], tensors[4]))
    by_kernels = narrow and kernels_apply(tensors[0]) and tensors[4].numel()
    # traced, plain torch runs within the operator, because the number of its pairs depends on the data
    if (by_kernels or torch.compiler.is_compiling() or scores.is_meta) and not any(isinstance(n, Tensor) for n in numbers):
        found = OPERATORS.task_aligned_assign(*tensors, *numbers)
    else:
        found = assignment_reference(*tensors, numbers=numbers)
    label, box, score, quality, foreground, index = found
    return Assignment(label, box, score if dense else None, foreground, index, quality)


def _choices(name: str, value: int) -> int:
    value = checks.whole_number(name, value)
    if not 1 <= value <= MOST:
        raise ValueError(f"{name} must be 1 to {MOST}, got {value}")
    return value


def _checked(
    scores: Tensor, boxes: Tensor, anchors: Tensor, labels: Tensor, target_boxes: Tensor, mask: Tensor | None, width: int
) -> tuple[Any, ...]:
    """Check the tensors; return them without gradient, labels and mask as (B, G). width: numbers of a box."""
    checks.whole("scores", scores)
    for name, t in (("boxes", boxes), ("anchors", anchors), ("target_boxes", target_boxes)):
        checks.floating_beside(name, t, scores, "scores")
    checks.integer("labels", labels)
    checks.beside("labels", labels, scores, "scores")
    checks.fits("scores", scores, scores.ndim == 3 and scores.shape[2] > 0, "have shape (B, A, C)")
    batch, count, classes = scores.shape
    fits = target_boxes.shape == (batch, *target_boxes.shape[1:2], width)
    checks.fits("target_boxes", target_boxes, fits, "have shape ({}, G, {})", batch, width)
    several = target_boxes.shape[1]
    for name, t, shape in (("boxes", boxes, (batch, count, width)), ("anchors", anchors, (count, 2))):
        checks.fits(name, t, t.shape == shape, "have shape {}", shape)
    label, counts = labels_and_mask(labels, mask, (batch, several), classes, scores, "scores")
    scores, boxes, anchors, target_boxes = (t.detach().resolve_neg() for t in (scores, boxes, anchors, target_boxes))
    return scores, boxes, anchors, label, target_boxes, counts.to(torch.int8)


def labels_and_mask(
    labels: Tensor, mask: Tensor | None, shape: tuple[int, int], classes: int | None, like: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """Check the boxes' labels, of `classes` where known, and which boxes count; return both as (B, G). like: a tensor, called `name`."""
    batch, several = shape
    mask = torch.ones(batch, several, dtype=torch.bool, device=like.device) if mask is None else mask
    flat = []
    for what, t in (("labels", labels), ("mask", mask)):
        checks.tensor(what, t)
        checks.beside(what, t, like, name)
        if t.shape != (batch, several) and t.shape != (batch, several, 1):  # `in` is False for a traced size
            raise ValueError(f"{what} must have shape ({batch}, {several}) or ({batch}, {several}, 1), got {tuple(t.shape)}")
        flat.append(t.reshape(batch, several))
    counts = flat[1] != 0
    if checks.known(labels) and labels.device.type == "cpu":
        checks.in_range("labels", torch.where(counts, flat[0].long(), 0), 0, classes, None)
    return flat[0], counts


def assignment_reference(
    scores: Tensor,
    boxes: Tensor,
    anchors: Tensor,
    labels: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    numbers: Numbers,
) -> tuple[Tensor, ...]:
    """Assign in plain torch, by the pairs of a box with the anchors that it may choose, some boxes at a time: no matrix of all is kept.

    On a GPU it waits for the device.
    """
    (batch, count, classes), several = scores.shape, targets.shape[1]
    label = labels.long().clamp(0, classes - 1)
    rotated, margin = numbers.iou == "probiou", numbers.margin
    grown = _grown_rotated if rotated else _grown
    corners, points, predicted = grown(accurate(targets), numbers.min_side), accurate(anchors).mT.contiguous().mT, accurate(boxes)
    dtype = torch.promote_types(corners.dtype, predicted.dtype)
    flat = [t.to(dtype).reshape(-1, t.shape[-1]) for t in (targets, boxes)]
    wanted, given = flat if rotated else map(box_terms, flat)

    def overlap(b: Tensor, g: Tensor, a: Tensor) -> Tensor:
        pairs = b * several + g, b * count + a
        if rotated:
            u = 1 - FORMULAS["probiou"].reference(wanted[pairs[0]], given[pairs[1]], 1e-7)
        else:
            u = overlap_of_pairs(wanted, given, *pairs, numbers.iou, 1e-7)
        return u.nan_to_num(nan=0.0).clamp(min=0)

    def aligned(b: Tensor, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        s, u = accurate(scores[b, a, label[b, g]]), overlap(b, g, a)
        s = s.sigmoid() if numbers.logits else s
        return torch.where((s > 0) & (u > 0), s**numbers.alpha * u**numbers.beta, 0.0), u

    def inside(box: Tensor, point: Tensor) -> Tensor:
        if rotated:
            (dx, dy), angle = (point - box[..., :2]).unbind(-1), box[..., 4]
            along, across = dx * angle.cos() + dy * angle.sin(), dy * angle.cos() - dx * angle.sin()
            return (box[..., 2] / 2 - along.abs() > margin) & (box[..., 3] / 2 - across.abs() > margin)
        return is_inside(point, box, margin)

    def candidates(b: Tensor, g: Tensor) -> Tensor:
        box = corners[b, g].unsqueeze(1)
        if not numbers.tood:
            return inside(box, points)
        if rotated:
            return torch.ones(len(b), count, dtype=torch.bool, device=b.device)
        (x1, y1, x2, y2), (u1, v1, u2, v2) = box.unbind(-1), predicted[b].unbind(-1)
        return (x2 > u1) & (u2 > x1) & (y2 > v1) & (v2 > y1)  # elsewhere u is 0

    rows = ((mask != 0) & (labels >= 0) & (labels < classes)).nonzero()
    empty = rows.new_empty(0)
    chosen = [(empty, empty, empty, corners.new_empty(0))]
    for part in rows.split(max(1, AT_ONCE // max(count, 1))) if count else ():
        row, a = candidates(*part.unbind(1)).nonzero().unbind(1)
        b, g = part[row].unbind(1)
        t, u = aligned(b, g, a)
        found = _first_best(row, t, len(part), numbers.topk)
        if numbers.tood:
            found = found[inside(corners[b[found], g[found]], points[a[found]])]
        chosen.append((b[found], g[found], a[found], u[found]))
    b, g, a, u = (torch.cat(each) for each in zip(*chosen, strict=True))
    owners = _Owners(torch.full((batch * count,), -1.0, dtype=u.dtype, device=u.device), several)
    at = b * count + a
    times = at.bincount(minlength=batch * count)
    alone = times[at] == 1 if not numbers.tood else torch.ones_like(at, dtype=torch.bool)
    owners.claim(at[alone], g[alone], u[alone])
    contested = ((times > 1) & (not numbers.tood)).view(batch, count)
    for image in contested.any(1).nonzero().view(-1).tolist():  # such an anchor goes to any box that it lies in
        place = contested[image].nonzero().view(-1)
        for part in rows[rows[:, 0] == image].split(max(1, AT_ONCE // len(place))):
            row, column = inside(corners[part[:, 0], part[:, 1]].unsqueeze(1), points.mT[:, place].mT).nonzero().unbind(1)
            (b, g), a = part[row].unbind(1), place[column]
            owners.claim(b * count + a, g, overlap(b, g, a))
    index = torch.where(times > 0, owners.box, -1)
    at = (index >= 0).nonzero().view(-1)
    b, g, a = at // max(count, 1), index[at], at % max(count, 1)
    t, u = aligned(b, g, a)
    if numbers.topk2:
        order = (b * several + g).sort(stable=True).indices
        kept = order[_first_best((b * several + g)[order], t[order], batch * several, numbers.topk2)]
        at, b, g, a, t, u = (each[kept] for each in (at, b, g, a, t, u))
        index = torch.full_like(index, -1).index_put((at,), g)
    of_box, box = t.new_zeros(2, batch * several), b * several + g
    best_t, best_u = of_box.scatter_reduce(1, box.expand(2, -1), torch.stack([t, u.to(t.dtype)]), "amax")[:, box]
    quality = t.new_zeros(batch * count).index_put((at,), t * best_u / (best_t + numbers.eps)).view(batch, count)
    label_of = torch.full_like(index, -1).index_put((at,), label[b, g]).view(batch, count)
    width = targets.shape[2]
    box_of = targets.new_zeros(batch * count, width).index_put((at,), targets[b, g]).view(batch, count, width)
    index = index.view(batch, count)
    columns = torch.arange(classes, device=scores.device)
    score = (
        torch.where(label_of.unsqueeze(2) == columns, quality.unsqueeze(2), 0.0).to(scores.dtype) if numbers.dense else scores.new_empty(0)
    )
    return label_of, box_of, score, quality.to(accurate(scores[:0]).dtype), index >= 0, index


def is_inside(points: Tensor, boxes: Tensor, margin: float) -> Tensor:
    """Return whether points (..., 2) lie in boxes (..., 4), further than `margin` from their sides."""
    (x, y), (x1, y1, x2, y2) = points.unbind(-1), boxes.unbind(-1)
    return (x - x1 > margin) & (y - y1 > margin) & (x2 - x > margin) & (y2 - y > margin)


def _grown(boxes: Tensor, least: float) -> Tensor:
    """Return boxes (B, G, 4) whose sides below `least` are this long, about the same centre."""
    low, high = boxes[..., :2], boxes[..., 2:]
    center, short = (low + high) / 2, high - low < least
    return torch.cat([torch.where(short, center - least / 2, low), torch.where(short, center + least / 2, high)], -1)


def _grown_rotated(boxes: Tensor, least: float) -> Tensor:
    """Return rotated boxes (B, G, 5) whose sides below `least` are this long."""
    return torch.cat([boxes[..., :2], boxes[..., 2:4].clamp(min=least), boxes[..., 4:]], -1)


def _first_best(row: Tensor, t: Tensor, rows: int, k: int) -> Tensor:
    """Return the pairs that are among the k of their row with the largest t above 0, of equal ones the first. row: ascending."""
    if len(row) == 0:
        return row
    of_row = row.bincount(minlength=rows)
    start, width = of_row.cumsum(0) - of_row, int(of_row.max())
    place = torch.arange(len(row), device=row.device) - start[row]
    padded = t.new_zeros(rows, width).index_put((row, place), t)
    best, place = padded.topk(min(k + 1, width))
    if width > k:  # where the best that is left out equals the last that is taken, topk may have taken a later one
        tied = ((best[:, k] == best[:, k - 1]) & (best[:, k] > 0)).nonzero().view(-1)
        best, place = best[:, :k], place[:, :k]
        if len(tied):
            place[tied] = padded[tied].sort(descending=True, stable=True).indices[:, :k]
    return (start.unsqueeze(1) + place)[best > 0].sort().values


class _Owners:
    """Of each anchor the box that overlaps it most of those that claimed it, of equal ones the first. Claims come by ascending boxes."""

    def __init__(self, most: Tensor, boxes: int) -> None:
        self.most, self.boxes = most, boxes
        self.box = torch.full_like(most, -1, dtype=torch.int64)

    def claim(self, anchor: Tensor, box: Tensor, overlap: Tensor) -> None:
        most = self.most.scatter_reduce(0, anchor, overlap.to(self.most.dtype), "amax")
        best = overlap == most[anchor]
        first = torch.full_like(self.box, self.boxes).scatter_reduce(0, anchor[best], box[best], "amin")
        self.box = torch.where(most > self.most, first, self.box)
        self.most = most


def _assign(*arguments: Any) -> tuple[Tensor, ...]:
    narrow = all(arguments[i].dtype in KERNEL_DTYPES for i in (1, 2, 4))
    tensors, numbers = arguments[:6], Numbers(*arguments[6:])
    if not (narrow and kernels_apply(arguments[0]) and arguments[4].numel()):
        return assignment_reference(*tensors, numbers=numbers)
    found: tuple[Tensor, ...] = launched("assignment.task_aligned", "assign", tensors, numbers)
    return found


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    scores, targets, dense = arguments[0], arguments[4], arguments[-1]
    shape = scores.shape[:2]
    score = scores.new_empty(scores.shape if dense else 0)
    index = scores.new_empty(shape, dtype=torch.int64)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    quality, foreground = scores.new_empty(shape, dtype=wide), scores.new_empty(shape, dtype=torch.bool)
    return index, targets.new_empty((*shape, targets.shape[2])), score, quality, foreground, torch.empty_like(index)


define(
    "task_aligned_assign(Tensor scores, Tensor boxes, Tensor anchors, Tensor labels, Tensor targets, Tensor mask, int topk, int topk2, "
    "float alpha, float beta, float eps, float margin, float min_side, str iou, bool tood, bool logits, bool dense) "
    "-> (Tensor labels, Tensor boxes, Tensor scores, Tensor quality, Tensor foreground, Tensor index)",
    _assign,
    _fake,
    ANY_DEVICE,
)
