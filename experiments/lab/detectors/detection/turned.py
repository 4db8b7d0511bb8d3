"""Oriented boxes: centre x and y, width, height, and angle in radians, clockwise in pictures."""

import math

import torch
from torch import Tensor


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
