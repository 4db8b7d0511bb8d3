"""Kahneman-Tversky optimisation: each completion is labelled good or bad, without pairs."""

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import Empty, Reduction
from lossforge.losses.definitions.preference.common import accurate, objective, reduced, same_shapes
from lossforge.losses.templates.plain_forms import counted


def _check_weight(name: str, weight: float | Tensor, first: str, x: Tensor) -> float | Tensor:
    if not checks.is_parameter(weight, x):
        return checks.number(name, weight, 0.0)
    checks.floating(name, weight)
    if weight.ndim and weight.shape != x.shape:
        raise ValueError(f"{name} must be a number, 0-d, or of the shape of {first}, {tuple(x.shape)}, got {tuple(weight.shape)}")
    checks.beside(name, weight, x, first)
    return weight


def _utility(h: Tensor, baseline: float | Tensor, beta: float, weight: float | Tensor) -> Tensor:
    """Return weight · σ(beta (h - baseline)), 0 where the weight is 0."""
    weight = weight if isinstance(weight, Tensor) else h.new_full((), weight)
    return (weight * counted(lambda h: torch.sigmoid(beta * (h - baseline)), weight, [h])).to(h.dtype)


@objective("KTOLoss", "Kahneman-Tversky optimisation", " Weights per completion are given per call, as is the baseline kl.")
def kto_loss(
    policy_chosen_logps: Tensor,  # (N_c,)
    policy_rejected_logps: Tensor,  # (N_r,)
    policy_KL_logps: Tensor | None,  # (N_KL,)
    reference_chosen_logps: Tensor,  # (N_c,)
    reference_rejected_logps: Tensor,  # (N_r,)
    reference_KL_logps: Tensor | None,  # (N_KL,)
    beta: float = 0.1,
    desirable_weight: float | Tensor = 1.0,  # a number, or (N_c,)
    undesirable_weight: float | Tensor = 1.0,  # a number, or (N_r,)
    reduction: Reduction = "mean",
    *,
    kl: float | Tensor | None = None,
    normalizer: float | Tensor | None = None,
    empty: Empty = "nan",
) -> Tensor:
    """Compute the loss of Kahneman-Tversky optimisation (KTO).

    With h = log π - log π_ref and the baseline z = max(0, mean h over the KL completions), which has no gradient:

        desirable    λ_D (1 - σ(β (h - z)))
        undesirable  λ_U (1 - σ(β (z - h)))

    The mean divides by N_c + N_r. "none" gives (N_c + N_r,), the chosen ones first.

    Edges: the loss is bounded by the weights. With -inf under the policy it has its limits; with -inf under policy and reference, nan.
    Without KL completions the baseline, and so the loss, is nan, or the baseline is 0 with empty="zero".

    Source: arXiv 2402.01306.

    The first version of the authors' code used the mean over the batch's undesirable completions as the baseline of the desirable ones, and
    vice versa.

    Args:
        policy_chosen_logps: (N_c,), of the desirable ("chosen") completions; there may be none.
        policy_rejected_logps: (N_r,), of the undesirable ("rejected") ones; there may be none.
        policy_KL_logps: of mismatched pairs, prompt i with the completion of prompt i + 1, as in the paper and TRL; None with kl.
        reference_KL_logps: of the same pairs under the reference model; None with kl.
        beta: β above 0.
        desirable_weight: λ_D, a number or one for each completion. Weight 0 leaves a completion out of the sum but not of the mean's
            divisor, so that batches of a fixed shape can hold every completion twice: then give `normalizer`.
        undesirable_weight: λ_U, in the same way.
        kl: the baseline itself, in nats, in place of both KL arguments, for example averaged over devices as TRL does. It is clamped and
            detached, too. With neither, the baseline is 0, which is APO-zero for unpaired data (arXiv 2408.06266).

    Examples:
        >>> chosen, rejected = -torch.rand(2, 8, requires_grad=True)
        >>> kto_loss(chosen, rejected, None, -torch.rand(8), -torch.rand(8), None, kl=0.1).backward()
    """
    chosen = {"policy_chosen_logps": policy_chosen_logps, "reference_chosen_logps": reference_chosen_logps}
    rejected = {"policy_rejected_logps": policy_rejected_logps, "reference_rejected_logps": reference_rejected_logps}
    groups = [chosen, rejected]
    if (policy_KL_logps is None) != (reference_KL_logps is None):
        missing = "policy_KL_logps" if policy_KL_logps is None else "reference_KL_logps"
        raise ValueError(f"policy_KL_logps and reference_KL_logps go together, got None for {missing}")
    if policy_KL_logps is not None and reference_KL_logps is not None:
        if kl is not None:
            raise ValueError("kl takes the place of policy_KL_logps and reference_KL_logps, got all three")
        groups.append({"policy_KL_logps": policy_KL_logps, "reference_KL_logps": reference_KL_logps})
    for group in groups:
        same_shapes(**group)
        name, t = next(iter(group.items()))
        checks.fits(name, t, t.ndim == 1, "have shape (N,)")
        checks.beside(name, t, policy_chosen_logps, "policy_chosen_logps")
    if checks.is_parameter(kl, policy_chosen_logps):
        checks.floating("kl", kl)
        if kl.ndim:
            raise ValueError(f"kl must be a number or a 0-d tensor, got shape {tuple(kl.shape)}")
        checks.beside("kl", kl, policy_chosen_logps, "policy_chosen_logps")
    elif kl is not None:
        kl = checks.number("kl", kl)
    beta = checks.number("beta", beta, 0.0, exclusive=True)
    desirable_weight = _check_weight("desirable_weight", desirable_weight, "policy_chosen_logps", policy_chosen_logps)
    undesirable_weight = _check_weight("undesirable_weight", undesirable_weight, "policy_rejected_logps", policy_rejected_logps)

    ratios = accurate(*(t for group in groups for t in group.values()))
    h = [policy - reference for policy, reference in zip(ratios[::2], ratios[1::2], strict=True)]
    if len(h) == 3:
        kl = reduced(h[2], "mean", None, empty)
    baseline = kl.detach().to(h[0].dtype).clamp(min=0) if isinstance(kl, Tensor) else max(kl or 0.0, 0.0)
    losses = torch.cat([_utility(h[0], baseline, -beta, desirable_weight), _utility(h[1], baseline, beta, undesirable_weight)])
    return reduced(losses, reduction, normalizer, empty)
