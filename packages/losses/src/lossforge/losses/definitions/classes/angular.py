"""Losses of cosines, with a margin on the target's: for very many classes, such as identities."""

import math
from typing import Annotated, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Converted, Module, loss
from lossforge.losses.base.option_types import NonNegative, Positive, Range, Reduction
from lossforge.losses.base.options import CallOptions, of_classes
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.templates.plain_forms import accurate
from lossforge.losses.templates.plain_forms.margin import with_margin
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_loss

ORACLES = "lossforge.losses.testing.oracles.classification"
WITHOUT = ("probabilities", "label_smoothing", "softcap", "z_loss", "target_b")
Angle = Annotated[float, Range(least=0, most=math.pi)]


def _alone(what: str, x: Tensor, options: CallOptions) -> Tensor:
    """Return cosines that torch may change before the kernel reads them."""
    if isinstance(x, Head) or options.get("inplace"):
        raise ValueError(f"{what} needs cosines without fuse_linear and without inplace")
    return x


def _nearest(x: Tensor, count: int) -> Tensor:
    """Return of cosines (N, C · count, d…) the largest of each class."""
    dim = of_classes(x)
    if count < 1 or x.shape[dim] % count:
        raise ValueError(f"input must have a multiple of sub_centers={count} classes, at least 1, got shape {tuple(x.shape)}")
    return x.unflatten(dim, (-1, count)).max(dim + 1).values  # amax would turn a gradient of 0 into nan in a row that holds nan


def _with_margins(x: Tensor, target: Tensor, margin: Tensor) -> Tensor:
    """Return cosines, in float32 at least, whose targets' have a margin of their own, one a row."""
    dim = of_classes(x)
    checks.integer("target", target)
    checks.floating_beside("margin", margin, x)
    checks.without_gradient("margin", margin)
    checks.fits("margin", margin, dim == 1 and margin.shape == target.shape, "be a number, or have the shape of target, {}", target.shape)
    if checks.known(margin) and margin.device.type == "cpu" and not ((margin >= 0) & (margin <= math.pi)).all():
        raise ValueError(f"margin must be in [0, π], got {margin.min().item():g} to {margin.max().item():g}")
    x = accurate(x)
    return with_margin(x, target, margin.to(x.dtype).unsqueeze(1), 0.0)


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
    margin: Angle | Tensor = 0.5,  # number, or as target
    scale: Positive = 64.0,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    *,
    sub_centers: int = 1,
    **options: Unpack[CallOptions],
) -> CheckedCall[RowwiseCall]:
    """Additive angular margin loss of cosines, as insightface's ArcFace (Deng et al. 2019, arXiv 1801.07698).

    L = -w_t ln(exp(s ψ(x_t)) / (exp(s ψ(x_t)) + Σⱼ exp(s xⱼ))), j ≠ t, x = cos θ, ψ(x) = cos(θ + m), s = scale, m = margin.
    Beyond θ = π - m, ψ(x) = x - m sin m, as in insightface: the loss has a step there, and still falls as x grows.

    The cosines are those of unit features and unit class vectors. Over many identities they need not be in memory:
    `fuse_linear(arcface_loss)(F.normalize(features), F.normalize(weight), target)` computes them by chunks, and autograd goes through both
    normalisations. sin θ is taken as at least 3.2e-4, so that the gradient is finite where x_t is 1.

    With sub_centers=K, as insightface's and pytorch-metric-learning's SubCenterArcFace (Deng et al. 2020, ECCV), a class has K vectors, of
    which the nearest counts: x of a class is the largest of its K cosines, which stand side by side, (N, C K). Images with wrong labels
    then gather at a vector of their own.

    Adaptive margins are `margin=margins[target]`: of classes, as mmpretrain's ArcFaceClsHead(margins=) has them, larger for rarer ones
    (arXiv 2010.05350), or of rows, such as those that follow the length of the features. Rows of their own take a copy of the cosines,
    which torch makes before the kernel; they are not fused with a linear layer, and not with inplace.

    When to use it: Take it to learn features whose angles tell identities, products or speakers that training has not seen.

    When not: Leave it for a closed set of classes, where cross entropy classifies as well without a margin and a scale to tune. Start with
    a smaller margin where labels are wrong or training does not begin to converge.

    Args:
        input: cosines in [-1, 1]; values that rounding put beyond count as ±1.
        target: class indices of any integer dtype, in the shape of input without the classes.
        margin: m in [0, π], the angle in radians that is added to the target's; 0 for a scaled cross entropy. Or one a row, in the shape
            of target, without a gradient: adaptive margins.
        scale: s above 0, which multiplies the cosines after the margin.
        sub_centers: K, how many vectors a class has, 3 in the paper; 1 for ArcFace. Not fused with a linear layer, and not with inplace.

    Examples:
        >>> features, centres = (torch.nn.functional.normalize(torch.randn(n, 32)) for n in (8, 10))
        >>> cosines = (features @ centres.T).requires_grad_()
        >>> arcface_loss(cosines, torch.randint(10, (8,))).backward()
    """
    count = checks.whole_number("sub_centers", sub_centers)
    if count != 1:
        input = _nearest(_alone("sub_centers", input, options), count)
    if isinstance(margin, Tensor) and margin.ndim:
        input, margin = _with_margins(_alone("margin of several rows", input, options), target, margin), 0.0
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
        margin: m of at least 0, by how much the target's cosine must exceed the others'. 0 gives a scaled cross entropy.
        scale: s above 0, which multiplies the cosines after the margin.

    Examples:
        >>> features, centres = (torch.nn.functional.normalize(torch.randn(n, 32)) for n in (8, 10))
        >>> cosines = (features @ centres.T).requires_grad_()
        >>> cosface_loss(cosines, torch.randint(10, (8,))).backward()
    """
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    return _of_cosines(call._replace(margin=checks.number("margin", margin, 0.0)), scale, options)


def margins_of_counts(class_counts: Tensor | None) -> Tensor | None:
    """Return the margins of LDAM, of which the rarest class has the largest, 0.5."""
    if class_counts is None:
        return None
    checks.tensor("class_counts", class_counts)
    checks.fits("class_counts", class_counts, class_counts.ndim == 1 and len(class_counts) > 0, "hold one count a class, shape (C,)")
    if not (class_counts > 0).all():
        raise ValueError(f"class_counts must be above 0, got {class_counts.min().item():g}")
    counts = class_counts.double()
    return (0.5 * (counts.min() / counts) ** 0.25).to(torch.float64 if class_counts.dtype == torch.float64 else torch.float32)


@loss(
    "ldam",
    ROWWISE,
    Module(
        "LDAMLoss",
        "Label-distribution-aware margin loss of cosines",
        kept=("margin",),
        converted={
            "margin": Converted(
                "class_counts",
                margins_of_counts,
                "samples of each class in the training set, (C,), all above 0: the rarest class has the margin 0.5, the others "
                "0.5 (min n / n)^(1/4). Kept as the buffer margin, which may be scaled; None: given as margin at each call.",
            )
        },
    ),
    formula="cross_entropy",
    options=({"margin": torch.linspace(0.05, 0.5, 10)}, {"margin": torch.linspace(0.5, -0.2, 10), "scale": 8.0}),
    without=WITHOUT,
    domain="cosines",
    like=f"{ORACLES}:ldam",
    paper="arXiv 1906.07413",
    targets="class index",
)
def ldam_loss(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    margin: Tensor | None = None,  # (C,)
    scale: Positive = 30.0,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[CallOptions],
) -> CheckedCall[RowwiseCall]:
    """Label-distribution-aware margin loss of cosines (LDAM; Cao et al. 2019, arXiv 1906.07413), as the authors' code.

    L = -w_t ln(exp(s (x_t - m_t)) / (exp(s (x_t - m_t)) + Σⱼ exp(s xⱼ))), j ≠ t, x = cos θ, s = scale, m = margin. The paper's margins go
    as n^(-1/4) of a class with n samples: m = 0.5 (min n / n)^(1/4), which the module makes of the counts.

    Over many classes the cosines need not be in memory:
    `fuse_linear(ldam_loss)(F.normalize(features), F.normalize(weight), target, margin)` computes them by chunks.

    When to use it: Take it for a long tail whose rare classes are separable but overfitted. The authors add class weights
    (`class_balanced_weight`) for the last fifth of the training alone.

    When not: Leave it for logits that are not cosines, because their scale makes the margins meaningless; `logit_adjusted_ce` takes them.

    Args:
        input: cosines in [-1, 1].
        target: class indices of any integer dtype, in the shape of input without the classes.
        margin: (C,), by how much the cosine of each class must exceed the others'; None for a scaled cross entropy.
        scale: s above 0, which multiplies the cosines after the margin.

    Examples:
        >>> features, centres = (torch.nn.functional.normalize(torch.randn(n, 32)) for n in (8, 10))
        >>> cosines = (features @ centres.T).requires_grad_()
        >>> ldam_loss(cosines, torch.randint(10, (8,)), torch.linspace(0.1, 0.5, 10)).backward()
    """
    call = RowwiseCall("cross_entropy", input, target, weight=weight, margins=margin, ignore_index=ignore_index, reduction=reduction)
    return _of_cosines(call, scale, options)
