"""Classification losses of dense detectors, whose targets say how good a box is."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.functional.common import ElementwiseOptions, UnscoredOptions
from lossforge.losses.functional.elementwise import elementwise_loss
from lossforge.losses.repeat import repeated
from lossforge.losses.types import Reduction


@repeated
def quality_focal_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    score: Tensor | None = None,  # as a class-index target
    beta: float = 2.0,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[UnscoredOptions],
) -> Tensor:
    """Quality focal loss on logits, as mmdetection's quality_focal_loss (Li et al. 2020, arXiv 2006.04388).

    L = w |y - p|^β [y softplus(-x) + (1 - y) softplus(x)], p = σ(x). The factor |y - p|^β is differentiated as well.

    Args: target: class indices (-1 background, where mmdetection has the number of classes; -2 ignored), whose row is y = score in its
    class and 0 elsewhere, or without score y = 1; or the qualities y in [0, 1] themselves; dim: the classes' dimension; score: in [0, 1],
    such as the IoU of the box; beta: at least 0; reduction: "mean" sums over the classes and averages over the rows not ignored, as
    mmdetection does, "none" gives the loss of each element (mmdetection: of each row); weight: one a row has shape (N, 1) for (N, C)
    logits; normalizer: mmdetection's avg_factor. Others: see lossforge.losses.functional. For β < 1 and saturated logits the gradient
    takes its limit.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    beta = checks.number("beta", beta, 0.0)
    scored: ElementwiseOptions = {**options, "score": score}
    return elementwise_loss("quality_focal", input, target, [beta], reduction, scored, weight=weight, mean_of_rows=True)


@repeated
def varifocal_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    score: Tensor | None = None,  # as a class-index target
    alpha: float = 0.75,
    gamma: float = 2.0,
    iou_weighted: bool = True,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[UnscoredOptions],
) -> Tensor:
    """Varifocal loss on logits, as mmdetection's varifocal_loss (Zhang et al. 2021, arXiv 2008.13367).

    L = w v [y softplus(-x) + (1 - y) softplus(x)] with v = y where y > 0 and v = α p^γ elsewhere, p = σ(x). The factor p^γ is
    differentiated as well.

    Args: target, score: as in quality_focal_loss, y the IoU-aware target; a score of 0 makes its class a negative, as in mmdetection;
    alpha, gamma: at least 0; iou_weighted: False is v = 1 where y > 0; reduction: "mean" is over all elements not ignored; normalizer:
    mmdetection's avg_factor. Others: see lossforge.losses.functional. For γ < 1 and saturated logits the gradient takes its limit.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    alpha = checks.number("alpha", alpha, 0.0)
    gamma = checks.number("gamma", gamma, 0.0)
    iou_weighted = checks.flag("iou_weighted", iou_weighted)
    scored: ElementwiseOptions = {**options, "score": score}
    return elementwise_loss("varifocal", input, target, [alpha, gamma, float(iou_weighted)], reduction, scored, weight=weight)
