"""ZLPR and the two-way loss beside timm's classes: values, gradients, layouts, modes, edges, and what every operator promises."""

import contextlib
import math

import pytest
import timm.loss
import torch
from loss_calls import gradient_of

from lossforge.losses import TwoWayLoss, ZlprLoss, plain_torch, two_way_loss, zlpr_loss

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def drawn(n, c, device="cpu", spread=3.0, share=0.2):
    generator = torch.Generator().manual_seed(n + c)
    x = torch.randn(n, c, generator=generator) * spread
    return x.to(device), (torch.rand(n, c, generator=generator) < share).to(device)


def zlpr(x, y, reduction="mean"):
    """Compute the paper's sums over pairs of sets."""
    y = y > 0.5
    rows = ((x.exp() * ~y).sum(1) + 1).log() + (((-x).exp() * y).sum(1) + 1).log()
    return {"none": rows, "mean": rows.mean(), "sum": rows.sum()}[reduction]


def two_way(x, y, tp=4.0, tn=1.0, reduction="mean"):
    """Compute both directions with products over the sets, of those rows and columns that have both."""
    y, total = y > 0.5, 0.0
    for rows, held in ((x, y), (x.T, y.T)):
        both, valid = held.any(1) & ~held.all(1), held.any(1)
        rows, held = rows[both], held[both]
        h = tn * ((rows / tn).exp() * ~held).sum(1).log() + tp * ((-rows / tp).exp() * held).sum(1).log()
        total = total + torch.logaddexp(h, h * 0).sum() / (valid.sum().clamp(min=1) if reduction == "mean" else 1)
    return total


CASES = {
    "one sample": lambda d: drawn(1, 9, d),
    "one class": lambda d: drawn(5, 1, d, share=0.5),
    "samples that end within a tile": lambda d: drawn(70, 20, d),
    "classes of several tiles": lambda d: drawn(3, 2050, d),
    "many of both": lambda d: drawn(70, 1100, d),
    "transposed": lambda d: tuple(t.T for t in drawn(20, 70, d)),
    "sliced": lambda d: tuple(t[::2, 1::3] for t in drawn(20, 70, d)),
    "targets in another order": lambda d: (drawn(7, 40, d)[0], drawn(40, 7, d)[1].T),
    "shares as targets": lambda d: (drawn(7, 40, d)[0], torch.rand(7, 40, device=d)),
    "integers as targets": lambda d: (drawn(7, 40, d)[0], drawn(7, 40, d)[1].int()),
}


@pytest.mark.parametrize(("mode", "reduction"), [("forward", "mean"), ("backward", "sum")])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ours", "plainly"), [(zlpr_loss, zlpr), (two_way_loss, two_way)], ids=["zlpr", "two_way"])
def test_against_float64(ours, plainly, name, reduction, dtype, mode, device):
    x, y = CASES[name](device)
    x = x.to(dtype)
    value, g = gradient_of(lambda x: 1.5 * ours(x, y, reduction=reduction, gradient=mode), x)
    exact, g_exact = gradient_of(lambda x: 1.5 * plainly(x, y, reduction=reduction), x.double())
    torch.testing.assert_close(value.double(), exact, rtol=3e-6, atol=1e-6)
    assert g.dtype == dtype
    assert (g.double() - g_exact).norm() <= 2 * DTYPES[dtype] * g_exact.norm() + 1e-12
    wide, g_wide = gradient_of(lambda x: 1.5 * ours(x, y, reduction=reduction), x.double())
    torch.testing.assert_close(wide, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(g_wide, g_exact, rtol=1e-9, atol=1e-14)


@MODES
@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ZlprLoss, timm.loss.ZlprLoss()),
        (TwoWayLoss, timm.loss.TwoWayLoss()),
        (lambda **options: TwoWayLoss(2.0, 0.5, **options), timm.loss.TwoWayLoss(2.0, 0.5)),
    ],
    ids=["zlpr", "two-way", "two-way, other temperatures"],
)
def test_as_timms(ours, theirs, spread, mode, device):
    """Samples and classes without positives, and without negatives, too."""
    x, y = drawn(12, 9, device, spread)
    y[3], y[4], y[:, 2], y[:, 5] = False, True, False, True
    value, g = gradient_of(lambda x: 1.5 * ours(gradient=mode)(x, y), x)
    expected, g_expected = gradient_of(lambda x: 1.5 * theirs(x, y), x)
    torch.testing.assert_close(value, expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(g, g_expected, rtol=2e-5, atol=1e-7)


def test_one_value_a_sample(device):
    """With an upstream gradient each, in the leading dimensions; a normalizer in the mean's place."""
    x, y = drawn(12, 30, device)
    upstream = torch.rand(3, 4, device=device) + 0.5
    each, g = gradient_of(lambda x: zlpr_loss(x, y.view(3, 4, 30), "none") * upstream, x.view(3, 4, 30))
    exact, g_exact = gradient_of(lambda x: zlpr(x, y, "none").view(3, 4) * upstream.double(), x.double())
    torch.testing.assert_close(each.double(), exact, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(g.double().view(12, 30), g_exact, rtol=1e-5, atol=1e-8)
    one = zlpr_loss(x[0], y[0], "none")
    assert one.shape == ()
    torch.testing.assert_close(one, zlpr_loss(x, y, "none")[0])
    for normalizer in (5, torch.tensor(5.0, device=device)):
        torch.testing.assert_close(zlpr_loss(x, y, normalizer=normalizer), zlpr_loss(x, y, "sum") / 5)


@MODES
def test_extreme_logits_and_empty_sets(mode, device):
    """Saturated answers are exact, a nan harms its sample alone, and nothing is 0 or the mean's nan."""
    x = torch.tensor([[1e4, -1e4, -1e4], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0], [INF, -INF, 1.0]], device=device)
    y = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1]], device=device)
    each, g = gradient_of(zlpr_loss, x, y, "none")
    expected = [0.0, 2e4, math.log(4), math.log1p(math.exp(-1))]
    torch.testing.assert_close(each, torch.tensor(expected, device=device), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(g[:2], torch.tensor([[0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]], device=device))
    assert not g[3, :2].any()
    spoiled = x.clone()
    spoiled[2, 1] = NAN
    value = zlpr_loss(spoiled, y, "none")
    assert value.isnan().tolist() == [False, False, True, False]
    nothing = torch.zeros(4, 3, device=device)
    value, g = gradient_of(two_way_loss, x[:3], nothing[:3], gradient=mode)
    assert value == 0
    assert not g.any()
    assert zlpr_loss(x[:0], y[:0]).isnan()
    assert zlpr_loss(x[:0], y[:0], empty="zero") == 0
    assert two_way_loss(x[:0], y[:0]) == 0


@MODES
def test_infinite_wrong_answers(mode, device):
    """Their loss is infinite, and the gradient nan at the class alone, as torch's logsumexp gives both."""
    x = torch.tensor([[-INF, 0.0, 0.0], [0.0, INF, 0.0], [0.0, INF, INF]], device=device)
    y = torch.tensor([[1, 0, 0]] * 3, device=device)
    assert zlpr_loss(x, y, "none").tolist() == [INF] * 3
    value, g = gradient_of(zlpr_loss, x, y, "sum", gradient=mode)
    assert value == INF
    third = 1 / 3
    expected = torch.tensor([[NAN, third, third], [-0.5, NAN, 0.0], [-0.5, NAN, NAN]], device=device)
    torch.testing.assert_close(g, expected, equal_nan=True)


@pytest.mark.parametrize("path", [contextlib.nullcontext, plain_torch])
def test_an_infinite_right_answer(path, device):
    """The one positive of its sample and of its class adds neither loss nor gradient."""
    x = torch.tensor([[INF, 0.0, 1.0], [0.5, 2.0, -1.0]], device=device)
    y = torch.tensor([[1, 0, 0], [0, 1, 0]], device=device)
    sure = x.double().clamp(max=500).requires_grad_()
    expected = two_way(sure, y)
    expected.backward()
    with path():
        value, g = gradient_of(two_way_loss, x, y)
    torch.testing.assert_close((value, g), (expected.detach().float(), sure.grad.float()))


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        (ValueError, lambda x: zlpr_loss(x, x[:, :3]), r"target must have the shape of input, \(6, 4\).* got shape \(6, 3\)"),
        (TypeError, lambda x: two_way_loss(x, x.to(torch.complex64)), "target must be of a real dtype or bool, got torch.complex64"),
        (ValueError, lambda x: zlpr_loss(x, x.detach().requires_grad_()), "target has no gradient"),
        (ValueError, lambda x: two_way_loss(x, x.detach().requires_grad_()), "target has no gradient"),
        (ValueError, lambda x: two_way_loss(x[0], x[0]), r"input must have shape \(N, C\), got \(4,\)"),
    ],
)
def test_refused_arguments(kind, call, message):
    with pytest.raises(kind, match=message):
        call(torch.zeros(6, 4))
