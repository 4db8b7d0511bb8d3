"""Megatron Core: the cross entropy of logits whose classes are spread over a tensor-parallel group, computed by ours.

    from lossforge.integrations import megatron

    megatron.patch()                                                   # then train as before
    loss = megatron.vocab_parallel_cross_entropy(logits, labels)       # or in code of your own

Each process computes the log-sum-exp of its own classes, and the target's logit where the target is among them. Two collectives of 4 and 8
bytes a token make the loss of the whole vocabulary. Logits are neither copied in float32 nor overwritten.

Tested with megatron-core 0.16.1.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lossforge.integrations.patching import Patch, Replacement, say_once
from lossforge.integrations.patching import patch as patch_names
from lossforge.losses import cross_entropy

TESTED = "0.16"
NO_CLASS = -100


class _Sum(torch.autograd.Function):
    """Sum over a group. Each process has the whole loss, and gives the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        total = parts.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Compute the cross entropy of each token, where each process of a group has an equal part of the classes.

    Args:
        vocab_parallel_logits: (S, B, V / processes), the logits of this process's classes, in any floating dtype.
        target: (S, B), classes of the whole vocabulary, the same on each process.
        label_smoothing: other than 0: Megatron's own function runs, in its own tensor-parallel group.
        tp_group: the process group; None for Megatron's tensor-parallel group.

    Returns:
        (S, B), in float32. Mask the loss of targets that are no class, such as -100, as Megatron does.
    """
    if label_smoothing:
        from megatron.core.tensor_parallel import cross_entropy as theirs

        say_once("Megatron's own vocab_parallel_cross_entropy runs: label smoothing over several processes is not in lossforge")
        smoothed: Tensor = theirs._VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing)
        return smoothed
    if tp_group is None:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        tp_group = get_tensor_model_parallel_group()
    logits, flat = vocab_parallel_logits.flatten(0, -2), target.flatten()
    first = dist.get_rank(tp_group) * logits.shape[1]
    mine = (flat >= first) & (flat < first + logits.shape[1])
    local = torch.where(mine, flat - first, NO_CLASS)
    found: Any = cross_entropy(logits, local, ignore_index=NO_CLASS, reduction="none", return_lse=True)
    top = found.lse.detach().clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=tp_group)
    parts = torch.stack([(found.lse - top).exp(), torch.where(mine, found.lse - found.loss - top, 0.0)])
    shares, of_target = _Sum.apply(parts, tp_group)
    loss: Tensor = shares.log() - of_target
    return loss.view(target.shape)


def _unfused(own: Any) -> Any:
    def vocab_parallel_cross_entropy_of(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing)

    return vocab_parallel_cross_entropy_of


def _fused(own: Any) -> Any:
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)

    return fused_vocab_parallel_cross_entropy


REPLACED = (
    Replacement(
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        _unfused,
        "(vocab_parallel_logits, target, label_smoothing=0.0)",
    ),
    Replacement(
        "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
        _fused,
        "(vocab_parallel_logits, target, tp_group)",
    ),
)


def patch(force: bool = False) -> Patch:
    """Replace Megatron's cross entropies over a tensor-parallel group by ours; those of TransformerEngine stay.

    Args:
        force: go on where Megatron has other parameters than those that were tested.

    Returns:
        a handle: `undo()` puts Megatron's own functions back.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
        IntegrationError: Megatron is not as it was tested; the message says what differs.
    """
    return patch_names("megatron-core", TESTED, REPLACED, force=force)
