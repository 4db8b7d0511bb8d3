"""Losses of embeddings: of two vectors a row that belong together or not, or of an anchor, a positive and a negative."""

from typing import Unpack

import torch
from torch import Tensor

from lossforge.kernels.features.calls import VectorsCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import Positive, Real, Reduction
from lossforge.losses.base.options import WeightedOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.plain_forms import or_nan
from lossforge.losses.templates.vectors import VECTORS, vectors_loss


@formula(
    "cosine_embedding",
    DeviceFormula("vectors.cosine_value", terms="vectors.cosine_terms", slopes="vectors.cosine_slopes"),
)
def cosine_embedding_reference(x: Tensor, y: Tensor, label: Tensor, margin: float) -> Tensor:
    cos = (x * y).sum(-1)
    for t in (x, y):
        cos = cos / or_nan((t.square().sum(-1) + 1e-12).sqrt())
    return torch.where(label == 1, 1 - cos, torch.where(label == -1, (cos - margin).clamp(min=0), 0.0))


@loss(
    "cosine_embedding",
    VECTORS,
    Module(
        "CosineEmbeddingLoss",
        "Cosine embedding loss as torch.nn.CosineEmbeddingLoss",
        forward="input1: Tensor, input2: Tensor, target: Tensor",
        kept=("margin",),
    ),
    options=({"margin": 0.25}, {"margin": -0.5}),
    without=("gradient of target",),
    like="torch.nn.functional:cosine_embedding_loss",
)
def cosine_embedding_loss(
    input1: Tensor,  # (D,), (N, D), (..., D)
    input2: Tensor,  # as input1
    target: Tensor,  # 1 or -1, as input1 without its last dimension
    margin: Real = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[WeightedOptions],
) -> CheckedCall[VectorsCall]:
    """Cosine embedding loss of pairs of vectors, as torch.nn.functional.cosine_embedding_loss.

    L = w [1 - cos if y = 1 else max(0, cos - m)] with cos = x₁ · x₂ / √((|x₁|² + ε) (|x₂|² + ε)), m = margin and ε = 1e-12; 0 for a label
    other than 1 and -1, as in torch. A vector whose squares overflow float32, of a length from 1.8e19, makes the row's loss nan.

    When to use it: Take it for pairs of embeddings that belong together (1) or not (-1), where their lengths must not count.

    When not: Leave it where a batch has many negatives for each vector; `info_nce_loss` uses them all.

    Args:
        input1: vectors (..., D) of any floating dtype; gets a gradient.
        input2: vectors in the shape of input1; gets a gradient.
        margin: m, the cosine below which a pair that does not belong together adds nothing.

    Examples:
        >>> pairs = torch.randn(2, 8, 16, requires_grad=True)
        >>> cosine_embedding_loss(pairs[0], pairs[1], torch.randn(8).sign()).backward()
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    hyper = [checks.number("margin", margin)]
    return vectors_loss(
        "cosine_embedding", {"input1": input1, "input2": input2}, hyper, reduction, options, label=checks.tensor("target", target)
    )


@formula(
    "triplet_margin",
    DeviceFormula(
        "vectors.triplet_value",
        ("vectors.squared_value", "vectors.squared_terms", "vectors.squared_slopes"),
        "vectors.is_squared",
        terms="vectors.triplet_terms",
        slopes="vectors.triplet_slopes",
    ),
)
def triplet_margin_reference(x: Tensor, y: Tensor, z: Tensor, margin: float, p: float, eps: float, swap: float) -> Tensor:
    first, second, third = (torch.linalg.vector_norm(d + eps, p, -1) for d in (x - y, x - z, y - z))
    return (margin + first - (torch.minimum(second, third) if swap else second)).clamp(min=0)


@loss(
    "triplet_margin",
    VECTORS,
    Module(
        "TripletMarginLoss",
        "Triplet margin loss as torch.nn.TripletMarginLoss",
        forward="anchor: Tensor, positive: Tensor, negative: Tensor",
        kept=("margin",),
    ),
    switches=("swap",),
    options=({"swap": True}, {"p": 1.0}, {"p": 3.0, "margin": 0.5, "swap": True}, {"eps": 0.1}),
    like="torch.nn.functional:triplet_margin_loss",
    targets="none: a third vector",
    paper="arXiv 1503.03832",
)
def triplet_margin_loss(
    anchor: Tensor,  # (D,), (N, D), (..., D)
    positive: Tensor,  # as anchor
    negative: Tensor,  # as anchor
    margin: Positive = 1.0,
    p: Positive = 2.0,
    eps: Real = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[WeightedOptions],
) -> CheckedCall[VectorsCall]:
    """Triplet margin loss, as torch.nn.functional.triplet_margin_loss (Schroff et al. 2015, arXiv 1503.03832).

    L = w max(0, m + d(a, p) - d(a, n)) with d(x, y) the norm of x - y + ε and m = margin; with `swap` the smaller of d(a, n) and d(p, n)
    stands in place of d(a, n).

    When to use it: Take it for triplets that you choose, such as the hardest of a batch, and for search by distance.

    When not: Leave it where all other vectors of a batch may serve as negatives; `info_nce_loss` uses them all.

    Args:
        anchor: vectors (..., D) of any floating dtype; gets a gradient.
        positive: vectors in the shape of anchor that belong to it; gets a gradient.
        negative: vectors in the shape of anchor that do not; gets a gradient.
        margin: m above 0, by how much the negative must be further away.
        p: the norm's degree, at least 1.
        eps: ε, added to each difference.
        swap: take the negative's distance from the positive where that is smaller.

    Examples:
        >>> triplets = torch.randn(3, 8, 16, requires_grad=True)
        >>> triplet_margin_loss(triplets[0], triplets[1], triplets[2]).backward()
    """
    hyper = [checks.number("margin", margin, 0.0, exclusive=True), checks.number("p", p, 1.0), checks.number("eps", eps)]
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    tensors = {"anchor": anchor, "positive": positive, "negative": negative}
    return vectors_loss("triplet_margin", tensors, [*hyper, float(swap)], reduction, options)
