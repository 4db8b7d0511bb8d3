"""Losses of a margin, by which a score must exceed another score, or 0."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import MarginsCall
from lossforge.kernels.elements.calls import PointwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import Real, Reduction
from lossforge.losses.base.options import CheckedOptions, MaskedWeightedOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import logistic, tl
from lossforge.losses.templates.margins import MARGIN_LISTS, MARGINS, margins_loss
from lossforge.losses.templates.pointwise import POINTWISE, pointwise_loss


def soft_margin(x, y):
    _, wrong, log1p = logistic(x * y)
    return log1p - tl.minimum(x * y, 0.0, propagate_nan=tl.PropagateNan.ALL), -wrong * y, -wrong * x


@formula("soft_margin", DeviceFormula(soft_margin, variables=2))
def soft_margin_reference(x: Tensor, y: Tensor) -> Tensor:
    return -F.logsigmoid(y * x)


@loss(
    "soft_margin",
    POINTWISE,
    Module("SoftMarginLoss", "Soft margin loss as torch.nn.SoftMarginLoss"),
    like="torch.nn.functional:soft_margin_loss",
    targets="1 or -1",
)
def soft_margin_loss(
    input: Tensor,  # any shape
    target: Tensor,  # 1 or -1, as input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[MaskedWeightedOptions],
) -> CheckedCall[PointwiseCall]:
    """Soft margin loss of labels 1 and -1, as torch.nn.functional.soft_margin_loss: binary cross entropy in other labels.

    L = w ln(1 + exp(-y x)). It is finite at any finite y x, where torch's overflows beyond 88.

    When to use it: Take it where labels are 1 and -1 already. It equals `bce` of the labels 1 and 0.

    When not: Leave it where labels are probabilities or class indices; `bce` takes these.

    Args:
        target: 1 or -1 in the shape of input, of any real dtype; gets a gradient where it asks for one.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return pointwise_loss("soft_margin", {"input": input, "target": target}, [], reduction, options)


def positive(h):
    """Return h where it is above 0, else 0; nan stays nan, and the slope at 0 is 1, as of torch's clamp."""
    return tl.where(h < 0.0, 0.0, h)


def hinge_embedding(x, y, margin):
    return tl.where(y == 1.0, 0.0, positive(margin - x)) + tl.where(y == -1.0, 0.0, x)


@formula("hinge_embedding", DeviceFormula(hinge_embedding, variables=2))
def hinge_embedding_reference(x: Tensor, y: Tensor, margin: float) -> Tensor:
    return torch.where(y == 1, 0.0, (margin - x).clamp(min=0)) + torch.where(y == -1, 0.0, x)


@loss(
    "hinge_embedding",
    POINTWISE,
    Module("HingeEmbeddingLoss", "Hinge embedding loss as torch.nn.HingeEmbeddingLoss", kept=("margin",)),
    options=({"margin": 2.5},),
    without=("gradient of target",),
    like="torch.nn.functional:hinge_embedding_loss",
    targets="1 or -1",
)
def hinge_embedding_loss(
    input: Tensor,  # distances, any shape
    target: Tensor,  # 1 or -1, as input
    margin: Real = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[MaskedWeightedOptions],
) -> CheckedCall[PointwiseCall]:
    """Hinge embedding loss of distances, as torch.nn.functional.hinge_embedding_loss.

    L = w [x if y = 1 else max(0, m - x)], m = margin; a label other than 1 and -1 has the sum of both, as in torch.

    When to use it: Take it for distances that you have already, of pairs that belong together (1) or not (-1).

    When not: Leave it where the pairs are embeddings; `cosine_embedding` takes these. Where a batch has many negatives for each,
    `info_nce_loss` uses them all.

    Args:
        input: distances, of any shape and floating dtype; gets a gradient.
        target: 1 or -1 in the shape of input, of any real dtype; has no gradient.
        margin: m, the distance beyond which a pair that does not belong together adds nothing.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    hyper = [checks.number("margin", margin)]
    return pointwise_loss("hinge_embedding", {"input": input, "target": target}, hyper, reduction, options, labels="target")


def margin_ranking(x, y, label, margin):
    return positive(margin - label * (x - y))


@formula("margin_ranking", DeviceFormula(margin_ranking, variables=3))
def margin_ranking_reference(x: Tensor, y: Tensor, label: Tensor, margin: float) -> Tensor:
    return (margin - label * (x - y)).clamp(min=0)


@loss(
    "margin_ranking",
    POINTWISE,
    Module(
        "MarginRankingLoss",
        "Margin ranking loss as torch.nn.MarginRankingLoss",
        forward="input1: Tensor, input2: Tensor, target: Tensor",
        kept=("margin",),
    ),
    options=({"margin": 0.5},),
    like="torch.nn.functional:margin_ranking_loss",
    targets="1 or -1",
)
def margin_ranking_loss(
    input1: Tensor,  # any shape
    input2: Tensor,  # as input1
    target: Tensor,  # 1 or -1, as input1
    margin: Real = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[MaskedWeightedOptions],
) -> CheckedCall[PointwiseCall]:
    """Margin ranking loss of two scores, as torch.nn.functional.margin_ranking_loss.

    L = w max(0, m - y (x₁ - x₂)), m = margin.

    When to use it: Take it where one of two items must score above the other, by at least the margin.

    When not: Leave it where every pair must keep a gradient; `soft_margin` of the difference x₁ - x₂, which is RankNet's loss, has one
    everywhere.

    Args:
        input1: scores of any shape and floating dtype; gets a gradient.
        input2: scores in the shape of input1; gets a gradient.
        target: 1 where input1 must be larger, -1 where input2, in the shape of input1; gets a gradient where it asks for one.
        margin: m, by how much one score must exceed the other.
        weight: broadcasts to input1, a factor of each element's loss.

    Examples:
        >>> scores = torch.randn(2, 8, requires_grad=True)
        >>> margin_ranking_loss(scores[0], scores[1], torch.randn(8).sign()).backward()
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    tensors = {"input1": input1, "input2": input2, "target": target}
    checks.same_dimensions(tensors)
    return pointwise_loss("margin_ranking", tensors, [checks.number("margin", margin)], reduction, options)


def multi_margin(d, margin, p):
    h = margin - d
    h = tl.where(h <= 0.0, 0.0, h)  # nan stays nan, and the slope at 0 is 0, as torch's
    return tl.where(p == 2.0, h * h, h)


@formula("multi_margin", DeviceFormula(multi_margin))
def multi_margin_reference(d: Tensor, margin: float, p: float) -> Tensor:
    h = torch.where(margin - d <= 0, 0.0, margin - d)
    return h.square() if p == 2 else h


@loss(
    "multi_margin",
    MARGINS,
    Module("MultiMarginLoss", "Multi-class margin loss as torch.nn.MultiMarginLoss", kept=("margin",)),
    options=({"p": 2}, {"margin": 2.5}, {"p": 2, "margin": 0.3}),
    like="torch.nn.functional:multi_margin_loss",
    paper="doi 10.1162/15324430260185628",
)
def multi_margin_loss(
    input: Tensor,  # (C,), (N, C)
    target: Tensor,  # class indices (), (N,)
    p: int = 1,
    margin: Real = 1.0,
    weight: Tensor | None = None,  # (C,)
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[CheckedOptions],
) -> CheckedCall[MarginsCall]:
    """Multi-class margin loss, as torch.nn.functional.multi_margin_loss (Crammer and Singer 2001, doi 10.1162/15324430260185628).

    L = 1/C Σ w_t max(0, m - x_t + x_i)^p, the sum over the classes i that are not the target t; m = margin.

    When to use it: Take it where only the order of the classes counts, and a row that is right by the margin must add nothing.

    When not: Leave it where probabilities are wanted, or there are many classes; cross entropy learns from every row.

    Args:
        p: the power, 1 or 2.
        margin: m, by how much the target's logit must exceed each other logit.
    """
    checks.one_of("p", checks.of_host("p", p), (1, 2))
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    hyper = [checks.number("margin", margin), float(p)]
    return margins_loss(MarginsCall("multi_margin", input, target, weight, hyper=hyper, reduction=reduction), options, lists=False)


@loss(
    "multilabel_margin",
    MARGIN_LISTS,
    Module("MultiLabelMarginLoss", "Multi-label margin loss as torch.nn.MultiLabelMarginLoss"),
    formula="multi_margin",
    like="torch.nn.functional:multilabel_margin_loss",
)
def multilabel_margin_loss(
    input: Tensor,  # (C,), (N, C)
    target: Tensor,  # lists of class indices (C,), (N, C)
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[CheckedOptions],
) -> CheckedCall[MarginsCall]:
    """Multi-label margin loss, as torch.nn.functional.multilabel_margin_loss.

    L = 1/C Σ max(0, 1 - (x_j - x_i)), the sum over the row's classes j and all other classes i. A class that is listed twice counts twice.

    When to use it: Take it where a row has several classes, and all that counts is that they score above the other classes.

    When not: Leave it where labels are multi-hot, or a row may have no class: it then adds nothing. `bce` takes both.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    call = MarginsCall("multi_margin", input, target, hyper=[1.0, 1.0], reduction=reduction)
    return margins_loss(call, options, lists=True)
