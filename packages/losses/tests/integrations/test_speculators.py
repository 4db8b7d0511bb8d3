"""speculators' losses with ours in their place: each by name, and a draft that its own model trains."""

import pytest
import torch

REASON = "needs pip install speculators"
utils = pytest.importorskip("speculators.losses.utils", reason=REASON)

from speculators import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.eagle3 import Eagle3SpeculatorConfig  # noqa: E402
from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from lossforge.integrations import speculators as ours  # noqa: E402

SPECS = [*utils._EAGER_LOSS_FN_MAP, '{"ce": 0.1, "tv": 0.9}']


@pytest.mark.parametrize("name", utils._EAGER_LOSS_FN_MAP)
def test_each_loss(name):
    """A row of an acceptance below 1e-5 too, where `nla` is constant."""
    torch.manual_seed(0)
    logits, targets = 2 * torch.randn(1, 7, 50), 2 * torch.randn(1, 7, 50)
    logits[0, 0, 3], targets[0, 0, 4] = 60.0, 60.0
    found = []
    for functions in (utils._EAGER_LOSS_FN_MAP, utils._FUSED_LOSS_FN_MAP):
        leaf = logits.clone().requires_grad_()
        with ours.patch():
            rows = functions[name](leaf, targets)
        assert rows.shape == (1, 7)
        (gradient,) = torch.autograd.grad((rows * torch.linspace(0.5, 2.0, 7)).sum(), leaf)
        found.append((rows.detach(), gradient))
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-6)


def draft():
    """Return a draft of EAGLE-3 with 40 of 60 classes, and what a step of its training takes."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    layers = LlamaConfig(**sizes, vocab_size=60, max_position_embeddings=64)
    layers._attn_implementation = "eager"
    proposals = [GreedyTokenProposalConfig(speculative_tokens=3)]
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    settings = SpeculatorsConfig(algorithm="eagle3", proposal_methods=proposals, default_proposal_method="greedy", verifier=verifier)
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layers, draft_vocab_size=40, speculators_config=settings))
    for each in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        torch.nn.init.normal_(each.weight, std=0.3)
    model.lm_head.weight.requires_grad_()
    model.t2d[:40] = True
    hidden, last, tokens = torch.randn(1, 20, 96), 3 * torch.randn(1, 20, 32), torch.randint(60, (1, 20))
    documents, mask = (torch.arange(20) >= 12).long()[None], torch.rand(1, 20) > 0.2
    return model, {
        "hidden_states": hidden,
        "input_ids": tokens,
        "document_ids": documents,
        "loss_mask": mask,
        "verifier_last_hidden_states": last,
    }


def trained(spec, implementation):
    """Return the losses of three updates of three depths, the metrics of the last, and the parameters after it."""
    model, given = draft()
    config, losses = utils.resolve_loss_config(spec, implementation), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        with torch.compiler.set_stance("force_eager"):
            _, loss, metrics = model(**given, ttt_steps=3, ttt_step_loss_decay=0.8, loss_config=config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), metrics, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("spec", SPECS)
def test_a_draft_of_eagle3(spec):
    expected = trained(spec, "eager")
    with ours.patch() as handle:
        assert len(handle.replaced) == 7
        found = trained(spec, "fused")
    assert expected[0][-1] < expected[0][0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
