"""Objectives against the code of TRL, Liger and verl, in float64: value, gradient and what they log.

TRL's trainers run their own methods on given log-probabilities. verl is not installed: verl_values.json holds what its functions returned.
"""

import dataclasses
import json
import re
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from preference_calls import MASK, OLD, POLICY, REF, A, in_records, pairs

from lossforge import losses as L
from lossforge.losses.definitions.preference.objectives import DIVERGENCES, PAIRS

ROWS, COLUMNS = POLICY.shape
FULL = torch.where(MASK.any(1, keepdim=True), MASK, 1)  # TRL divides by the tokens of a completion for its logs: none is empty
WEIGHT = torch.where(MASK != 0, torch.linspace(0.2, 1.4, ROWS * COLUMNS, dtype=torch.float64).view(ROWS, COLUMNS), 1.0)
"""Of the sampler; 1 beside the completions, because TRL and Liger multiply it over all tokens for vespo."""
REJECTED = WEIGHT.clone()
REJECTED[1, 4] = 0.0  # a token that is clipped from below
IDS = torch.zeros(ROWS, COLUMNS, dtype=torch.long)
GIVEN = pairs(count=4)
EVALUATED = types.SimpleNamespace(training=False)


def check(ours, theirs, *inputs):
    """Compare value and gradients of calls of the same inputs."""
    results = []
    for call in (ours, theirs):
        given = [t.clone().requires_grad_() for t in inputs]
        out = call(*given)
        results.append((out.detach(), *torch.autograd.grad(out, given, allow_unused=True)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # TRL's torch.where takes its numbers in float32


def accelerator():
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def of_trainer(config, **more):
    """Return what a trainer's method reads of its trainer."""
    shared = {"args": config, "accelerator": accelerator(), "model": EVALUATED, "_metrics": {"eval": defaultdict(list)}}
    return types.SimpleNamespace(beta=config.beta, aux_loss_enabled=False, current_gradient_accumulation_steps=1, **shared, **more)


def grpo_trainer(config, policy):
    def logps(*_, **__):
        return policy, torch.zeros_like(policy), None

    more = {"loss_type": config.loss_type, "importance_sampling_level": config.importance_sampling_level, "epsilon_low": config.epsilon}
    more |= {"epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high, "top_entropy_quantile": 1.0}
    more |= {"off_policy_mask_threshold": None, "use_vllm": True, "vllm_importance_sampling_correction": True}
    more |= {"max_completion_length": 9, "_entropy_bonus_enabled": False, "_get_per_token_logps_and_entropies": logps}
    return of_trainer(config, **more)


def inputs_of(weight):
    shared = {"prompt_ids": IDS, "prompt_mask": IDS, "completion_ids": IDS, "completion_mask": FULL, "advantages": A}
    shared |= {"old_per_token_logps": OLD, "ref_per_token_logps": REF, "num_items_in_batch": FULL.sum()}
    return shared | {"importance_sampling_ratio": weight}


STATS = L.PolicyLossOutput.names[1:]
GRPO = [
    *({"loss_type": name} for name in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")),
    *({"loss_type": name, "importance_sampling_level": "sequence", "epsilon": 0.03} for name in ("grpo", "luspo", "cispo", "sapo")),
    {"loss_type": "grpo", "delta": 1.4, "epsilon_high": 0.28},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.7, "vespo_lambda_neg": 0.2},
]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("options", GRPO, ids=lambda o: "-".join(map(str, o.values())))
def test_grpo_of_trl(options, corrected):
    """With an importance ratio of the sampler and a KL term, corrected for bias or not; and what the trainer logs."""
    trl = pytest.importorskip("trl")
    theirs = {**options, "beta": 0.05, "use_bias_correction_kl": corrected}
    mine = {**theirs, **({"max_completion_length": 9} if options["loss_type"] == "dr_grpo" else {})}
    if options["loss_type"] == "cispo":
        theirs["epsilon_high"], mine["epsilon"], mine["epsilon_high"] = 1.3, 1.0, 0.3
    config = trl.GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, **theirs)
    trainer = []
    weight = WEIGHT if options["loss_type"] == "vespo" else REJECTED

    def trained(policy):
        trainer[:] = [grpo_trainer(config, policy)]
        trainer[0].get_gamma_weights = trl.GRPOTrainer.get_gamma_weights
        return trl.GRPOTrainer._compute_loss(trainer[0], EVALUATED, inputs_of(weight))

    def ours(policy, **more):
        return L.grpo_loss(policy, A, OLD, REF, FULL, importance_sampling_ratio=weight, **in_records(mine), **more)

    check(ours, trained, POLICY)
    out, logged = ours(POLICY, outputs=STATS), trainer[0]._metrics["eval"]
    assert out.kl.item() == pytest.approx(logged["kl"][0], rel=1e-5)
    if "clip_ratio/low_mean" in logged and "delta" not in options:  # where r > δ, TRL takes δ for r
        assert out.clipped_low.item() == pytest.approx(logged["clip_ratio/low_mean"][0])
        assert out.clipped_high.item() == pytest.approx(logged["clip_ratio/high_mean"][0])
    if "cispo_clip_ratio" in logged:
        assert out.clipped_high.item() == pytest.approx(logged["cispo_clip_ratio"][0])


def test_off_policy_sequences_of_trl():
    """The method takes the log-probabilities of the sampler. One of them is unknown, which is nan."""
    trl = pytest.importorskip("trl")
    sampler = OLD.clone()
    sampler[1, 1] = torch.nan
    ours = L.SamplerCorrection(sampler, "none", off_policy=0.05)
    factor = trl.GRPOTrainer.get_off_policy_mask(A.unsqueeze(1), POLICY, sampler, FULL, 0.05)
    assert 0 < factor.sum() < ROWS
    options = {"mask": FULL, "loss_type": "dapo"}
    found = L.grpo_loss(POLICY, A, OLD, importance_sampling_ratio=ours, reduction="none", **options)
    torch.testing.assert_close(found, factor * L.grpo_loss(POLICY, A, OLD, reduction="none", **options), rtol=0, atol=0)


PAGE = Path(__file__).parents[4] / "docs" / "learn" / "preferences_and_policies.md"


def test_what_is_said_to_be_missing_is_an_option_of_trl():
    """A row of the page goes where TRL drops the option that it names."""
    trl = pytest.importorskip("trl")
    _, table = PAGE.read_text(encoding="utf-8").split("## What they have and this library has not")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| TRL")]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"sigmoid_norm", "ipo"}
    known = {field.name for config in (trl.GRPOConfig, trl.DPOConfig) for field in dataclasses.fields(config)}
    assert len(rows) == 6
    assert names <= known


def test_gmpo_of_trl():
    pytest.importorskip("trl")
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    config = GMPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, epsilon=0.3, epsilon_high=0.2, beta=0.05)
    logged = []

    def trained(policy):
        trainer = grpo_trainer(config, policy)
        logged[:] = [trainer._metrics["eval"]]
        return GMPOTrainer._compute_loss(trainer, EVALUATED, inputs_of(None))

    options = {"loss_type": "gmpo", "epsilon": 0.3, "epsilon_high": 0.2, "beta": 0.05}
    check(lambda policy: L.grpo_loss(policy, A, OLD, REF, FULL, **options), trained, POLICY)
    out = L.grpo_loss(POLICY, A, OLD, REF, FULL, **options, outputs=STATS[:2])
    assert out.clipped_low.item() == pytest.approx(logged[0]["clip_ratio/low_mean"][0])
    assert out.clipped_high.item() == pytest.approx(logged[0]["clip_ratio/high_mean"][0])


def test_a2po_of_trl():
    pytest.importorskip("trl")
    from trl.experimental.a2po import A2POTrainer

    def trained(policy):
        trainer = types.SimpleNamespace(args=types.SimpleNamespace(beta2=0.3), model=EVALUATED, _metrics={"eval": defaultdict(list)})
        trainer._get_sequence_logps = lambda *_: (policy * FULL).sum(1)
        rewards = {"ref_logps": (REF * FULL).sum(1), "rewards": A, "v_star": 0.2 * A}
        return A2POTrainer.compute_loss(trainer, None, rewards | dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep")))

    check(lambda policy: L.grpo_loss(policy, 0.8 * A, None, REF, FULL, beta=0.3, loss_type="a2po"), trained, POLICY)


def output_of(logps):
    """Return what TRL's DPO trainer reads of a model, for one token a completion."""
    logps, zeros = torch.stack([torch.zeros_like(logps), logps], 1), torch.zeros(len(logps), 2)
    return types.SimpleNamespace(log_probs=logps[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, each in PAIRS.items() for kind in (DIVERGENCES if each.divergence else ("reverse_kl",))]
)
def test_dpo_of_trl(name, kind):
    trl = pytest.importorskip("trl")
    smoothing = 0.1 if PAIRS[name].smoothed and name != "sigmoid" else 0.0  # which TRL's sigmoid does not have
    dtype = torch.float32 if kind == "alpha_divergence" else torch.float64  # the one that TRL's clamp knows
    options = {"beta": 0.3, "label_smoothing": smoothing, "f_divergence_type": kind}
    config = trl.DPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, loss_type=[name], **options)

    def trained(*given):
        policy, reference = (torch.cat(each).to(dtype) for each in (given[:2], given[2:]))
        trainer = of_trainer(config, loss_types=[name], loss_weights=[1.0], ld_alpha=None, use_weighting=False, f_divergence_type=kind)
        trainer.label_smoothing, trainer.f_alpha_divergence_coef = smoothing, config.f_alpha_divergence_coef
        trainer.precompute_ref_logps, trainer._total_train_tokens, trainer._tp_size = True, 0, 1
        ids = torch.zeros(len(policy), 2, dtype=torch.long)
        chosen, rejected = reference.chunk(2)
        inputs = {"input_ids": ids, "completion_mask": torch.tensor([0, 1]).expand(len(policy), 2), "attention_mask": ids}
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return trl.DPOTrainer._compute_loss(trainer, lambda **_: output_of(policy), inputs, False)

    tolerance = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    if tolerance:
        given = [t.to(dtype) for t in GIVEN]
        torch.testing.assert_close(L.dpo_loss(*given, loss_type=name, **options), trained(*given), **tolerance)
        return
    check(lambda *t: L.dpo_loss(*t, loss_type=name, **options), trained, *GIVEN)


@pytest.mark.parametrize("alpha", [0.0, 0.25, -0.5])
def test_alphapo_of_trl(alpha):
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    config = CPOConfig(output_dir="unused", use_cpu=True, bf16=False, loss_type="simpo", alpha=alpha, beta=2.0, simpo_gamma=0.4)
    trainer = of_trainer(config, loss_type="simpo", alpha=alpha, simpo_gamma=0.4, label_smoothing=0.1)
    options = {"beta": 2.0, "gamma": 0.4, "label_smoothing": 0.1, "alpha": alpha}
    check(lambda *t: L.simpo_loss(*t, **options), lambda *t: CPOTrainer.cpo_loss(trainer, *t)[0].mean(), *GIVEN[:2])


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "tpo-l"])
def test_tpo_of_trl(name):
    """On logits: TRL takes the gold completions' mean over all their tokens, which each row is given."""
    pytest.importorskip("trl")
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    smoothing = 0.1 if name in ("sigmoid", "tpo-l") else 0.0
    config = TPOConfig(output_dir="unused", use_cpu=True, bf16=False, loss_type=name, beta=0.3, tpo_alpha=0.7)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, (9, 4), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).repeat(3, 1)

    def trained(logits):
        trainer = of_trainer(config, loss_type=name, tpo_alpha=0.7, tpo_l_gamma=0.5, label_smoothing=smoothing)
        trainer._total_train_tokens = 0
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
        return TPOTrainer._compute_loss(trainer, lambda **_: types.SimpleNamespace(logits=logits), inputs, False)

    def ours(logits):
        logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2)
        chosen, rejected, _ = L.sequence_logps(logps, mask[:, 1:], average_log_prob=name in ("ipo", "tpo-l")).chunk(3)
        gold = logps[6:][mask[6:, 1:] != 0].mean().expand(3)
        return L.tpo_loss(chosen, rejected, gold, 0.3, smoothing, name, 0.7)

    check(ours, trained, torch.randn(9, 4, 5, generator=generator, dtype=torch.float64))


LIGER = [
    *({"loss_type": name} for name in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo")),
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "delta": 1.4},
]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("options", LIGER, ids=lambda o: "-".join(map(str, o.values())))
def test_grpo_of_liger(options, corrected):
    """Its luspo is another: it multiplies by the number of tokens and divides by the length."""
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction.ppo_loss_fn
    name, metrics = options["loss_type"], []
    bounds = {"epsilon": 1.0, "epsilon_high": 0.3} if name == "cispo" else {"epsilon": 0.2, "epsilon_high": 0.28}
    given = options | {"beta": 0.05, "use_bias_correction_kl": corrected}

    def theirs(policy):
        high = 1.3 if name == "cispo" else 0.28
        out, metrics[:] = liger(
            policy, MASK, A, MASK, REF, OLD, 0.2, high, **given, vllm_is_ratio=WEIGHT, max_completion_length=9, num_items_in_batch=None
        )
        return out

    mine = bounds | in_records(given | ({"max_completion_length": 9} if name == "dr_grpo" else {}))
    check(lambda policy: L.grpo_loss(policy, A, OLD, REF, MASK, importance_sampling_ratio=WEIGHT, **mine), theirs, POLICY)
    if "importance_sampling_level" not in options:
        out = L.grpo_loss(POLICY, A, OLD, REF, MASK, **mine, outputs=STATS)
        assert out.kl.item() == pytest.approx(metrics[0].item(), rel=1e-6)
        if name != "cispo":
            assert (out.clipped_low + out.clipped_high).item() == pytest.approx(metrics[1].item(), rel=1e-6)


VERL = json.loads((Path(__file__).parent / "verl_values.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", VERL["policies"], ids=lambda case: case["loss_mode"])
def test_policies_of_verl(case):
    """verl adds its KL term elsewhere. Its means are over the completions that have tokens."""
    policy = POLICY.clone().requires_grad_()
    weight = WEIGHT if case["weighted"] else None
    out = L.grpo_loss(policy, A, OLD, None, FULL, importance_sampling_ratio=weight, **in_records(case["options"]), outputs=STATS[:2])
    gradient = torch.autograd.grad(out.loss, policy)[0]
    assert out.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=torch.float64), rtol=1e-6, atol=1e-9)
    if case["loss_mode"].startswith("dppo"):
        assert (out.clipped_low + out.clipped_high).item() == pytest.approx(case["metrics"]["actor/pg_clipfrac"], rel=1e-6)


def test_value_loss_of_verl():
    case = VERL["value"]
    values = POLICY.clone().requires_grad_()
    out = L.ppo_value_loss(values, REF, OLD, FULL, case["cliprange_value"], outputs=("clipped",))
    assert out.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    assert out.clipped.item() == pytest.approx(case["clipped"], rel=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(out.loss, values)[0], torch.tensor(case["gradient"], dtype=torch.float64), atol=1e-9, rtol=1e-6
    )
