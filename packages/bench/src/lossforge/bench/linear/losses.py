"""Each fused loss twice: in plain torch from a part of the logits, which is also the reference in float64, and as ours computes it."""

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
"""Of DPO; of GRPO, the weight of the divergence from the reference and the clipping of the ratio."""
Others = dict[str, Tensor]


@dataclass(frozen=True)
class LinearLoss:
    """rows: (logits (n, C), their rows' tensors) → what each row adds, (n,) or (n, 2). total: (that of all rows, all tensors) → the loss.

    ours: (inputs, how it is computed) → the loss.
    """

    rows: Callable[[Tensor, Others], Tensor]
    total: Callable[[Tensor, Others], Tensor]
    ours: Callable[..., Tensor]

    def plain(self, input: Tensor, head: Tensor, others: Others) -> Tensor:
        """The loss as torch computes it from all logits."""
        logits = F.linear(input, head).flatten(0, -2)
        flat = {k: t.flatten(0, input.ndim - 2) if k in ("target", "teacher") else t for k, t in others.items()}
        if "teacher_input" in flat:
            flat["teacher_input"] = flat["teacher_input"].flatten(0, -2)
        return self.total(self.rows(logits, flat), others)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logps(x: Tensor, others: Others) -> Tensor:
    return -F.cross_entropy(_wide(x), others["target"], reduction="none")


def _cross_entropy(x: Tensor, others: Others) -> Tensor:
    return _wide(F.cross_entropy(x, others["target"], reduction="none"))


def _mean_of_counted(rows: Tensor, others: Others) -> Tensor:
    return rows.sum() / (others["target"] != IGNORE_INDEX).sum()


def _with_entropy(x: Tensor, others: Others) -> Tensor:
    log_p = _wide(x).log_softmax(-1)
    return torch.stack([log_p.gather(-1, others["target"].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)], -1)


def _weighted(rows: Tensor, others: Others) -> Tensor:
    """One factor a token, so that a gradient of its own reaches each result."""
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


def _of_tokens(total: Callable[[Tensor, Others], Tensor]) -> Callable[..., Tensor]:
    """An objective of each token's log-probability, as a recipe of linear_selective_log_softmax."""

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
    "bce": LinearLoss(_bce, lambda rows, others: rows.mean(), _fused("bce", reduction="mean")),
    "kl": LinearLoss(_divergence, lambda rows, others: rows.mean(), _kl),
}
