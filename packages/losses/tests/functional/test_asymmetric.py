"""Asymmetric loss of one class: values by hand, timm, limits, saturated and infinite logits, long rows, pairs, weights, errors."""

import math

import pytest
import timm.loss
import torch

from lossforge.kernels import launch_counts
from lossforge.losses import AsymmetricLossSingleLabel, asymmetric_loss_single_label, cross_entropy, softmax_focal_loss
from lossforge.losses.testing import error

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
LAYOUTS = {
    "aligned": lambda d: torch.randn(3, 128, device=d),
    "odd": lambda d: torch.randn(3, 37, device=d),
    "two sweeps": lambda d: torch.randn(3, 20_480, device=d),
    "two sweeps, rows anywhere": lambda d: torch.randn(3, 20_001, device=d),
    "sliced": lambda d: torch.randn(3, 90, device=d)[:, ::2],
    "pixels": lambda d: torch.randn(2, 5, 4, 8, device=d),
    "pixels, many classes": lambda d: torch.randn(1, 70, 4, 8, device=d),
}


def gradient_of(function, x, *args, **kwargs):
    x = x.detach().requires_grad_()  # in the layout of x
    value = function(x, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def by_definition(x, t, gamma_pos=1.0, gamma_neg=4.0, eps=0.1):
    """L a row of (N, C), in float64, over the classes that have a probability."""
    lp = x.double().log_softmax(1)
    own = torch.arange(x.shape[1], device=x.device) == t[:, None]
    q = (1 - eps) * own + eps / x.shape[1]
    exists = own | (lp > -INF)
    lp = torch.where(exists, lp, 0.0)
    p = lp.exp()
    terms = q * torch.where(own, (1 - p) ** gamma_pos, p**gamma_neg) * -lp
    return torch.where(exists, terms, 0.0).sum(1)


def test_by_hand(device):
    """p = ½, ½ and ¼, ¾ with ε = 0.2: q = 0.9 and 0.1; gradients from h = ∂L/∂ln p as h - p Σ h."""
    x, t = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]], device=device), torch.tensor([0, 1], device=device)
    ln2, ln43, ln4 = math.log(2), math.log(4 / 3), math.log(4)
    value, g = gradient_of(asymmetric_loss_single_label, x, t, 1.0, 2.0, 0.2, reduction="none")
    torch.testing.assert_close(value.cpu(), torch.tensor([0.9 * ln2 / 2 + 0.1 * ln2 / 4, 0.9 * ln43 / 4 + 0.1 * ln4 / 16]))
    h = [-0.9 * (1 / 2 + ln2 / 2), -0.1 * (1 - 2 * ln2) / 4], [-0.1 * (1 - 2 * ln4) / 16, -0.9 * (1 / 4 + 3 / 4 * ln43)]
    expected = [[h[0][0] - sum(h[0]) / 2, h[0][1] - sum(h[0]) / 2], [h[1][0] - sum(h[1]) / 4, h[1][1] - sum(h[1]) * 3 / 4]]
    torch.testing.assert_close(g.cpu(), torch.tensor(expected))


@pytest.mark.parametrize("options", [(), (2, 1), (0, 3, 0.3), (0.5, 2.5, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_of_timm(options, reduction, device):
    x, t = torch.randn(6, 11, device=device) * 3, torch.randint(0, 11, (6,), device=device)
    ours, theirs = (
        gradient_of(module(*options, reduction=reduction), x.to(dtype), t)
        for module, dtype in ((AsymmetricLossSingleLabel, x.dtype), (timm.loss.AsymmetricLossSingleLabel, torch.float64))
    )
    assert error(ours[0], theirs[0]) < 1e-6
    assert error(ours[1], theirs[1]) < 2e-6
    torch.testing.assert_close(asymmetric_loss_single_label(x, t), timm.loss.AsymmetricLossSingleLabel()(x, t))


@MODES
@pytest.mark.parametrize("name", LAYOUTS)
def test_limits(name, mode, device):
    """Without powers it is the cross entropy with label smoothing, without smoothing the focal loss."""
    x = LAYOUTS[name](device)
    t = torch.randint(0, x.shape[1], (x.shape[0], *x.shape[2:]), device=device)
    t.view(-1)[1] = -100
    value, g = gradient_of(cross_entropy, x, t, label_smoothing=0.3, gradient=mode)
    ours, g_ours = gradient_of(asymmetric_loss_single_label, x, t, 0.0, 0.0, 0.3, gradient=mode)
    assert error(ours, value) < 2e-6
    assert error(g_ours, g) < 2e-6
    value, g = gradient_of(softmax_focal_loss, x, t, gamma=1.5, reduction="mean", gradient=mode)
    ours, g_ours = gradient_of(asymmetric_loss_single_label, x, t, 1.5, 3.0, 0.0, gradient=mode)
    assert error(ours, value) < 1e-6
    assert error(g_ours, g) < 1e-6


@MODES
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, mode, device):
    """Upstream gradients a row, an ignored row of nan, many shares of smoothing in long rows, in one tile and in sweeps."""
    x = LAYOUTS[name](device)
    t = torch.randint(0, x.shape[1], (x.shape[0], *x.shape[2:]), device=device)
    t.view(-1)[1] = -100
    rows = x.movedim(1, -1).flatten(0, -2).detach().double().requires_grad_()
    kept = t.flatten() >= 0
    exact = by_definition(rows[kept], t.flatten()[kept], 0.7, 1.3, 0.9)
    (g_exact,) = torch.autograd.grad(exact.mean(), rows)
    x.movedim(1, -1)[t == -100] = NAN
    value, g = gradient_of(asymmetric_loss_single_label, x, t, 0.7, 1.3, 0.9, gradient=mode)
    assert error(value, exact.mean()) < 2e-6
    assert error(g.movedim(1, -1).flatten(0, -2), g_exact) < 3e-6
    each = asymmetric_loss_single_label(x.requires_grad_(), t, 0.7, 1.3, 0.9, reduction="none")
    upstream = torch.rand(t.shape, device=device) + 0.5
    (g_exact,) = torch.autograd.grad(by_definition(rows[kept], t.flatten()[kept], 0.7, 1.3, 0.9), rows, upstream.flatten()[kept].double())
    (g,) = torch.autograd.grad(each, x, upstream)
    assert (each.flatten()[~kept] == 0).all()
    assert error(each.flatten()[kept], exact) < 2e-6
    assert error(g.movedim(1, -1).flatten(0, -2), g_exact) < 3e-6


@MODES
@pytest.mark.parametrize("gamma_neg", [0.0, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("gamma_pos", [0.0, 0.3, 0.5, 1.0, 5.0])
def test_saturated_logits(gamma_pos, gamma_neg, mode, device):
    """From certain to impossible: finite, and what float64 gives; at p = 1 the limit, 0."""
    x = torch.tensor([[1e4, 0], [60, 0], [9, 0], [1e-4, 0], [0, 9], [0, 60], [0, 1e4]], device=device)
    t = torch.zeros(7, dtype=torch.long, device=device)
    value, g = gradient_of(asymmetric_loss_single_label, x, t, gamma_pos, gamma_neg, reduction="sum", gradient=mode)
    exact, g_exact = gradient_of(asymmetric_loss_single_label, x.double(), t, gamma_pos, gamma_neg, reduction="sum")
    assert value.isfinite()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(g.double(), g_exact, rtol=2e-3, atol=1e-7)
    assert g_exact.isfinite().all()
    if gamma_neg:
        assert (g[0] == 0).all() or gamma_pos == 0


@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_at_its_limits(dtype, mode, device):
    x = torch.tensor([[6e4, -6e4, 0.0], [-6e4, 6e4, 0.0], [1.0, 2.0, 3.0]], device=device, dtype=dtype)
    t = torch.tensor([0, 0, 2], device=device)
    value, g = gradient_of(asymmetric_loss_single_label, x, t, gradient=mode)
    exact, g_exact = gradient_of(asymmetric_loss_single_label, x.double(), t)
    assert value.dtype == torch.float32
    assert g.dtype == dtype
    assert error(value, exact) < 1e-6
    assert error(g, g_exact) < 1e-2


@MODES
@pytest.mark.parametrize("classes", [7, 20_001, 20_480])
def test_classes_that_cannot_be(classes, mode, device):
    """Logits of -inf, whole tiles of them, add nothing but at γ₋ = 0; at the target the loss is inf with a finite gradient."""
    x = torch.randn(3, classes, device=device)
    x[0, : classes // 2] = -INF
    x[1, 2:] = -INF
    t = torch.tensor([classes - 1, 1, 5], device=device)
    wide = x.detach().double().requires_grad_()
    exact = by_definition(wide, t)
    (g_exact,) = torch.autograd.grad(exact.sum(), wide)
    value, g = gradient_of(asymmetric_loss_single_label, x, t, reduction="sum", gradient=mode)
    assert error(value, exact.sum()) < 2e-6
    assert error(g, g_exact.nan_to_num(0.0)) < 3e-6
    assert (g[x == -INF] == 0).all()
    for tensor in (x, x.double()):
        each, g = gradient_of(asymmetric_loss_single_label, tensor, t, 1.0, 0.0, reduction="none")
        assert torch.equal(each == INF, torch.tensor([True, True, False], device=device))
        assert g.isfinite().all()
        for gamma_neg in (0.0, 4.0):
            each, g = gradient_of(asymmetric_loss_single_label, tensor, torch.zeros_like(t), 1.0, gamma_neg, reduction="none")
            assert each[0] == INF
            assert g.isfinite().all()


@MODES
@pytest.mark.parametrize("classes", [7, 20_001])
def test_rows_that_are_nan_harm_no_other(classes, mode, device, monkeypatch):
    """An index out of range, +inf."""
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    x = torch.randn(4, classes, device=device)
    x[3, 2] = INF
    t = torch.tensor([classes, 4, -7, 0], device=device)
    exact, g_exact = gradient_of(asymmetric_loss_single_label, x[1:2].double(), t[1:2], reduction="sum")
    each, _ = gradient_of(asymmetric_loss_single_label, x, t, reduction="none")
    _, g = gradient_of(asymmetric_loss_single_label, x, t, reduction="sum", gradient=mode)
    assert each.isnan().tolist() == [True, False, True, True]
    assert error(each[1], exact) < 1e-6
    assert error(g[1:2], g_exact) < 2e-6
    assert g[[0, 2, 3]].isnan().all()


@MODES
@pytest.mark.parametrize("classes", [5, 20_001])
def test_pairs_and_class_weights(classes, mode, device):
    """Σ λ w_a L(a) + (1 - λ) w_b L(b) over Σ λ w_a + (1 - λ) w_b, of which one index may be ignored."""
    x, w = torch.randn(6, classes, device=device), torch.rand(classes, device=device)
    a, b = torch.tensor([0, 1, 2, 3, -100, -100], device=device), torch.tensor([1, 1, 0, -100, 4, -100], device=device)
    lam = torch.tensor([0.3, 0.6, 0.5, 0.9, 0.1, 0.4], device=device)
    wide = x.detach().double().requires_grad_()
    exact, divisor = 0.0, 0.0
    for t, share in ((a, lam), (b, 1 - lam)):
        c = share.double() * torch.where(t < 0, 0.0, w[t.clamp(min=0)])
        exact, divisor = exact + (c * by_definition(wide, t.clamp(min=0), 0.5, 1.5, 0.8)).sum(), divisor + c.sum()
    (g_exact,) = torch.autograd.grad(exact / divisor, wide)
    options = {"weight": w, "target_b": b, "lam": lam}
    value, g = gradient_of(asymmetric_loss_single_label, x, a, 0.5, 1.5, 0.8, gradient=mode, **options)
    assert error(value, exact / divisor) < 2e-6
    assert error(g, g_exact) < 3e-6


def test_one_launch_for_value_and_gradient(device):
    """And one that multiplies it by what arrives, also where a hyper-parameter or the smoothing changes."""
    t = torch.zeros(3, dtype=torch.long, device=device)
    gradient_of(asymmetric_loss_single_label, torch.randn(3, 9, device=device), t)
    before = launch_counts()
    for options in ((1, 4, 0.1), (0.5, 3, 0.2), (0, 0, 1)):
        gradient_of(asymmetric_loss_single_label, torch.randn(3, 9, device=device), t, *options)
    launched = {name: n - before.get(name, 0) for name, n in launch_counts().items() if n != before.get(name, 0)}
    assert launched == {"rowwise_kernel": 3, "scale_kernel": 3}


X, T = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, "gamma_pos must be finite and at least 0, got -1", lambda: asymmetric_loss_single_label(X, T, -1)),
        (ValueError, "gamma_neg must be finite and at least 0, got inf", lambda: asymmetric_loss_single_label(X, T, 1, INF)),
        (ValueError, "eps must be finite and at least 0 and at most 1, got 2", lambda: asymmetric_loss_single_label(X, T, eps=2)),
        (TypeError, "eps must be a number or a 0-d tensor, got", lambda: asymmetric_loss_single_label(X, T, eps=X[0])),
        (TypeError, "target must hold class indices, with target_b and lam", lambda: asymmetric_loss_single_label(X, X)),
        (ValueError, r"weight must hold one number a class, shape \(3,\)", lambda: asymmetric_loss_single_label(X, T, weight=X)),
        (ValueError, "input must have a dimension of classes", lambda: asymmetric_loss_single_label(X[0, 0], T[0])),
        (TypeError, "input must be of a floating dtype", lambda: asymmetric_loss_single_label(T, T)),
        (TypeError, "unexpected keyword argument 'label_smoothing'", lambda: asymmetric_loss_single_label(X, T, label_smoothing=0.1)),
        (TypeError, "unexpected keyword argument 'clip'", lambda: AsymmetricLossSingleLabel(clip=0.1)),
    ],
)
def test_errors(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
