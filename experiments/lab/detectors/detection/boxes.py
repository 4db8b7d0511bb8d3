"""Boxes: oriented ones, RetinaNet's encoding, and the best of a model that suppresses none.

An oriented box is its centre x and y, width, height, and angle in radians, clockwise in pictures.
"""

import math

import torch
from torch import Tensor

from lab.detectors.detection.types import DetectorOutput


def turned_boxes(corners: Tensor) -> Tensor:
    """Return oriented boxes (B, 5), centre x and y, width, height and angle in [-π/4, 3π/4), of corners (B, 4, 2) in their order around.

    The width is along the first side and the one across from it; four corners that are no rectangle have their mean sides.
    """
    first, second = (
        (corners[:, 1] - corners[:, 0] + corners[:, 2] - corners[:, 3]) / 2,
        (corners[:, 2] - corners[:, 1] + corners[:, 3] - corners[:, 0]) / 2,
    )
    angle = torch.atan2(first[:, 1], first[:, 0])
    angle = (angle + math.pi / 4).remainder(math.pi) - math.pi / 4
    return torch.cat([corners.mean(1), first.norm(dim=1, keepdim=True), second.norm(dim=1, keepdim=True), angle[:, None]], 1)


def rotated(points: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and y of points (..., 2) turned by an angle (...)."""
    x, y = points.unbind(-1)
    cosine, sine = angle.cos(), angle.sin()
    return x * cosine - y * sine, x * sine + y * cosine


def corners_of(boxes: Tensor) -> Tensor:
    """Return the corners (D, 8), x, y, x, y, ..., of boxes (D, 5)."""
    half = boxes[:, None, 2:4] / 2 * boxes.new_tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    x, y = rotated(half, boxes[:, None, 4])
    return (torch.stack([x, y], -1) + boxes[:, None, :2]).flatten(1)


LARGEST = math.log(1000.0 / 16)  # torchvision's limit, so that no predicted side overflows


class DeltaCoder:
    """Offsets of centres in units of the anchor's sides, and logarithms of ratios of sides; Ren et al. 2015 (arXiv 1506.01497).

    The same as torchvision's BoxCoder with weights of 1, which takes single images and waits for the device, because it copies constants
    from the host in each call.
    """

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor:
        """Return deltas (..., 4) from anchors (A, 4) or (..., 4) to boxes (..., 4)."""
        center, sides = _center_and_sides(boxes)
        anchor_center, anchor_sides = _center_and_sides(anchors)
        return torch.cat([(center - anchor_center) / anchor_sides, (sides / anchor_sides).log()], -1)

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        """Return boxes (..., 4) from deltas (..., 4) and anchors (A, 4) or (..., 4)."""
        anchor_center, anchor_sides = _center_and_sides(anchors)
        center = deltas[..., :2] * anchor_sides + anchor_center
        half = 0.5 * (deltas[..., 2:].clamp(max=LARGEST).exp() * anchor_sides)
        return torch.cat([center - half, center + half], -1)


def _center_and_sides(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * sides, sides


def unsuppressed(output: DetectorOutput, boxes: Tensor, count: int, threshold: float) -> list[dict[str, Tensor]]:
    """Return each image's best pairs of box and class as Detector.detections does, none of them suppressed, with `index`, their queries.

    Args:
        output: the last layer's.
        boxes: (N, A, 4 or 5), the predicted boxes in pixels.
        count: the most detections of an image.
        threshold: the score above which a detection is kept.
    """
    best, labels, index = best_of(output, count)
    parts = {"boxes": rows_at(boxes, index), "scores": best, "labels": labels, "index": index}
    return [{name: part[image][sure] for name, part in parts.items()} for image, sure in enumerate(best > threshold)]


def clipped(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Return boxes (N, A, 4) inside of their images. sizes: (N, 2) height and width of each image inside its padding."""
    return boxes.clamp(min=0).minimum(sizes.to(boxes).flip(1).repeat(1, 2)[:, None])


def least(first: int, second: int) -> int:
    """Return the smaller number, as a symbol in torch.export, which would bind the image's size by a comparison."""
    return torch.sym_min(first, second) if torch.compiler.is_exporting() else min(first, second)


def best_of(output: DetectorOutput, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best scores (N, D), their classes (N, D) and the indices of their queries (N, D)."""
    scores, classes = output.logits.float().sigmoid(), output.logits.shape[-1]
    best, place = scores.flatten(1).topk(least(count, scores.shape[1] * classes))
    return best, place % classes, place // classes


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows (N, D, X) of (N, A, X) at the indices (N, D)."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
