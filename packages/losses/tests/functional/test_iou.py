"""What is the box losses' own: values worked out by hand, other implementations, edges, gradients of both boxes, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
import torchvision.ops
from torch import Tensor

from lossforge.kernels import launch_counts
from lossforge.losses import (
    BoxIoULoss,
    box_iou_loss,
    box_l1_loss,
    box_smooth_l1_loss,
    complete_box_iou_loss,
    distance_box_iou_loss,
    efficient_box_iou_loss,
    generalized_box_iou_loss,
    scylla_box_iou_loss,
)
from lossforge.losses.definitions.boxes.iou import overlap_ratio
from lossforge.losses.formulas import FORMULAS, DeviceFormula, Formula
from lossforge.losses.registry import LOSSES
from lossforge.losses.templates.boxes import SPECIAL_PAIRS, boxes_reference, corner_loss
from lossforge.losses.testing import error, samples

INF = float("inf")
OVERLAP = (box_iou_loss, generalized_box_iou_loss, distance_box_iou_loss, complete_box_iou_loss, efficient_box_iou_loss)
BOXES = [loss for loss in LOSSES.values() if loss.template.name == "boxes"]
EACH = pytest.mark.parametrize("loss", BOXES, ids=lambda loss: loss.name)
FORMS = pytest.mark.parametrize("function", OVERLAP, ids=lambda f: f.__name__)
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
V = 4 / math.pi**2 * (math.atan(1 / 2) - math.pi / 4) ** 2


def results(function, boxes1: Tensor, boxes2: Tensor, upstream: Tensor | float = 1.0, **kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """Value, and gradients of both boxes."""
    boxes1, boxes2 = (b.detach().clone(memory_format=torch.preserve_format).requires_grad_() for b in (boxes1, boxes2))
    value = function(boxes1, boxes2, **kwargs)
    gradients = torch.autograd.grad((value * upstream).sum(), (boxes1, boxes2))
    return value.detach(), *gradients


def special(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    boxes1, boxes2 = (torch.tensor(b, device=device, dtype=dtype) for b in zip(*SPECIAL_PAIRS.values(), strict=True))
    return boxes1, boxes2


def random(n: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    low, sides = torch.rand(n, 2, device=device) * 100, torch.rand(n, 2, device=device) * 60 + 1
    return torch.cat([low, low + sides], 1).to(dtype)


@pytest.mark.parametrize(
    ("boxes1", "boxes2", "expected"),  # IoU, GIoU, DIoU, CIoU, EIoU, L1, smooth L1 with β = 2
    [
        ([0, 0, 2, 2], [1, 1, 3, 3], (6 / 7, 6 / 7 + 2 / 9, 6 / 7 + 1 / 9, 6 / 7 + 1 / 9, 6 / 7 + 1 / 9, 4, 1)),
        ([0, 0, 1, 1], [3, 0, 4, 2], (1, 1 + 5 / 8, 1.4625, 1.4625 + V * V / (1 + V), 1.7125, 7, 4.25)),
        ([0, 0, 4, 4], [1, 1, 2, 3], (7 / 8, 7 / 8, 0.8828125, None, 1.6953125, 5, 1.75)),
    ],
    ids=["crossing", "disjoint", "nested"],
)
def test_by_hand(boxes1, boxes2, expected, device):
    corners = [torch.tensor(b, dtype=torch.float32, device=device) for b in (boxes1, boxes2)]
    centered = [torch.cat([(b[:2] + b[2:]) / 2, b[2:] - b[:2]]) for b in corners]
    for function, value in zip((*OVERLAP, box_l1_loss, box_smooth_l1_loss), expected, strict=True):
        if value is not None:
            options = {"beta": 2.0} if function is box_smooth_l1_loss else {}
            torch.testing.assert_close(function(*corners, **options).item(), float(value), rtol=1e-6, atol=0)
            if function in OVERLAP:
                torch.testing.assert_close(function(*centered, format="cxcywh").item(), float(value), rtol=1e-6, atol=0)


FLIPPED = pytest.mark.parametrize("loss", [loss for loss in BOXES if not loss.name.startswith("box_")], ids=lambda loss: loss.name)


def of_an_empty_box(name: str, b1: Tensor, b2: Tensor) -> Tensor:
    """The formulas of pairs with a flipped box: I = 0, its area 0, the hull from the smallest coordinate to the largest."""
    s1, s2 = ((b[:, 2:] - b[:, :2]).clamp(min=0) for b in (b1, b2))
    points = torch.stack([b1[:, :2], b1[:, 2:], b2[:, :2], b2[:, 2:]])
    hull = points.amax(0) - points.amin(0)
    area, union = hull.prod(1), s1.prod(1) + s2.prod(1)
    d = (b1[:, :2] + b1[:, 2:] - b2[:, :2] - b2[:, 2:]) / 2
    if name == "iou":
        return torch.ones_like(area)
    if name == "giou":
        return 1 + (area - union) / area
    if name == "siou":
        gamma = 2 - 2 * d.prod(1).abs() / d.square().sum(1).clamp(min=1e-7)
        shape = 1 - torch.exp(-(s1 - s2).abs() / torch.maximum(s1, s2).clamp(min=1e-7))
        return 1 + ((1 - torch.exp(-gamma[:, None] * (d / hull).square())) + shape**4).sum(1) / 2
    diou = 1 + d.square().sum(1) / hull.square().sum(1)
    if name == "ciou":
        v = 4 / math.pi**2 * (torch.atan2(s1[:, 0], s1[:, 1]) - torch.atan2(s2[:, 0], s2[:, 1])).square()
        return diou + (v / (1 + v)).detach() * v
    if name == "eiou":
        return diou + ((s1 - s2) / hull).square().sum(1)
    assert name == "diou", f"write the loss of {name} for a flipped box here"
    return diou


ACROSS, DOWN, BOTH = [2, 1, 0, 3], [0, 3, 2, 1], [2, 3, 0, 1]


def as_centers(boxes: Tensor) -> Tensor:
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


def flipped_pairs(device):
    """Pairs of boxes of which one is flipped, of either input and on either axis; both in the last; none in the first."""
    boxes1, boxes2 = random(8, device), random(8, device)
    for boxes, pair, order in ((boxes1, 1, ACROSS), (boxes1, 2, DOWN), (boxes2, 3, ACROSS), (boxes2, 4, DOWN), (boxes1, 5, BOTH)):
        boxes[pair] = boxes[pair, order]
    boxes2[6], boxes1[7] = boxes2[6, BOTH], boxes1[0, BOTH]
    boxes2[7] = boxes1[7]
    return boxes1, boxes2


@pytest.mark.each
@FLIPPED
@pytest.mark.parametrize("format", ["xyxy", "cxcywh"])
def test_a_flipped_box_is_an_empty_one(loss, format, device):
    """In its pair alone: value, and gradients of the box beside it and of the centre. No nan."""
    boxes1, boxes2 = flipped_pairs(device)
    wide1, wide2 = (b.double().requires_grad_() for b in (boxes1, boxes2))
    exact = of_an_empty_box(loss.name, wide1, wide2)[1:]
    slopes = [g.nan_to_num() for g in torch.autograd.grad(exact.sum() + 0 * (wide1 + wide2).sum(), (wide1, wide2))]
    flipped = [b[:, 2:] < b[:, :2] for b in (boxes1, boxes2)]
    if format == "cxcywh":
        boxes1, boxes2 = as_centers(boxes1), as_centers(boxes2)
    by_reference = results(loss.reference, boxes1.double(), boxes2.double(), format=format)[1:]
    for function in (loss.function, loss.reference):
        for options in ({"reduction": "none"}, {"reduction": "sum", "gradient": "forward"}, {"reduction": "sum", "gradient": "backward"}):
            value, *gradients = results(function, boxes1, boxes2, format=format, **options)
            expected, *own = results(function, boxes1[:1], boxes2[:1], format=format, **options)
            assert all(error(g, exact) < 1e-5 for g, exact in zip(gradients, by_reference, strict=True))
            found, known = (value, torch.cat([expected, exact])) if value.ndim else (value, expected + exact.sum())
            torch.testing.assert_close(found.double(), known.detach().double(), rtol=1e-5, atol=0)
            for g, alone, slope, turned in zip(gradients, own, slopes, flipped, strict=True):
                assert torch.equal(g[:1], alone)
                assert g.isfinite().all()
                if format == "xyxy":
                    upright = ~turned[1:].any(1)  # its derivatives are those of the formula
                    torch.testing.assert_close(g[1:][upright].double(), slope[1:][upright], rtol=1e-4, atol=1e-7)
                    assert (g[:, :2] > g[:, 2:])[turned].all()
                else:
                    assert (g[:, 2:] < 0)[turned].all()


@pytest.mark.each("format")
@FLIPPED
@pytest.mark.parametrize("format", ["xyxy", "cxcywh"])
def test_validate_refuses_a_flipped_box(loss, format, device):
    boxes1, boxes2 = flipped_pairs(device)
    if format == "cxcywh":
        boxes1, boxes2 = as_centers(boxes1), as_centers(boxes2)
    got = {"xyxy": r"x1 <= x2 and y1 <= y2, got \(.*\) at pair 1", "cxcywh": r"w and h of at least 0, got \(.*, -.*\) at pair 1"}
    with pytest.raises(ValueError, match=rf"boxes1 must hold boxes \(.*\) with {got[format]}"):
        loss.function(boxes1, boxes2, format=format, validate=True)
    with pytest.raises(ValueError, match=r"boxes2 must hold boxes .* at pair \(0, 3\)"):
        loss.module(format=format, validate=True)(boxes2[None].clone().fill_(1), boxes2[None])
    assert loss.function(boxes1[:1], boxes2[:1], format=format, validate=True).isfinite()
    if format == "cxcywh":  # which are far wider than their centre is large, or far narrower
        upright = torch.tensor([[0.5, 40.0, 30.0, 2.0]], device=device)
        assert loss.function(upright, upright, format=format, validate=True).isfinite()


FROM = [[0.4, 0.2, 0.2, 0.4], [0.2, 0.4, 0.4, 0.2], [0.5, 0.5, 0.1, 0.1], [0.6, 0.2, 0.05, 0.3], [0.3, 0.55, 0.2, 0.25]]
"""Flipped boxes within a box of 0.1 to 0.5, around it, and across its edges."""


@pytest.mark.each
@pytest.mark.parametrize("format", ["xyxy", "cxcywh"])
@EACH
def test_descent_turns_flipped_boxes_back(loss, format):
    """200 steps of SGD by the reference, from boxes that are flipped on one side or on both; the kernels' gradients are tested above."""
    if loss.name.startswith("box_") and format == "cxcywh":
        pytest.skip("coordinates are compared as they are")
    forms = [{}, {"log": True}] if loss.name == "iou" else [{}, {"neg_gamma": False}] if loss.name == "siou" else [{}]
    for options in forms:
        if format == "cxcywh":
            options = {**options, "format": format}
        boxes, targets = torch.tensor(FROM), torch.tensor([[0.1, 0.1, 0.5, 0.5]]).expand(5, 4).contiguous()
        if format == "cxcywh":
            boxes, targets = (torch.cat([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], 1) for b in (boxes, targets))
        boxes.requires_grad_()
        optimizer = torch.optim.SGD([boxes], lr=0.002 if "log" in options else 0.01)
        first = loss.reference(boxes, targets, **options).detach()
        for _ in range(200):
            optimizer.zero_grad()
            loss.reference(boxes, targets, reduction="sum", **options).backward()
            optimizer.step()
        last, b = loss.reference(boxes, targets, **options), boxes.detach()
        assert (b[:, 2:] > (b[:, :2] if format == "xyxy" else 0)).all()
        assert (last < 0.5 * first).all(), (last, first)


def iou(b1: Tensor, b2: Tensor) -> Tensor:
    shared = (torch.min(b1[:, 2:], b2[:, 2:]) - torch.max(b1[:, :2], b2[:, :2])).relu().prod(1)
    return 1 - shared / ((b1[:, 2:] - b1[:, :2]).prod(1) + (b2[:, 2:] - b2[:, :2]).prod(1) - shared)


def their_siou(b1: Tensor, b2: Tensor, neg_gamma: bool) -> Tensor:
    """The paper's equations as mmdetection has them: the angle by its sine, -γ or +γ, the IoU minus both costs kept in [-1, 1]."""
    corners = torch.cat([torch.min(b1, b2)[:, :2], torch.max(b1, b2)[:, 2:]], 1)
    sides1, sides2, sides = (b[:, 2:] - b[:, :2] for b in (b1, b2, corners))
    offset = (b2[:, :2] + b2[:, 2:] - b1[:, :2] - b1[:, 2:]) / 2
    sine = offset.abs().amin(1) / offset.square().sum(1).sqrt()
    gamma = 2 - torch.cos(2 * torch.asin(sine) - math.pi / 2)
    exponent = gamma[:, None] * (offset / sides).square()
    distance = 1 - torch.exp(-exponent if neg_gamma else exponent)
    shape = (1 - torch.exp(-(sides1 - sides2).abs() / torch.max(sides1, sides2))) ** 4
    value = 1 - iou(b1, b2) - (distance + shape).sum(1) / 2
    return 1 - (value.clamp(-1, 1) if not neg_gamma else value)


def eiou(b1: Tensor, b2: Tensor) -> Tensor:
    """The paper's equation 11, from points and sides."""
    c = torch.cat([torch.min(b1, b2)[:, :2], torch.max(b1, b2)[:, 2:]], 1)
    sides1, sides2, sides = (b[:, 2:] - b[:, :2] for b in (b1, b2, c))
    centers = (b1[:, :2] + b1[:, 2:] - b2[:, :2] - b2[:, 2:]) / 2
    return iou(b1, b2) + centers.square().sum(1) / sides.square().sum(1) + ((sides1 - sides2) / sides).square().sum(1)


def giou(b1: Tensor, b2: Tensor) -> Tensor:
    return torchvision.ops.generalized_box_iou_loss(b1, b2, eps=0.0)


def diou(b1: Tensor, b2: Tensor) -> Tensor:
    return torchvision.ops.distance_box_iou_loss(b1, b2, eps=0.0)


def ciou(b1: Tensor, b2: Tensor) -> Tensor:
    return torchvision.ops.complete_box_iou_loss(b1 * 1e5, b2 * 1e5, eps=0.0)  # its DIoU part adds 1e-7 whatever eps is


JUDGES = pytest.mark.parametrize(
    ("function", "judge"), list(zip(OVERLAP, (iou, giou, diou, ciou, eiou), strict=True)), ids=lambda f: f.__name__
)


@JUDGES
def test_against_other_implementations(function, judge, device):
    """Whose eps, which torchvision adds, is 0 here; pairs with area, of which edges touch or lie on each other, too."""
    boxes1, boxes2 = special(device, torch.float64)
    has_area = ((boxes1[:, 2:] != boxes1[:, :2]) & (boxes2[:, 2:] != boxes2[:, :2])).all(1)
    boxes1 = torch.cat([boxes1[has_area][1:], random(200, device, torch.float64)])  # of equal boxes α is 0/0
    boxes2 = torch.cat([boxes2[has_area][1:], random(200, device, torch.float64)])
    upstream = torch.rand(len(boxes1), device=device) + 0.5
    exact = results(judge, boxes1, boxes2, upstream)
    for got, wanted in zip(results(function, boxes1, boxes2, upstream), exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    for got, wanted in zip(results(function, boxes1.float(), boxes2.float(), upstream), exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=3e-5, atol=3e-7)


def unit_box(b1: Tensor, b2: Tensor) -> Tensor:
    """-ln IoU where boxes overlap, else mmdetection's bound, through which no gradient goes."""
    some = iou(b1.detach(), b2.detach()) < 1
    ratio = torch.where(some, 1 - iou(b1, b2), 1.0)
    return torch.where(some, -ratio.log(), -math.log(1e-7))


def test_log_is_unit_box(device):
    boxes1, boxes2 = (torch.cat([b, random(200, device)]) for b in special(device))
    area = ((boxes1[:, 2:] != boxes1[:, :2]) & (boxes2[:, 2:] != boxes2[:, :2])).all(1)
    boxes1, boxes2 = boxes1[area], boxes2[area]
    upstream = torch.rand(len(boxes1), device=device) + 0.5
    exact = results(unit_box, boxes1.double(), boxes2.double(), upstream)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        for got, wanted in zip(results(box_iou_loss, boxes1.to(dtype), boxes2.to(dtype), upstream, log=True), exact, strict=True):
            assert error(got, wanted) < bound


@pytest.mark.parametrize("neg_gamma", [True, False])
def test_siou_as_mmdetection_has_it(neg_gamma, device):
    """Where mmdetection's cost falls with the distance, some random pairs reach its bound of 0, others do not."""
    boxes1, boxes2 = random(300, device, torch.float64), random(300, device, torch.float64)
    boxes2[::2] = boxes1[::2] + torch.rand(150, 4, device=device, dtype=torch.float64) / 8
    exact = results(lambda a, b: their_siou(a, b, neg_gamma), boxes1, boxes2)
    assert neg_gamma or 5 < (exact[0] == 0).sum() < 280
    for got, wanted in zip(results(scylla_box_iou_loss, boxes1, boxes2, neg_gamma=neg_gamma), exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)
    for got, wanted in zip(results(scylla_box_iou_loss, boxes1.float(), boxes2.float(), neg_gamma=neg_gamma), exact, strict=True):
        assert error(got, wanted) < 3e-5


def test_log_keeps_the_digits_of_small_losses_and_bounds_large_ones(device):
    """-ln(1 - 1e-6) is 1.0000005e-6; boxes that touch at a corner only, and disjoint ones, have -ln eps and no gradient."""
    unit = torch.tensor([[0.0, 0, 1, 1]], device=device)
    almost = torch.tensor([[0.0, 0, 1, 1 - 2.0**-20]], device=device)
    value, g1, _ = results(box_iou_loss, almost, unit, log=True)
    torch.testing.assert_close(value.item(), -math.log1p(-(2.0**-20)), rtol=1e-6, atol=0)
    torch.testing.assert_close(g1[0, 3].item(), -1.0, rtol=1e-5, atol=0)
    assert box_iou_loss(unit, unit, log=True) == 0
    for far in ([1.0, 1, 2, 2], [30.0, 30, 40, 40]):
        value, g1, g2 = results(box_iou_loss, unit, torch.tensor([far], device=device), log=True, eps=1e-6)
        torch.testing.assert_close(value.item(), -math.log(1e-6), rtol=1e-6, atol=0)
        assert not g1.any()
        assert not g2.any()
    with pytest.raises(ValueError, match="eps must be finite and at least 0 and at most 1, got 2"):
        box_iou_loss(unit, unit, log=True, eps=2)
    assert BoxIoULoss(log=True)(unit, almost) == box_iou_loss(unit, almost, log=True)


@pytest.mark.parametrize("beta", [0.0, 1.0, 9.0])
def test_l1_sums_over_the_coordinates(beta, device):
    boxes1, boxes2 = random(9, device), random(9, device)
    boxes2[:2] = boxes1[:2]
    function = (lambda a, b: box_l1_loss(a, b)) if beta == 0 else (lambda a, b: box_smooth_l1_loss(a, b, "none", beta))
    judge = F.l1_loss if beta == 0 else lambda a, b, reduction: F.smooth_l1_loss(a, b, reduction=reduction, beta=beta)
    for got, exact in zip(
        results(function, boxes1, boxes2), results(lambda a, b: judge(a, b, reduction="none").sum(1), boxes1, boxes2), strict=True
    ):
        torch.testing.assert_close(got, exact)
    torch.testing.assert_close(box_smooth_l1_loss(boxes1, boxes2, "mean", beta), 4 * judge(boxes1, boxes2, reduction="mean"))


@pytest.mark.each("dtype")
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_both(loss, dtype, device, all_cases):
    """Over all samples, by default of each loss a third, and modes; each alone as with the other; upstream gradients other than 1."""
    first = list(LOSSES).index(loss.name) + (dtype == torch.float16)
    for number, sample in enumerate(samples(loss, device, dtype)):
        if number % 3 != first % 3 and not all_cases:
            continue
        reduction = "sum" if "normalizer" in sample.kwargs else "none"
        upstream = torch.rand(loss.reference(sample.x, sample.target, reduction=reduction, **sample.kwargs).shape, device=device) + 0.5
        wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in sample.kwargs.items()}
        exact = results(loss.reference, sample.x.double(), sample.target.double(), upstream.double(), reduction=reduction, **wide)
        plain = results(loss.reference, sample.x, sample.target, upstream, reduction=reduction, **sample.kwargs)
        bound = 3e-6 if dtype == torch.float32 else 2.0**-9
        kwargs = {**sample.kwargs, "reduction": reduction}
        for mode in (None,) if reduction == "none" else ("forward", "backward"):
            ours = results(loss.function, sample.x, sample.target, upstream, **kwargs, gradient=mode)
            for got, g_exact, g_plain in zip(ours[1:], exact[1:], plain[1:], strict=True):
                assert got.dtype == dtype
                assert error(got, g_exact) <= error(g_plain, g_exact) + bound, (sample.name, mode)
            for i, boxes in enumerate((sample.x, sample.target)):
                leaf = boxes.detach().clone(memory_format=torch.preserve_format).requires_grad_()
                pair = (leaf, sample.target) if i == 0 else (sample.x, leaf)
                (alone,) = torch.autograd.grad((loss.function(*pair, **kwargs, gradient=mode) * upstream).sum(), leaf)
                assert error(alone, ours[1 + i]) <= bound, (sample.name, mode)  # the compiler contracts other sums where one is asked for


@FORMS
@pytest.mark.parametrize("format", ["xyxy", "cxcywh"])
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e6])
def test_equal_boxes_have_loss_zero(function, format, scale, device):
    """Exactly, where torchvision's eps leaves 1.2e-7 of a unit square, and 1e-3 of a hundredth of one."""
    boxes = random(300, device) * scale
    value, g1, g2 = results(function, boxes, boxes, format=format)
    assert torch.equal(value, torch.zeros_like(value))
    smallest_side = (boxes[:, 2:] if format == "cxcywh" else boxes[:, 2:] - boxes[:, :2]).amin(1, keepdim=True)
    assert ((g1 * smallest_side).abs() < 1e-6).all()
    assert ((g2 * smallest_side).abs() < 1e-6).all()
    unit = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=device)
    assert function(unit, unit) == 0
    if function is generalized_box_iou_loss:
        assert torchvision.ops.generalized_box_iou_loss(unit, unit) > 1e-7


@FORMS
@pytest.mark.parametrize("format", ["xyxy", "cxcywh"])
def test_boxes_without_area(function, format, device):
    """Finite value and gradients where torchvision's CIoU is nan, as the reference has them; those of equal points are 0."""
    lines = [[5.0, 0, 5, 10], [5.0, 4, 5, 20], [0.0, 3, 8, 3], [2.0, 3, 30, 3], [3.0, 4, 3, 4], [1.0, 1, 9, 9], [0.0, 0, 0, 0]]
    corners = torch.tensor(lines, device=device)
    boxes = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1) if format == "cxcywh" else corners
    first, second = (b.reshape(-1, 4) for b in (boxes[:, None].expand(7, 7, 4), boxes[None].expand(7, 7, 4)))
    ours = results(function, first, second, format=format)
    exact = results(function, first.double(), second.double(), format=format)
    for got, wanted in zip(ours, exact, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    no_area = ours[0].view(7, 7)[torch.tensor([0, 1, 2, 3, 4, 6], device=device), torch.tensor([0, 1, 2, 3, 4, 6], device=device)]
    assert (no_area == 1).all()
    assert (ours[1].view(7, 7, 4)[4, 4] == 0).all()
    if function is complete_box_iou_loss and format == "xyxy":
        theirs = results(torchvision.ops.complete_box_iou_loss, first, second)
        assert theirs[0].isnan().any()
        assert theirs[1].isnan().any()
        same = theirs[0].isfinite()
        torch.testing.assert_close(ours[0][same], theirs[0][same], rtol=1e-5, atol=1e-6)


@MODES
@pytest.mark.parametrize("loss", [LOSSES["giou"], LOSSES["box_l1"]], ids=lambda loss: loss.name)
def test_weights_and_divisors(loss, mode, device):
    """The mean divides by the pairs, also with weights; a normalizer in its place; one of 0 gives 0 unless empty="nan"."""
    boxes1, boxes2, weight = random(7, device), random(7, device), torch.rand(7, device=device)
    each = loss.function(boxes1, boxes2)
    for options, expected in (
        ({"reduction": "mean"}, each.mean()),
        ({"reduction": "mean", "weight": weight}, (each * weight).sum() / 7),
        ({"reduction": "sum", "weight": weight}, (each * weight).sum()),
        ({"reduction": "mean", "weight": weight, "normalizer": weight.sum()}, (each * weight).sum() / weight.sum()),
        ({"reduction": "sum", "normalizer": 5}, each.sum() / 5),
        ({"reduction": "sum", "normalizer": 0, "empty": "nan"}, each.sum() * INF),
        ({"reduction": "sum", "normalizer": 0}, each.sum() * 0),
        ({"reduction": "sum", "normalizer": torch.tensor(0.0, device=device)}, each.sum() * 0),
    ):
        value, g1, _ = results(loss.function, boxes1, boxes2, gradient=mode, **options)
        torch.testing.assert_close(value, expected)
        if options.get("normalizer") is not None and expected == 0:
            assert (g1 == 0).all()
    torch.testing.assert_close(loss.function(boxes1, boxes2, weight=weight), each * weight)


@pytest.mark.large
@EACH
def test_offsets_beyond_32_bits(loss, device):
    """A small view of a large tensor: the offsets, not the count of pairs, need 64 bits; between pairs, and between coordinates."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # untouched pages take no memory
    memory = torch.empty(2**32, dtype=torch.float16, device=device)
    for strides in ((2**30, 7), (2, 2**30)):
        boxes = memory.as_strided((3, 4), strides)
        boxes.copy_(random(3, device))
        other = random(3, device)
        exact = loss.reference(boxes.double(), other.double(), reduction="sum")
        torch.testing.assert_close(loss.function(boxes, other, reduction="sum").double(), exact, rtol=1e-5, atol=0)


BOX = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)


@pytest.mark.parametrize(
    ("kind", "message", "boxes1", "boxes2", "options"),
    [
        (TypeError, "boxes2 must be of a floating dtype, got torch.int64", BOX, BOX.long(), {}),
        (ValueError, r"boxes1 must have shape \(..., 4\), got \(3, 5\)", torch.zeros(3, 5), torch.zeros(3, 5), {}),
        (ValueError, r"boxes1 must have shape \(..., 4\), got \(\)", torch.zeros(()), BOX, {}),
        (ValueError, r"boxes2 must have the shape of boxes1, \(3, 4\), got \(1, 4\)", BOX, BOX[:1], {}),
        (ValueError, "boxes2 must be on the device of boxes1, cpu, got meta", BOX, BOX.to("meta"), {}),
        (ValueError, r"weight must hold one weight a pair and broadcast to \(3,\), got \(4,\)", BOX, BOX, {"weight": torch.ones(4)}),
        (ValueError, r"weight must hold one weight a pair .* got \(3, 1\)", BOX, BOX, {"weight": torch.ones(3, 1)}),
        (TypeError, "weight must be of a floating dtype, got torch.bool", BOX, BOX, {"weight": torch.ones(3) > 0}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
@EACH
def test_mistakes(loss, kind, message, boxes1, boxes2, options):
    before = launch_counts()
    with pytest.raises(kind, match=message):
        loss.function(boxes1, boxes2, **options)
    assert launch_counts() == before


def test_mistakes_in_options():
    for function in OVERLAP:
        with pytest.raises(ValueError, match="format must be one of 'xyxy', 'cxcywh', got 'xywh'"):
            function(BOX, BOX, format="xywh")


def test_a_formula_of_overlap_takes_its_numbers_after_eps(monkeypatch):
    """As the loss of a power of the overlap, 1 - (I/U)^α, would be defined in one file."""
    reference = Formula(lambda b1, b2, eps, alpha: 1 - overlap_ratio(b1, b2, eps) ** alpha, DeviceFormula(None))
    monkeypatch.setitem(FORMULAS, "power_of_overlap", reference)
    boxes1, boxes2 = torch.tensor([[0.0, 0.0, 2.0, 2.0]], requires_grad=True), torch.tensor([[1.0, 1.0, 3.0, 3.0]])
    call = corner_loss("power_of_overlap", boxes1, boxes2, "sum", 1e-7, {}, 3).call
    assert call.hyper == [1e-7, 3.0]
    value = boxes_reference(call)
    assert value.item() == pytest.approx(1 - 1 / 7**3)
    (gradient,) = torch.autograd.grad(value, boxes1)  # I = 1 and U = 7: ∂I/∂x₂ = 1, ∂A₁/∂x₂ = 2, ∂(I/U) = (7·1 - 1·(2 - 1)) / 49
    assert gradient[0, 2].item() == pytest.approx(-3 / 49 * 6 / 49)
