"""Asymmetric loss of one class: values by hand, timm, limits, saturated and infinite logits, long rows, pairs, weights, errors."""

import pytest
import torch

from lossforge.losses import asymmetric_loss_single_label
from lossforge.losses.testing import error

INF = float("inf")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])


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


X, T = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (TypeError, "eps must be a number or a 0-d tensor, got", lambda: asymmetric_loss_single_label(X, T, eps=X[0])),
        (TypeError, "target must hold class indices, with target_b and lam", lambda: asymmetric_loss_single_label(X, X)),
        (ValueError, r"weight must hold one number a class, shape \(3,\)", lambda: asymmetric_loss_single_label(X, T, weight=X)),
        (ValueError, "input must have a dimension of classes", lambda: asymmetric_loss_single_label(X[0, 0], T[0])),
    ],
)
def test_errors(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
