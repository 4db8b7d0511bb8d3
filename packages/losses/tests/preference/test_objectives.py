"""Objectives by name against their papers' formulas: value and gradient of one token or pair at a time, in Python's floats."""

import math

import pytest
import torch
from preference_calls import MASK, OLD, POLICY, REF, A, in_records, logps, none, pairs

from lossforge import losses as L
from lossforge.losses.definitions.preference.objectives import DIVERGENCES, PAIRS, POLICIES

INF = math.inf
EPSILON, HIGH, BETA, DELTA = 0.2, 0.28, 0.3, 1.3
CLIP_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "clip_cov")


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def clipped(r, a, low, high):
    """PPO's value, and its derivative by ln r."""
    bound = min(max(r, low), high)
    return -min(r * a, bound * a), -r * a if r * a <= bound * a else 0.0


def token(name, p, old, a):
    """A token's loss, and its derivative by log π, from the paper's formula and its policy gradient."""
    r, probability, before = math.exp(p - old), math.exp(p), math.exp(old)
    if name in CLIP_TYPES:
        return clipped(r, a, 1 - EPSILON, 1 + HIGH)
    if name == "cispo":
        weight = min(max(r, 1 - EPSILON), 1 + HIGH)
        return -weight * a * p, -weight * a
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = sigmoid(tau * (r - 1))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a
    if name == "gpg":
        return -a * p, -a
    if name == "dro":
        return -a * p + BETA / 2 * (p - old) ** 2, -a + BETA * (p - old)
    if name == "dppo_tv":
        kept = probability - before <= HIGH if a > 0 else before - probability <= EPSILON
    else:
        kl = before * math.log(before / probability) + (1 - before) * math.log((1 - before) / (1 - probability))
        kept = kl <= HIGH or r <= 1 if a > 0 else kl <= EPSILON or r >= 1
    weight = min(r, DELTA if name == "dppo_kl" else 20.0) * kept
    return -weight * a * p, -weight * a


def expected(name, beta, policy=POLICY, old=OLD, ref=REF, mask=MASK, advantages=A):
    """The mean loss, and its gradient by log π."""
    n, length = policy.shape
    value, gradient = 0.0, torch.zeros(n, length, dtype=torch.float64)
    total = int((mask != 0).sum())
    for i in range(n):
        counted = [t for t in range(length) if mask[i, t]]
        p, o, q, a = ([float(row[i, t]) for t in counted] for row in (policy, old, ref, advantages.unsqueeze(1).expand(n, length)))
        size, a0 = max(len(counted), 1), float(advantages[i])
        items = POLICIES[name].items
        share = {"mean": 1 / n / size, "sum": 1 / n, "tokens": 1 / max(total, 1), "length": 1 / (n * length)}[items]
        if name == "gmpo":
            logs = [min(x - y, HIGH) if a0 > 0 else max(x - y, -EPSILON) for x, y in zip(p, o, strict=True)]
            ratio = math.exp(sum(logs) / size)
            tokens = [(-ratio * a0, -ratio * a0 if kept == x - y else 0.0) for kept, x, y in zip(logs, p, o, strict=True)]
        elif name == "a2po":
            error = BETA * (sum(p) - sum(q)) - a0
            tokens = [(error**2, 2 * error * BETA * size)] * len(p)
        elif name == "vespo":
            k, rate = (2.0, 3.0) if a0 >= 0 else (3.0, 2.0)
            w = math.exp(sum(p) - sum(o))
            weight = w**k * math.exp(rate * (1 - w))
            tokens = [(-weight * a0 * x, -weight * a0) for x in p]
        else:
            tokens = [token(name, *each) for each in zip(p, o, a, strict=True)]
        for t, x, y, (loss, slope) in zip(counted, p, q, tokens, strict=True):
            if beta and name not in ("a2po", "dro"):
                loss, slope = loss + beta * (math.exp(y - x) - (y - x) - 1), slope + beta * (1 - math.exp(y - x))
            value += share * loss
            gradient[i, t] = share * slope
    return value, gradient


def ours(name, beta, policy=POLICY, **options):
    x = policy.clone().requires_grad_()
    options |= {"beta": BETA} if name in ("a2po", "dro") else {"beta": beta}
    options |= {"delta": DELTA} if name == "dppo_kl" else {}
    out = L.grpo_loss(x, A, OLD, REF, MASK, EPSILON, HIGH, **in_records({"loss_type": name, **options}))
    return out, torch.autograd.grad(out[0] if isinstance(out, tuple) else out, x)[0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", [name for name in POLICIES if not name.endswith("_cov")])
def test_policies_by_their_formulas(name, beta):
    value, gradient = expected(name, beta)
    out, found = ours(name, beta)
    assert out.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_policies_of_covariance(name, share):
    """The share of tokens that they choose, rounded down but at least one, among those of highest covariance."""
    kept = [(i, t) for i in range(4) for t in range(6) if MASK[i, t]]
    a, p = [float(A[i]) for i, _ in kept], [float(POLICY[i, t]) for i, t in kept]
    cov = {at: (x - sum(a) / len(a)) * (y - sum(p) / len(p)) for at, x, y in zip(kept, a, p, strict=True)}
    count = max(1, math.floor(len(kept) * share))
    if name == "kl_cov":
        out, found = ours(name, 0.0, kl_cov_ratio=share, ppo_kl_coef=0.7)
        chosen = sorted(cov, key=cov.get)[-count:]
        value, gradient = 0.0, torch.zeros(4, 6, dtype=torch.float64)
        for i, t in kept:
            log_ratio = float(POLICY[i, t] - OLD[i, t])
            value += (-math.exp(log_ratio) * float(A[i]) + 0.7 * abs(log_ratio) * ((i, t) in chosen)) / len(kept)
            gradient[i, t] = (-math.exp(log_ratio) * A[i] + 0.7 * math.copysign((i, t) in chosen, log_ratio)) / len(kept)
        assert out.item() == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-14)
        return
    plain = {at: token(name, float(POLICY[at]), float(OLD[at]), float(A[at[0]])) for at in kept}
    low, high = -1.5, 3.0
    among = {at for at in kept if plain[at][1] and low < cov[at] < high}
    assert 1 < len(among) < len(kept)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        options = {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high}
        (loss, *_), found = ours(name, 0.0, outputs=("clipped_low",), **options)
        left_out = {at for at in kept if plain[at][1] and not found[at]}
        assert left_out <= among
        assert len(left_out) == min(count, len(among))
        assert loss.item() == pytest.approx(sum(plain[at][0] for at in kept if at not in left_out) / len(kept), rel=1e-12)
        seen.add(frozenset(left_out))
        torch.manual_seed(seed)
        assert torch.equal(ours(name, 0.0, **options)[0], loss)
    assert (len(seen) > 1) == (count < len(among))


def test_bias_corrected_kl_and_the_sampler():
    """The KL term is multiplied by the ratio and not by the sampler's correction, the policy term by the latter."""
    weight = torch.tensor([[0.5, 2.0, 1.0, 0.0, 1.0, 1.0]], dtype=torch.float64).expand(4, 6)
    for name in ("grpo", "cispo", "sapo", "gpg", "luspo", "dppo_tv"):
        items = {"reduction": "none", "loss_type": name}
        plain = L.grpo_loss(POLICY, A, OLD, REF, MASK, **items) if POLICIES[name].items == "tokens" else None
        both = L.grpo_loss(
            POLICY, A, OLD, REF, MASK, beta=L.KLPenalty(0.1, bias_correction=True), importance_sampling_ratio=weight, **items
        )
        q = REF - POLICY
        kl = torch.where(MASK != 0, 0.1 * (POLICY - OLD).exp() * (q.exp() - q - 1), 0.0)
        if plain is not None:
            torch.testing.assert_close(both, weight * plain + kl)
            continue
        rows = L.grpo_loss(POLICY, A.unsqueeze(1) * weight, OLD, None, MASK, **items)  # a positive factor of A is one of the loss
        counts = MASK.sum(1).clamp(min=1) if POLICIES[name].items == "mean" else 1
        torch.testing.assert_close(both, rows + kl.sum(1) / counts)
    for name in ("gmpo", "vespo"):
        geometric = (torch.where(MASK != 0, (weight + 0.5).log(), 0.0).sum(1) / MASK.sum(1).clamp(min=1)).exp().unsqueeze(1)
        out = L.grpo_loss(POLICY, A, OLD, None, MASK, loss_type=name, reduction="none", importance_sampling_ratio=weight + 0.5)
        if name == "gmpo":
            plain = L.grpo_loss(POLICY, A, OLD, None, MASK, loss_type=name, reduction="none")
            torch.testing.assert_close(out, plain * geometric.squeeze(1))
        else:  # within φ the correction is a part of π_old
            torch.testing.assert_close(
                out, L.grpo_loss(POLICY, A, OLD - (weight + 0.5).log(), None, MASK, loss_type=name, reduction="none")
            )


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


def shares_clipped(output):
    return float(output.clipped_low), float(output.clipped_high)


def test_statistics_count_clipped_tokens_beside_the_same_loss():
    out = with_statistics()
    assert isinstance(out, L.PolicyLossOutput)
    with pytest.raises(AttributeError, match=r"ask for it with outputs=\('clipped_low', 'clipped_high', 'kl'\)"):
        _ = out.kl
    assert shares_clipped(out) == pytest.approx((2 / 7, 1 / 7))
    torch.testing.assert_close(out.loss, L.grpo_loss(CLIPPED, BETTER_AND_WORSE, torch.zeros(2, 4), None, KEPT, loss_type="dapo"))


def test_the_divergence_in_statistics_is_the_mean_of_kept_tokens():
    expected = ((-CLIPPED).exp() + CLIPPED - 1)[KEPT != 0].mean()
    assert float(with_statistics(ref=torch.zeros(2, 4)).kl) == pytest.approx(float(expected))


@pytest.mark.parametrize(("epsilon", "shares"), [(0.05, (0, 0)), (0.01, (0, 0.5))])
def test_statistics_of_sequences(epsilon, shares):
    """Means of ln r are ln(1.1) / 3, and ln(1.05) / 4, which A < 0 never clips from above."""
    assert shares_clipped(with_statistics(importance_sampling_level="sequence", epsilon=epsilon)) == shares


@pytest.mark.parametrize("name", ["sapo", "vespo", "gpg", "kl_cov"])
def test_objectives_that_clip_nothing_count_nothing(name):
    assert shares_clipped(with_statistics(loss_type=name)) == (0, 0)


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
    double = [logps(3, 4, seed=i) for i in range(3)]
    assert torch.autograd.gradcheck(lambda *t: L.ppo_value_loss(*t, reduction="none"), [t.requires_grad_() for t in double])
    assert L.ppo_value_loss(v, returns, old, 0 * mask, empty="zero") == 0
    assert L.ppo_value_loss(v, returns, old, 0 * mask).isnan()
    loss, fraction = L.ppo_value_loss(v, returns, old, torch.tensor([[0.5, 2.0, 1.5, 0.0]]), outputs=("clipped",))
    assert loss.item() == pytest.approx((0.5 * 2 + 2 * 0.5 * 2.8**2 + 1.5 * 0.125) / 4)
    assert fraction.item() == pytest.approx(2 / 4)


def smooth(x, e):
    return -(1 - e) * math.log(sigmoid(x)) - e * math.log(sigmoid(-x))


def pair(name, c, r, beta, e=0.0, tau=0.05):
    """A pair's loss of the scores of both completions."""
    h, x = c - r, beta * (c - r)
    q = sigmoid(x)
    return {
        "sigmoid": lambda: smooth(x, e),
        "robust": lambda: ((1 - e) * smooth(x, 0) - e * smooth(-x, 0)) / (1 - 2 * e),
        "hinge": lambda: max(0.0, 1 - x),
        "ipo": lambda: (h - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: q * math.log(q / (1 - e)) + (1 - q) * math.log((1 - q) / e),
        "nca_pair": lambda: smooth(beta * c, 0) + 0.5 * smooth(-beta * c, 0) + 0.5 * smooth(-beta * r, 0),
        "bco_pair": lambda: smooth(beta * c, 0) + smooth(-beta * r, 0),
        "sppo_hard": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "apo_down": lambda: sigmoid(beta * c) + 1 - sigmoid(beta * (c - r)),
        "discopop": lambda: smooth(x, 0) * (1 - sigmoid(x / tau)) + math.exp(-x) * sigmoid(x / tau),
    }[name]()


def score(t, kind, alpha=0.5):
    """f'(t) of t = π / π_ref."""
    if kind == "alpha_divergence":
        return (t ** (alpha - 1) - 1) / (alpha - 1)
    return {"reverse_kl": math.log(t), "forward_kl": 1 - 1 / t, "js_divergence": math.log(2 * t / (1 + t))}[kind]


GIVEN = pairs(count=4)
SMOOTHING = {name: 0.1 for name, each in PAIRS.items() if each.smoothed}


def check(call, items):
    torch.testing.assert_close(call(*GIVEN), torch.tensor(items, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    given = [t.clone().requires_grad_() for t in GIVEN]
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, each in PAIRS.items()
        if not name.startswith("aot")
        for kind in (DIVERGENCES if each.divergence else ("reverse_kl",))
    ],
)
def test_pairs_by_their_formulas(name, kind):
    e = SMOOTHING.get(name, 0.0)

    def call(*t):
        return L.dpo_loss(*t, 0.3, e, name, "none", f_divergence_type=kind)

    rows = [[float(t[i]) for t in GIVEN] for i in range(5)]
    check(call, [pair(name, score(math.exp(pc - rc), kind), score(math.exp(pr - rr), kind), 0.3, e) for pc, pr, rc, rr in rows])


@pytest.mark.parametrize("unpaired", [False, True])
def test_pairs_by_order(unpaired):
    pc, pr, rc, rr = (t.tolist() for t in GIVEN)

    def minus(a, b):
        return [x - y for x, y in zip(a, b, strict=True)]

    first, second = (minus(pc, rc), minus(pr, rr)) if unpaired else (minus(pc, pr), minus(rc, rr))
    check(
        lambda *t: L.dpo_loss(*t, 0.3, 0.1, "aot_unpaired" if unpaired else "aot", "none"),
        [smooth(0.3 * d, 0.1) for d in minus(sorted(first), sorted(second))],
    )


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


def test_tpo_and_alphapo_by_their_formulas():
    c, r, gold = (t.tolist() for t in GIVEN[:3])
    for name, e in (("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0)):
        items = [pair(name, x, y, 0.3, e) - 0.7 * z for x, y, z in zip(c, r, gold, strict=True)]
        check(lambda a, b, g, _, name=name, e=e: L.tpo_loss(a, b, g, 0.3, e, name, 0.7, reduction="none") + 0 * _, items)
    items = [smooth(0.3 * (x - y) - 0.2, 0.1) - 0.7 * z for x, y, z in zip(c, r, gold, strict=True)]
    check(lambda a, b, g, _: L.tpo_loss(a, b, g, 0.3, 0.1, L.TpoL(0.2), 0.7, "none") + 0 * _, items)
    for alpha in (0.25, -0.5):
        items = [
            smooth(2 * ((1 - math.exp(x) ** -alpha) - (1 - math.exp(y) ** -alpha)) / alpha - 0.5, 0.1) for x, y in zip(c, r, strict=True)
        ]
        check(
            lambda a, b, *rest, alpha=alpha: L.simpo_loss(a, b, label_smoothing=0.1, reduction="none", alpha=alpha) + 0 * sum(rest), items
        )


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POLICIES)
def test_low_precision(name, dtype):
    """float32 inside: as exact on rounded arguments as float32 is."""
    given = [t.to(dtype) for t in (POLICY, A, OLD, REF)]
    options = {"loss_type": L.ClipCov(1.0, -0.5) if name == "clip_cov" else name, "beta": 0.1}
    results = []
    for values in (given, [t.double() for t in given]):
        x = values[0].clone().requires_grad_()
        out = L.grpo_loss(x, *values[1:], MASK, **options)
        results.append((out, torch.autograd.grad(out, x)[0]))
    assert results[0][0].dtype == torch.float32
    assert results[0][1].dtype == dtype
    torch.testing.assert_close(results[0][0].double(), results[1][0], rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(results[0][1].double(), results[1][1], rtol=2 * torch.finfo(dtype).eps + 2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "alpha", "power"), [("forward_kl", 0.0, -1.0), ("alpha_divergence", 0.5, -0.5), ("alpha_divergence", 2.0, 1.0)]
)
def test_scores_of_distant_policies_keep_their_gradient(name, alpha, power):
    """Of (tᵃ - 1) / a in ln t it is tᵃ."""
    log_ratio = torch.tensor([-60.0, -20.0, -0.1, 0.0, 1e-3, 20.0, 60.0], requires_grad=True)
    (slope,) = torch.autograd.grad(DIVERGENCES[name](log_ratio, alpha).sum(), log_ratio)
    torch.testing.assert_close(slope, torch.exp(power * log_ratio.detach()), rtol=1e-6, atol=0)
