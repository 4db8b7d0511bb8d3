"""Losses of cosines, with a margin on the target's: for very many classes, such as identities."""

import math
from typing import Annotated, Unpack

from torch import Tensor

from lossforge.kernels.rowwise.call import RowwiseCall
from lossforge.losses import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.options import CallOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.option_types import NonNegative, Positive, Range, Reduction
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_loss

ORACLES = "lossforge.losses.oracles.classification"
WITHOUT = ("probabilities", "label_smoothing", "softcap", "z_loss", "target_b")
Angle = Annotated[float, Range(least=0, most=math.pi)]


def _of_cosines(call: RowwiseCall, scale: float, options: CallOptions) -> CheckedCall[RowwiseCall]:
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
) -> CheckedCall[RowwiseCall]:
    """Additive angular margin loss of cosines, as insightface's ArcFace (Deng et al. 2019, arXiv 1801.07698).

    L = -w_t ln(exp(s ψ(x_t)) / (exp(s ψ(x_t)) + Σⱼ exp(s xⱼ))), j ≠ t, x = cos θ, ψ(x) = cos(θ + m), s = scale, m = margin.
    Beyond θ = π - m, ψ(x) = x - m sin m, as in insightface: the loss has a step there, and still falls as x grows.

    The cosines are those of unit features and unit class vectors. Over many identities they need not be in memory:
    `fuse_linear(arcface_loss)(F.normalize(features), F.normalize(weight), target)` computes them by chunks, and autograd goes through both
    normalisations. sin θ is taken as at least 3.2e-4, so that the gradient is finite where x_t is 1.

    When to use it: Take it to learn features whose angles tell identities, products or speakers that training has not seen.

    When not: Leave it for a closed set of classes, where cross entropy classifies as well without a margin and a scale to tune. Start with
    a smaller margin where labels are wrong or training does not begin to converge.

    Args:
        input: cosines in [-1, 1]; values that rounding put beyond count as ±1.
        target: class indices of any integer dtype, in the shape of input without the classes.
        margin: m in [0, π], the angle in radians that is added to the target's; 0 for a scaled cross entropy.
        scale: s above 0, which multiplies the cosines after the margin.

    Examples:
        >>> features, centres = (torch.nn.functional.normalize(torch.randn(n, 32)) for n in (8, 10))
        >>> cosines = (features @ centres.T).requires_grad_()
        >>> arcface_loss(cosines, torch.randint(10, (8,))).backward()
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
) -> CheckedCall[RowwiseCall]:
    """Additive cosine margin loss, as CosFace, also known as AM-Softmax (Wang et al. 2018, arXiv 1801.09414).

    L = -w_t ln(exp(s (x_t - m)) / (exp(s (x_t - m)) + Σⱼ exp(s xⱼ))), j ≠ t, x = cos θ, s = scale, m = margin.

    Over many identities the cosines need not be in memory:
    `fuse_linear(cosface_loss)(F.normalize(features), F.normalize(weight), target)` computes them by chunks.

    When to use it: Take it in place of `arcface` where training does not begin to converge under that. Its margin is subtracted from the
    cosine itself, so it is the same at every angle.

    When not: Leave it for a closed set of classes, where cross entropy classifies as well without a margin and a scale to tune.

    Args:
        input: cosines in [-1, 1].
        target: class indices of any integer dtype, in the shape of input without the classes.
        margin: m of at least 0, by how much the target's cosine must exceed the others'; 0 for a scaled cross entropy.
        scale: s above 0, which multiplies the cosines after the margin.

    Examples:
        >>> features, centres = (torch.nn.functional.normalize(torch.randn(n, 32)) for n in (8, 10))
        >>> cosines = (features @ centres.T).requires_grad_()
        >>> cosface_loss(cosines, torch.randint(10, (8,))).backward()
    """
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    return _of_cosines(call._replace(margin=checks.number("margin", margin, 0.0)), scale, options)
