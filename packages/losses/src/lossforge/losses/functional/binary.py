"""Losses of independent yes-or-no decisions: one logit or probability each."""

import math
from typing import Unpack

import torch
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.functional.common import ElementwiseOptions
from lossforge.losses.functional.elementwise import dense, elementwise_loss, per_sample, with_parameter
from lossforge.losses.repeat import repeated
from lossforge.losses.types import BatchReduction, Reduction


@repeated
def binary_cross_entropy_with_logits(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    weight: Tensor | None = None,  # broadcasts to input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    pos_weight: Tensor | None = None,  # broadcasts to input
    *,
    label_smoothing: float = 0.0,
    target_threshold: float | None = None,
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Binary cross entropy on logits, as torch.nn.functional.binary_cross_entropy_with_logits.

    L = w [c y softplus(-x) + (1 - y) softplus(x)] with c = pos_weight. Exact at any logit.

    Args: target in [0, 1], or class indices (one against all: the row's class 1, the others 0; -1 background, -2 ignored), with
    target_b and lam a mixup pair; dim: the classes' dimension; label_smoothing, target_threshold: as in smoothed_binary_cross_entropy,
    of class indices and pairs, and of every target. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    formula, hyper = _softened(input, target, label_smoothing, target_threshold, False, options)
    hyper, parameter = with_parameter(hyper, "pos_weight", 1.0 if pos_weight is None else pos_weight, input)
    return elementwise_loss(
        formula,
        input,
        target,
        hyper,
        checks.legacy_reduction(size_average, reduce, reduction),
        options,
        weight=weight,
        parameter=parameter,
    )


def _softened(
    input: Tensor, target: Tensor, smoothing: float, threshold: float | None, smooth_dense: bool, options: ElementwiseOptions
) -> tuple[str, list[float]]:
    """The formula for targets y (1 - smoothing) + offset, 1 above the threshold and else 0, and its hyper-parameters but pos_weight."""
    dim = options.get("dim", -1)
    dim = checks.whole_number("dim", dim)
    if threshold is not None:
        threshold = checks.number("target_threshold", threshold)
        if isinstance(target, Tensor) and target.requires_grad and torch.is_grad_enabled():
            raise ValueError("target has no gradient through target_threshold, got a target that requires grad: detach it")
    indices = isinstance(target, Tensor) and not target.is_floating_point() and target.shape != getattr(input, "shape", None)
    if indices and isinstance(input, Tensor) and -input.ndim <= dim < input.ndim:
        offset = smoothing / max(int(input.shape[dim]), 1)
    else:
        offset = smoothing / 2
        smoothing = smoothing if smooth_dense else 0.0
    if not checks.nonzero(smoothing) and threshold is None:
        return "bce_with_logits", []
    return "bce_softened", [1.0 - smoothing, offset if checks.nonzero(smoothing) else 0.0, -math.inf if threshold is None else threshold]


@repeated
def binary_cross_entropy(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    weight: Tensor | None = None,  # broadcasts to input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Binary cross entropy on probabilities, as torch.nn.functional.binary_cross_entropy. Prefer the one on logits, which is exact.

    L = -w [y ln p + (1 - y) ln(1 - p)], logarithms kept above -100; the gradient is that of preference_bce, finite at 0 and 1.

    Args: input in [0, 1]; outside, loss and gradient are nan (torch raises, on CUDA a device assert). Target and others: as in
    binary_cross_entropy_with_logits.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss("bce", input, target, [_floor(input)], reduction, options, weight=weight)


def _floor(input: Tensor) -> float:
    """The least probability that the gradient tells from 0."""
    return 2.0**-15 if isinstance(input, Tensor) and input.dtype == torch.float16 else 1e-12


@repeated
def smoothed_binary_cross_entropy(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    smoothing: float = 0.1,
    target_threshold: float | None = None,
    weight: Tensor | None = None,  # broadcasts to input
    reduction: Reduction = "mean",
    sum_classes: bool = False,
    pos_weight: float | Tensor | None = None,  # broadcasts to input
    smooth_dense: bool = False,
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Binary cross entropy on logits of smoothed labels, as timm.loss.BinaryCrossEntropy (Wightman et al. 2021, arXiv 2110.00476).

    L = w [c y softplus(-x) + (1 - y) softplus(x)] with c = pos_weight and, of class indices, y = 1 - s + s / C in the row's class and
    s / C in the others, s = smoothing. Dense targets, such as those of mixup, count as smoothed already.

    Args: target: as in binary_cross_entropy_with_logits; background has s / C in all classes, and a mixup pair gives what timm's Mixup
    with label smoothing gives as dense targets; smoothing: in [0, 1]; target_threshold: smoothed targets above it become 1, others 0;
    sum_classes: the loss summed over the classes (dim) and averaged over the rows, whatever the reduction; smooth_dense: dense targets
    are smoothed too, y (1 - s) + s / 2. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    smoothing = checks.number("smoothing", smoothing, 0.0, 1.0)
    formula, hyper = _softened(input, target, smoothing, target_threshold, smooth_dense, options)
    hyper, parameter = with_parameter(hyper, "pos_weight", 1.0 if pos_weight is None else pos_weight, input)
    return elementwise_loss(
        formula,
        input,
        target,
        hyper,
        "mean" if sum_classes else reduction,
        options,
        weight=weight,
        parameter=parameter,
        mean_of_rows=sum_classes,
    )


@repeated
def preference_bce_with_logits(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Preference-weighted binary cross entropy on logits.

    L = v g [y softplus(-x) + (1 - y) softplus(x)], v the element's preference weight, g = group_weight[group] the weight of its group,
    so that outcomes of different groups can be weighted for fairness. The mean is over the N elements that are not ignored: gradient
    v g (σ(x) - y) / N.

    Args: preference: one weight an element, or whatever broadcasts, such as (N, 1) for one a sample; group: a group id each, with
    group_weight (G,). Target and others: as in binary_cross_entropy_with_logits.
    Raises: TypeError, ValueError naming the argument; IndexError for an index or group out of range.
    """
    return elementwise_loss(
        "bce_with_logits",
        input,
        target,
        [1.0],
        reduction,
        options,
        weight=preference,
        group=group,
        group_weight=group_weight,
    )


@repeated
def preference_bce(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Preference-weighted binary cross entropy on probabilities. Prefer the one on logits: it is exact at every confidence.

    L = -v g [y ln p + (1 - y) ln(1 - p)], logarithms kept above -100 as in torch.nn.functional.binary_cross_entropy; the gradient
    v g [(1 - y) / (1 - p) - y / p] / N is exact down to p or 1 - p = 1e-12 (float16: 2⁻¹⁵) and finite at 0 and 1.

    Args: input in [0, 1]; outside, loss and gradient are nan. Others: as in preference_bce_with_logits.
    Raises: TypeError, ValueError naming the argument; IndexError for an index or group out of range.
    """
    return elementwise_loss(
        "bce",
        input,
        target,
        [_floor(input)],
        reduction,
        options,
        weight=preference,
        group=group,
        group_weight=group_weight,
    )


@repeated
def sigmoid_focal_loss(
    inputs: Tensor,  # any shape
    targets: Tensor,  # as inputs, or class indices: as inputs without dim
    alpha: float | Tensor = 0.25,
    gamma: float = 2.0,
    reduction: Reduction = "none",
    *,
    weight: Tensor | None = None,  # broadcasts to inputs
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Sigmoid focal loss, as torchvision.ops.sigmoid_focal_loss (Lin et al. 2017, arXiv 1708.02002).

    L = α_t (1 - p_t)^γ BCE(x, y), p_t = p y + (1 - p)(1 - y), α_t = α y + (1 - α)(1 - y), or 1 where α is negative.

    Args: targets in [0, 1], or class indices (the row's class 1, the others 0; -1 background, -2 ignored), so that a detector builds no
    one-hot tensor, with target_b and lam a mixup pair; dim: the classes' dimension; alpha: a number, or one a class (broadcasts to
    inputs, so of shape (C,) where the classes come last); gamma: at least 0; normalizer: such as the number of positives.
    Others: see lossforge.losses.functional. For γ < 1 and saturated logits the gradient takes its limit (torchvision: nan).
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    gamma = checks.number("gamma", gamma, 0.0)
    hyper, per_class = with_parameter([gamma], "alpha", alpha, inputs, high=1.0)
    return elementwise_loss(
        "focal",
        inputs,
        targets,
        hyper,
        reduction,
        options,
        weight=weight,
        parameter=per_class,
    )


def _smoothed(target: Tensor, input: Tensor, smoothing: float) -> Tensor:
    """Dense targets moved towards ½, as timm does."""
    smoothing = checks.number("smoothing", smoothing, 0.0, 1.0)
    if not checks.nonzero(smoothing) or not isinstance(target, Tensor) or not isinstance(input, Tensor):
        return target
    target = dense(target, input)
    if not target.is_floating_point():
        raise ValueError(f"smoothing needs a dense target, {tuple(input.shape)}, got class indices {tuple(target.shape)}")
    return target.to(torch.promote_types(target.dtype, torch.float32)) * (1.0 - smoothing) + 0.5 * smoothing


@repeated
def asymmetric_loss_multi_label(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    gamma_neg: float = 4.0,
    gamma_pos: float = 1.0,
    clip: float | None = 0.05,
    eps: float = 1e-8,
    disable_torch_grad_focal_loss: bool = False,
    smoothing: float = 0.0,
    reduction: BatchReduction = "batchmean",
    weight: Tensor | None = None,  # broadcasts to input
    pos_weight: float | Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Asymmetric loss on logits, as timm.loss.AsymmetricLossMultiLabel (Ben-Baruch et al. 2020, arXiv 2009.14119).

    L = -w [c y (1 - p)^γ₊ ln p + (1 - y) s^γ₋ ln(1 - s)] with p = σ(x), s = max(p - clip, 0) and c = pos_weight, for y of 0 or 1. Between,
    as in timm, both terms have one power: (y (1 - p) + (1 - y) s)^(γ₊ y + γ₋ (1 - y)).

    Logarithms are exact at any logit: timm keeps them above ln eps, so that its gradient vanishes at a positive with x < -18. Where a
    power's derivative is infinite the gradient takes its limit (timm: nan).

    Args: target in [0, 1], or class indices (one against all: the row's class 1, the others 0; -1 background, -2 ignored), with target_b
    and lam a mixup pair; gamma_neg, gamma_pos: at least 0; clip: in [0, 1], None is 0; eps: timm's, at most 1e-4 and without effect;
    disable_torch_grad_focal_loss: the powers are constants to the gradient; smoothing: in [0, 1], of dense targets, which become
    y (1 - s) + s / 2; reduction: also "batchmean", the sum divided by
    the number of samples, input.shape[0]. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    gamma_neg = checks.number("gamma_neg", gamma_neg, 0.0)
    gamma_pos = checks.number("gamma_pos", gamma_pos, 0.0)
    margin = checks.number("clip", 0.0 if clip is None else clip, 0.0, 1.0)
    given = 1.0 if pos_weight is None else pos_weight
    hyper, parameter = with_parameter([gamma_neg, gamma_pos, margin], "pos_weight", given, input)
    checks.number("eps", eps, 0.0, 1e-4)
    constant_powers = checks.flag("disable_torch_grad_focal_loss", disable_torch_grad_focal_loss)
    return elementwise_loss(
        "asymmetric_constant_powers" if constant_powers else "asymmetric",
        input,
        _smoothed(target, input, smoothing),
        hyper,
        per_sample(reduction, input, options),
        options,
        weight=weight,
        parameter=parameter,
    )


@repeated
def poly_binary_cross_entropy(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    epsilon: float = 2.0,
    gamma: float = 0.0,
    alpha: float | Tensor | None = None,
    smoothing: float = 0.0,
    reduction: BatchReduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Poly-1 binary cross entropy on logits, as timm.loss.PolyBinaryCrossEntropy (Leng et al. 2022, arXiv 2204.12511).

    L = w α_t (1 - p_t)^γ [BCE(x, y) + ε (1 - p_t)], p_t = p y + (1 - p)(1 - y), α_t = α y + (1 - α)(1 - y), or 1 where α is None or
    negative. γ = 0 is Poly-1 of the cross entropy, other γ of the focal loss.

    Args: target, alpha, gamma: as in sigmoid_focal_loss; epsilon: 0 is the plain loss; smoothing: in [0, 1], of dense targets, which become
    y (1 - s) + s / 2; reduction: also "batchmean", the sum divided by the
    number of samples, input.shape[0]. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    epsilon = checks.number("epsilon", epsilon)
    gamma = checks.number("gamma", gamma, 0.0)
    hyper, per_class = with_parameter([epsilon, gamma], "alpha", -1.0 if alpha is None else alpha, input, high=1.0)
    return elementwise_loss(
        "poly_bce",
        input,
        _smoothed(target, input, smoothing),
        hyper,
        per_sample(reduction, input, options),
        options,
        weight=weight,
        parameter=per_class,
    )
