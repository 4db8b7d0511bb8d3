"""The losses of similarities, of which some belong together: of a matrix, or of two sets of features. The plain-torch form."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.features.calls import OTHERS, OWN, SAME, ContrastiveCall, SimilarityCall
from lossforge.losses.base.record import SCALAR, Keeping, Template, TemplateDocs
from lossforge.losses.base.state import without_autocast
from lossforge.losses.templates import rowwise
from lossforge.losses.templates.plain_forms import accurate, reduced_call, relative

NOWHERE = 2**62
"""The offset of a diagonal that meets no matrix."""


def similarity_reference(call: SimilarityCall) -> Tensor:
    """Compute a call in plain torch, with the whole matrix of similarities."""
    x, scale, bias = products(call)
    counts, together = related(call, x)
    if call.loss == "sigmoid":
        x = scale * x + bias
        values = (F.softplus(-x.abs()) + torch.where(together, -x, x).clamp(min=0)).sum(1)
    elif call.in_pairs:
        values = _pair_sums(call, x, together, counts & ~together)
    else:
        if call.hardness:
            own = _own(call, x)
            x, scale = torch.where(own, x * scale, x * scale + call.hardness * x.detach()), 1.0
        inside = counts & ~together if call.decoupled else counts
        values = _softmax(x, scale, inside, together)
    if call.loss == "both_sides":
        pairs = slice(call.offset, call.offset + x.shape[0])
        values = 0.5 * (values + _softmax(x.T[pairs], scale, inside.T[pairs], together.T[pairs]))
    return reduced_call(call, values)


def products(call: SimilarityCall) -> tuple[Tensor, float | Tensor, float | Tensor]:
    """Return a bᵀ, and scale and bias of the similarities."""
    a, b = accurate(call.a), accurate(call.b)
    scale = call.logit_scale if call.scale is None else call.logit_scale * call.scale.to(a.dtype)
    bias = call.logit_bias if call.bias is None else call.logit_bias + call.bias.to(a.dtype)
    with without_autocast(a):
        return a @ b.T, scale, bias


def related(call: SimilarityCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return which elements count, and which of these belong together."""
    own = _own(call, x)
    counts = torch.ones_like(own)
    if call.skip == OWN:
        counts = ~own
    elif call.skip == OTHERS:
        counts = own | (torch.arange(x.shape[1], device=x.device) >= call.pairs)
    together = own
    if call.row_labels is not None and call.column_labels is not None:
        same = call.row_labels.unsqueeze(1) == call.column_labels
        if call.skip == SAME:
            counts = own | ~same
        else:
            together = same
    if call.row_guide is not None and call.column_guide is not None and call.threshold is not None:
        above = accurate(call.row_guide) @ accurate(call.column_guide).T > call.threshold.unsqueeze(1)
        counts = counts & (own | ~above)
    return counts, together & counts


def _own(call: SimilarityCall, x: Tensor) -> Tensor:
    """Return which column is that of each row."""
    row, column = (torch.arange(n, device=x.device) for n in x.shape)
    return (row + call.offset).unsqueeze(1) == column


def _softmax(x: Tensor, scale: float | Tensor, inside: Tensor, together: Tensor) -> Tensor:
    """Return the mean of -ln p over what belongs to each row; 0 where nothing does. p is exp(scale · x) over its sum of what is inside."""
    if not x.numel():
        return x.sum(1)
    number = together.sum(1)
    read = inside | together
    x = torch.where(read, relative(torch.where(read, x, -torch.inf), 1), 0.0) * scale  # -inf · scale has a gradient of nan by scale
    least = torch.finfo(x.dtype).min  # of a row that leaves out all, log-sum-exp of -inf would have no gradient
    lse = torch.where(inside, x, -torch.inf).clamp(min=least).logsumexp(1)
    lse = torch.where(inside.any(1), lse, -torch.inf)
    near = torch.where(together, x, 0.0).sum(1) / number.clamp(min=1)
    return torch.where(number > 0, lse - near, 0.0)


def _pair_sums(call: SimilarityCall, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the losses of rows that have one sum over their positives and one over their negatives."""
    if not x.numel():
        return x.sum(1)
    alpha, beta, near, far, of_positives, of_negatives, last = call.hyper
    d = torch.where(positive, near - x, x - far)
    k = torch.where(positive, x.new_full((), alpha), x.new_full((), beta))
    if call.loss == "circle":
        k = k * (d.detach() + last).clamp(min=0)
    if call.mined:  # a pair of nan is kept, so that nan stays nan
        lowest, highest = torch.where(positive, x, torch.inf).amin(1, True), torch.where(negative, x, -torch.inf).amax(1, True)
        positive, negative = positive & ~(x - last >= highest), negative & ~(x + last <= lowest)
    least = torch.finfo(x.dtype).min  # of a row that has none, log-sum-exp of -inf would have no gradient
    p, n = [torch.where(inside, k * d, -torch.inf).clamp(min=least).logsumexp(1) for inside in (positive, negative)]
    if call.loss == "circle":
        return -F.logsigmoid(-p - n)
    pushed = of_negatives * -F.logsigmoid(-n)
    return of_positives * -F.logsigmoid(-p) + (pushed if call.negative_weight is None else pushed * call.negative_weight.to(x.dtype))


DOCS = TemplateDocs(
    targets="pairs of features, or their labels",
    arguments={
        "reduction": '"mean" over the rows, "sum", or "none", one value a row.',
        "normalize": (
            "divide each row by its length first, in float32 (float64 for float64). Unit vectors of half precision are rounded once, to "
            "its dtype."
        ),
        "group": (
            "processes over which the rows are spread, a ProcessGroup or a DeviceMesh of one dimension: each gives its own pairs, of any "
            "number, and compares them with the features of all, which go round a ring. The scalar is that of all rows, in every process; "
            '"none" gives this process\'s. Gradients are those of the sum of what all processes return, which DDP averages. '
            "torch.compile breaks its graph."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, in float32.',
    keeping=Keeping({"empty": "nan", "gradient": None}, per_call=("negatives", "negatives_guide", "logit_scale", "logit_bias")),
    autocast=True,
)
SIMILARITY = Template(
    "similarity",
    "features.similarity.launch",
    SimilarityCall,
    kept=("row_lse", "share", "column_lse"),
    differentiable=("a", "b", "scale", "bias"),
    filled=("b",),
    reference=similarity_reference,
    docs=DOCS,
)
"""It is here for memory: torch.compile of plain PyTorch is quicker where the matrix fits (one H200, supcon of 8,192 features: 2.87 ms and
1,040 MiB to 3.30 ms and 656 MiB; of 32,768 features 45.6 ms and 16,448 MiB to 55.6 ms and 1,361 MiB)."""


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
    "features.contrastive",
    ContrastiveCall,
    kept=("row_lse", "column_lse"),
    reference=contrastive_reference,
    docs=replace(rowwise.DOCS, targets="the diagonal", keeping=Keeping(forward="similarity: Tensor, offset: int = 0")),
)
