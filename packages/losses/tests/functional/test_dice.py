"""Losses of overlapping regions: against MONAI's and segmentation_models_pytorch's formulas, by hand, at their edges, and their errors."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels import launch_counts
from lossforge.losses import (
    cross_entropy,
    dice_ce_loss,
    dice_loss,
    focal_tversky_loss,
    jaccard_loss,
    plain_torch,
    tversky_loss,
)
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error

NAN, INF = float("nan"), float("inf")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
OVERLAP = [loss for loss in LOSSES.values() if loss.template.name == "overlap"]
EACH = pytest.mark.parametrize("loss", OVERLAP, ids=lambda loss: loss.name)


def gradient_of(function, x, *args, **kwargs):
    x = x.detach().clone().requires_grad_()
    value = function(x, *args, **kwargs)
    (value * torch.arange(1, value.numel() + 1, device=x.device).view(value.shape)).sum().backward()
    return value.detach(), x.grad


def activated(x: Tensor, activation: str | None) -> Tensor:
    return {"softmax": lambda: x.softmax(1), "sigmoid": x.sigmoid, None: lambda: x}[activation]()


def one_hot(target: Tensor, classes: int) -> Tensor:
    return F.one_hot(target, classes).movedim(-1, 1).double()


def monai_dice(
    x,
    y,
    include_background=True,
    activation="softmax",
    squared_pred=False,
    jaccard=False,
    reduction="mean",
    smooth_nr=1e-5,
    smooth_dr=1e-5,
    batch=False,
    weight=None,
):
    """monai.losses.DiceLoss on a one-hot target."""
    p = activated(x, activation)
    first = 0 if include_background else 1
    p, y = p[:, first:], y[:, first:]
    axes = ([0] if batch else []) + list(range(2, x.ndim))
    intersection = (y * p).sum(axes)
    if squared_pred:
        y, p = y**2, p**2
    denominator = y.sum(axes) + p.sum(axes)
    denominator = 2 * (denominator - intersection) if jaccard else denominator
    f = 1 - (2 * intersection + smooth_nr) / (denominator + smooth_dr)
    f = f if weight is None else f * weight
    return {"mean": f.mean, "sum": f.sum, "none": lambda: f}[reduction]()


def monai_tversky(x, y, activation="softmax", alpha=0.5, beta=0.5, reduction="mean", smooth_nr=1e-5, smooth_dr=1e-5, batch=False):
    """monai.losses.TverskyLoss on a one-hot target."""
    p = activated(x, activation)
    axes = ([0] if batch else []) + list(range(2, x.ndim))
    tp = (p * y).sum(axes)
    fp, fn = alpha * (p * (1 - y)).sum(axes), beta * ((1 - p) * y).sum(axes)
    f = 1 - (tp + smooth_nr) / (tp + fp + fn + smooth_dr)
    return {"mean": f.mean, "sum": f.sum, "none": lambda: f}[reduction]()


def smp(kind: str, x: Tensor, target: Tensor, mode: str, smooth=0.0, ignore_index=None, alpha=0.5, beta=0.5, gamma=1.0, eps=1e-7) -> Tensor:
    """segmentation_models_pytorch's DiceLoss, JaccardLoss and TverskyLoss."""
    n, classes = x.shape[:2]
    p = x.log_softmax(1).exp() if mode == "multiclass" else F.logsigmoid(x).exp()
    p = p.view(n, classes, -1)
    if mode == "multiclass":
        target = target.view(n, -1)
        mask = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
        p = p * mask.unsqueeze(1)
        y = F.one_hot(target * mask, classes).permute(0, 2, 1) * mask.unsqueeze(1)
    else:
        y = target.view(n, classes, -1)
        if ignore_index is not None:
            mask = y != ignore_index
            p, y = p * mask, y * mask
    i = (p * y.to(p.dtype)).sum((0, 2))
    if kind == "tversky":
        scores = (i + smooth) / (i + alpha * (p * (1 - y)).sum((0, 2)) + beta * ((1 - p) * y).sum((0, 2)) + smooth).clamp_min(eps)
    elif kind == "dice":
        scores = (i + smooth) / ((p + y).sum((0, 2)) / 2 + smooth).clamp_min(eps)
    else:
        scores = (i + smooth) / ((p + y).sum((0, 2)) - i + smooth).clamp_min(eps)
    return ((1 - scores) * (y.sum((0, 2)) > 0)).mean() ** gamma


def agree(ours, theirs, x: Tensor) -> None:
    """Values and gradients, ours in float32 and in float64, theirs in float64."""
    exact, g_exact = gradient_of(theirs, x.double())
    for dtype, bound in ((torch.float32, 3e-6), (torch.float64, 1e-12)):
        value, g = gradient_of(ours, x.to(dtype))
        assert value.shape == exact.shape
        assert error(value, exact) < bound
        assert error(g, g_exact) < bound


@pytest.fixture
def pair(device) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, 5, 6, device=device) * 2, torch.randint(0, 4, (3, 5, 6), device=device)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
def test_monai(activation, batch, reduction, pair):
    x, target = pair
    x = x if activation else x.sigmoid()
    y = one_hot(target, 4)
    common = {"activation": activation, "batch": batch, "reduction": reduction}
    for options in ({}, {"squared_pred": True}, {"include_background": False}, {"smooth_nr": 1.0, "smooth_dr": 2.0}):
        agree(lambda x: dice_loss(x, target, **common, **options), lambda x: monai_dice(x, y, **common, **options), x)  # noqa: B023
    halved = {"smooth_nr": 2e-5, "smooth_dr": 2e-5}
    agree(lambda x: jaccard_loss(x, target, **common), lambda x: monai_dice(x, y, jaccard=True, **common, **halved), x)
    for options in ({}, {"alpha": 0.3, "beta": 0.7}, {"alpha": 1.5, "beta": 0.25, "smooth_nr": 0.0}):
        agree(lambda x: tversky_loss(x, target, **common, **options), lambda x: monai_tversky(x, y, **common, **options), x)  # noqa: B023


def test_monai_dice_ce(pair):
    x, target = pair
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0], device=x.device)
    wide = weight.double()

    def theirs(x):
        return 0.5 * monai_dice(x, one_hot(target, 4), weight=wide) + 2 * F.cross_entropy(x, target, wide)

    agree(lambda x: dice_ce_loss(x, target, weight=weight.to(x.dtype), lambda_dice=0.5, lambda_ce=2.0), theirs, x)

    def without_background(x):
        return monai_dice(x, one_hot(target, 4), False, batch=True, weight=wide[1:]) + F.cross_entropy(x, target, wide)

    agree(lambda x: dice_ce_loss(x, target, weight=weight.to(x.dtype), include_background=False, batch=True), without_background, x)
    soft = torch.rand_like(x)
    agree(
        lambda x: dice_ce_loss(x, soft.to(x.dtype)),
        lambda x: monai_dice(x, soft.double()) + F.cross_entropy(x, soft.double()),
        x,
    )
    agree(
        lambda x: dice_ce_loss(x, soft.to(x.dtype), activation="sigmoid", reduction="sum"),
        lambda x: (
            monai_dice(x, soft.double(), activation="sigmoid", reduction="sum")
            + F.binary_cross_entropy_with_logits(x, soft.double(), reduction="sum")
        ),
        x,
    )
    mask = target[:, None] % 2
    agree(
        lambda x: dice_ce_loss(x, mask, activation="sigmoid"),
        lambda x: monai_dice(x, mask.double(), activation="sigmoid") + F.binary_cross_entropy_with_logits(x, mask.double()),
        x[:, :1].contiguous(),
    )


@pytest.mark.parametrize(("kind", "loss"), [("dice", dice_loss), ("jaccard", jaccard_loss), ("tversky", tversky_loss)])
def test_segmentation_models_pytorch(kind, loss, pair):
    """Regions over the batch, classes without target pixels at 0, ignored pixels."""
    x, target = pair
    target = target.clamp(max=2)
    target[0, 1] = 255
    smooth = 2.0 if kind == "dice" else 1.0
    common = {"batch": True, "present_only": True, "smooth_nr": smooth, "smooth_dr": smooth}
    agree(lambda x: loss(x, target, ignore_index=255, **common), lambda x: smp(kind, x, target, "multiclass", 1.0, 255), x)
    mask = torch.where(target == 255, 255, target % 2).unsqueeze(1)
    one = x[:, :1].contiguous()
    options = {"activation": "sigmoid", "ignore_index": 255, **common}
    agree(lambda x: loss(x, mask, **options), lambda x: smp(kind, x, mask, "binary", 1.0, 255), one)
    agree(lambda x: loss(x, mask.squeeze(1).byte(), **options), lambda x: smp(kind, x, mask, "binary", 1.0, 255), one)
    labels = (torch.rand_like(x) < 0.4).float()
    agree(
        lambda x: loss(x, labels.to(x.dtype), activation="sigmoid", **common),
        lambda x: smp(kind, x, labels.double(), "multilabel", 1.0),
        x,
    )


def test_focal_tversky_is_the_power_of_each_region(pair):
    x, target = pair
    y = one_hot(target, 4)
    for gamma in (0.75, 1.0, 2.0):
        agree(
            lambda x: focal_tversky_loss(x, target, gamma=gamma),  # noqa: B023
            lambda x: (monai_tversky(x, y, alpha=0.3, beta=0.7, reduction="none") ** gamma).mean(),  # noqa: B023
            x,
        )


@MODES
@EACH
def test_all_ignored(loss, mode, device):
    """The ratio is smooth_nr / smooth_dr = 1, the loss 0; a mean of cross entropy over nothing is nan, or 0 where asked."""
    x = torch.randn(2, 3, 4, device=device)
    x[0, 1] = NAN
    target = torch.full((2, 4), -100, device=device)
    for empty in ("nan", "zero"):
        value, g = gradient_of(loss.function, x, target, gradient=mode, empty=empty)
        if loss.name == "dice_ce" and empty == "nan":
            assert value.isnan()
        else:
            assert value.abs() < 1e-20
        assert torch.equal(g, torch.zeros_like(g))
    assert loss.function(x, target, reduction="sum").abs() < 1e-20
    assert loss.reference(x, target, reduction="sum").abs() < 1e-20


@EACH
def test_empty_regions_are_finite(loss, device):
    """No target pixel of a class, and none predicted either."""
    x = torch.zeros(1, 2, 3, 3, device=device)
    x[:, 0] = 60.0
    value, g = gradient_of(loss.function, x, torch.zeros(1, 3, 3, dtype=torch.long, device=device))
    assert value.abs() < 1e-6
    assert g.isfinite().all()


@EACH
def test_index_out_of_range(loss, device, monkeypatch):
    target = torch.tensor([[0, 1], [3, 2]])
    with pytest.raises(IndexError, match=r"target must hold 0 to 2, or -100 where ignored, got 3 at row \(1, 0\)"):
        loss.function(torch.rand(2, 3, 2), target)
    with pytest.raises(IndexError, match=r"target must hold 0 to 1, .*, got 3"):
        loss.function(torch.rand(2, 1, 2), target, activation="sigmoid")
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    x = torch.randn(3, 3, 4, device=device)
    good = torch.randint(0, 3, (3, 4), device=device)
    for index in (3, -1, 2**33 + 1, -(2**40)) if loss.name == "dice" or device == "cuda" else (3,):
        target = good.clone()
        target[1, 2] = index
        for function in (loss.function, loss.reference):
            for activation in ("softmax", "sigmoid"):
                value, g = gradient_of(function, x, target, reduction="sum", activation=activation)
                _, g_good = gradient_of(function, x, good, reduction="sum", activation=activation)
                assert value.isnan()
                assert g[1].isnan().all()
                assert torch.equal(g[[0, 2]], g_good[[0, 2]])
        if "none" in loss.reductions:
            value = loss.function(x, target, reduction="none", present_only=True)
            assert value[1, good[1, 0]].isnan()
            assert value[[0, 2]].isfinite().all()


@MODES
def test_infinite_logits(mode, device):
    x = torch.randn(2, 3, 4, device=device)
    x[0, 1, 2] = -INF
    x[0, 2, 1] = -INF
    target = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 0]], device=device)
    value, g = gradient_of(dice_ce_loss, x, target, gradient=mode)
    exact, g_exact = gradient_of(lambda x: monai_dice(x, one_hot(target, 3)) + F.cross_entropy(x, target), x.double())
    assert error(value, exact) < 3e-6
    assert error(g, g_exact) < 3e-6
    assert g[0, 1, 2] == g[0, 2, 1] == 0
    x[0, 1, 2] = INF
    value, g = gradient_of(dice_loss, x, target, reduction="sum", gradient=mode)
    assert value.isnan()
    assert g[0].isnan().all()
    assert g[1].isfinite().all()


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_saturated_logits(dtype, mode, device):
    x = torch.tensor([6e4, -6e4, 30.0, -30.0], device=device).to(dtype).view(1, 1, 4)
    y = torch.tensor([[1, 1, 0, 0]], device=device)
    for loss in (dice_loss, dice_ce_loss):
        value, g = gradient_of(loss, x, y, activation="sigmoid", gradient=mode)
        exact, g_exact = gradient_of(loss, x.double(), y, activation="sigmoid")
        assert error(value, exact) < 1e-6
        torch.testing.assert_close(g.double(), g_exact, rtol=1e-6 if dtype == torch.float32 else 2.0**-10, atol=1e-8)


def test_perfect_prediction_of_focal_tversky_is_finite(device):
    """1 - T is 0, where for γ < 1 the derivative has no limit: the gradient is 0."""
    y = torch.tensor([[0, 1, 1, 0]], device=device)
    p = one_hot(y, 2).float()
    for function in (focal_tversky_loss, LOSSES["focal_tversky"].reference):
        value, g = gradient_of(function, p, y, activation=None)
        assert value < 1e-20
        assert g.isfinite().all()
        assert (g == 0).all()


def test_normalizer(pair):
    x, target = pair
    total, g_total = gradient_of(dice_loss, x, target, reduction="sum")
    for normalizer in (4, torch.tensor(4.0, device=x.device)):
        for mode in ("forward", "backward"):
            value, g = gradient_of(dice_loss, x, target, normalizer=normalizer, gradient=mode)
            torch.testing.assert_close(value, total / 4)
            torch.testing.assert_close(g, g_total / 4)
    for function in (dice_loss, LOSSES["dice"].reference):
        value, g = gradient_of(function, x, target, normalizer=torch.tensor(0.0, device=x.device), empty="zero")
        assert value == 0
        assert torch.equal(g, torch.zeros_like(g))


def test_cross_entropy_alone(pair):
    """λ_dice = 0 is the cross entropy of the row-wise template, ignored pixels, class weights and all."""
    x, target = pair
    target[0, :2] = -100
    weight = torch.rand(4, device=x.device)
    value, g = gradient_of(dice_ce_loss, x, target, weight=weight, lambda_dice=0.0)
    expected, g_expected = gradient_of(cross_entropy, x, target, weight)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g, g_expected, rtol=1e-5, atol=1e-8)


@pytest.mark.large
def test_strides_beyond_32_bits(device):
    """A small view of a large tensor: classes and pixels further apart than 32 bits reach."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # untouched pages take no memory
    memory = torch.empty(2**31 + 2**11, dtype=torch.float16, device=device)
    target = torch.randint(0, 3, (2, 4), device=device)
    for strides in ((40, 2**30, 2), (40, 9, 2**29)):
        x = memory.as_strided((2, 3, 4), strides)
        x.copy_(torch.randn(2, 3, 4))
        assert error(dice_ce_loss(x, target), dice_ce_loss(x.double(), target)) < 1e-6


@pytest.mark.parametrize("smooth", [0.0, 1e-7])
@pytest.mark.parametrize("pixels", [41, 47, 1000])  # 82 · (1 / 82) and 94 · (1 / 94) are below 1 in float32
@EACH
def test_disjoint_and_identical_regions(loss, pixels, smooth, device):
    """Exactly 1 and exactly 0, as the formula has them, at sums whose reciprocal is rounded."""
    if loss.name == "dice_ce":
        pytest.skip("its cross entropy is neither 0 nor 1")
    y = torch.zeros(1, 1, 3 * pixels, device=device)
    y[..., :pixels] = 1
    options = {"activation": None, "smooth_nr": smooth, "smooth_dr": smooth}
    for reduction in ("mean", "none"):
        disjoint = loss.function(y.roll(pixels, -1).requires_grad_(), y, reduction=reduction, **options)
        identical = loss.function(y.clone().requires_grad_(), y, reduction=reduction, **options)
        assert disjoint.unique().tolist() == [1.0]
        assert identical.unique().tolist() == [0.0]


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, r"input must have shape \(N, C, d…\), got \(3,\)", {"input": torch.zeros(3)}),
        (TypeError, "target must be of an integer dtype, got torch.bool", {"target": torch.zeros(2, 4, dtype=torch.bool)}),
        (ValueError, r"target must have the shape of input, \(2, 3, 4\), where it is dense, got \(2, 4\)", {"target": torch.zeros(2, 4)}),
        (ValueError, r"target must have shape \(2, 4\), got \(2, 5\)", {"target": torch.zeros(2, 5, dtype=torch.long)}),
        (ValueError, r"weight must hold one number a class, shape \(3,\), got \(2,\)", {"weight": torch.ones(2)}),
        (TypeError, "weight must be of a floating dtype, got torch.int64", {"weight": torch.ones(3, dtype=torch.long)}),
        (ValueError, "activation must be one of 'softmax', 'sigmoid', None, got 'relu'", {"activation": "relu"}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_mistakes(kind, message, options):
    arguments = {"input": torch.rand(2, 3, 4), "target": torch.zeros(2, 4, dtype=torch.long), **options}
    before = launch_counts()
    with pytest.raises(kind, match=message):
        dice_loss(**arguments)
    assert launch_counts() == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": None}, ValueError, 'activation must be "softmax" or "sigmoid" where a cross entropy needs logits, got None'),
        ({"reduction": "none"}, ValueError, 'reduction must be "mean" or "sum" where two losses are added, got "none"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_of_dice_with_cross_entropy(options, error, message):
    with pytest.raises(error, match=message):
        dice_ce_loss(torch.rand(2, 3, 4), torch.zeros(2, 4, dtype=torch.long), **options)


def test_a_background_that_is_the_only_class_cannot_be_left_out():
    with pytest.raises(ValueError, match="include_background=False needs more than one class"):
        dice_loss(torch.rand(2, 1, 4), torch.zeros(2, 4, dtype=torch.long), include_background=False, activation="sigmoid")


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "plain torch"])
@pytest.mark.parametrize("classes", [2, 3, 21, 300])
def test_gradients_of_saturated_pixels_keep_their_digits(classes, reference, device):
    """Of each pixel, up to a probability of 1 - 1e-13, also where the likeliest class is not the right one."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(1, classes, 4, 4, generator=generator), torch.randint(0, classes, (2, 1, 4, 4), generator=generator)
    x = x.scatter_add(1, target[:1], torch.linspace(0, 30, 16).view(1, 1, 4, 4)).to(device)
    for index in target[:, 0].unsqueeze(1).to(device):
        (exact,) = gradient_of(dice_loss, x.double(), index)[1:]
        with plain_torch() if reference else contextlib.nullcontext():
            (found,) = gradient_of(dice_loss, x, index)[1:]
        assert ((found - exact).norm(dim=1) < 1e-5 * exact.norm(dim=1)).all()
