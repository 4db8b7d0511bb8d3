"""Log-probabilities of tokens and their entropy, from logits as models give them."""

import contextlib
import math

import pytest
import torch

from lossforge.kernels.plans import PLANS
from lossforge.losses import (
    TokenLogps,
    cross_entropy,
    linear_entropy,
    linear_objective,
    linear_selective_log_softmax,
    plain_torch,
    selective_log_softmax,
    sequence_logps,
)
from lossforge.losses.engine.calls import CallPlan
from lossforge.losses.testing import error

INF = float("inf")


def plain(x, index, temperature=1.0, softcap=None, scale=1.0):
    x = x.double() * scale
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    log_p = (x / temperature).log_softmax(-1)
    return log_p.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


SHAPES = {
    "tokens": lambda d: torch.randn(5, 33, device=d),
    "sequences": lambda d: torch.randn(2, 4, 130, device=d),
    "sliced, as for the next token": lambda d: torch.randn(2, 4, 130, device=d)[:, :-1],
    "two sweeps": lambda d: torch.randn(1, 2, 9001, device=d),
    "four dimensions": lambda d: torch.randn(2, 2, 2, 16, device=d),
    "one token": lambda d: torch.randn(9, device=d),
}


def test_the_cap_comes_before_the_temperature(device):
    """As models scale and cap their logits, and samplers divide by T afterwards: 2 tanh(6 / 2) / ½ is 3.98, 2 tanh(6 / ½ / 2) is 2."""
    x = torch.tensor([[6.0, 0.0]], device=device)
    index = torch.tensor([1], device=device)
    logit = 2 * math.tanh(3) / 0.5
    expected = -math.log1p(math.exp(logit))
    found = selective_log_softmax(x / 3, index, temperature=0.5, scale=3.0, softcap=2.0)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    layer = torch.eye(2, device=device)
    assert linear_selective_log_softmax(x, layer, index, temperature=0.5, scale=1.0, softcap=2.0).item() == pytest.approx(
        expected, rel=1e-6
    )
    p = 1 / (1 + math.exp(-logit))
    entropy = linear_entropy(x, layer, temperature=0.5, softcap=2.0)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on the CPU indices are checked in every call, so that no call is kept")
def test_a_call_of_one_token_a_row_is_kept(device):
    index = torch.randint(0, 40, (5,), device=device)
    for options in ({}, {"outputs": ("entropy",)}):
        PLANS.clear()
        selective_log_softmax(torch.randn(5, 40, device=device, requires_grad=True), index, **options)
        assert sum(isinstance(plan, CallPlan) for plan in PLANS.values()) == 1


def test_ignored_tokens(device):
    """Log-probability 0 without gradient, entropy with one; what only masks their own row does not reach the others."""
    x = torch.randn(2, 3, 8, device=device)
    index = torch.tensor([[1, -100, 2], [-100, 0, 7]], device=device)
    leaf = x.clone().requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, outputs=("entropy",))[:2]
    exact, h = plain(x, index)
    assert error(logps, torch.where(index < 0, 0.0, exact)) < 3e-6
    assert error(entropy, h) < 3e-6
    (g,) = torch.autograd.grad(logps.sum(), leaf, retain_graph=True)
    assert (g[index < 0] == 0).all()
    (g,) = torch.autograd.grad(entropy.sum(), leaf)
    assert (g[index < 0] != 0).all()
    torch.testing.assert_close(sequence_logps(logps, index >= 0).double(), torch.where(index < 0, 0.0, exact).sum(1), check_dtype=False)


def test_impossible_token(device):
    x = torch.tensor([[0.0, -INF, 1.0]], device=device, requires_grad=True)
    logps = selective_log_softmax(x, torch.tensor([1], device=device))
    assert logps == -INF
    assert torch.autograd.grad(logps.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "message", "args", "options"),
    [
        (TypeError, "index must be of an integer dtype, got torch.float32", (torch.zeros(2, 3), torch.zeros(2)), {}),
        (ValueError, r"index must have shape \(2,\), or \(2, K\) .* got \(3, 1\)", (torch.zeros(2, 3), torch.zeros(3, 1).long()), {}),
        (ValueError, "inplace=True needs one index a row", (torch.zeros(2, 3), torch.zeros(2, 1).long()), {"inplace": True}),
        (IndexError, "index must hold 0 to 2, or -100 where ignored", (torch.zeros(2, 3), torch.tensor([[0, 3], [0, 0]])), {}),
        (IndexError, "index must hold 0 to 2, or -100 where ignored, got 3 at row 1", (torch.zeros(2, 3), torch.tensor([0, 3])), {}),
    ],
)
def test_errors(kind, message, args, options):
    with pytest.raises(kind, match=message):
        selective_log_softmax(*args, **options)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 2.0, "scale": 0.6, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*SHAPES, *(f"{name}; several tokens" for name in SHAPES)])
def test_against_float64(name, dtype, options, device):
    """A token of each row or several, one of them ignored, alone and with the entropy: values and gradients."""
    shape, _, several = name.partition("; ")
    x, several = (SHAPES[shape](device) * 3).to(dtype), bool(several)
    index = torch.randint(0, x.shape[-1], (*x.shape[:-1], *[3] * several), device=device, dtype=torch.int32)
    index.view(-1)[-1] = -100
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    each = [plain(wide, k.long(), **options) for k in (index.unbind(-1) if several else (index,))]
    logps = torch.where(index == -100, 0.0, torch.stack([found for found, _ in each], -1).view(index.shape))
    exact, ups = (logps, each[0][1]), [torch.rand(shape, device=device) + 0.5 for shape in (index.shape, x.shape[:-1])]
    for outputs in ((), ("entropy",)):
        ours = selective_log_softmax(leaf, index, outputs=outputs, **options)
        found = ours[:2] if outputs else (ours,)
        for got, right in zip(found, exact, strict=False):
            assert (got.dtype, got.shape) == (torch.float32, right.shape)
            assert error(got, right) < 3e-6
        (g,) = torch.autograd.grad(found, leaf, ups[: len(found)])
        (g_exact,) = torch.autograd.grad(exact[: len(found)], wide, [u.double() for u in ups[: len(found)]], retain_graph=True)
        assert g.dtype == dtype
        assert error(g, g_exact) < (5e-6 if dtype == torch.float32 else 2.0**-6)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_log_sum_exp_that_is_known(several, softcap, device):
    """The same values, and the same gradient through cross entropy's log-sum-exp; the logits are read at the indices alone."""
    x = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0)).to(device) * 3
    index = torch.randint(30, (2, 5, 3) if several else (2, 5), generator=torch.Generator().manual_seed(1)).to(device)
    index[0, 1] = -100
    upstream = torch.rand(index.shape, device=device) + 0.5
    found = []
    for known in (False, True):
        leaf = x.clone().requires_grad_()
        lse = None
        if known:
            rows = leaf.movedim(-1, 1)
            ignored = torch.full((2, 5), -100, device=device)
            cap = softcap and softcap / 2.0
            lse = cross_entropy(rows, ignored, scale=0.5, softcap=cap, reduction="sum", outputs=("lse",)).lse
        logps = selective_log_softmax(leaf, index, temperature=2.0, softcap=softcap, lse=lse)
        (logps * upstream).sum().backward()
        found.append((logps.detach(), leaf.grad))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    moved = x.clone()
    moved.scatter_(-1, (index.clamp(0).view(2, 5, -1)[..., :1] + 1) % 30, 100.0)
    index = index.view(2, 5, -1)[..., 0]
    constant = torch.zeros(2, 5, device=device)
    assert torch.equal(selective_log_softmax(moved, index, lse=constant), selective_log_softmax(x, index, lse=constant))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lse": torch.zeros(3)}, r"lse must have one entry a row of logits, shape \(4,\), got \(3,\)"),
        ({"lse": torch.zeros(4), "outputs": ("entropy",)}, "lse excludes further outputs"),
        ({"lse": torch.zeros(4), "inplace": True}, "lse excludes inplace=True"),
    ],
)
def test_a_refused_log_sum_exp(options, message):
    with pytest.raises(ValueError, match=message):
        selective_log_softmax(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long), **options)


def unfused(x, layer, index, **options):
    return selective_log_softmax(torch.nn.functional.linear(x, layer), index, **options)


def every_output(x, layer, index, temperature, softcap, scale):
    """Return all outputs from their definitions."""
    z = softcap * torch.tanh(torch.nn.functional.linear(x, layer) * scale / softcap) / temperature
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    each = index if index.ndim == x.ndim else index.unsqueeze(-1)
    logps = torch.where(each == -100, 0.0, log_p.gather(-1, each.clamp(min=0)))
    correct = (z.argmax(-1, keepdim=True) == each) & (each != -100)
    return {
        "logps": logps.view(index.shape),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": lse,
        "z_loss": lse.square(),
        "correct": correct.view(index.shape),
        "argmax": z.argmax(-1),
        "log_p2": (2 * log_p).logsumexp(-1),
        "mean_logit": z.mean(-1),
    }


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "plain torch"])
@pytest.mark.parametrize("classes", [33, 9001], ids=["one tile", "two sweeps"])
def test_a_row_of_minus_infinity_has_no_slope(classes, reference, device):
    """Its log-sum-exp is -inf, with gradient 0, as of a row that a mask leaves nothing of; the row beside it has its own."""
    x = torch.randn(2, classes, device=device)
    x[1] = -INF
    x.requires_grad_()
    with plain_torch() if reference else contextlib.nullcontext():
        found = selective_log_softmax(x, torch.zeros(2, dtype=torch.int64, device=device), outputs=("z_loss", "lse"))
        (g,) = torch.autograd.grad((found.lse + found.z_loss).sum(), x)
    assert found.lse[1] == -INF
    assert not g[1].any()
    exact = x[0].detach().double()
    assert error(g[0], exact.softmax(0) * (1 + 2 * exact.logsumexp(0))) < 5e-6


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("function", [unfused, linear_selective_log_softmax], ids=["logits", "layer"])
def test_every_further_output(function, several, device):
    """Together and one at a time, with the gradients of those that have one."""
    generator = torch.Generator().manual_seed(0)
    x, layer = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 5, 16), (40, 16)))
    options = {"temperature": 0.7, "softcap": 4.0, "scale": 1.2}
    wide = [t.double().requires_grad_() for t in (x, layer)]
    largest = torch.nn.functional.linear(x, layer).argmax(-1)
    index = torch.where(torch.arange(5, device=device) < 3, largest, (largest + 1) % 40)
    index[1, 0] = -100
    if several:
        index = torch.stack([index, (index + 7).clamp(0, 39), index.flip(1)], -1)
    expected = every_output(*wide, index, **options)
    outputs = tuple(name for name in TokenLogps.names if name in expected and name != "logps")
    leaves = [t.clone().requires_grad_() for t in (x, layer)]
    found = function(*leaves, index, outputs=outputs, **options)
    assert found.correct.sum() > 0
    for name, right in expected.items():
        got = getattr(found, name)
        assert got.shape == right.shape, name
        if right.is_floating_point():
            assert got.dtype == torch.float32
            assert error(got, right) < 5e-6, name
        else:
            assert torch.equal(got, right), name
    upstream = {name: torch.rand(expected[name].shape, generator=generator).to(device) for name in ("logps", "entropy", "lse", "z_loss")}
    ours = sum((getattr(found, name) * up).sum() for name, up in upstream.items())
    theirs = sum((expected[name] * up).sum() for name, up in upstream.items())
    for got, right in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, wide), strict=True):
        assert error(got, right) < 1e-5
    for name in expected:
        if name != "logps":
            alone = function(*leaves, index, outputs=(name,), **options)
            assert [field for field, t in alone._asdict().items() if t is not None] == ["logps", name]
            torch.testing.assert_close(getattr(alone, name), getattr(found, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_temperatures_of_rows(name, device):
    """By the formula in float64, with scale and cap; and of one temperature in every row, what the number gives."""
    x = SHAPES[name](device) * 3
    if x.ndim == 1:
        pytest.skip("one row takes a number")
    index = torch.randint(0, x.shape[-1], x.shape[:-1], device=device)
    temperature = torch.rand(index.shape, device=device) * 2 + 0.3
    for options in ({}, {"scale": 1.3, "softcap": 3.0}):
        leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
        ours = selective_log_softmax(leaf, index, temperature=temperature, outputs=("entropy",), **options)
        exact = plain(wide, index, temperature.double().unsqueeze(-1), **options)
        ups = torch.rand(2, *index.shape, device=device) + 0.5
        for got, right in zip(ours[:2], exact, strict=True):
            assert error(got, right) < 3e-6
        (g,) = torch.autograd.grad(ours[:2], leaf, list(ups))
        (g_exact,) = torch.autograd.grad(exact, wide, list(ups.double()))
        assert error(g, g_exact) < 5e-6
        same = selective_log_softmax(x, index, temperature=torch.full(index.shape, 0.5, device=device), **options)
        assert error(same, selective_log_softmax(x, index, temperature=0.5, **options).double()) < 3e-6


@pytest.mark.parametrize("independent", ["tokens", "sequences", "pairs", None])
def test_temperatures_of_rows_of_a_layer(independent, device):
    """In chunks, of one token a row and of several, with entropy; and of an objective of all."""
    generator = torch.Generator().manual_seed(0)
    x, layer = (torch.randn(shape, generator=generator).to(device) for shape in ((4, 5, 16), (40, 16)))
    index = torch.randint(40, (4, 5, 3), generator=generator).to(device)
    temperature = (torch.rand(4, 5, generator=generator) * 2 + 0.3).to(device)

    def objective(logps):
        chosen, rejected = logps.square().sum(1).chunk(2)
        return (chosen * rejected).sum() if independent == "pairs" else chosen.sum() + rejected.sum()

    wide = [t.double().requires_grad_() for t in (x, layer)]
    logits = torch.nn.functional.linear(*wide)
    exact, entropy = plain(logits, index[..., 0], temperature.double().unsqueeze(-1))
    leaves = [t.clone().requires_grad_() for t in (x, layer)]
    loss = linear_objective(*leaves, index[..., 0], objective, independent=independent, temperature=temperature, chunk=10)
    assert loss.item() == pytest.approx(objective(exact).item(), rel=1e-5)
    for got, right in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(objective(exact), wide), strict=True):
        assert error(got, right) < 1e-5
    assert error(linear_entropy(x, layer, temperature=temperature, chunk=7), entropy) < 5e-6
    several = torch.stack([plain(logits, index[..., k], temperature.double().unsqueeze(-1))[0] for k in range(3)], -1)
    assert error(linear_selective_log_softmax(x, layer, index, temperature=temperature), several) < 5e-6


def test_temperatures_that_are_refused():
    x, index = torch.zeros(2, 4, 6), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"temperature must be a number or have one entry a row, \(2, 4\), got \(4,\)"):
        selective_log_softmax(x, index, temperature=torch.ones(4))
    with pytest.raises(ValueError, match="temperature must be above 0 in every row"):
        selective_log_softmax(x, index, temperature=torch.arange(8.0).view(2, 4))
    with pytest.raises(ValueError, match="temperature has no gradient"):
        selective_log_softmax(x, index, temperature=torch.ones(2, 4, requires_grad=True))


def test_a_row_of_nan_has_no_correct_token(device):
    x = torch.tensor([[1.0, math.nan, 0.0], [1.0, 0.0, -1.0]], device=device)
    index = torch.zeros(2, 1, dtype=torch.int64, device=device)
    for tokens in (index, index[:, 0]):
        assert selective_log_softmax(x, tokens, outputs=("correct",)).correct.flatten().tolist() == [False, True]
