"""What is the top-k divergence's own: values by hand, the tail, entries that are absent or wrong, rows left out."""

import math

import pytest
import torch

from lossforge.kernels import launch_counts
from lossforge.losses import kl_div_with_logits, plain_torch, topk_kl_div_with_logits
from lossforge.losses.testing import error

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
CLASSES = pytest.mark.parametrize("classes", [7, 9_001, 16_384])


def gradient_of(x, *args, **kwargs):
    x = x.detach().clone().requires_grad_()
    value = topk_kl_div_with_logits(x, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad


def test_values_by_hand(device):
    """p = (1/2, 1/4, 1/4); of the teacher's classes 0 and 2 are known: 0.6 and 0.3."""
    x = torch.tensor([[2.0, 1.0, 1.0]], device=device).log()
    indices, values = torch.tensor([[0, 2]], device=device), torch.tensor([[0.6, 0.3]], device=device).log()
    known = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.25)
    rest = 0.1 * math.log(0.1 / 0.25)
    value, g = gradient_of(x, values, indices)
    torch.testing.assert_close(value.item(), known, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.45 - 0.6, 0.225, 0.225 - 0.3]]))
    value, g = gradient_of(x, values, indices, tail=True)
    torch.testing.assert_close(value.item(), known + rest, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.5 - 0.6, 0.25 - 0.1, 0.25 - 0.3]]))
    value, _ = gradient_of(x, values, indices, renormalize=True)
    exact = 2 / 3 * math.log(2 / 3 / 0.5) + 1 / 3 * math.log(1 / 3 / 0.25)
    torch.testing.assert_close(value.item(), exact, rtol=1e-6, atol=0)


def test_what_topk_returns_fits(device):
    """In its order; all classes are the dense divergence, whose gradient is (p - q) / N."""
    x, t = torch.randn(2, 7, device=device), torch.randn(2, 7, device=device).log_softmax(1)
    value, g = gradient_of(x, *t.topk(7, 1))
    exact = kl_div_with_logits(x, t)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(g, (x.softmax(1) - t.exp()) / 2)


@MODES
@CLASSES
def test_all_classes_are_the_dense_divergence(classes, mode, device):
    """K = C, and with fewer, q among the others 0: what kl_div_with_logits gives of teachers of that support."""
    x, t = torch.randn(2, classes, device=device), torch.randn(2, classes, device=device)
    k = min(classes, 33)
    logits, indices = t.topk(k, 1)
    sparse = torch.full_like(t, -INF).scatter(1, indices, logits)
    exact = kl_div_with_logits(x.double().requires_grad_(), sparse.double(), 2.0)
    value, g = gradient_of(x, logits, indices, 2.0, renormalize=True, gradient=mode)
    assert error(value, exact) < 3e-6
    wide = x.double().requires_grad_()
    kl_div_with_logits(wide, sparse.double(), 2.0).backward()
    assert error(g, wide.grad) < 3e-6
    value, g = gradient_of(x, (logits / 2).log_softmax(1), indices.int(), 2.0, gradient=mode)
    assert error(value, exact) < 3e-6
    assert error(g, wide.grad) < 3e-6


@MODES
def test_a_tail_that_the_student_has_lost(mode, device):
    """1 - Σ p[i] rounds to 0: it is held at 2⁻²⁴, without a gradient, as the reference says."""
    x = torch.tensor([[50.0, 0.0, 0.0], [0.0, 1.0, 2.0]], device=device)
    indices, values = torch.tensor([[0], [2]], device=device), torch.tensor([[0.9], [0.5]], device=device).log()
    value, g = gradient_of(x, values, indices, tail=True, gradient=mode)
    with plain_torch():
        exact, g_exact = gradient_of(x, values, indices, tail=True)
    assert value.isfinite()
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(g, g_exact, rtol=1e-5, atol=1e-7)


@MODES
@CLASSES
def test_entries_that_are_absent(classes, mode, device):
    """An index of -1, or a probability of 0, adds nothing; a row of none gives 0 with gradient 0."""
    x = torch.randn(3, classes, device=device)
    values, indices = torch.randn(3, classes, device=device).log_softmax(1).topk(5, 1)
    exact, g_exact = gradient_of(x[:1].double(), values[:1, :3].double(), indices[:1, :3], reduction="sum")
    indices[0, 3] = -1
    values[0, 4] = -INF
    indices[1], values[2] = -1, -INF
    for renormalize in (False, True):
        each, _ = gradient_of(x, values, indices, reduction="none", renormalize=renormalize)
        assert torch.equal(each[1:], torch.zeros(2, device=device))
    value, g = gradient_of(x, values, indices, reduction="sum", gradient=mode)
    assert error(value, exact) < 3e-6
    assert error(g[:1], g_exact) < 3e-6
    assert torch.equal(g[1:], torch.zeros_like(g[1:]))


@MODES
@CLASSES
def test_rows_left_out_are_not_read(classes, mode, device):
    x = torch.randn(4, classes, device=device)
    values, indices = torch.randn(4, classes, device=device).log_softmax(1).topk(3, 1)
    kept = torch.tensor([True, False, True, True], device=device)
    exact, g_exact = gradient_of(x[kept].double(), values[kept].double(), indices[kept])
    x[1], values[1] = NAN, INF
    for options in ({"weight": kept}, {"weight": kept * 2.0}, {"labels": torch.where(kept, 5, -100)}):
        value, g = gradient_of(x, values, indices, gradient=mode, **options)
        assert error(value, exact) < 3e-6
        assert error(g[kept], g_exact) < 3e-6
        assert torch.equal(g[1], torch.zeros_like(g[1]))
    for empty, expected in (("nan", NAN), ("zero", 0.0)):
        value, g = gradient_of(x, values, indices, gradient=mode, empty=empty, weight=torch.zeros(4, device=device))
        assert str(value.item()) == str(expected)
        assert torch.equal(g, torch.zeros_like(g))


@MODES
@pytest.mark.parametrize("index", [7, -3, 2**33, -(2**40)])
def test_index_out_of_range(index, mode, device, monkeypatch):
    """On CPU an error with value and row; unchecked, nan in that row alone."""
    x = torch.randn(3, 7, device=device)
    values, indices = torch.randn(3, 7, device=device).log_softmax(1).topk(3, 1)
    indices[1, 2] = index
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"indices must hold 0 to 6, or -1 where ignored, got {index} at row \(1, 2\)"):
            topk_kl_div_with_logits(x, values, indices)
    monkeypatch.setattr("lossforge.losses.checks.in_range", lambda *args: None)
    good = torch.tensor([True, False, True], device=device)
    each, _ = gradient_of(x, values, indices, reduction="none")
    value, g = gradient_of(x, values, indices, reduction="sum", gradient=mode)
    exact, g_exact = gradient_of(x[good], values[good], indices[good], reduction="none")
    assert each[1].isnan()
    assert value.isnan()
    assert g[1].isnan().all()
    torch.testing.assert_close(each[good], exact)
    torch.testing.assert_close(g[good], g_exact)
    with plain_torch():
        assert topk_kl_div_with_logits(x, values, indices, reduction="none")[1].isnan()


@MODES
@CLASSES
def test_infinite_logits(classes, mode, device):
    x = torch.randn(4, classes, device=device)
    values, indices = torch.randn(4, classes, device=device).log_softmax(1).topk(3, 1)
    x[0] = -INF
    x[1, 2] = INF
    x[2, indices[2, 1]] = -INF
    each, _ = gradient_of(x, values, indices, reduction="none")
    assert each[:2].isnan().all()
    assert each[2] == INF
    assert each[3].isfinite()
    _, g = gradient_of(x, values, indices, reduction="sum", gradient=mode)
    _, g_exact = gradient_of(x[2:].double(), values[2:].double(), indices[2:], reduction="sum")
    assert g_exact.isfinite().all()
    assert error(g[2:], g_exact) < 3e-6


def test_no_rows(device):
    x = torch.rand(0, 5, device=device, requires_grad=True)
    indices, values = torch.zeros(0, 2, dtype=torch.long, device=device), torch.rand(0, 2, device=device)
    assert topk_kl_div_with_logits(x, values, indices).isnan()
    assert topk_kl_div_with_logits(x, values, indices, reduction="sum") == 0
    assert topk_kl_div_with_logits(x, values, indices, reduction="none").shape == (0,)


X, INDICES, VALUES = torch.randn(3, 4), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.full((3, 2), -1.0)


@pytest.mark.parametrize(
    ("kind", "message", "args", "options"),
    [
        (TypeError, "input must be of a floating dtype, got torch.int64", (X.long(), VALUES, INDICES), {}),
        (TypeError, "indices must be of an integer dtype, got torch.float32", (X, VALUES, VALUES), {}),
        (TypeError, "values must be of a floating dtype, got torch.int64", (X, INDICES, INDICES), {}),
        (TypeError, r"values come before indices, as topk gives them: .*\*teacher.topk\(k\)\), got torch.int64", (X, INDICES, VALUES), {}),
        (ValueError, r"indices must have K classes for each row of input, \(3, 4\), got shape \(2, 2\)", (X, VALUES[:2], INDICES[:2]), {}),
        (ValueError, r"indices must have K classes for each row .* got shape \(3, 0\)", (X, VALUES[:, :0], INDICES[:, :0]), {}),
        (ValueError, r"values must have the shape of indices, \(3, 2\), got \(3, 1\)", (X, VALUES[:, :1], INDICES), {}),
        (ValueError, "tail needs probabilities that leave some", (X, VALUES, INDICES), {"tail": True, "renormalize": True}),
        (ValueError, "temperature must be finite and above 0, got -1", (X, VALUES, INDICES, -1), {}),
        (ValueError, "reduction must be one of", (X, VALUES, INDICES), {"reduction": "avg"}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_mistakes(kind, message, args, options):
    before = launch_counts()
    with pytest.raises(kind, match=message):
        topk_kl_div_with_logits(*args, **options)
    assert launch_counts() == before
