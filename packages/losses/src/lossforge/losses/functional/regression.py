"""Losses of a difference x - y."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.functional.common import ElementwiseOptions
from lossforge.losses.functional.elementwise import elementwise_loss
from lossforge.losses.repeat import repeated
from lossforge.losses.types import Reduction


@repeated
def l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Mean absolute error (MAE), as torch.nn.functional.l1_loss.

    L = w |x - y|; the mean divides by Σ w where weights are given. A class-index target stands for its one-hot vector: on softmax
    probabilities that is the noise-robust MAE of Ghosh et al. 2017 (arXiv 1712.09482).

    Args: input of a floating dtype; target of any real dtype in its shape, or class indices in its shape without dim, -1 background and -2
    ignored: an integer target (N,) of an input (N, N) is read as class indices, where torch broadcasts it; target_b, lam: a mixup pair,
    y = λ [j = target] + (1 - λ) [j = target_b]; dim: the classes' dimension. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(
        "l1",
        input,
        target,
        [],
        reduction,
        options,
        weight=weight,
        mean_of_weights=True,
    )


@repeated
def mse_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Mean squared error (MSE), as torch.nn.functional.mse_loss.

    L = w (x - y)²; the mean divides by Σ w where weights are given. On softmax probabilities with class indices: the Brier score.

    Args: as in l1_loss.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(
        "mse",
        input,
        target,
        [],
        reduction,
        options,
        weight=weight,
        mean_of_weights=True,
    )


@repeated
def huber_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    reduction: Reduction = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Huber loss, as torch.nn.functional.huber_loss (Huber 1964, doi 10.1214/aoms/1177703732).

    L = w [½ d² if |d| ≤ δ else δ (|d| - ½ δ)] with d = x - y; as in torch the mean divides by the number of elements, also with weights.

    Args: delta: above 0, in the units of x. Others: as in l1_loss.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    delta = checks.number("delta", delta, 0.0, exclusive=True)
    return elementwise_loss("huber", input, target, [delta], reduction, options, weight=weight)


@repeated
def smooth_l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    beta: float = 1.0,
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Smooth L1 loss, as torch.nn.functional.smooth_l1_loss (Girshick 2015, arXiv 1504.08083): Huber's divided by β.

    L = w [½ d² / β if |d| < β else |d| - ½ β] with d = x - y; the mean divides by Σ w where weights are given. β = 0 is the L1 loss.

    Args: beta: at least 0, in the units of x. Others: as in l1_loss.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    beta = checks.number("beta", beta, 0.0)
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    smooth = checks.nonzero(beta)
    return elementwise_loss(
        "smooth_l1" if smooth else "l1",
        input,
        target,
        [beta] if smooth else [],
        reduction,
        options,
        weight=weight,
        mean_of_weights=True,
    )
