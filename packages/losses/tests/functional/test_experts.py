"""Load balancing of experts beside transformers' formula, written plainly: values, gradients, masks, layouts, modes, edges."""

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.losses import load_balancing_loss, plain_torch

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def plainly(x, top_k=2, attention_mask=None, balance=1.0, z_loss=0.0):
    """Compute the loss as transformers' load_balancing_loss_func does, with one-hot tensors; and the router z-loss."""
    lead, experts = x.shape[:-1], x.shape[-1]
    mask = torch.ones(lead) if attention_mask is None else attention_mask.cpu().expand(lead)
    x, mask = x.cpu().reshape(-1, experts), mask.reshape(-1, 1).to(x.dtype)
    p = x.softmax(1)
    largest = p.sort(dim=1, descending=True, stable=True).indices[:, :top_k]  # as topk, which takes any of equal ones
    chosen = F.one_hot(largest, experts).to(p.dtype)  # (T, k, E)
    tokens_per_expert = (chosen * mask.unsqueeze(1)).sum(0) / mask.sum()
    router_prob = (p * mask).sum(0) / mask.sum()
    balanced = (tokens_per_expert * router_prob.unsqueeze(0)).sum() * experts
    return balance * balanced + z_loss * (x.logsumexp(1, keepdim=True).square() * mask).sum() / mask.sum()


def logits(*shape, device="cpu", dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2).to(device, dtype)


CASES = {
    "one token": lambda d: (logits(1, 8, device=d), {}),
    "one expert": lambda d: (logits(9, 1, device=d), {"top_k": 1}),
    "tokens that end within a tile": lambda d: (logits(1031, 8, device=d), {}),
    "experts that are no power of two": lambda d: (logits(70, 60, device=d), {"top_k": 4}),
    "all experts taken": lambda d: (logits(50, 5, device=d), {"top_k": 5}),
    "many experts": lambda d: (logits(9, 384, device=d), {"top_k": 8}),
    "more experts than a tile holds tokens of": lambda d: (logits(3, 4096, device=d), {"top_k": 1}),
    "layers, mask of tokens": lambda d: (logits(3, 2, 40, 16, device=d), {"attention_mask": (torch.arange(40, device=d) % 5 > 0)}),
    "integer mask": lambda d: (logits(2, 30, 4, device=d), {"attention_mask": torch.tensor([[1], [0]], device=d)}),
    "shares as mask": lambda d: (logits(30, 4, device=d), {"attention_mask": torch.rand(30, device=d)}),
    "transposed": lambda d: (logits(8, 90, device=d).T, {}),
    "sliced": lambda d: (logits(40, 33, device=d)[:, ::2], {"top_k": 3}),
    "z-loss alone": lambda d: (logits(40, 8, device=d), {"balance": 0.0, "z_loss": 1.0}),
    "both": lambda d: (logits(40, 8, device=d) + 20, {"balance": 0.01, "z_loss": 1e-3}),
}


@MODES
@pytest.mark.parametrize("dtype", GRADIENT, ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, dtype, mode, device):
    x, options = CASES[name](device)
    x = x.to(dtype)
    value, g = gradient_of(lambda x: 1.5 * load_balancing_loss(x, **options, gradient=mode), x)
    exact, g_exact = gradient_of(lambda x: 1.5 * plainly(x, **options), x.double())
    torch.testing.assert_close(value.double().cpu(), exact, rtol=3e-6, atol=0)
    cancelled = 2.0**-22 * x.shape[-1] * (x.numel() // x.shape[-1]) ** -0.5  # of terms up to E / T, whose sum may be 0
    assert (g.double() - g_exact).norm().item() <= GRADIENT[dtype] * g_exact.norm().item() + cancelled
    assert g.dtype == dtype
    for function in (load_balancing_loss, plain_torch()(load_balancing_loss)):
        wide, g_wide = gradient_of(lambda x, function=function: 1.5 * function(x, **options), x.double())
        torch.testing.assert_close(wide.cpu(), exact, rtol=1e-12, atol=0)
        torch.testing.assert_close(g_wide, g_exact, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_mask_of_batch_and_tokens(layers, device):
    """Compare with transformers' own function, whose logits are (batch · tokens, E) a layer, and with the mask of each row."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    x = logits(layers, 4 * 7, 6, device=device)
    mask = (torch.arange(7, device=device) < torch.tensor([[7], [3], [5], [1]], device=device)).long()
    theirs, g_theirs = gradient_of(lambda x: load_balancing_loss_func(tuple(x), 6, 2, mask), x.double())
    rows = x.flatten(0, 1)
    value, g = gradient_of(load_balancing_loss, rows, 2, mask)
    torch.testing.assert_close(value.double(), theirs.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(g.double(), g_theirs.flatten(0, 1), rtol=1e-5, atol=1e-8)
    same, g_same = gradient_of(load_balancing_loss, rows, 2, mask.flatten().repeat(layers))
    assert torch.equal(value, same)
    assert torch.equal(g, g_same)


def test_returned_z_loss(device):
    """It is the part of the z-loss, and the same where it is not asked for."""
    x = logits(50, 8, device=device).requires_grad_()
    out = load_balancing_loss(x, z_loss=0.5, outputs=("z_loss",))
    torch.testing.assert_close(out.z_loss, 0.5 * x.detach().logsumexp(1).square().mean())
    assert not out.z_loss.requires_grad
    assert torch.equal(out.loss, load_balancing_loss(x, z_loss=0.5))
    (g,) = torch.autograd.grad(out.loss, x)
    assert torch.equal(g, torch.autograd.grad(load_balancing_loss(x, z_loss=0.5), x)[0])


@MODES
def test_padding_may_hold_anything(mode, device):
    x = logits(20, 6, device=device)
    mask = torch.arange(20, device=device) % 3 > 0
    spoiled = x.clone()
    spoiled[::3] = torch.tensor([NAN, INF, -INF, 0.0, 1e38, -1e38], device=device)
    value, g = gradient_of(load_balancing_loss, spoiled, 2, mask, z_loss=0.1, gradient=mode)
    expected, g_expected = gradient_of(load_balancing_loss, x[mask], 2, z_loss=0.1)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g[mask], g_expected)
    assert not g[~mask].any()


def test_of_equal_logits_the_lower_expert_comes_first(device):
    x = torch.zeros(4, 4, device=device)
    assert load_balancing_loss(x, 2).item() == 2.0
    x[:, 0] = 1.0
    p = x[0].softmax(0)
    torch.testing.assert_close(load_balancing_loss(x, 2), 4 * (p[0] + p[1]))


def test_logits_of_0_and_of_minus_0_are_equal(device):
    x = torch.tensor([[-0.0, 0.0, -1.0, 0.0]], device=device).repeat(3, 1)
    for function in (load_balancing_loss, plain_torch()(load_balancing_loss)):
        value, g = gradient_of(function, x, 2)
        expected, g_expected = gradient_of(function, x + 0.0, 2)
        assert torch.equal(value, expected)
        assert torch.equal(g, g_expected)
    p = x[0].softmax(0)
    torch.testing.assert_close(value, 4 * (p[0] + p[1]))


@MODES
def test_without_a_z_loss_its_squares_may_be_infinite(mode, device):
    x = torch.tensor([[1e30, 0.0, 0.0], [0.0, 1e30, 0.0]], device=device)
    value, g = gradient_of(load_balancing_loss, x, 1, gradient=mode)
    assert value == 1.5
    assert not g.any()


def with_one_expert_left(device):
    x = torch.full((4, 4), -INF, device=device)
    x[:, 0] = 1.0
    return x


@MODES
def test_of_excluded_experts_the_lower_one_comes_first(mode, device):
    value, g = gradient_of(load_balancing_loss, with_one_expert_left(device), 2, gradient=mode)
    assert value == 4.0
    assert not g.any()


@MODES
def test_a_nan_shows(mode, device):
    x = with_one_expert_left(device)
    x[1, 2] = NAN
    value, g = gradient_of(load_balancing_loss, x, 2, gradient=mode)
    assert value.isnan()
    assert g[1].isnan().all()


@MODES
@pytest.mark.parametrize(("tokens", "mask"), [(0, None), (4, torch.zeros(4))], ids=["no tokens", "all masked"])
def test_a_mean_over_nothing_is_nan_or_0(tokens, mask, mode, device):
    x, mask = torch.zeros(tokens, 4, device=device), mask if mask is None else mask.to(device)
    value, _ = gradient_of(load_balancing_loss, x, 2, mask, gradient=mode)
    assert value.isnan()
    value, g = gradient_of(load_balancing_loss, x, 2, mask, gradient=mode, empty="zero")
    assert value == 0
    assert not g.any()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ValueError, {"top_k": 5}, "top_k must be at least 1 and at most the 4 experts, got 5"),
        (ValueError, {"top_k": 0}, "top_k must be at least 1 and at most the 4 experts, got 0"),
        (ValueError, {"attention_mask": torch.ones(3)}, r"attention_mask must broadcast to \(6,\), or be .*, got shape \(3,\)"),
        (ValueError, {"attention_mask": torch.ones(2, 2)}, r"attention_mask must broadcast to \(6,\), or be .*, got shape \(2, 2\)"),
        (TypeError, {"attention_mask": torch.ones(6, dtype=torch.complex64)}, "attention_mask must be of a real dtype or bool"),
    ],
)
def test_refused_arguments(kind, options, message):
    with pytest.raises(kind, match=message):
        load_balancing_loss(torch.zeros(6, 4), **options)
    with pytest.raises(ValueError, match="router_logits must have the experts last, 1 to 4096, got shape"):
        load_balancing_loss(torch.zeros(6, 5000))
