"""Multi-token prediction against DeepSeek-V3's equations and Megatron Core's loop, with logits in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from linear_calls import launches_of

from lossforge import kernels
from lossforge.losses import LinearMTPLoss, linear_mtp_loss, mtp_targets
from lossforge.losses.testing import error

DEPTHS, N, T, HIDDEN, CLASSES = 3, 2, 9, 16, 37
WAYS = {
    "exponentials": (torch.bfloat16, {}, 1.2e-2),
    "four products": (torch.bfloat16, {"gradient": "backward"}, 1.2e-2),
    "float32": (torch.float32, {}, 2e-5),
    "plain PyTorch": (torch.float64, {}, 1e-13),
}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def tokens_of(device):
    tokens = torch.randint(CLASSES, (N, T), generator=torch.Generator().manual_seed(1))
    tokens[1, 4] = -100  # of a prompt
    return tokens.to(device)


def layer(device, dtype):
    """Return the hidden states of each depth, and the head's weight and bias."""
    hidden = [drawn(N, T, HIDDEN, seed=k) for k in range(DEPTHS)]
    return [t.to(device, dtype).requires_grad_() for t in (*hidden, drawn(CLASSES, HIDDEN), drawn(CLASSES))]


def by_equations(leaves, target, weights, divisors, factors, scale, softcap):
    """Return the sum, the losses and the gradients of 3 times the sum, one depth after another from its logits."""
    *hidden, w, b = [t.detach().double().requires_grad_() for t in leaves]
    losses = []
    for h, t, divisor, factor in zip(hidden, target, divisors, factors, strict=True):
        logits = softcap * torch.tanh(scale * F.linear(h, w, b) / softcap)
        rows = F.cross_entropy(logits.transpose(1, 2), t, reduction="none", ignore_index=-100)
        losses.append((rows * factor.double()).sum() / divisor)
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return total, torch.stack(losses), torch.autograd.grad(3 * total, [*hidden, w, b])


@pytest.mark.parametrize("form", ["each depth's own count", "given divisors and factors"])
@pytest.mark.parametrize("way", WAYS)
def test_depths_of_one_head(way, form, device, monkeypatch):
    monkeypatch.setattr(kernels.load("linear.launch"), "WORK", 0)
    launched = launches_of("linear_finish_kernel", device, monkeypatch)
    dtype, options, most = WAYS[way]
    leaves, target = layer(device, dtype), mtp_targets(tokens_of(device), DEPTHS)
    weights, given = (1.0, 0.15, 0.15), {}
    divisors, factors = (target != -100).flatten(1).sum(1).double(), torch.ones(DEPTHS, N, T, device=device)
    if form != "each depth's own count":
        weights, divisors = torch.tensor([0.7, 0.2, 0.0], device=device), torch.tensor([18.0, 7.0, 5.0], device=device)
        factors = drawn(DEPTHS, 1, T).abs().mul(torch.arange(T) != 3).to(device).expand(DEPTHS, N, T)
        given = {"normalizer": divisors, "token_weight": factors[:, :1], "chunk": 20}
    total, each, gradients = by_equations(leaves, target, weights, divisors, factors, 1.3, 6.0)
    given |= {"depth_weights": weights, "scale": 1.3, "softcap": 6.0, "outputs": ("losses",), **options}
    loss, losses = linear_mtp_loss(leaves[:DEPTHS], leaves[-2], target, leaves[-1], **given)
    assert not losses.requires_grad
    assert error(loss, total) < most / 10
    assert error(losses, each) < most / 10
    for got, right in zip(torch.autograd.grad(3 * loss, leaves), gradients, strict=True):
        assert error(got, right) < most
    assert launched() == (way == "exponentials") * (3 if "chunk" in given else 1)


def megatron(hidden, weight, labels, mask, cu_seqlens, factor):
    """Return what process_mtp_loss of Megatron Core adds to the backward pass, and the losses that it logs.

    hidden: of each depth (S, B, H). labels, mask: (B, S), of the main model; each depth rolls them by one more place within its sequence.
    """

    def rolled(t):
        t = t.clone()
        for start, end in itertools.pairwise(cu_seqlens):
            t[..., start:end] = torch.cat([t[..., start + 1 : end], torch.zeros_like(t[..., :1])], -1)
        return t

    total, logged = 0.0, []
    for each in hidden:
        labels, mask = rolled(labels), rolled(mask)
        rows = F.cross_entropy((each @ weight.t()).permute(1, 2, 0), labels, reduction="none") * mask
        count = mask.sum().clamp(min=1)
        logged.append(rows.sum() / count)
        total = total + (factor / len(hidden) * rows / count).sum()
    return total, torch.stack(logged)


def test_megatron_core_of_packed_sequences():
    """Documents of 5, 1 and 6 tokens: the second has no target, and a fourth depth has two."""
    depths, borders = 4, [0, 5, 6, 12]
    hidden, w = drawn(depths, 12, 1, HIDDEN).double().requires_grad_(), drawn(CLASSES, HIDDEN).double().requires_grad_()
    labels = torch.randint(CLASSES, (1, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, 12).double()
    mask[0, 2] = 0
    expected, logged = megatron(hidden, w, labels, mask, borders, 0.3)
    documents = torch.bucketize(torch.arange(12), torch.tensor(borders[1:]), right=True)
    target = mtp_targets(torch.where(mask == 0, -100, labels), depths, first=1, documents=documents)
    loss, losses = linear_mtp_loss(hidden, w, target.transpose(1, 2), depth_weights=[0.3 / depths] * depths, outputs=("losses",))
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(losses, logged, rtol=1e-14, atol=0)
    for got, right in zip(torch.autograd.grad(loss, (hidden, w)), torch.autograd.grad(expected, (hidden, w)), strict=True):
        assert error(got, right) < 1e-13


def test_targets():
    """By hand: torchtitan's example of labels with positions, and rows shorter than the depths."""
    tokens, positions = torch.tensor([10, 11, 12, 20, 21, 22, 23], dtype=torch.int16), torch.tensor([0, 1, 2, 0, 1, 2, 3])
    found = mtp_targets(tokens, 3, first=0, documents=(positions == 0).cumsum(-1), ignore_index=-1)
    assert found.dtype == torch.int64
    assert found.tolist() == [[10, 11, 12, 20, 21, 22, 23], [11, 12, -1, 21, 22, 23, -1], [12, -1, -1, 22, 23, -1, -1]]
    assert mtp_targets(torch.tensor([[1, 2], [3, 4]]), 3).tolist() == [[[2, -100], [4, -100]], *[[[-100, -100]] * 2] * 2]
    assert mtp_targets(torch.empty(3, 0, dtype=torch.int32), 2).shape == (2, 3, 0)


def test_a_depth_without_targets_adds_nothing():
    hidden, head = drawn(2, 1, HIDDEN).requires_grad_(), drawn(CLASSES, HIDDEN).requires_grad_()
    loss, losses = linear_mtp_loss(hidden, head, torch.tensor([[3], [-100]]), outputs=("losses",))
    torch.testing.assert_close(losses, torch.stack([F.cross_entropy(hidden[0] @ head.t(), torch.tensor([3])), torch.tensor(0.0)]).detach())
    assert loss == losses[0]
    (of_hidden,) = torch.autograd.grad(loss, hidden)
    assert not of_hidden[1].any()


def test_module_keeps_its_options():
    hidden, head = drawn(2, 4, HIDDEN), drawn(CLASSES, HIDDEN)
    target = torch.tensor([[1, 2, 3, 4], [5, 6, 7, -1]])
    module = LinearMTPLoss(depth_weights=(1.0, 0.3), ignore_index=-1)
    assert module(hidden, head, target) == linear_mtp_loss(hidden, head, target, depth_weights=(1.0, 0.3), ignore_index=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": drawn(4)}, "input must have shape"),
        ({"input": [drawn(4, HIDDEN), drawn(5, HIDDEN)]}, r"input\[1\] must have the shape of input\[0\]"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, "target must have shape"),
        ({"depth_weights": (1.0,)}, "depth_weights must have one number a depth, 2, got 1"),
        ({"depth_weights": torch.ones(3)}, "depth_weights must have one number a depth"),
        ({"normalizer": torch.ones(2, requires_grad=True)}, "normalizer has no gradient"),
        ({"token_weight": torch.ones(3)}, "token_weight must broadcast to the shape of target"),
        ({"classes": 5}, "classes needs group"),
    ],
)
def test_refused(change, message):
    given = {"input": drawn(2, 4, HIDDEN), "weight": drawn(CLASSES, HIDDEN), "target": torch.zeros(2, 4, dtype=torch.int64), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        linear_mtp_loss(**given)
    with pytest.raises(ValueError, match="depths must be at least 1"):
        mtp_targets(torch.zeros(4, dtype=torch.int64), 0)
