"""Each fused loss twice: in plain torch on a part of the logits, which is also the float64 reference, and as ours computes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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


def _grpo_on_policy(logps: Tensor, others: Others) -> Tensor:
    """Compute it of the policy that drew the tokens: the ratio is 1, and its derivative that of the log-probability."""
    logps = logps.view(others["target"].shape)
    return -((logps - logps.detach()).exp() * others["advantage"].unsqueeze(-1)).mean()


def _gspo(logps: Tensor, others: Others) -> Tensor:
    """Compute arXiv 2507.18071: the ratio of a sequence is the geometric mean of its tokens'."""
    away = logps.view(others["target"].shape) - others["old"]
    ratio, advantage = away.mean(-1).exp(), others["advantage"]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage).mean()


def _mean_of_weighted(rows: Tensor, others: Others) -> Tensor:
    return (rows * others["factor"].flatten()).mean()


def _hard_divergence(divergence: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Others], Tensor]:
    """Return half of a divergence of student and teacher plus half of the cross entropy, a row."""

    def rows(x: Tensor, others: Others) -> Tensor:
        log_p, log_q = (_wide(t).log_softmax(-1) for t in (x, F.linear(others["teacher_input"], others["teacher_head"])))
        return 0.5 * divergence(log_p, log_q) + 0.5 * F.nll_loss(log_p, others["target"], reduction="none")

    return rows


def _kl_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def _js_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (_kl_of(middle, log_p) + _kl_of(middle, log_q))


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


def _labelled_contrast(x: Tensor, others: Others) -> Tensor:
    """Leave rows of the same label out of the negatives."""
    own, labels = others["target"].unsqueeze(1), others["labels"]
    equal = (labels[own] == labels).scatter(1, own, False)
    return _contrast(x.masked_fill(equal, -torch.inf), others)


def _decoupled(x: Tensor, others: Others) -> Tensor:
    """Leave the positive out of the denominator."""
    x, own = _wide(LOGIT_SCALE * x), others["target"].unsqueeze(1)
    return x.scatter(1, own, -torch.inf).logsumexp(1) - x.gather(1, own).squeeze(1)


def _guided(x: Tensor, others: Others) -> Tensor:
    """Return each row's log-sum-exp, and the logit of its pair, without rows that the guide finds nearer than the pair.

    A query is compared with all queries and positives, a positive with positives alone.
    """
    own, pair, guide = others["own"].unsqueeze(1), others["target"].unsqueeze(1), others["guide"]
    x, near = _wide(LOGIT_SCALE * x), guide[others["own"]] @ guide.T
    dropped = (near > near.gather(1, pair)).scatter(1, pair, False).scatter(1, own, True)
    queries = torch.arange(len(guide), device=x.device) < len(guide) // 2
    dropped = dropped | (~queries[own] & queries)
    return torch.stack([x.masked_fill(dropped, -torch.inf).logsumexp(1), x.gather(1, pair).squeeze(1)], 1)


def _mean_of_guided(rows: Tensor, others: Others) -> Tensor:
    (of_queries, pair), (of_positives, _) = (half.unbind(1) for half in rows.chunk(2))
    return (torch.logaddexp(of_queries, of_positives) - pair).mean()


def _parted(x: Tensor, others: Others) -> tuple[Tensor, Tensor]:
    """Return which similarities are of positives, without a row itself, and which of negatives."""
    own, labels = others["own"].unsqueeze(1), others["labels"]
    equal = labels[own] == labels
    return equal.scatter(1, own, False), ~equal


def _log_sum(x: Tensor, taken: Tensor) -> Tensor:
    """Return each row's log-sum-exp of what is taken; of nothing a number so far below 0 that its exponential is 0."""
    return x.masked_fill(~taken, -1e30).logsumexp(1)


def _multi_similarity(x: Tensor, others: Others) -> Tensor:
    positive, negative = _parted(x, others)
    x = _wide(x) - 0.5
    return F.softplus(_log_sum(-2.0 * x, positive)) / 2.0 + F.softplus(_log_sum(50.0 * x, negative)) / 50.0


def _circle(x: Tensor, others: Others) -> Tensor:
    (positive, negative), margin, x = _parted(x, others), 0.4, _wide(x)
    pull, push = (1 + margin - x).relu().detach(), (x + margin).relu().detach()
    near, far = _log_sum(80.0 * pull * (1 - margin - x), positive), _log_sum(80.0 * push * (x - margin), negative)
    return F.softplus(near + far)


def _proxy_anchor(x: Tensor, others: Others) -> Tensor:
    """Return the terms of the positives and of the negatives of each proxy."""
    positive, x = others["own"].unsqueeze(1) == others["labels"], _wide(x)
    terms = _log_sum(-32.0 * (x - 0.1), positive), _log_sum(32.0 * (x + 0.1), ~positive)
    return F.softplus(torch.stack(terms, 1))


def _mean_of_proxies(rows: Tensor, others: Others) -> Tensor:
    near, far = rows.unbind(1)
    present = torch.zeros_like(near).index_fill(0, others["labels"], 1.0).sum()
    return near.sum() / present + far.mean()


def _of_labelled(name: str) -> Callable[..., Tensor]:
    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses import functional

        z = torch.cat([inputs.input, inputs.head])
        loss: Tensor = getattr(functional, name)(z, inputs.others["labels"], normalize=False, **how)
        return loss

    return call


def _of_proxies(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import proxy_anchor_loss

    return proxy_anchor_loss(inputs.head, inputs.input, inputs.others["labels"], normalize=False, **how)


def _gist_embed(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import gist_embed_loss

    of_query, of_positive = inputs.others["guide"].chunk(2)
    return gist_embed_loss(inputs.input, inputs.head, of_query, of_positive, temperature=1 / LOGIT_SCALE, normalize=False, **how)


def _info_nce_labels(inputs: LinearInputs, **how: Any) -> Tensor:
    return _of_features("info_nce_loss", temperature=1 / LOGIT_SCALE, normalize=False, labels=inputs.others["labels"])(inputs, **how)


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


def _of_tokens(total: Callable[[Tensor, Others], Tensor], independent: Literal["tokens", "sequences", "pairs"]) -> Callable[..., Tensor]:
    """Compute an objective of the tokens' log-probabilities with linear_objective. independent: see there."""

    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses.functional import linear_objective

        def objective(logps: Tensor) -> Tensor:
            return total(logps, inputs.others)

        return linear_objective(inputs.input, inputs.head, inputs.others["target"], objective, independent=independent, **how)

    return call


def _tokens(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import linear_selective_log_softmax

    found: Any = linear_selective_log_softmax(inputs.input, inputs.head, inputs.others["target"], outputs=("entropy",), **how)
    loss: Tensor = (inputs.others["factor"] * (found.logps - found.entropy)).mean()
    return loss


def _fused(name: str, **options: Any) -> Callable[..., Tensor]:
    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses.functional import fuse_linear
        from lossforge.losses.registry import LOSSES as REGISTRY

        return fuse_linear(REGISTRY[name].function)(inputs.input, inputs.head, inputs.others["target"], **options, **how)

    return call


def _weighted_ce(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import linear_cross_entropy

    return linear_cross_entropy(inputs.input, inputs.head, inputs.others["target"], token_weight=inputs.others["factor"], **how)


def _with_hard_part(name: str) -> Callable[..., Tensor]:
    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        from lossforge.losses import functional

        others = inputs.others
        teacher = functional.LinearTeacher(others["teacher_input"], others["teacher_head"])
        given = {"labels": others["target"], "hard_weight": 0.5, "reduction": "mean"}
        loss: Tensor = getattr(functional, name)(inputs.input, inputs.head, teacher, **given, **how)
        return loss

    return call


def _kl(inputs: LinearInputs, **how: Any) -> Tensor:
    from lossforge.losses.functional import LinearTeacher, linear_kl_div

    others = inputs.others
    teacher = others["teacher"] if "teacher" in others else LinearTeacher(others["teacher_input"], others["teacher_head"])
    return linear_kl_div(inputs.input, inputs.head, teacher, **how)


LOSSES = {
    "ce": LinearLoss(_cross_entropy, _mean_of_counted, _fused("ce")),
    "selective_log_softmax": LinearLoss(_with_entropy, _weighted, _tokens),
    "dpo": LinearLoss(_logps, _dpo, _of_tokens(_dpo, "pairs")),
    "grpo": LinearLoss(_logps, _grpo, _of_tokens(_grpo, "tokens")),
    "grpo_on_policy": LinearLoss(_logps, _grpo_on_policy, _of_tokens(_grpo_on_policy, "tokens")),
    "gspo": LinearLoss(_logps, _gspo, _of_tokens(_gspo, "sequences")),
    "weighted_ce": LinearLoss(_cross_entropy, _mean_of_weighted, _weighted_ce),
    "hard_kl": LinearLoss(_hard_divergence(_kl_of), _mean, _with_hard_part("linear_kl_div")),
    "hard_js": LinearLoss(_hard_divergence(_js_of), _mean, _with_hard_part("linear_js_div")),
    "focal": LinearLoss(_focal, lambda rows, others: rows.sum(), _fused("focal", **FOCAL)),
    "bce": LinearLoss(_bce, _mean, _fused("bce", reduction="mean")),
    "info_nce": LinearLoss(_contrast, _mean, _of_features("info_nce_loss", temperature=1 / LOGIT_SCALE, normalize=False)),
    "info_nce_labels": LinearLoss(_labelled_contrast, _mean, _info_nce_labels),
    "info_nce_decoupled": LinearLoss(
        _decoupled, _mean, _of_features("info_nce_loss", temperature=1 / LOGIT_SCALE, normalize=False, decoupled=True)
    ),
    "gist_embed": LinearLoss(_guided, _mean_of_guided, _gist_embed, joined=True),
    "clip_features": LinearLoss(_contrast, _mean, _of_features("clip_loss_from_features", logit_scale=LOGIT_SCALE), both=True),
    "siglip_features": LinearLoss(
        _pairwise, _mean, _of_features("siglip_loss_from_features", logit_scale=LOGIT_SCALE, logit_bias=LOGIT_BIAS)
    ),
    "nt_xent": LinearLoss(_views, _mean, _of_features("nt_xent_loss", temperature=1 / LOGIT_SCALE, normalize=False), joined=True),
    "supcon": LinearLoss(_labelled_views, _mean, _supcon, joined=True),
    "multi_similarity": LinearLoss(_multi_similarity, _mean, _of_labelled("multi_similarity_loss"), joined=True),
    "circle": LinearLoss(_circle, _mean, _of_labelled("circle_loss"), joined=True),
    "proxy_anchor": LinearLoss(_proxy_anchor, _mean_of_proxies, _of_proxies),
    "kl": LinearLoss(_divergence, _mean, _kl),
}
