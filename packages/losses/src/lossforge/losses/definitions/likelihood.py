"""Losses of log-probabilities, such as log_softmax gives them. On logits, cross_entropy and kl_div_with_logits need one pass less."""

import functools
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from lossforge.kernels.elementwise.call import ElementwiseCall
from lossforge.losses import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.options import (
    ElementwiseOptions,
    Options,
    WeightedElementwiseOptions,
    check_options,
    of_classes,
    rows_of,
    share,
    weights_of_classes,
)
from lossforge.losses.base.record import KEPT, SCALAR, CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.option_types import BatchReduction, Reduction
from lossforge.losses.templates.elementwise import ELEMENTWISE, IGNORED, elementwise_loss, per_sample, summed_over
from lossforge.losses.templates.rowwise import ROWWISE


@formula("nll", DeviceFormula("likelihood.nll", binary=DeviceFormula("likelihood.nll_hard", sparse=True)))
def nll_reference(x: Tensor, y: Tensor) -> Tensor:
    return -y * torch.where((y == 0) & ~x.isfinite(), 0.0, x)


NLL = replace(
    ELEMENTWISE,
    name="nll",
    ignored=-100,
    without=("probabilities", "label_smoothing"),
    samples=ROWWISE.samples,
    variables=(),
    docs=replace(
        ROWWISE.docs,
        returns=f'{SCALAR}; with reduction "none" one value a row, in the dtype of input.',
        example=("log_p = torch.randn(8, 10, requires_grad=True).log_softmax(1)", "log_p, torch.randint(10, (8,))"),
        targets="class index, mixup pair",
        keeping=KEPT,
    ),
)
"""It is computed element by element, and has the targets of rows."""


@loss(
    "nll",
    NLL,
    Module("NLLLoss", "Negative log-likelihood of log-probabilities as torch.nn.NLLLoss"),
    domain="log-probabilities",
    like="torch.nn.functional:nll_loss",
)
def nll_loss(
    input: Tensor,  # log-probabilities (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    weight: Tensor | None = None,  # (C,)
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[Options],
) -> CheckedCall[ElementwiseCall]:
    """Negative log-likelihood of log-probabilities, as torch.nn.functional.nll_loss.

    L = -w_t x_t; the mean divides by the weights of the classes of the rows not ignored. Other classes' values do not matter, nan included.

    When to use it: Take it for log-probabilities that exist anyway, such as those of a mixture.

    When not: Leave it where you have logits; `ce` takes less time and memory. On a GPU torch's own `nll_loss` is as quick.

    Args:
        input: log-probabilities (C,), (N, C) or (N, C, d…). Only the target's is used.
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        ignore_index: rows with this index have loss and gradient 0.

    Returns:
        a scalar, or (N, d…) in the dtype of input with reduction "none".
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    dim = of_classes(input)
    check_options(input, reduction, options, Options)
    checks.whole_number("ignore_index", ignore_index)
    if isinstance(target, Tensor) and target.is_floating_point():
        checks.dense(target, input, rows_of(input, dim), ", or hold class indices")
        raise TypeError(f"target must hold class indices, with target_b and lam for a mixture of two, got {target.dtype}")
    classes = input.shape[dim]
    weight = weights_of_classes("weight", weight, input, classes)
    allowed = checks.Allowed(0, classes, ignore_index, options.get("validate"))

    def placed(name: str, index: Tensor) -> Tensor:
        """Return the index as the template of elements has it: rows that do not count by its own number, and no background."""
        index = checks.indices(name, index, input, allowed, rows_of(input, dim))
        return torch.where(index == ignore_index, IGNORED, torch.where(index < 0, classes, index))

    def counted(index: Tensor) -> Tensor:
        """Return what each row counts in a mean."""
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
        given["normalizer"] = total = of_row.sum()
        if weight is not None and options.get("empty") != "zero":
            # 0 / 0 is nan, also in the gradient: weights of 0 alone would leave the rows out
            weight = torch.where(total == 0, torch.nan, weight)
    per_class = None if weight is None else weight.view(-1, *(1,) * (input.ndim - dim - 1))
    checked = elementwise_loss(ElementwiseCall("nll", input, target, weight=per_class, reduction=reduction), given, mean="rows")
    return checked._replace(finish=functools.partial(summed_over, dim)) if reduction == "none" else checked


@formula("kl_div", DeviceFormula("likelihood.kl_div", "likelihood.kl_div_log", "likelihood.is_log"))
def kl_div_reference(x: Tensor, y: Tensor, log_target: float) -> Tensor:
    p = y.exp() if log_target else y
    log_p = y if log_target else torch.where(y == 0, 1.0, y).log()
    return p * torch.where(p == 0, 0.0, log_p - x)


@loss(
    "kl_div",
    ELEMENTWISE,
    Module("KLDivLoss", "Kullback-Leibler divergence of log-probabilities as torch.nn.KLDivLoss"),
    switches=("log_target",),
    options=({"log_target": True},),
    domain="log-probabilities",
    like="torch.nn.functional:kl_div",
)
def kl_div(
    input: Tensor,  # log-probabilities, any shape
    target: Tensor,  # probabilities or their logarithms as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: BatchReduction = "mean",
    log_target: bool = False,
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Kullback-Leibler divergence of log-probabilities, element by element, as torch.nn.functional.kl_div.

    L = w y (ln y - x), or with log_target w exp(y) (y - x). An element of probability 0 adds nothing, for any x (torch: nan at -inf).

    When to use it: Take it for a target distribution and log-probabilities that exist anyway. With `reduction="batchmean"` it is the
    divergence.

    When not: Leave it where both are logits; `kl` reads each once. With `reduction="mean"` it divides by the number of elements, as torch's
    does, which is hardly ever meant.

    Args:
        input: log-probabilities of any shape and floating dtype.
        target: probabilities in the shape of input, with log_target their logarithms; or class indices, -1 background and -2 ignored.
        reduction: "mean" divides by the number of elements, as torch's does; "batchmean" by input.shape[0], which is the divergence itself;
            "sum"; "none".
        log_target: target holds logarithms.
        weight: broadcasts to input; a mean does not divide by it.

    Examples:
        >>> log_p = torch.randn(8, 10, requires_grad=True).log_softmax(1)
        >>> kl_div(log_p, torch.rand(8, 10).softmax(1), reduction="batchmean").backward()
    """
    if log_target and isinstance(target, Tensor) and not target.is_floating_point():
        raise TypeError(f"target must hold log-probabilities where log_target is True, got {target.dtype}")
    kept = per_sample(checks.legacy_reduction(size_average, reduce, reduction), input, options)
    return elementwise_loss(ElementwiseCall("kl_div", input, target, hyper=[1.0 * log_target], reduction=kept), options)
