"""The losses of a matrix of similarities, over its rows and its columns: the plain-torch form."""

from dataclasses import replace

import torch
from torch import Tensor

from lossforge.kernels.call import ContrastiveCall
from lossforge.losses.reference import accurate, reduced
from lossforge.losses.templates import rowwise
from lossforge.losses.templates.docs import Keeping
from lossforge.losses.templates.record import Template


def contrastive_reference(a: ContrastiveCall) -> Tensor:
    """Compute a call in plain torch."""
    x = accurate(a.x) * a.logit_scale
    pairs = x.shape[0]
    own = x.diagonal(a.offset)[:pairs]
    columns = x[:, a.offset : a.offset + pairs]
    values = 0.5 * (x.logsumexp(1) - own) + 0.5 * (columns.logsumexp(0) - own) if x.numel() else x.sum(1)
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = torch.tensor(pairs, device=x.device)
    return reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)


CONTRASTIVE = Template(
    "contrastive",
    ContrastiveCall,
    kept=("row_lse", "column_lse"),
    reference=contrastive_reference,
    docs=replace(rowwise.DOCS, targets="the diagonal", keeping=Keeping(forward="similarity: Tensor, offset: int = 0")),
)
