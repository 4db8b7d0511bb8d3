"""Group-relative policy optimisation and its relatives: objectives over the tokens of sampled completions, and PPO's value loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import Empty, PolicyOutput, Reduction, ValueOutput
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.definitions.preference.common import accurate, check_mask, counted, objective, reduced, same_shapes
from lossforge.losses.definitions.preference.kl import KLPenalty, estimated
from lossforge.losses.definitions.preference.objectives import (
    OWN_NUMBERS,
    POLICIES,
    ClipCov,
    DrGRPO,
    KLCov,
    Policy,
    PolicyObjective,
    PolicyOptions,
    Sapo,
    Tokens,
    Vespo,
    lists,
    named,
)
from lossforge.losses.definitions.preference.sampler import SamplerCorrection, weights

__all__ = ["PolicyLossOutput", "ValueLossOutput"]

LEVELS = ("token", "sequence", "sequence_token")


class PolicyLossOutput(Outputs):
    """What `grpo_loss` returns with outputs: the loss and these alone, in this order. All but the loss are without gradient, for logs.

    Attributes:
        loss: the loss, reduced as asked for.
        clipped_low: fraction of tokens (completions, with the ratio of a sequence) with A < 0 whose ratio is below its bound, 0-d; 0 for
            losses that do not clip.
        clipped_high: fraction with A > 0 whose ratio is above its bound, 0-d. "dppo_tv", "dppo_kl" and "clip_cov" also count the tokens
            that they leave out, by the sign of A in one of both.
        kl: mean over tokens of the estimate of KL(π ‖ π_ref), 0-d; it needs ref_per_token_logps.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor


class ValueLossOutput(Outputs):
    """What `ppo_value_loss` returns with outputs.

    Attributes:
        loss: the loss, reduced as asked for.
        clipped: fraction of tokens whose clipped error is the larger one, 0-d, without gradient.
    """

    loss: Tensor
    clipped: Tensor


@objective("GRPOLoss", "Group-relative policy optimisation", " For type checkers a call gives a Tensor, or with outputs PolicyLossOutput.")
@lists(POLICIES=POLICIES)
def grpo_loss(
    per_token_logps: Tensor,  # (N, T)
    advantages: Tensor,  # (N,), (N, 1) or (N, T)
    old_per_token_logps: Tensor | None = None,  # (N, T)
    ref_per_token_logps: Tensor | None = None,  # (N, T)
    mask: Tensor | None = None,  # (N, T)
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float | KLPenalty = 0.0,
    importance_sampling_level: str = "token",
    loss_type: str | DrGRPO | Sapo | Vespo | ClipCov | KLCov = "grpo",
    delta: float | None = None,
    reduction: Reduction = "mean",
    *,
    importance_sampling_ratio: Tensor | SamplerCorrection | None = None,  # (N, T) or (N, 1)
    outputs: Sequence[PolicyOutput] = (),
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor | PolicyLossOutput:
    """Compute the loss of group-relative policy optimisation (GRPO), or of another objective over sampled completions.

    Per token t of completion i, with q = log π_ref - log π, r = π / π_old and A = Aᵢₜ:

        lᵢₜ = ℓ(r, A) + β k(q),  k = e^q - q - 1, or another estimate of KL(π ‖ π_ref) by KLPenalty

    loss_type: ℓ, where clip is to [1 - ε, 1 + ε_high], sg lets no gradient through, τ, k and λ are
    those of the sign of A, and c is KLCov's coef:

    {POLICIES}

    It also says how tokens are weighted: what the items are, and the divisor of their sum in the mean. `normalizer` replaces the divisor;
    reduction "none" returns the items:

        "grpo", "sapo", "gmpo", "a2po"  completions, means over tokens, (N,)   divisor: N
        "luspo"                         completions, sums over tokens, (N,)    divisor: N
        "dr_grpo"                       tokens, (N, T)                         divisor: N max_completion_length
        the other ones                  tokens, (N, T)                         divisor: tokens that count

    The page "Preferences and policies" of the documentation has the sources and says when to use each. "grpo" weights the tokens of long
    completions less. Dr. GRPO's constant divisor avoids that. Its paper also does not divide advantages by their standard deviation; this
    is up to the caller, who passes the advantages. DAPO's batch spans devices: give its number of tokens as normalizer. A completion
    without tokens has loss 0 and counts in N, as in TRL.

    importance_sampling_level: "token", r = π / π_old of the token; "sequence", r = s = (π(y) / π_old(y))^(1 / |y|), shared by its tokens;
    "sequence_token", r = sg(s) π / sg(π) of the token, which differs from "sequence" where the tokens of a completion differ in A.

    Edges: the estimate of KL, e^q - q - 1, is inf from a gap q of 89 nats on, and its gradient -inf, as TRL's: one such token ends a
    training. `KLPenalty` keeps q and the estimate within bounds: those of verl and NeMo RL are clamp=20, clamp_estimate=10. Where r is
    clipped, or A is 0, the policy gradient is 0 even if r overflows. Where log π is -inf and its factor 0, ℓ is 0. If no token counts, a
    divisor of tokens gives nan, or 0 with empty="zero" (TRL: 0). Tokens whose importance_sampling_ratio is 0 have ℓ = 0, whatever they
    hold. They count in the divisor and, as in TRL, in the shares of outputs and in the r of a sequence, but not in the w of "vespo" nor in
    covariances.

    Args:
        per_token_logps: (N, T), in nats.
        advantages: (N,), (N, 1) or (N, T), one for each completion or token. "a2po" has one for a completion, r - V*, and "gmpo" one that
            multiplies; of tokens they take the mean. "gmpo" clips each token by the sign of its own.
        old_per_token_logps: (N, T), of the policy that sampled the completions. None: of the current policy; r is 1, with its gradient.
        ref_per_token_logps: (N, T), needed where beta > 0 (but for "dro"), otherwise for the output "kl" alone.
        mask: (N, T), bool or integer, non-zero where a token counts (TRL's completion_mask). Tokens that do not count may hold any value,
            also nan. Floats are weights of at least 0: of a token's loss, and in every sum and mean over tokens, the divisor and r of a
            sequence included.
        epsilon: in [0, 1]; 1 gives no lower bound. For "gmpo" a bound of ln r, for "dppo_tv" and "dppo_kl" of the divergence.
            A loss_type without a clip reads neither this nor epsilon_high.
        epsilon_high: of at least 0, default epsilon (DAPO takes 0.28). TRL's "cispo" takes 1 + epsilon_high by this name, and has no lower
            bound.
        beta: β of at least 0, default TRL's 0; 0.04 in the paper. "a2po" and "dro" need it above 0, as part of ℓ, and have no KL term.
            KLPenalty(β, estimator=…, clamp=…, …) says how KL is estimated.
        importance_sampling_level: "token"; "sequence": GSPO (arXiv 2507.18071), with "grpo" and an epsilon near 3e-4; or "sequence_token":
            GSPO-token of the same paper, verl's "gspo". The last two only with the four first ones, "luspo", "cispo" and "sapo".
        loss_type: a name of the table. A record in its place gives the numbers that this objective alone reads: DrGRPO, Sapo, Vespo,
            ClipCov, KLCov.
        delta: above 1: an upper bound on r where A < 0, where r is otherwise unbounded (two-sided clipping, arXiv 2505.07291, or dual clip,
            verl's clip_ratio_c). Below 1 + epsilon_high TRL's delta differs: it bounds r where A > 0, and 1 + epsilon_high does
            where A < 0. For "dppo_tv" and "dppo_kl" the largest weight, default 20.
        importance_sampling_ratio: (N, T) or (N, 1), of at least 0, π_old / π_sampler of an inference engine, truncated or masked as the
            trainer has it; or SamplerCorrection(logps of the sampler, mode=…), which computes it. It multiplies ℓ and not the KL term;
            "vespo" takes it into w, "gmpo" its geometric mean. It has no gradient.
        outputs: names of what to give as well, in this order: "clipped_low" and "clipped_high", the fractions of clipped ratios, and "kl",
            the mean estimate of KL. All are without gradient, for logs.

    Returns:
        a scalar, in float32 (float64 for float64); with reduction "none" the items. With outputs PolicyLossOutput.

    Examples:
        >>> logps = -torch.rand(4, 12, requires_grad=True)
        >>> grpo_loss(logps, torch.randn(4), mask=torch.ones(4, 12, dtype=torch.bool)).backward()
    """
    loss_type, own = named("loss_type", loss_type, POLICIES, OWN_NUMBERS)
    objective, asked = POLICIES[loss_type], PolicyLossOutput.asked(outputs)
    given = same_shapes(
        ("old_per_token_logps", "ref_per_token_logps"),
        per_token_logps=per_token_logps,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
    )
    checks.fits("per_token_logps", per_token_logps, per_token_logps.ndim == 2, "have shape (N, T)")
    _check_advantages(advantages, per_token_logps)
    check_mask(mask, "per_token_logps", per_token_logps)
    given_sampler = _check_sampler(importance_sampling_ratio, per_token_logps, loss_type)
    checks.one_of("importance_sampling_level", importance_sampling_level, LEVELS)
    if importance_sampling_level != "token" and not objective.level:
        takers = ", ".join(f'"{name}"' for name, each in POLICIES.items() if each.level)
        raise ValueError(f'importance_sampling_level "{importance_sampling_level}" needs a loss_type of {takers}, got {loss_type!r}')
    epsilon = checks.number("epsilon", epsilon, 0.0, 1.0)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    epsilon_high = checks.number("epsilon_high", epsilon_high, 0.0)
    if delta is not None:
        if not objective.bounded:
            takers = ", ".join(f'"{name}"' for name, each in POLICIES.items() if each.bounded)
            raise ValueError(f"delta needs a loss_type of {takers}, got {loss_type!r}: leave it at None")
        delta = checks.number("delta", delta, 1.0, exclusive=True)
    penalty = _check_penalty(beta, loss_type, ref_per_token_logps, "kl" in outputs)
    options = PolicyOptions(epsilon=epsilon, epsilon_high=epsilon_high, beta=penalty.beta, delta=delta, own=own)
    length = (own.max_completion_length if isinstance(own, DrGRPO) else None) or per_token_logps.shape[1]

    advantages, *logps = accurate(advantages, *given)
    keep, weight = counted(mask, logps[0])
    logps = [torch.where(keep, t, 0.0) for t in logps]
    advantages = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    advantages = torch.where(keep, advantages, 0.0) if advantages.shape == keep.shape else advantages
    policy, reference = logps[0], None if ref_per_token_logps is None else logps[-1]
    old = policy.detach() if old_per_token_logps is None else logps[1]
    log_ratio = policy - old
    tokens = Tokens(policy, log_ratio, log_ratio, reference, advantages, keep, weight, None, options)
    if importance_sampling_level != "token":
        tokens = tokens._replace(level=_of_sequence(tokens, importance_sampling_level))
    if isinstance(given_sampler, SamplerCorrection):
        tokens = tokens._replace(sampler=weights(given_sampler, tokens, old))
    elif given_sampler is not None:
        tokens = tokens._replace(sampler=given_sampler.to(policy.dtype))
    if tokens.sampler is not None and tokens.sampler.shape == keep.shape:
        tokens = tokens._replace(sampler=torch.where(keep, tokens.sampler, 1.0))
    computed = _corrected(objective, tokens)
    losses, kl = computed.losses, None
    in_loss = checks.nonzero(options.beta) and loss_type not in WITHIN
    if reference is not None and (in_loss or "kl" in outputs):
        kl = estimated(penalty, policy, reference, tokens.level)
        if in_loss:
            losses = losses + options.beta * kl
    losses = tokens.weighted(losses)
    if objective.items == "mean":
        losses = losses.sum(1) / tokens.sizes().squeeze(1)
    elif objective.items == "sum":
        losses = losses.sum(1)
    items: int | Tensor = len(per_token_logps) * (length if objective.items == "length" else 1)
    if objective.items == "tokens":
        items = (keep if weight is None else weight).sum()
    loss = reduced(losses, reduction, normalizer, empty, items)
    return _with_stats(asked, loss, computed, kl, tokens) if any(asked) else loss


WITHIN = ("a2po", "dro")
"""Policies whose formula has beta itself, without an estimate of KL."""


def _check_advantages(advantages: Tensor, x: Tensor) -> None:
    checks.floating("advantages", advantages)
    if advantages.shape not in (x.shape, x.shape[:1], (len(x), 1)):
        shape = tuple(x.shape)
        raise ValueError(f"advantages must have shape {shape[:1]}, {(len(x), 1)} or {shape}, got {tuple(advantages.shape)}")
    checks.beside("advantages", advantages, x, "per_token_logps")


def _check_sampler(ratio: Tensor | SamplerCorrection | None, x: Tensor, loss_type: str) -> Tensor | SamplerCorrection | None:
    if ratio is None:
        return None
    if loss_type == "a2po":
        raise ValueError('importance_sampling_ratio must be None with loss_type "a2po", which has no ratio')
    if isinstance(ratio, SamplerCorrection):
        return ratio.checked(x)
    checks.floating_beside("importance_sampling_ratio", ratio, x, "per_token_logps")
    checks.without_gradient("importance_sampling_ratio", ratio)
    if ratio.shape not in (x.shape, (len(x), 1)):
        raise ValueError(f"importance_sampling_ratio must have shape {tuple(x.shape)} or {(len(x), 1)}, got {tuple(ratio.shape)}")
    return ratio


def _check_penalty(beta: float | KLPenalty, loss_type: str, reference: Tensor | None, wanted: bool) -> KLPenalty:
    """Return the coefficient of KL and how it is estimated. wanted: whether the estimate is an output."""
    penalty = (beta if isinstance(beta, KLPenalty) else KLPenalty(beta)).checked()
    beta = penalty.beta
    if loss_type in WITHIN and not checks.nonzero(beta):
        raise ValueError(f"beta must be above 0 with loss_type {loss_type!r}, got {beta!r}")
    if checks.nonzero(beta) and reference is None and loss_type != "dro":
        raise ValueError(f"ref_per_token_logps must be given where beta is above 0, got None with beta={beta!r}")
    if wanted and reference is None:
        raise ValueError('ref_per_token_logps must be given for outputs "kl", got None')
    if loss_type in WITHIN and not wanted and penalty.changes_estimate():
        raise ValueError(f'KLPenalty\'s estimate of KL needs a loss_type other than {loss_type!r}, or outputs "kl"')
    return penalty


def _of_sequence(t: Tokens, level: str) -> Tensor:
    """Return ln r of sequences (N, 1), or that of tokens (N, T) which have the value of their sequence and a gradient of their own."""
    mean = t.mean(t.log_ratio)
    if level == "sequence":
        return mean
    policy = torch.where(t.policy.isinf(), 0.0, t.policy)
    return mean.detach() + (policy - policy.detach())


def _corrected(objective: PolicyObjective, t: Tokens) -> Policy:
    """Compute an objective, multiplied by the sampler's correction. Where that is 0, a token is a constant, and its loss 0."""
    if t.sampler is None:
        return objective.compute(t)
    nothing = ~t.counted()
    of_level = nothing if t.level.shape == nothing.shape else nothing.all(1, keepdim=True)
    held = {"policy": nothing, "log_ratio": nothing, "level": of_level, "advantages": nothing}
    constant: dict[str, Any] = {name: torch.where(where, getattr(t, name).detach(), getattr(t, name)) for name, where in held.items()}
    computed = objective.compute(t._replace(**constant))
    losses = computed.losses if objective.weighs else t.sampler * computed.losses
    return computed._replace(losses=torch.where(nothing, 0.0, losses))


def _with_stats(asked: list[bool], loss: Tensor, computed: Policy, kl: Tensor | None, t: Tokens) -> PolicyLossOutput:
    def fraction(where: Tensor | None, sign: Tensor) -> Tensor:
        if where is None:
            return torch.zeros_like(loss, dtype=t.policy.dtype).sum()
        where = where & sign
        if where.shape[1] == 1 != t.keep.shape[1]:
            return where.to(t.policy.dtype).sum() / max(len(where), 1)
        return _mean(where.to(t.policy.dtype), t.keep, t.weight)

    low, high, wants_kl = asked
    below = fraction(computed.below, t.advantages < 0) if low else None
    above = fraction(computed.above, t.advantages > 0) if high else None
    kl = _mean(kl.detach(), t.keep, t.weight) if wants_kl and kl is not None else None
    return PolicyLossOutput.of([loss, below, above, kl])


def _mean(t: Tensor, keep: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean over the tokens that count, 0 if there are none."""
    t = torch.where(keep, t, 0.0)
    size = (keep if weight is None else weight).sum()
    return (t if weight is None else t * weight).sum() / torch.where(size == 0, 1, size)


@objective("PPOValueLoss", "Clipped value loss of PPO", " For type checkers a call gives a Tensor, or with outputs ValueLossOutput.")
def ppo_value_loss(
    values: Tensor,  # any shape, usually (N, T)
    returns: Tensor,  # as values
    old_values: Tensor,  # as values
    mask: Tensor | None = None,  # as values
    cliprange_value: float = 0.2,
    reduction: Reduction = "mean",
    *,
    outputs: Sequence[ValueOutput] = (),
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor | ValueLossOutput:
    """Compute the value loss of proximal policy optimisation (PPO), whose steps are clipped.

    With V_c = V_old + clip(V - V_old, -c, c):  L = ½ max((V - R)², (V_c - R)²)

    The mean divides by the number of tokens that count. "none" gives one loss a token.

    Source: arXiv 1707.06347 and OpenAI's baselines; the same as verl's. TRL's and OpenAI's coefficient vf_coef is up to the caller.

    Args:
        values: V, (N, T), of the value head that learns.
        returns: R, (N, T), such as advantages + values of generalised advantage estimation.
        old_values: V_old, (N, T), of the value head when the completions were sampled.
        mask: (N, T), bool or integer, non-zero where a token counts. Other tokens may hold any value, also nan. Floats are weights of at
            least 0, whose sum the mean divides by.
        cliprange_value: c above 0.
        outputs: names of what to give as well: "clipped", the fraction of clipped tokens, without gradient.

    Returns:
        a scalar, in float32 (float64 for float64); with reduction "none" one value a token. With outputs ValueLossOutput.

    Examples:
        >>> values = torch.randn(4, 12, requires_grad=True)
        >>> ppo_value_loss(values, torch.randn(4, 12), torch.randn(4, 12)).backward()
    """
    given, asked = same_shapes(values=values, returns=returns, old_values=old_values), ValueLossOutput.asked(outputs)
    check_mask(mask, "values", values)
    bound = checks.number("cliprange_value", cliprange_value, 0.0, exclusive=True)
    computed = accurate(*given)
    keep, weight = counted(mask, computed[0])
    value, target, old = (torch.where(keep, t, 0.0) for t in computed)
    plain = (value - target).square()
    clipped = (torch.maximum(torch.minimum(value, old + bound), old - bound) - target).square()
    losses = 0.5 * torch.maximum(plain, clipped)
    losses = losses if weight is None else losses * weight
    loss = reduced(losses, reduction, normalizer, empty, (keep if weight is None else weight).sum())
    return ValueLossOutput.of([loss, _mean((clipped > plain).to(loss.dtype), keep, weight)]) if any(asked) else loss
