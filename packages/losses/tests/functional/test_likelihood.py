"""Losses of log-probabilities and of probabilities against torch.nn.functional's of the same names."""

import contextlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import BCELoss, KLDivLoss, NLLLoss, binary_cross_entropy, kl_div, nll_loss, plain_torch

INF, NAN = float("inf"), float("nan")
REDUCTIONS = ("none", "mean", "sum")
generator = torch.Generator().manual_seed(0)


def compare(ours, theirs, x, *args, dtype=torch.float32, rtol=2e-6, **options):
    """Value and gradient for a non-unit upstream, against torch in float64."""
    found = []
    for function, precision in ((ours, dtype), (theirs, torch.float64)):
        leaf = x.detach().to(dtype).to(precision).clone().requires_grad_()
        moved = [t.to(dtype).to(precision) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]
        kept = {k: v.to(dtype).to(precision) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        value = function(leaf, *moved, **kept)
        upstream = torch.linspace(0.5, 2.0, max(value.numel(), 1), dtype=value.dtype)[: value.numel()].view(value.shape)
        value.backward(upstream)
        found += [value.detach().double(), leaf.grad.double()]
    bound = rtol if dtype == torch.float32 else 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(found[0], found[2], rtol=bound, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(found[1], found[3], rtol=2 * bound, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("function", ["nll_loss", "kl_div", "binary_cross_entropy"])
def test_signatures_are_torchs(function):
    theirs = inspect.signature(getattr(F, function)).parameters
    ours = inspect.signature({"nll_loss": nll_loss, "kl_div": kl_div, "binary_cross_entropy": binary_cross_entropy}[function]).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in list(ours.values())[len(theirs) :])


@pytest.mark.parametrize("module", ["NLLLoss", "KLDivLoss", "BCELoss"])
def test_modules_signatures_are_torchs(module):
    theirs = inspect.signature(getattr(torch.nn, module)).parameters
    ours = inspect.signature({"NLLLoss": NLLLoss, "KLDivLoss": KLDivLoss, "BCELoss": BCELoss}[module]).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss_edges(reduction):
    x = torch.rand(4, 5, generator=generator).log()
    for target in (torch.full((4,), -100), torch.tensor([0, 4, -100, 1])):
        compare(nll_loss, F.nll_loss, x, target, reduction=reduction)
    compare(nll_loss, F.nll_loss, x, torch.tensor([0, 4, -100, 1]), weight=torch.zeros(5), reduction=reduction)
    if reduction == "mean":
        leaf = x.clone().requires_grad_()
        value = nll_loss(leaf, torch.tensor([0, 4, -100, 1]), torch.zeros(5), empty="zero")
        value.backward()
        assert value == 0
        assert not leaf.grad.any()
    compare(nll_loss, F.nll_loss, torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), reduction=reduction)
    x[0, 1], x[1, 4], x[3, 2] = -INF, -INF, NAN  # beside the target, at it, beside it
    target = torch.tensor([0, 4, -100, 1])
    compare(nll_loss, F.nll_loss, x, target, reduction=reduction)


@pytest.mark.parametrize("path", [contextlib.nullcontext, plain_torch])
def test_nll_loss_of_weights_in_another_dtype(path):
    """The kernels and plain torch give a loss in the dtype that follows from the input."""
    x, weight = torch.rand(4, 5, generator=generator).log(), torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5])
    target = torch.tensor([0, 4, 1, 1])
    with path():
        for reduction in REDUCTIONS:
            value = nll_loss(x, target, weight.double(), reduction=reduction)
            assert value.dtype == torch.float32
            assert torch.equal(value, nll_loss(x, target, weight, reduction=reduction))


def test_nll_loss_of_a_pair_and_of_learned_weights():
    x, weight = torch.rand(6, 5, generator=generator).log(), torch.rand(5, generator=generator)
    a, b = torch.tensor([0, 1, -100, 3, 4, -100]), torch.tensor([2, -100, 1, 3, 0, -100])
    for w in (None, weight):
        each = [F.nll_loss(x, t, w, reduction="sum") for t in (a, b)]
        count = [(t != -100).float() if w is None else torch.where(t == -100, 0.0, w[t.clamp(min=0)]) for t in (a, b)]
        expected = (0.3 * each[0] + 0.7 * each[1]) / (0.3 * count[0] + 0.7 * count[1]).sum()
        torch.testing.assert_close(nll_loss(x, a, w, target_b=b, lam=0.3), expected)
    learned = weight.clone().requires_grad_()
    nll_loss(x, a, learned).backward()
    kept = a != -100
    other = weight.clone().requires_grad_()
    (-(other[a[kept]] * x[kept, a[kept]]).sum() / other[a[kept]].sum()).backward()
    torch.testing.assert_close(learned.grad, other.grad)


def test_nll_loss_refuses():
    x = torch.rand(4, 5).log()
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=rf"target must hold 0 to 4, or -100 where ignored, got {bad} at row 2"):
            nll_loss(x, torch.tensor([0, 1, bad, 2]))
    with pytest.raises(TypeError, match="target must hold class indices"):
        nll_loss(x, torch.rand(4, 5))
    with pytest.raises(ValueError, match=r"weight must hold one number a class, shape \(5,\), got \(4,\)"):
        nll_loss(x, torch.tensor([0, 1, 3, 2]), torch.rand(4))


def test_kl_div_of_probability_zero_and_of_targets():
    x, y = torch.tensor([-INF, -1.0, -INF]), torch.tensor([0.0, 0.0, 0.5])
    assert kl_div(x, y, reduction="none").tolist() == [0.0, 0.0, INF]
    assert kl_div(x, y.log(), reduction="none", log_target=True).tolist() == [0.0, 0.0, INF]
    x, y = torch.randn(3, 4, generator=generator), torch.rand(3, 4, generator=generator) + 0.1
    for log_target in (False, True):
        gradients = []
        for function in (kl_div, F.kl_div):
            leaf = y.clone().requires_grad_()
            function(x, leaf, reduction="batchmean", log_target=log_target).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(kl_div(x, torch.tensor([0, 3, 1]), reduction="sum"), -x[[0, 1, 2], [0, 3, 1]].sum())
    with pytest.raises(TypeError, match=r"target must hold log-probabilities where log_target is True, got torch.int64"):
        kl_div(x, torch.tensor([0, 3, 1]), log_target=True)
    with pytest.raises(ValueError, match=r"target must have the shape of input, \(3, 4\), got \(4,\)"):
        kl_div(x, y[0])


def test_legacy_arguments_and_modules():
    x, y, weight = torch.rand(4, 5, generator=generator).log(), torch.rand(4, 5, generator=generator), torch.rand(5, generator=generator)
    target = torch.tensor([0, 4, 1, 1])
    torch.testing.assert_close(nll_loss(x, target, None, False), F.nll_loss(x, target, reduction="sum"))
    torch.testing.assert_close(kl_div(x, y, None, False), F.kl_div(x, y, reduction="none"))
    torch.testing.assert_close(binary_cross_entropy(x.exp(), y, None, False, True), F.binary_cross_entropy(x.exp(), y, reduction="sum"))
    for ours, theirs, args in (
        (NLLLoss(weight, ignore_index=1), torch.nn.NLLLoss(weight, ignore_index=1), (x, target)),
        (KLDivLoss(reduction="batchmean", log_target=True), torch.nn.KLDivLoss(reduction="batchmean", log_target=True), (x, y.log())),
        (BCELoss(weight, reduction="none"), torch.nn.BCELoss(weight, reduction="none"), (x.exp(), y)),
    ):
        torch.testing.assert_close(ours(*args), theirs(*args))
