"""The generalised IoU of rotated boxes, with the convex hull of both."""

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import Reduction
from lossforge.losses.functional import rotated_iou_loss
from lossforge.losses.templates.plain_forms import accurate

__all__ = ["rotated_giou_loss"]

REDUCTIONS = ("none", "mean", "sum")


@checks.named
def rotated_giou_loss(boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: float = 1e-7) -> Tensor:
    """Generalised IoU loss of two rotated boxes (Rezatofighi et al. 2019, arXiv 1902.09630), with their convex hull as enclosing shape.

    L = 1 - I/U + (C - U)/C, with I and U the areas of intersection and union, as in `rotated_iou_loss`, and C that of the convex hull of
    both boxes: the smallest convex shape around them, as the paper has it, and as mmcv's convex_giou. Others enclose both by a rectangle,
    as the Rotated_IoU repository: the smallest one, or one along an axis. Its C is larger, and so is its loss. The hull is plain
    PyTorch, with some tensors of 512 numbers a pair.

    When to use it: Take it where rotated boxes may not overlap their targets: its gradient brings them together.

    When not: Take `probiou_loss` or `kld_loss` where one kernel is to compute loss and gradient.

    Args:
        boxes1: (..., 5), of a floating dtype: centre x and y, width, height, and the angle in radians by which the box is turned from the x
            axis to the y axis; gets a gradient. A negative side counts as its absolute value.
        boxes2: (..., 5), as boxes1; gets a gradient, too.
        reduction: "none", "mean" over the pairs, or "sum".
        eps: of at least 0; a union or a hull below it is eps.

    Returns:
        a scalar in float32 (float64 for float64); with reduction "none" one value a pair, (...).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import rotated_giou_loss
        >>> boxes, targets = torch.rand(2, 16, 5) + 0.5
        >>> rotated_giou_loss(boxes.requires_grad_(), targets, "mean").backward()
    """
    checks.one_of("reduction", reduction, REDUCTIONS)
    disjoint = rotated_iou_loss(boxes1, boxes2, "none", eps)
    both = [accurate(each).to(disjoint.dtype) for each in (boxes1, boxes2)]
    areas = [(each[..., 2] * each[..., 3]).abs() for each in both]
    union = (areas[0] + areas[1]) / (2 - disjoint)  # A + B = U + I
    hull = _hull_area(torch.cat([_corners(each) for each in both], -2)).clamp(min=eps)
    losses = disjoint + (hull - union) / hull
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def _corners(boxes: Tensor) -> Tensor:
    """Return the corners (..., 4, 2) of rotated boxes."""
    center, half, angle = boxes[..., None, :2], boxes[..., 2:4] / 2, boxes[..., 4]
    signs = boxes.new_tensor([[1, 1], [1, -1], [-1, -1], [-1, 1]])
    (u, v), c, s = (signs * half.unsqueeze(-2)).unbind(-1), angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1)
    return center + torch.stack([u * c - v * s, u * s + v * c], -1)


def _hull_area(points: Tensor) -> Tensor:
    """Return the area of the convex hull of points (..., P, 2).

    Above each point's x the hull reaches to the highest chord of two points, on either side. Between neighbouring x it is a trapezoid,
    because its corners are points. So no points are put in a round, and equal ones and ones on a line do no harm.
    """
    points = points - points.detach().mean(-2, keepdim=True)
    order = points[..., 0].detach().argsort(-1)
    points = points.gather(-2, order.unsqueeze(-1).expand_as(points))
    x, y = points.unbind(-1)
    at, left, right = x[..., :, None, None], x[..., None, :, None], x[..., None, None, :]
    low, high = y[..., None, :, None], y[..., None, None, :]
    upright = right <= left
    share = (at - left) / torch.where(upright, 1.0, right - left)
    chord = low + share * (high - low)
    counts = (left <= at) & (at <= right)
    top = torch.where(upright, torch.maximum(low, high), chord).masked_fill(~counts, -torch.inf).flatten(-2).amax(-1)
    bottom = torch.where(upright, torch.minimum(low, high), chord).masked_fill(~counts, torch.inf).flatten(-2).amin(-1)
    height = top - bottom
    return ((x[..., 1:] - x[..., :-1]) * (height[..., 1:] + height[..., :-1])).sum(-1) / 2
