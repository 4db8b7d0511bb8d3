"""Group-relative policy optimisation: the clipped policy gradient over the tokens of sampled completions."""

import torch
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.definitions.preference.common import accurate, check_mask, objective, reduced, same_shapes
from lossforge.losses.option_types import Empty, Reduction

LEVELS = ("token", "sequence")
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")


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


@objective("GRPOLoss", "Group-relative policy optimisation")
def grpo_loss(
    per_token_logps: Tensor,  # (N, T)
    advantages: Tensor,  # (N,) or (N, T)
    old_per_token_logps: Tensor | None = None,  # (N, T)
    ref_per_token_logps: Tensor | None = None,  # (N, T)
    mask: Tensor | None = None,  # (N, T)
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    loss_type: str = "grpo",
    delta: float | None = None,
    max_completion_length: int | None = None,
    reduction: Reduction = "mean",
    *,
    kl_clamp: float | None = None,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of group-relative policy optimisation (GRPO), with the importance ratio of a token (DeepSeek) or a sequence (GSPO).

    Per token t of completion i, with q = log π_ref - log π and clip to [1 - ε, 1 + ε_high]:

        lᵢₜ = -min(rᵢₜ Aᵢₜ, clip(rᵢₜ) Aᵢₜ) + β (e^q - q - 1)

    importance_sampling_level: "token", r = π / π_old of the token; "sequence", r = (π(y) / π_old(y))^(1 / |y|), shared by its tokens.

    loss_type: how tokens are weighted. It defines the items, and the divisor of their sum in the mean. `normalizer` replaces the divisor;
    reduction "none" returns the items:

        "grpo"     item: completion, (1 / |yᵢ|) Σₜ lᵢₜ, (N,)     divisor: N                          arXiv 2402.03300
        "bnpo"     item: token, (N, T)                           divisor: tokens that count          TRL's name, per batch
        "dapo"     as "bnpo"; the paper's batch spans devices: give its number of tokens as normalizer    arXiv 2503.14476
        "dr_grpo"  item: token, (N, T)                           divisor: N max_completion_length    arXiv 2503.20783

    "grpo" weights the tokens of long completions less. Dr. GRPO's constant divisor avoids that. Its paper also does not divide advantages
    by their standard deviation; this is up to the caller, who passes the advantages. A completion without tokens has loss 0 and counts in
    N, as in TRL.

    Edges: the estimate of KL, e^q - q - 1, is inf from a gap q of 89 nats on, and its gradient -inf, as TRL's: one such token ends a
    training. `kl_clamp` keeps q within a bound; verl clamps it at 20. Where r is clipped, or A is 0, the policy gradient is 0 even if r
    overflows. If no token counts, "bnpo" and "dapo" give nan, or 0 with empty="zero" (TRL: 0).

    Args:
        per_token_logps: (N, T), in nats.
        advantages: (N,) or (N, T), one for each completion or token.
        old_per_token_logps: (N, T), of the policy that sampled the completions. None: of the current policy; r is 1, with its gradient.
        ref_per_token_logps: (N, T), needed where beta > 0, otherwise unused.
        mask: (N, T), bool or integer, non-zero where a token counts (TRL's completion_mask). Tokens that do not count may hold any value,
            also nan.
        epsilon: in [0, 1].
        epsilon_high: of at least 0, default epsilon (DAPO takes 0.28).
        beta: β of at least 0, default TRL's 0; 0.04 in the paper.
        importance_sampling_level: "token", or "sequence": GSPO (arXiv 2507.18071), with "grpo" and an epsilon near 3e-4.
        loss_type: "grpo", "bnpo", "dapo" or "dr_grpo".
        delta: above 1 + epsilon_high: an upper bound on r where A < 0, where r is otherwise unbounded (two-sided clipping, arXiv
            2505.07291).
        max_completion_length: for "dr_grpo" only, default T.
        kl_clamp: above 0, the largest size of q in the estimate of KL, whose gradient is 0 beyond it. None: no bound, as TRL.

    Examples:
        >>> logps = -torch.rand(4, 12, requires_grad=True)
        >>> grpo_loss(logps, torch.randn(4), mask=torch.ones(4, 12, dtype=torch.bool)).backward()
    """
    beta = checks.number("beta", beta, 0.0)
    if checks.nonzero(beta) and ref_per_token_logps is None:
        raise ValueError(f"ref_per_token_logps must be given where beta is above 0, got None with beta={beta!r}")
    given = same_shapes(
        ("old_per_token_logps", "ref_per_token_logps"),
        per_token_logps=per_token_logps,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
    )
    checks.fits("per_token_logps", per_token_logps, per_token_logps.ndim == 2, "have shape (N, T)")
    checks.floating("advantages", advantages)
    if advantages.shape not in (per_token_logps.shape, per_token_logps.shape[:1]):
        shape = tuple(per_token_logps.shape)
        raise ValueError(f"advantages must have shape {shape[:1]} or {shape}, got {tuple(advantages.shape)}")
    checks.beside("advantages", advantages, per_token_logps, "per_token_logps")
    check_mask(mask, "per_token_logps", per_token_logps)
    epsilon = checks.number("epsilon", epsilon, 0.0, 1.0)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    epsilon_high = checks.number("epsilon_high", epsilon_high, 0.0)
    checks.one_of("importance_sampling_level", importance_sampling_level, LEVELS)
    checks.one_of("loss_type", loss_type, LOSS_TYPES)
    if delta is not None:
        delta = checks.number("delta", delta, 1.0 if isinstance(epsilon_high, Tensor) else 1 + epsilon_high, exclusive=True)
    if kl_clamp is not None:
        kl_clamp = checks.number("kl_clamp", kl_clamp, 0.0, exclusive=True)
    length = per_token_logps.shape[1]
    if max_completion_length is not None:
        max_completion_length = checks.whole_number("max_completion_length", max_completion_length)
        if max_completion_length < 1 or loss_type != "dr_grpo":
            raise ValueError(
                f'max_completion_length must be at least 1, with loss_type "dr_grpo", got {max_completion_length} with {loss_type!r}'
            )
        length = max_completion_length

    advantages, *logps = accurate(advantages, *given)
    keep = torch.ones_like(per_token_logps, dtype=torch.bool) if mask is None else mask != 0
    logps = [torch.where(keep, t, 0.0) for t in logps]
    advantages = advantages.unsqueeze(1) if advantages.ndim == 1 else torch.where(keep, advantages, 0.0)
    policy, tokens = logps[0], keep.sum(1)
    log_ratio = policy - (policy.detach() if old_per_token_logps is None else logps[1])
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(1) / tokens.clamp(min=1)).unsqueeze(1)
    losses = -advantages * _clipped_ratio(log_ratio, advantages, 1 - epsilon, 1 + epsilon_high, delta)
    if checks.nonzero(beta):
        q = logps[-1] - policy
        if kl_clamp is not None:
            q = q.clamp(-kl_clamp, kl_clamp)
        losses = losses + beta * (torch.expm1(q) - q)
    losses = torch.where(keep, losses, 0.0)
    if loss_type == "grpo":
        losses = losses.sum(1) / tokens.clamp(min=1)
    items = {"grpo": len(per_token_logps), "dr_grpo": len(per_token_logps) * length}.get(loss_type)
    return reduced(losses, reduction, normalizer, empty, tokens.sum() if items is None else items)
