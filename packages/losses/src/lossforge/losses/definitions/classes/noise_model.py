"""Regression under a model of the noise: the negative log-likelihood of a target."""

import functools
import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.elements.calls import PointwiseCall
from lossforge.kernels.torch_internals import transformed
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import Positive, Reduction
from lossforge.losses.base.options import MaskedWeightedOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.pointwise import POINTWISE, beside, pointwise_loss


class VarianceOptions(MaskedWeightedOptions, total=False):
    validate: bool | None


@formula("gaussian_nll", DeviceFormula("regression.gaussian_nll"))
def gaussian_nll_reference(x: Tensor, y: Tensor, var: Tensor, full: float, eps: float) -> Tensor:
    v = torch.where(var < eps, var - var.detach() + eps, var)
    v = torch.where(var < 0, torch.nan, v)
    return 0.5 * (v.log() + (x - y).square() / v) + full * 0.5 * math.log(2 * math.pi)


@loss(
    "gaussian_nll",
    POINTWISE,
    Module(
        "GaussianNLLLoss",
        "Gaussian negative log-likelihood as torch.nn.GaussianNLLLoss",
        forward="input: Tensor, target: Tensor, var: Tensor | float",
        keyword=("full", "eps", "reduction"),
    ),
    switches=("full",),
    options=({"full": True}, {"eps": 0.5}),
    like="torch.nn.functional:gaussian_nll_loss",
    paper="doi 10.1109/ICNN.1994.374138",
)
def gaussian_nll_loss(
    input: Tensor,  # the mean, any shape
    target: Tensor,  # as input
    var: Tensor | float,  # as input, without its last dimension, or with one dimension of size 1
    full: bool = False,
    eps: Positive = 1e-6,
    reduction: Reduction = "mean",
    **options: Unpack[VarianceOptions],
) -> CheckedCall[PointwiseCall]:
    """Gaussian negative log-likelihood, as torch.nn.functional.gaussian_nll_loss (Nix and Weigend 1994).

    L = w ½ [ln v + (x - y)²/v] with v = max(var, ε); `full` adds ½ ln 2π.

    When to use it: Take it where a model predicts a mean and how sure it is of it, so that noisy targets count less.

    When not: Leave it where the variance is the same everywhere; `mse` has the same minimum. Early in a training large variances can keep
    the mean from being learnt.

    Args:
        input: the predicted mean, of any shape and floating dtype; gets a gradient.
        target: in the shape of input, of any real dtype; gets a gradient where it asks for one.
        var: the predicted variance, at least 0: in the shape of input, in that without the last dimension, or with one dimension of size 1
            (several, where the installed torch takes them); or one number. Gets a gradient, below eps that of eps, as in torch.
        full: add the constant ½ ln 2π.
        eps: ε above 0, the least variance.
        validate: raise a ValueError where a variance is negative on CUDA, too, which waits for the device. On CPU it always raises.
            Default: the environment's LOSSFORGE_VALIDATE. Unchecked, such an element has loss and gradient nan.

    Examples:
        >>> mean, var = torch.randn(8, 10, requires_grad=True), torch.rand(8, 10, requires_grad=True)
        >>> gaussian_nll_loss(mean, torch.randn(8, 10), var).backward()
    """
    checks.whole("input", input)
    hyper = [float(full), checks.number("eps", eps, 0.0, exclusive=True)]
    var = beside("var", var, input, "input") if isinstance(var, Tensor) else input.new_full((), checks.number("var", var, 0.0))
    _not_negative(var, options.pop("validate", None), options.get("mask"))
    return pointwise_loss("gaussian_nll", {"input": input, "target": target, "var": _as_input(var, input)}, hyper, reduction, options)


def _not_negative(var: Tensor, validate: bool | None, mask: object) -> None:
    """Check the values of variances, where the host can read them now: not while torch.compile traces.

    mask: which elements count. Variances that broadcast to it are checked where they do.
    """
    asked = var.device.type == "cpu" or (checks.VALIDATE if validate is None else validate)
    if not (asked and checks.known(var)) or transformed(var):
        return
    wrong = var < 0
    if isinstance(mask, Tensor) and wrong.any():
        if not checks.known(mask) or mask.device != var.device:
            return
        wrong = wrong.unsqueeze(-1) if wrong.ndim < mask.ndim else wrong
        wrong = wrong & (mask != 0)
    if wrong.any():
        raise ValueError(f"var must be at least 0, got {var.min().item():g}")


@functools.cache
def _takes_several() -> bool:
    """Return whether the installed torch takes variances with several dimensions of size 1: 2.11 does not."""
    try:
        F.gaussian_nll_loss(torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(1, 1))
    except ValueError:
        return False
    return True


def _as_input(var: Tensor, input: Tensor) -> Tensor:
    """Return variances in the shape of the input, which has one of them for each element or for each row of a dimension."""
    shape = input.shape
    if var.shape == shape[:-1] and var.ndim < input.ndim:
        var = var.unsqueeze(-1)
    repeated = len([a for a, b in zip(var.shape, shape, strict=False) if a != b])
    several = repeated > 1 and not _takes_several()
    if var.ndim and (var.ndim != input.ndim or several or not checks.expands(var, shape)):
        raise ValueError(
            f"var must have the shape of input, {tuple(shape)}, that without its last dimension, or one dimension of size 1, "
            f"got {tuple(var.shape)}"
        )
    return var.expand(shape)


@formula("poisson_nll", DeviceFormula("regression.poisson_nll", "regression.poisson_nll_log", "regression.is_plain"))
def poisson_nll_reference(x: Tensor, y: Tensor, log_input: float, full: float, eps: float) -> Tensor:
    rate, log_rate = (x.exp(), x) if log_input else (x, (x + eps).log())
    absent = (y == 0) & log_rate.isinf()
    values = rate - torch.where(absent, 0.0, y * torch.where(absent, 0.0, log_rate))
    s = y.clamp(min=1)
    return values + torch.where(y > 1, s * s.log() - s + 0.5 * (2 * math.pi * s).log(), 0.0) if full else values


@loss(
    "poisson_nll",
    POINTWISE,
    Module("PoissonNLLLoss", "Poisson negative log-likelihood as torch.nn.PoissonNLLLoss"),
    switches=("log_input", "full"),
    options=({"log_input": False}, {"full": True}, {"log_input": False, "full": True, "eps": 0.25}),
    domain="rates",
    like="torch.nn.functional:poisson_nll_loss",
    targets="counts",
)
def poisson_nll_loss(
    input: Tensor,  # logarithms of rates, any shape
    target: Tensor,  # counts, as input
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    eps: Positive = 1e-8,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[MaskedWeightedOptions],
) -> CheckedCall[PointwiseCall]:
    """Poisson negative log-likelihood of counts, as torch.nn.functional.poisson_nll_loss.

    L = w [exp(x) - y x], or with log_input=False w [x - y ln(x + ε)]; `full` adds Stirling's y ln y - y + ½ ln 2πy where y > 1.

    When to use it: Take it for counts, such as of events or photons, whose variance grows with their mean.

    When not: Leave it where the variance of the counts exceeds their mean by much, because it then gives large counts too much weight.

    Args:
        input: logarithms of the expected counts, or with log_input=False these counts, of any shape and floating dtype; gets a gradient.
        target: counts in the shape of input, of any real dtype; gets a gradient where it asks for one.
        log_input: input holds logarithms.
        full: add Stirling's approximation of ln y!.
        eps: ε above 0, added to a rate before its logarithm.

    Examples:
        >>> log_rates = torch.randn(8, 10, requires_grad=True)
        >>> poisson_nll_loss(log_rates, torch.poisson(4 * torch.rand(8, 10))).backward()
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    flags = [float(log_input), float(full)]
    hyper = [*flags, checks.number("eps", eps, 0.0, exclusive=True)]
    return pointwise_loss("poisson_nll", {"input": input, "target": target}, hyper, reduction, options)
