"""Preference objectives at the edges: extremes, empty batches, errors; and their modules."""

import math
import re

import pytest
import torch
from preference_calls import KTO, none, pairs, value_and_gradients

from lossforge import losses as L

INF = math.inf


def hinge(c, r, **kwargs):
    return L.dpo_loss(c, r, torch.zeros_like(c), torch.zeros_like(r), beta=1.0, loss_type="hinge", **kwargs)


def kto_without_baseline(c, r, **kwargs):
    return L.kto_loss(c, r, None, torch.full_like(c, -1.0), torch.full_like(r, -1.0), None, **kwargs)


def of_equal_references(c, r, **kwargs):
    """Return DPO's loss where the reference gives both completions -1."""
    return L.dpo_loss(c, r, torch.full_like(c, -1.0), torch.full_like(r, -1.0), beta=1.0, **kwargs)


@pytest.mark.parametrize("low", [-1e4, -INF])
@pytest.mark.parametrize(
    ("loss", "worst", "gradients"),
    [
        (L.simpo_loss, lambda far: 2 * far - 1.5, [[-2, 0], [2, 0]]),
        (of_equal_references, lambda far: far - 1, [[-1, 0], [1, 0]]),
        (hinge, lambda far: far, [[-1, 0], [1, 0]]),
    ],
    ids=["simpo", "dpo", "hinge"],
)
def test_extreme_log_probabilities(loss, worst, gradients, low):
    """The chosen one at `low`, then the rejected one."""
    assert value_and_gradients(loss, [low, -1.0], [-1.0, low]) == ([worst(-low), 0], gradients)


@pytest.mark.parametrize("low", [-1e4, -INF])
def test_gradients_of_references_at_extreme_log_probabilities(low):
    _, gradients = value_and_gradients(L.dpo_loss, [low, -1.0], [-1.0, low], [-1.0, -1.0], [-1.0, -1.0], beta=1.0)
    assert gradients == [[-1, 0], [1, 0], [1, 0], [-1, 0]]


@pytest.mark.parametrize("low", [-1e4, -INF])
def test_kto_without_a_baseline_at_extreme_log_probabilities(low):
    assert value_and_gradients(kto_without_baseline, [low], [low]) == ([1, 0], [[0], [0]])


@pytest.mark.parametrize("low", [-1e4, -INF])
def test_smoothed_bradley_terry_at_extreme_rewards(low):
    values, gradients = value_and_gradients(L.bradley_terry_loss, [low, 1.0], [1.0, low], label_smoothing=0.25)
    assert values == [0.75 * (1 - low), 0.25 * (1 - low)]
    assert gradients == [[-0.75, 0.25], [0.75, -0.25]]


def test_policy_and_reference_both_without_the_completion():
    low, one = torch.tensor([-INF]), torch.tensor([-1.0])
    assert L.dpo_loss(low, one, low, one).isnan()
    assert L.kto_loss(low, one, None, low, one, None).isnan()
    assert L.dpo_loss(low, one, one, one, loss_type="robust", label_smoothing=0.1) == INF
    assert L.dpo_loss(low, one, one, one, loss_type="ipo") == INF


@pytest.mark.parametrize(
    ("function", "count"),
    [(L.bradley_terry_loss, 2), (L.dpo_loss, 4), (L.cpo_loss, 2), (L.simpo_loss, 2), (L.tpo_loss, 3), (L.orpo_loss, 2), (L.kto_loss, 6)],
)
def test_empty_batches(function, count):
    values = [none(0) for _ in range(count)]
    assert function(*values).isnan()
    assert function(*values, empty="zero") == 0
    assert function(*values, reduction="sum") == 0
    assert function(*values, normalizer=4) == 0
    assert function(*values, reduction="none").shape == (0,)
    function(*values, empty="zero").backward()
    assert values[0].grad.shape == (0,)


def test_module_takes_what_each_call_brings():
    c, r, m = pairs(count=3)
    assert torch.equal(L.BradleyTerryLoss()(c, r, margin=m), L.bradley_terry_loss(c, r, m))
    w = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    assert torch.equal(L.KTOLoss()(*KTO, desirable_weight=w), L.kto_loss(*KTO, desirable_weight=w))
    assert torch.equal(L.CPOLoss()(c, r, policy_nll_loss=m), L.cpo_loss(c, r, policy_nll_loss=m))


X, Y, INT = torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.long)
Z = torch.zeros(2, 3)
META = torch.zeros(3, device="meta")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: L.dpo_loss(X, Y, X, X), ValueError, "policy_rejected_logps must have the shape of policy_chosen_logps, (3,), got (2,)"),
        (
            lambda: L.dpo_loss(X, X, META, X),
            ValueError,
            "reference_chosen_logps must be on the device of policy_chosen_logps, cpu, got meta",
        ),
        (
            lambda: L.dpo_loss(X, X, X, X, X),
            TypeError,
            "beta must be a number or a 0-d tensor, got a tensor of shape (3,) and torch.float32",
        ),
        (
            lambda: L.dpo_loss(X, X, X, X, loss_type="ipo2"),
            ValueError,
            "loss_type must be one of 'sigmoid', 'robust', 'hinge', 'ipo', 'exo_pair', 'nca_pair', 'bco_pair', 'sppo_hard', 'aot', ",
        ),
        (
            lambda: L.dpo_loss(X, X, X, X, 0.1, 0.5, "robust"),
            ValueError,
            "label_smoothing must be finite and at least 0 and below 0.5, got 0.5",
        ),
        (
            lambda: L.dpo_loss(X, X, X, X, 0.1, 0.1, "ipo"),
            ValueError,
            'label_smoothing needs loss_type "sigmoid" or "robust" or "exo_pair" or "aot" or "aot_unpaired", got 0.1 with',
        ),
        (lambda: L.dpo_loss(X, X, X, X, loss_type="exo_pair"), ValueError, 'label_smoothing must be above 0 with loss_type "exo_pair"'),
        (
            lambda: L.dpo_loss(X, X, X, X, loss_type="aot", f_divergence_type="forward_kl"),
            ValueError,
            'f_divergence_type other than "reverse_kl" needs a loss_type of "sigmoid", "robust", "hinge", "ipo", "exo_pair", "discopop"',
        ),
        (lambda: L.dpo_loss(X, X, X, X, loss_type=L.DiscoPOP(0.0)), ValueError, "DiscoPOP.tau must be finite and above 0, got 0.0"),
        (lambda: L.bradley_terry_loss(X, X, Y), ValueError, "margin must have the shape of rewards_chosen, (3,), got (2,)"),
        (
            lambda: L.cpo_loss(X, X, policy_nll_loss=Y),
            ValueError,
            "policy_nll_loss must be 0-d or have the shape of policy_chosen_logps, (3,)",
        ),
        (lambda: L.cpo_loss(X, X, loss_type="robust"), ValueError, "loss_type must be one of 'sigmoid', 'hinge', 'ipo', got 'robust'"),
        (lambda: L.tpo_loss(X, X, Y), ValueError, "policy_gold_logps must have the shape of policy_chosen_logps, (3,), got (2,)"),
        (lambda: L.kto_loss(X, Y, X, X, Y, None), ValueError, "go together, got None for reference_KL_logps"),
        (lambda: L.kto_loss(X, Y, X, X, Y, X, kl=0.1), ValueError, "kl takes the place of policy_KL_logps"),
        (
            lambda: L.kto_loss(X, Y, X, X, X, X),
            ValueError,
            "reference_rejected_logps must have the shape of policy_rejected_logps, (2,), got (3,)",
        ),
        (lambda: L.kto_loss(Z, Y, None, Z, Y, None), ValueError, "policy_chosen_logps must have shape (N,), got (2, 3)"),
        (lambda: L.kto_loss(X, Y, None, X, Y, None, kl=X), ValueError, "kl must be a number or a 0-d tensor, got shape (3,)"),
        (
            lambda: L.kto_loss(X, Y, None, X, Y, None, desirable_weight=Y),
            ValueError,
            "desirable_weight must be a number, 0-d, or of the shape",
        ),
        (lambda: L.grpo_loss(X, X), ValueError, "per_token_logps must have shape (N, T), got (3,)"),
        (lambda: L.grpo_loss(Z, X), ValueError, "advantages must have shape (2,), (2, 1) or (2, 3), got (3,)"),
        (lambda: L.grpo_loss(Z, Y, X), ValueError, "old_per_token_logps must have the shape of per_token_logps, (2, 3), got (3,)"),
        (lambda: L.grpo_loss(Z, Y, beta=0.1), ValueError, "ref_per_token_logps must be given where beta is above 0"),
        (
            lambda: L.grpo_loss(Z, Y, mask=Z.to(torch.complex64)),
            TypeError,
            "mask must be of dtype bool, an integer dtype or a fl",
        ),
        (lambda: L.grpo_loss(Z, Y, mask=none(2, 3)), ValueError, "mask has no gradient, got a tensor that requires grad"),
        (lambda: L.grpo_loss(Z, Y, mask=INT), ValueError, "mask must have the shape of per_token_logps, (2, 3), got (3,)"),
        (lambda: L.grpo_loss(Z, Y, loss_type="dro"), ValueError, "beta must be above 0 with loss_type 'dro', got 0.0"),
        (lambda: L.grpo_loss(Z, Y, loss_type="a2po"), ValueError, "beta must be above 0 with loss_type 'a2po', got 0.0"),
        (lambda: L.grpo_loss(Z, Y, loss_type="a2po", beta=1.0), ValueError, "ref_per_token_logps must be given where beta is above 0"),
        (
            lambda: L.grpo_loss(Z, Y, loss_type="gpg", importance_sampling_level="sequence"),
            ValueError,
            'importance_sampling_level "sequence" needs a loss_type of "grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", got',
        ),
        (
            lambda: L.grpo_loss(Z, Y, importance_sampling_ratio=X),
            ValueError,
            "importance_sampling_ratio must have shape (2, 3) or (2, 1), got (3,)",
        ),
        (
            lambda: L.grpo_loss(Z, Y, None, Z, beta=1.0, loss_type="a2po", importance_sampling_ratio=Z),
            ValueError,
            'importance_sampling_ratio must be None with loss_type "a2po"',
        ),
        (
            lambda: L.grpo_loss(Z, Y, loss_type=L.Sapo(temperature_neg=0)),
            ValueError,
            "Sapo.temperature_neg must be finite and above 0",
        ),
        (
            lambda: L.grpo_loss(Z, Y, loss_type=L.KLCov(ratio=1.5)),
            ValueError,
            "KLCov.ratio must be finite and at least 0 and at most",
        ),
        (lambda: L.grpo_loss(Z, Y, importance_sampling_ratio=Z.clone().requires_grad_()), ValueError, "ratio has no gradient"),
        (lambda: L.ppo_value_loss(Z, Z, Y), ValueError, "old_values must have the shape of values, (2, 3), got (2,)"),
        (lambda: L.grpo_loss(Z, Y, loss_type=L.DrGRPO(0)), ValueError, "DrGRPO.max_completion_length must be at least 1, got 0"),
        (lambda: L.grpo_loss(Z, Y, loss_type=L.TpoL()), ValueError, "loss_type must be one of 'grpo', 'bnpo'"),
        (lambda: L.grpo_loss(Z, Y, outputs=("kl",)), ValueError, 'ref_per_token_logps must be given for outputs "kl", got None'),
        (
            lambda: L.grpo_loss(Z, Y, None, Z, beta=L.KLPenalty(0.1, bias_correction=1)),
            TypeError,
            "KLPenalty.bias_correction must be True or False, got int",
        ),
        (
            lambda: L.grpo_loss(Z, Y, None, Z, beta=L.KLPenalty(0.1, bias_correction="off_policy")),
            ValueError,
            "KLPenalty.bias_correction must be one of True, False, 'on_policy', got 'off_policy'",
        ),
        (
            lambda: L.grpo_loss(Z, Y, None, Z, beta=L.KLPenalty(0.1, bias_correction=True, estimator="k3+")),
            ValueError,
            "KLPenalty.bias_correction needs an estimator without +, got 'k3+'",
        ),
        (
            lambda: L.grpo_loss(Z, Y, None, Z, beta=L.KLPenalty(0.1, estimator="k4")),
            ValueError,
            "KLPenalty.estimator must be one of 'k1', 'k2', 'k3', 'abs', 'k1+', 'k3+', 'abs+', got 'k4'",
        ),
        (
            lambda: L.grpo_loss(Z, Y, importance_sampling_ratio=L.SamplerCorrection(X)),
            ValueError,
            "SamplerCorrection.per_token_logps must have the shape of per_token_logps, (2, 3), got (3,)",
        ),
        (
            lambda: L.grpo_loss(Z, Y, importance_sampling_ratio=L.SamplerCorrection(Z, "tis")),
            ValueError,
            "SamplerCorrection.mode must be one of 'none', 'token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask', ",
        ),
        (
            lambda: L.grpo_loss(Z, Y, loss_type=L.DrGRPO(1.5)),
            TypeError,
            "DrGRPO.max_completion_length must be a whole number",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_none_for_a_tensor_that_is_needed_is_named():
    a = torch.randn(4)
    calls = {
        "reference_chosen_logps": lambda: L.dpo_loss(a, a, None, None),
        "policy_rejected_logps": lambda: L.cpo_loss(a, None),
        "rewards_rejected": lambda: L.bradley_terry_loss(a, None),
        "per_token_logps": lambda: L.grpo_loss(None, a),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got NoneType"):
            call()


def test_a_list_of_counts_is_named():
    """The function takes a tensor alone; the module, which keeps it, takes what timm's takes."""
    with pytest.raises(TypeError, match="class_counts must be a tensor, got list"):
        L.distribution_balanced_loss(torch.randn(4, 3), torch.ones(4, 3), [3, 4, 5], 25)  # type: ignore[arg-type]
