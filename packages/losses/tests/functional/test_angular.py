"""ArcFace and CosFace: values by hand, the margin's branches, ends of the cosine, the fused form, many classes."""

import math

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import arcface_loss, cosface_loss, cross_entropy, fuse_linear
from lossforge.losses.oracles.classification import arcface, cosface
from lossforge.losses.testing import error

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
PAIRS = pytest.mark.parametrize(("function", "oracle"), [(arcface_loss, arcface), (cosface_loss, cosface)], ids=["arcface", "cosface"])


def cosines(rows, classes, device="cpu"):
    """All of [-1, 1] at the targets, which are class 0 of each row."""
    x = torch.randn(rows, classes, generator=torch.Generator().manual_seed(rows)) / 10
    x[:, 0] = torch.linspace(-1, 1, rows)
    return x.clamp(-1, 1).to(device)


def differentiated(function, x, *args, **options):
    x = x.detach().requires_grad_()
    value = function(x, *args, **options)
    upstream = torch.linspace(0.5, 1.5, max(1, value.numel()), device=x.device, dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, x, upstream)[0]


def test_by_hand(device):
    """θ = 60° plus 30° is a cosine of 0: ln(1 + e^0 + e^0) with the other cosines 0; 0.5 - 0.5 is the same."""
    x, target = torch.tensor([[0.0, 0.5, 0.0]], device=device), torch.tensor([1], device=device)
    for value in (arcface_loss(x, target, math.pi / 6, 10.0), cosface_loss(x, target, 0.5, 10.0)):
        assert value.item() == pytest.approx(math.log(3), abs=1e-6)
    beyond = arcface_loss(torch.tensor([[-0.9, -0.9]], device=device), torch.tensor([0], device=device), 0.5, 1.0)
    assert beyond.item() == pytest.approx(math.log1p(math.exp(0.5 * math.sin(0.5))), abs=1e-6)


@MODES
@PAIRS
@pytest.mark.parametrize("classes", [10, 9001])
@pytest.mark.parametrize("margin", [0.35, 0.5, 2.0])
def test_whole_range_of_cosines(function, oracle, margin, classes, mode, device):
    """Against angles in float64. The derivative is infinite at x = 1 but for the least sine, which the oracle has too."""
    x = cosines(9, classes, device)
    target = torch.zeros(9, dtype=torch.long, device=device)
    value, g = differentiated(function, x, target, margin, 16.0, gradient=mode)
    exact, g_exact = differentiated(oracle, x.double().clamp(max=1 - 6e-8), target, margin, 16.0)
    assert error(value, exact) < 2e-5
    assert g.isfinite().all()
    assert error(g[:-1], g_exact[:-1]) < 2e-5


@PAIRS
def test_confident_rows_keep_their_digits(function, oracle, device):
    """The margin is in the row's sum: without it ln p is -3e-10, of which float32 keeps no digit in a sum of 1."""
    x = torch.full((2, 1000), 0.1, device=device)
    x[:, 3] = 0.55
    target = torch.full((2,), 3, device=device)
    value, g = differentiated(function, x, target, reduction="sum")
    exact, g_exact = differentiated(oracle, x.double(), target, reduction="sum")
    assert exact > 1
    assert error(value, exact) < 1e-5
    assert error(g, g_exact) < 1e-5


def test_beyond_one_is_one(device):
    """What rounding puts beyond ±1 has a finite gradient, that of the cosine alone."""
    x = torch.tensor([[1.0078125, 0.0], [1.0, 0.0], [-1.0078125, 0.0]], device=device)
    _, g = differentiated(arcface_loss, x, torch.zeros(3, dtype=torch.long, device=device), 0.5, 1.0, reduction="sum")
    assert g.isfinite().all()
    p = 1 / (1 + torch.exp(1.0078125 * torch.cos(torch.tensor(0.5)) - math.sqrt(1e-7) * torch.sin(torch.tensor(0.5))))
    torch.testing.assert_close(g[0, 0].cpu(), -0.5 * p * torch.cos(torch.tensor(0.5)), rtol=1e-5, atol=0)


@MODES
@PAIRS
def test_fused_with_the_layer_of_class_vectors(function, oracle, mode, device):
    """Gradients of features and class vectors go through their normalisation, by chunks of rows and of classes."""
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(n, 16, generator=generator).to(device) for n in (6, 130))
    target = torch.arange(6, device=device) * 25

    def run(loss, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (features, weight)]
        value = loss(*(F.normalize(t) for t in leaves))
        return value, *torch.autograd.grad(value, leaves)

    ours = run(lambda x, w: fuse_linear(function)(x, w, target, scale=16.0, gradient=mode, chunk=3), torch.float32)
    exact = run(lambda x, w: oracle(x @ w.T, target, scale=16.0), torch.float64)
    assert all(error(a, b) < 2e-5 for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("function", [arcface_loss, cosface_loss])
def test_without_margin_it_is_a_scaled_cross_entropy(function, device):
    x, target = cosines(5, 7, device), torch.arange(5, device=device)
    torch.testing.assert_close(function(x, target, 0.0, 12.0), cross_entropy(x, target, scale=12.0))


@pytest.mark.parametrize("function", [arcface_loss, cosface_loss])
def test_wrong_numbers_are_refused(function):
    x, target = cosines(2, 3), torch.tensor([0, 1])
    for wrong in ({"margin": -0.1}, {"margin": math.inf}, {"scale": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            function(x, target, **wrong)
