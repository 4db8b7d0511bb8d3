"""torchtitan's chunked loss and ours in its place: losses and gradients, on one process, and under FSDP2 on two."""

import pytest
import torch
from processes import run
from torch import nn

REASON = "needs pip install torchtitan"
pytest.importorskip("torchtitan.components.loss", reason=REASON)

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402

from lossforge.integrations import torchtitan as ours  # noqa: E402


class LowRank(Linear):
    """A head with an adapter, as torchtitan's converters make them: a forward of its own."""

    def forward(self, input):
        return super().forward(input) + input.sum(-1, keepdim=True) / 3


def trained(config, kind=Linear, bias=False, tokens=None, labelled=True):
    """Return the loss, and the gradients of the body and of the head."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 16), kind(Linear.Config(in_features=16, out_features=53, bias=bias))
    loss = config.build()
    labels = torch.randint(53, (2, 8))
    labels[0, :5] = -100
    if not labelled:
        labels[:] = -100
    hidden = body(torch.randn(2, 8, 8))
    if isinstance(loss, ChunkedLossWrapper):
        loss.set_lm_head(head)
        value, metrics = loss(hidden, labels, tokens, positions=torch.arange(8).expand(2, 8))
    else:
        value, metrics = loss(head(hidden), labels, tokens)
    assert metrics == {}
    value.backward()
    return value.detach(), [p.grad for p in (*body.parameters(), *head.parameters())], (hidden.detach(), head, labels)


@pytest.mark.parametrize("tokens", [None, torch.tensor(31), torch.tensor(31.0)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("theirs", [ChunkedLossWrapper.Config(num_chunks=4), CrossEntropyLoss.Config()], ids=["chunked", "of logits"])
def test_loss_and_gradients(theirs, bias, tokens):
    expected = trained(theirs, bias=bias, tokens=tokens)[:2]
    found = trained(ours.Loss.Config(), bias=bias, tokens=tokens)[:2]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_no_label_that_counts():
    value, gradients, _ = trained(ours.Loss.Config(), tokens=torch.tensor(31), labelled=False)
    assert value == 0
    assert not any(gradient.any() for gradient in gradients)


def test_z_loss():
    plain, _, (hidden, head, labels) = trained(ours.Loss.Config(), tokens=torch.tensor(31))
    lse = head(hidden).logsumexp(-1)[labels != -100]
    found = trained(ours.Loss.Config(z_loss=0.1), tokens=torch.tensor(31))[0]
    torch.testing.assert_close(found, plain + 0.1 * lse.square().sum().detach() / 31)


def test_the_head_gives_logits_when_it_is_called_by_others():
    _, _, (hidden, head, _) = trained(ours.Loss.Config())
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)


def test_a_head_that_is_more_than_a_linear_layer_has_torchtitans_loss(caplog):
    expected = trained(ChunkedLossWrapper.Config(), LowRank)[:2]
    torch.testing.assert_close(trained(ours.Loss.Config(), LowRank)[:2], expected, rtol=0, atol=0)
    assert "torchtitan's own ChunkedLossWrapper runs: the head is a " in caplog.text
    assert "test_torchtitan.LowRank, not a linear layer" in caplog.text
    with pytest.raises(ValueError, match=r"z_loss=0\.1 needs lossforge's loss"):
        trained(ours.Loss.Config(z_loss=0.1), LowRank)


def test_mistakes_are_named():
    with pytest.raises(RuntimeError, match="the loss has no head yet"):
        ours.Loss.Config().build()(torch.randn(1, 8, 16), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(AttributeError, match="has no attribute 'patch'"):
        ours.patch  # noqa: B018


@pytest.mark.slow
def test_under_fsdp2(tmp_path):
    """Two processes, accumulation 1 and 4, uneven labels, float32 and mixed precision."""
    printed = run("torchtitan_runs.py", processes=2, folder=tmp_path)
    assert printed.count("every update is torchtitan's own") == 2
