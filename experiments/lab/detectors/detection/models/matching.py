"""Match anchors with boxes: torchvision's rules for batches, in static shapes and without waiting for the device.

N images have K rows of boxes each, some of them empty, and the same A anchors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from lab.detectors.detection.types import BACKGROUND, IGNORED, Matched

PAIRS = 2**23
"""Of boxes and anchors that are compared at once; some hundred MiB of them."""


class Match(NamedTuple):
    box: Tensor  # (N, A) index of each anchor's box, also if not positive
    positive: Tensor  # (N, A) bool
    ignored: Tensor  # (N, A) bool


def in_parts(rule: Callable[[Tensor, Tensor], Match], boxes: Tensor, there: Tensor, anchors: int) -> Match:
    """Apply a rule to boxes (N, K, 4) and the mask of rows that are boxes (N, K), as many images at a time as PAIRS allows."""
    images = max(1, PAIRS // (boxes.shape[1] * anchors))
    parts = [rule(*part) for part in zip(boxes.split(images), there.split(images), strict=True)]
    return Match(*(torch.cat(each) for each in zip(*parts, strict=True)))


def by_overlap(boxes: Tensor, there: Tensor, anchors: Tensor, high: float, low: float) -> Match:
    """RetinaNet's rule: positive from an IoU of `high`, background below `low`, ignored between; a box's best anchors are always positive.

    A box that overlaps no anchor has no best anchors; in torchvision all anchors are then its best.

    Args:
        boxes: (N, K, 4), K at least 1.
        there: (N, K) bool, which rows are boxes.
        anchors: (A, 4)
    """
    overlaps = box_iou(boxes.flatten(0, 1), anchors).unflatten(0, there.shape)
    quality = torch.where(there[..., None], overlaps, -1.0)  # (N, K, A)
    best, box = quality.max(dim=1)
    best_of_box = quality.amax(dim=2, keepdim=True)
    lifted = ((quality == best_of_box) & (best_of_box > 0)).any(dim=1)
    positive = (best >= high) | lifted
    return Match(box, positive, (best >= low) & ~positive)


def by_centre(boxes: Tensor, there: Tensor, levels: list[Tensor], radius: float) -> Match:
    """FCOS's rule: a point is positive near the centre of a box that has its level's size; of several boxes the smallest counts.

    Args:
        boxes: (N, K, 4), K at least 1.
        there: (N, K) bool, which rows are boxes.
        levels: (Aₗ, 4) square anchors of each level, as large as its stride.
        radius: radius around a box's centre, in strides.
    """
    anchors = torch.cat(levels)
    points = (anchors[:, None, :2] + anchors[:, None, 2:]) / 2  # (A, 1, 2)
    stride = anchors[:, 2] - anchors[:, 0]
    corner, opposite = boxes[:, None, :, :2], boxes[:, None, :, 2:]  # (N, 1, K, 2)
    near = (points - (corner + opposite) / 2).abs().amax(-1) < radius * stride[:, None]  # (N, A, K)
    sides = torch.cat([points - corner, opposite - points], -1)  # (N, A, K, 4)
    longest = sides.amax(-1)
    shortest_allowed, longest_allowed = 4 * stride, 8 * stride
    shortest_allowed[: len(levels[0])] = 0
    longest_allowed[-len(levels[-1]) :] = torch.inf
    fits = (longest > shortest_allowed[:, None]) & (longest < longest_allowed[:, None])
    matches = near & (sides.amin(-1) > 0) & fits & there[:, None]
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    # as torchvision finds the smallest area: areas that are equal in float32 beside 1e8 are ties, and the first counts
    value, box = (matches.float() * (1e8 - areas[:, None])).max(dim=-1)
    positive = value >= 1e-5
    return Match(box, positive, torch.zeros_like(positive))


def matched(match: Match, boxes: Tensor, labels: Tensor, anchors: Tensor) -> Matched:
    """Return a batch's targets from boxes (N, K, 4), labels (N, K) and anchors (A, 4)."""
    box, positive, ignored = match
    nothing = torch.where(ignored, IGNORED, BACKGROUND)
    of_anchor = boxes.gather(1, box[..., None].expand(-1, -1, 4))
    return Matched(
        torch.where(positive, labels.gather(1, box), nothing),
        torch.where(positive[..., None], of_anchor, anchors),
        positive,
        positive.sum(dtype=torch.float32),
        anchors,
    )


def with_a_row(boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Add an empty row to a batch without boxes, because a maximum over no rows is undefined."""
    if boxes.shape[1]:
        return boxes, labels
    return F.pad(boxes, (0, 0, 0, 1)), F.pad(labels, (0, 1), value=-1)
