"""Losses of draft models, which propose the tokens of speculative decoding for a larger model, their teacher.

A proposal from p is accepted with probability α = Σ min(p, q) = 1 - TV(p, q), q the teacher's softmax.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import DivergenceCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import BatchReduction, DraftKind, DraftOutputs, NonNegative, Positive
from lossforge.losses.base.options import CappedDivergenceOptions
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.definitions.classes.divergence import kl_reference, total_variation_reference
from lossforge.losses.definitions.features.self_distillation import soft_cross_entropy_reference
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.divergence import DIVERGENCE, divergence_loss

__all__ = ["DraftOutput"]


class DraftOutput(Outputs):
    """What a draft model's loss returns with outputs.

    Attributes:
        loss: a scalar, or one value a row with reduction "none".
        entropy: (N, d…), of the draft's softmax(input / T), in nats, without gradient; 0 in rows that are left out.
        acceptance: (N, d…), α = Σ min(p, q), without gradient; 0 in rows that are left out.
    """

    loss: Tensor
    entropy: Tensor
    acceptance: Tensor


KINDS = {"lk": "draft_lk", "log_tv": "draft_log_tv", "tv": "draft_tv", "kl": "draft_kl", "ce": "draft_ce"}
ONE_SUM = {"tv": "total_variation", "kl": "kl", "ce": "soft_cross_entropy"}
"""The formulas of the kinds that need one of the two sums, where the other is not asked for."""


def _sum(terms: Tensor) -> Tensor:
    return terms.sum(1, keepdim=True)


@formula("draft_kl", DeviceFormula("softmax.overlap", averaged="softmax.kl_averaged", blend="softmax.draft_first"))
def draft_kl_reference(lp: Tensor, lq: Tensor, mass: Tensor | None = None) -> Tensor:
    return _sum(kl_reference(lp, lq))


@formula("draft_ce", DeviceFormula("softmax.overlap", averaged="softmax.soft_cross_entropy_averaged", blend="softmax.draft_first"))
def draft_ce_reference(lp: Tensor, lq: Tensor, mass: Tensor | None = None) -> Tensor:
    return _sum(soft_cross_entropy_reference(lp, lq))


@formula("draft_tv", DeviceFormula("softmax.total_variation", blend="softmax.draft_total_variation"))
def draft_tv_reference(lp: Tensor, lq: Tensor, mass: Tensor | None = None) -> Tensor:
    """Of the classes that the draft lacks, all of the teacher's probability, 1 - mass, differs."""
    if mass is None:
        return _sum(total_variation_reference(lp, lq))
    return _sum(total_variation_reference(lp, lq + mass.log())) + 0.5 * (1 - mass)


@formula("draft_log_tv", DeviceFormula("softmax.overlap", blend="softmax.draft_log_acceptance"))
def draft_log_tv_reference(lp: Tensor, lq: Tensor, mass: Tensor | None = None) -> Tensor:
    q = lq.exp() if mass is None else lq.exp() * mass
    acceptance = _sum(torch.minimum(lp.exp(), q))
    nothing = acceptance == 0
    return torch.where(nothing, torch.inf, -torch.where(nothing, 1.0, acceptance).log())


@formula("draft_overlap", DeviceFormula("softmax.overlap"))
def overlap_reference(lp: Tensor, lq: Tensor) -> Tensor:
    """Of the terms of α, with the derivatives of TV, whose sign is the other. Where classes are spread over processes, a part of a row."""
    least = torch.minimum(lp.exp(), lq.exp())
    return 2 * least.detach() - least


@formula("draft_lk", DeviceFormula("softmax.total_variation", averaged="softmax.kl_averaged", blend="softmax.draft_blend"))
def draft_lk_reference(lp: Tensor, lq: Tensor, kl_scale: float, eta: float, mass: Tensor | None = None) -> Tensor:
    distance = draft_tv_reference(lp, lq, mass)
    share = kl_scale * torch.exp(-eta * (1 - distance.detach()))
    return torch.where(share == 0, 0.0, share * _sum(kl_reference(lp, lq))) + (1 - share) * distance


@loss(
    "draft",
    DIVERGENCE,
    Module("DraftWithLogitsLoss", "Loss of a draft model from its logits and a teacher's"),
    formula="draft_lk",
    switches=("temperature_squared",),
    options=(
        {"kind": "log_tv"},
        {"kind": "tv", "temperature": 0.7},
        {"kind": "kl", "temperature": 2.0, "temperature_squared": True},
        {"kind": "ce"},
        {"eta": 0.5, "kl_scale": 0.4, "temperature": 1.5},
    ),
    like="lossforge.losses.testing.oracles.divergence:draft",
    paper="arXiv 2602.23881",
)
def draft_loss_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    kind: DraftKind = "lk",
    eta: NonNegative = 3.0,
    kl_scale: NonNegative = 1.0,
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    teacher_lse: Tensor | None = None,  # (N, d…)
    temperature_squared: bool = False,
    ignore_index: int = -100,
    outputs: Sequence[DraftOutputs] = (),
    **options: Unpack[CappedDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DraftOutput]:
    """Loss of a draft model for speculative decoding (LK losses; Samarin et al. 2026, arXiv 2602.23881).

    L = λ KL(q ‖ p) + (1 - λ) TV(p, q), λ = s exp(-η α) without gradient, α = Σⱼ min(pⱼ, qⱼ) = 1 - TV, p = softmax(input / T), q =
    softmax(target_logits / T).

    α is the probability that the teacher accepts a token which the draft proposes. "log_tv" is -ln α, "tv" 1 - α, "kl" KL(q ‖ p) and "ce"
    -Σⱼ qⱼ ln pⱼ.

    Source: speculators' lk_hybrid_loss ("lk"), neg_log_acceptance_loss ("log_tv"), tv_loss and kl_div_loss. Its ce_loss is the cross
    entropy of the teacher's most likely class: give this as labels, with hard_weight. SpecForge's lk_loss_type="alpha" is "log_tv"; its
    "lambda" has one λ for all tokens, of their mean α, and the cross entropy in place of KL.

    When to use it: Take it for EAGLE-3, DFlash and other drafts whose teacher's logits or hidden states are at hand. "lk" begins like KL,
    whose gradient is strong while p and q differ, and ends like TV, which is what acceptance counts.

    When not: Leave "tv" at the start of training, because its gradient vanishes where the draft gives almost no probability. Where only
    the teacher's tokens are known, train by `cross_entropy`.

    Args:
        kind: "lk", "log_tv", "tv", "kl" or "ce".
        eta: η of at least 0, of "lk": the larger, the sooner the loss goes over to TV.
        kl_scale: s of at least 0, of "lk": λ where nothing is accepted.
        teacher_lse: (N, d…), ln Σ exp(x / T) over all of the teacher's classes, where input and target_logits have some of them. α and TV
            are then of the teacher's softmax over all; KL and cross entropy stay of that over these. None: q is over these alone. Where it
            is less than that of these, the row is nan.
        temperature_squared: multiply by T², so that gradients keep their size. Off by default.
        outputs: names of what to give as well, without gradient and 0 in rows that are left out: "entropy", of each row's
            softmax(input / T), and "acceptance", α.

    Returns:
        a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is); with outputs DraftOutput.
    """
    checks.one_of("kind", kind, tuple(KINDS))
    eta, kl_scale = checks.number("eta", eta, 0.0), checks.number("kl_scale", kl_scale, 0.0)
    asked = DraftOutput.asked(outputs)
    one_sum = kind in ONE_SUM and not asked[1] and (kind != "tv" or teacher_lse is None)
    call = DivergenceCall(ONE_SUM[kind] if one_sum else KINDS[kind], input, target_logits, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(hyper=[kl_scale, eta] if kind == "lk" else [], temperature=temperature, outputs=asked, target_lse=teacher_lse)
    checked: CheckedCall[DivergenceCall, Any] = divergence_loss(call, options, temperature_squared)
    if one_sum:
        checked = checked._replace(call=checked.call._replace(target_lse=None))
    return checked.returning(DraftOutput.of) if any(asked) else checked
