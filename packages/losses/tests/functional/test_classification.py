"""Focal, Poly-1, generalised and logit-adjusted cross entropy: values by hand, edges, class weights, pairs, priors, errors."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.losses import (
    LogitAdjustedCrossEntropyLoss,
    class_balanced_weight,
    cross_entropy,
    fuse_linear,
    generalized_cross_entropy,
    logit_adjusted_cross_entropy,
    plain_torch,
    poly_cross_entropy,
    softmax_focal_loss,
    symmetric_cross_entropy,
)
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])


@MODES
def test_limits_are_cross_entropy(mode, device):
    x, t = torch.randn(9, 7, device=device) * 4, torch.randint(0, 7, (9,), device=device)
    w = torch.rand(7, device=device)
    value, g = gradient_of(cross_entropy, x, t, w, gradient=mode)
    for function, options in (
        (generalized_cross_entropy, {"q": 0.0}),
        (generalized_cross_entropy, {"q": 1e-9}),
        (generalized_cross_entropy, {"q": 1.2e-38}),
    ):
        ours, g_ours = gradient_of(function, x, t, weight=w, gradient=mode, **options)
        assert error(ours, value) < 1e-6
        assert error(g_ours, g) < 1e-6


@MODES
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0, 2.0, 5.0])
def test_focal_is_finite_at_any_gamma(gamma, mode, device):
    """From certain to impossible: at p = 1 the limit, 0, at p = 0 the loss inf and its gradient that of cross entropy."""
    x = torch.tensor([[1e4, 0], [60, 0], [9, 0], [1e-4, 0], [0, 9], [0, 60], [0, 1e4]], device=device)
    t = torch.zeros(7, dtype=torch.long, device=device)
    value, g = gradient_of(softmax_focal_loss, x, t, gamma=gamma, reduction="sum", gradient=mode)
    exact, g_exact = gradient_of(softmax_focal_loss, x.double(), t, gamma=gamma, reduction="sum")
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(g.double(), g_exact, rtol=2e-3, atol=1e-7)
    assert g_exact.isfinite().all()
    never = torch.tensor([[-INF, 0.0, 1.0]], device=device)
    for wide in (never, never.double()):
        value, g = gradient_of(softmax_focal_loss, wide, t[:1], gamma=gamma, reduction="sum", gradient=mode)
        assert value == INF
        torch.testing.assert_close(g.float().cpu(), torch.tensor([[-1.0, 1 / (1 + math.e), math.e / (1 + math.e)]]))


@MODES
def test_generalized_of_an_impossible_target_is_bounded(mode, device):
    x = torch.tensor([[-INF, 0.0], [-1e4, 0.0]], device=device)
    t = torch.zeros(2, dtype=torch.long, device=device)
    for wide in (x, x.double()):
        value, g = gradient_of(generalized_cross_entropy, wide, t, 0.5, reduction="sum", gradient=mode)
        assert value == 4
        assert (g == 0).all()


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])
def test_symmetric_of_a_lost_target_keeps_its_gradient(plain, device):
    """-β A p (1 - p) at p = e⁻⁴⁰."""
    x = torch.tensor([[0.0, 40.0]], device=device)
    with plain_torch() if plain else nullcontext():
        _, g = gradient_of(symmetric_cross_entropy, x, torch.tensor([0], device=device), 0.0, 1.0, reduction="sum")
    torch.testing.assert_close(g.cpu(), math.exp(-40) * torch.tensor([[-4.0, 4.0]]), rtol=1e-5, atol=0)


def test_small_losses_keep_their_digits(device):
    """1 - p at p near 1, and (1 - p^q) / q at small q, where the formula taken literally loses every digit."""
    x = torch.tensor([[4.0, 0.0], [7.0, 0.0]], device=device)
    t = torch.zeros(2, dtype=torch.long, device=device)
    z = torch.log1p(torch.exp(-x[:, 0].double()))
    for q in (1.0, 0.3, 1e-2, 1e-4, 1e-6):
        ours = generalized_cross_entropy(x, t, q, reduction="none")
        torch.testing.assert_close(ours.double(), -torch.expm1(-q * z) / q, rtol=1e-4, atol=0)
    torch.testing.assert_close(poly_cross_entropy(x, t, 1.0, reduction="none").double(), z - torch.expm1(-z), rtol=1e-4, atol=0)


@MODES
@pytest.mark.parametrize("function", [softmax_focal_loss, poly_cross_entropy, generalized_cross_entropy], ids=lambda f: f.__name__)
def test_a_pair_mixes_losses(function, mode, device):
    """λ L(a) + (1 - λ) L(b), class weights outside of the formula, of which one may be ignored."""
    x, w = torch.randn(6, 5, device=device), torch.rand(5, device=device)
    a, b = torch.tensor([0, 1, 2, 3, -100, -100], device=device), torch.tensor([1, 1, 0, -100, 4, -100], device=device)
    lam = torch.tensor([0.3, 0.6, 0.5, 0.9, 0.1, 0.4], device=device)
    value, g = gradient_of(function, x, a, weight=w, target_b=b, lam=lam, reduction="sum", gradient=mode)

    def mixed(x):
        x = x.double()
        return lam * function(x, a, weight=w, reduction="none") + (1 - lam) * function(x, b, weight=w, reduction="none")

    exact, g_exact = gradient_of(mixed, x)
    assert error(value, exact.sum()) < 3e-6
    assert error(g, g_exact) < 3e-6
    ours, _ = gradient_of(function, x, a, weight=w, target_b=b, lam=lam, reduction="mean", gradient=mode)
    weights = lam * torch.where(a < 0, 0, w[a.clamp(min=0)]) + (1 - lam) * torch.where(b < 0, 0, w[b.clamp(min=0)])
    divisor = torch.tensor(5.0) if function is softmax_focal_loss else weights.sum()
    assert error(ours, exact.sum() / divisor.to(device)) < 3e-6


@MODES
def test_focal_mean_is_over_rows(mode, device):
    """Weights and α stay out of the divisor, unlike in cross_entropy, with few rows and with many."""
    for rows in (6, 1100):
        x, w = torch.randn(rows, 3, device=device), torch.rand(3, device=device)
        t = torch.randint(0, 3, (rows,), device=device)
        t[::5] = -100
        each, g_each = gradient_of(softmax_focal_loss, x.double(), t, 0.25, weight=w)
        value, g = gradient_of(softmax_focal_loss, x, t, 0.25, reduction="mean", weight=w, gradient=mode)
        assert error(value, each.sum() / (t >= 0).sum()) < 3e-6
        assert error(g, g_each / (t >= 0).sum()) < 3e-6


LAYOUTS = {
    "aligned": lambda d: torch.randn(3, 128, device=d),
    "odd": lambda d: torch.randn(3, 37, device=d),
    "two sweeps": lambda d: torch.randn(2, 9000, device=d),
    "two sweeps, rows anywhere": lambda d: torch.randn(2, 9001, device=d),
    "sliced": lambda d: torch.randn(3, 90, device=d)[:, ::2],
    "pixels": lambda d: torch.randn(2, 5, 4, 8, device=d),
    "pixels, many classes": lambda d: torch.randn(1, 70, 4, 8, device=d),
}


@MODES
@pytest.mark.parametrize("name", LAYOUTS)
def test_log_prior_over_layouts(name, mode, device):
    """Added as the logits are read: an ignored row of nan, smoothing, probabilities, scale and z-loss see the adjusted logits."""
    x = LAYOUTS[name](device)
    prior = torch.randn(x.shape[1], device=device) * 3
    t = torch.randint(0, x.shape[1], (x.shape[0], *x.shape[2:]), device=device)
    t.view(-1)[1] = -100
    ignored = (t == -100).unsqueeze(1).expand_as(x)
    x = torch.where(ignored, NAN, x).as_strided(x.shape, x.stride()) if x.is_contiguous() else x
    adjusted = (x.double().nan_to_num(0) * 0.7 + 1.3 * prior.double().view(-1, *(1,) * (x.ndim - 2))).requires_grad_()
    for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}):
        with plain_torch():
            exact = cross_entropy(adjusted, t, **options)
        (g_exact,) = torch.autograd.grad(exact, adjusted)
        value, g = gradient_of(logit_adjusted_cross_entropy, x, t, prior, 1.3, scale=0.7, gradient=mode, **options)
        assert error(value, exact) < 3e-6
        assert error(g, g_exact * 0.7) < 3e-6
        assert (g[ignored] == 0).all()
    q = torch.rand_like(adjusted).softmax(1).float()
    x = x.nan_to_num(0)
    value, g = gradient_of(logit_adjusted_cross_entropy, x, q, prior, 1.3, scale=0.7, gradient=mode)
    exact = F.cross_entropy(adjusted, q.double())
    assert error(value, exact) < 3e-6
    assert error(g, torch.autograd.grad(exact, adjusted)[0] * 0.7) < 3e-6


def test_class_counts_become_the_prior(device):
    counts = torch.tensor([1, 10, 89])
    module = LogitAdjustedCrossEntropyLoss(counts, tau=0.5).to(device)
    torch.testing.assert_close(module.log_prior.exp().cpu(), torch.tensor([0.01, 0.1, 0.89]))
    x, t = torch.randn(4, 3, device=device), torch.tensor([0, 1, 2, 0], device=device)
    torch.testing.assert_close(module(x, t), F.cross_entropy(x + 0.5 * (counts / 100).log().to(device), t))
    with pytest.raises(ValueError, match="class_counts must be above 0, got 0"):
        LogitAdjustedCrossEntropyLoss(torch.tensor([0, 3]))


def test_class_balanced_weight(device):
    """(1 - β) / (1 - β^n) of β = ½: 1, 2/3, 4/7, normalised to 3 in all; a class without samples counts as one."""
    expected = torch.tensor([1.0, 1.0, 2 / 3, 4 / 7])
    weight = class_balanced_weight(torch.tensor([0, 1, 2, 3], device=device), 0.5)
    torch.testing.assert_close(weight.cpu(), expected * 4 / expected.sum())
    assert torch.equal(class_balanced_weight(torch.tensor([1, 50]), 0.0), torch.ones(2))
    near = class_balanced_weight(torch.tensor([1.0, 3.0], dtype=torch.float64), 1 - 1e-12)
    torch.testing.assert_close(near, torch.tensor([1.5, 0.5], dtype=torch.float64))
    x, t = torch.randn(4, 4, device=device), torch.tensor([0, 1, 2, 3], device=device)
    torch.testing.assert_close(cross_entropy(x, t, weight), F.cross_entropy(x, t, weight))


X, T = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, r"alpha must hold one number a class, shape \(3,\), got \(2,\)", lambda: softmax_focal_loss(X, T, torch.ones(2))),
        (ValueError, r"weight must hold one number a class, shape \(3,\)", lambda: softmax_focal_loss(X, T, 0.5, weight=torch.ones(2))),
        (TypeError, "target must hold class indices, with target_b and lam", lambda: generalized_cross_entropy(X, X)),
        (ValueError, r"target must have the shape of input, .*, where it holds probabilities", lambda: poly_cross_entropy(X, X[:, :2])),
        (ValueError, "ignore_index needs class indices as target", lambda: softmax_focal_loss(X, X, ignore_index=1)),
        (ValueError, "label_smoothing must be 0 where weight is given", lambda: poly_cross_entropy(X, T, 1, X[0], label_smoothing=0.1)),
        (ValueError, r"log_prior must hold one number a class, shape \(3,\)", lambda: logit_adjusted_cross_entropy(X, T, X)),
        (ValueError, "softcap must be None", lambda: logit_adjusted_cross_entropy(X, T, X[0], softcap=3.0)),
        (ValueError, "beta must be finite and at least 0 and below 1, got 1", lambda: class_balanced_weight(T, 1.0)),
        (ValueError, r"counts must hold one count a class, shape \(C,\), got \(2, 3\)", lambda: class_balanced_weight(X)),
    ],
)
def test_errors(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def test_a_smoothing_that_must_be_below_1_is_checked_when_a_compiled_graph_runs():
    compiled = torch.compile(lambda smoothing: poly_cross_entropy(X, T, label_smoothing=smoothing), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.tensor(0.25)), poly_cross_entropy(X, T, label_smoothing=0.25))
    with pytest.raises(ValueError, match=r"label_smoothing must be finite and at least 0 and below 1, got 1\.0"):
        compiled(torch.tensor(1.0))


@pytest.mark.parametrize("function", [softmax_focal_loss, poly_cross_entropy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_index_is_its_one_hot_vector(function, dtype, device):
    """Of rows and pixels, with smoothing, as is a mixup pair the mixture of two."""
    bound = 3e-6 if dtype == torch.float32 else 1e-12
    for shape in ((6,), (2, 3, 4)):
        x = torch.randn(shape[0], 5, *shape[1:], device=device, dtype=dtype)
        a, b = torch.randint(0, 5, (2, *shape), device=device)
        y, y_b = (F.one_hot(t, 5).movedim(-1, 1).to(dtype) for t in (a, b))
        for options in ({}, {"label_smoothing": 0.2}, {"label_smoothing": 0.2, "scale": 0.7, "z_loss": 0.1}):
            for reduction in ("mean", "none"):
                exact, g_exact = gradient_of(function, x.double(), a, reduction=reduction, **options)
                value, g = gradient_of(function, x, y, reduction=reduction, **options)
                assert error(value, exact) < bound
                assert error(g, g_exact) < bound
        exact, g_exact = gradient_of(function, x.double(), a, target_b=b, lam=0.3, reduction="none")
        value, g = gradient_of(function, x, 0.3 * y + 0.7 * y_b, reduction="none")
        assert error(value, exact) < bound
        assert error(g, g_exact) < bound


@pytest.mark.parametrize("function", [softmax_focal_loss, poly_cross_entropy], ids=lambda f: f.__name__)
def test_soft_targets_of_a_teacher(function, device):
    """The target is differentiated, a class of probability 0 may have a logit of -inf, and the head's logits may come from a layer."""
    x, y = torch.randn(6, 5, device=device, dtype=torch.float64), torch.rand(6, 5, device=device, dtype=torch.float64).softmax(1)
    p = x.softmax(1)
    each = -p.log() * (1 - p) ** 2 if function is softmax_focal_loss else -p.log() + 2 * (1 - p)
    _, g = gradient_of(lambda y: function(x, y, reduction="sum"), y)
    assert error(g, each) < 1e-12
    far, kept = x.clone(), y.clone()
    far[:, 2], kept[:, 2] = -math.inf, 0.0
    others = [0, 1, 3, 4]
    value, g = gradient_of(function, far, kept, reduction="none")
    exact, g_exact = gradient_of(function, x[:, others], y[:, others], reduction="none")
    assert error(value, exact) < 1e-12
    assert error(g[:, others], g_exact) < 1e-12
    assert not g[:, 2].any()
    w = torch.randn(5, 7, device=device, dtype=torch.float64)
    features = torch.randn(6, 7, device=device, dtype=torch.float64)
    value, g = gradient_of(fuse_linear(function), features, w, y, reduction="mean", label_smoothing=0.1)
    exact, g_exact = gradient_of(lambda f: function(f @ w.T, y, reduction="mean", label_smoothing=0.1), features)
    assert error(value, exact) < 1e-12
    assert error(g, g_exact) < 1e-12


@pytest.mark.parametrize("name", ["softmax_focal", "poly_ce"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_targets_by_the_oracle(name, dtype, device):
    """Under every option, of rows and of pixels, by the formula over all classes in float64."""
    function, oracle = LOSSES[name].function, LOSSES[name].oracle()
    weight = torch.rand(5, device=device, dtype=dtype)
    own = {
        "softmax_focal": [{"gamma": 0.5}, {"alpha": 0.25}, {"alpha": weight.flip(0), "weight": weight}],
        "poly_ce": [{"epsilon": -0.5}, {"weight": weight}],
    }
    for shape in ((6, 5), (2, 5, 3, 4)):
        x, y = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        for target in (y.softmax(1), y.argmax(1)):
            for options in ({}, *own[name]):
                for smoothing in (0.0, 0.2):
                    if name == "poly_ce" and "weight" in options and not target.is_floating_point():
                        continue  # refused with smoothing
                    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
                    for reduction in ("mean", "none"):
                        given = {"reduction": reduction, "label_smoothing": smoothing}
                        right, g_right = gradient_of(oracle, x.double(), target, **exact, **given)
                        value, g = gradient_of(function, x, target, **options, **given)
                        assert error(value, right) < (3e-6 if dtype == torch.float32 else 1e-12)
                        assert error(g, g_right) < (3e-6 if dtype == torch.float32 else 1e-12)


def test_soft_targets_as_timm(device):
    """Those of its PolyCrossEntropy, whose targets add up to 1."""
    theirs = pytest.importorskip("timm.loss").PolyCrossEntropy
    x, y = torch.randn(6, 5, device=device), torch.randn(6, 5, device=device).softmax(1)
    for epsilon, reduction in ((2.0, "mean"), (-0.5, "none")):
        exact, g_exact = gradient_of(theirs(epsilon, reduction=reduction), x, y)
        value, g = gradient_of(poly_cross_entropy, x, y, epsilon, reduction=reduction)
        assert error(value, exact) < 1e-6
        assert error(g, g_exact) < 3e-6
