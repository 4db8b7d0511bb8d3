"""Lazy views, whose memory holds the negative of their values: as logits, targets, weights and upstream gradients."""

import pytest
import torch

from lossforge.losses import linear_cross_entropy
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import has_inplace, offered, plain_sample, samples

EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)


def negative(t):
    """Return the same values in a lazy view: the imaginary part of a conjugate."""
    if not (isinstance(t, torch.Tensor) and t.is_floating_point()):
        return t
    found = torch.complex(torch.zeros_like(t), -t).conj().imag if t.dtype == torch.float32 else torch._neg_view(-t)
    assert found.is_neg()
    assert torch.equal(found, t)
    return found


def calls(loss, device, dtype):
    """Yield the loss's simplest call, and those with dense targets and with weights."""
    yield plain_sample(loss, device, dtype)
    for sample in offered(loss, samples(loss, device, dtype)):
        if sample.name in ("dense", "probabilities", "weights", "class weights", "normalizer"):
            yield sample


def both(loss, x, sample, upstream, change=lambda t: t, **options):
    """Return the value and the gradient of a call with `change` made of every floating tensor of it."""
    leaf = x.detach().clone().requires_grad_()
    given = {k: change(v) for k, v in sample.kwargs.items()}
    value = loss.function(change(leaf), change(sample.target), **given, **options)
    value = value if isinstance(value, torch.Tensor) else value.loss
    (g,) = torch.autograd.grad(value, leaf, change(upstream.expand_as(value).to(value.dtype)))
    return value.detach(), g


@pytest.mark.each("template", "dtype", ci=True)
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gives_what_its_values_give(loss, dtype, device):
    upstream = torch.tensor(0.75, device=device)
    for sample in calls(loss, device, dtype):
        modes = [{"reduction": "sum", "gradient": "forward"}, {"reduction": "sum", "gradient": "backward"}, {"reduction": "none"}]
        if "normalizer" in sample.kwargs or "none" not in loss.reductions:
            modes.pop()
        for options in modes:
            value, g = both(loss, sample.x, sample, upstream, **options)
            got, gradient = both(loss, sample.x, sample, upstream, negative, **options)
            assert torch.equal(got, value), (sample.name, options)
            assert torch.equal(gradient, g), (sample.name, options)


@pytest.mark.each("template", "mode", ci=True)
@EACH
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_inplace(loss, mode, device):
    """Targets, weights and upstream gradients may be lazy; logits are refused, because their memory could not hold both."""
    if not has_inplace(loss):
        pytest.skip("losses of several tensors with gradients have no inplace=True")
    sample = plain_sample(loss, device)
    if sample.target is not None and not sample.target.is_floating_point():
        sample = next((s for s in samples(loss, device) if s.name in ("dense", "probabilities")), sample)
    upstream = torch.tensor(0.75, device=device)
    leaf = sample.x.detach().clone().requires_grad_()
    _, expected = both(loss, sample.x, sample, upstream, reduction="sum", gradient=mode)
    value = loss.function(leaf * 1.0, negative(sample.target), **sample.kwargs, reduction="sum", gradient=mode, inplace=True)
    value = value if isinstance(value, torch.Tensor) else value.loss
    (g,) = torch.autograd.grad(value, leaf, negative(upstream))
    assert torch.equal(g, expected)
    with pytest.raises(ValueError, match=r"inplace=True needs logits whose memory holds their values, got a lazy negative view"):
        loss.function(torch._neg_view(leaf * -1.0), sample.target, **sample.kwargs, reduction="sum", gradient=mode, inplace=True)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_fused_linear(mode, device):
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((6, 8), (11, 8), (11,)))
    target, class_weight = torch.randint(0, 11, (6,), device=device), torch.rand(11, device=device)
    found = []
    for change in (lambda t: t, negative):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        h, w, b = map(change, leaves)
        loss = linear_cross_entropy(h, w, target, bias=b, loss_weight=change(class_weight), gradient=mode, chunk=3)
        found.append([loss, *torch.autograd.grad(loss, leaves, change(torch.tensor(0.5, device=device)))])
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
