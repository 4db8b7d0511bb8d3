"""Losses of log-probabilities, such as log_softmax gives them. On logits, cross_entropy and kl_div_with_logits need one pass less."""

from typing import Unpack

import torch
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.functional.common import ElementwiseOptions, Options, check_options, share
from lossforge.losses.functional.elementwise import IGNORED, elementwise_loss, per_sample
from lossforge.losses.functional.rowwise import per_class
from lossforge.losses.repeat import repeated
from lossforge.losses.types import BatchReduction, Reduction


@repeated
def nll_loss(
    input: Tensor,  # log-probabilities (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    weight: Tensor | None = None,  # (C,)
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[Options],
) -> Tensor:
    """Negative log-likelihood of log-probabilities, as torch.nn.functional.nll_loss.

    L = -w_t x_t; the mean divides by the weights of the classes of the rows not ignored. Other classes' values do not matter, nan included.

    Args: input: log-probabilities, of which nothing is asked but the target's; target: indices of any integer dtype; with target_b and
    lam a mixup pair, L = λ L(target) + (1 - λ) L(target_b); ignore_index: rows with this index have loss and gradient 0.
    Others: see lossforge.losses.functional.
    Returns: a scalar, or (N, d…) in the dtype of input with reduction "none".
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    checks.floating("input", input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-d tensor")
    check_options(input, reduction, options, Options)
    checks.whole_number("ignore_index", ignore_index)
    if isinstance(target, Tensor) and target.is_floating_point():
        if target.shape != input.shape:
            raise ValueError(f"target must have the shape of input, {tuple(input.shape)}, or hold class indices, got {tuple(target.shape)}")
        raise TypeError(f"target must hold class indices, with target_b and lam for a mixture of two, got {target.dtype}")
    dim = 0 if input.ndim == 1 else 1
    classes = input.shape[dim]
    rows = [n for d, n in enumerate(input.shape) if d != dim]
    weight = per_class("weight", weight, input, classes)

    def placed(name: str, index: Tensor) -> Tensor:
        """The index as the template of elements has it: rows that do not count by its own number, and no background."""
        index = checks.indices(name, index, rows, input, 0, classes, ignore_index, options.get("validate"))
        return torch.where(index == ignore_index, IGNORED, torch.where(index < 0, classes, index))

    def counted(index: Tensor) -> Tensor:
        """What each row counts in a mean."""
        kept = (index != IGNORED).to(dtype)
        return kept if weight is None else kept * weight.to(dtype)[index.long().clamp(0, classes - 1)]

    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    target = placed("target", target)
    given: ElementwiseOptions = {**options, "dim": dim, "validate": False}
    target_b = options.get("target_b")
    if target_b is not None:
        given["target_b"] = target_b = placed("target_b", target_b)
    lam = share(options.get("lam"), target, target_b, input)
    if reduction == "mean" and options.get("normalizer") is None and (weight is not None or target_b is not None):
        of_row = counted(target)
        if target_b is not None and lam is not None:
            of_row = lam * of_row + (1 - lam) * counted(target_b)
        given["normalizer"] = of_row.sum()
    values = elementwise_loss(
        "nll",
        input,
        target,
        [],
        reduction,
        given,
        weight=None if weight is None else weight.view(-1, *(1,) * (input.ndim - dim - 1)),
        mean_of_rows=True,
    )
    return values.sum(dim) if reduction == "none" else values


@repeated
def kl_div(
    input: Tensor,  # log-probabilities, any shape
    target: Tensor,  # probabilities or their logarithms as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: BatchReduction = "mean",
    log_target: bool = False,
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities, element by element, as torch.nn.functional.kl_div.

    L = w y (ln y - x), or with log_target w exp(y) (y - x). An element of probability 0 adds nothing, whatever x is (torch: nan at -inf).

    Args: input: log-probabilities; target: probabilities, with log_target their logarithms, or class indices (the row's class 1, the
    others 0; -1 background, -2 ignored); reduction: "mean" divides by the number of elements, as torch's does, "batchmean" by
    input.shape[0], which is the divergence itself; weight: a mean does not divide by it. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    checks.flag("log_target", log_target)
    if log_target and isinstance(target, Tensor) and not target.is_floating_point():
        raise TypeError(f"target must hold log-probabilities where log_target is True, got {target.dtype}")
    kept = per_sample(checks.legacy_reduction(size_average, reduce, reduction), input, options)
    return elementwise_loss("kl_div", input, target, [1.0 * log_target], kept, options, weight=weight)
