"""Cross entropy of the hardest rows of a batch."""

import math
from typing import Annotated, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import RowwiseCall
from lossforge.losses import checks
from lossforge.losses.autograd import compute
from lossforge.losses.reference import which_count
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.record import Prepared
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_loss
from lossforge.losses.types import Range, Reduction, UnitInterval


@loss(
    "ohem_ce",
    ROWWISE,
    Module("OHEMCrossEntropyLoss", "Cross entropy with online hard example mining"),
    formula="cross_entropy",
    options=({"threshold": 0.2, "min_kept": 3}, {"threshold": 0.0, "min_kept": 2}, {"threshold": 0.4, "min_kept": 0, "z_loss": 1e-2}),
    like="lossforge.losses.oracles.classification:ohem_ce",
    paper="arXiv 1604.03540",
)
def ohem_cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    threshold: UnitInterval = 0.7,
    min_kept: Annotated[int, Range(least=0)] = 100_000,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[RowOptions],
) -> Tensor:
    """Cross entropy with online hard example mining (OHEM; Shrivastava et al. 2016, arXiv 1604.03540), for segmentation.

    L = w_t (-ln p_t) [p_t < θ], p = softmax(x): rows with a smaller probability of their class than θ = threshold are kept; where these
    are fewer than min_kept, the min_kept rows of smallest p_t in the whole batch.

    The other rows count as ignored ones do: the mean divides by the weights of the classes of the kept rows. The rows are chosen in one
    pass over the logits, without waiting for the device; the loss then reads the kept rows alone. The choice has no gradient.

    When to use it: Take it for segmentation in which most pixels are easy, such as road and sky. It spends the gradient on hard regions.

    When not: Leave it where many labels are wrong, because those are the rows that it keeps; `generalized_ce` does the opposite. On
    balanced, easy data it only adds a pass.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b), and is kept or not as one.
        threshold: θ in [0, 1], the probability below which a row is hard.
        min_kept: the least number of rows that are kept of a batch; of a batch with fewer rows all are kept. Rows as hard as the last of
            them are kept, too.
        weight: (C,), a factor of each class, which the mean divides by. It does not change which rows are hard.
    """
    min_kept = checks.whole_number("min_kept", min_kept)
    if min_kept < 0:
        raise ValueError(f"min_kept must be at least 0, got {min_kept}")
    limit = -torch.log(torch.as_tensor(checks.number("threshold", threshold, 0.0, 1.0)))
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    keep = _hard_rows(rowwise_loss(call, options).call, limit, min_kept).view(target.shape)
    target_b = options.get("target_b")
    if target_b is not None:
        options["target_b"] = torch.where(keep, target_b.long(), ignore_index)
    return rowwise_loss(call._replace(target=torch.where(keep, target.long(), ignore_index)), options)


@torch.no_grad()
def _hard_rows(call: RowwiseCall, limit: Tensor, min_kept: int) -> Tensor:
    """Return which rows have a loss above `limit`, or one of the min_kept largest."""
    counts = which_count(call)
    plain = call._replace(weight=None, normalizer=None, z_loss=0.0, loss_scale=1.0, reduction="none", mean_of_rows=False)
    losses = compute(Prepared(plain, {}))
    hardness = torch.where(counts, losses.nan_to_num(nan=math.inf, posinf=math.inf), -math.inf)
    keep = hardness > limit
    if kept := min(min_kept, hardness.numel()):
        keep = keep | (hardness >= hardness.flatten().topk(kept).values[-1])
    return keep
