"""ArcFace and CosFace: values by hand, the margin's branches, ends of the cosine, the fused form, many classes."""

import math

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import LDAMLoss, arcface_loss, cosface_loss, fuse_linear, ldam_loss
from lossforge.losses.testing import error
from lossforge.losses.testing.oracles.classification import arcface, cosface, ldam

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
@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize(
    ("function", "oracle", "margin"), [(arcface_loss, arcface, 0.4), (cosface_loss, cosface, 0.4), (ldam_loss, ldam, None)]
)
def test_fused_with_the_layer_of_class_vectors(function, oracle, margin, chunk, mode, device):
    """Gradients of features and class vectors go through their normalisation, by chunks of rows and of classes."""
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(n, 16, generator=generator).to(device) for n in (6, 130))
    target = torch.arange(6, device=device) * 25
    margin = torch.linspace(0.5, 0.1, 130, device=device) if margin is None else margin

    def run(loss, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (features, weight)]
        value = loss(*(F.normalize(t) for t in leaves))
        return value, *torch.autograd.grad(value, leaves)

    ours = run(lambda x, w: fuse_linear(function)(x, w, target, margin, scale=16.0, gradient=mode, chunk=chunk), torch.float32)
    exact = run(lambda x, w: oracle(x @ w.T, target, margin, scale=16.0), torch.float64)
    assert all(error(a, b) < 2e-5 for a, b in zip(ours, exact, strict=True))


def test_ldam_by_hand(device):
    """Each class's margin goes as the fourth root of its samples, as in the authors' code: 0.5 of the rarest."""
    x, target, counts = cosines(5, 3, device), torch.tensor([0, 2, 1, 2, 2], device=device), torch.tensor([1000, 100, 10], device=device)
    total = 0.0
    for row, label in zip(x.double().tolist(), target.tolist(), strict=True):
        moved = [30 * (v - (0.5 * (10 / counts[j].item()) ** 0.25 if j == label else 0)) for j, v in enumerate(row)]
        total += math.log(sum(map(math.exp, moved))) - moved[label]
    module = LDAMLoss(counts)
    assert module(x, target).item() == pytest.approx(total / 5, rel=1e-5)
    assert module.state_dict()["margin"].tolist() == pytest.approx([0.5 * 0.01**0.25, 0.5 * 0.1**0.25, 0.5])
    with pytest.raises(ValueError, match=r"class_counts must be above 0, got 0"):
        LDAMLoss(torch.tensor([3, 0]))
    with pytest.raises(ValueError, match=r"margin must hold one number a class, shape \(3,\), got \(2,\)"):
        ldam_loss(x, target, torch.zeros(2, device=device))
    with pytest.raises(TypeError, match="margin must be a tensor, got float"):
        ldam_loss(x, target, 0.5)


@MODES
@pytest.mark.parametrize("classes", [10, 9001])
def test_margins_of_classes(classes, mode, device):
    """Whole rows and long ones, ignored rows, confident rows, a margin that requires grad, and the layer's chunks of rows and classes."""
    x, target = cosines(9, classes, device), torch.arange(9, device=device)
    x[target, target] = torch.linspace(-1, 1, 9, device=device)
    target[3] = -100
    margin = torch.linspace(0.5, -0.1, classes, device=device)
    value, g = differentiated(ldam_loss, x, target, margin, gradient=mode)
    exact, g_exact = differentiated(ldam, x.double(), target, margin.double())
    assert error(value, exact) < 2e-5
    assert error(g, g_exact) < 2e-5
    learned = margin.clone().requires_grad_()
    (g,) = torch.autograd.grad(ldam_loss(x, target, learned), learned)
    wide = margin.double().requires_grad_()
    assert error(g, torch.autograd.grad(ldam(x.double(), target, wide), wide)[0]) < 2e-5


def test_sub_centers(device):
    """The nearest of each class's vectors counts, and has the gradient; class weights and margins are those of classes."""
    x, target = 0.9 * cosines(9, 12, device), torch.arange(9, device=device) % 4
    weight = torch.linspace(0.5, 2.0, 4, device=device)
    value, g = differentiated(arcface_loss, x, target, 0.3, 8.0, weight, sub_centers=3)
    exact, g_exact = differentiated(lambda x: arcface(x.view(9, 4, 3).max(2)[0], target, 0.3, 8.0, weight=weight.double()), x.double())
    assert error(value, exact) < 2e-6
    assert error(g, g_exact) < 2e-6
    planes = x.view(3, 3, 12).mT  # (N, C K, d)
    assert error(arcface_loss(planes, target.view(3, 3), 0.3, 8.0, weight, sub_centers=3), exact) < 2e-6


def test_an_ignored_row_of_nan_with_several_vectors(device):
    """It changes no value, and its gradient is 0; so with margins of rows."""
    x, target = 0.9 * cosines(4, 12, device), torch.tensor([0, -100, 3, 1], device=device)
    for options in ({"sub_centers": 3}, {"margin": torch.full((4,), 0.5, device=device)}):
        value, g = differentiated(arcface_loss, x, target, **options)
        x[1] = torch.nan
        value_of_nan, g_of_nan = differentiated(arcface_loss, x, target, **options)
        x[1] = 0.1
        assert torch.equal(value, value_of_nan)
        assert torch.equal(g, g_of_nan)


def test_sub_centers_are_refused(device):
    x, target = cosines(4, 10, device), torch.zeros(4, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match=r"input must have a multiple of sub_centers=3 classes, at least 1, got shape \(4, 10\)"):
        arcface_loss(x, target, sub_centers=3)
    with pytest.raises(ValueError, match="input must have a multiple of sub_centers=0 classes"):
        arcface_loss(x, target, sub_centers=0)
    for call in (
        lambda: fuse_linear(arcface_loss)(x, x, target, sub_centers=2),
        lambda: arcface_loss(x, target, sub_centers=2, inplace=True),
    ):
        with pytest.raises(ValueError, match="sub_centers needs cosines without fuse_linear and without inplace"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_margins_of_rows(dtype, device):
    """Each row is as with its own number; those of ignored rows do not count."""
    x = (0.9 * cosines(9, 6, device)).to(dtype)
    target = torch.tensor([0, 0, 1, 2, -100, 5, 0, 3, 0], device=device)
    of_classes = torch.linspace(0.0, 2.5, 6, device=device)
    margins = of_classes[target.clamp(min=0)]
    value, g = differentiated(arcface_loss, x, target, margins, 8.0, reduction="none")
    upstream = torch.linspace(0.5, 1.5, 9)

    def of_row(i):
        exact, g = differentiated(arcface_loss, x[i : i + 1].double(), target[i : i + 1], margins[i].item(), 8.0, reduction="none")
        return exact, g * upstream[i].item() / 0.5

    exact, g_exact = (torch.cat(each) for each in zip(*map(of_row, range(9)), strict=True))
    assert error(value, exact) < 5e-6
    assert error(g, g_exact) < (5e-6 if dtype == torch.float32 else 2.0**-8)
    assert value[4] == 0
    both = arcface_loss(x.float().repeat_interleave(2, 1), target, margins, 8.0, sub_centers=2)
    assert error(both, arcface_loss(x.float(), target, margins, 8.0)) < 1e-6


@pytest.mark.parametrize(
    ("message", "margin"),
    [
        ("margin must be a number, or have the shape of target, .*4", torch.zeros(3)),
        (r"margin must be in \[0, π\], got -1 to 0", torch.tensor([0.0, -1.0, 0.0, 0.0])),
        ("margin has no gradient", torch.zeros(4, requires_grad=True)),
    ],
)
def test_margins_that_are_refused(message, margin):
    with pytest.raises(ValueError, match=message):
        arcface_loss(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), margin)
