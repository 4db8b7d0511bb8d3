"""The cross entropy with a divergence of views beside timm's class: values, gradients, layouts, modes, edges, the operator."""

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of
from timm.loss import JsdCrossEntropy

from lossforge.losses import jsd_cross_entropy

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def drawn(rows, classes, device="cpu", spread=3.0):
    generator = torch.Generator().manual_seed(rows + classes)
    x = torch.randn(rows, classes, generator=generator) * spread
    return x.to(device), torch.randint(classes, (rows,), generator=generator).to(device)


def plainly(x, target, num_splits=3, alpha=12.0, smoothing=0.1):
    return JsdCrossEntropy(num_splits, alpha, smoothing)(x, target)


CASES = {
    "one sample": lambda d: (*drawn(3, 10, d), {}),
    "two views": lambda d: (*drawn(14, 33, d), {"num_splits": 2, "alpha": 3.0}),
    "five views": lambda d: (*drawn(15, 7, d), {"num_splits": 5, "smoothing": 0.0}),
    "several tiles": lambda d: (*drawn(9, 1500, d), {}),
    "one class": lambda d: (*drawn(6, 1, d), {}),
    "far apart, so that the mixture is clamped": lambda d: (*drawn(12, 20, d, 30.0), {}),
    "transposed": lambda d: (drawn(20, 12, d)[0].T, drawn(12, 20, d)[1], {}),
    "sliced": lambda d: (drawn(24, 40, d)[0][::2, ::2], drawn(12, 20, d)[1], {"alpha": 0.5}),
}


@MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, dtype, mode, device):
    x, target, options = CASES[name](device)
    x = x.to(dtype)
    value, g = gradient_of(lambda x: 1.5 * jsd_cross_entropy(x, target, **options, gradient=mode), x)
    exact, g_exact = gradient_of(lambda x: 1.5 * plainly(x, target, **options), x.double())
    torch.testing.assert_close(value.double(), exact, rtol=3e-6, atol=1e-6)
    assert g.dtype == dtype
    assert (g.double() - g_exact).norm() <= DTYPES[dtype] * g_exact.norm() + 2.0**-22  # of terms up to 1, whose sum may be 0
    clean = target[: len(x) // options.get("num_splits", 3)]
    assert torch.equal(jsd_cross_entropy(x, target, **options), jsd_cross_entropy(x, clean, **options))
    wide, g_wide = gradient_of(lambda x: 1.5 * jsd_cross_entropy(x, target, **options), x.double())
    torch.testing.assert_close(wide, exact, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(g_wide, g_exact, rtol=1e-9, atol=1e-14)


@MODES
def test_edges(mode, device):
    """Equal views add nothing, an excluded class neither; a nan shows; ignored samples count in the divergence."""
    x, target = drawn(4, 6, device)
    x[:, 5], target[0] = -INF, 2
    target = target.clamp(max=4)
    value, g = gradient_of(jsd_cross_entropy, torch.cat([x, x, x]), target, gradient=mode, smoothing=0.0)
    expected, g_expected = gradient_of(F.cross_entropy, x, target)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g[:4], g_expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[4:], torch.zeros_like(g[4:]), rtol=0, atol=1e-6)
    spoiled = torch.cat([x, x, x])
    spoiled[5, 0] = NAN
    assert jsd_cross_entropy(spoiled, target, smoothing=0.0).isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 1}, "num_splits must be at least 2 and at most 64, got 1"),
        ({"num_splits": 4}, r"input must have shape \(S N, C\) with S = num_splits = 4, got \(6, 4\)"),
    ],
)
def test_refused_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        jsd_cross_entropy(torch.zeros(6, 4), torch.zeros(6, dtype=torch.long), **options)
