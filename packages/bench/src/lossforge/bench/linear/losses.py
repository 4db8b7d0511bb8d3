"""Each fused loss twice: in plain torch on a part of the logits, which is also the float64 reference, and as ours computes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import FOCAL
from lossforge.bench.inputs import IGNORE_INDEX
from lossforge.bench.linear.inputs import LinearInputs
from lossforge.bench.plain import eager

BETA, KL_WEIGHT, EPSILON = 0.1, 0.04, 0.2
"""DPO's β; GRPO's weight of the divergence from the reference, and its clipping of the ratio."""
LOGIT_SCALE, LOGIT_BIAS = 20.0, -10.0
Others = dict[str, Tensor]


@dataclass(frozen=True)
class LinearLoss:
    """A fused loss, in plain torch and as ours.

    Attributes:
        rows: (logits (n, C), the tensors of these rows) → each row's contribution, (n,) or (n, 2).
        total: (contributions of all rows, all tensors) → the loss.
        ours: (inputs, how to compute it) → the loss.
        both: it is the mean of this and of the same loss of the transposed logits, of the targets' columns.
        joined: the logits are the products of all rows of input and weight with all of them.
    """

    rows: Callable[[Tensor, Others], Tensor]
    total: Callable[[Tensor, Others], Tensor]
    ours: Callable[..., Tensor]
    both: bool = False
    joined: bool = False

    def plain(self, input: Tensor, head: Tensor, others: Others) -> Tensor:
        """Compute the loss with torch from all logits."""
        if self.joined:
            input = head = torch.cat([input, head])
        logits = F.linear(input, head).flatten(0, -2)
        flat = {k: t.flatten(0, input.ndim - 2) if k in ("target", "teacher") else t for k, t in others.items()}
        if "teacher_input" in flat:
            flat["teacher_input"] = flat["teacher_input"].flatten(0, -2)
        value = self.total(self.rows(logits, flat), others)
        return (value + self.total(self.rows(logits[:, : len(logits)].T, flat), others)) / 2 if self.both else value


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logps(x: Tensor, others: Others) -> Tensor:
    return -F.cross_entropy(_wide(x), others["target"], reduction="none")


def _cross_entropy(x: Tensor, others: Others) -> Tensor:
    return _wide(F.cross_entropy(x, others["target"], reduction="none"))


def _mean(rows: Tensor, others: Others) -> Tensor:
    return rows.mean()


def _mean_of_counted(rows: Tensor, others: Others) -> Tensor:
    return rows.sum() / (others["target"] != IGNORE_INDEX).sum()


def _with_entropy(x: Tensor, others: Others) -> Tensor:
    log_p = _wide(x).log_softmax(-1)
    return torch.stack([log_p.gather(-1, others["target"].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)], -1)


def _weighted(rows: Tensor, others: Others) -> Tensor:
    """Weight each token, so that each result has a different upstream gradient."""
    logps, entropy = rows.unbind(-1)
    return (others["factor"].flatten() * (logps - entropy)).mean()


def _focal(x: Tensor, others: Others) -> Tensor:
    return _summed(eager("focal")(x, others["target"], **FOCAL | {"reduction": "none"}))


def _bce(x: Tensor, others: Others) -> Tensor:
    return _summed(F.binary_cross_entropy_with_logits(x, others["target"], reduction="none")) / x.shape[1]


def _summed(values: Tensor) -> Tensor:
    return values.sum(-1, dtype=torch.promote_types(values.dtype, torch.float32))


def _divergence(x: Tensor, others: Others) -> Tensor:
    teacher = others["teacher"] if "teacher" in others else F.linear(others["teacher_input"], others["teacher_head"])
    log_p, log_q = (_wide(t).log_softmax(-1) for t in (x, teacher))
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def _dpo(logps: Tensor, others: Others) -> Tensor:
    ratio = logps.view(others["target"].shape).sum(-1) - others["reference"]
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def _grpo(logps: Tensor, others: Others) -> Tensor:
    logps = logps.view(others["target"].shape)
    ratio, advantage = (logps - others["old"]).exp(), others["advantage"].unsqueeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
    away = others["reference"] - logps
    return (KL_WEIGHT * (away.exp() - away - 1) - gain).mean()


def _contrast(x: Tensor, others: Others) -> Tensor:
    return _cross_entropy(LOGIT_SCALE * x, others)


def _pairwise(x: Tensor, others: Others) -> Tensor:
    together = torch.arange(x.shape[1], device=x.device) == others["target"].unsqueeze(1)
    return _summed(-F.logsigmoid(torch.where(together, 1.0, -1.0).to(x.dtype) * (LOGIT_SCALE * x + LOGIT_BIAS)))


def _without_itself(x: Tensor, others: Others) -> Tensor:
    return (LOGIT_SCALE * x).scatter(1, others["own"].unsqueeze(1), float("-inf"))


def _views(x: Tensor, others: Others) -> Tensor:
    return _wide(F.cross_entropy(_without_itself(x, others), others["target"], reduction="none"))


def _labelled_views(x: Tensor, others: Others) -> Tensor:
    own, labels = others["own"].unsqueeze(1), others["labels"]
    log_p = _wide(_without_itself(x, others)).log_softmax(1)
    positive = (labels[own] == labels).scatter(1, own, False)
    return -torch.where(positive, log_p, 0.0).sum(1) / positive.sum(1)


def _supcon(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import supervised_contrastive_loss

    z, temperature = torch.cat([inputs.input, inputs.head]), 1 / LOGIT_SCALE
    return supervised_contrastive_loss(z, inputs.others["labels"], temperature, None, normalize=False, **how)


def _of_features(name: str, **options: Any) -> Callable[..., Tensor]:
    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses import functional

        loss: Tensor = getattr(functional, name)(inputs.input, inputs.head, **options, **how)
        return loss

    return call


def _of_tokens(total: Callable[[Tensor, Others], Tensor]) -> Callable[..., Tensor]:
    """Compute an objective of each token's log-probability with linear_selective_log_softmax."""

    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses.functional import linear_selective_log_softmax

        logps: Any = linear_selective_log_softmax(inputs.input, inputs.head, inputs.others["target"], **how)
        return total(logps, inputs.others)

    return call


def _tokens(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import linear_selective_log_softmax

    found: Any = linear_selective_log_softmax(inputs.input, inputs.head, inputs.others["target"], return_entropy=True, **how)
    loss: Tensor = (inputs.others["factor"] * (found.logps - found.entropy)).mean()
    return loss


def _fused(name: str, **options: Any) -> Callable[..., Tensor]:
    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses.functional import fuse_linear
        from lossforge.losses.registry import LOSSES as REGISTRY

        return fuse_linear(REGISTRY[name].function)(inputs.input, inputs.head, inputs.others["target"], **options, **how)

    return call


def _kl(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import LinearTeacher, linear_kl_div

    others = inputs.others
    teacher = others["teacher"] if "teacher" in others else LinearTeacher(others["teacher_input"], others["teacher_head"])
    return linear_kl_div(inputs.input, inputs.head, teacher, **how)


LOSSES = {
    "ce": LinearLoss(_cross_entropy, _mean_of_counted, _fused("ce")),
    "selective_log_softmax": LinearLoss(_with_entropy, _weighted, _tokens),
    "dpo": LinearLoss(_logps, _dpo, _of_tokens(_dpo)),
    "grpo": LinearLoss(_logps, _grpo, _of_tokens(_grpo)),
    "focal": LinearLoss(_focal, lambda rows, others: rows.sum(), _fused("focal", **FOCAL)),
    "bce": LinearLoss(_bce, _mean, _fused("bce", reduction="mean")),
    "info_nce": LinearLoss(_contrast, _mean, _of_features("info_nce_loss", temperature=1 / LOGIT_SCALE, normalize=False)),
    "clip_features": LinearLoss(_contrast, _mean, _of_features("clip_loss_from_features", logit_scale=LOGIT_SCALE), both=True),
    "siglip_features": LinearLoss(
        _pairwise, _mean, _of_features("siglip_loss_from_features", logit_scale=LOGIT_SCALE, logit_bias=LOGIT_BIAS)
    ),
    "nt_xent": LinearLoss(_views, _mean, _of_features("nt_xent_loss", temperature=1 / LOGIT_SCALE, normalize=False), joined=True),
    "supcon": LinearLoss(_labelled_views, _mean, _supcon, joined=True),
    "kl": LinearLoss(_divergence, _mean, _kl),
}
