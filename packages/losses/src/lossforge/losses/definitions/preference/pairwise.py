"""Objectives over pairs of a chosen and a rejected completion."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import Empty, Reduction
from lossforge.losses.definitions.preference.common import accurate, objective, reduced, same_shapes
from lossforge.losses.definitions.preference.objectives import (
    DIVERGENCES,
    PAIRS,
    AlphaDivergence,
    DiscoPOP,
    Pair,
    TpoL,
    hinge,
    lists,
    named,
    power_score,
    smoothed,
)

SMOOTHED = tuple(name for name, each in PAIRS.items() if each.smoothed)
WITH_DIVERGENCE = tuple(name for name, each in PAIRS.items() if each.divergence)


def _check_loss_type(loss_type: str, accepted: tuple[str, ...], label_smoothing: float) -> float:
    checks.one_of("loss_type", loss_type, accepted)
    robust = loss_type == "robust"  # whose divisor is 1 - 2 label_smoothing
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 0.5, below=robust)
    if loss_type == "exo_pair" and not checks.nonzero(label_smoothing):
        raise ValueError('label_smoothing must be above 0 with loss_type "exo_pair", which takes its logarithm, such as 1e-3, got 0.0')
    taken = [each for each in (*SMOOTHED, "tpo-l") if each in accepted]
    if checks.nonzero(label_smoothing) and loss_type not in taken:
        takers = " or ".join(f'"{each}"' for each in taken)
        raise ValueError(f"label_smoothing needs loss_type {takers}, got {label_smoothing!r} with {loss_type!r}")
    return label_smoothing


def _log_expm1(a: Tensor) -> Tensor:
    """Compute ln(eᵃ - 1) for a ≥ 0, without overflow."""
    return a + torch.log(-torch.expm1(-a))


def _log_odds_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute -ln σ(ln odds(chosen) - ln odds(rejected)) = ln(1 + (e^-chosen - 1) / (e^-rejected - 1)).

    Where the chosen odds are larger, and may be infinite, the right-hand form is used, because its derivative stays finite at chosen = 0,
    unlike that of the log-odds.
    """
    a, b = -chosen, -rejected
    direct = (a <= b) & (a < 1)
    ratio = torch.expm1(torch.where(direct, a, 0.5)) * torch.exp(-_log_expm1(torch.where(direct, b, 1.0)))
    log_ratio = _log_expm1(torch.where(direct, 1.0, a)) - _log_expm1(torch.where(direct, 1.0, b))
    return torch.where(direct, torch.log1p(ratio), -F.logsigmoid(-log_ratio))


def _check_nll(policy_nll_loss: Tensor | None, alpha_name: str, alpha: float, chosen: Tensor) -> float:
    alpha = checks.number(alpha_name, alpha, 0.0)
    if policy_nll_loss is None:
        return alpha
    checks.floating("policy_nll_loss", policy_nll_loss)
    if policy_nll_loss.ndim and policy_nll_loss.shape != chosen.shape:
        shape, got = tuple(chosen.shape), tuple(policy_nll_loss.shape)
        raise ValueError(f"policy_nll_loss must be 0-d or have the shape of policy_chosen_logps, {shape}, got {got}")
    checks.beside("policy_nll_loss", policy_nll_loss, chosen, "policy_chosen_logps")
    return alpha


def _with_nll(losses: Tensor, alpha: float, policy_nll_loss: Tensor | None, chosen: Tensor) -> Tensor:
    if not checks.nonzero(alpha):
        return losses
    return losses + alpha * (-chosen if policy_nll_loss is None else policy_nll_loss.to(losses.dtype))


@objective("BradleyTerryLoss", "Bradley-Terry loss of a reward model", " The margin is given per call.")
def bradley_terry_loss(
    rewards_chosen: Tensor,  # any shape, usually (N,)
    rewards_rejected: Tensor,  # as rewards_chosen
    margin: float | Tensor | None = None,  # a number, or as rewards_chosen
    label_smoothing: float = 0.0,
    center_rewards_coefficient: float = 0.0,
    reduction: Reduction = "mean",
    *,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the Bradley-Terry loss of a reward model.

    With x = r_c - r_r - m:  L = -(1 - ε) ln σ(x) - ε ln σ(-x) + c (r_c + r_r)²

    Edges: a pair whose rewards are both -inf or both inf has loss nan.

    Source: Bradley and Terry 1952; Christiano et al. arXiv 1706.03741; margin: arXiv 2307.09288; centring: arXiv 2312.09244.

    Args:
        rewards_chosen: (N,), of the chosen completions.
        rewards_rejected: (N,), of the rejected ones.
        margin: m, a number or one for each pair, by which the chosen reward should exceed the other (Llama 2).
        label_smoothing: ε in [0, 0.5], the expected share of swapped labels; the margin is swapped with them. TRL's RewardTrainer has
            none.
        center_rewards_coefficient: c of at least 0, which draws the mean of the rewards to zero.

    Examples:
        >>> chosen, rejected = torch.randn(2, 8, requires_grad=True)
        >>> bradley_terry_loss(chosen, rejected, margin=0.1).backward()
    """
    each = None  # a margin for each pair
    if checks.is_parameter(margin, rewards_chosen) and (margin.ndim or not rewards_chosen.ndim):
        each = margin
    elif margin is not None:
        margin = checks.number("margin", margin)
    chosen, rejected, *rest = accurate(
        *same_shapes(("margin",), rewards_chosen=rewards_chosen, rewards_rejected=rewards_rejected, margin=each)
    )
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 0.5)
    center_rewards_coefficient = checks.number("center_rewards_coefficient", center_rewards_coefficient, 0.0)
    x = chosen - rejected
    if margin is not None:
        x = x - (rest[0] if rest else margin)
    losses = smoothed(x, label_smoothing)
    if checks.nonzero(center_rewards_coefficient):
        losses = losses + center_rewards_coefficient * (chosen + rejected).square()
    return reduced(losses, reduction, normalizer, empty)


@objective("DPOLoss", "Direct preference optimisation")
@lists(PAIRS=PAIRS)
def dpo_loss(
    policy_chosen_logps: Tensor,  # any shape, usually (N,)
    policy_rejected_logps: Tensor,  # as policy_chosen_logps
    reference_chosen_logps: Tensor,  # as policy_chosen_logps
    reference_rejected_logps: Tensor,  # as policy_chosen_logps
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str | DiscoPOP = "sigmoid",
    reduction: Reduction = "mean",
    *,
    f_divergence_type: str | AlphaDivergence = "reverse_kl",
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of direct preference optimisation (DPO), or of an objective over the same log-probabilities.

    With s = log π - log π_ref of a completion, h = s_c - s_r, β and ε = label_smoothing:

    {PAIRS}

    smoothed(x) is -(1 - ε) ln σ(x) - ε ln σ(-x). "aot" and "aot_unpaired" compare sorted values, so an item is a rank of the batch, not a
    pair. The page "Preferences and policies" of the documentation has the sources and says when to use each.

    f_divergence_type: what keeps the policy near the reference (arXiv 2309.16240). s becomes f'(t) of t = π / π_ref:

        "reverse_kl"        ln t
        "forward_kl"        1 - 1 / t
        "js_divergence"     ln 2t - ln(1 + t)
        "alpha_divergence"  (t^(α - 1) - 1) / (α - 1)

    Conservative ("sigmoid" with ε) and robust DPO differ: with labels swapped at rate ε, conservative DPO fits the noisy labels (its
    minimum is at βh = ln((1 - ε) / ε)), while robust DPO's mean over the noise is plain DPO's loss on clean labels. Robust DPO has no lower
    bound.

    Edges: where a policy gives -inf to the chosen completion, the loss is inf ("robust" too) and the gradient finite (for "ipo" -inf).
    Where it gives -inf to the rejected one, the loss has its limit, 0 without smoothing. Where policy and reference both give -inf, it is
    nan. "nca_pair", "bco_pair" and "sppo_hard" are inf, too, where the policy gives -inf to the chosen one; "exo_pair", "apo_zero" and
    "apo_down" are bounded. Exponents of f-divergences are cut at 80: beyond it a score has no gradient, as TRL's alpha divergence.

    The implicit rewards are β (log π - log π_ref).

    Args:
        beta: β above 0, in the papers also τ for "ipo" and 1 / η for "sppo_hard".
        label_smoothing: ε in [0, 0.5], below 0.5 for "robust", above 0 for "exo_pair", 0 for losses without ε (TRL ignores it there).
        loss_type: a name of the table. For "ipo" TRL's trainer passes means over tokens; the paper and the authors of DPO pass sums: choose
            one. TRL's "sigmoid_norm" is "sigmoid" of means. DiscoPOP(tau) in place of "discopop" gives its τ.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence"; other than "reverse_kl" only with "sigmoid",
            "robust", "hinge", "ipo", "exo_pair" and "discopop". AlphaDivergence(alpha) in place of "alpha_divergence" gives its α.

    Examples:
        >>> chosen, rejected = -torch.rand(2, 8, requires_grad=True)
        >>> dpo_loss(chosen, rejected, -torch.rand(8), -torch.rand(8), beta=0.1).backward()
    """
    given = same_shapes(
        policy_chosen_logps=policy_chosen_logps,
        policy_rejected_logps=policy_rejected_logps,
        reference_chosen_logps=reference_chosen_logps,
        reference_rejected_logps=reference_rejected_logps,
    )
    beta = checks.number("beta", beta, 0.0, exclusive=True)
    loss_type, own = named("loss_type", loss_type, PAIRS, {"discopop": DiscoPOP})
    label_smoothing = _check_loss_type(loss_type, tuple(PAIRS), label_smoothing)
    f_divergence_type, of_divergence = named("f_divergence_type", f_divergence_type, DIVERGENCES, {"alpha_divergence": AlphaDivergence})
    if f_divergence_type != "reverse_kl" and loss_type not in WITH_DIVERGENCE:
        takers = ", ".join(f'"{each}"' for each in WITH_DIVERGENCE)
        raise ValueError(f'f_divergence_type other than "reverse_kl" needs a loss_type of {takers}, got {loss_type!r}')
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = accurate(*given)
    score = DIVERGENCES[f_divergence_type]
    alpha = of_divergence.alpha if isinstance(of_divergence, AlphaDivergence) else 0.0
    pair = Pair(
        chosen=score(policy_chosen - reference_chosen, alpha),
        rejected=score(policy_rejected - reference_rejected, alpha),
        policy_gap=policy_chosen - policy_rejected,
        reference_gap=reference_chosen - reference_rejected,
        beta=beta,
        epsilon=label_smoothing,
        tau=own.tau if isinstance(own, DiscoPOP) else 0.0,
    )
    return reduced(PAIRS[loss_type].compute(pair), reduction, normalizer, empty)


WITHOUT_REFERENCE = ("sigmoid", "hinge", "ipo")


def _without_reference(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float, loss_type: str) -> Tensor:
    gap = chosen - rejected
    return PAIRS[loss_type].compute(Pair(chosen, rejected, gap, torch.zeros_like(gap), beta, label_smoothing))


@objective("CPOLoss", "Contrastive preference optimisation")
def cpo_loss(
    policy_chosen_logps: Tensor,  # any shape, usually (N,)
    policy_rejected_logps: Tensor,  # as policy_chosen_logps
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    cpo_alpha: float = 1.0,
    policy_nll_loss: Tensor | None = None,  # 0-d, or as policy_chosen_logps
    reduction: Reduction = "mean",
    *,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of contrastive preference optimisation (CPO): DPO with a uniform reference, and the chosen completion's negative
    log-likelihood.

    With h = log π_c - log π_r and ε = label_smoothing:  L = ℓ(h) + α NLL, where ℓ is

        "sigmoid"  -(1 - ε) ln σ(βh) - ε ln σ(-βh)
        "hinge"    max(0, 1 - βh)
        "ipo"      (h - 1 / (2β))²

    Source: arXiv 2401.08417.

    Args:
        beta: β above 0.
        label_smoothing: ε in [0, 0.5], 0 unless loss_type is "sigmoid".
        loss_type: "sigmoid", "hinge" or "ipo".
        cpo_alpha: α of at least 0.
        policy_nll_loss: NLL, one for each pair, or a 0-d tensor that is added to each pair's loss. By default the paper's, -log π_c, summed
            over tokens. TRL's trainer uses a mean over all tokens of the batch: pass it to match TRL.

    Examples:
        >>> chosen, rejected = -torch.rand(2, 8, requires_grad=True)
        >>> cpo_loss(chosen, rejected).backward()
    """
    chosen, rejected = accurate(*same_shapes(policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps))
    beta = checks.number("beta", beta, 0.0, exclusive=True)
    label_smoothing = _check_loss_type(loss_type, WITHOUT_REFERENCE, label_smoothing)
    cpo_alpha = _check_nll(policy_nll_loss, "cpo_alpha", cpo_alpha, policy_chosen_logps)
    losses = _without_reference(chosen, rejected, beta, label_smoothing, loss_type)
    losses = _with_nll(losses, cpo_alpha, policy_nll_loss, chosen)
    return reduced(losses, reduction, normalizer, empty)


@objective("SimPOLoss", "Simple preference optimisation")
def simpo_loss(
    policy_chosen_logps: Tensor,  # any shape, usually (N,): means over tokens
    policy_rejected_logps: Tensor,  # as policy_chosen_logps
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reduction: Reduction = "mean",
    *,
    alpha: float = 0.0,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of simple preference optimisation (SimPO): mean log-probabilities as rewards, a target margin, no reference model.

    With x = β (log π_c / |y_c| - log π_r / |y_r|) - γ and ε = label_smoothing:

        "sigmoid"  -(1 - ε) ln σ(x) - ε ln σ(-x)
        "hinge"    max(0, 1 - x)

    alpha: AlphaPO (arXiv 2501.03884). The reward log p̄ of a completion, p̄ = exp(log π / |y|), becomes (1 - p̄^-α) / α, which has it as
    limit at α = 0. A small α above 0, such as 0.25, makes likely completions count less; one below 0 the reverse. Exponents are cut at 80.

    Source: arXiv 2405.14734.

    Args:
        policy_chosen_logps: (N,), means over tokens: `sequence_logps` with average_log_prob=True.
        policy_rejected_logps: (N,), means over tokens too.
        beta: β above 0.
        gamma: the margin γ itself. The authors' code takes gamma_beta_ratio = γ / β (0.25) and beta 2.0, the defaults here; TRL has γ as
            simpo_gamma (0.5) and beta 0.1.
        label_smoothing: ε in [0, 0.5], 0 with "hinge".
        alpha: α of AlphaPO; 0 is SimPO.
        loss_type: "sigmoid" or "hinge". CPO-SimPO adds a negative log-likelihood: add cpo_alpha times it to this loss.

    Examples:
        >>> chosen, rejected = -torch.rand(2, 8, requires_grad=True)
        >>> simpo_loss(chosen, rejected).backward()
    """
    chosen, rejected = accurate(*same_shapes(policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps))
    beta = checks.number("beta", beta, 0.0, exclusive=True)
    gamma = checks.number("gamma", gamma)
    label_smoothing = _check_loss_type(loss_type, ("sigmoid", "hinge"), label_smoothing)
    alpha = checks.number("alpha", alpha)
    if checks.nonzero(alpha):
        chosen, rejected = power_score(chosen, -alpha), power_score(rejected, -alpha)
    x = beta * (chosen - rejected) - gamma
    return reduced(hinge(x) if loss_type == "hinge" else smoothed(x, label_smoothing), reduction, normalizer, empty)


@objective("TPOLoss", "Triple preference optimisation")
def tpo_loss(
    policy_chosen_logps: Tensor,  # any shape, usually (N,)
    policy_rejected_logps: Tensor,  # as policy_chosen_logps
    policy_gold_logps: Tensor,  # as policy_chosen_logps
    beta: float = 0.01,
    label_smoothing: float = 0.0,
    loss_type: str | TpoL = "sigmoid",
    tpo_alpha: float = 1.0,
    reduction: Reduction = "mean",
    *,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of triple preference optimisation (TPO): a preference without reference model, and the likelihood of a third, gold
    completion.

    With h = log π_c - log π_r and ε = label_smoothing:  L = ℓ(h) - α log π_gold, where ℓ is

        "sigmoid"  -(1 - ε) ln σ(βh) - ε ln σ(-βh)
        "hinge"    max(0, 1 - βh)
        "ipo"      (h - 1 / (2β))²
        "tpo-l"    -(1 - ε) ln σ(βh - γ) - ε ln σ(γ - βh)

    Source: arXiv 2405.16681.

    Args:
        policy_chosen_logps: (N,), in nats, summed over tokens; means over tokens for "tpo-l" and, as in TRL, for "ipo".
        policy_rejected_logps: (N,), in the same way.
        policy_gold_logps: (N,), of the gold completions. TRL's trainer has the mean over all their tokens of the batch: give that mean for
            each, to match it.
        beta: β above 0.
        label_smoothing: ε in [0, 0.5], 0 with "hinge" and "ipo".
        loss_type: "sigmoid", "hinge", "ipo" or "tpo-l". TpoL(gamma) in place of "tpo-l" gives its γ, by default 0.5.
        tpo_alpha: α of at least 0.

    Examples:
        >>> chosen, rejected, gold = -torch.rand(3, 8, requires_grad=True)
        >>> tpo_loss(chosen, rejected, gold).backward()
    """
    chosen, rejected, gold = accurate(
        *same_shapes(
            policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps, policy_gold_logps=policy_gold_logps
        )
    )
    beta = checks.number("beta", beta, 0.0, exclusive=True)
    loss_type, own = named("loss_type", loss_type, (*WITHOUT_REFERENCE, "tpo-l"), {"tpo-l": TpoL})
    label_smoothing = _check_loss_type(loss_type, (*WITHOUT_REFERENCE, "tpo-l"), label_smoothing)
    tpo_alpha = checks.number("tpo_alpha", tpo_alpha, 0.0)
    if isinstance(own, TpoL):
        losses = smoothed(beta * (chosen - rejected) - own.gamma, label_smoothing)
    else:
        losses = _without_reference(chosen, rejected, beta, label_smoothing, loss_type)
    if checks.nonzero(tpo_alpha):
        losses = losses - tpo_alpha * gold
    return reduced(losses, reduction, normalizer, empty)


@objective("ORPOLoss", "Odds-ratio preference optimisation")
def orpo_loss(
    policy_chosen_logps: Tensor,  # any shape, usually (N,): means over tokens
    policy_rejected_logps: Tensor,  # as policy_chosen_logps
    beta: float = 0.1,
    alpha: float = 1.0,
    policy_nll_loss: Tensor | None = None,  # 0-d, or as policy_chosen_logps
    reduction: Reduction = "mean",
    *,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of odds-ratio preference optimisation (ORPO).

    With log p the mean log-probability of a token and odds = p / (1 - p):  L = α NLL - β ln σ(ln odds_c - ln odds_r)

    Edges: exact up to p = 1. At p_c = 1 loss and gradient are finite. At p_r = 1 the odds-ratio term is inf. Where both are 1, or both
    are 0 (-inf), or log p_r is above 0, it is nan. A log p_c slightly above 0, from rounding, has the smooth continuation. If only p_r is 0
    the odds-ratio term is 0; if only p_c is 0 it is inf.

    Source: arXiv 2403.07691.

    Args:
        policy_chosen_logps: (N,), at most 0, means over tokens: `sequence_logps` with average_log_prob=True.
        policy_rejected_logps: (N,), at most 0, means over tokens too.
        beta: β of at least 0, λ in the paper.
        alpha: α of at least 0, the paper's 1; 0 for the odds-ratio term alone.
        policy_nll_loss: NLL, one for each pair, or a 0-d tensor that is added to each pair's loss. By default the paper's, -log p_c. TRL's
            trainer uses a mean over all tokens of the batch, prompts included: pass it to match TRL.

    Examples:
        >>> chosen, rejected = -torch.rand(2, 8, requires_grad=True)
        >>> orpo_loss(chosen, rejected).backward()
    """
    chosen, rejected = accurate(*same_shapes(policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps))
    beta = checks.number("beta", beta, 0.0)
    alpha = _check_nll(policy_nll_loss, "alpha", alpha, policy_chosen_logps)
    losses = _with_nll(beta * _log_odds_loss(chosen, rejected), alpha, policy_nll_loss, chosen)
    return reduced(losses, reduction, normalizer, empty)
