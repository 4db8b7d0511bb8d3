"""SpecForge: the cross entropy and the acceptance of EAGLE-3 and P-EAGLE drafts, computed by ours.

    from lossforge.integrations import specforge

    specforge.patch()          # before training

SpecForge's own kernel of the cross entropy refuses more than 131,072 classes, and needs a GPU; its acceptance is plain PyTorch, two
softmaxes of the logits' size. From hidden states, without logits, `linear_draft_loss` computes the same.

Tested with SpecForge 0.2.0.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lossforge.losses import cross_entropy, draft_loss_with_logits
from lossforge.patch.patching import Patch, Replacement
from lossforge.patch.patching import patch as patch_names

TESTED = "0.2"
Means = tuple[Tensor, Tensor]


def _soft_cross_entropy(own: Any) -> Any:
    class SoftCrossEntropy:
        """In place of an autograd function."""

        @staticmethod
        def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
            """Return the cross entropy of the tokens that the mask has, over the number of all tokens."""
            rows: Tensor = cross_entropy(logits.flatten(0, 1), target.flatten(0, 1), reduction="none")
            return torch.where(position_mask.flatten().bool(), rows, 0.0).mean()

    return SoftCrossEntropy


def _acceptance(own: Any) -> Any:
    @functools.wraps(own)
    def compute_acceptance_rate(
        *,
        logits: Tensor,
        target_probs: Tensor,
        position_mask: Tensor,
        eps: float = 1e-8,
        reduce_fn: Callable[..., Means] | None = None,
    ) -> Means:
        log_q = target_probs.flatten(0, -2).log()  # of all classes, of which the draft has some: their log-sum-exp is 0
        over_all = torch.zeros(len(log_q), dtype=torch.float32, device=log_q.device)
        some = target_probs.flatten(0, -2).any(-1)  # padding has probability 0
        given: Any = {"kind": "log_tv", "teacher_lse": over_all, "weight": some, "reduction": "none"}
        rows = draft_loss_with_logits(logits.flatten(0, -2), log_q, **given)
        mask = position_mask.flatten().to(rows.dtype)

        def mean(values: Tensor) -> Tensor:
            total, count = (values * mask).sum(), mask.sum().clamp_min(eps)
            if reduce_fn is not None:
                total, count = reduce_fn(local_correct=total, local_denom=count)
                count = count.clamp_min(eps)
            return total / count

        accepted = some & rows.isfinite()
        return mean(torch.where(accepted, (-rows).exp(), 0.0)), mean(torch.where(accepted, -rows, 0.0))

    return compute_acceptance_rate


REPLACED = (
    Replacement("specforge.core.loss:LogSoftmaxLoss", _soft_cross_entropy, "(ctx, logits, target, position_mask)", method="forward"),
    Replacement(
        "specforge.core.lk_loss:compute_acceptance_rate",
        _acceptance,
        "(*, logits, target_probs, position_mask, eps=1e-08, reduce_fn=None)",
    ),
)


def patch(force: bool = False) -> Patch:
    """Replace SpecForge's cross entropy and acceptance by ours.

    Args:
        force: go on where SpecForge has other parameters than those that were tested.

    Returns:
        a handle: `undo()` puts SpecForge's own functions back.

    Raises:
        ModuleNotFoundError: SpecForge is not installed.
        IntegrationError: SpecForge is not as it was tested; the message says what differs.
    """
    return patch_names("specforge", TESTED, REPLACED, force=force)
