"""Preference objectives over log-probabilities, as functions and modules.

They are plain torch, because their tensors hold only one number a sequence or token.

Common to all:

- `logps`: natural logarithms of the probabilities that a model gives to a completion, summed over its tokens (one number a sequence),
    unless the loss says mean. `selective_log_softmax` computes those of tokens from logits, `sequence_logps` those of sequences from them.
- Hyper-parameters are numbers, as in lossforge.losses.functional. They may be 0-d tensors on the CPU, which torch.compile accepts without
    compiling anew.
- `reduction`: "mean" (default), "sum", or "none" for one loss an item, in the shape of the items.
- `normalizer`: number or 0-d tensor that replaces the mean's divisor: Σ loss / normalizer, with reduction "mean" or "sum". If a batch is
    split into micro-batches or over devices, give the number of items of the complete batch.
- `empty`: the result of a mean over nothing (a divisor of 0): "nan", or "zero", with gradient 0.

Arguments may be float32, float16, bfloat16 or float64, also mixed. Everything is computed and returned in float32, or in float64 if an
argument is float64. Gradients have the dtype of their argument. Every floating argument has one unless a loss says otherwise, and
derivatives of any order exist. Arguments are checked by shape, dtype and device before the computation; nothing synchronises with the host.

A module's `forward` takes the function's tensors in its order. What changes with each call (normalizer, margin, policy_nll_loss, mask, kl)
is given by keyword.

Examples:
    From hidden states (N, T, H) and a model's linear head, without computing logits. `index` (N, T) holds the token that each position
    predicts, -100 in prompts and padding. The chosen completions of all pairs come before the rejected ones. The reference model has no
    gradient.

    >>> def logps_of(hidden, head, index):
    ...     return linear_selective_log_softmax(hidden, head.weight, index, head.bias)  # (N, T), 0 where index is -100
    >>> mask = index != -100
    >>> logps = logps_of(hidden, head, index)
    >>> with torch.no_grad():
    ...     reference_logps = logps_of(reference_hidden, reference_head, index)
    >>> sums, reference_sums = sequence_logps(logps, mask), sequence_logps(reference_logps, mask)
    >>> means = sequence_logps(logps, mask, average_log_prob=True)
    >>> dpo = dpo_loss(*sums.chunk(2), *reference_sums.chunk(2))
    >>> cpo = cpo_loss(*sums.chunk(2))
    >>> simpo = simpo_loss(*means.chunk(2))
    >>> orpo = orpo_loss(*means.chunk(2))
    >>> grpo = grpo_loss(logps, advantages, old_logps, reference_logps, mask, beta=0.04)

    KTO also needs each prompt with the completion of another prompt; these log-probabilities have no gradient:

    >>> with torch.no_grad():
    ...     kl = sequence_logps(logps_of(kl_hidden, head, kl_index))
    ...     reference_kl = sequence_logps(logps_of(reference_kl_hidden, reference_head, kl_index))
    >>> kto = kto_loss(*sums.chunk(2), kl, *reference_sums.chunk(2), reference_kl)
"""

from lossforge.losses.functional import (
    bradley_terry_loss,
    cpo_loss,
    dpo_loss,
    grpo_loss,
    kto_loss,
    orpo_loss,
    ppo_value_loss,
    sequence_logps,
    simpo_loss,
    tpo_loss,
)
from lossforge.losses.modules import BradleyTerryLoss, CPOLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, PPOValueLoss, SimPOLoss, TPOLoss

__all__ = [
    "BradleyTerryLoss",
    "CPOLoss",
    "DPOLoss",
    "GRPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "PPOValueLoss",
    "SimPOLoss",
    "TPOLoss",
    "bradley_terry_loss",
    "cpo_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "ppo_value_loss",
    "sequence_logps",
    "simpo_loss",
    "tpo_loss",
]
