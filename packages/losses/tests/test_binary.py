"""What is their own of the asymmetric loss and of Poly-1: the clip, saturated logits, timm's defaults."""

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F

from lossforge.losses import (
    AsymmetricLossMultiLabel,
    PolyBinaryCrossEntropy,
    asymmetric_loss_multi_label,
    binary_cross_entropy_with_logits,
    poly_binary_cross_entropy,
    sigmoid_focal_loss,
)

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
SATURATED = [-6e4, -1e4, -200.0, -100.0, -88.0, -30.0, -17.0, -2.944, 0.0, 17.0, 30.0, 88.0, 100.0, 200.0, 1e4, 6e4]


def gradient_of(function, x, *args, **kwargs):
    x = x.detach().clone().requires_grad_()
    value = function(x, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad


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


def test_defaults_are_timms(device):
    x, y = torch.randn(5, 7, device=device), torch.rand(5, 7, device=device)
    torch.testing.assert_close(asymmetric_loss_multi_label(x, y), timm.loss.AsymmetricLossMultiLabel()(x, y))
    torch.testing.assert_close(AsymmetricLossMultiLabel(2, 0.5, 0.1)(x, y), timm.loss.AsymmetricLossMultiLabel(2, 0.5, 0.1)(x, y))
    torch.testing.assert_close(poly_binary_cross_entropy(x, y), timm.loss.PolyBinaryCrossEntropy()(x, y))
    torch.testing.assert_close(PolyBinaryCrossEntropy(1, 2, 0.3)(x, y), timm.loss.PolyBinaryCrossEntropy(1, 2, 0.3)(x, y))


def test_batchmean_gives_way_to_a_normalizer(device):
    x, y = torch.randn(5, 7, device=device), torch.rand(5, 7, device=device)
    total = asymmetric_loss_multi_label(x, y, reduction="sum")
    torch.testing.assert_close(asymmetric_loss_multi_label(x, y), total / 5)
    torch.testing.assert_close(asymmetric_loss_multi_label(x, y, normalizer=2), total / 2)
    torch.testing.assert_close(asymmetric_loss_multi_label(x[0, 0], y[0, 0]), asymmetric_loss_multi_label(x[:1, :1], y[:1, :1]))


def test_what_they_become(device):
    """Asymmetric without clip at γ₊ = γ₋ is the focal loss without α; Poly-1 with ε = 0 the focal loss or the cross entropy."""
    x = torch.randn(5, 7, device=device)
    for y in (torch.rand(5, 7, device=device), torch.tensor([0, 3, -1, -2, 6], device=device)):
        focal = gradient_of(sigmoid_focal_loss, x, y, alpha=-1, gamma=1.5, reduction="sum")
        bce = gradient_of(binary_cross_entropy_with_logits, x, y, reduction="sum")
        for got, exact in (
            (gradient_of(asymmetric_loss_multi_label, x, y, 1.5, 1.5, None, reduction="sum"), focal),
            (gradient_of(asymmetric_loss_multi_label, x, y, 0.0, 0.0, 0.0, reduction="sum"), bce),
            (gradient_of(poly_binary_cross_entropy, x, y, 0.0, 1.5, reduction="sum"), focal),
            (gradient_of(poly_binary_cross_entropy, x, y, 0.0, reduction="sum"), bce),
        ):
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)


def test_alpha_and_pos_weight_of_each_class(device):
    x, y = torch.randn(5, 7, device=device), torch.rand(5, 7, device=device)
    per_class = torch.rand(7, device=device)
    for function, name in ((poly_binary_cross_entropy, "alpha"), (asymmetric_loss_multi_label, "pos_weight")):
        value, g = gradient_of(function, x, y, reduction="none", **{name: per_class})
        for c in range(7):
            one, g_one = gradient_of(function, x[:, c], y[:, c], reduction="none", **{name: per_class[c].item()})
            torch.testing.assert_close(value[:, c], one)
            torch.testing.assert_close(g[:, c], g_one)


@pytest.mark.parametrize(
    ("function", "options", "kind", "message"),
    [
        (asymmetric_loss_multi_label, {"gamma_neg": -1}, ValueError, "gamma_neg must be finite and at least 0, got -1"),
        (asymmetric_loss_multi_label, {"gamma_pos": "1"}, TypeError, "gamma_pos must be a number, got str"),
        (asymmetric_loss_multi_label, {"clip": 1.5}, ValueError, "clip must be finite and at least 0 and at most 1, got 1.5"),
        (asymmetric_loss_multi_label, {"pos_weight": math.nan}, ValueError, "pos_weight must be finite, got nan"),
        (asymmetric_loss_multi_label, {"eps": 0.05}, ValueError, "eps must be finite and at least 0 and at most 0.0001, got 0.05"),
        (poly_binary_cross_entropy, {"epsilon": math.inf}, ValueError, "epsilon must be finite, got inf"),
        (poly_binary_cross_entropy, {"gamma": -1}, ValueError, "gamma must be finite and at least 0, got -1"),
        (poly_binary_cross_entropy, {"alpha": 1.5}, ValueError, "alpha must be finite and at most 1, got 1.5"),
    ],
)
def test_options_out_of_range(function, options, kind, message):
    with pytest.raises(kind, match=message):
        function(torch.rand(3), torch.rand(3), **options)


def test_float16_focal_without_focus(device):
    """torchvision's test of γ = 0 against torch's BCE in float16 can fail, because torch rounds σ(x) before it takes y from it.

    Ours is within half a step of float16 of the exact gradient; torch's differs from that by more than the 0.001 that the test allows.
    """
    p = torch.cat([torch.linspace(0.02, 0.2, 50), torch.linspace(0.8, 0.98, 50)]).to(device)
    x, y = p.logit().half(), (p > 0.5).half()

    def gradient(function, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x)[0].double()

    exact = gradient(lambda x: F.binary_cross_entropy_with_logits(x, y.double(), reduction="sum"), x.double())
    ours = gradient(lambda x: sigmoid_focal_loss(x, y, alpha=-1, gamma=0, reduction="sum"), x)
    theirs = gradient(lambda x: F.binary_cross_entropy_with_logits(x, y, reduction="sum"), x)
    assert ((ours - exact).abs() / exact.abs()).max() < 2**-10  # the interpreter truncates
    assert ((theirs - exact).abs() / exact.abs()).max() > 0.001
