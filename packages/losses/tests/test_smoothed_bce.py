"""Binary cross entropy of softened targets against timm: smoothing, thresholds, sums over the classes, mixup pairs."""

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target

from lossforge.losses import BinaryCrossEntropy, binary_cross_entropy_with_logits, smoothed_binary_cross_entropy
from lossforge.losses.testing import error

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
PER_CLASS = torch.rand(7, generator=torch.Generator().manual_seed(0)) + 0.5


def gradient_of(function, x, *args, **kwargs):
    x = x.detach().clone().requires_grad_()
    value = function(x, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"smoothing": 0.0},
        {"smoothing": 0.3, "target_threshold": 0.2},
        {"smoothing": 0.4, "target_threshold": 0.05},
        {"sum_classes": True, "reduction": "sum"},
        {"sum_classes": True, "pos_weight": 2.0, "target_threshold": 0.5},
        {"weight": PER_CLASS, "reduction": "sum"},
        {"pos_weight": PER_CLASS, "smoothing": 0.2},
        {"smooth_dense": True},
        {"smooth_dense": True, "smoothing": 0.6, "target_threshold": 0.61},
    ],
    ids=str,
)
def test_in_place_of_timm(options, dtype, mode, device):
    x = (torch.randn(5, 7, device=device) * 3).to(dtype)
    ours, theirs = (module(**options).to(device) for module in (BinaryCrossEntropy, timm.loss.BinaryCrossEntropy))
    for target in (torch.tensor([0, 6, 3, 3, 1], device=device), torch.rand(5, 7, device=device).to(dtype)):
        wide = target.double() if target.is_floating_point() else target
        exact, g_exact = gradient_of(theirs.double(), x.double(), wide)
        value, g = gradient_of(ours, x, target, gradient=mode)
        assert error(value, exact) < 1e-6
        assert error(g, g_exact) < (3e-6 if dtype == torch.float32 else 2.0**-7)


def test_timms_positions_and_defaults(device):
    x, target = torch.randn(5, 7, device=device), torch.tensor([0, 6, 3, 3, 1], device=device)
    arguments = 0.2, 0.01, PER_CLASS, "sum", False, PER_CLASS.flip(0), True
    for given in ((), arguments):
        ours, theirs = (module(*given).to(device) for module in (BinaryCrossEntropy, timm.loss.BinaryCrossEntropy))
        torch.testing.assert_close(gradient_of(ours, x, target), gradient_of(theirs, x, target))


@MODES
@pytest.mark.parametrize("threshold", [None, 0.25])
@pytest.mark.parametrize("lam", [0.3, 0.8])
def test_a_pair_is_timms_mixup(lam, threshold, mode, device):
    """Indices and λ in place of the dense targets that timm's Mixup makes, which flips the batch."""
    x, target = torch.randn(6, 7, device=device), torch.tensor([0, 6, 3, 3, 1, 5], device=device)
    soft = mixup_target(target, 7, lam, 0.1)
    exact = gradient_of(timm.loss.BinaryCrossEntropy(target_threshold=threshold), x, soft)
    for name, function in (("smoothing", smoothed_binary_cross_entropy), ("label_smoothing", binary_cross_entropy_with_logits)):
        options = {name: 0.1, "target_threshold": threshold, "target_b": target.flip(0), "lam": lam, "gradient": mode}
        got = gradient_of(function, x, target, **options)
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-7)


def test_values_by_hand(device):
    """At x = 0 the cross entropy is ln 2 and the gradient 1/2 - y; c of the positive class scales y's part."""
    x, target = torch.zeros(1, 4, device=device), torch.tensor([1], device=device)
    value, g = gradient_of(smoothed_binary_cross_entropy, x, target, 0.2, sum_classes=True)
    torch.testing.assert_close(value.item(), 4 * math.log(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.45, -0.35, 0.45, 0.45]]), rtol=1e-6, atol=0)
    _, g = gradient_of(smoothed_binary_cross_entropy, x, target, 0.2, 0.5, sum_classes=True, pos_weight=3.0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.5, -1.5, 0.5, 0.5]]), rtol=1e-6, atol=0)
    dense = torch.tensor([[0.2, 0.5, 0.50001, 1.0]], device=device)
    _, g = gradient_of(binary_cross_entropy_with_logits, x, dense, reduction="sum", target_threshold=0.5)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.5, 0.5, -0.5, -0.5]]), rtol=1e-6, atol=0)


@MODES
def test_background_ignored_rows_and_pixels(mode, device):
    x = torch.randn(2, 5, 3, 2, device=device)
    target = torch.tensor([[[0, 4], [-1, 2], [-2, 1]], [[3, -2], [-2, 0], [-1, -1]]], device=device)
    y = (target.unsqueeze(1) == torch.arange(5, device=device).view(5, 1, 1)).double() * 0.9 + 0.1 / 5
    kept = (target != -2).unsqueeze(1).expand_as(x)
    wide = x.double().requires_grad_()
    exact = F.binary_cross_entropy_with_logits(wide, y, reduction="none")[kept].sum() / (target != -2).sum()
    (g_exact,) = torch.autograd.grad(exact, wide)
    x[~kept] = float("nan")
    value, g = gradient_of(smoothed_binary_cross_entropy, x, target, dim=1, sum_classes=True, gradient=mode)
    assert error(value, exact.detach()) < 1e-6
    assert error(g, g_exact) < 3e-6


def test_scores_are_smoothed_too(device):
    x, target, score = torch.randn(3, 4, device=device), torch.tensor([0, 2, -1], device=device), torch.rand(3, device=device)
    y = (target[:, None] == torch.arange(4, device=device)) * score[:, None] * 0.9 + 0.025
    torch.testing.assert_close(
        gradient_of(smoothed_binary_cross_entropy, x, target, score=score), gradient_of(F.binary_cross_entropy_with_logits, x, y)
    )


def test_without_softening_nothing_changes(device):
    x, target = torch.randn(5, 7, device=device), torch.tensor([0, 6, 3, -1, -2], device=device)
    plain = gradient_of(binary_cross_entropy_with_logits, x, target)
    got = gradient_of(smoothed_binary_cross_entropy, x, target, 0.0)
    assert all(map(torch.equal, got, plain))
    dense = torch.rand(5, 7, device=device)
    got = gradient_of(smoothed_binary_cross_entropy, x, dense)
    assert all(map(torch.equal, got, gradient_of(binary_cross_entropy_with_logits, x, dense, label_smoothing=0.3)))
    torch.testing.assert_close(got, gradient_of(F.binary_cross_entropy_with_logits, x, dense))


@MODES
def test_exact_at_large_logits(mode, device):
    """Off-values of 0.05: softplus is linear at ±1e4."""
    x = torch.tensor([[1e4, -1e4]], device=device)
    value, g = gradient_of(smoothed_binary_cross_entropy, x, torch.tensor([0], device=device), reduction="sum", gradient=mode)
    torch.testing.assert_close(value.item(), 0.05 * 1e4 * 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.05, -0.05]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("function", "options", "kind", "message"),
    [
        (smoothed_binary_cross_entropy, {"smoothing": 1.5}, ValueError, "smoothing must be finite and at least 0 and at most 1, got 1.5"),
        (binary_cross_entropy_with_logits, {"label_smoothing": -1}, ValueError, "label_smoothing must be finite and at least 0"),
        (smoothed_binary_cross_entropy, {"target_threshold": "1"}, TypeError, "target_threshold must be a number, got str"),
        (binary_cross_entropy_with_logits, {"target_threshold": math.inf}, ValueError, "target_threshold must be finite, got inf"),
        (smoothed_binary_cross_entropy, {"pos_weight": math.nan}, ValueError, "pos_weight must be finite, got nan"),
        (smoothed_binary_cross_entropy, {"dim": 5}, ValueError, "dim must be at least -2 and below 2 .* got 5"),
        (smoothed_binary_cross_entropy, {"dim": "1"}, TypeError, "dim must be a whole number, got str"),
    ],
)
def test_mistakes(function, options, kind, message):
    with pytest.raises(kind, match=message):
        function(torch.rand(3, 4), torch.tensor([0, 1, 2]), **options)


def test_a_threshold_takes_the_gradient_of_the_target():
    target = torch.rand(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="target has no gradient through target_threshold, got a target that requires grad"):
        binary_cross_entropy_with_logits(torch.rand(3, 4), target, target_threshold=0.5)
