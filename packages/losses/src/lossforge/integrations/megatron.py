"""Megatron Core: the cross entropy of logits whose classes are spread over a tensor-parallel group, computed by ours.

    from lossforge.integrations import megatron

    megatron.patch()                                                   # then train as before
    loss = megatron.vocab_parallel_cross_entropy(logits, labels)       # or in code of your own

Each process computes statistics of its own classes, and one all-gather of 12 bytes a token makes the loss of the whole vocabulary
(`cross_entropy` with `group=`). Logits are neither copied in float32 nor overwritten.

Tested with megatron-core 0.16.1.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lossforge.losses import cross_entropy
from lossforge.patch.patching import Patch, Replacement
from lossforge.patch.patching import patch as patch_names

TESTED = "0.16"
NO_CLASS = -100


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Compute the cross entropy of each token, where each process of a group has an equal part of the classes.

    Args:
        vocab_parallel_logits: (S, B, V / processes), the logits of this process's classes, in any floating dtype.
        target: (S, B), classes of the whole vocabulary, the same on each process.
        label_smoothing: ε in [0, (V - 1) / V]: the other classes of the whole vocabulary have ε / (V - 1) each. Megatron's own takes the
            mean of each process's classes alone, so that the processes have different losses; on one process both are the same.
        tp_group: the process group; None for Megatron's tensor-parallel group.

    Returns:
        (S, B), in float32, 0 for targets that are no class, such as -100.

    Raises:
        ValueError: label_smoothing is out of its range.
    """
    if tp_group is None:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        tp_group = get_tensor_model_parallel_group()
    logits, flat = vocab_parallel_logits.flatten(0, -2), target.flatten()
    classes = logits.shape[1] * dist.get_world_size(tp_group)
    flat = torch.where((flat >= 0) & (flat < classes), flat, NO_CLASS)
    smoothing = label_smoothing * classes / max(classes - 1, 1)  # of which the target has a part, too
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to (V - 1) / V with the V = {classes} classes, got {label_smoothing}")
    options: dict[str, Any] = {"label_smoothing": smoothing, "group": tp_group, "classes": classes, "validate": False}
    loss: Tensor = cross_entropy(logits, flat, ignore_index=NO_CLASS, reduction="none", **options)
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
