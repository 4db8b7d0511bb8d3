"""Generalised Dice and MCC loss equal MONAI's and segmentation_models_pytorch's, with gradients, ignored pixels and second derivatives."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import boundary_loss, generalized_dice_loss, hausdorff_loss, mcc_loss
from lossforge.losses.testing import error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    monai = pytest.importorskip("monai.losses")
    smp = pytest.importorskip("segmentation_models_pytorch")

LOSSES = {"generalized_dice": (generalized_dice_loss, monai.GeneralizedDiceLoss), "mcc": (mcc_loss, monai.MCCLoss)}


def problem(device):
    x = torch.randn(2, 4, 9, 13, dtype=torch.float64, device=device)
    target = torch.randint(0, 4, (2, 9, 13), device=device)
    target[0] = target[0].clamp(max=2)  # a class without pixels
    return x, target, F.one_hot(target, 4).movedim(-1, 1)


def differentiated(loss, x, *args, **options):
    leaf = x.detach().clone().requires_grad_()
    value = loss(leaf, *args, **options).flatten()
    up = torch.linspace(-1, 2, value.numel(), dtype=value.dtype, device=x.device)
    return value.detach(), *torch.autograd.grad((value * up).sum(), leaf)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_as_monai(name, activation, device):
    x, target, one_hot = problem(device)
    ours, theirs = LOSSES[name]
    extra = [{"weighting": "simple"}, {"weighting": "uniform"}] if name == "generalized_dice" else []
    for options in ({}, {"batch": True}, {"include_background": False}, {"smooth_nr": 0.5, "smooth_dr": 2.0}, *extra):
        for reduction in ("mean", "none"):
            named = {"w_type" if k == "weighting" else k: v for k, v in options.items()}
            exact = theirs(**named, reduction=reduction, **{activation: True})
            wanted = differentiated(exact, x, one_hot.double())
            for given, dtype, bound in ((target, torch.float64, 1e-6), (one_hot, torch.float32, 5e-6)):
                found = differentiated(ours, x.to(dtype), given, reduction=reduction, activation=activation, **options)
                for got, right in zip(found, wanted, strict=True):
                    assert got.dtype == dtype
                    assert error(got, right) < bound
            half = differentiated(ours, x.half(), target, reduction=reduction, activation=activation, **options)
            assert half[0].dtype == torch.float32
            assert error(half[1], differentiated(exact, x.half().double(), one_hot.double())[1]) < 2.0**-8


def test_as_segmentation_models_pytorch(device):
    p = torch.rand(3, 1, 9, 13, dtype=torch.float64, device=device)
    target = torch.rand(3, 1, 9, 13, device=device) > 0.7
    wanted = differentiated(smp.losses.MCCLoss(eps=0.0), p, target.double())
    found = differentiated(mcc_loss, p, target, activation=None, batch=True, smooth_dr=0.0)
    for got, right in zip(found, wanted, strict=True):
        assert error(got, right) < 1e-6


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_pixels_are_as_if_cut_off(name, device):
    """Neither their logits, which are nan, nor their number changes value or gradient."""
    x, target, _ = problem(device)
    loss = LOSSES[name][0]
    wanted = differentiated(loss, x[..., :9], target[..., :9], reduction="none")
    target[..., 9:], x[..., 9:] = 255, float("nan")
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        value, g = differentiated(loss, x.to(dtype), target, reduction="none", ignore_index=255)
        assert error(value, wanted[0]) < bound
        assert error(g[..., :9], wanted[1]) < bound
        assert not g[..., 9:].any()


def test_an_image_of_ignored_pixels(device):
    """It has no nan, and adds 0 to the sum of the others."""
    x, target, _ = problem(device)
    for given in (target, target.to(torch.uint8)):
        for loss in (generalized_dice_loss, mcc_loss):
            wanted = loss(x[1:], given[1:], reduction="sum", ignore_index=255)
            ignored = torch.where(torch.arange(len(x), device=device).view(-1, 1, 1) == 0, 255, given)
            value, g = differentiated(loss, x, ignored, reduction="sum", ignore_index=255)
            assert error(value[0], wanted) < 1e-12
            assert not g[0].any()


@pytest.mark.parametrize("weighting", ["square", "simple", "uniform"])
def test_generalized_dice_of_soft_targets_that_require_grad(weighting, device):
    """The weights depend on the targets too; a class without pixels, whose weight is another's, makes none nan."""
    x, y = problem(device)[0], torch.rand(2, 4, 9, 13, dtype=torch.float64, device=device)

    def exact(x, y):
        p = x.softmax(1)
        shared, either, true = (t.flatten(2).sum(2) for t in (p * y, p + y, y))
        w = true ** -{"square": 2, "simple": 1, "uniform": 0}[weighting]
        return (1 - (2 * (w * shared).sum(1) + 1e-5) / ((w * either).sum(1) + 1e-5)).mean()

    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        leaves, wide = ([t.to(to, copy=True).requires_grad_() for t in (x, y)] for to in (dtype, torch.float64))
        found = torch.autograd.grad(3 * generalized_dice_loss(*leaves, weighting), leaves)
        assert all(error(*each) < bound for each in zip(found, torch.autograd.grad(3 * exact(*wide), wide), strict=True))
        leaves[1].data[0, 3] = 0
        assert all(g.isfinite().all() for g in torch.autograd.grad(generalized_dice_loss(*leaves, weighting), leaves))


def test_class_156_of_uint8_is_not_ignored(device):
    """torch takes -100 as 156 when it compares it with numbers of 8 bits."""
    x = torch.randn(1, 160, 2, 3, device=device)
    target = torch.tensor([[[156, 156, 3], [2, 1, 0]]], dtype=torch.uint8, device=device)
    torch.testing.assert_close(mcc_loss(x, target), mcc_loss(x, target.long()))


@pytest.mark.parametrize(
    ("activation", "classes", "size"),
    [("sigmoid", 1, 8.0), (None, 2, 8.0), ("softmax", 3, 8.0), ("softmax", 3, 2.0), ("softmax", 600, 6.0)],
)
def test_mcc_of_a_class_of_nearly_all_pixels(activation, classes, size, device):
    """10 pixels have another class, of 65,536 or 256. What they add is not lost beside the sums of the others."""
    edge = 16 if classes > 3 else 256
    target = torch.ones(1, edge, edge, dtype=torch.int64, device=device)
    target.view(-1)[:10] = 0
    one_hot = F.one_hot(target, max(classes, 2)).movedim(-1, 1)[:, -classes:]
    x = torch.randn(1, classes, edge, edge, device=device) + size * (2.0 * one_hot - 1)
    x = x.sigmoid() if activation is None else x
    for given, wide in ((target, target), (one_hot.float(), one_hot.double())):
        wanted = differentiated(mcc_loss, x.double(), wide, activation=activation, reduction="none")
        value, g = differentiated(mcc_loss, x, given, activation=activation, reduction="none")
        assert (value - wanted[0]).abs().max() < 2e-6
        if activation != "softmax" or size < 3:  # the gradient of a softmax near 1 has the digits of 1
            assert error(g, wanted[1]) < 5e-5


def test_mcc_of_an_empty_region_without_smoothing_has_gradient_0(device):
    target = torch.zeros(2, 1, 4, 4, dtype=torch.bool, device=device)
    target[1, 0, 1] = True
    value, g = differentiated(mcc_loss, target.float(), target, activation=None, smooth_dr=0.0, reduction="none")
    assert value[0] == 0
    assert not g[0].any()
    assert g[1].isfinite().all()


@pytest.mark.parametrize("loss", [generalized_dice_loss, mcc_loss, boundary_loss, hausdorff_loss])
def test_no_images(loss, device):
    """As torch: a mean of nothing is nan, a sum 0."""
    x = torch.randn(0, 4, 9, 13, device=device, requires_grad=True)
    for target in (torch.zeros(0, 9, 13, dtype=torch.int64, device=device), torch.zeros(0, 4, 9, 13, device=device)):
        assert loss(x, target).isnan()
        loss(x, target, reduction="sum").backward()
        assert loss(x, target, reduction="sum") == 0
        assert loss(x, target, reduction="none").numel() == 0
