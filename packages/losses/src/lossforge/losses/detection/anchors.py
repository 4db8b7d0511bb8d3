"""Assign boxes to anchors by IoU, by statistics of near anchors, or by the cost of predictions, in PyTorch on the device.

Matrices of anchors × boxes are computed for some boxes at a time, `AT_ONCE` pairs, and none is kept. Nothing waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.definitions.boxes.iou import overlap_ratio
from lossforge.losses.detection.assignment import Assignment, is_inside, labels_and_mask
from lossforge.losses.detection.pairwise import box_iou
from lossforge.losses.templates.plain_forms import accurate

__all__ = ["atss_assign", "max_iou_assign", "rtmdet_assign", "simota_assign"]

STYLES = ("torchvision", "mmdetection")
BETWEEN = -2
"""The box of an anchor whose IoU is between the thresholds."""
IGNORED = -100
"""Its label."""
OUTSIDE = 1e5
"""What SimOTA adds to the cost of an anchor that lies outside of the box or of its centre region."""
EPS = 1e-7
"""The union of two boxes is at least this where their IoU is computed: the default of box_iou."""
AT_ONCE = 1 << 22
"""Pairs of box and anchor that are compared at once."""


class Boxes(NamedTuple):
    """Boxes (B, G, 4) with labels (B, G), and which count: they are finite and not padding."""

    corners: Tensor
    labels: Tensor
    counts: Tensor


@checks.named
def max_iou_assign(
    anchors: Tensor,
    labels: Tensor,
    target_boxes: Tensor,
    mask: Tensor | None = None,
    *,
    positive: float = 0.5,
    negative: float = 0.4,
    low_quality: bool = True,
    least: float = 0.0,
    style: Literal["torchvision", "mmdetection"] = "torchvision",
) -> Assignment:
    """Assign to each anchor the box that overlaps it most, as torchvision's Matcher and mmdetection's MaxIoUAssigner do.

    An anchor whose largest IoU u is at least `positive` gets that box; below `negative` it is background; between, it is ignored: label
    -100, box_index -2. With low_quality, the anchors that overlap a box most are positive, too, whatever their IoU, so that each box has
    one.

    Args:
        anchors: (A, 4) or (B, A, 4), boxes (x1, y1, x2, y2), of a floating dtype.
        labels: (B, G) or (B, G, 1), the classes of the boxes, of any integer dtype.
        target_boxes: (B, G, 4), the boxes (x1, y1, x2, y2), each image's padded to the same number. A box that is not finite
            counts as padding.
        mask: (B, G) or (B, G, 1), nonzero where a box is one, 0 where it is padding; None: all are.
        positive: the least u of a positive anchor. RetinaNet takes 0.5, an RPN 0.7.
        negative: u of background is below it, at most `positive`. RetinaNet takes 0.4, an RPN 0.3.
        low_quality: whether a box gets the anchors that overlap it most. A box that overlaps no anchor gets none, where torchvision gives
            it all.
        least: how much these must overlap it at least; mmdetection's min_pos_iou.
        style: "torchvision": such an anchor keeps the box that overlaps it most. "mmdetection": it goes to the box whose best it is, the
            last of several.

    Returns:
        an Assignment: its quality is u of the assigned box, its scores are None. No gradient goes through any of it.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class is negative.

    Examples:
        >>> import torch
        >>> from lossforge.losses import max_iou_assign
        >>> anchors = torch.tensor([[0.0, 0, 10, 10], [10, 0, 20, 10], [40, 40, 50, 50]])
        >>> boxes = torch.tensor([[[0.0, 0, 9, 10], [14, 0, 20, 10]]])
        >>> max_iou_assign(anchors, torch.tensor([[7, 3]]), boxes).labels
        tensor([[ 7,  3, -1]])
    """
    checks.whole("anchors", anchors)
    given = _boxes(anchors, "anchors", labels, target_boxes, mask)
    checks.one_of("style", style, STYLES)
    positive, negative = checks.number("positive", positive, 0.0, 1.0), checks.number("negative", negative, 0.0, 1.0)
    least = checks.number("least", least, 0.0, 1.0)
    if negative > positive:
        raise ValueError(f"negative must be at most positive, {positive}, got {negative}")
    batch = len(given.corners)
    fits = anchors.ndim in (2, 3) and anchors.shape[-1] == 4 and (anchors.ndim == 2 or anchors.shape[0] == batch)
    checks.fits("anchors", anchors, fits, "have shape (A, 4) or ({}, A, 4)", batch)
    anchors = accurate(anchors.detach()).expand(batch, -1, 4)
    most, index = _nothing(given, anchors.shape[1], -1.0)
    tops = []
    for start, part in _parts(given, anchors.shape[1]):
        u = _overlaps(part, anchors)
        most, index = _better(most, index, u, start)
        tops.append(u.amax(2) if u.shape[2] else u.new_zeros(u.shape[:2]))
    found = torch.where(most < positive, torch.where(most < negative, -1, BETWEEN), index)
    if low_quality:
        own = torch.full_like(index, -1)
        for (start, part), top in zip(_parts(given, anchors.shape[1]), tops, strict=True):
            best = (_overlaps(part, anchors) == top.unsqueeze(2)) & ((top > 0) & (top >= least)).unsqueeze(2)
            number = torch.arange(start, start + best.shape[1], device=best.device).view(1, -1, 1)
            own = torch.maximum(own, torch.where(best, number, -1).amax(1))
        chosen = index if style == "torchvision" else own
        found = torch.where(own >= 0, chosen, found)
    if style == "mmdetection" and low_quality:
        box = _pick(given.corners, found)
        most = torch.where(found >= 0, overlap_ratio(anchors, box, EPS), most)
    return _assignment(given, found, most)


@checks.named
def atss_assign(
    anchors: Tensor,
    levels: Sequence[int],
    labels: Tensor,
    target_boxes: Tensor,
    mask: Tensor | None = None,
    *,
    topk: int = 9,
    margin: float = 0.01,
) -> Assignment:
    """Assign boxes to anchors by a threshold that each box has of its own (ATSS; Zhang et al. 2020, arXiv 1912.02424).

    The candidates of a box are, of each level, the topk anchors whose centres are nearest to its centre. Its threshold is the mean of
    their IoU with it plus their standard deviation. Candidates from this IoU on whose centre lies inside the box are positive. An anchor
    of several boxes goes to the one that overlaps it most, the first of equal ones.

    Args:
        anchors: (A, 4), boxes (x1, y1, x2, y2), level by level, of a floating dtype.
        levels: how many anchors each level has, in their order.
        labels: (B, G) or (B, G, 1), the classes of the boxes, of any integer dtype.
        target_boxes: (B, G, 4), the boxes (x1, y1, x2, y2), each image's padded to the same number. A box that is not finite
            counts as padding.
        mask: (B, G) or (B, G, 1), nonzero where a box is one, 0 where it is padding; None: all are.
        topk: candidates of a level, at least 1; all anchors of a level that has fewer.
        margin: how far from a box's sides the centre of an anchor must be to be inside, in the units of the boxes.

    Returns:
        an Assignment: its quality is the IoU of anchor and box, its scores are None. No gradient goes through any of it.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class is negative.

    Examples:
        >>> import torch
        >>> from lossforge.losses import atss_assign
        >>> corner = torch.arange(0.0, 64, 8)
        >>> y, x = (t.flatten() for t in torch.meshgrid(corner, corner, indexing="ij"))
        >>> anchors = torch.stack([x, y, x + 8, y + 8], 1)
        >>> found = atss_assign(anchors, [64], torch.tensor([[2]]), torch.tensor([[[3.0, 3, 30, 30]]]), topk=4)
        >>> int(found.foreground.sum())
        4
    """
    checks.whole("anchors", anchors)
    given = _boxes(anchors, "anchors", labels, target_boxes, mask)
    checks.fits("anchors", anchors, anchors.shape == (*anchors.shape[:1], 4), "have shape (A, 4)")
    topk, margin = checks.whole_number("topk", topk), checks.number("margin", margin, 0.0)
    levels = [checks.whole_number("levels", n) for n in checks.several("levels", levels)]
    count = len(anchors)
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    if sum(levels) != count or min(levels, default=1) < 1:
        raise ValueError(f"levels must be at least 1 and sum to the number of anchors, {count}, got {levels}")
    anchors = accurate(anchors.detach())
    centers = (anchors[:, :2] + anchors[:, 2:]) / 2
    most, index = _nothing(given, count, -1.0)
    for start, part in _parts(given, count) if count else ():
        middle = (part.corners[..., :2] + part.corners[..., 2:]) / 2
        near, first = [], 0
        for size in levels:
            of_level = centers[first : first + size]
            squared = (middle.unsqueeze(2) - of_level).square().sum(3)
            near.append(first + squared.topk(min(topk, size), dim=2, largest=False).indices)
            first += size
        candidates = torch.cat(near, 2)  # (B, g, K)
        u = overlap_ratio(anchors[candidates], part.corners.unsqueeze(2), EPS)
        threshold = u.mean(2) + (u.std(2) if u.shape[2] > 1 else 0.0)
        inside = is_inside(centers[candidates], part.corners.unsqueeze(2), margin)
        u = torch.where((u >= threshold.unsqueeze(2)) & inside & part.counts.unsqueeze(2), u, -1.0)
        of_anchor = torch.full((*u.shape[:2], count), -1.0, dtype=u.dtype, device=u.device).scatter(2, candidates, u)
        most, index = _better(most, index, of_anchor, start)
    return _assignment(given, torch.where(most >= 0, index, -1), most)


@checks.named
def simota_assign(
    scores: Tensor,
    boxes: Tensor,
    anchors: Tensor,
    strides: Tensor,
    labels: Tensor,
    target_boxes: Tensor,
    mask: Tensor | None = None,
    *,
    topk: int = 10,
    radius: float = 2.5,
    iou_weight: float = 3.0,
) -> Assignment:
    """Assign boxes to the anchors whose predictions cost least (SimOTA; Ge et al. 2021, arXiv 2107.08430), as YOLOX.

    An anchor takes part where it lies in a box or in the square of `radius` strides about a box's centre. The cost of anchor and box is
    the binary cross entropy of the scores with the box's class, plus iou_weight · -ln(IoU + 1e-8), plus 1e5 where the anchor lies outside
    of the box or of its square. A box takes the k anchors that cost least, k the sum of its topk largest IoU, rounded down, at least 1.
    An anchor that several boxes took goes to the box for which it costs least.

    Args:
        scores: (B, A, C), probabilities in [0, 1]; YOLOX takes √(class · objectness).
        boxes: (B, A, 4), predicted (x1, y1, x2, y2), in the units of the anchors. An anchor whose box is not finite takes no part.
        anchors: (A, 2), the points (x, y) of the anchors.
        strides: (A,), the stride of each anchor's level.
        labels: (B, G) or (B, G, 1), the classes of the boxes, of any integer dtype.
        target_boxes: (B, G, 4), the boxes (x1, y1, x2, y2), each image's padded to the same number. A box that is not finite
            counts as padding.
        mask: (B, G) or (B, G, 1), nonzero where a box is one, 0 where it is padding; None: all are.
        topk: the most anchors of a box, at least 1.
        radius: half the side of the square about a box's centre, in strides.
        iou_weight: of at least 0.

    Returns:
        an Assignment: its quality is the IoU of predicted box and box, its scores are None. No gradient goes through any of it.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import simota_assign
        >>> anchors = torch.tensor([[4.0, 4], [12, 4], [4, 12], [12, 12]])
        >>> boxes = torch.cat([anchors - 4, anchors + 4], 1)[None]
        >>> targets, labels = torch.tensor([[[0.0, 0, 9, 9]]]), torch.tensor([[1]])
        >>> simota_assign(torch.rand(1, 4, 3), boxes, anchors, torch.full((4,), 8.0), labels, targets).box_index
        tensor([[ 0, -1, -1, -1]])
    """
    given, predicted = _predictions(scores, boxes, anchors, strides, labels, target_boxes, mask)
    topk, radius, weight = _dynamic_numbers(topk, radius, iou_weight)
    p = accurate(scores.detach())
    wrong = -torch.log1p(-p).clamp(min=-100)
    right = -p.log().clamp(min=-100)
    base = wrong.sum(2)

    def cost(part: Boxes, u: Tensor) -> Tensor:
        of_class = base.unsqueeze(1) + _of_label(right, part) - _of_label(wrong, part)
        both = is_inside(predicted.points, part.corners.unsqueeze(2), 0.0) & _is_near(predicted, part, radius)
        price = of_class - weight * (u + 1e-8).log()
        return torch.where(both, price, price + OUTSIDE)

    def takes_part(part: Boxes) -> Tensor:
        return is_inside(predicted.points, part.corners.unsqueeze(2), 0.0) | _is_near(predicted, part, radius)

    return _dynamic(given, predicted, takes_part, cost, topk)


@checks.named
def rtmdet_assign(
    scores: Tensor,
    boxes: Tensor,
    anchors: Tensor,
    strides: Tensor,
    labels: Tensor,
    target_boxes: Tensor,
    mask: Tensor | None = None,
    *,
    topk: int = 13,
    radius: float = 3.0,
    iou_weight: float = 3.0,
) -> Assignment:
    """Assign boxes to anchors by costs with soft labels (RTMDet; Lyu et al. 2022, arXiv 2212.07784), as mmdetection's assigner.

    An anchor takes part where it lies in a box. The cost of anchor and box is the binary cross entropy of the logits with the IoU at the
    box's class and 0 elsewhere, times the squared distance of probability and label, plus iou_weight · -ln(IoU + 1e-7), plus
    10^(d - radius) with d the distance of the anchor from the box's centre in strides. The rest is as in simota_assign.

    Args:
        scores: (B, A, C), logits.
        boxes: (B, A, 4), predicted (x1, y1, x2, y2), in the units of the anchors. An anchor whose box is not finite takes no part.
        anchors: (A, 2), the points (x, y) of the anchors.
        strides: (A,), the stride of each anchor's level.
        labels: (B, G) or (B, G, 1), the classes of the boxes, of any integer dtype.
        target_boxes: (B, G, 4), the boxes (x1, y1, x2, y2), each image's padded to the same number. A box that is not finite
            counts as padding.
        mask: (B, G) or (B, G, 1), nonzero where a box is one, 0 where it is padding; None: all are.
        topk: the most anchors of a box, at least 1.
        radius: the distance, in strides, from which on the prior costs more than 1.
        iou_weight: of at least 0.

    Returns:
        an Assignment: its quality, RTMDet's soft label, is the IoU of predicted box and box; its scores are None. No gradient goes through
        any of it.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import quality_focal_loss, rtmdet_assign
        >>> anchors = torch.tensor([[4.0, 4], [12, 4], [4, 12], [12, 12]])
        >>> logits, boxes = torch.randn(1, 4, 3), torch.cat([anchors - 4, anchors + 4], 1)[None]
        >>> targets, labels = torch.tensor([[[0.0, 0, 9, 9]]]), torch.tensor([[1]])
        >>> found = rtmdet_assign(logits, boxes, anchors, torch.full((4,), 8.0), labels, targets)
        >>> loss = quality_focal_loss(logits, found.labels, score=found.quality, reduction="sum")
    """
    given, predicted = _predictions(scores, boxes, anchors, strides, labels, target_boxes, mask)
    topk, radius, weight = _dynamic_numbers(topk, radius, iou_weight)
    x = accurate(scores.detach())
    p = x.sigmoid()
    background = -F.logsigmoid(-x) * p.square()
    base = background.sum(2)

    def cost(part: Boxes, u: Tensor) -> Tensor:
        logit, probability = _of_label(x, part), _of_label(p, part)
        of_label = F.binary_cross_entropy_with_logits(logit, u, reduction="none") * (u - probability).square()
        of_class = base.unsqueeze(1) - _of_label(background, part) + of_label
        middle = (part.corners[..., :2] + part.corners[..., 2:]) / 2
        distance = (predicted.points - middle.unsqueeze(2)).square().sum(3).sqrt() / predicted.strides
        return of_class - weight * (u + 1e-7).log() + 10 ** (distance - radius)

    return _dynamic(given, predicted, lambda part: is_inside(predicted.points, part.corners.unsqueeze(2), 0.0), cost, topk)


class Predictions(NamedTuple):
    """Predicted boxes (B, A, 4), and the points (A, 2) and strides (A,) of their anchors."""

    boxes: Tensor
    points: Tensor
    strides: Tensor


def _boxes(like: Tensor, name: str, labels: Tensor, target_boxes: Tensor, mask: Tensor | None, classes: int | None = None) -> Boxes:
    """Check the boxes to assign. like: the first tensor of the call, whose name is `name`. classes: how many there are, where known."""
    checks.floating_beside("target_boxes", target_boxes, like, name)
    checks.integer("labels", labels)
    checks.fits("target_boxes", target_boxes, target_boxes.ndim == 3 and target_boxes.shape[2] == 4, "have shape (B, G, 4)")
    batch, several = target_boxes.shape[:2]
    label, counts = labels_and_mask(labels, mask, (batch, several), classes, like, name)
    label = label.long()
    counts = counts & (label >= 0) & target_boxes.isfinite().all(2)
    if classes is not None:
        counts = counts & (label < classes)
    return Boxes(accurate(target_boxes.detach()), label, counts)


def _predictions(
    scores: Tensor, boxes: Tensor, anchors: Tensor, strides: Tensor, labels: Tensor, target_boxes: Tensor, mask: Tensor | None
) -> tuple[Boxes, Predictions]:
    checks.whole("scores", scores)
    for name, t in (("boxes", boxes), ("anchors", anchors), ("strides", strides)):
        checks.floating_beside(name, t, scores, "scores")
    checks.fits("scores", scores, scores.ndim == 3 and scores.shape[2] > 0, "have shape (B, A, C)")
    batch, count, classes = scores.shape
    given = _boxes(scores, "scores", labels, target_boxes, mask, classes)
    checks.fits("target_boxes", target_boxes, len(target_boxes) == batch, "have shape ({}, G, 4)", batch)
    for name, t, shape in (("boxes", boxes, (batch, count, 4)), ("anchors", anchors, (count, 2)), ("strides", strides, (count,))):
        checks.fits(name, t, t.shape == shape, "have shape {}", shape)
    return given, Predictions(*(accurate(t.detach()) for t in (boxes, anchors, strides)))


def _dynamic_numbers(topk: int, radius: float, iou_weight: float) -> tuple[int, float, float]:
    topk = checks.whole_number("topk", topk)
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    return topk, checks.number("radius", radius, 0.0), checks.number("iou_weight", iou_weight, 0.0)


def _dynamic(
    given: Boxes, predicted: Predictions, takes_part: Callable[[Boxes], Tensor], cost: Callable[[Boxes, Tensor], Tensor], topk: int
) -> Assignment:
    """Give each box its dynamic number of anchors of least cost, and each anchor to one box.

    Args:
        given: the boxes.
        predicted: boxes, points and strides of the anchors.
        takes_part: from some boxes to which anchors each box lets take part, (B, g, A).
        cost: from some boxes and their IoU (B, g, A) with the predicted boxes to the costs.
        topk: the most anchors of a box.
    """
    batch, count = predicted.boxes.shape[:2]
    some = torch.zeros(batch, count, dtype=torch.bool, device=predicted.boxes.device)
    for _, part in _parts(given, count):
        some = some | (takes_part(part) & part.counts.unsqueeze(2)).any(1)
    some &= predicted.boxes.isfinite().all(2)
    least, nearest = _nothing(given, count, -torch.inf)
    times, owner = torch.zeros_like(nearest), torch.full_like(nearest, -1)
    width = min(topk, count)
    place = torch.arange(width, device=some.device)
    for start, part in _parts(given, count):
        allowed = some.unsqueeze(1) & part.counts.unsqueeze(2)
        u = torch.where(allowed, _overlaps(part, predicted.boxes), 0.0)
        price = cost(part, u)
        allowed = allowed & ~price.isnan()  # of scores; topk would take nan for the largest
        u = torch.where(allowed, u, 0.0)
        price = torch.where(allowed, price.clamp(max=torch.finfo(price.dtype).max), torch.inf)
        least, nearest = _better(least, nearest, -price, start)
        take = u.topk(width, 2).values.sum(2).long().clamp(min=1)
        anchor = price.topk(width, 2, largest=False).indices
        taken = (place < take.unsqueeze(2)) & allowed.gather(2, anchor)
        number = torch.arange(start, start + u.shape[1], device=u.device).view(1, -1, 1).expand_as(anchor)
        flat = anchor.flatten(1)
        times = times.scatter_add(1, flat, taken.long().flatten(1))
        owner = owner.scatter_reduce(1, flat, torch.where(taken, number, -1).flatten(1), "amax")
    index = torch.where(times > 1, nearest, owner)
    quality = overlap_ratio(predicted.boxes, _pick(given.corners, index), EPS)
    return _assignment(given, index, quality)


def _parts(given: Boxes, count: int) -> Iterator[tuple[int, Boxes]]:
    """Yield some boxes of each image at a time, with the number of the first."""
    batch, several = given.labels.shape
    size = max(1, AT_ONCE // max(1, batch * count))
    for start in range(0, several, size):
        yield start, Boxes(*(t[:, start : start + size] for t in given))


def _nothing(given: Boxes, count: int, worst: float) -> tuple[Tensor, Tensor]:
    """Return for each anchor of each image `worst`, and the number of no box."""
    most = given.corners.new_full((len(given.corners), count), worst)
    return most, torch.full_like(most, -1, dtype=torch.int64)


def _better(most: Tensor, index: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return for each anchor the largest value so far and its box, the first of equal ones. values: (B, g, A)."""
    top, place = values.max(1)
    better = top > most
    return torch.where(better, top.to(most.dtype), most), torch.where(better, place + start, index)


def _overlaps(part: Boxes, boxes: Tensor) -> Tensor:
    """Return the IoU (B, g, A) of boxes with others; -1 of padding."""
    return torch.where(part.counts.unsqueeze(2), box_iou(part.corners, boxes), -1.0)


def _is_near(predicted: Predictions, part: Boxes, radius: float) -> Tensor:
    """Return whether anchors lie within the squares of `radius` strides about the centres of boxes."""
    middle = ((part.corners[..., :2] + part.corners[..., 2:]) / 2).unsqueeze(2)
    return ((predicted.points - middle).abs() < radius * predicted.strides.unsqueeze(1)).all(-1)


def _of_label(values: Tensor, part: Boxes) -> Tensor:
    """Return the values (B, A, C) of each box's class, (B, g, A)."""
    label = part.labels.clamp(0, values.shape[2] - 1)
    return values.mT.gather(1, label.unsqueeze(2).expand(-1, -1, values.shape[1]))


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Return the box (B, A, 4) that each anchor has; the first for none."""
    if values.shape[1] == 0:
        return values.new_zeros(*index.shape, 4)
    return values.gather(1, index.clamp(min=0).unsqueeze(2).expand(-1, -1, 4))


def _assignment(given: Boxes, index: Tensor, quality: Tensor) -> Assignment:
    foreground = index >= 0
    padded = F.pad(given.labels, (0, 1))  # so that there is a label to take where there are no boxes
    label = torch.where(foreground, padded.gather(1, index.clamp(min=0)), torch.where(index == BETWEEN, IGNORED, -1))
    boxes = torch.where(foreground.unsqueeze(2), _pick(given.corners, index), 0.0)
    return Assignment(label, boxes, None, foreground, index, torch.where(foreground, quality, 0.0))
