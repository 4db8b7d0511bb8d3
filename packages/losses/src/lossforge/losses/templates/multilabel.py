"""The losses of the positive and the negative classes of a sample: the plain-torch form."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import MultilabelCall
from lossforge.losses.base.record import SCALAR, Template, TemplateDocs
from lossforge.losses.reference import accurate, reduced_call


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
    return reduced_call(a, values, count=positive.any(1).sum().clamp(min=1) if a.paired else None)


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
