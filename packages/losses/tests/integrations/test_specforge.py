"""SpecForge's EAGLE-3 draft, trained by its own model with our losses, against its formulas in plain PyTorch."""

import pytest
import torch

REASON = "needs pip install specforge"
model_of = pytest.importorskip("specforge.algorithms.eagle3.model", reason=REASON)

from specforge.core import lk_loss  # noqa: E402
from specforge.core.loss import LogSoftmaxLoss  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from lossforge.integrations import specforge as ours  # noqa: E402


class InTorch:
    """The formula of LogSoftmaxLoss, whose kernel needs a GPU: _compute_loss of its file, with its kernel's mask."""

    @staticmethod
    def apply(logits, target, position_mask):
        return -(position_mask.bool() * target * logits.float().log_softmax(-1)).sum(-1).mean()


def draft(lk_loss_type):
    """Return the online model of a draft with 40 of 60 classes, and what a step of its training takes."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, vocab_size=60, max_position_embeddings=64, pad_token_id=0)
    config.draft_vocab_size = 40
    network = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    network.t2d[40:] = False
    online = model_of.OnlineEagle3Model(network, length=3, attention_backend="sdpa", lk_loss_type=lk_loss_type, kl_scale=0.9, kl_decay=2.0)
    tokens, target = torch.randint(60, (2, 16)), 3 * torch.randn(2, 16, 60)
    mask = (torch.rand(2, 16, 1) > 0.2).float()
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "target": target, "loss_mask": mask}
    return online, {**given, "hidden_states": torch.randn(2, 16, 96)}


def trained(lk_loss_type):
    """Return the losses and acceptances of three updates of three depths, and the parameters after them."""
    online, given = draft(lk_loss_type)
    optimizer, seen = torch.optim.SGD(online.parameters(), lr=0.1), []
    for _ in range(3):
        with torch.compiler.set_stance("force_eager"):
            losses, acceptances, *_ = online(**given)
        optimizer.zero_grad()
        sum(0.8**i * loss for i, loss in enumerate(losses)).backward()
        optimizer.step()
        seen.append(torch.stack([*losses, *acceptances]).detach())
    return torch.stack(seen), [p.detach() for p in online.parameters()]


@pytest.mark.parametrize("lk_loss_type", [None, "lambda", "alpha"])
def test_a_draft_of_eagle3(lk_loss_type, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(model_of, "LogSoftmaxLoss", InTorch)
        expected = trained(lk_loss_type)
    with ours.patch() as handle:
        assert len(handle.replaced) == 2
        assert model_of.LogSoftmaxLoss is not LogSoftmaxLoss
        found = trained(lk_loss_type)
    assert model_of.LogSoftmaxLoss is LogSoftmaxLoss
    assert expected[0][-1, 0] < expected[0][0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_that_nothing_accepts():
    """Their acceptance is 0 in float32: they have no part in the mean of logarithms, and no gradient."""
    torch.manual_seed(0)
    logits, probabilities = torch.randn(1, 5, 8), torch.randn(1, 5, 12).softmax(-1)[..., :8]
    logits[0, 1, 2], probabilities[0, 1] = 200.0, torch.eye(8)[3]
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]).view(1, 5, 1)
    found = []
    for function in (lk_loss.compute_acceptance_rate, ours.REPLACED[1].make(lk_loss.compute_acceptance_rate)):
        leaf = logits.clone().requires_grad_()
        means = function(logits=leaf, target_probs=probabilities, position_mask=mask)
        found.append((torch.stack(means).detach(), torch.autograd.grad(means[0] - 0.3 * means[1], leaf)[0]))
    (theirs, of_theirs), (mine, of_mine) = found
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(of_mine, of_theirs.nan_to_num(0.0), rtol=1e-4, atol=2e-6)  # theirs is 0 · inf
