"""Losses of one's own: their kernels, modules and names, where they work, and what the checks find of them."""

import functools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lossforge.kernels.formulas.box import hull, length, overlap
from lossforge.kernels.math import logistic
from lossforge.losses import boxes, check, distance_box_iou_loss, elementwise, fuse_linear, rowwise
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.report import Report
from lossforge.losses.testing import error


@elementwise(hyper={"delta": 1.0})
@triton.jit
def charbonnier(x, y, delta):
    """L = sqrt((x - y)² + δ²) - δ"""
    d = x - y
    return tl.sqrt(d * d + delta * delta) - delta


def charbonnier_torch(x, y, delta):
    return ((x - y).square() + delta**2).sqrt() - delta


@elementwise
@triton.jit
def without_hyper(x, y):
    return (x - y) * (x - y)


@elementwise(reference=lambda x, y: F.softplus(x) - x * y)
@triton.jit
def with_reference(x, y):
    p, _, log1p = logistic(x)
    return tl.maximum(x, 0.0) - x * y + log1p, p - y


def test_kernel_computes_value_and_gradient(device, points):
    x, y = (t.detach().float().view(20, 25).to(device) for t in points)
    for loss, hyper, plain in ((charbonnier, {"delta": 0.5}, charbonnier_torch), (without_hyper, {}, lambda x, y: (x - y).square())):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        value = loss(leaf, y, **hyper, weight=y[:1])
        value.backward()
        expected = (plain(wide, y.double(), **hyper) * y[:1]).mean()
        expected.backward()
        assert error(value, expected) < 1e-6
        assert error(leaf.grad, wide.grad) < 1e-6
    index = torch.tensor([*range(18), -1, -2], device=device)
    one_hot = (index.unsqueeze(1) == torch.arange(25, device=device)).float()
    expected = charbonnier_torch(x, one_hot, 0.5)[:-1].mean()
    assert error(charbonnier(x, index, delta=0.5), expected) < 1e-6


def test_a_tensor_as_the_last_hyper_parameter(device, points):
    x, y = (t.detach().float().view(20, 25).to(device) for t in points)
    delta = torch.linspace(0.1, 1.0, 25, device=device)
    expected = charbonnier_torch(x, y, delta).mean()
    assert error(charbonnier(x, y, delta=delta), expected) < 1e-6
    module = charbonnier.module(delta=delta)
    assert "delta" in dict(module.named_buffers())
    assert error(module(x, y), expected) < 1e-6


def test_module_keeps_its_options(points):
    x, y = (t.detach().float() for t in points)
    module = charbonnier.module(delta=0.5, reduction="sum")
    assert torch.equal(module(x, y), charbonnier(x, y, delta=0.5, reduction="sum"))
    assert "delta=0.5" in repr(module)
    with pytest.raises(TypeError, match=r"CustomModule\(\) got an unexpected keyword argument 'delto'; did you mean 'delta'"):
        charbonnier.module(delto=0.5)


def test_module_keeps_a_hyper_parameter_whose_name_belongs_to_a_call_elsewhere(points):
    @elementwise(hyper={"margin": 1.0})
    @triton.jit
    def hinge(x, y, margin):
        return tl.maximum(margin - x * y, 0.0)

    x, y = (t.detach().float() for t in points)
    torch.testing.assert_close(hinge.module(margin=0.25)(x, y), (0.25 - x * y).clamp(min=0).mean())


def test_code_around_a_loss_of_ones_own_is_not_left_out():
    @functools.wraps(charbonnier)
    def twice(*args, **kwargs):
        return 2 * charbonnier(*args, **kwargs)

    with pytest.raises(TypeError, match="wraps a loss or is none"):
        fuse_linear(twice)


def test_names_survive_a_pickle():
    assert pickle.loads(pickle.dumps(charbonnier)) is charbonnier
    assert charbonnier.__doc__ == "L = sqrt((x - y)² + δ²) - δ"
    assert "delta=1.0" in repr(charbonnier)
    assert "derived" in repr(charbonnier)
    assert "given" in repr(with_reference)


def test_second_definition_takes_its_own_formula():
    made = []
    for _ in range(2):

        @elementwise
        @triton.jit
        def twice(x, y):
            return (x - y) * 2.0

        made.append(twice)
    assert made[0].loss.name != made[1].loss.name


@rowwise(hyper={"q": 0.7})
@triton.jit
def bounded(z, q):
    """L = (1 - exp(-q z)) / q"""
    return (1.0 - tl.exp(-q * z)) / q


@boxes(hyper={"eps": 1e-6})
@triton.jit
def distance_iou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """L = 1 - I/U + ρ²/d²"""
    w, h = tl.minimum(x2, u2) - tl.maximum(x1, u1), tl.minimum(y2, v2) - tl.maximum(y1, v1)
    inter = tl.where((w > 0) & (h > 0), w * h, 0.0)
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - inter
    wide, high = tl.maximum(x2, u2) - tl.minimum(x1, u1), tl.maximum(y2, v2) - tl.minimum(y1, v1)
    dx, dy = (x1 + x2) - (u1 + u2), (y1 + y2) - (v1 + v2)
    return 1.0 - inter / (union + eps) + 0.25 * (dx * dx + dy * dy) / (wide * wide + high * high + eps)


def test_a_row_wise_loss_of_ones_own(device):
    x = torch.randn(9, 12, device=device, requires_grad=True)
    target = torch.arange(9, device=device)
    weight = torch.rand(12, device=device)
    (g,) = torch.autograd.grad(bounded(x, target, q=0.5, weight=weight), x)
    wide = x.detach().double().requires_grad_()
    p = wide.softmax(1)[torch.arange(9), target]
    expected = (weight[target] * (1 - p**0.5) / 0.5).sum() / weight[target].sum()
    expected.backward()
    assert error(bounded(x, target, q=0.5, weight=weight), expected) < 1e-6
    assert error(g, wide.grad) < 1e-6
    with pytest.raises(TypeError, match="target must hold class indices"):
        bounded(x, x.softmax(1))


def test_a_loss_of_boxes_of_ones_own(device):
    """Beside the library's own, whose gradient is written out."""
    corner, side = torch.rand(2, 50, 2, device=device), torch.rand(2, 50, 2, device=device) + 0.1
    one, other = (torch.cat([c, c + s], -1).requires_grad_() for c, s in zip(corner, side, strict=True))
    ours = torch.autograd.grad(distance_iou(one, other, eps=1e-12), (one, other))
    theirs = torch.autograd.grad(distance_box_iou_loss(one, other, "mean"), (one, other))
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b) < 1e-5
    assert error(distance_iou.module(reduction="sum")(one, other), distance_box_iou_loss(one, other, "sum")) < 1e-5


@boxes(hyper={"eps": 1e-7})
@triton.jit
def sides_and_overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """L = 1 - I/U + |w₁ - w₂| / w_C"""
    return overlap(x1, y1, x2, y2, u1, v1, u2, v2, eps) + tl.abs(length(x1, x2) - length(u1, u2)) / hull(x1, x2, u1, u2)


def test_shared_functions_of_boxes_turn_flipped_ones_back(device):
    """In a formula whose gradient is derived, and in its translation to torch: the other box at 2 to 6 is 4 wide, the hull 8."""
    for dtype in (torch.float32, torch.float64):
        box = torch.tensor([[8.0, 1.0, 0.0, 4.0]], dtype=dtype, device=device, requires_grad=True)
        other = torch.tensor([[2.0, 1.0, 6.0, 5.0]], dtype=dtype, device=device)
        value = sides_and_overlap(box, other, reduction="sum")
        (g,) = torch.autograd.grad(value, box)
        assert value.item() == pytest.approx(1 + 4 / 8)
        assert g[0].tolist() == pytest.approx([2 / 8, 0.0, -2 / 8, 0.0])  # (1 + depth / hull) / hull with depth 8


@pytest.mark.parametrize("loss", [bounded, distance_iou], ids=lambda loss: loss.__name__)
def test_formulas_of_rows_and_boxes_are_checked(loss):
    report = Report(loss.__name__)
    check_formula(loss.loss, report, 0)
    assert report.passed, str(report)
    assert len(report.findings) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("loss", [charbonnier, *([bounded, distance_iou] if torch.cuda.is_available() else [])], ids=repr)
def test_all_checks_pass(loss, device):
    report = check(loss, device=device)
    assert report.passed, str(report)
    assert len(report.findings) > 12
    assert {f.name for f in report.findings if f.passed is None} <= {"CUDA graph, no host synchronisation"}


@elementwise(reference=lambda x, y: (x - y).abs())
@triton.jit
def wrong_reference(x, y):
    d = x - y
    return d * d


def test_check_finds_a_wrong_reference():
    report = Report("wrong_reference")
    check_formula(wrong_reference.loss, report, 0)
    (failure,) = report.failures
    assert failure.name == "reference against the formula"
    assert re.match(r"at x=.*, y=.*: formula .*, reference", failure.detail)
    assert not report


@elementwise
@triton.jit
def zero_one(x, y):
    return (x > 0.5) != (y > 0.5)


def test_a_comparison_is_a_number_of_the_inputs_dtype(device, points):
    """On the CPU the mean of bools would be taken in bools."""
    x, y = (torch.rand(6, 5, device=device) for _ in range(2))
    wrong = ((x > 0.5) != (y > 0.5)).float()
    for reduction, expected in (("mean", wrong.mean()), ("sum", wrong.sum()), ("none", wrong)):
        for loss in (zero_one, zero_one.reference):
            torch.testing.assert_close(loss(x, y, reduction=reduction), expected)
    assert check(zero_one, device="cpu", quick=True)


def test_call_errors():
    x = torch.zeros(3)
    with pytest.raises(TypeError, match="hyper must map the names of hyper-parameters to their defaults, got list"):
        elementwise(charbonnier, hyper=["delta"])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'gama'\. It takes input, target, reduction, delta, "):
        charbonnier(x, x, gama=1)
    with pytest.raises(TypeError, match="delta must be a number, got str"):
        charbonnier(x, x, delta="a")
    with pytest.raises(ValueError, match=r"target must have the shape of input, \(3,\), got \(2,\)"):
        charbonnier(x, x[:2])
