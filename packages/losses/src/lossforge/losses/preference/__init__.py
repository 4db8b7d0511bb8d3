"""Preference objectives over log-probabilities, as functions and modules.

They are plain torch: their tensors hold one number a sequence or token.

Everywhere:

- `logps`: natural logarithms of the probabilities that a model gives to a completion, summed over its tokens (one number a sequence) unless
    the loss says mean. `selective_log_softmax` makes per-token ones from logits, and `sequence_logps` these from per-token ones.
- Hyper-parameters are numbers as in lossforge.losses.functional, also as 0-d tensors on the CPU, which torch.compile takes without
    compiling anew.
- `reduction`: "mean" (default), "sum", or "none" for one loss an item, in the shape of the items.
- `normalizer`: number or 0-d tensor that takes the place of the mean's divisor: Σ loss / normalizer, with reduction "mean" or "sum". Give
    the number of items of the whole batch where it is split into micro-batches or over devices.
- `empty`: what a mean over nothing (a divisor of 0) gives: "nan", or "zero", with gradient 0.

Arguments may be float32, float16, bfloat16 or float64, mixed. Everything is computed and returned in float32 (float64 where an argument is
float64); gradients come in the dtype of their argument, for every floating argument unless a loss says otherwise, as often as one likes.
Arguments are checked from shapes, dtypes and devices alone, before any computation; nothing synchronises with the host.

A module's `forward` takes the function's tensors in its order, and what each call brings (normalizer, margin, policy_nll_loss, mask, kl)
by keyword.

Examples:
    From hidden states (N, T, H) and a model's linear head, without its logits. `index` (N, T) holds the token that each position predicts,
    -100 in prompts and padding; of pairs, the chosen completions stand before the rejected ones. The reference model takes no gradient.

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

    KTO also takes prompts with the completion of another one, whose log-probabilities carry no gradient:

    >>> with torch.no_grad():
    ...     kl = sequence_logps(logps_of(kl_hidden, head, kl_index))
    ...     reference_kl = sequence_logps(logps_of(reference_kl_hidden, reference_head, kl_index))
    >>> kto = kto_loss(*sums.chunk(2), kl, *reference_sums.chunk(2), reference_kl)
"""

from lossforge.losses.preference.common import sequence_logps
from lossforge.losses.preference.grpo import grpo_loss
from lossforge.losses.preference.kto import kto_loss
from lossforge.losses.preference.pairwise import bradley_terry_loss, cpo_loss, dpo_loss, orpo_loss, simpo_loss

# isort: split
from lossforge.losses.modules import BradleyTerryLoss, CPOLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss

__all__ = [
    "BradleyTerryLoss",
    "CPOLoss",
    "DPOLoss",
    "GRPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "SimPOLoss",
    "bradley_terry_loss",
    "cpo_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "sequence_logps",
    "simpo_loss",
]
