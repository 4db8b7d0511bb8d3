"""Losses of cosines with a margin on the target's, for very many classes, such as identities."""

import math
from typing import Annotated, Unpack

from torch import Tensor

from lossforge.kernels.call import RowwiseCall
from lossforge.losses import checks
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.options import CallOptions
from lossforge.losses.templates.record import Deferred
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_loss
from lossforge.losses.types import NonNegative, Positive, Range, Reduction

ORACLES = "lossforge.losses.oracles.margin"
WITHOUT = ("probabilities", "label_smoothing", "softcap", "z_loss", "target_b")
Angle = Annotated[float, Range(least=0, most=math.pi)]


def _of_cosines(call: RowwiseCall, scale: float, options: CallOptions) -> Deferred:
    given: RowOptions = {**options, "scale": checks.number("scale", scale, 0.0, exclusive=True)}
    return rowwise_loss(call, given)


@loss(
    "arcface",
    ROWWISE,
    Module("ArcFaceLoss", "Additive angular margin loss of cosines", kept=("margin",)),
    formula="cross_entropy",
    options=({"margin": 0.2, "scale": 8.0}, {"margin": 1.8}, {"margin": 0.0, "scale": 16.0}),
    without=WITHOUT,
    domain="cosines",
    like=f"{ORACLES}:arcface",
    paper="arXiv 1801.07698",
    targets="class index",
)
def arcface_loss(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    margin: Angle = 0.5,
    scale: Positive = 64.0,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[CallOptions],
) -> Tensor:
    """Additive angular margin loss of cosines, as insightface's ArcFace (Deng et al. 2019, arXiv 1801.07698).

    L = -w_t ln(exp(s ψ(x_t)) / (exp(s ψ(x_t)) + Σⱼ exp(s xⱼ))), j ≠ t, x = cos θ, ψ(x) = cos(θ + m), s = scale, m = margin. Beyond
    θ = π - m, ψ(x) = x - m sin m, so that the loss falls with x throughout.

    The cosines are those of unit features and unit class vectors. Over many identities compute none of them:
    `fuse_linear(arcface_loss)(F.normalize(features), F.normalize(weight), target)` takes them by chunks, and autograd goes through both
    normalisations. The sine is at least 3.2e-4, so that the gradient is finite where x_t is 1.

    When to use it: Take it to learn features whose angles tell identities, products or speakers that training has not seen.

    When not: Leave it for a closed set of classes, where cross entropy classifies as well without two more numbers. Start with a smaller
    margin where the labels are wrong or training does not begin to converge.

    Args:
        input: cosines in [-1, 1]; what rounding puts beyond counts as ±1.
        target: class indices of any integer dtype, in the shape of input without the classes.
        margin: m in [0, π], the angle in radians that is added to the target's; 0 for a scaled cross entropy.
        scale: s above 0, which multiplies the cosines after the margin.
    """
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    return _of_cosines(call._replace(angle=checks.number("margin", margin, 0.0, math.pi)), scale, options)


@loss(
    "cosface",
    ROWWISE,
    Module("CosFaceLoss", "Additive cosine margin loss", kept=("margin",)),
    formula="cross_entropy",
    options=({"margin": 0.1, "scale": 8.0}, {"margin": 0.0, "scale": 16.0}),
    without=WITHOUT,
    domain="cosines",
    like=f"{ORACLES}:cosface",
    paper="arXiv 1801.09414",
    targets="class index",
)
def cosface_loss(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    margin: NonNegative = 0.35,
    scale: Positive = 64.0,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[CallOptions],
) -> Tensor:
    """Additive cosine margin loss, as CosFace, also known as AM-Softmax (Wang et al. 2018, arXiv 1801.09414).

    L = -w_t ln(exp(s (x_t - m)) / (exp(s (x_t - m)) + Σⱼ exp(s xⱼ))), j ≠ t, x = cos θ, s = scale, m = margin.

    Over many identities compute no cosines: `fuse_linear(cosface_loss)(F.normalize(features), F.normalize(weight), target)` takes them by
    chunks.

    When to use it: Take it as `arcface`, where its angle does not begin to converge: the margin is the same at every angle.

    When not: Leave it for a closed set of classes, where cross entropy classifies as well without two more numbers.

    Args:
        input: cosines in [-1, 1].
        target: class indices of any integer dtype, in the shape of input without the classes.
        margin: m of at least 0, what the target's cosine must exceed the others' by; 0 for a scaled cross entropy.
        scale: s above 0, which multiplies the cosines after the margin.
    """
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    return _of_cosines(call._replace(margin=checks.number("margin", margin, 0.0)), scale, options)
