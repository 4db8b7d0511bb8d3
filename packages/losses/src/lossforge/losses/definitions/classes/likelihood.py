"""Losses of log-probabilities, such as log_softmax gives them. On logits, cross_entropy and kl_div_with_logits need one pass less."""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import BatchReduction, Reduction
from lossforge.losses.base.options import (
    Options,
    WeightedElementwiseOptions,
    check_options,
    factor,
    of_classes,
    rows_of,
    share,
    weights_of_classes,
)
from lossforge.losses.base.record import KEPT, SCALAR, CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss, per_sample
from lossforge.losses.templates.plain_forms import accurate, reduced
from lossforge.losses.templates.rowwise import ROWWISE


@formula("nll", None)
def nll_reference(x: Tensor, w: Tensor) -> Tensor:
    return -x * w


NLL = replace(
    ROWWISE,
    name="nll",
    fusing=None,
    variables=(),
    docs=replace(
        ROWWISE.docs,
        returns=f'{SCALAR}; with reduction "none" one value a row, in the dtype of input.',
        example=("log_p = torch.randn(8, 10, requires_grad=True).log_softmax(1)", "log_p, torch.randint(10, (8,))"),
        targets="class index, mixup pair",
        keeping=KEPT,
    ),
)
"""The targets of rows, without a softmax: plain torch gathers what it needs, and no call is made."""


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
) -> Tensor:
    """Negative log-likelihood of log-probabilities, as torch.nn.functional.nll_loss.

    L = -w_t x_t; the mean divides by the weights of the classes of the rows not ignored. Other classes' values do not matter, nan included.

    In plain PyTorch: torch.compile of it took less time than a kernel (one H200, 8192×32000, float32: 0.24 ms to 0.32).

    When to use it: Take it for log-probabilities that exist anyway, such as those of a mixture.

    When not: Leave it where you have logits; `ce` takes less time and memory.

    Args:
        input: log-probabilities (C,), (N, C) or (N, C, d…). Only the target's is used.
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        ignore_index: rows with this index have loss and gradient 0.
        gradient: without effect, because autograd computes it in backward.
        inplace: without effect, because autograd gives the gradient memory of its own.

    Returns:
        a scalar, or (N, d…) in the dtype of input with reduction "none".
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    dim = of_classes(input)
    divisor = check_options(input, reduction, options, Options)
    checks.whole_number("ignore_index", ignore_index)
    if isinstance(target, Tensor) and target.is_floating_point():
        checks.dense(target, input, rows_of(input, dim), ", or hold class indices")
        raise TypeError(f"target must hold class indices, with target_b and lam for a mixture of two, got {target.dtype}")
    allowed = checks.Allowed(0, input.shape[dim], ignore_index, options.get("validate"))
    weight = weights_of_classes("weight", weight, input, input.shape[dim])
    target, target_b = checks.indices("target", target, input, allowed, rows_of(input, dim)), options.get("target_b")
    if target_b is not None:
        target_b = checks.indices("target_b", target_b, input, allowed, rows_of(input, dim))
    lam = share(options.get("lam"), target, target_b, input)
    values, counts = _of_class(input, dim, target, weight, ignore_index)
    if target_b is not None and lam is not None:
        values_b, counts_b = _of_class(input, dim, target_b, weight, ignore_index)
        values, counts = lam * values + (1 - lam) * values_b, lam * counts + (1 - lam) * counts_b
    if divisor is None and reduction == "mean" and options.get("normalizer") is None:
        divisor = counts.sum()
    result = reduced(values, factor(options), divisor, reduction, options.get("empty") == "zero")
    return result.to(input.dtype) if reduction == "none" else result


def _of_class(x: Tensor, dim: int, index: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return of each row -x of its class times the weight of the class, nan where the index is out of range, and what it counts."""
    index, counts = index.long(), index != ignore_index
    at = index.clamp(0, x.shape[dim] - 1)
    chosen = accurate(x.gather(dim, at.unsqueeze(dim)).squeeze(dim))
    w = counts.to(chosen.dtype) if weight is None else torch.where(counts, weight.to(chosen.dtype)[at], 0.0)
    lost = counts & (at != index)
    return torch.where(counts, nll_reference(chosen, torch.where(lost, torch.nan, w)), 0.0), w


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
