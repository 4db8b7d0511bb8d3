"""The losses of the positive and the negative classes of a sample: the plain-torch form."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import MultilabelCall
from lossforge.losses.reference import accurate, reduced
from lossforge.losses.templates.docs import SCALAR, TemplateDocs
from lossforge.losses.templates.record import Template


def multilabel_reference(a: MultilabelCall) -> Tensor:
    """Compute a call in plain torch."""
    return _of_rows(a) + _of_rows(a._replace(x=a.x.t(), target=a.target.t())) if a.paired else _of_rows(a)


def _of_rows(a: MultilabelCall) -> Tensor:
    x, positive = accurate(a.x), a.target > 0.5
    compared = positive.any(1, keepdim=True) & ~positive.all(1, keepdim=True) if a.paired else torch.ones_like(positive[:, :1])
    terms = [
        torch.where(compared, t.masked_fill(left_out, -torch.inf), 0.0) for t, left_out in ((x / a.tn, positive), (-x / a.tp, ~positive))
    ]
    if not a.paired:
        terms = [torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in terms]
    n, p = (t.logsumexp(1) for t in terms)
    values = torch.where(compared[:, 0], -F.logsigmoid(-a.tn * n - a.tp * p), 0.0) if a.paired else n + p
    divisor = a.normalizer
    if divisor is None and a.reduction == "mean":
        divisor = positive.any(1).sum().clamp(min=1) if a.paired else torch.tensor(len(x), device=x.device)
    return reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)


MULTILABEL = Template(
    "multilabel",
    MultilabelCall,
    kept=("divisor", "stats", "column_divisor", "column_stats"),
    reference=multilabel_reference,
    docs=TemplateDocs(
        targets="several classes a sample, dense",
        returns=f'{SCALAR}; with reduction "none" one value a sample, in float32.',
    ),
)
