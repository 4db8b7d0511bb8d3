"""Every two options of a preference or policy loss together, against its formula in float64: value, and gradients of all arguments.

Options are drawn by a seed. The formulas are written from the papers, as TRL, verl and NeMo RL compute them.
"""

import inspect
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from preference_calls import OF_KL, RECORDS, in_records

from lossforge import losses as L
from lossforge.losses.definitions.preference.objectives import DIVERGENCES, OWN_NUMBERS, PAIRS, POLICIES

N, T = 4, 5


class Draw(random.Random):
    """A seeded source of options and tensors."""

    def tensor(self, *shape, low=0.0, high=1.0):
        generator = torch.Generator().manual_seed(self.getrandbits(40))
        return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

    def one_or_each(self, shape, low, high):
        return self.tensor(*self.choice([(), shape]), low=low, high=high)


def smoothed(x, e):
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def divergence(s, kind, alpha):
    t = s.exp()
    if kind == "alpha_divergence":
        return (t ** (alpha - 1) - 1) / (alpha - 1)
    return {"reverse_kl": s, "forward_kl": 1 - 1 / t, "js_divergence": (2 * t / (1 + t)).log()}[kind]


def pair(kind, c, r, beta, e, tau=0.05):
    x = beta * (c - r)
    q = torch.sigmoid(x)
    return {
        "sigmoid": lambda: smoothed(x, e),
        "robust": lambda: ((1 - e) * smoothed(x, 0) - e * smoothed(-x, 0)) / (1 - 2 * e),
        "hinge": lambda: (1 - x).clamp(min=0),
        "ipo": lambda: (c - r - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: q * (q / (1 - e)).log() + (1 - q) * ((1 - q) / e).log(),
        "nca_pair": lambda: smoothed(beta * c, 0) + 0.5 * smoothed(-beta * c, 0) + 0.5 * smoothed(-beta * r, 0),
        "bco_pair": lambda: smoothed(beta * c, 0) + smoothed(-beta * r, 0),
        "sppo_hard": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "aot_unpaired": lambda: smoothed(beta * (c.sort().values - r.sort().values), e),
        "apo_zero": lambda: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
        "apo_down": lambda: torch.sigmoid(beta * c) + 1 - q,
        "discopop": lambda: smoothed(x, 0) * (1 - torch.sigmoid(x / tau)) + (-x).exp() * torch.sigmoid(x / tau),
    }[kind]()


def dpo(given, beta=0.1, label_smoothing=0.0, loss_type="sigmoid", f_divergence_type="reverse_kl", **rest):
    c, r, ref_c, ref_r = given
    if loss_type == "aot":
        return smoothed(beta * ((c - r).sort().values - (ref_c - ref_r).sort().values), label_smoothing)
    c, r = (divergence(s, f_divergence_type, rest.get("f_alpha_divergence_coef", 0.5)) for s in (c - ref_c, r - ref_r))
    return pair(loss_type, c, r, beta, label_smoothing, rest.get("discopop_tau", 0.05))


def bradley_terry(given, margin=0.0, label_smoothing=0.0, center_rewards_coefficient=0.0):
    c, r = given
    return smoothed(c - r - margin, label_smoothing) + center_rewards_coefficient * (c + r) ** 2


def cpo(given, beta=0.1, label_smoothing=0.0, loss_type="sigmoid", cpo_alpha=1.0, policy_nll_loss=None):
    c, r = given
    return pair(loss_type, c, r, beta, label_smoothing) + cpo_alpha * (-c if policy_nll_loss is None else policy_nll_loss)


def simpo(given, beta=2.0, gamma=0.5, label_smoothing=0.0, loss_type="sigmoid", alpha=0.0):
    c, r = ((1 - t.exp() ** -alpha) / alpha if alpha else t for t in given)
    x = beta * (c - r) - gamma
    return (1 - x).clamp(min=0) if loss_type == "hinge" else smoothed(x, label_smoothing)


def tpo(given, beta=0.01, label_smoothing=0.0, loss_type="sigmoid", tpo_alpha=1.0, tpo_l_gamma=0.5):
    c, r, gold = given
    first = (
        smoothed(beta * (c - r) - tpo_l_gamma, label_smoothing) if loss_type == "tpo-l" else pair(loss_type, c, r, beta, label_smoothing)
    )
    return first - tpo_alpha * gold


def orpo(given, beta=0.1, alpha=1.0, policy_nll_loss=None):
    c = given[0]
    odds = [t - (1 - t.exp()).log() for t in given]
    return alpha * (-c if policy_nll_loss is None else policy_nll_loss) + beta * smoothed(odds[0] - odds[1], 0)


def kto(given, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, kl=None):
    c, r, of_kl, ref_c, ref_r, ref_kl = given
    z = max(0.0, float((of_kl - ref_kl).mean() if kl is None else kl))
    return torch.cat(
        [desirable_weight * torch.sigmoid(-beta * (c - ref_c - z)), undesirable_weight * torch.sigmoid(-beta * (z - r + ref_r))]
    )


def value(given, cliprange_value=0.2):
    v, returns, old = given
    return 0.5 * torch.maximum((v - returns) ** 2, (v.clamp(old - cliprange_value, old + cliprange_value) - returns) ** 2)


def uniform(low, high):
    return lambda draw: draw.uniform(low, high)


def one_of(*values):
    return lambda draw: draw.choice(values)


def each(low, high, shape=(N,)):
    return lambda draw: draw.one_or_each(shape, low, high)


SHARED = {"beta": uniform(0.05, 1.5), "label_smoothing": uniform(0.01, 0.4)}
NLL = {"policy_nll_loss": each(0.1, 3.0)}
# function, formula, number of tensors, how to draw each option
LOSSES = [
    (
        L.dpo_loss,
        dpo,
        4,
        {
            **SHARED,
            "loss_type": one_of(*PAIRS),
            "f_divergence_type": one_of(*DIVERGENCES),
            "f_alpha_divergence_coef": uniform(-0.9, 0.9),
            "discopop_tau": uniform(0.04, 2.0),
        },
    ),
    (
        L.bradley_terry_loss,
        bradley_terry,
        2,
        {"label_smoothing": SHARED["label_smoothing"], "margin": each(-1.0, 1.0), "center_rewards_coefficient": uniform(0.01, 1.0)},
    ),
    (L.cpo_loss, cpo, 2, {**SHARED, **NLL, "loss_type": one_of("sigmoid", "hinge", "ipo"), "cpo_alpha": uniform(0.0, 2.0)}),
    (
        L.simpo_loss,
        simpo,
        2,
        {**SHARED, "gamma": uniform(-1.0, 1.0), "loss_type": one_of("sigmoid", "hinge"), "alpha": uniform(-1.0, 1.0)},
    ),
    (
        L.tpo_loss,
        tpo,
        3,
        {**SHARED, "loss_type": one_of("sigmoid", "hinge", "ipo", "tpo-l"), "tpo_alpha": uniform(0.0, 2.0), "tpo_l_gamma": uniform(-1, 1)},
    ),
    (L.orpo_loss, orpo, 2, {"beta": SHARED["beta"], "alpha": uniform(0.0, 2.0), **NLL}),
    (
        L.kto_loss,
        kto,
        6,
        {"beta": SHARED["beta"], "desirable_weight": each(0.0, 2.0), "undesirable_weight": each(0.0, 2.0), "kl": each(-1.0, 2.0, ())},
    ),
    (L.ppo_value_loss, value, 3, {"cliprange_value": uniform(0.01, 1.0)}),
]
REDUCING = {"reduction": one_of("none", "mean", "sum"), "normalizer": uniform(1.0, 9.0), "empty": one_of("zero")}


def allowed(function, options):
    """Make drawn options a call that the function accepts."""
    if options.get("reduction") == "none":
        options.pop("normalizer", None)
    if "discopop_tau" in options:
        options["loss_type"] = "discopop"
    if "tpo_l_gamma" in options:
        options["loss_type"] = "tpo-l"
    kind = options.get("loss_type", "sigmoid")
    if kind not in (*(name for name, known in PAIRS.items() if known.smoothed), "tpo-l"):
        options.pop("label_smoothing", None)
    if kind == "exo_pair":
        options.setdefault("label_smoothing", 0.05)
    if function is L.dpo_loss and not PAIRS[kind].divergence:
        options.pop("f_divergence_type", None)
        options.pop("f_alpha_divergence_coef", None)
    if "f_alpha_divergence_coef" in options:
        options["f_divergence_type"] = "alpha_divergence"
    return options


def drawn(draw, table, names):
    """Draw the options that are named, and each other one at times."""
    return {name: make(draw) for name, make in table.items() if name in names or draw.random() < 0.2}


def check(ours, exact, inputs):
    """Compare value and gradients of both calls of the same inputs, under a random upstream gradient."""
    results = []
    for call in (ours, exact):
        given = [t.clone().requires_grad_() for t in inputs]
        out = call(given)
        upstream = Draw(0).tensor(*out.shape, low=0.5, high=2.0)
        results.append((out.detach(), *torch.autograd.grad(out, given, upstream, allow_unused=True, materialize_grads=True)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def reduced(items, divisor, reduction="mean", normalizer=None, empty=None):
    if reduction == "none":
        return items
    divisor = normalizer or (divisor if reduction == "mean" else 1)
    return items.sum() / divisor


def compare(function, formula, count, table, names, draw, **fixed):
    options = allowed(function, drawn(draw, table | REDUCING, names) | fixed)
    given = [draw.tensor(N, low=-4.0, high=-0.05) for _ in range(count)]
    if function is L.kto_loss and "kl" in options:
        given[2] = given[5] = None
    tensors = {i: t for i, t in enumerate(given) if t is not None and not (function is L.kto_loss and i in (2, 5))}
    differentiable = {name: v for name, v in options.items() if name == "policy_nll_loss" or (name == "margin" and v.ndim)}
    own = {name: v for name, v in options.items() if name not in REDUCING}
    how = {name: v for name, v in options.items() if name in REDUCING}

    def split(values):
        placed = list(given)
        for place, t in zip(tensors, values, strict=False):
            placed[place] = t
        return placed, dict(zip(differentiable, values[len(tensors) :], strict=True))

    def ours(values):
        placed, named = split(values)
        return function(*placed, **in_records({**options, **named}))

    def exact(values):
        placed, named = split(values)
        items = formula(placed, **{**own, **named})
        return reduced(items, items.numel(), **how)

    check(ours, exact, [*tensors.values(), *differentiable.values()])


@pytest.mark.parametrize(("function", "formula", "count", "table"), LOSSES, ids=[row[0].__name__ for row in LOSSES])
def test_pairs(function, formula, count, table):
    draw = Draw(0)
    for names in itertools.combinations(table | REDUCING, 2):
        for _ in range(2):
            compare(function, formula, count, table, names, draw)


@pytest.mark.parametrize("kind", PAIRS)
def test_every_loss_of_pairs(kind):
    """With scores of each f-divergence that it takes."""
    draw, (function, formula, count, table) = Draw(1), LOSSES[0]
    for of_scores in DIVERGENCES if PAIRS[kind].divergence else ("reverse_kl",):
        compare(function, formula, count, table, ("beta", "label_smoothing"), draw, loss_type=kind, f_divergence_type=of_scores)


# Policies


def over(size):
    """Return a divisor: 1 where nothing counts."""
    return torch.where(size == 0, 1.0, size)


def policy(kind, x, log_ratio, level, ref, a, m, sampler, o):
    """Compute ℓ of each token, (N, T). m: weights of tokens, 0 for those that do not count."""
    keep = m > 0

    def mean(t):
        return (m * t).sum(1, keepdim=True) / over(m.sum(1, keepdim=True))

    def detached(weight):
        return -weight.detach() * a * x

    low, high, r = 1 - o["epsilon"], 1 + o["epsilon_high"], level.exp()
    counted, own = keep & (sampler != 0), o["importance_sampling_ratio"]
    delta = math.inf if o["delta"] is None else o["delta"]
    ppo = -torch.minimum(r * a, r.clamp(low, high) * a)
    ppo = torch.where(a < 0, torch.minimum(ppo, -delta * a), ppo) if o["delta"] else ppo
    positive = a > 0
    if kind in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo"):
        return sampler * ppo
    if kind == "cispo":
        return sampler * detached(r.clamp(low, high))
    if kind == "sapo":
        tau = torch.where(positive, *(torch.tensor(o[f"sapo_temperature_{sign}"], dtype=torch.float64) for sign in ("pos", "neg")))
        return sampler * -4 / tau * torch.sigmoid(tau * (r - 1)) * a
    if kind == "vespo":
        log_w = torch.where(counted, m * log_ratio, 0.0).sum(1, keepdim=True)
        weight = torch.where(keep, sampler, 1.0) if own is None or own.shape[1] == T else own  # one of a completion counts once
        log_w = log_w + weight.log().clamp(math.log(1e-8), 20).sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20)
        k, rate = (
            torch.where(a >= 0, *(torch.tensor(o[f"vespo_{name}_{sign}"], dtype=torch.float64) for sign in ("pos", "neg")))
            for name in ("k", "lambda")
        )
        return torch.where(counted, detached((rate + k * log_w - rate * log_w.exp()).exp()), 0.0)
    if kind == "gmpo":
        bounded = torch.where(positive, log_ratio.clamp(max=o["epsilon_high"]), log_ratio.clamp(min=-o["epsilon"]))
        return (-(mean(bounded) + mean(torch.where(keep, sampler, 1.0).log())).exp() * mean(a)).expand_as(x)
    if kind == "a2po":
        return ((o["beta"] * (m * (x - ref)).sum(1, keepdim=True) - mean(a)) ** 2).expand_as(x)
    if kind == "gpg":
        return sampler * detached(torch.ones_like(x))
    if kind == "dro":
        return sampler * (-a * x + o["beta"] / 2 * log_ratio**2)
    covariance = (a - a[counted].mean()) * (x - x[counted].mean())
    if kind == "clip_cov":  # of a share of 1, which leaves nothing to chance
        plain = -torch.minimum(r * a, r.clamp(low, high) * a)
        clipped = r.clamp(low, high) * a < r * a
        return sampler * torch.where(counted & ~clipped & (covariance > o["clip_cov_lb"]) & (covariance < o["clip_cov_ub"]), 0.0, plain)
    if kind == "kl_cov":
        most = max(1, math.floor(int(counted.sum()) * o["kl_cov_ratio"]))
        chosen = counted & (covariance >= covariance[counted].sort(descending=True).values[:most][-1])
        return sampler * (-r * a + torch.where(chosen, o["ppo_kl_coef"] * log_ratio.abs(), 0.0))
    p, p_old = x.exp(), (x - log_ratio).exp()
    if kind == "dppo_tv":
        kept = torch.where(positive, p - p_old <= o["epsilon_high"], p_old - p <= o["epsilon"])
    else:
        kl = p_old * (p_old / p).log() + (1 - p_old) * ((1 - p_old) / (1 - p)).log()
        kept = torch.where(positive, (kl <= o["epsilon_high"]) | (p <= p_old), (kl <= o["epsilon"]) | (p >= p_old))
    return sampler * detached(r.clamp(max=20.0 if o["delta"] is None else delta) * kept)


def grpo(x, a, old=None, ref=None, mask=None, reduction="mean", normalizer=None, empty=None, **o):
    """Compute the loss, and the mean estimate of KL."""
    kind, m = o["loss_type"], torch.ones_like(x) if mask is None else mask.to(x.dtype)
    a = (a if a.ndim == 2 else a.unsqueeze(1)).expand_as(x)
    old = x.detach() if old is None else old
    log_ratio = x - old
    size = over(m.sum(1))
    level, shared = log_ratio, ((m * log_ratio).sum(1) / size).unsqueeze(1).expand_as(x)
    if o["importance_sampling_level"] == "sequence":
        level = shared
    elif o["importance_sampling_level"] == "sequence_token":
        level = (shared - x).detach() + x
    o["epsilon_high"] = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    if isinstance(o["importance_sampling_ratio"], L.SamplerCorrection):
        o["importance_sampling_ratio"] = correction(o["importance_sampling_ratio"], x.detach(), old.detach(), a, m)
    sampler = torch.ones_like(x) if o["importance_sampling_ratio"] is None else o["importance_sampling_ratio"].expand_as(x)
    tokens, kl = policy(kind, x, log_ratio, level, ref, a, m, sampler, o), None
    if ref is not None:
        kl = divergence_of_reference(x, ref, level, o)
        if kind not in ("a2po", "dro"):
            tokens = tokens + o["beta"] * kl
    tokens = m * torch.where(m > 0, tokens, 0.0)
    weighing = POLICIES[kind].items
    items = {"mean": tokens.sum(1) / size, "sum": tokens.sum(1)}.get(weighing, tokens)
    length = o["max_completion_length"] or T
    divisor = {"tokens": over(m.sum()), "length": N * length}.get(weighing, N)
    mean_kl = None if kl is None else (m * kl).sum() / over(m.sum())
    return reduced(items, divisor, reduction, normalizer), mean_kl


def divergence_of_reference(x, ref, level, o):
    q, bound = ref - x, math.inf if o["kl_clamp"] is None else o["kl_clamp"]
    near = q.clamp(-bound, bound)
    kl = {"k1": -near, "k2": near**2 / 2, "k3": near.exp() - near - 1, "abs": near.abs()}[o["kl_type"].rstrip("+")]
    if corrected := o["use_bias_correction_kl"]:
        r = (x - x.detach() if corrected == "on_policy" else level).exp()
        kl = kl * torch.where(q.abs() <= bound, r, r.detach())
    most = math.inf if o["kl_output_clamp_value"] is None else o["kl_output_clamp_value"]
    kl = kl.clamp(-most, most)
    return q**2 / 2 + (kl - q**2 / 2).detach() if o["kl_type"].endswith("+") else kl


def correction(given, x, old, a, m):
    """Compute a sampler's correction by the names of TRL, completion by completion."""
    logps, mode, low, high, off_policy = given
    found = torch.ones_like(x)
    for i in range(N):
        weights = m[i] * (m[i] > 0)
        log_w = torch.where(logps[i].isnan(), 0.0, old[i] - logps[i])
        w = log_w.exp() if mode.startswith(("token", "geometric")) else (weights * log_w).sum().exp().expand(T)
        judged = ((weights * log_w).sum() / over(weights.sum())).exp() if mode == "geometric_mask" else w
        least, most = low or 0.0, high or math.inf
        if mode != "none":
            found[i] = w.clamp(least, most) if mode.endswith("truncate") else w * ((least <= judged) & (judged <= most))
        drift = (weights * torch.where(logps[i].isnan(), 0.0, logps[i] - x[i])).sum() / over(weights.sum())
        if off_policy is not None:
            found[i] *= (a[i] >= 0) | (drift <= off_policy)
    return found[:, :1] if mode.startswith("sequence") and (off_policy is None or (a == a[:, :1]).all()) else found


def of_sampler(draw):
    """Draw a correction of tokens or completions, 0 for some."""
    weight = draw.tensor(N, draw.choice([1, T]), low=0.1, high=2.0)
    weight[2:] *= draw.tensor(*weight[2:].shape) > draw.choice([0.0, 0.3])  # covariances of one completion would be equal
    return weight


def of_logps(draw):
    """Draw a correction from log-probabilities of a sampler, one of which is unknown."""
    logps = draw.tensor(N, T, low=-6.0, high=-0.05)
    logps[0, 1] = torch.nan
    mode = draw.choice(["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"])
    low, off_policy = (draw.choice([None, draw.uniform(0.1, 0.8)]) for _ in range(2))
    return L.SamplerCorrection(logps, mode, low, draw.choice([None, draw.uniform(1.0, 9.0)]), off_policy)


POLICY = {
    "loss_type": one_of(*POLICIES),
    "epsilon": uniform(0.05, 0.5),
    "epsilon_high": uniform(0.05, 0.6),
    "beta": uniform(0.01, 1.0),
    "importance_sampling_level": one_of("sequence", "sequence_token"),
    "delta": uniform(1.01, 3.0),
    "max_completion_length": one_of(7, 9),
    "importance_sampling_ratio": lambda draw: draw.choice([of_sampler, of_logps])(draw),
    "kl_clamp": uniform(0.1, 6.0),
    "use_bias_correction_kl": one_of(True, "on_policy"),
    "kl_type": one_of("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"),
    "kl_output_clamp_value": uniform(0.1, 20.0),
    "sapo_temperature_pos": uniform(0.3, 3.0),
    "sapo_temperature_neg": uniform(0.3, 3.0),
    "vespo_k_pos": uniform(0.0, 3.0),
    "vespo_lambda_pos": uniform(0.1, 3.0),
    "vespo_k_neg": uniform(0.0, 3.0),
    "vespo_lambda_neg": uniform(0.1, 3.0),
    "clip_cov_lb": uniform(-1.0, 0.5),
    "clip_cov_ub": uniform(0.6, 3.0),
    "kl_cov_ratio": lambda draw: draw.choice([0.0, draw.random()]),
    "ppo_kl_coef": uniform(0.0, 1.0),
    "advantages": one_of((N, T), (N, 1)),
    "weights": one_of(True),
    "on_policy": one_of(True),
    "reference": one_of(True),
    "unmasked": one_of(True),
}
DEFAULTS = {name: p.default for name, p in inspect.signature(L.grpo_loss).parameters.items() if p.default is not p.empty}
DEFAULTS |= {theirs: L.KLPenalty._field_defaults[ours] for theirs, ours in OF_KL.items()}
DEFAULTS |= {theirs: getattr(record(), ours) for _, record, names in RECORDS for theirs, ours in names.items()}
READ_BY = {"delta": tuple(kind for kind, known in POLICIES.items() if known.bounded)}
READ_BY |= {name: (kind,) for kind, record in OWN_NUMBERS.items() for _, made, names in RECORDS if made is record for name in names}
PLACES = {"per_token_logps": "x", "advantages": "a", "old_per_token_logps": "old", "ref_per_token_logps": "ref"}


def policy_options(draw, names, kind=None):
    """Draw a set of options that are accepted together, of a loss type that reads those that are named, unless it is given."""
    options = drawn(draw, POLICY | REDUCING, names)
    levels = tuple(kind for kind, known in POLICIES.items() if known.level)
    readers = {**READ_BY, "importance_sampling_level": levels}
    kinds = [kind for kind in POLICIES if all(kind in readers.get(name, POLICIES) for name in names)]
    options["loss_type"] = kind = kind or draw.choice(kinds or list(POLICIES))
    drop = {name for name, known in readers.items() if kind not in known}
    drop |= {"use_bias_correction_kl"} if options.get("kl_type", "").endswith("+") else set()
    drop |= {"importance_sampling_ratio"} if kind == "a2po" else set()
    drop |= {"normalizer"} if options.get("reduction") == "none" else set()
    options = {name: v for name, v in options.items() if name not in drop}
    if kind in ("a2po", "dro") or set(OF_KL) & set(options):
        options.setdefault("beta", 0.3)
    return options


def compare_policies(names, draw, kind=None):
    options = policy_options(draw, names, kind)
    flags = {name: options.pop(name, False) for name in ("advantages", "weights", "on_policy", "reference", "unmasked")}
    if options["loss_type"] == "kl_cov":  # whose covariances would all be 0 where one sequence is left
        flags["advantages"] = (N, T)
    x = draw.tensor(N, T, low=-6.0, high=-0.05)
    given = {"per_token_logps": x, "advantages": draw.tensor(*(flags["advantages"] or (N,)), low=-2.0, high=2.0)}
    if not flags["on_policy"]:
        given["old_per_token_logps"] = (x + draw.tensor(N, T, low=-0.8, high=0.8)).clamp(max=-0.01)
    if flags["reference"] or options.get("beta"):
        given["ref_per_token_logps"] = x + draw.tensor(N, T, low=-1, high=1) ** 3 * 9
    mask = None if flags["unmasked"] else torch.where(torch.arange(N).unsqueeze(1) == 3, 0, draw.tensor(N, T).gt(0.25).int())
    mask = mask if mask is None or not flags["weights"] else mask * draw.tensor(N, T, low=0.1, high=2.0)
    fixed = {"mask": mask, **options} | ({"clip_cov_ratio": 1.0} if options["loss_type"] == "clip_cov" else {})
    stats = []

    def ours(values):
        outputs = ("kl",) if "ref_per_token_logps" in given else ()
        found = L.grpo_loss(**dict(zip(given, values, strict=True)), **in_records(fixed), outputs=outputs)
        stats.append(found.kl if outputs else None)
        return found.loss if outputs else found

    def exact(values):
        named = dict(zip([PLACES[name] for name in given], values, strict=True))
        loss, kl = grpo(**named, **{name: v for name, v in (DEFAULTS | fixed).items() if name not in PLACES})
        stats.append(kl)
        return loss

    check(ours, exact, list(given.values()))
    assert (stats[0] is None) == (stats[1] is None)
    if stats[0] is not None:
        torch.testing.assert_close(stats[0], stats[1].detach(), rtol=1e-9, atol=1e-11)


def test_pairs_of_policies():
    draw = Draw(0)
    for names in itertools.combinations(POLICY | REDUCING, 2):
        compare_policies(names, draw)


@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy(kind):
    """On the policy and off it, with a KL term and without, with a mask and without."""
    draw = Draw(1)
    for flags in itertools.product(("on_policy", "epsilon"), ("reference", "beta"), ("unmasked", "importance_sampling_ratio")):
        compare_policies(flags, draw, kind)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x, **given: L.grpo_loss(x.T.expand(N, T), x[0], loss_type="cispo", **given), {"delta": 2.0}),
        (
            lambda x, **given: L.grpo_loss(x.T.expand(N, T), x[0], None, x.T.expand(N, T), loss_type="dro", **given),
            {"beta": L.KLPenalty(0.1, clamp=1.0)},
        ),
    ],
    ids=lambda v: "".join(v) if isinstance(v, dict) else "",
)
def test_an_option_that_the_loss_would_not_read_is_refused(call, named):
    x = -torch.rand(1, N)
    with pytest.raises(ValueError, match=r"^(delta needs|KLPenalty's estimate of KL needs) a loss_type o"):
        call(x, **named)
