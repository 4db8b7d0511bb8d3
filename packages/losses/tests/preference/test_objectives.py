"""What objectives of preference and policies give at their ends: masked and weightless tokens, probabilities of nothing, statistics."""

import math

import pytest
import torch
from preference_calls import MASK, OLD, POLICY, REF, A, in_records, none, pairs

from lossforge import losses as L
from lossforge.losses.definitions.preference.objectives import DIVERGENCES, PAIRS, POLICIES

INF = math.inf


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_tokens_that_clip_cov_leaves_out(share):
    """The share of tokens that it leaves out, rounded down but at least one, among those of a covariance in the interval, by chance."""
    kept = [(i, t) for i in range(4) for t in range(6) if MASK[i, t]]
    a, p = [float(A[i]) for i, _ in kept], [float(POLICY[i, t]) for i, t in kept]
    cov = {at: (x - sum(a) / len(a)) * (y - sum(p) / len(p)) for at, x, y in zip(kept, a, p, strict=True)}
    count, low, high = max(1, math.floor(len(kept) * share)), -1.5, 3.0

    def graded(loss_type, **options):
        x = POLICY.clone().requires_grad_()
        out = L.grpo_loss(x, A, OLD, None, MASK, 0.2, 0.28, loss_type=loss_type, **options)
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    plain, slopes = graded("dapo", reduction="none")
    among = {at for at in kept if slopes[at] and low < cov[at] < high}
    assert 1 < len(among) < len(kept)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        loss, found = graded(L.ClipCov(share, low, high))
        left_out = {at for at in kept if slopes[at] and not found[at]}
        assert left_out <= among
        assert len(left_out) == min(count, len(among))
        assert loss.item() == pytest.approx(sum(float(plain[at]) for at in kept if at not in left_out) / len(kept), rel=1e-12)
        seen.add(frozenset(left_out))
        torch.manual_seed(seed)
        assert torch.equal(graded(L.ClipCov(share, low, high))[0], loss)
    assert (len(seen) > 1) == (count < len(among))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "a2po"])
def test_a_sampler_of_weight_zero(name):
    """A token whose correction is 0 may hold anything, and so may a completion of such tokens."""
    tokens = torch.ones(4, 6, dtype=torch.float64)
    tokens[1:, 3] = 0
    completions = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)
    options = {"loss_type": name, "beta": 0.1 if name == "dro" else 0.0}
    options["loss_type"] = {"clip_cov": L.ClipCov(0.3, -0.5), "kl_cov": L.KLCov(0.5)}.get(name, name)
    cases = [(tokens, "token"), (completions, "token"), (completions.expand(4, 6), "token")]
    cases += [(completions, "sequence"), (completions.expand(4, 6), "sequence")] if POLICIES[name].level else []
    for weight, level in cases:
        results = []
        for filled in (-1.0, torch.nan, -INF, 1000.0):
            x = torch.where(weight == 0, filled, POLICY).requires_grad_()
            a = A.clone().requires_grad_()
            torch.manual_seed(0)
            out = L.grpo_loss(
                x, a, OLD, None, MASK, importance_sampling_ratio=weight, importance_sampling_level=level, **in_records(options)
            )
            results.append((out, *torch.autograd.grad(out, (x, a))))
        assert results[0][1].any()
        assert all(torch.equal(s, t) for other in results[1:] for s, t in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_masked_tokens_and_empty_batches(name):
    beta = 0.1
    values = []
    for bad in (-1.0, torch.nan, INF):
        x, old, ref = (torch.where(MASK != 0, t, bad) for t in (POLICY, OLD, REF))
        x.requires_grad_()
        torch.manual_seed(0)
        out = L.grpo_loss(x, A, old, ref, MASK, beta=beta, loss_type=name, outputs=STATS)
        values.append([*out, *torch.autograd.grad(out.loss, x)])
    for other in values[1:]:
        assert all(torch.equal(s, t) for s, t in zip(values[0], other, strict=True))
    assert (values[0][-1][MASK == 0] == 0).all()
    x = none(0, 3)
    options = {"loss_type": name, "beta": beta}
    assert L.grpo_loss(x, none(0), x.detach(), x.detach(), **options).isnan()
    assert L.grpo_loss(x, none(0), x.detach(), x.detach(), empty="zero", **options) == 0
    x, nothing = none(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    out = L.grpo_loss(x, torch.ones(2), x.detach(), x.detach(), nothing, empty="zero", outputs=STATS, **options)
    assert [each.item() for each in out] == [0, 0, 0, 0]
    out.loss.backward()
    assert (x.grad == 0).all()
    assert L.grpo_loss(none(2, 0), torch.ones(2), None, none(2, 0), empty="zero", **options) == 0


@pytest.mark.parametrize("far", [100.0, 1e4, INF])
@pytest.mark.parametrize("name", POLICIES)
def test_probabilities_of_nothing(name, far):
    """The policy gives the first token no probability any more, the old policy had given the second none: never nan."""
    x = torch.tensor([[-far, -1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -min(far, 1e4), -2.0]])
    ref = torch.full((1, 3), -1.5)
    for advantage in (1.0, -1.0, 0.0):
        options = {"beta": 0.1} if name in ("a2po", "dro") else {}
        out = L.grpo_loss(x, torch.tensor([advantage]), old, ref, loss_type=name, **options)
        assert not out.isnan()
        gradient = torch.autograd.grad(out, x)[0]
        assert not gradient[0, 2].isnan()
        if name not in ("a2po", "dro", "kl_cov", "gpg", "grpo", "bnpo", "dapo", "dr_grpo", "luspo", "clip_cov", "gmpo"):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["default", "ipo"])
def test_the_recipes_for_prime_rl(kind):
    """The gradient of A r within the region, less kl_tau (ln r)², of tokens that the sampler gave other probabilities."""
    kl_tau, region = 0.1, 0.05
    r, change = (POLICY - OLD).exp(), POLICY.exp() - OLD.exp()
    a = A.unsqueeze(1)
    if kind == "default":
        kept = torch.where(a > 0, change <= region, change >= -region)
        options = {"loss_type": "dppo_tv", "epsilon": region, "delta": 1e9}
    else:
        kept = change.abs() <= region
        options = {"loss_type": "gpg", "importance_sampling_ratio": torch.where(kept, r, 0.0)}
    expected = torch.where(MASK != 0, -a * r * kept + 2 * kl_tau * (POLICY - OLD), 0.0) / MASK.sum()
    x = POLICY.clone().requires_grad_()
    out = L.grpo_loss(x, A, OLD, OLD, MASK, beta=L.KLPenalty(2 * kl_tau, estimator="k2"), **options)
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], expected, rtol=1e-11, atol=1e-14)


STATS = L.PolicyLossOutput.names[1:]
CLIPPED = torch.tensor([[2.0, 0.5, 1.1, 1.0], [0.5, 0.7, 3.0, 1.0]]).log()
KEPT = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
BETTER_AND_WORSE = torch.tensor([1.0, -1.0])


def with_statistics(ref=None, loss_type="dapo", **options):
    outputs = STATS[:2] if ref is None else STATS
    return L.grpo_loss(CLIPPED, BETTER_AND_WORSE, torch.zeros(2, 4), ref, KEPT, loss_type=loss_type, outputs=outputs, **options)


@pytest.mark.parametrize("name", ["sapo", "vespo", "gpg", "kl_cov"])
def test_objectives_that_clip_nothing_count_nothing(name):
    assert with_statistics(loss_type=name)[1:] == (0, 0)


def test_statistics_take_no_gradient():
    zeros = torch.zeros(2, 4)
    assert not any(t.requires_grad for t in L.grpo_loss(none(2, 4), BETTER_AND_WORSE, zeros, zeros, KEPT, outputs=STATS)[1:])


def test_value_loss():
    """By hand: not clipped, clipped to the farther side, clipped to the nearer side."""
    v = torch.tensor([[1.0, 2.0, 2.0, torch.nan]], requires_grad=True)
    old, returns = torch.tensor([[0.9, 1.0, 1.0, 0.0]]), torch.tensor([[3.0, 4.0, 1.5, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    out = L.ppo_value_loss(v, returns, old, mask, reduction="none")
    assert out[0].tolist() == pytest.approx([2.0, 0.5 * 2.8**2, 0.125, 0])
    loss, fraction = L.ppo_value_loss(v, returns, old, mask, outputs=("clipped",))
    assert loss.item() == pytest.approx((2 + 0.5 * 2.8**2 + 0.125) / 3)
    assert fraction.item() == pytest.approx(1 / 3)
    loss.backward()
    assert v.grad[0].tolist() == pytest.approx([-2 / 3, 0, 0.5 / 3, 0])
    assert L.ppo_value_loss(v, returns, old, 0 * mask, empty="zero") == 0
    assert L.ppo_value_loss(v, returns, old, 0 * mask).isnan()
    loss, fraction = L.ppo_value_loss(v, returns, old, torch.tensor([[0.5, 2.0, 1.5, 0.0]]), outputs=("clipped",))
    assert loss.item() == pytest.approx((0.5 * 2 + 2 * 0.5 * 2.8**2 + 1.5 * 0.125) / 4)
    assert fraction.item() == pytest.approx(2 / 4)


GIVEN = pairs(count=4)
SMOOTHING = {name: 0.1 for name, each in PAIRS.items() if each.smoothed}


def test_alpha_one_is_reverse_kl():
    for alpha in (1.0, 1 + 1e-13):
        out = L.dpo_loss(*GIVEN, f_divergence_type=L.AlphaDivergence(alpha))
        torch.testing.assert_close(out, L.dpo_loss(*GIVEN), rtol=1e-12, atol=0)


@pytest.mark.parametrize("low", [-100.0, -1e4, -INF])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_far_out(name, low):
    """The policy gives one of both completions no probability: the loss is its limit, and no gradient is nan."""
    for values in ((low, -1.0), (-1.0, low)):
        given = [torch.tensor([v], requires_grad=True) for v in values]
        out = L.dpo_loss(*given, torch.tensor([-1.0]), torch.tensor([-1.0]), 0.1, SMOOTHING.get(name, 0.0), name)
        assert not out.isnan()
        gradients = torch.autograd.grad(out, given)
        assert not any(g.isnan() for g in gradients)
        if name in ("exo_pair", "apo_zero", "apo_down"):
            assert out < 6
            assert all(g.isfinite() for g in gradients)
    for kind in DIVERGENCES if PAIRS[name].divergence else ():
        x = torch.tensor([-300.0], requires_grad=True)
        out = L.dpo_loss(x, *[torch.tensor([-1.0])] * 3, 0.1, SMOOTHING.get(name, 0.0), name, f_divergence_type=kind)
        assert not out.isnan()
        assert torch.autograd.grad(out, x)[0].isfinite()


@pytest.mark.slow  # by default one of each function, in test_values.py
def test_compile_every_objective():
    """All of them in one graph."""
    numbers = {name: {"loss_type": name, "beta": 0.1} for name in POLICIES}
    numbers["clip_cov"]["loss_type"] = L.ClipCov(1.0, -0.5)

    def call(x, *given):
        of_pairs = [L.dpo_loss(*given, 0.1, SMOOTHING.get(name, 0.0), name) for name in PAIRS]
        return torch.stack([*of_pairs, *(L.grpo_loss(x, A, OLD, REF, MASK, **numbers[name]) for name in POLICIES)])

    torch._dynamo.reset()
    given = [t.clone().requires_grad_() for t in (POLICY, *GIVEN)]
    out, eager = torch.compile(call, fullgraph=True, backend="eager")(*given), call(*given)
    torch.testing.assert_close(out, eager)
    for s, t in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(eager.sum(), given), strict=True):
        torch.testing.assert_close(s, t)


@pytest.mark.parametrize(
    ("name", "alpha", "power"), [("forward_kl", 0.0, -1.0), ("alpha_divergence", 0.5, -0.5), ("alpha_divergence", 2.0, 1.0)]
)
def test_scores_of_distant_policies_keep_their_gradient(name, alpha, power):
    """Of (tᵃ - 1) / a in ln t it is tᵃ."""
    log_ratio = torch.tensor([-60.0, -20.0, -0.1, 0.0, 1e-3, 20.0, 60.0], requires_grad=True)
    (slope,) = torch.autograd.grad(DIVERGENCES[name](log_ratio, alpha).sum(), log_ratio)
    torch.testing.assert_close(slope, torch.exp(power * log_ratio.detach()), rtol=1e-6, atol=0)
