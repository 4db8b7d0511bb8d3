"""Every way to compute a fused loss of half precision has the precision of its kernels: no logits are rounded."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from linear_calls import indices, normal

from lossforge import losses as L
from lossforge.losses.testing import error

ROWS, HIDDEN, CLASSES = 24, 32, 100


def wave(*shape, like, middle=0.0):
    """Return numbers in the dtype of a tensor that every dtype holds exactly. A generator could not be traced."""
    return (2 * torch.arange(math.prod(shape), device=like.device).cos() + middle).bfloat16().view(shape).to(like.dtype)


def teacher(x, w):
    return L.LinearTeacher(wave(ROWS, 8, like=x), wave(CLASSES, 8, like=w), scale=2.0)


def likeliest(x):
    return L.TopKTeacher(*wave(ROWS, CLASSES, like=x, middle=-5.0).topk(5))


def of_tokens(logps, entropy):
    return (logps.exp() - 0.1 * entropy).mean()


CALLS = {
    "cross entropy": lambda x, w, b, t: L.linear_cross_entropy(x, w, t, b),
    "of rows": lambda x, w, b, t: L.linear_cross_entropy(x, w, t, b, reduction="none").square().sum(),
    "soft cap": lambda x, w, b, t: L.linear_cross_entropy(x, w, t, b, softcap=30.0, label_smoothing=0.1, z_loss=1e-3),
    "probabilities": lambda x, w, b, t: L.linear_cross_entropy(x, w, F.one_hot(t.clamp(0), CLASSES).to(x.dtype), b),
    "focal": lambda x, w, b, t: L.fuse_linear(L.sigmoid_focal_loss)(x, w, t.clamp(-2), bias=b, reduction="mean"),
    "elements": lambda x, w, b, t: L.fuse_linear(L.sigmoid_focal_loss)(x, w, t.clamp(-2), bias=b, reduction="none"),
    "softmax focal": lambda x, w, b, t: L.fuse_linear(L.softmax_focal_loss)(x, w, t, bias=b, reduction="mean"),
    "poly": lambda x, w, b, t: L.fuse_linear(L.poly_cross_entropy)(x, w, t, bias=b),
    "adjusted": lambda x, w, b, t: L.fuse_linear(L.logit_adjusted_cross_entropy)(
        x, w, t, torch.arange(1.0, CLASSES + 1, device=x.device), bias=b
    ),
    "log-probabilities": lambda x, w, b, t: L.linear_selective_log_softmax(x, w, t.clamp(0), b).sum(),
    "entropy": lambda x, w, b, t: L.linear_entropy(x, w, b).sum(),
    "objective": lambda x, w, b, t: L.linear_objective(x, w, t.clamp(0), of_tokens, b, entropy=True, independent="tokens"),
    "kl": lambda x, w, b, t: L.linear_kl_div(x, w, wave(ROWS, CLASSES, like=x), b),
    "kl of a layer": lambda x, w, b, t: L.linear_kl_div(x, w, teacher(x, w), b),
    "topk": lambda x, w, b, t: L.linear_kl_div(x, w, likeliest(x), b, tail=True),
    "js": lambda x, w, b, t: L.linear_js_div(x, w, teacher(x, w), b),
    "total variation": lambda x, w, b, t: L.linear_total_variation(x, w, teacher(x, w), b),
    "cosine": lambda x, w, b, t: L.linear_cosine_distance(x, w, teacher(x, w), b),
    "draft": lambda x, w, b, t: L.linear_draft_loss(x, w, teacher(x, w), b, outputs=("acceptance",)).loss,
}


SUMS = {"of rows", "elements", "log-probabilities", "entropy"}
"""Calls that divide by nothing. The gradients of the others arrive multiplied, because float16 has no smaller numbers for them."""


def upstream_of(value, call):
    return torch.full_like(value, 1.0 if any(call is CALLS[name] for name in SUMS) else 1024.0)


class Subclass(torch.Tensor):
    """A tensor that the dispatcher must be asked about."""


def differentiated(call, leaves, target, made_of=None, **options):
    given = [t.detach().clone().requires_grad_() for t in leaves]
    value = call(*given, target)
    return [value, *torch.autograd.grad(value, given, upstream_of(value, made_of or call), **options)]


def in_plain_torch(call, leaves, target):
    with L.plain_torch():
        return differentiated(call, leaves, target)


def transformed(call, leaves, target):
    value, back = torch.func.vjp(lambda *given: call(*given, target), *leaves)
    return [value, *back(upstream_of(value, call))]


def forward_mode(call, leaves, target):
    """Return the value alone: its tangent is tested against float64 in test_call."""
    value, _ = torch.func.jvp(lambda *given: call(*given, target), tuple(leaves), tuple(leaves))
    return [value]


def inferred(call, leaves, target):
    with torch.inference_mode():
        return [call(*leaves, target)]


def compiled(call, leaves, target):
    torch._dynamo.reset()
    return differentiated(torch.compile(call, backend="aot_eager"), leaves, target, call)


def exported(call, leaves, target):
    class Model(torch.nn.Module):
        def forward(self, *given):
            return call(*given)

    given = *[t.detach().requires_grad_() for t in leaves], target
    return differentiated(torch.export.export(Model(), given).module(), leaves, target, call)


def of_subclasses(call, leaves, target):
    given = [t.detach().clone().as_subclass(Subclass).requires_grad_() for t in leaves]
    value = call(*given, target)
    return [value, *torch.autograd.grad(value, given, upstream_of(value, call))]


def autocast(call, leaves, target):
    """In plain torch under autocast, which casts a layer's tensors, and then its product."""
    with L.plain_torch(), torch.autocast(leaves[0].device.type, leaves[0].dtype):
        return [call(*leaves, target)]


WAYS = {
    "plain torch": in_plain_torch,
    "torch.func": transformed,
    "create_graph": functools.partial(differentiated, create_graph=True),
    "forward mode": forward_mode,
    "inference mode": inferred,
    "compiled": compiled,
    "exported": exported,
    "subclass": of_subclasses,
    "autocast": autocast,
}


@pytest.fixture(params=["kernels", "torch"])
def by(request, monkeypatch):
    """By the kernels, or as where none runs."""
    if request.param == "torch":
        monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)


@pytest.mark.each("way", "name", "dtype")
@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_way_is_as_exact_as_the_kernels(way, name, dtype, device):
    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    scales = 16 / HIDDEN**0.5, 1.0, 1.0  # logits with a standard deviation of 16, which half precision would round by up to 0.25
    leaves = [(normal(*s, seed=i) * k).to(device, dtype) for i, (s, k) in enumerate(zip(shapes, scales, strict=True))]
    target, call = indices(ROWS, device, CLASSES), CALLS[name]
    exact = differentiated(call, [t.double() for t in leaves], target)
    kernels = differentiated(call, leaves, target)
    for got, reached, right in zip(way(call, leaves, target), kernels, exact, strict=False):
        assert got.dtype == reached.dtype
        assert error(got, right) < 2 * error(reached, right) + 2e-6


IGNORING = {
    "cross entropy": CALLS["cross entropy"],
    "a pair of classes": lambda x, w, b, t: L.linear_cross_entropy(x, w, t, b, target_b=t, lam=0.3),
    "focal": CALLS["focal"],
    "weight": lambda x, w, b, t: L.linear_kl_div(x, w, wave(ROWS, CLASSES, like=x), b, loss_weight=(t >= 0).to(x.dtype)),
    "labels": lambda x, w, b, t: L.linear_kl_div(x, w, likeliest(x), b, labels=t, reduction="mean"),
}


@pytest.mark.each("way", "name", "bad")
@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name not in ("forward mode", "inference mode", "autocast")])
@pytest.mark.parametrize("name", IGNORING)
def test_an_ignored_row_adds_nothing_whatever_its_input_holds(name, way, bad, device):
    """Nor to the weight's gradient, which is a product with that input."""
    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    leaves, target = [normal(*s, seed=i).to(device) for i, s in enumerate(shapes)], indices(ROWS, device, CLASSES)
    expected = differentiated(IGNORING[name], leaves, target)
    with_bad = leaves[0].clone()
    with_bad[target < 0, 1:3] = bad
    for got, right in zip(way(IGNORING[name], [with_bad, *leaves[1:]], target), expected, strict=True):
        assert error(got, right) < 5e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.usefixtures("by")
def test_logits_of_a_row_that_is_not_finite_are_the_same(bad, device):
    """By kernels and in plain torch, with a gradient and without one; of elements they may be infinite."""
    x, w, b = (normal(*s, seed=1).to(device).requires_grad_() for s in ((5, 4), (6, 4), (6,)))
    x = x.detach().index_fill(0, torch.tensor([2], device=device), bad).requires_grad_()
    y = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)).to(device)
    fused = L.fuse_linear(L.binary_cross_entropy_with_logits)
    expected = fused(x, w, y, bias=b, reduction="none").detach()
    with L.plain_torch():
        found = fused(x, w, y, bias=b, reduction="none").detach()
        with torch.no_grad():
            without = fused(x, w, y, bias=b, reduction="none")
    for got in (found, without):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.usefixtures("by")
def test_a_row_that_counts_keeps_its_nan(gradient, device):
    leaves, target = [normal(*s, seed=1).to(device).requires_grad_() for s in ((8, 6), (11, 6))], indices(8, device, 11)
    bad = leaves[0].detach().clone().index_fill_(0, torch.tensor([0], device=device), math.nan).requires_grad_()
    value = L.linear_cross_entropy(bad, leaves[1], target, gradient=gradient)
    assert all(t.isnan().any() for t in (value, *torch.autograd.grad(value, (bad, leaves[1]))))
