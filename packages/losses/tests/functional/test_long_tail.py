"""The distribution-balanced loss beside timm's class, which the registry's tests do not call, because it requires the classes' counts."""

import pytest
import torch
from loss_calls import gradient_of
from timm.loss import DistributionBalancedLoss as TimmsLoss

from lossforge.losses import DistributionBalancedLoss, distribution_balanced_loss

COUNTS = torch.tensor([900.0, 350.0, 40.0, 7.0, 0.0, 1000.0])  # the last two are clamped
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 4


@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"map_alpha": 0.5, "map_beta": 3.0, "map_mu": 0.4, "init_bias": 0.3},
        {"neg_scale": 5.0, "focal_gamma": 0.0, "init_bias": 0.0},
        {"focal_gamma": 1.5, "focal_balance": 0.7, "smoothing": 0.1},
    ],
)
@pytest.mark.parametrize("soft", [False, True], ids=["binary", "soft"])
def test_as_timms(soft, options, reduction, device):
    x = drawn(8, 6).to(device)
    y = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)).to(device)
    y = y if soft else (y > 0.6).float()
    y[2] = 0  # a sample without positives
    theirs = TimmsLoss(COUNTS.to(device), 1000, **options, reduction=reduction)
    expected, g_expected = gradient_of(lambda x: theirs(x, y) * 1.5, x)
    modes = {"none": ("backward",)}.get(reduction, ("forward", "backward"))
    for mode in modes:
        ours = DistributionBalancedLoss(COUNTS.to(device), 1000, **options, reduction=reduction, gradient=mode)
        value, g = gradient_of(lambda x, ours=ours: ours(x, y) * 1.5, x)
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(g, g_expected, rtol=1e-5, atol=1e-7)


@MODES
def test_class_indices_along_another_dimension(mode, device):
    """One class a pixel, a score, and a mixup pair, as the dense target that each means."""
    x = drawn(2, 6, 3).to(device)
    a, b = (torch.randint(-1, 6, (2, 3), generator=torch.Generator().manual_seed(seed)).to(device) for seed in (0, 1))
    given = {"class_counts": COUNTS.to(device), "num_samples": 1000, "dim": 1, "gradient": mode}

    def one_hot(index):
        return (index.unsqueeze(1) == torch.arange(6, device=device).view(1, 6, 1)).float()

    score = torch.rand(2, 3, device=device)
    for dense, kwargs in (
        (one_hot(a), {}),
        (one_hot(a) * score.unsqueeze(1), {"score": score}),
        (0.3 * one_hot(a) + 0.7 * one_hot(b), {"target_b": b, "lam": 0.3}),
    ):
        found = gradient_of(distribution_balanced_loss, x, a, **given, **kwargs)
        expected = gradient_of(distribution_balanced_loss, x, dense, **given)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_counts": COUNTS}, "num_samples must be given where class_counts is"),
        ({"class_counts": COUNTS, "num_samples": 1}, "num_samples must be finite and at least 2"),
        ({"class_counts": COUNTS[:5], "num_samples": 9}, r"class_counts must hold one count a class, shape \(6,\), got \(5,\)"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        distribution_balanced_loss(torch.zeros(2, 6), torch.zeros(2, 6), **options)


@MODES
def test_weights_beside_the_counts(mode, device):
    x, w = drawn(4, 6).to(device), torch.rand(4, 1).to(device)
    y = (x > 1).float()
    given = {"class_counts": COUNTS.to(device), "num_samples": 1000}
    each, g_each = gradient_of(distribution_balanced_loss, x, y, **given, reduction="none")
    value, g = gradient_of(distribution_balanced_loss, x, y, **given, weight=w, reduction="sum", gradient=mode)
    torch.testing.assert_close(value, (each * w).sum())
    torch.testing.assert_close(g, g_each * w)
