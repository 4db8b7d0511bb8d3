"""TRL: its fused log-probabilities and divergences, and those of logits in its experimental trainers, computed by ours.

    from lossforge.integrations import trl

    trl.patch()                       # then SFTTrainer, DPOTrainer, GRPOTrainer … as before

SFT, DPO, KTO, GRPO, RLOO and AsyncGRPO take log-probabilities, entropy and the rest from one fused function, distillation takes its
divergence from another: both are replaced. Trainers that have logits (CPO, ORPO, SDFT, SDPO, A2PO, TPO, GKD, GOLD) take them from functions
of `trl.trainer.utils` and from their `generalized_jsd_loss`. The trainers, their counts and their divisors are untouched.

Tested with TRL 1.16.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.losses import (
    LinearTeacher,
    js_div_with_logits,
    linear_cross_entropy,
    linear_js_div,
    selective_log_softmax,
)
from lossforge.losses.base.option_types import RowOutput
from lossforge.patch.patching import Patch, Replacement, say_once
from lossforge.patch.patching import patch as patch_names

TESTED = "1.16"
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
RESULTS: dict[RowOutput, str] = {"entropy": "entropy", "correct": "is_top1", "log_p2": "log_sum_sq_probs", "mean_logit": "mean_logits"}
"""TRL's names of further results by ours, in our order."""


def _not_whole(*weights: Tensor) -> bool:
    """Return whether a weight lies in parts on several processes, gathered for the call alone: DeepSpeed ZeRO-3."""
    return any(hasattr(weight, "ds_id") for weight in weights)


def _log_probs(own: Any) -> Any:
    class ChunkedLogProbFunction:
        """Log-probabilities of tokens, and what is logged of them, from hidden states."""

        forward = own.forward

        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            final_logit_softcapping: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = OUTPUTS,
        ) -> tuple[Tensor | None, ...]:
            if _not_whole(weight):
                say_once("TRL's own log-probabilities run: DeepSpeed ZeRO-3 gathers the head for their backward alone")
                given = temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
                found: tuple[Tensor | None, ...] = own.apply(hidden, weight, bias, targets, *given)
                return found
            cap = None if final_logit_softcapping is None else final_logit_softcapping / temperature
            asked = [ours for ours, theirs in RESULTS.items() if theirs in outputs]
            results = linear_cross_entropy(
                hidden,
                weight.to(hidden.dtype),
                targets,
                None if bias is None else bias.to(hidden.dtype),
                reduction="none",
                scale=logit_scale / temperature,
                softcap=cap,
                outputs=("lse", *asked),  # a record also where nothing else is asked for
            )
            return -results.loss, *[getattr(results, name, None) for name in ("entropy", "log_p2", "mean_logit", "correct")]

    return ChunkedLogProbFunction


def _divergence(own: Any) -> Any:
    class ChunkedDivergenceFunction:
        """Divergence of a student's tokens from a teacher's, and the student's entropy, from hidden states."""

        forward = own.forward

        @staticmethod
        def apply(
            student_hidden: Tensor,
            student_weight: Tensor,
            student_bias: Tensor | None,
            teacher_hidden: Tensor,
            teacher_weight: Tensor,
            teacher_bias: Tensor | None,
            beta: float,
            temperature: float = 1.0,
            student_logit_scale: float = 1.0,
            student_final_logit_softcapping: float | None = None,
            teacher_logit_scale: float = 1.0,
            teacher_final_logit_softcapping: float | None = None,
        ) -> tuple[Tensor, Tensor]:
            caps = student_final_logit_softcapping, teacher_final_logit_softcapping
            if _not_whole(student_weight, teacher_weight):
                say_once("TRL's own divergence runs: DeepSpeed ZeRO-3 gathers the heads for it alone")
                layers = student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias
                scales = student_logit_scale, caps[0], teacher_logit_scale, caps[1]
                found: tuple[Tensor, Tensor] = own.apply(*layers, beta, temperature, *scales)
                return found
            hidden, weight, bias = _in_one_dtype(student_hidden, student_weight, student_bias)
            softened: dict[str, Any] = {"temperature": temperature, "scale": student_logit_scale, "softcap": caps[0]}
            # theirs gives the teacher no gradient
            layer = _in_one_dtype(teacher_hidden.detach(), teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach())
            teacher = LinearTeacher(*layer, scale=teacher_logit_scale, softcap=caps[1])
            results = linear_js_div(hidden, weight, teacher, bias, beta=beta, reduction="none", outputs=("entropy",), **softened)
            return results.loss, results.entropy

    return ChunkedDivergenceFunction


def _in_one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def _logps(own: Any) -> Any:
    def selective_log_softmax_of(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Tensor:
        if temperature <= 0:
            raise ValueError("temperature must be positive")
        if row_mask is not None:
            index = index.masked_fill(row_mask == 0, -100)
        found = selective_log_softmax(logits, index, temperature=temperature)
        assert isinstance(found, Tensor)
        return found

    return selective_log_softmax_of


def _entropy(own: Any) -> Any:
    def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
        nothing = torch.full(logits.shape[:-1], -100, dtype=torch.int64, device=logits.device)
        return selective_log_softmax(logits, nothing, outputs=("entropy",)).entropy

    return entropy_from_logits


def _logps_and_entropy(own: Any) -> Any:
    def selective_log_softmax_and_entropy(
        logits: Tensor, index: Tensor, entropy_requires_grad: bool = True, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if temperature <= 0:
            raise ValueError("temperature must be positive")
        if row_mask is not None:
            index = index.masked_fill(row_mask == 0, -100)
        logps, entropy = selective_log_softmax(logits, index, temperature=temperature, outputs=("entropy",))
        entropy = entropy if entropy_requires_grad else entropy.detach()
        return logps, entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)

    return selective_log_softmax_and_entropy


def _jsd(own: Any) -> Any:
    def generalized_jsd_loss(
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: Tensor | int | None = None,
        **more: Any,
    ) -> Any:
        asked = [name for name, value in more.items() if value and name != "add_tail"]
        if asked or (num_items_in_batch is None and reduction not in ("batchmean", "sum")):
            say_once(f"TRL's own generalized_jsd_loss runs: {', '.join(asked) or f'reduction={reduction!r}'} is not in lossforge")
            given = {"labels": labels, "beta": beta, "temperature": temperature, "reduction": reduction, **more}
            return own(student_logits, teacher_logits, **given, num_items_in_batch=num_items_in_batch)
        divisor: Any = num_items_in_batch
        if divisor is None:
            count = max(len(student_logits), 1) if labels is None else (labels != -100).sum().clamp(min=1)
            divisor = count if reduction == "batchmean" else 1
        if isinstance(divisor, Tensor):
            divisor = divisor.to(student_logits.device)
        student, teacher = student_logits.flatten(0, -2), teacher_logits.flatten(0, -2)
        named = {"labels": None if labels is None else labels.flatten(), "normalizer": divisor}
        return js_div_with_logits(student, teacher, beta, temperature, "mean", **named)

    return generalized_jsd_loss


JSD = "student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction='batchmean'"
FUSED = (
    Replacement(
        "trl.trainer.utils:_ChunkedLogProbFunction",
        _log_probs,
        "(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0, "
        "outputs=('entropy', 'log_sum_sq_probs', 'mean_logits', 'is_top1'))",
        method="forward",
    ),
    Replacement(
        "trl.trainer.distillation_trainer:ChunkedDivergenceFunction",
        _divergence,
        "(ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature=1.0, "
        "student_logit_scale=1.0, student_final_logit_softcapping=None, teacher_logit_scale=1.0, teacher_final_logit_softcapping=None)",
        method="forward",
        optional=True,  # since 1.16
    ),
    Replacement("trl.trainer.utils:selective_log_softmax", _logps, "(logits, index, temperature=1.0, row_mask=None)"),
    Replacement("trl.trainer.utils:entropy_from_logits", _entropy, "(logits, chunk_size=128)"),
    Replacement(
        "trl.trainer.utils:selective_log_softmax_and_entropy",
        _logps_and_entropy,
        "(logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None)",
    ),
)
OF_JSD = {
    "gkd.gkd_trainer:GKDTrainer": f"({JSD}, num_items_in_batch=None)",
    "gold.gold_trainer:GOLDTrainer": f"({JSD}, logits_are_probs=False, num_items_in_batch=None)",
}
EXPERIMENTAL = [
    Replacement(f"trl.experimental.{trainer}.generalized_jsd_loss", _jsd, signature, optional=True)  # some need packages
    for trainer, signature in OF_JSD.items()
]


def patch(force: bool = False) -> Patch:
    """Replace TRL's fused functions and those of logits by ours, for all trainers that are made or run from now on.

    Args:
        force: go on where TRL has other parameters than those that were tested.

    Returns:
        a handle: `undo()` puts TRL's own functions back.

    Raises:
        ModuleNotFoundError: TRL is not installed.
        IntegrationError: TRL is not as it was tested; the message says what differs.
    """
    return patch_names("trl", TESTED, [*FUSED, *EXPERIMENTAL], force=force)
