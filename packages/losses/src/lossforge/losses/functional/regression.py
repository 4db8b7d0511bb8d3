"""Losses of a difference x - y."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import ElementCall, Formulas
from lossforge.losses import checks
from lossforge.losses.device_names import LN2, complement, log1p_unit, tl
from lossforge.losses.formulas import formula
from lossforge.losses.registry import loss
from lossforge.losses.templates.element import elementwise_loss
from lossforge.losses.templates.module import Module
from lossforge.losses.templates.options import ElementwiseOptions
from lossforge.losses.types import NonNegative, Positive, Reduction

__all__ = ["huber_loss", "l1_loss", "log_cosh_loss", "mse_loss", "smooth_l1_loss"]


@formula("l1", lambda of: Formulas(of.l1.l1))
def l1_reference(x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(x, y, reduction="none")


@loss(
    "mae",
    "elementwise",
    Module("L1Loss", "Mean absolute error as torch.nn.L1Loss", keyword=("weight",)),
    formula="l1",
    judge="torch.nn.functional:l1_loss",
    given="softmax",
)
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

    Args:
        target: of any real dtype in the shape of input; or class indices in its shape without dim, -1 background and -2 ignored. An integer
            target (N,) of an input (N, N) is read as class indices, where torch broadcasts it.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(ElementCall("l1", input, target, weight=weight, reduction=reduction), options, mean="weights")


@formula("mse", lambda of: Formulas(of.regression.mse))
def mse_reference(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y, reduction="none")


@loss(
    "mse",
    "elementwise",
    Module("MSELoss", "Mean squared error as torch.nn.MSELoss", keyword=("weight",)),
    judge="torch.nn.functional:mse_loss",
    given="softmax",
)
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
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(ElementCall("mse", input, target, weight=weight, reduction=reduction), options, mean="weights")


@formula("huber", lambda of: Formulas(of.regression.huber))
def huber_reference(x: Tensor, y: Tensor, delta: float) -> Tensor:
    if not isinstance(delta, Tensor):
        return F.huber_loss(x, y, reduction="none", delta=delta)
    d = (x - y).abs()
    return torch.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))


@loss(
    "huber",
    "elementwise",
    Module("HuberLoss", "Huber loss as torch.nn.HuberLoss", keyword=("weight",)),
    options=({"delta": 0.3}, {"delta": 5.0}),
    judge="torch.nn.functional:huber_loss",
    given="softmax",
)
def huber_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    reduction: Reduction = "mean",
    delta: Positive = 1.0,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Huber loss, as torch.nn.functional.huber_loss (Huber 1964, doi 10.1214/aoms/1177703732).

    L = w [½ d² if |d| ≤ δ else δ (|d| - ½ δ)] with d = x - y; as in torch the mean divides by the number of elements, also with weights.

    Args:
        delta: δ above 0, in the units of input.
    """
    delta = checks.number("delta", delta, 0.0, exclusive=True)
    return elementwise_loss(ElementCall("huber", input, target, weight=weight, hyper=[delta], reduction=reduction), options)


@formula("smooth_l1", lambda of: Formulas(of.regression.smooth_l1))
def smooth_l1_reference(x: Tensor, y: Tensor, beta: float) -> Tensor:
    if not isinstance(beta, Tensor):
        return F.smooth_l1_loss(x, y, reduction="none", beta=beta)
    d = (x - y).abs()
    return torch.where(d < beta, 0.5 * d * d / beta.clamp(min=torch.finfo(x.dtype).tiny), d - 0.5 * beta)


@loss(
    "smooth_l1",
    "elementwise",
    Module("SmoothL1Loss", "Smooth L1 loss as torch.nn.SmoothL1Loss"),
    options=({"beta": 0.3}, {"beta": 5.0}),
    judge="torch.nn.functional:smooth_l1_loss",
    given="softmax",
)
def smooth_l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    beta: NonNegative = 1.0,
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Smooth L1 loss, as torch.nn.functional.smooth_l1_loss (Girshick 2015, arXiv 1504.08083): Huber's divided by β.

    L = w [½ d² / β if |d| < β else |d| - ½ β] with d = x - y; the mean divides by Σ w where weights are given. β = 0 is the L1 loss.

    Args:
        beta: β of at least 0, in the units of input; 0 is the L1 loss.
    """
    beta = checks.number("beta", beta, 0.0)
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    name, hyper = ("smooth_l1", [beta]) if checks.nonzero(beta) else ("l1", [])
    call = ElementCall(name, input, target, weight=weight, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, options, mean="weights")


def log_cosh(x, y):
    d = tl.abs(x - y)
    u, e = complement(d)  # cosh d - 1 = u² / 2e, by which small differences keep their digits
    return tl.where(d < 1.0, log1p_unit(0.5 * u * u / e), d - LN2 + log1p_unit(e * e))


@formula("log_cosh", lambda of: Formulas(of(log_cosh)))
def log_cosh_reference(x: Tensor, y: Tensor) -> Tensor:
    d = x - y
    near = torch.log1p(2 * torch.sinh(d.clamp(-1, 1) / 2).square())
    return torch.where(d.abs() < 1, near, d.abs() + F.softplus(-2 * d.abs()) - math.log(2))


@loss("log_cosh", "elementwise", Module("LogCoshLoss", "Log-cosh loss"), paper="arXiv 2208.04564", given="softmax")
def log_cosh_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Log-cosh loss (Saleh and Saleh 2022, arXiv 2208.04564): ½ d² where d is small, |d| - ln 2 where it is large; smooth everywhere.

    L = w ln cosh(x - y); the mean divides by the number of elements, also with weights.
    """
    return elementwise_loss(ElementCall("log_cosh", input, target, weight=weight, reduction=reduction), options)
