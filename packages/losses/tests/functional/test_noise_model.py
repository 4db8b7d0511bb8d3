"""Negative log-likelihoods of a normal and of a Poisson noise: what torch's take, and the ends of their domains."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.kernels import INTERPRETED, launch_counts
from lossforge.losses import GaussianNLLLoss, gaussian_nll_loss, poisson_nll_loss
from lossforge.losses.definitions.classes import noise_model

INF = float("inf")


def both(ours, theirs, tensors, **options):
    """Return values and all gradients, ours in float32 and torch's in float64."""
    found = []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        value = function(*leaves, **options)
        value.backward(torch.full_like(value, 1.5))
        found.append((value.detach(), *[t.grad for t in leaves]))
    return zip(*found, strict=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3), (4, 3, 1), (4, 1, 5), (1, 3, 5)], ids=str)
def test_variances_of_fewer_elements(shape, reduction, device):
    """Each gets the sum of the gradients of the elements that it stands for."""
    torch.manual_seed(0)
    tensors = torch.randn(4, 3, 5, device=device), torch.randn(4, 3, 5, device=device), torch.rand(shape, device=device) + 0.1
    launches = launch_counts().get("pointwise_kernel", 0)
    for got, exact in both(gaussian_nll_loss, F.gaussian_nll_loss, tensors, full=True, reduction=reduction):
        assert got.shape == exact.shape
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    assert launch_counts()["pointwise_kernel"] > launches


def outcome(function, *tensors):
    """Return value and gradients, or the kind of the error."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    try:
        value = function(*leaves, reduction="none")
    except ValueError:
        return ValueError
    value.backward(torch.full_like(value, 1.5))
    return [value.detach(), *[t.grad for t in leaves]]


SHAPES = [shape for n in range(4) for shape in itertools.product((1, 3), repeat=n)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_variances_as_the_installed_torch(shape, device):
    """With none, one or several dimensions of size 1; a 0-d tensor is one number here, of any input."""
    torch.manual_seed(0)
    x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
    for of_var in SHAPES:
        var = torch.rand(of_var, device=device) + 0.1
        found, expected = outcome(gaussian_nll_loss, x, y, var), outcome(F.gaussian_nll_loss, x, y, var)
        if not of_var and len(shape) > 1:
            expected = outcome(F.gaussian_nll_loss, x, y, var.expand(shape))
            expected[3] = expected[3].sum()
        if ValueError in (found, expected):
            assert found is expected, of_var
        else:
            for got, right in zip(found, expected, strict=True):
                torch.testing.assert_close(got, right, rtol=3e-6, atol=1e-6)


def test_several_dimensions_of_size_1_where_torch_takes_them(monkeypatch, device):
    """As a torch would that broadcasts all of them."""
    x, y, var = torch.randn(2, 3, device=device), torch.randn(2, 3, device=device), torch.rand(1, 1, device=device) + 0.1
    monkeypatch.setattr(noise_model, "_takes_several", lambda: True)
    found, expected = (outcome(gaussian_nll_loss, x, y, v) for v in (var, var.expand(2, 3)))
    for got, right in zip(found, [*expected[:3], expected[3].sum().view(1, 1)], strict=True):
        torch.testing.assert_close(got, right)


def test_a_number_as_variance(device):
    x, y = torch.randn(2, 4, 5, device=device)
    torch.testing.assert_close(gaussian_nll_loss(x, y, 0.5), F.gaussian_nll_loss(x, y, 0.5))
    torch.testing.assert_close(GaussianNLLLoss(eps=0.75)(x, y, 0.5), F.gaussian_nll_loss(x, y, 0.5, eps=0.75))


@pytest.mark.parametrize("columns", [5, 1])
def test_compiled_at_several_sizes(columns):
    """The last batch of an epoch is smaller, and torch.compile then traces sizes as symbols."""
    compiled = torch.compile(gaussian_nll_loss, backend="eager", fullgraph=True)
    for n in (4, 3, 7):
        x, y, var = torch.randn(n, 5), torch.randn(n, 5), torch.rand(n, columns) + 0.1
        torch.testing.assert_close(compiled(x, y, var), F.gaussian_nll_loss(x, y, var))


@pytest.mark.parametrize("shape", [(4,), (4, 5, 1), (5, 4), (2, 5), (1, 1)], ids=str)
def test_variances_of_other_shapes(shape, device):
    x = torch.randn(3, 5, device=device)
    with pytest.raises(ValueError, match=r"var must have the shape of input, \(3, 5\), that without its last dimension, or one"):
        gaussian_nll_loss(x, x, torch.ones(shape, device=device))


def test_variances_at_least_eps(device):
    """Below eps the gradient is that at eps, as torch's."""
    x, y = torch.randn(2, 6, device=device)
    var = torch.tensor([0.0, 1e-9, 0.1, 0.25, 0.5, INF], device=device)
    for got, exact in both(gaussian_nll_loss, F.gaussian_nll_loss, (x, y, var), eps=0.25, reduction="none"):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


def test_negative_variances(device, monkeypatch):
    """Refused where the host can read them; else that element alone is nan, by the kernel and by the reference."""
    x, y = torch.randn(2, 3, device=device)
    var = torch.tensor([1.0, -0.5, 2.0], device=device)
    with pytest.raises(ValueError, match=r"var must be at least 0, got -0\.5"):
        gaussian_nll_loss(x, y, var, validate=True)
    with pytest.raises(ValueError, match="var must be finite and at least 0, got -1"):
        gaussian_nll_loss(x, y, -1.0)
    monkeypatch.setattr("lossforge.losses.definitions.classes.noise_model._not_negative", lambda *_: None)
    for dtype in (torch.float32, torch.float64):
        value, g = gradient_of(gaussian_nll_loss, x.to(dtype), y.to(dtype), var.to(dtype), reduction="none")
        assert value.isnan().tolist() == g.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_count_of_zero_at_a_rate_of_zero(dtype, device):
    x = torch.tensor([-INF, -INF, 0.0], device=device, dtype=dtype)
    y = torch.tensor([0.0, 1.0, 0.0], device=device, dtype=dtype)
    value, g = gradient_of(poisson_nll_loss, x, y, reduction="none")
    assert value.tolist() == [0.0, INF, 1.0]
    assert g.tolist() == [0.0, -1.0, 1.0]


def test_rates_of_any_size(device):
    """From the smallest to beyond the largest; the interpreter has no fused product, by which the kernel keeps the last bits."""
    x = torch.tensor([-INF, -100.0, -80.0, -30.0, 0.0, 1e-3, 30.0, 80.0, 88.7, 89.0, INF], device=device)
    value, g = gradient_of(poisson_nll_loss, x, torch.zeros_like(x), reduction="none")
    exact = torch.where(x < -87, 0.0, x.double().exp())
    exact[-2:] = INF
    bound = 1e-5 if INTERPRETED else 1e-6
    torch.testing.assert_close(value.double(), exact, rtol=bound, atol=1e-38)
    torch.testing.assert_close(g.double(), exact, rtol=bound, atol=1e-38)


@pytest.mark.parametrize("log_input", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_counts(full, log_input, device):
    """Whole counts of integer dtypes too, around 1, where Stirling's approximation begins."""
    torch.manual_seed(0)
    x = torch.rand(60, device=device) * 4 + 0.1
    counts = torch.arange(60, device=device).remainder(6)
    expected, g_expected = gradient_of(F.poisson_nll_loss, x.double(), counts.double(), log_input=log_input, full=full)
    for target in (counts, counts.int(), counts.float(), counts.half()):
        value, g = gradient_of(poisson_nll_loss, x, target, log_input=log_input, full=full)
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(g.double(), g_expected, rtol=1e-5, atol=1e-7)
    for got, exact in both(poisson_nll_loss, F.poisson_nll_loss, (x, counts), log_input=log_input, full=full, reduction="none"):
        known = exact.isfinite()  # torch gives the target's gradient as nan at a count of 0 under `full`: it masks 0 ln 0 afterwards
        assert known[counts > 0].all()
        assert got.isfinite().all()
        torch.testing.assert_close(got.double()[known], exact[known], rtol=1e-5, atol=1e-5)
