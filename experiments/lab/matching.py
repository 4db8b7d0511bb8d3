"""Which anchor shall predict which box: torchvision's rules for whole batches, in static shapes and without a wait for the device."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from lab.detection_types import BACKGROUND, IGNORED, Matched


class Match(NamedTuple):
    """Of one image's anchors."""

    box: Tensor  # (A,) the index of each one's, whether positive or not
    positive: Tensor  # (A,) bool
    ignored: Tensor  # (A,) bool


def by_overlap(boxes: Tensor, there: Tensor, anchors: Tensor, high: float, low: float) -> Match:
    """RetinaNet's rule: positive from an IoU of `high`, background below `low`, ignored between; a box's best anchors are always positive.

    A box that no anchor overlaps has no best anchors, where torchvision takes them all.

    Args:
        boxes: (K, 4), K at least 1.
        there: (K,) bool, which rows are boxes.
        anchors: (A, 4)
    """
    quality = torch.where(there[:, None], box_iou(boxes, anchors), -1.0)
    best, box = quality.max(dim=0)
    best_of_box = quality.amax(dim=1, keepdim=True)
    lifted = ((quality == best_of_box) & (best_of_box > 0)).any(dim=0)
    positive = (best >= high) | lifted
    return Match(box, positive, (best >= low) & ~positive)


def by_centre(boxes: Tensor, there: Tensor, levels: list[Tensor], radius: float) -> Match:
    """FCOS's rule: a point is positive near the centre of a box that is of its level's size; the smallest of several boxes counts.

    Args:
        boxes: (K, 4), K at least 1.
        there: (K,) bool, which rows are boxes.
        levels: (Aₗ, 4) square anchors of each level, as large as its stride.
        radius: of the neighbourhood of a centre, in strides.
    """
    anchors = torch.cat(levels)
    points = (anchors[:, :2] + anchors[:, 2:]) / 2
    stride = anchors[:, 2] - anchors[:, 0]
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    near = (points[:, None] - centres).abs().amax(2) < radius * stride[:, None]  # (A, K)
    sides = torch.cat([points[:, None] - boxes[:, :2], boxes[:, 2:] - points[:, None]], 2)  # (A, K, 4)
    longest = sides.amax(2)
    shortest_allowed, longest_allowed = 4 * stride, 8 * stride
    shortest_allowed[: len(levels[0])] = 0
    longest_allowed[-len(levels[-1]) :] = torch.inf
    fits = (longest > shortest_allowed[:, None]) & (longest < longest_allowed[:, None])
    matches = near & (sides.amin(2) > 0) & fits & there
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    # torchvision's way to the smallest area: boxes that float32 cannot tell apart beside 1e8 are ties, of which the first counts
    value, box = (matches.float() * (1e8 - areas)).max(dim=1)
    positive = value >= 1e-5
    return Match(box, positive, torch.zeros_like(positive))


def matched(matches: list[Match], boxes: Tensor, labels: Tensor, anchors: Tensor) -> Matched:
    """A batch's targets from its images' matches.

    Args:
        matches: one an image.
        boxes: (N, K, 4)
        labels: (N, K)
        anchors: (A, 4)
    """
    box, positive, ignored = (torch.stack(parts) for parts in zip(*matches, strict=True))
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
    """A batch without any box gets a row that is none: a maximum over nothing is not defined."""
    if boxes.shape[1]:
        return boxes, labels
    return F.pad(boxes, (0, 0, 0, 1)), F.pad(labels, (0, 1), value=-1)
