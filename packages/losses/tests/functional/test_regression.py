"""What is their own of the losses of a difference: kinks, nan and infinity, weighted means, as in torch."""

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.losses import HuberLoss, MSELoss, SmoothL1Loss, huber_loss, l1_loss, mse_loss, smooth_l1_loss

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
CASES = [
    (mse_loss, F.mse_loss, {}),
    *((huber_loss, F.huber_loss, {"delta": delta}) for delta in (1.0, 0.25, 3.0)),
    *((smooth_l1_loss, F.smooth_l1_loss, {"beta": beta}) for beta in (1.0, 0.25, 3.0, 0.0, 1e-30)),
]
EACH = pytest.mark.parametrize(("ours", "torchs", "options"), CASES, ids=[f"{ours.__name__} {options}" for ours, _, options in CASES])


@EACH
@MODES
def test_at_and_around_the_kinks(ours, torchs, options, mode, device):
    """|d| = δ or β exactly, one unit beside it, 0, and where squares overflow."""
    bound = torch.tensor(max(options.values(), default=1.0))
    up, down = bound.nextafter(torch.tensor(INF)), bound.nextafter(torch.tensor(0.0))
    d = torch.stack([bound, up, down, bound * 0, bound / 2, bound * 100])
    d = torch.cat([d, -d, torch.tensor([1e-6, -1e-6, 1e15, -1e15])]).to(device)
    y = torch.zeros_like(d)
    value, g = gradient_of(ours, d, y, reduction="none", **options)
    exact, g_exact = gradient_of(torchs, d.double(), y.double(), reduction="none", **options)
    torch.testing.assert_close(value.double(), exact, rtol=3e-7, atol=1e-40)
    torch.testing.assert_close(g.double(), g_exact, rtol=3e-7, atol=1e-40)
    _, g_sum = gradient_of(ours, d, y, reduction="sum", gradient=mode, **options)
    assert torch.equal(g_sum, g)
    hard, g_hard = gradient_of(ours, torch.tensor([0.5, 1.0, 3.0], device=device)[None], torch.tensor([1], device=device), **options)
    dense = torch.tensor([[0.0, 1.0, 0.0]], device=device)
    exact, g_exact = gradient_of(torchs, torch.tensor([[0.5, 1.0, 3.0]], device=device), dense, **options)
    torch.testing.assert_close(hard, exact)
    torch.testing.assert_close(g_hard, g_exact)


@EACH
@MODES
def test_nan_and_infinity(ours, torchs, options, mode, device):
    """Huber nan / nan, the L1 that β = 0 is nan / 0; other elements are unharmed."""
    x = torch.tensor([NAN, INF, -INF, 2.0, 0.0, INF], device=device)
    y = torch.tensor([0.0, 0.0, 0.0, NAN, 0.0, INF], device=device)
    value, g = gradient_of(ours, x, y, reduction="none", **options)
    exact, g_exact = gradient_of(torchs, x, y, reduction="none", **options)
    torch.testing.assert_close(value, exact, equal_nan=True)
    torch.testing.assert_close(g, g_exact, equal_nan=True)
    assert value[0].isnan()
    assert g[0].isnan() if options.get("beta") != 0 else g[0] == 0
    _, g_sum = gradient_of(ours, x, y, reduction="sum", gradient=mode, **options)
    torch.testing.assert_close(g_sum, g, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_as_in_torch(reduction, device):
    """The weighted mean of mse_loss divides by the weights, that of huber_loss by the number of elements."""
    x, y, w = (torch.randn(5, 3, device=device) for _ in range(3))
    w = w.abs()
    torch.testing.assert_close(mse_loss(x, y, weight=w, reduction=reduction), F.mse_loss(x, y, weight=w, reduction=reduction))
    ours = huber_loss(x, y, reduction, 0.5, w)
    torch.testing.assert_close(ours, F.huber_loss(x, y, reduction, 0.5, w))
    ours = smooth_l1_loss(x, y, reduction=reduction, weight=w)
    each = F.smooth_l1_loss(x, y, reduction="none") * w
    torch.testing.assert_close(ours, {"mean": each.sum() / w.sum(), "sum": each.sum(), "none": each}[reduction])


def test_beta_of_zero_is_l1(device):
    x, y, w = (torch.randn(40, device=device) for _ in range(3))
    x[:3] = y[:3]
    for kwargs in ({}, {"weight": w.abs()}, {"reduction": "sum"}):
        ours, exact = gradient_of(smooth_l1_loss, x, y, beta=0, **kwargs), gradient_of(l1_loss, x, y, **kwargs)
        assert torch.equal(ours[0], exact[0])
        assert torch.equal(ours[1], exact[1])


def test_legacy_arguments_and_their_order(device):
    x, y = torch.randn(6, device=device), torch.randn(6, device=device)
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(mse_loss(x, y, False), F.mse_loss(x, y, reduction="sum"))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(smooth_l1_loss(x, y, None, False, "mean", 0.5), F.smooth_l1_loss(x, y, reduction="none", beta=0.5))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(SmoothL1Loss(False, None, "mean", 0.5)(x, y), F.smooth_l1_loss(x, y, reduction="sum", beta=0.5))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(MSELoss(None, False)(x, y), F.mse_loss(x, y, reduction="none"))
    torch.testing.assert_close(HuberLoss("sum", 0.5)(x, y), F.huber_loss(x, y, "sum", 0.5))


def test_gradients_of_both_arguments(device):
    for ours, torchs, options in CASES[:6]:
        x, y = (torch.randn(9, device=device, requires_grad=True) for _ in range(2))
        g = torch.autograd.grad(ours(x, y, **options), (x, y))
        for got, exact in zip(g, torch.autograd.grad(torchs(x, y, **options), (x, y)), strict=True):
            torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(
    ("function", "options", "kind", "message"),
    [
        (huber_loss, {"delta": 0.0}, ValueError, "delta must be finite and above 0, got 0.0"),
        (huber_loss, {"delta": INF}, ValueError, "delta must be finite and above 0, got inf"),
        (smooth_l1_loss, {"beta": -0.1}, ValueError, "beta must be finite and at least 0, got -0.1"),
        (smooth_l1_loss, {"beta": "1"}, TypeError, "beta must be a number, got str"),
    ],
)
def test_options_out_of_range(function, options, kind, message):
    with pytest.raises(kind, match=message):
        function(torch.rand(3), torch.rand(3), **options)
