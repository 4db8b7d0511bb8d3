"""Generalised IoU of rotated boxes: scipy's hulls, upright boxes, and gradients of boxes that touch in every way."""

import math

import pytest
import torch
from scipy.spatial import ConvexHull

from lossforge.losses import generalized_box_iou_loss, rotated_giou_loss, rotated_iou_loss
from lossforge.losses.detection.enclosing import _corners, _hull_area

SPECIAL = {
    "equal": ([30, 40, 20, 10, 0.5], [30, 40, 20, 10, 0.5]),
    "equal but for a turn": ([30, 40, 20, 20, 0.0], [30, 40, 20, 20, math.pi / 2]),
    "upright beside": ([0, 0, 2, 2, 0.0], [2, 0, 2, 2, 0.0]),
    "upright on a line": ([0, 0, 2, 2, 0.0], [7, 0, 3, 2, 0.0]),
    "nested": ([0, 0, 9, 9, 0.3], [0.5, 0, 2, 1, 1.0]),
    "a negative side": ([3, 4, -2, 1, 0.5], [3.3, 4.1, 2.2, 0.9, 0.75]),
}


def drawn(n, far):
    draw = torch.Generator().manual_seed(0)
    boxes = torch.rand(2, n, 5, dtype=torch.float64, generator=draw) * torch.tensor([far, far, 3.0, 3.0, 7.0]) + 0.1
    pairs = torch.tensor([*SPECIAL.values()], dtype=torch.float64).movedim(1, 0)
    return torch.cat([boxes, pairs], 1)


@pytest.mark.parametrize("far", [2.0, 30.0])
def test_the_hull_and_the_loss(far):
    """By scipy's hulls, in float64."""
    one, two = drawn(100, far)
    corners = torch.cat([_corners(one), _corners(two)], -2)
    hull = torch.tensor([ConvexHull(each).volume for each in corners.numpy()], dtype=torch.float64)
    torch.testing.assert_close(_hull_area(corners), hull, rtol=1e-9, atol=1e-9)
    overlap = 1 - rotated_iou_loss(one, two)
    union = (one[:, 2] * one[:, 3]).abs() + (two[:, 2] * two[:, 3]).abs()
    union = union / (1 + overlap)
    torch.testing.assert_close(rotated_giou_loss(one, two), 1 - overlap + 1 - union / hull, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotated_giou_loss(two, one), rotated_giou_loss(one, two), rtol=1e-9, atol=1e-9)
    assert rotated_giou_loss(one, two, "mean") == pytest.approx(rotated_giou_loss(one, two).mean().item())
    assert rotated_giou_loss(one, two, "sum") == pytest.approx(rotated_giou_loss(one, two).sum().item())


def test_upright_boxes_are_those_of_torchvision(device):
    one, two = drawn(50, 8.0)[:, :50].float().to(device)
    one[:, 4], two[:, 4] = 0, 0
    corners = [torch.cat([each[:, :2] - each[:, 2:4] / 2, each[:, :2] + each[:, 2:4] / 2], 1) for each in (one, two)]
    hulls = _hull_area(torch.cat([_corners(one), _corners(two)], -2))
    inside = torch.minimum(corners[0][:, :2], corners[1][:, :2]), torch.maximum(corners[0][:, 2:], corners[1][:, 2:])
    rectangles = (inside[1] - inside[0]).prod(1)
    assert (hulls <= rectangles * (1 + 1e-6)).all()
    assert (rotated_giou_loss(one, two) <= generalized_box_iou_loss(*corners) + 1e-5).all()
    row = two.clone()
    row[:, 1], row[:, 3] = one[:, 1], one[:, 3]  # in a row of one height the hull is the rectangle
    beside = torch.cat([row[:, :2] - row[:, 2:4] / 2, row[:, :2] + row[:, 2:4] / 2], 1)
    torch.testing.assert_close(rotated_giou_loss(one, row), generalized_box_iou_loss(corners[0], beside), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("far", [2.0, 30.0])
def test_gradients(far):
    one, two = (each[:20].requires_grad_() for each in drawn(20, far))
    assert torch.autograd.gradcheck(rotated_giou_loss, (one, two))
    if far > 20:
        (gradient,) = torch.autograd.grad(rotated_giou_loss(one, two, "sum"), one)
        toward = (two - one)[:, :2]
        assert ((gradient[:, :2] * toward).sum(1) < 0).all()


def test_gradients_of_boxes_that_touch_are_finite():
    one, two = (each[-len(SPECIAL) :].requires_grad_() for each in drawn(1, 2.0))
    assert all(each.isfinite().all() for each in torch.autograd.grad(rotated_giou_loss(one, two, "sum") * 1.7, (one, two)))
