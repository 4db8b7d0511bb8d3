"""What is their own of losses of yes-or-no decisions: the clip, saturated logits, softened targets, mixup pairs, timm's defaults."""

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from loss_calls import gradient_of
from timm.data.mixup import mixup_target

from lossforge.losses import (
    AsymmetricLossMultiLabel,
    BinaryCrossEntropy,
    PolyBinaryCrossEntropy,
    asymmetric_loss_multi_label,
    binary_cross_entropy_with_logits,
    plain_torch,
    poly_binary_cross_entropy,
    sigmoid_focal_loss,
    smoothed_binary_cross_entropy,
)
from lossforge.losses.testing import error

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
SATURATED = [-6e4, -1e4, -200.0, -100.0, -88.0, -30.0, -17.0, -2.944, 0.0, 17.0, 30.0, 88.0, 100.0, 200.0, 1e4, 6e4]
PER_CLASS = torch.rand(7, generator=torch.Generator().manual_seed(0)) + 0.5


@MODES
def test_the_gradient_at_the_clip(mode, device):
    """x = 0 is p = 1/2 = clip exactly: the derivative from above, as torch's clamp has it; just below it is 0, as is the loss."""
    x = torch.tensor([0.0, -1e-3, -1.0, 1.0], device=device)
    y = torch.zeros_like(x)
    options = {"gamma_neg": 0.0, "gamma_pos": 0.0, "clip": 0.5, "reduction": "sum"}
    value, g = gradient_of(asymmetric_loss_multi_label, x, y, **options, gradient=mode)
    p = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(value.item(), -math.log(1.5 - p), rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([0.25, 0.0, 0.0, p * (1 - p) / (1.5 - p)]), rtol=1e-6, atol=0)
    _, g_timm = gradient_of(timm.loss.AsymmetricLossMultiLabel(**options), x, y)
    torch.testing.assert_close(g, g_timm, rtol=1e-5, atol=1e-7)


def test_just_above_the_clip_digits_are_kept(device):
    """s = p - clip is small there; ln(1 - s) taken literally would lose its digits."""
    clip = 2.0**-10
    x = torch.logit(torch.tensor([clip + 2.0**-n for n in range(2, 16)], dtype=torch.float64)).float().to(device)
    options = {"gamma_neg": 0.0, "gamma_pos": 0.0, "clip": clip, "reduction": "none"}
    value, g = gradient_of(asymmetric_loss_multi_label, x, torch.zeros_like(x), **options)
    exact, g_exact = gradient_of(asymmetric_loss_multi_label, x.double(), torch.zeros_like(x).double(), **options)
    torch.testing.assert_close(value.double(), exact, rtol=3e-5, atol=0)  # literally: 1e-3
    torch.testing.assert_close(g.double(), g_exact, rtol=1e-6, atol=0)


@MODES
@pytest.mark.parametrize("clip", [None, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("gammas", [(4.0, 1.0), (0.0, 0.0), (0.3, 0.7), (1.0, 2.5)], ids=str)
def test_asymmetric_is_finite_at_any_logit(gammas, clip, mode, device):
    options = {"gamma_neg": gammas[0], "gamma_pos": gammas[1], "clip": clip, "reduction": "sum"}
    x = torch.tensor(SATURATED, device=device)
    for y in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 0.3)):
        value, g = gradient_of(asymmetric_loss_multi_label, x, y, gradient=mode, **options)
        assert value.isfinite()
        assert g.isfinite().all()
        exact, g_exact = gradient_of(asymmetric_loss_multi_label, x.double(), y.double(), **options)
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(g.double(), g_exact, rtol=1e-4, atol=3e-6)


@MODES
@pytest.mark.parametrize("options", [{}, {"gamma": 0.3}, {"gamma": 2.0, "epsilon": -1.0, "alpha": 0.25}], ids=str)
def test_poly_is_finite_at_any_logit(options, mode, device):
    x = torch.tensor(SATURATED, device=device)
    for y in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 0.3)):
        value, g = gradient_of(poly_binary_cross_entropy, x, y, reduction="sum", gradient=mode, **options)
        assert value.isfinite()
        assert g.isfinite().all()
        exact, g_exact = gradient_of(poly_binary_cross_entropy, x.double(), y.double(), reduction="sum", **options)
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(g.double(), g_exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", [asymmetric_loss_multi_label, poly_binary_cross_entropy])
def test_float16(function, device):
    """The gradient of a confident mistake on a positive stays; probabilities that float16 does not hold harm nothing."""
    x = torch.tensor([[6e4, -6e4, 30.0, -30.0, 9.0, -9.0]], device=device, dtype=torch.float16)
    for y in (torch.zeros_like(x), torch.ones_like(x)):
        value, g = gradient_of(function, x, y, reduction="sum")
        assert value.dtype == torch.float32
        exact, g_exact = gradient_of(function, x.double(), y.double(), reduction="sum")
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(g.double(), g_exact, rtol=2e-3, atol=1e-7)
        assert not y.any() or g.abs().max() > 0.9


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize(
    ("module", "judge", "options"),
    [
        (AsymmetricLossMultiLabel, timm.loss.AsymmetricLossMultiLabel, {}),
        (AsymmetricLossMultiLabel, timm.loss.AsymmetricLossMultiLabel, {"gamma_neg": 2, "clip": None, "pos_weight": 2.0}),
        (AsymmetricLossMultiLabel, timm.loss.AsymmetricLossMultiLabel, {"weight": torch.rand(7), "pos_weight": torch.rand(7)}),
        (PolyBinaryCrossEntropy, timm.loss.PolyBinaryCrossEntropy, {}),
        (PolyBinaryCrossEntropy, timm.loss.PolyBinaryCrossEntropy, {"gamma": 1.5, "alpha": 0.3, "epsilon": -0.5}),
    ],
)
def test_in_place_of_timm(module, judge, options, reduction, device):
    x, y = torch.randn(5, 7, device=device) * 2, (torch.rand(5, 7, device=device) < 0.3).float()
    ours, theirs = (made(**options, reduction=reduction).to(device) for made in (module, judge))
    value, g = gradient_of(ours, x, y)
    exact, g_exact = gradient_of(theirs, x, y)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(g, g_exact, rtol=1e-4, atol=1e-6)


def test_batchmean_gives_way_to_a_normalizer(device):
    x, y = torch.randn(5, 7, device=device), torch.rand(5, 7, device=device)
    total = asymmetric_loss_multi_label(x, y, reduction="sum")
    torch.testing.assert_close(asymmetric_loss_multi_label(x, y), total / 5)
    torch.testing.assert_close(asymmetric_loss_multi_label(x, y, normalizer=2), total / 2)
    torch.testing.assert_close(asymmetric_loss_multi_label(x[0, 0], y[0, 0]), asymmetric_loss_multi_label(x[:1, :1], y[:1, :1]))


def test_alpha_and_pos_weight_of_each_class(device):
    x, y = torch.randn(5, 7, device=device), torch.rand(5, 7, device=device)
    per_class = torch.rand(7, device=device)
    for function, name in ((poly_binary_cross_entropy, "alpha"), (asymmetric_loss_multi_label, "pos_weight")):
        value, g = gradient_of(function, x, y, reduction="none", **{name: per_class})
        for c in range(7):
            one, g_one = gradient_of(function, x[:, c], y[:, c], reduction="none", **{name: per_class[c].item()})
            torch.testing.assert_close(value[:, c], one)
            torch.testing.assert_close(g[:, c], g_one)


@pytest.mark.parametrize("function", [sigmoid_focal_loss, poly_binary_cross_entropy])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_an_alpha_of_0_or_1_takes_one_kind_alone(function, alpha, device):
    """By kernels, and by plain PyTorch as it computes float64; a negative alpha takes both kinds whole."""
    x, y = torch.randn(20, device=device), (torch.arange(20, device=device) % 2).float()
    whole, slope = gradient_of(function, x.double(), y.double(), alpha=-1.0, gamma=1.5, reduction="none")
    counts = (y == alpha).double()
    for given in (x, x.double()):
        value, g = gradient_of(function, given, y.to(given.dtype), alpha=alpha, gamma=1.5, reduction="none")
        torch.testing.assert_close(value.double(), whole * counts, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(g.double(), slope * counts, rtol=1e-5, atol=1e-6)
        assert value.count_nonzero() == 10


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"smoothing": 0.0},
        {"smoothing": 0.3, "target_threshold": 0.2},
        {"smoothing": 0.4, "target_threshold": 0.05},
        {"sum_classes": True, "reduction": "sum"},
        {"sum_classes": True, "pos_weight": 2.0, "target_threshold": 0.5},
        {"weight": PER_CLASS, "reduction": "sum"},
        {"pos_weight": PER_CLASS, "smoothing": 0.2},
        {"smooth_dense": True},
        {"smooth_dense": True, "smoothing": 0.6, "target_threshold": 0.61},
    ],
    ids=str,
)
def test_smoothing_in_place_of_timm(options, dtype, mode, device):
    x = (torch.randn(5, 7, device=device) * 3).to(dtype)
    ours, theirs = (module(**options).to(device) for module in (BinaryCrossEntropy, timm.loss.BinaryCrossEntropy))
    for target in (torch.tensor([0, 6, 3, 3, 1], device=device), torch.rand(5, 7, device=device).to(dtype)):
        wide = target.double() if target.is_floating_point() else target
        exact, g_exact = gradient_of(theirs.double(), x.double(), wide)
        value, g = gradient_of(ours, x, target, gradient=mode)
        assert error(value, exact) < 1e-6
        assert error(g, g_exact) < (3e-6 if dtype == torch.float32 else 2.0**-7)


def test_smoothings_positions_and_defaults_are_timms(device):
    x, target = torch.randn(5, 7, device=device), torch.tensor([0, 6, 3, 3, 1], device=device)
    arguments = 0.2, 0.01, PER_CLASS, "sum", False, PER_CLASS.flip(0), True
    for given in ((), arguments):
        ours, theirs = (module(*given).to(device) for module in (BinaryCrossEntropy, timm.loss.BinaryCrossEntropy))
        torch.testing.assert_close(gradient_of(ours, x, target), gradient_of(theirs, x, target))


@MODES
@pytest.mark.parametrize("threshold", [None, 0.25])
@pytest.mark.parametrize("lam", [0.3, 0.8])
def test_a_pair_is_timms_mixup(lam, threshold, mode, device):
    """Indices and λ in place of the dense targets that timm's Mixup makes, which flips the batch."""
    x, target = torch.randn(6, 7, device=device), torch.tensor([0, 6, 3, 3, 1, 5], device=device)
    soft = mixup_target(target, 7, lam, 0.1)
    exact = gradient_of(timm.loss.BinaryCrossEntropy(target_threshold=threshold), x, soft)
    for name, function in (("smoothing", smoothed_binary_cross_entropy), ("label_smoothing", binary_cross_entropy_with_logits)):
        options = {name: 0.1, "target_threshold": threshold, "target_b": target.flip(0), "lam": lam, "gradient": mode}
        got = gradient_of(function, x, target, **options)
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-7)


@MODES
def test_background_ignored_rows_and_pixels(mode, device):
    x = torch.randn(2, 5, 3, 2, device=device)
    target = torch.tensor([[[0, 4], [-1, 2], [-2, 1]], [[3, -2], [-2, 0], [-1, -1]]], device=device)
    y = (target.unsqueeze(1) == torch.arange(5, device=device).view(5, 1, 1)).double() * 0.9 + 0.1 / 5
    kept = (target != -2).unsqueeze(1).expand_as(x)
    wide = x.double().requires_grad_()
    exact = F.binary_cross_entropy_with_logits(wide, y, reduction="none")[kept].sum() / (target != -2).sum()
    (g_exact,) = torch.autograd.grad(exact, wide)
    x[~kept] = float("nan")
    for function in (smoothed_binary_cross_entropy, plain_torch()(smoothed_binary_cross_entropy)):
        value, g = gradient_of(function, x, target, dim=1, sum_classes=True, gradient=mode)
        assert error(value, exact.detach()) < 1e-6
        assert error(g, g_exact) < 3e-6


def test_the_first_dimension_may_be_that_of_the_classes(device):
    x, target = torch.randn(5, 3, device=device), torch.tensor([0, 4, -1], device=device)
    expected = sigmoid_focal_loss(x.T, target).T
    for dim in (0, -2):
        torch.testing.assert_close(sigmoid_focal_loss(x, target, dim=dim), expected)
    for dim in (-3, 2):
        with pytest.raises(ValueError, match=r"dim must be at least -2 and below 2 for inputs of shape \(5, 3\)"):
            sigmoid_focal_loss(x, target, dim=dim)


def test_scores_are_smoothed_too(device):
    x, target, score = torch.randn(3, 4, device=device), torch.tensor([0, 2, -1], device=device), torch.rand(3, device=device)
    y = (target[:, None] == torch.arange(4, device=device)) * score[:, None] * 0.9 + 0.025
    torch.testing.assert_close(
        gradient_of(smoothed_binary_cross_entropy, x, target, score=score), gradient_of(F.binary_cross_entropy_with_logits, x, y)
    )


def test_without_softening_nothing_changes(device):
    x, target = torch.randn(5, 7, device=device), torch.tensor([0, 6, 3, -1, -2], device=device)
    plain = gradient_of(binary_cross_entropy_with_logits, x, target)
    got = gradient_of(smoothed_binary_cross_entropy, x, target, 0.0)
    assert all(map(torch.equal, got, plain))
    dense = torch.rand(5, 7, device=device)
    got = gradient_of(smoothed_binary_cross_entropy, x, dense)
    assert all(map(torch.equal, got, gradient_of(binary_cross_entropy_with_logits, x, dense)))
    with pytest.raises(ValueError, match="label_smoothing must be 0 where target is dense: smooth the target yourself"):
        binary_cross_entropy_with_logits(x, dense, label_smoothing=0.3)
    torch.testing.assert_close(got, gradient_of(F.binary_cross_entropy_with_logits, x, dense))


@pytest.mark.parametrize(
    ("function", "options", "kind", "message"),
    [
        (smoothed_binary_cross_entropy, {"dim": 5}, ValueError, "dim must be at least -2 and below 2 .* got 5"),
        (smoothed_binary_cross_entropy, {"dim": "1"}, TypeError, "dim must be a whole number, got str"),
    ],
)
def test_mistakes(function, options, kind, message):
    with pytest.raises(kind, match=message):
        function(torch.rand(3, 4), torch.tensor([0, 1, 2]), **options)


def test_a_threshold_takes_the_gradient_of_the_target():
    target = torch.rand(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="target has no gradient through target_threshold, got a target that requires grad"):
        binary_cross_entropy_with_logits(torch.rand(3, 4), target, target_threshold=0.5)
