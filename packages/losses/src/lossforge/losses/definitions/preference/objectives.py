"""Every objective over log-probabilities by its name: formula, source, use, and the numbers that it alone reads.

PAIRS are functions of a chosen and a rejected completion (`Pair`), POLICIES of the tokens of sampled completions (`Tokens`). Docstrings and
documentation list these tables, so a new objective is one entry here.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.templates.plain_forms import one_minus_exp

__all__ = ["AlphaDivergence", "ClipCov", "DiscoPOP", "DrGRPO", "KLCov", "Sapo", "TpoL", "Vespo"]

C = TypeVar("C", bound=Callable[..., Any])

EXPONENT = 80.0
"""Exponents are cut here, because float32 overflows at 88; beyond it a term has no gradient."""
FAR = 1e4
"""Beyond ±FAR a sigmoid and its product with its argument are constant in any precision."""


def named(argument: str, given: Any, accepted: Iterable[str], records: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of a choice, and the numbers that it alone reads, checked.

    given: a name, or a record of numbers. accepted: the names. records: by name the type of its record, where it has one.
    """
    for name, record in records.items():
        if isinstance(given, record):
            return name, given.checked()
    checks.one_of(argument, given, tuple(accepted))
    return given, records[given]() if given in records else None


# Pairs


class DiscoPOP(NamedTuple):
    """The `loss_type` "discopop" of `dpo_loss`, with its number.

    Attributes:
        tau: τ above 0.
    """

    tau: float = 0.05

    def checked(self) -> "DiscoPOP":
        return DiscoPOP(checks.number("DiscoPOP.tau", self.tau, 0.0, exclusive=True))


class TpoL(NamedTuple):
    """The `loss_type` "tpo-l" of `tpo_loss`, with its number.

    Attributes:
        gamma: the margin γ.
    """

    gamma: float = 0.5

    def checked(self) -> "TpoL":
        return TpoL(checks.number("TpoL.gamma", self.gamma))


class AlphaDivergence(NamedTuple):
    """The `f_divergence_type` "alpha_divergence" of `dpo_loss`, with its number.

    Attributes:
        alpha: α; 1 is the reverse KL divergence. TRL's f_alpha_divergence_coef.
    """

    alpha: float = 0.5

    def checked(self) -> "AlphaDivergence":
        return AlphaDivergence(checks.number("AlphaDivergence.alpha", self.alpha))


class Pair(NamedTuple):
    """A chosen and a rejected completion.

    chosen, rejected: scores of both; by default s = log π - log π_ref. policy_gap, reference_gap: log-probability of the chosen one less
    that of the rejected one, of each model. beta, epsilon, tau: β, label_smoothing and DiscoPOP's τ.
    """

    chosen: Tensor
    rejected: Tensor
    policy_gap: Tensor
    reference_gap: Tensor
    beta: float
    epsilon: float = 0.0
    tau: float = 0.0

    def h(self) -> Tensor:
        return self.chosen - self.rejected

    def x(self) -> Tensor:
        return self.beta * self.h()


class PairObjective(NamedTuple):
    """An objective over pairs.

    compute: the loss of each pair. smoothed: whether it takes label_smoothing. divergence: whether it takes scores of other f-divergences.
    """

    compute: Callable[[Pair], Tensor]
    formula: str
    paper: str
    use: str
    smoothed: bool = False
    divergence: bool = False


def smoothed(x: Tensor, epsilon: float) -> Tensor:
    """Compute -(1 - ε) ln σ(x) - ε ln σ(-x), without 0 · inf where ε is 0."""
    loss = -F.logsigmoid(x)
    return (1 - epsilon) * loss - epsilon * F.logsigmoid(-x) if checks.nonzero(epsilon) else loss


def hinge(x: Tensor) -> Tensor:
    return F.relu(1 - x)


def _robust(p: Pair) -> Tensor:
    if not checks.nonzero(p.epsilon):
        return smoothed(p.x(), 0.0)
    return (p.epsilon * F.logsigmoid(-p.x()) - (1 - p.epsilon) * F.logsigmoid(p.x())) / (1 - 2 * p.epsilon)


def _exo(p: Pair) -> Tensor:
    x, epsilon = p.x().clamp(-FAR, FAR), torch.as_tensor(p.epsilon, dtype=torch.float64)
    chosen, rejected = torch.log1p(-epsilon).to(x.dtype), torch.log(epsilon).to(x.dtype)
    return torch.sigmoid(x) * (F.logsigmoid(x) - chosen) + torch.sigmoid(-x) * (F.logsigmoid(-x) - rejected)


def _nca(p: Pair) -> Tensor:
    chosen, rejected = p.beta * p.chosen, p.beta * p.rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _sppo(p: Pair) -> Tensor:
    return (p.chosen - 0.5 / p.beta).square() + (p.rejected + 0.5 / p.beta).square()


def _in_order(t: Tensor) -> Tensor:
    return t.flatten().sort().values.view_as(t)


def _aot(p: Pair) -> Tensor:
    return smoothed(p.beta * (_in_order(p.policy_gap) - _in_order(p.reference_gap)), p.epsilon)


def _aot_unpaired(p: Pair) -> Tensor:
    return smoothed(p.beta * (_in_order(p.chosen) - _in_order(p.rejected)), p.epsilon)


def _apo_zero(p: Pair) -> Tensor:
    return torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected)


def _apo_down(p: Pair) -> Tensor:
    return torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.x())


def _discopop(p: Pair) -> Tensor:
    near = p.x().clamp(-FAR, FAR)
    exponential = torch.exp(F.logsigmoid(near / p.tau) - near)  # one exponent, because exp(-x) alone overflows
    return torch.sigmoid(-near / p.tau) * -F.logsigmoid(p.x()) + exponential


PAIRS = {
    "sigmoid": PairObjective(
        lambda p: smoothed(p.x(), p.epsilon),
        "-(1 - ε) ln σ(βh) - ε ln σ(-βh)",
        "arXiv 2305.18290",
        "DPO, the default. With ε above 0 it is conservative DPO, for labels that are wrong at rate ε.",
        smoothed=True,
        divergence=True,
    ),
    "robust": PairObjective(
        _robust,
        "[-(1 - ε) ln σ(βh) + ε ln σ(-βh)] / (1 - 2ε)",
        "arXiv 2403.00409",
        "Labels are swapped at a known rate ε. The mean over the noise is DPO's loss on clean labels.",
        smoothed=True,
        divergence=True,
    ),
    "hinge": PairObjective(
        lambda p: hinge(p.x()),
        "max(0, 1 - βh)",
        "SLiC, arXiv 2305.10425",
        "Pairs that a margin already separates have no weight.",
        divergence=True,
    ),
    "ipo": PairObjective(
        lambda p: (p.h() - 1 / (2 * p.beta)).square(),
        "(h - 1 / (2β))²",
        "arXiv 2310.12036",
        "DPO overfits, because preferences are nearly deterministic: the gap has a target, not only a sign.",
        divergence=True,
    ),
    "exo_pair": PairObjective(
        _exo,
        "KL(σ(±βh) ‖ (1 - ε, ε))",
        "arXiv 2402.00856",
        "Reverse KL to the preferences in place of DPO's forward KL. Needs ε above 0, such as 1e-3.",
        smoothed=True,
        divergence=True,
    ),
    "nca_pair": PairObjective(
        _nca,
        "-ln σ(β s_c) - ½ ln σ(-β s_c) - ½ ln σ(-β s_r)",
        "arXiv 2402.05369",
        "DPO lowers the likelihood of chosen completions, too: here their absolute reward counts.",
    ),
    "bco_pair": PairObjective(
        lambda p: smoothed(p.beta * p.chosen, 0.0) + smoothed(-p.beta * p.rejected, 0.0),
        "-ln σ(β s_c) - ln σ(-β s_r)",
        "arXiv 2404.04656",
        "Each completion is classified on its own, without the paper's reward shift, as in TRL.",
    ),
    "sppo_hard": PairObjective(
        _sppo,
        "(s_c - 1 / (2β))² + (s_r + 1 / (2β))²",
        "arXiv 2405.00675",
        "Self-play with labels of 0 and 1, in iterations on the policy's own completions.",
    ),
    "aot": PairObjective(
        _aot,
        "smoothed(β (sort(π_c - π_r) - sort(ref_c - ref_r)))",
        "arXiv 2406.05882",
        "Compares the distributions of gaps over a batch, not single pairs. Needs large batches.",
        smoothed=True,
    ),
    "aot_unpaired": PairObjective(
        _aot_unpaired,
        "smoothed(β (sort(s_c) - sort(s_r)))",
        "arXiv 2406.05882",
        "The same where chosen and rejected completions belong to different prompts.",
        smoothed=True,
    ),
    "apo_zero": PairObjective(
        _apo_zero,
        "σ(-β s_c) + σ(β s_r)",
        "arXiv 2408.06266",
        "Chosen completions are better than the policy's own.",
    ),
    "apo_down": PairObjective(
        _apo_down,
        "σ(β s_c) + σ(-β (s_c - s_r))",
        "arXiv 2408.06266",
        "Chosen completions are worse than the policy's own: both are made less likely, the rejected ones more.",
    ),
    "discopop": PairObjective(
        _discopop,
        "σ(-βh/τ) (-ln σ(βh)) + σ(βh/τ) e^(-βh)",
        "arXiv 2406.08414",
        "A loss that language models found by search. It is not convex.",
        divergence=True,
    ),
}


def power_score(log_ratio: Tensor, power: float) -> Tensor:
    """Compute (tᵃ - 1) / a of t = exp(log_ratio); at a = 0 its limit ln t, which a = 1e-12 gives to the last digit."""
    if isinstance(power, Tensor):
        power = torch.where(power.abs() < 1e-12, 1e-12, power)
    elif abs(power) < 1e-12:
        power = 1e-12
    return -one_minus_exp(-(power * log_ratio).clamp(max=EXPONENT)) / power


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda s, _: s,
    "forward_kl": lambda s, _: power_score(s, -1.0),
    "js_divergence": lambda s, _: math.log(2) + F.logsigmoid(s),
    "alpha_divergence": lambda s, alpha: power_score(s, alpha - 1),
}
"""Scores f'(t) of t = π / π_ref, from s = ln t and α (arXiv 2309.16240)."""


# Policies


class DrGRPO(NamedTuple):
    """The `loss_type` "dr_grpo" of `grpo_loss`, with its divisor.

    Attributes:
        max_completion_length: at least 1; None is T.
    """

    max_completion_length: int | None = None

    def checked(self) -> "DrGRPO":
        if self.max_completion_length is None:
            return self
        most = checks.whole_number("DrGRPO.max_completion_length", self.max_completion_length)
        if most < 1:
            raise ValueError(f"DrGRPO.max_completion_length must be at least 1, got {most}")
        return DrGRPO(most)


class Sapo(NamedTuple):
    """The `loss_type` "sapo" of `grpo_loss`, with its numbers.

    Attributes:
        temperature_pos: τ where A is above 0, above 0.
        temperature_neg: τ elsewhere, above 0.
    """

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05

    def checked(self) -> "Sapo":
        return Sapo(
            checks.number("Sapo.temperature_pos", self.temperature_pos, 0.0, exclusive=True),
            checks.number("Sapo.temperature_neg", self.temperature_neg, 0.0, exclusive=True),
        )


class Vespo(NamedTuple):
    """The `loss_type` "vespo" of `grpo_loss`, with its numbers.

    Attributes:
        k_pos: k where A is at least 0, of at least 0.
        lambda_pos: λ where A is at least 0, above 0.
        k_neg: k elsewhere, of at least 0.
        lambda_neg: λ elsewhere, above 0.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def checked(self) -> "Vespo":
        return Vespo(
            k_pos=checks.number("Vespo.k_pos", self.k_pos, 0.0),
            lambda_pos=checks.number("Vespo.lambda_pos", self.lambda_pos, 0.0, exclusive=True),
            k_neg=checks.number("Vespo.k_neg", self.k_neg, 0.0),
            lambda_neg=checks.number("Vespo.lambda_neg", self.lambda_neg, 0.0, exclusive=True),
        )


class ClipCov(NamedTuple):
    """The `loss_type` "clip_cov" of `grpo_loss`, with its numbers.

    Attributes:
        ratio: share of tokens that are left out, in [0, 1], at least one.
        lower: least covariance of those tokens; a token's covariance is (A - mean A) (log π - mean log π).
        upper: largest covariance of those tokens.
    """

    ratio: float = 2e-4
    lower: float = 1.0
    upper: float = 5.0

    def checked(self) -> "ClipCov":
        return ClipCov(
            checks.number("ClipCov.ratio", self.ratio, 0.0, 1.0),
            checks.number("ClipCov.lower", self.lower),
            checks.number("ClipCov.upper", self.upper),
        )


class KLCov(NamedTuple):
    """The `loss_type` "kl_cov" of `grpo_loss`, with its numbers.

    Attributes:
        ratio: share of tokens that are penalised, in [0, 1], at least one.
        coef: c, of at least 0: 1 in the paper; verl's configuration has 0.1, as ppo_kl_coef.
    """

    ratio: float = 2e-4
    coef: float = 1.0

    def checked(self) -> "KLCov":
        return KLCov(checks.number("KLCov.ratio", self.ratio, 0.0, 1.0), checks.number("KLCov.coef", self.coef, 0.0))


class PolicyOptions(NamedTuple):
    """Numbers of a policy objective, as grpo_loss explains them. own: the record of those that this objective alone reads."""

    epsilon: float
    epsilon_high: float
    beta: float
    delta: float | None
    own: Any


class Tokens(NamedTuple):
    """The tokens of sampled completions, 0 where they do not count.

    policy: log π, (N, T). log_ratio: log π - log π_old, (N, T). level: the same of the level, (N, T), or (N, 1) for sequences. reference:
    log π_ref, (N, T), if given. advantages: (N, 1) or (N, T). keep: (N, T), tokens that count. weight: (N, T), their weights, if given.
    sampler: (N, 1) or (N, T), the weight of the sampler's correction, if given.
    """

    policy: Tensor
    log_ratio: Tensor
    level: Tensor
    reference: Tensor | None
    advantages: Tensor
    keep: Tensor
    weight: Tensor | None
    sampler: Tensor | None
    options: PolicyOptions

    def counted(self) -> Tensor:
        """Return the tokens that count, but for those of weight 0, which may hold anything."""
        return self.keep if self.sampler is None else self.keep & (self.sampler != 0)

    def weighted(self, t: Tensor) -> Tensor:
        """Return a value of each token times its weight, 0 where it does not count."""
        t = torch.where(self.keep, t, 0.0)
        return t if self.weight is None else t * self.weight

    def sizes(self) -> Tensor:
        """Return the number of tokens of each completion, or the sum of their weights, (N, 1); 1 where there is none."""
        size = (self.keep if self.weight is None else self.weight).sum(1, keepdim=True)
        return torch.where(size == 0, 1, size)

    def mean(self, t: Tensor) -> Tensor:
        """Return the mean over the tokens of each completion, (N, 1)."""
        return self.weighted(t).sum(1, keepdim=True) / self.sizes()

    def of_completions(self) -> Tensor:
        """Return the advantages of the completions, (N, 1): means over their tokens."""
        return self.advantages if self.advantages.shape[1] == 1 else self.mean(self.advantages)


class Policy(NamedTuple):
    """losses: (N, T) or (N, 1), before the KL term. below, above: where the ratio is clipped from below and above, of losses that clip."""

    losses: Tensor
    below: Tensor | None = None
    above: Tensor | None = None


class PolicyObjective(NamedTuple):
    """An objective over sampled completions.

    compute: of tokens. items: "mean" and "sum" of a completion's tokens, divided by the number of completions; "tokens", divided by their
    number; "length", tokens divided by N · max_completion_length. level: whether it takes importance_sampling_level. bounded: whether it
    takes delta. weighs: whether its formula takes the sampler's correction itself.
    """

    compute: Callable[[Tokens], Policy]
    formula: str
    paper: str
    use: str
    items: str = "mean"
    level: bool = False
    bounded: bool = False
    weighs: bool = False


def _clipped_ratio(log_ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """Return the ratio r for which r A is the minimum of r A and clip(r) A. Its gradient is 0 where clipped, even if eʳ overflows."""
    ratio = log_ratio.detach().exp()
    above = (advantages >= 0) & (ratio > high)
    below = (advantages <= 0) & (ratio < low)
    clipped, bound = above | below, torch.where(above, high, torch.where(below, low, ratio))
    if delta is not None:
        far = (advantages < 0) & (ratio > delta)
        clipped, bound = clipped | far, torch.where(far, delta, bound)
    return torch.where(clipped, bound, torch.where(clipped, 0.0, log_ratio).exp())


def _clipped(t: Tokens, delta: float | None) -> Policy:
    low, high = 1 - t.options.epsilon, 1 + t.options.epsilon_high
    ratio = t.level.detach().exp()
    return Policy(-t.advantages * _clipped_ratio(t.level, t.advantages, low, high, delta), ratio < low, ratio > high)


def _ppo(t: Tokens) -> Policy:
    return _clipped(t, t.options.delta)


def _held(weight: Tensor, t: Tokens) -> Tensor:
    """Return -sg(weight) A log π, 0 where weight or A is 0 and log π is -inf."""
    weight = weight.detach() * t.advantages
    return -weight * torch.where((weight == 0) & t.policy.isinf(), 0.0, t.policy)


def _by_sign(positive: Tensor, of_positive: float, of_others: float) -> Tensor:
    """Return one number where `positive`, else the other. positive: 1 or 0, in the dtype of the result."""
    return positive * of_positive + (1 - positive) * of_others


def limited(x: Tensor, low: float, high: float) -> Tensor:
    """Return x.clamp(low, high). Under torch.compile a scheduled number is a tensor of the CPU, which `clamp` refuses beside a GPU's."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def _cispo(t: Tokens) -> Policy:
    low, high, ratio = 1 - t.options.epsilon, 1 + t.options.epsilon_high, t.level.detach().exp()
    return Policy(_held(limited(ratio, low, high), t), ratio < low, ratio > high)


def _sapo(t: Tokens) -> Policy:
    own = t.options.own
    positive = (t.advantages > 0).to(t.policy.dtype)
    temperature = _by_sign(positive, own.temperature_pos, own.temperature_neg)
    ratio = t.level.clamp(max=20.0).exp()  # the gate is flat beyond, where its derivative would be 0 · inf
    return Policy(-t.advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature)


def _vespo(t: Tokens) -> Policy:
    own, least = t.options.own, math.log(1e-8)
    log_weight = t.weighted(torch.where(t.counted(), t.log_ratio.detach(), 0.0).clamp(-20.0, 20.0)).sum(1, keepdim=True)
    if t.sampler is not None:
        log_weight = log_weight + t.sampler.log().clamp(least, 20.0).sum(1, keepdim=True)
    log_weight = log_weight.clamp(least, 20.0)
    positive = (t.advantages >= 0).to(t.policy.dtype)
    k = _by_sign(positive, own.k_pos, own.k_neg)
    rate = _by_sign(positive, own.lambda_pos, own.lambda_neg)
    return Policy(_held(torch.exp(rate + k * log_weight - rate * log_weight.exp()), t))


def _gmpo(t: Tokens) -> Policy:
    low, high = -t.options.epsilon, t.options.epsilon_high
    below, above = t.log_ratio < low, t.log_ratio > high
    bounded = torch.where(t.advantages > 0, limited(t.log_ratio, -math.inf, high), limited(t.log_ratio, low, math.inf))
    ratio = t.mean(torch.where(t.counted() & (t.advantages != 0), bounded, 0.0)).clamp(max=EXPONENT).exp()
    if t.sampler is not None:
        ratio = ratio * (t.sampler if t.sampler.shape[1] == 1 else t.mean(t.sampler.log()).exp())
    return Policy(-ratio * t.of_completions(), below, above)


def _a2po(t: Tokens) -> Policy:
    assert t.reference is not None  # checked with beta
    return Policy((t.options.beta * t.weighted(t.policy - t.reference).sum(1, keepdim=True) - t.of_completions()).square())


def _gpg(t: Tokens) -> Policy:
    return Policy(_held(torch.ones_like(t.policy), t))


def _covariance(t: Tokens) -> Tensor:
    """Return each token's part of the covariance of A and log π over the tokens that count."""
    count = t.counted().sum().clamp(min=1)
    a, logps = t.advantages.detach().expand_as(t.policy), t.policy.detach()
    means = [torch.where(t.counted(), each, 0.0).sum() / count for each in (a, logps)]
    return (a - means[0]) * (logps - means[1])


def _largest(scores: Tensor, among: Tensor, t: Tokens, ratio: float) -> Tensor:
    """Return where the largest scores are, for a share of the tokens that count: at least one, rounded down."""
    most = (t.counted().sum().double() * ratio).floor().clamp(min=1)
    order = torch.where(among, scores, -math.inf).flatten().argsort(descending=True, stable=True)
    return among & (order.argsort().view_as(scores) < most)


def _clip_cov(t: Tokens) -> Policy:
    losses, below, above = _clipped(t, None)
    assert below is not None  # of a loss that clips
    assert above is not None
    covariance, clipped = _covariance(t), (below & (t.advantages < 0)) | (above & (t.advantages > 0))
    own = t.options.own
    among = t.counted() & ~clipped & (covariance > own.lower) & (covariance < own.upper)
    left_out = _largest(torch.rand_like(covariance), among, t, own.ratio)
    return Policy(torch.where(left_out, 0.0, losses), below | left_out, above | left_out)


def _kl_cov(t: Tokens) -> Policy:
    penalised = _largest(_covariance(t), t.counted(), t, t.options.own.ratio)
    penalty = torch.where(penalised, t.options.own.coef * t.log_ratio.abs(), 0.0)
    return Policy(-t.advantages * t.log_ratio.clamp(max=EXPONENT).exp() + penalty)


def _trusted(t: Tokens, trusted: Tensor) -> Policy:
    delta = 20.0 if t.options.delta is None else t.options.delta
    weight = torch.where(trusted, limited(t.log_ratio.detach().exp(), 0.0, delta), 0.0)
    return Policy(_held(weight, t), ~trusted, ~trusted)


def _dppo_tv(t: Tokens) -> Policy:
    policy = t.policy.detach()
    change = policy.exp() - (policy - t.log_ratio.detach()).exp()
    return _trusted(t, torch.where(t.advantages > 0, change <= t.options.epsilon_high, change >= -t.options.epsilon))


def _dppo_kl(t: Tokens) -> Policy:
    policy, log_ratio = t.policy.detach(), t.log_ratio.detach()
    old = policy - log_ratio
    rest, rest_old = -torch.expm1(policy), -torch.expm1(old)
    chosen = torch.where(old == -math.inf, 0.0, old.exp() * -log_ratio)
    kl = chosen + torch.special.xlogy(rest_old, rest_old) - torch.special.xlogy(rest_old, rest)
    more = (kl <= t.options.epsilon_high) | (log_ratio <= 0)
    less = (kl <= t.options.epsilon) | (log_ratio >= 0)
    return _trusted(t, torch.where(t.advantages > 0, more, less))


def _dro(t: Tokens) -> Policy:
    finite = torch.where(t.log_ratio.isinf(), 0.0, torch.ones_like(t.policy))  # the square outgrows the linear part
    return Policy(_held(finite, t) + 0.5 * t.options.beta * t.log_ratio.square())


PPO = "-min(r A, clip(r) A)"
POLICIES = {
    "grpo": PolicyObjective(
        _ppo, PPO, "arXiv 2402.03300", "The default. Long completions weigh as much as short ones.", level=True, bounded=True
    ),
    "bnpo": PolicyObjective(
        _ppo,
        PPO,
        "TRL's name",
        "Each token of the batch weighs the same, divided by the tokens of this call.",
        "tokens",
        level=True,
        bounded=True,
    ),
    "dapo": PolicyObjective(
        _ppo, PPO, "arXiv 2503.14476", "As bnpo; give the tokens of all devices as normalizer.", "tokens", level=True, bounded=True
    ),
    "dr_grpo": PolicyObjective(
        _ppo,
        PPO,
        "arXiv 2503.20783",
        "A constant divisor: no bias by length: DrGRPO(max_completion_length).",
        "length",
        level=True,
        bounded=True,
    ),
    "luspo": PolicyObjective(
        _ppo,
        PPO,
        "arXiv 2602.05261",
        'GSPO without its bias to short completions: with importance_sampling_level="sequence".',
        "sum",
        level=True,
        bounded=True,
    ),
    "cispo": PolicyObjective(
        _cispo,
        "-sg(clip(r)) A ln π",
        "arXiv 2506.13585",
        "No token loses its gradient by clipping: rare tokens of a reasoning model go on learning.",
        "tokens",
        level=True,
    ),
    "sapo": PolicyObjective(
        _sapo,
        "-(4/τ) σ(τ (r - 1)) A",
        "arXiv 2511.20347",
        "A soft gate in place of clipping, for stable training off the policy and of mixtures of experts.",
        level=True,
    ),
    "vespo": PolicyObjective(
        _vespo,
        "-sg(φ(w)) A ln π, φ(w) = wᵏ e^(λ (1 - w)), w = Πₜ rₜ",
        "arXiv 2602.10693",
        "Very stale samples: weights of sequences with bounded variance.",
        "tokens",
        weighs=True,
    ),
    "gmpo": PolicyObjective(
        _gmpo,
        "-(Πₜ clip(rₜ))^(1/|y|) A, clip in ln r",
        "arXiv 2507.20673",
        "Outliers among ratios disturb GRPO. epsilon is in ln r, 0.4 in the paper.",
        weighs=True,
    ),
    "a2po": PolicyObjective(
        _a2po,
        "(β Σₜ ln(π / π_ref) - A)²",
        "A*-PO, arXiv 2505.20686",
        "One completion a prompt, with A = r - V* from offline samples; β is the paper's β₂, about 1e-3.",
    ),
    "gpg": PolicyObjective(_gpg, "-A ln π", "arXiv 2504.02546", "Strictly on the policy: no ratio, no clipping, no reference.", "tokens"),
    "clip_cov": PolicyObjective(
        _clip_cov,
        "as bnpo, 0 for random tokens of high covariance",
        "arXiv 2505.22617",
        "Entropy collapses early. Random: torch.manual_seed repeats it.",
        "tokens",
    ),
    "kl_cov": PolicyObjective(
        _kl_cov,
        "-r A + c |ln r| for the tokens of highest covariance",
        "arXiv 2505.22617",
        "The same, without chance: a penalty on the few tokens that lower entropy most.",
        "tokens",
    ),
    "dppo_tv": PolicyObjective(
        _dppo_tv,
        "-sg(min(r, δ) m) A ln π, m = [±(π - π_old) ≤ ε]",
        "arXiv 2602.04879",
        "Clipping r stops rare tokens and lets frequent ones far: here the change of probability is bounded.",
        "tokens",
        bounded=True,
    ),
    "dppo_kl": PolicyObjective(
        _dppo_kl,
        "the same, m = [KL(π_old ‖ π) ≤ ε] of the token against the rest",
        "arXiv 2602.04879",
        "The same, with the divergence of two outcomes; ε about 0.05.",
        "tokens",
        bounded=True,
    ),
    "dro": PolicyObjective(
        _dro,
        "-A ln π + ½ β (ln r)²",
        "arXiv 2405.19107",
        "Off the policy without ratios: a squared penalty, whose β is `beta`. As in verl, from π_old and by token.",
        "tokens",
    ),
}


OWN_NUMBERS: dict[str, Any] = {"dr_grpo": DrGRPO, "sapo": Sapo, "vespo": Vespo, "clip_cov": ClipCov, "kl_cov": KLCov}
"""The records of the policies that read numbers which no other does."""


def lists(**tables: Mapping[str, PairObjective | PolicyObjective]) -> Callable[[C], C]:
    """Write tables into a docstring, each where its name stands in braces: a line for each objective, with its name and formula."""

    def write(function: C) -> C:
        for table, objectives in tables.items():
            width = max(map(len, objectives)) + 4
            lines = "\n".join(f"{' ' * 8}{f'{name!r}':{width}}{each.formula}" for name, each in objectives.items()).replace("'", '"')
            function.__doc__ = (function.__doc__ or "").replace(f"{' ' * 4}{{{table}}}", lines)
        return function

    return write
