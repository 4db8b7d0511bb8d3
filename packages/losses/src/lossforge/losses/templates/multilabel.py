"""The losses of the positive and the negative classes of a sample: the plain-torch form."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import MultilabelCall
from lossforge.losses.base.record import SCALAR, Template, TemplateDocs
from lossforge.losses.templates.plain_forms import accurate, largest, reduced_call


def multilabel_reference(a: MultilabelCall) -> Tensor:
    """Compute a call in plain torch."""
    x, positive = accurate(a.x), a.target > 0.5
    if a.mask is not None:  # a factor of the exponentials
        w = a.mask.to(x.dtype)
        positive = positive & (w != 0)
        x = torch.where(w == 0, -torch.inf, x + w.log() * torch.where(positive, -a.tp, a.tn))
    return _of_rows(a, x, positive) + _of_rows(a, x.t(), positive.t()) if a.paired else _of_rows(a, x, positive)


def _of_rows(a: MultilabelCall, x: Tensor, positive: Tensor) -> Tensor:
    compared = positive.any(1, keepdim=True) & ~positive.all(1, keepdim=True) if a.paired else torch.ones_like(positive[:, :1])
    terms = [torch.where(compared, t.masked_fill(left_out, -torch.inf), 0.0) for t, left_out in ((x, positive), (-x, ~positive))]
    if not a.paired:
        terms = [torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in terms]
    tops, logs = zip(*(_log_sum(t, rate) for t, rate in zip(terms, (1 / a.tn, 1 / a.tp), strict=True)), strict=True)
    h = sum(tops) + (a.tn * logs[0] + a.tp * logs[1])
    values = torch.where(compared[:, 0], -F.logsigmoid(-h), 0.0) if a.paired else h
    return reduced_call(a, values, count=positive.any(1).sum().clamp(min=1) if a.paired else None)


def _log_sum(x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return the largest of each row, and ln Σ exp relative to it, of rate · x. A sum of both keeps its digits under a common offset."""
    top = largest(x, 1)
    nothing = (x == -torch.inf).all(1, keepdim=True)  # its log-sum-exp has no gradient
    return top.squeeze(1), ((x - top) * rate).masked_fill(nothing, torch.finfo(x.dtype).min).logsumexp(1)


MULTILABEL = Template(
    "multilabel",
    "classes.multilabel",
    MultilabelCall,
    kept=("divisor", "stats", "column_divisor", "column_stats"),
    reference=multilabel_reference,
    docs=TemplateDocs(
        targets="several classes a sample, dense",
        returns=f'{SCALAR}; with reduction "none" one value a sample, in float32.',
    ),
)
