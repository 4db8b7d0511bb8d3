"""Losses of a difference, and likelihoods under a model of the noise."""

from __future__ import annotations

import math

from lossforge.bench.record import ELEMENTS, LARGE, F, Target, Tensor, cases, enter, loss, reduced, summed, torch, whole, wide

POINTS = "pointwise"

enter(
    "mae",
    "mean absolute error",
    cases("table", "large", LARGE, "dense"),
    template=ELEMENTS,
    targets=(Target("268435456 fp32", "ms", 0.79), Target("268435456 bf16", "ms", 0.40)),
)
enter("mse", "mean squared error", summed("large", LARGE, "dense"), template=ELEMENTS)
enter("huber", "Huber", summed("large", LARGE, "dense", {"delta": 1.0}, {"delta": 0.5}), template=ELEMENTS)
enter("smooth_l1", "smooth L1", summed("large", LARGE, "dense", {"beta": 1.0}, {"beta": 0.1}), template=ELEMENTS)


@loss("log_cosh", "log-cosh", summed("large", LARGE, "dense"), template=ELEMENTS)
def log_cosh(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    d = x - target
    return reduced(d + F.softplus(-2 * d) - math.log(2), reduction)


@loss("quantile", "quantile", summed("large", LARGE, "dense", {"quantile": 0.9}, {"quantile": 0.2}), template=ELEMENTS)
def quantile(x: Tensor, target: Tensor, *, quantile: float, reduction: str) -> Tensor:
    d = target - x
    return reduced((quantile * d).maximum((quantile - 1) * d), reduction)


@loss("general_robust", "general robust", summed("large", LARGE, "dense", {"alpha": 1.0, "scale": 0.5}, {"alpha": -2.0}), template=ELEMENTS)
def general_robust(x: Tensor, target: Tensor, *, alpha: float, scale: float, reduction: str) -> Tensor:
    """Compute arXiv 1701.03077 where alpha is none of its limits."""
    b = abs(alpha - 2)
    return reduced(b / alpha * (((x - target) / scale).square() / b + 1).pow(alpha / 2).sub(1), reduction)


enter("gaussian_nll", "Gaussian likelihood", summed("large", (2**27,), "variances", {}, {"eps": 0.6}), template=POINTS)
enter("poisson_nll", "Poisson likelihood", summed("large", LARGE, "counts", {}, {"eps": 0.5}), template=POINTS)
enter("soft_margin", "soft margin", summed("large", LARGE, "signs"), template=POINTS)
enter("hinge_embedding", "hinge embedding", summed("large", LARGE, "signs", {"margin": 1.0}, {"margin": 0.5}), template=POINTS)
enter("margin_ranking", "margin ranking", summed("large", (2**27,), "ranking", {"margin": 0.5}, {"margin": 0.25}), template=POINTS)


@loss(
    "silog",
    "scale-invariant log",
    whole("depths-1024", (16, 1, 1024, 1024), "depths", {"lambd": 0.5}, {"lambd": 0.85}),
    function="silog_loss",
    late=True,
)
def silog(x: Tensor, target: Tensor, *, lambd: float) -> Tensor:
    """Compute arXiv 1406.2283 over the pixels whose depth is known, and take the root."""
    known = target > 0
    d = torch.where(known, wide(x).log() - torch.where(known, target, 1.0).log(), 0.0)
    n = known.sum()
    return (d.square().sum() / n - lambd * (d.sum() / n).square()).sqrt()
