"""Losses of a difference x - y."""

import math
from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.broadcast import with_target
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import NonNegative, Positive, Real, Reduction, UnitInterval
from lossforge.losses.base.options import ElementwiseOptions, WeightedElementwiseOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import LN2, complement, log, log1p_unit, tl
from lossforge.losses.templates.elementwise import DOCS, ELEMENTWISE, elementwise_loss, with_parameter
from lossforge.losses.templates.plain_forms import one_minus_exp

REGRESSION = replace(
    DOCS, example=("prediction, measured = torch.randn(8, 3, requires_grad=True), torch.randn(8, 3)", "prediction, measured")
)
ORACLES = "lossforge.losses.testing.oracles.elements"


@formula("l1", DeviceFormula("regression.l1"))
def l1_reference(x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(x, y, reduction="none")


@loss(
    "mae",
    ELEMENTWISE,
    Module("L1Loss", "Mean absolute error as torch.nn.L1Loss", keyword=("weight",)),
    formula="l1",
    like="torch.nn.functional:l1_loss",
    given="softmax",
    docs=REGRESSION,
)
def l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Mean absolute error (MAE), as torch.nn.functional.l1_loss.

    L = w |x - y|; the mean divides by Σ w where weights are given. A class-index target stands for its one-hot vector: on softmax
    probabilities that is the noise-robust MAE of Ghosh et al. 2017 (arXiv 1712.09482).

    When to use it: Take it for regression with outliers, because a large residual pulls no harder than a small one. On softmax
    probabilities it trains classifiers under many wrong labels.

    When not: Leave it where small residuals matter, because its slope does not shrink near 0. Deep classifiers learn slowly under it;
    `generalized_ce` is quicker.

    Args:
        target: of any real dtype in the shape of input; or class indices in its shape without dim, -1 background and -2 ignored. A floating
            target of another shape is broadcast, with torch's warning. An integer target (N,) of an input (N, N) is read as class
            indices, where torch broadcasts it.
    """
    input, target = with_target(input, target)
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(ElementwiseCall("l1", input, target, weight=weight, reduction=reduction), options, mean="weights")


@formula("mse", DeviceFormula("regression.mse"))
def mse_reference(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y, reduction="none")


@loss(
    "mse",
    ELEMENTWISE,
    Module("MSELoss", "Mean squared error as torch.nn.MSELoss", keyword=("weight",)),
    like="torch.nn.functional:mse_loss",
    given="softmax",
    docs=REGRESSION,
)
def mse_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Mean squared error (MSE), as torch.nn.functional.mse_loss.

    L = w (x - y)²; the mean divides by Σ w where weights are given. On softmax probabilities with class indices: the Brier score.

    When to use it: Take it for regression whose noise is about normal; its minimum is the mean. On softmax probabilities it is the Brier
    score.

    When not: Leave it where outliers occur, because a residual of 100 counts ten thousand times one of 1. Under a sigmoid or softmax its
    gradient vanishes where the model is sure and wrong; cross entropy's does not.

    Args:
        target: in the shape of input, dense; or class indices in its shape without dim, -1 background and -2 ignored. A floating target of
            another shape is broadcast, with torch's warning.
    """
    input, target = with_target(input, target)
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(ElementwiseCall("mse", input, target, weight=weight, reduction=reduction), options, mean="weights")


@formula("huber", DeviceFormula("regression.huber"))
def huber_reference(x: Tensor, y: Tensor, delta: float) -> Tensor:
    if not isinstance(delta, Tensor):
        return F.huber_loss(x, y, reduction="none", delta=delta)
    d = (x - y).abs()
    return torch.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))


@loss(
    "huber",
    ELEMENTWISE,
    Module("HuberLoss", "Huber loss as torch.nn.HuberLoss", keyword=("weight",)),
    options=({"delta": 0.3}, {"delta": 5.0}),
    like="torch.nn.functional:huber_loss",
    given="softmax",
    docs=REGRESSION,
)
def huber_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    reduction: Reduction = "mean",
    delta: Positive = 1.0,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Huber loss, as torch.nn.functional.huber_loss (Huber 1964, doi 10.1214/aoms/1177703732).

    L = w [½ d² if |d| ≤ δ else δ (|d| - ½ δ)] with d = x - y; as in torch the mean divides by the number of elements, also with weights.

    When to use it: Take it for regression with some outliers, and for temporal-difference errors. It is quadratic up to δ and linear
    beyond.

    When not: Leave it where you cannot say what a large residual is. δ has the unit of the target, so scale the targets first.

    Args:
        target: in the shape of input, dense; or class indices in its shape without dim, -1 background and -2 ignored. A floating target of
            another shape is broadcast, with torch's warning.
        delta: δ above 0, the distance at which the square becomes a line, in the units of input.
    """
    input, target = with_target(input, target)
    delta = checks.number("delta", delta, 0.0, exclusive=True)
    return elementwise_loss(ElementwiseCall("huber", input, target, weight=weight, hyper=[delta], reduction=reduction), options)


@formula("smooth_l1", DeviceFormula("regression.smooth_l1"))
def smooth_l1_reference(x: Tensor, y: Tensor, beta: float) -> Tensor:
    if not isinstance(beta, Tensor):
        return F.smooth_l1_loss(x, y, reduction="none", beta=beta)
    d = (x - y).abs()
    return torch.where(d < beta, 0.5 * d * d / beta.clamp(min=torch.finfo(x.dtype).tiny), d - 0.5 * beta)


@loss(
    "smooth_l1",
    ELEMENTWISE,
    Module("SmoothL1Loss", "Smooth L1 loss as torch.nn.SmoothL1Loss"),
    options=({"beta": 0.3}, {"beta": 5.0}),
    like="torch.nn.functional:smooth_l1_loss",
    given="softmax",
    docs=REGRESSION,
)
def smooth_l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    beta: NonNegative = 1.0,
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Smooth L1 loss, as torch.nn.functional.smooth_l1_loss (Girshick 2015, arXiv 1504.08083): Huber's divided by β.

    L = w [½ d² / β if |d| < β else |d| - ½ β] with d = x - y; the mean divides by Σ w where weights are given. β = 0 is the L1 loss.

    When to use it: Take it for offsets of boxes, as Fast R-CNN does. It is Huber's loss divided by β, so its slope far out is 1 for every
    β.

    When not: Leave it where β itself is tuned, because the slope near 0 grows as 1 / β. Huber's slope there stays 1.

    Args:
        target: in the shape of input, dense; or class indices in its shape without dim, -1 background and -2 ignored. A floating target of
            another shape is broadcast, with torch's warning.
        beta: β of at least 0, the distance at which the square becomes a line, in the units of input. 0 is the L1 loss.
    """
    input, target = with_target(input, target)
    beta = checks.number("beta", beta, 0.0)
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    name, hyper = ("smooth_l1", [beta]) if checks.nonzero(beta) else ("l1", [])
    call = ElementwiseCall(name, input, target, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, options, mean="weights")


def log_cosh(x, y):
    d = tl.abs(x - y)
    u, e = complement(d)  # cosh d - 1 = u² / 2e, by which small differences keep their digits
    return tl.where(d < 1.0, log1p_unit(0.5 * u * u / e), d - LN2 + log1p_unit(e * e))


@formula("log_cosh", DeviceFormula(log_cosh))
def log_cosh_reference(x: Tensor, y: Tensor) -> Tensor:
    d = x - y
    near = torch.log1p(2 * torch.sinh(d.clamp(-1, 1) / 2).square())
    return torch.where(d.abs() < 1, near, d.abs() + F.softplus(-2 * d.abs()) - math.log(2))


@loss("log_cosh", ELEMENTWISE, Module("LogCoshLoss", "Log-cosh loss"), paper="arXiv 2208.04564", given="softmax", docs=REGRESSION)
def log_cosh_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    reduction: Reduction = "mean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Log-cosh loss (Saleh and Saleh 2022, arXiv 2208.04564): ½ d² where d is small, |d| - ln 2 where it is large; smooth everywhere.

    L = w ln cosh(x - y); the mean divides by the number of elements, also with weights.

    When to use it: Take it in place of Huber's loss where the second derivative must be continuous. It has no threshold to choose.

    When not: Leave it where the target's unit is far from 1, because the turn from quadratic to linear stands at about 1. Scale the
    targets, or take `huber`.
    """
    return elementwise_loss(ElementwiseCall("log_cosh", input, target, reduction=reduction), options)


def quantile_formula(x, y, quantile):
    d = x - y
    return d * (tl.where(d > 0, 1.0, tl.where(d < 0, 0.0, 0.5)) - quantile)  # ½ where d is 0: the slope between both sides


@formula("quantile", DeviceFormula(quantile_formula))
def quantile_reference(x: Tensor, y: Tensor, quantile: float | Tensor) -> Tensor:
    d = x - y
    side = torch.where(d > 0, 1.0, torch.where(d < 0, 0.0, 0.5)).to(d)
    return d * (side - quantile)


@loss(
    "quantile",
    ELEMENTWISE,
    Module("QuantileLoss", "Quantile (pinball) loss"),
    options=({"quantile": 0.9}, {"quantile": 0.0}, {"quantile": torch.tensor([0.2])}),
    like=f"{ORACLES}:quantile",
    paper="doi 10.2307/1913643",
    given="softmax",
    docs=REGRESSION,
)
def quantile_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    quantile: UnitInterval | Tensor = 0.5,  # number, or broadcasts to input
    reduction: Reduction = "mean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Quantile loss, also called pinball loss (Koenker and Bassett 1978, doi 10.2307/1913643).

    L = w max(τ (y - x), (τ - 1)(y - x)), τ = quantile; at x = y the gradient is ½ - τ, the middle of both sides. The mean divides by the
    number of elements, also with weights.

    When to use it: Take it to predict a quantile in place of a mean, such as the load that is exceeded on one day in ten. Several
    quantiles at once are several outputs, with `quantile` of shape (Q,).

    When not: Leave it where the mean is wanted (`mse`). It does not stop the predictions of several quantiles from crossing.

    Args:
        quantile: τ in [0, 1], the share of targets that should lie below the prediction. Or a tensor that broadcasts to input.
        reduction: "mean", "sum" or "none".
    """
    hyper, given = with_parameter([], "quantile", quantile, input, 0.0, 1.0)
    call = ElementwiseCall("quantile", input, target, parameter=given, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, options)


def growth(t):
    """Return e^t - 1 and e^t."""
    u, e = complement(tl.abs(t))
    return tl.where(t > 0, u / e, -u), tl.where(t > 0, 1.0 / e, e)


def general_robust(x, y, scale, alpha):
    z = (x - y) / scale
    s = z * z
    a = tl.clamp(alpha, -1e10, 1e10)  # beyond, the limits differ by rounding alone
    a = tl.where(tl.abs(a) < 1e-15, 1e-15, a)
    b = tl.abs(a - 2.0)
    least = tl.maximum(b, 1e-8)  # b is 0 or above 1e-7; at 0 the logarithm that it gives is multiplied by 0
    logarithm = tl.where(s < least, log1p_unit(tl.minimum(s, least) / least), log(s + least) - log(least))  # ln(1 + s / b)
    change, slope = growth(0.5 * (a - 2.0) * logarithm)
    far, _ = growth(0.5 * a * logarithm)
    # around α = 2, b is small and e^(α/2 logarithm) large; elsewhere the first form would cancel
    value = tl.where(s < tl.where(b < 1.0, float("inf"), 0.0), (s * slope + b * change) / a, least / a * far)
    return value, z / scale * slope + 0.0 * s  # nan at an infinite difference, as autograd has it


@formula("general_robust", DeviceFormula(general_robust))
def general_robust_reference(x: Tensor, y: Tensor, scale: float, alpha: float | Tensor) -> Tensor:
    limits = torch.finfo(x.dtype)
    alpha = torch.as_tensor(alpha, dtype=x.dtype, device=x.device).clamp(-(limits.max**0.5), limits.max**0.5)
    a = torch.where(alpha.abs() < limits.tiny**0.5, limits.tiny**0.5, alpha)
    b = (a - 2).abs().clamp(min=limits.eps)
    s = ((x - y) / scale).square()
    return torch.where(alpha == 2, 0.5 * s, -b / a * one_minus_exp(-0.5 * a * torch.log1p(s / b)))


@loss(
    "general_robust",
    ELEMENTWISE,
    Module("GeneralRobustLoss", "Barron's general robust loss"),
    options=({"alpha": 2.0}, {"alpha": 0.0, "scale": 0.3}, {"alpha": -2.0}, {"alpha": -math.inf}, {"alpha": torch.tensor([1.5])}),
    like=f"{ORACLES}:general_robust",
    paper="arXiv 1701.03077",
    given="softmax",
    docs=REGRESSION,
)
def general_robust_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    alpha: Real | Tensor = 1.0,  # number, or broadcasts to input
    scale: Positive = 1.0,
    reduction: Reduction = "mean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """General and adaptive robust loss (Barron 2019, arXiv 1701.03077): one number chooses among squared, Charbonnier, Cauchy and others.

    L = w |α - 2| / α [((d / c)² / |α - 2| + 1)^(α/2) - 1] with d = x - y, c = scale. The limits: α = 2 is ½ (d / c)², α = 0 is
    ln(½ (d / c)² + 1), Cauchy's, α = -∞ is 1 - exp(-½ (d / c)²), Welsch's. α = 1 is Charbonnier's (pseudo-Huber), α = -2 Geman and
    McClure's. Value and gradient are exact at these α and beside them. The mean divides by the number of elements, also with weights.

    A tensor α that requires grad is differentiated by plain torch. The paper's adaptive form adds ln Z(α), which is not computed here.

    When to use it: Take it for regression where the share of outliers is unknown: the smaller α, the less outliers count, and α can be
    tuned like any number.

    When not: Leave it where most residuals start far beyond c, because for α below 1 their gradient fades with distance. Start with α = 1
    or 2, and lower it.

    Args:
        alpha: α, the shape; any number, or -inf. Or a tensor that broadcasts to input.
        scale: c above 0, the size of a residual that is not an outlier, in the units of input.
        reduction: "mean", "sum" or "none".
    """
    hyper, shape = [checks.number("scale", scale, 0.0, exclusive=True)], None
    if not checks.is_parameter(alpha, input) and (not isinstance(alpha, Tensor) or checks.known(alpha)):
        alpha = checks.of_host("alpha", alpha)
    if isinstance(alpha, float) and alpha == -math.inf:
        hyper.append(alpha)
    else:
        hyper, shape = with_parameter(hyper, "alpha", alpha, input)
    call = ElementwiseCall("general_robust", input, target, parameter=shape, hyper=hyper, reduction=reduction)
    return elementwise_loss(call, options)
