"""Objectives over pairs of a chosen and a rejected completion."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.definitions.preference.common import accurate, objective, reduced, same_shapes
from lossforge.losses.option_types import Empty, Reduction


def _check_loss_type(loss_type: str, accepted: tuple[str, ...], label_smoothing: float) -> float:
    checks.one_of("loss_type", loss_type, accepted)
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 0.5)
    if loss_type == "robust" and not isinstance(label_smoothing, Tensor) and label_smoothing == 0.5:
        raise ValueError('label_smoothing must be below 0.5 with loss_type "robust", whose divisor is 1 - 2 label_smoothing, got 0.5')
    if checks.nonzero(label_smoothing) and loss_type not in ("sigmoid", "robust"):
        raise ValueError(f'label_smoothing needs loss_type "sigmoid" or "robust", got {label_smoothing!r} with {loss_type!r}')
    return label_smoothing


def _smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - ε) ln σ(x) - ε ln σ(-x), without 0 · inf where ε is 0."""
    loss = -F.logsigmoid(x)
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-x) if checks.nonzero(label_smoothing) else loss


def _objective(x: Tensor, loss_type: str, label_smoothing: float) -> Tensor:
    if loss_type == "hinge":
        return F.relu(1 - x)
    if loss_type == "robust" and checks.nonzero(label_smoothing):
        return (label_smoothing * F.logsigmoid(-x) - (1 - label_smoothing) * F.logsigmoid(x)) / (1 - 2 * label_smoothing)
    return _smoothed(x, label_smoothing)


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
    losses = _smoothed(x, label_smoothing)
    if checks.nonzero(center_rewards_coefficient):
        losses = losses + center_rewards_coefficient * (chosen + rejected).square()
    return reduced(losses, reduction, normalizer, empty)


@objective("DPOLoss", "Direct preference optimisation")
def dpo_loss(
    policy_chosen_logps: Tensor,  # any shape, usually (N,)
    policy_rejected_logps: Tensor,  # as policy_chosen_logps
    reference_chosen_logps: Tensor,  # as policy_chosen_logps
    reference_rejected_logps: Tensor,  # as policy_chosen_logps
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reduction: Reduction = "mean",
    *,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of direct preference optimisation (DPO).

    With h = (log π_c - log π_r) - (log π_ref,c - log π_ref,r) and ε = label_smoothing:

        "sigmoid"  -(1 - ε) ln σ(βh) - ε ln σ(-βh)                  DPO, arXiv 2305.18290; ε > 0 is conservative DPO
        "robust"   [-(1 - ε) ln σ(βh) + ε ln σ(-βh)] / (1 - 2ε)     robust DPO, arXiv 2403.00409
        "hinge"    max(0, 1 - βh)                                   SLiC, arXiv 2305.10425, on DPO's rewards
        "ipo"      (h - 1 / (2β))²                                  IPO, arXiv 2310.12036

    Conservative and robust DPO differ: with labels swapped at rate ε, conservative DPO fits the noisy labels (its minimum is at
    βh = ln((1 - ε) / ε)), while robust DPO's mean over the noise is plain DPO's loss on clean labels. Robust DPO has no lower bound.

    Edges: where a policy gives -inf to the chosen completion, the loss is inf ("robust" too) and the gradient finite (for "ipo" -inf).
    Where it gives -inf to the rejected one, the loss has its limit, 0 without smoothing. Where policy and reference both give -inf, it is
    nan.

    The implicit rewards are β (log π - log π_ref).

    Args:
        beta: β above 0, in the papers also τ for "ipo".
        label_smoothing: ε in [0, 0.5], below 0.5 for "robust", 0 for "hinge" and "ipo" (TRL ignores it there).
        loss_type: "sigmoid", "robust", "hinge" or "ipo". For "ipo" TRL's trainer passes means over tokens; the paper and the authors of DPO
            pass sums: choose one.

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
    label_smoothing = _check_loss_type(loss_type, ("sigmoid", "robust", "hinge", "ipo"), label_smoothing)
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = accurate(*given)
    h = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    losses = (h - 1 / (2 * beta)).square() if loss_type == "ipo" else _objective(beta * h, loss_type, label_smoothing)
    return reduced(losses, reduction, normalizer, empty)


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
    label_smoothing = _check_loss_type(loss_type, ("sigmoid", "hinge", "ipo"), label_smoothing)
    cpo_alpha = _check_nll(policy_nll_loss, "cpo_alpha", cpo_alpha, policy_chosen_logps)
    h = chosen - rejected
    losses = (h - 1 / (2 * beta)).square() if loss_type == "ipo" else _objective(beta * h, loss_type, label_smoothing)
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
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of simple preference optimisation (SimPO): mean log-probabilities as rewards, a target margin, no reference model.

    With x = β (log π_c / |y_c| - log π_r / |y_r|) - γ and ε = label_smoothing:

        "sigmoid"  -(1 - ε) ln σ(x) - ε ln σ(-x)
        "hinge"    max(0, 1 - x)

    Source: arXiv 2405.14734.

    Args:
        policy_chosen_logps: (N,), means over tokens: `sequence_logps` with average_log_prob=True.
        policy_rejected_logps: (N,), means over tokens too.
        beta: β above 0.
        gamma: the margin γ itself. The authors' code takes gamma_beta_ratio = γ / β (0.25) and beta 2.0, the defaults here; TRL has γ as
            simpo_gamma (0.5) and beta 0.1.
        label_smoothing: ε in [0, 0.5], 0 with "hinge".
        loss_type: "sigmoid" or "hinge". CPO-SimPO adds a negative log-likelihood: add cpo_alpha times it to this loss.

    Examples:
        >>> chosen, rejected = -torch.rand(2, 8, requires_grad=True)
        >>> simpo_loss(chosen, rejected).backward()
    """
    chosen, rejected = accurate(*same_shapes(policy_chosen_logps=policy_chosen_logps, policy_rejected_logps=policy_rejected_logps))
    beta = checks.number("beta", beta, 0.0, exclusive=True)
    gamma = checks.number("gamma", gamma)
    label_smoothing = _check_loss_type(loss_type, ("sigmoid", "hinge"), label_smoothing)
    losses = _objective(beta * (chosen - rejected) - gamma, loss_type, label_smoothing)
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
