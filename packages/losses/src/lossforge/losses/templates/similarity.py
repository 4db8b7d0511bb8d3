"""The losses of similarities, of which some belong together: of a matrix, or of two sets of features. The plain-torch form."""

import contextlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.contrastive.call import ContrastiveCall
from lossforge.kernels.similarity.call import SimilarityCall
from lossforge.losses.base.record import SCALAR, Keeping, Template, TemplateDocs
from lossforge.losses.reference import accurate, reduced_call, relative
from lossforge.losses.state import autocast_dtype
from lossforge.losses.templates import rowwise

OWN, OTHERS = 1, 2
"""What a row leaves out: kernels/similarity/kernel.py."""


def similarity_reference(call: SimilarityCall) -> Tensor:
    """Compute a call in plain torch, with the whole matrix of similarities."""
    a, b = accurate(call.a), accurate(call.b)
    scale = call.logit_scale if call.scale is None else call.logit_scale * call.scale.to(a.dtype)
    bias = call.logit_bias if call.bias is None else call.logit_bias + call.bias.to(a.dtype)
    kind = a.device.type
    with torch.autocast(kind, enabled=False) if autocast_dtype(kind) else contextlib.nullcontext():  # it would round the product
        x = a @ b.T
    counts, together = _related(call, x)
    if call.loss == "sigmoid":
        x = scale * x + bias
        values = (F.softplus(-x.abs()) + torch.where(together, -x, x).clamp(min=0)).sum(1)
    else:
        values = _softmax(x, scale, counts, together)
    if call.loss == "both_sides":
        pairs = slice(call.offset, call.offset + x.shape[0])
        values = 0.5 * (values + _softmax(x.T[pairs], scale, counts.T[pairs], together.T[pairs]))
    return reduced_call(call, values)


def _related(call: SimilarityCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return which elements count, and which of these belong together."""
    row, column = (torch.arange(n, device=x.device) for n in x.shape)
    own = (row + call.offset).unsqueeze(1) == column
    counts = torch.ones_like(own)
    if call.skip == OWN:
        counts = ~own
    elif call.skip == OTHERS:
        counts = own | (column >= call.pairs)
    if call.row_labels is not None and call.column_labels is not None:
        own = call.row_labels.unsqueeze(1) == call.column_labels
    return counts, own & counts


def _softmax(x: Tensor, scale: float | Tensor, counts: Tensor, together: Tensor) -> Tensor:
    """Return the mean of -ln p over what belongs to each row; 0 where nothing does. p is the softmax of scale · x, of what counts."""
    if not x.numel():
        return x.sum(1)
    number = together.sum(1)
    x = torch.where(counts, relative(torch.where(counts, x, -torch.inf), 1), 0.0) * scale  # -inf · scale has a gradient of nan by scale
    least = torch.finfo(x.dtype).min  # of a row that leaves out all, log-sum-exp of -inf would have no gradient
    lse = torch.where(counts, x, -torch.inf).clamp(min=least).logsumexp(1)
    near = torch.where(together, x, 0.0).sum(1) / number.clamp(min=1)
    return torch.where(number > 0, lse - near, 0.0)


DOCS = TemplateDocs(
    targets="pairs of features, or their labels",
    arguments={
        "reduction": '"mean" over the rows, "sum", or "none", one value a row.',
        "normalize": "divide each row by its length first.",
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, in float32.',
    keeping=Keeping({"empty": "nan", "gradient": None}, per_call=("negatives", "logit_scale", "logit_bias")),
    autocast=True,
)
SIMILARITY = Template(
    "similarity",
    SimilarityCall,
    kept=("row_lse", "share", "column_lse"),
    differentiable=("a", "b", "scale", "bias"),
    filled=("b",),
    reference=similarity_reference,
    docs=DOCS,
)


def contrastive_reference(a: ContrastiveCall) -> Tensor:
    """Compute a call in plain torch."""
    x = accurate(a.x)
    if not x.numel():
        return reduced_call(a, x.sum(1))
    pairs = x.shape[0]
    paired = x[:, a.offset : a.offset + pairs]
    rows, columns = ((relative(t, dim) * a.logit_scale).log_softmax(dim) for dim, t in ((1, x), (0, paired)))
    return reduced_call(a, -0.5 * rows.diagonal(a.offset)[:pairs] - 0.5 * columns.diagonal())


CONTRASTIVE = Template(
    "contrastive",
    ContrastiveCall,
    kept=("row_lse", "column_lse"),
    reference=contrastive_reference,
    docs=replace(rowwise.DOCS, targets="the diagonal", keeping=Keeping(forward="similarity: Tensor, offset: int = 0")),
)
