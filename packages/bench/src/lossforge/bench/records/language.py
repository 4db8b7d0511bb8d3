"""Objectives of the log-probabilities of tokens, from hidden states."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

from lossforge.bench.record import F, Fused, Others, Target, Tensor, enter, layers, losses, torch, wide
from lossforge.bench.records.classes import THREE
from lossforge.bench.records.divergence import COMPILED, DISTILLED, OF_TOP

BETA, KL_WEIGHT, EPSILON = 0.1, 0.04, 0.2
"""DPO's β; GRPO's weight of the divergence from the reference, and its clipping of the ratio."""
SEVERAL, MTP = (8, 1024, 2048, 128256), (3, 8192, 4096, 151936)
TOP = 64
ITSELF = Target("objectives", "ms", 1.02, "products", f"{THREE} + the objective alone", plus="objective", optional=True)


def logps(x: Tensor, others: Others) -> Tensor:
    return -F.cross_entropy(wide(x), others["target"], reduction="none")


def of_tokens(total: Any, independent: Literal["tokens", "sequences", "pairs"], **more: Any) -> Fused:
    """Return an objective of the tokens' log-probabilities, as losses.linear_objective computes it. independent: see there."""

    def ours(inputs: Any, **how: Any) -> Tensor:
        def objective(logps: Tensor) -> Tensor:
            found: Tensor = total(logps, inputs.others)
            return found

        return losses.linear_objective(
            inputs.x,
            inputs.head,
            inputs.others["target"],
            objective,
            independent=independent,
            **how,
        )

    return Fused(logps, total, ours, **more)


def dpo(logps: Tensor, others: Others) -> Tensor:
    ratio = logps.view(others["target"].shape).sum(-1) - others["reference"]
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def grpo(logps: Tensor, others: Others) -> Tensor:
    logps = logps.view(others["target"].shape)
    ratio, advantage = (logps - others["old"]).exp(), others["advantage"].unsqueeze(-1)
    gain = (ratio * advantage).minimum(ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
    away = others["reference"] - logps
    return (KL_WEIGHT * (away.exp() - away - 1) - gain).mean()


def grpo_on_policy(logps: Tensor, others: Others) -> Tensor:
    """Compute it of the policy that drew the tokens: the ratio is 1, and its derivative that of the log-probability."""
    logps = logps.view(others["target"].shape)
    return -((logps - logps.detach()).exp() * others["advantage"].unsqueeze(-1)).mean()


def gspo(logps: Tensor, others: Others) -> Tensor:
    """Compute arXiv 2507.18071: the ratio of a sequence is the geometric mean of its tokens'."""
    away = logps.view(others["target"].shape) - others["old"]
    ratio, advantage = away.mean(-1).exp(), others["advantage"]
    return -(ratio * advantage).minimum(ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage).mean()


def depth_weights(others: Others) -> list[float]:
    """Return DeepSeek-V3's weights: 1 of the main model, and λ / D of each of D further depths."""
    depths = len(others["target"]) - 1
    return [1.0, *(0.3 / depths for _ in range(depths))]


def mtp(logps: Tensor, others: Others) -> Tensor:
    of_depths = -logps.view(others["target"].shape).mean(-1)
    return torch.stack([weight * each for weight, each in zip(depth_weights(others), of_depths, strict=True)]).sum()


def _mtp_of_ours(inputs: Any, **how: Any) -> Tensor:
    found: Tensor = losses.linear_mtp_loss(
        inputs.x, inputs.head, inputs.others["target"], depth_weights=depth_weights(inputs.others), outputs=("losses",), **how
    ).loss
    return found


def _dpo_of_liger(inputs: Any) -> Tensor:
    loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)
    return loss(inputs.head, inputs.x, inputs.others["target"])[0]


def _grpo_of_liger(inputs: Any) -> Tensor:
    kind, others = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss, inputs.others
    loss = kind(beta=KL_WEIGHT, loss_type="bnpo", epsilon_low=EPSILON, epsilon_high=EPSILON)
    given = {"ref_per_token_logps": others["reference"], "old_per_token_logps": others["old"]}
    return loss(inputs.x, inputs.head, others["target"], others["target"].new_ones(others["target"].shape), others["advantage"], **given)[0]


def of_suites(inputs: str, *suites: str) -> list[Any]:
    return [case for suite in suites for case in layers(suite, "llama3-1b", SEVERAL, inputs)]


enter(
    "dpo",
    "DPO",
    of_suites("pairs", "linear", "objectives"),
    targets=(Target("linear", "ms", 33.0), Target("linear", "peak_mib", 2.6e9 / 2**20, said="2.6 GB"), ITSELF),
    fused=of_tokens(dpo, "pairs", together=2, peers={"liger": _dpo_of_liger}),
)
enter(
    "grpo",
    "GRPO",
    of_suites("rollouts", "linear", "objectives"),
    targets=(ITSELF,),
    fused=of_tokens(grpo, "tokens", peers={"liger": _grpo_of_liger}),
)
enter(
    "grpo_on_policy",
    "GRPO on policy",
    of_suites("rollouts", "objectives"),
    targets=(ITSELF,),
    fused=of_tokens(grpo_on_policy, "tokens"),
)
enter(
    "mtp",
    "multi-token prediction",
    layers("drafts", "qwen3-8b", MTP, "classes"),
    targets=OF_TOP,
    fused=Fused(logps, mtp, _mtp_of_ours, apart=True),
)
enter(
    "top_k",
    "the 64 likeliest classes, forward only",
    layers("drafts", "qwen3-8b", DISTILLED, "nothing without gradient"),
    targets=(Target("drafts", "ms", 1.0, **COMPILED),),
    fused=Fused(
        rows=lambda x, others: wide(x).log_softmax(-1).topk(min(TOP, x.shape[-1])).values,
        total=lambda rows, others: rows,
        ours=lambda inputs, **how: losses.linear_top_k(inputs.x, inputs.head, min(TOP, len(inputs.head)), **how).values,
    ),
)
enter("gspo", "GSPO", of_suites("rollouts", "objectives"), targets=(ITSELF,), fused=of_tokens(gspo, "sequences", together=1))
