"""Losses of independent yes-or-no decisions: one logit or probability each, or several labels a sample."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import MultilabelCall
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Converted, Module, loss, public
from lossforge.losses.base.option_types import (
    Balance,
    BatchReduction,
    BelowOne,
    NonNegative,
    Positive,
    Real,
    Reduction,
    ScalarReduction,
    UnitInterval,
)
from lossforge.losses.base.options import (
    ElementwiseOptions,
    MaskedInplaceOptions,
    MaskedScalarOptions,
    WeightedElementwiseOptions,
    check_options,
    checked_call,
    mask_of_elements,
    per_class,
)
from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.elementwise import ELEMENTWISE, dense, elementwise_loss, of_dim, per_sample, summed_over, with_parameter
from lossforge.losses.templates.multilabel import MULTILABEL


@formula(
    "bce_with_logits", DeviceFormula("binary.bce.bce_with_logits", binary=DeviceFormula("binary.bce.bce_with_logits_hard")), saturates=True
)
def bce_with_logits_reference(x: Tensor, y: Tensor, pos_weight: Tensor | float) -> Tensor:
    return -pos_weight * y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)


@formula(
    "bce_softened", DeviceFormula("binary.bce.bce_with_logits_softened", binary=DeviceFormula("binary.bce.bce_with_logits_softened_hard"))
)
def softened_bce_reference(x: Tensor, y: Tensor, slope: float, offset: float, threshold: float, pos_weight: Tensor | float) -> Tensor:
    y = y * slope + offset
    if isinstance(threshold, Tensor) or threshold > -torch.inf:
        y = (y > threshold).to(y.dtype)
    return bce_with_logits_reference(x, y, pos_weight)


@loss(
    "bce",
    ELEMENTWISE,
    Module("BCEWithLogitsLoss", "Binary cross entropy on logits as torch.nn.BCEWithLogitsLoss"),
    formula="bce_with_logits",
    like="torch.nn.functional:binary_cross_entropy_with_logits",
)
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
) -> CheckedCall[ElementwiseCall]:
    """Binary cross entropy on logits, as torch.nn.functional.binary_cross_entropy_with_logits.

    L = w [c y softplus(-x) + (1 - y) softplus(x)] with c = pos_weight. Exact at any logit.

    When to use it: Take it where a sample may have several labels, or none. Each class is a decision of its own.

    When not: Leave it where classes exclude each other; cross entropy ties them together. Where negatives outnumber positives by thousands,
    as in dense detection, take `focal`, under which easy negatives count little.

    Args:
        target: in [0, 1], dense; or class indices, one against all: the row's class has 1, the others 0, -1 is background and -2 ignored.
        label_smoothing: in [0, 1], of class indices and mixup pairs; 0 for dense targets.
        target_threshold: smoothed targets above it become 1, others 0; None leaves them.
        pos_weight: c, a weight of the positives; broadcasts to input, one a class as a rule.
    """
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    call = ElementwiseCall(
        "bce_with_logits", input, target, weight=weight, reduction=checks.legacy_reduction(size_average, reduce, reduction)
    )
    checked = elementwise_loss(_with_pos_weight(_softened(call, label_smoothing, target_threshold, False, options), pos_weight), options)
    if checks.nonzero(label_smoothing) and not checked.call.by_class():
        raise ValueError(
            "label_smoothing must be 0 where target is dense: smooth the target yourself, or call smoothed_binary_cross_entropy with "
            "smooth_dense=True"
        )
    return checked


@loss(
    "multilabel_soft_margin",
    ELEMENTWISE,
    Module("MultiLabelSoftMarginLoss", "Binary cross entropy averaged over the classes as torch.nn.MultiLabelSoftMarginLoss"),
    formula="bce_with_logits",
    like="torch.nn.functional:multilabel_soft_margin_loss",
)
def multilabel_soft_margin_loss(
    input: Tensor,  # (..., C)
    target: Tensor,  # as input, or class indices: as input without dim
    weight: Tensor | None = None,  # broadcasts to input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Multi-label soft margin loss, as torch.nn.functional.multilabel_soft_margin_loss: binary cross entropy, averaged over the classes.

    L = 1/C Σ w [y softplus(-x) + (1 - y) softplus(x)], the sum over the C classes of a row.

    When to use it: Take it where you want one loss a row, or where your code already calls torch's function. Its mean equals that of `bce`.

    When not: Leave it where each class needs its own loss or weight of positives; `bce` gives both.

    Args:
        target: in [0, 1], dense; or class indices, one against all: the row's class has 1, the others 0, -1 is background and -2 ignored.
        reduction: "mean" or "sum" over the rows, or "none" for one value a row.

    Returns:
        a scalar, in float32 (float64 for float64); with reduction "none" one value a row, in the dtype of input.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    call = ElementwiseCall("bce_with_logits", input, target, weight=weight, hyper=[1.0], reduction=reduction)
    whole_mean = reduction == "mean" and options.get("normalizer") is None
    checked = elementwise_loss(call, options)
    if not input.ndim or whole_mean:
        return checked
    dim, mask = checked.call.dim, options.get("mask")
    if mask is None:
        averaged = checked.call._replace(loss_scale=per_class(checked.call.loss_scale, input.shape[dim]))
    else:  # a row's mean is over its classes that count, and the row counts by the largest entry of its mask
        counts = mask.to(torch.promote_types(input.dtype, torch.float32)).expand(input.shape)
        classes = counts.sum(dim, keepdim=True) / counts.amax(dim, keepdim=True)
        share = torch.where(classes > 0, 1 / classes, 0.0)
        weight = checked.call.weight
        averaged = checked.call._replace(weight=share if weight is None else weight * share)
    of_rows = functools.partial(summed_over, dim) if reduction == "none" else first
    return checked._replace(call=averaged, finish=of_rows)


def _softened(
    call: ElementwiseCall, smoothing: float, threshold: float | None, smooth_dense: bool, options: ElementwiseOptions
) -> ElementwiseCall:
    """Return the call for targets y (1 - smoothing) + offset, 1 above the threshold and else 0, without pos_weight."""
    input, target = call.x, call.target
    dim = options.get("dim", -1)
    dim = checks.whole_number("dim", dim)
    if threshold is not None:
        threshold = checks.number("target_threshold", threshold)
        if isinstance(target, Tensor) and target.requires_grad and torch.is_grad_enabled():
            raise ValueError("target has no gradient through target_threshold, got a target that requires grad: detach it")
    indices = isinstance(target, Tensor) and not target.is_floating_point() and target.shape != getattr(input, "shape", None)
    if indices and isinstance(input, (Tensor, Head)) and -input.ndim <= dim < input.ndim:
        offset = per_class(smoothing, input.shape[dim])
    else:
        offset = smoothing / 2
        smoothing = smoothing if smooth_dense else 0.0
    if not checks.nonzero(smoothing) and threshold is None:
        return call
    hyper = [1.0 - smoothing, offset if checks.nonzero(smoothing) else 0.0, -math.inf if threshold is None else threshold]
    return call._replace(loss="bce_softened", hyper=hyper)


def _with_pos_weight(call: ElementwiseCall, pos_weight: float | Tensor | None) -> ElementwiseCall:
    hyper, parameter = with_parameter(call.hyper, "pos_weight", 1.0 if pos_weight is None else pos_weight, call.x)
    return call._replace(hyper=hyper, parameter=parameter)


@loss(
    "bce_smoothed",
    ELEMENTWISE,
    Module("BinaryCrossEntropy", "Binary cross entropy of smoothed labels as timm.loss.BinaryCrossEntropy"),
    formula="bce_softened",
    options=({"smooth_dense": True}, {"sum_classes": True, "pos_weight": 3.0}),
    like="timm.loss:BinaryCrossEntropy",
    paper="arXiv 2110.00476",
)
def smoothed_binary_cross_entropy(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    smoothing: BelowOne = 0.1,
    target_threshold: Real | None = None,
    weight: Tensor | None = None,  # broadcasts to input
    reduction: Reduction = "mean",
    sum_classes: bool = False,
    pos_weight: float | Tensor | None = None,  # broadcasts to input
    smooth_dense: bool = False,
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Binary cross entropy on logits of smoothed labels, as timm.loss.BinaryCrossEntropy (Wightman et al. 2021, arXiv 2110.00476).

    L = w [c y softplus(-x) + (1 - y) softplus(x)] with c = pos_weight and, of class indices, y = 1 - s + s / C in the row's class and
    s / C in the others, s = smoothing. Dense targets, such as those of mixup, count as smoothed already.

    When to use it: Take it for ImageNet recipes that train with sigmoids, such as ResNet Strikes Back, with mixup and cutmix.

    When not: Leave it where labels are multi-hot already, because dense targets are not smoothed again. Take `bce` there.

    Args:
        target: in [0, 1], dense; or class indices: background has s / C in all classes. A mixup pair gives what timm's Mixup with
            label smoothing gives as dense targets.
        smoothing: s in [0, 1], the share of the target that is spread.
        target_threshold: smoothed targets above it become 1, others 0; None leaves them.
        sum_classes: sum the loss over the classes (dim) and average it over the rows, whatever the reduction.
        smooth_dense: smooth dense targets too: y (1 - s) + s / 2.
        pos_weight: c, a weight of the positives; broadcasts to input.
    """
    smoothing = checks.number("smoothing", smoothing, 0.0, 1.0)
    call = ElementwiseCall("bce_with_logits", input, target, weight=weight, reduction="mean" if sum_classes else reduction)
    call = _softened(call, smoothing, target_threshold, smooth_dense, options)
    return elementwise_loss(_with_pos_weight(call, pos_weight), options, mean="rows" if sum_classes else "elements")


def _bounded_log(p: Tensor, floor: float) -> Tensor:
    """max(ln p, -100) with derivative 1 / max(p, floor)."""
    slope = torch.where(p < floor, p / floor, p.clamp(min=floor).log())
    return slope + (p.log().clamp(min=-100) - slope).detach()


@formula("bce", DeviceFormula("binary.bce.bce", heavy=True))
def bce_reference(p: Tensor, y: Tensor, floor: float) -> Tensor:
    p = p * torch.where((p >= 0) & (p <= 1), 1.0, torch.nan).to(p.dtype)
    return -y * _bounded_log(p, floor) - (1 - y) * _bounded_log(1 - p, floor)


def _floor(input: Tensor) -> float:
    """Return the least probability that the gradient tells from 0."""
    return 2.0**-15 if isinstance(input, (Tensor, Head)) and input.dtype == torch.float16 else 1e-12


def lost(values: Tensor, x: Tensor, *of_power: Tensor | bool) -> Tensor:
    """Return the values, whose gradient is nan where they are nan because a power of 0 meets an infinite entropy.

    of_power: conditions that together hold where there is a power. torch.jit.trace fails at a tensor & a bool.
    """
    nothing = values.isnan()
    for condition in of_power:
        if isinstance(condition, Tensor):
            nothing = nothing & condition
        elif not condition:
            return values
    return torch.where(nothing, x * torch.where(nothing, torch.nan, 1.0).to(x.dtype), values)


def _balance(y: Tensor, alpha: Tensor | float) -> Tensor:
    """α y + (1 - α)(1 - y), 1 where α is negative."""
    alpha = torch.as_tensor(alpha, dtype=y.dtype, device=y.device)
    return torch.where(alpha < 0, torch.ones_like(alpha), alpha * y + (1 - alpha) * (1 - y))


FOCAL = DeviceFormula(
    "binary.focal.focal",
    "binary.focal.focal_2",
    "binary.focal.is_2",
    binary=DeviceFormula("binary.focal.focal_hard", "binary.focal.focal_2_hard", "binary.focal.is_2"),
)


@formula("focal", FOCAL, saturates=True)
def focal_reference(x: Tensor, y: Tensor, gamma: float, alpha: Tensor | float) -> Tensor:
    p, p_not = x.sigmoid(), (-x).sigmoid()
    q = p * (1 - y) + p_not * y
    entropy = -y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)
    return lost(_balance(y, alpha) * q.clamp(min=torch.finfo(x.dtype).tiny) ** gamma * entropy, x, gamma != 0)


@loss(
    "focal",
    ELEMENTWISE,
    Module(
        "SigmoidFocalLoss",
        "Focal loss of sigmoids",
        ' As there, the default reduction is torchvision\'s "none".',
    ),
    options=({"gamma": 0.5}, {"gamma": 0.0, "alpha": -1.0}, {"gamma": 1.0}, {"gamma": 3.5, "alpha": 0.6}),
    like="torchvision.ops:sigmoid_focal_loss",
    paper="arXiv 1708.02002",
)
@checks.renamed(input="inputs", target="targets")
def sigmoid_focal_loss(
    inputs: Tensor,  # any shape
    targets: Tensor,  # as inputs, or class indices: as inputs without dim
    alpha: Balance | Tensor = 0.25,
    gamma: NonNegative = 2.0,
    reduction: Reduction = "none",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Focal loss of sigmoids, as torchvision.ops.sigmoid_focal_loss (Lin et al. 2017, arXiv 1708.02002).

    L = α_t (1 - p_t)^γ BCE(x, y), p_t = p y + (1 - p)(1 - y), α_t = α y + (1 - α)(1 - y), or 1 where α is negative.

    For γ < 1 and saturated logits the gradient takes its limit (torchvision: nan).

    When to use it: Take it for dense detectors, in which nearly all anchors are easy background. Divide by the number of positives with
    `normalizer=`.

    When not: Leave it on balanced data or few classes. Easy elements get little gradient, so small models learn more slowly than under
    `bce`, and its probabilities lean towards 0.5.

    Args:
        inputs: logits of any shape and floating dtype.
        targets: in [0, 1], dense; or class indices, -1 background and -2 ignored, so that a detector builds no one-hot tensor.
        alpha: α in [0, 1], the weight of positives, where negatives have 1 - α; negative for none. Or one a class, which broadcasts to
            inputs, so of shape (C,) where the classes come last.
        gamma: γ of at least 0, the focusing exponent: the larger, the less easy examples count.
        normalizer: number or 0-d tensor that takes the place of the mean's divisor, such as the number of positives.
    """
    gamma = checks.number("gamma", gamma, 0.0)
    hyper, per_class = with_parameter([gamma], "alpha", alpha, inputs, high=1.0)
    return elementwise_loss(ElementwiseCall("focal", inputs, targets, parameter=per_class, hyper=hyper, reduction=reduction), options)


def smoothed(target: Tensor, input: Tensor, smoothing: float) -> Tensor:
    """Dense targets moved towards ½, as timm does."""
    smoothing = checks.number("smoothing", smoothing, 0.0, 1.0)
    if not checks.nonzero(smoothing) or not isinstance(target, Tensor) or not isinstance(input, (Tensor, Head)):
        return target
    target = dense(target, input)
    if not target.is_floating_point():
        raise ValueError(f"smoothing needs a dense target, {tuple(input.shape)}, got class indices {tuple(target.shape)}")
    return target.to(torch.promote_types(target.dtype, torch.float32)) * (1.0 - smoothing) + 0.5 * smoothing


def asymmetric_reference(
    x: Tensor, y: Tensor, gamma_neg: float, gamma_pos: float, clip: float, pos_weight: Tensor | float, constant_powers: bool = False
) -> Tensor:
    p, p_not = x.sigmoid(), (-x).sigmoid()
    shifted = (p - clip).clamp(min=0)
    negative = -F.logsigmoid(-x)
    if isinstance(clip, Tensor) or clip > 0:
        clipped = -torch.log1p(-shifted.clamp(max=1 - 2.0**-24))
        negative = torch.where(clip > 0, clipped, negative) if isinstance(clip, Tensor) else clipped
    entropy = -pos_weight * y * F.logsigmoid(x) + (1 - y) * negative
    base = (y * p_not + (1 - y) * shifted).clamp(min=torch.finfo(x.dtype).tiny)
    gamma = gamma_pos * y + gamma_neg * (1 - y)
    power = base**gamma
    return power.detach() * entropy if constant_powers else lost(power * entropy, x, gamma != 0)


def _asymmetric(constant: str = "") -> DeviceFormula:
    unclipped, clipped = (f"binary.asymmetric.asymmetric_{name}{constant}" for name in ("unclipped", "clipped"))
    return DeviceFormula(unclipped, clipped, "binary.asymmetric.clips", heavy=True)


formula("asymmetric", _asymmetric())(asymmetric_reference)
formula("asymmetric_constant_powers", _asymmetric("_constant"))(functools.partial(asymmetric_reference, constant_powers=True))


@loss(
    "asymmetric",
    ELEMENTWISE,
    Module("AsymmetricLossMultiLabel", "Asymmetric loss as timm.loss.AsymmetricLossMultiLabel"),
    options=(
        {"clip": None},
        {"gamma_neg": 0.0, "gamma_pos": 0.0, "clip": 0.2},
        {"gamma_neg": 2.5, "gamma_pos": 0.5, "clip": 0.1, "pos_weight": 3.0},
        {"disable_torch_grad_focal_loss": True},
        {"disable_torch_grad_focal_loss": True, "clip": None, "smoothing": 0.1},
    ),
    like="timm.loss:AsymmetricLossMultiLabel",
    paper="arXiv 2009.14119",
)
def asymmetric_loss_multi_label(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    gamma_neg: NonNegative = 4.0,
    gamma_pos: NonNegative = 1.0,
    clip: UnitInterval | None = 0.05,
    eps: float = 1e-8,
    disable_torch_grad_focal_loss: bool = False,
    smoothing: float = 0.0,
    reduction: BatchReduction = "batchmean",
    weight: Tensor | None = None,  # broadcasts to input
    pos_weight: float | Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Asymmetric loss on logits, as timm.loss.AsymmetricLossMultiLabel (Ben-Baruch et al. 2020, arXiv 2009.14119).

    L = -w [c y (1 - p)^γ₊ ln p + (1 - y) s^γ₋ ln(1 - s)] with p = σ(x), s = max(p - clip, 0) and c = pos_weight, for y of 0 or 1. Between,
    as in timm, both terms have one power: (y (1 - p) + (1 - y) s)^(γ₊ y + γ₋ (1 - y)).

    Logarithms are exact at any logit: timm keeps them above ln eps, so that its gradient vanishes at a positive with x < -18. Where a
    power's derivative is infinite the gradient takes its limit (timm: nan).

    When to use it: Take it for large multi-label data, in which few of many labels hold. It fades out easy negatives, and `clip` drops
    those that are probably mislabelled.

    When not: Leave it for small networks that begin with nothing learned. In our measurements on ten classes `bce` is better.

    Args:
        target: in [0, 1], dense; or class indices, one against all, -1 background and -2 ignored.
        gamma_neg: γ₋ of at least 0, the focusing exponent of negatives.
        gamma_pos: γ₊ of at least 0, the focusing exponent of positives.
        clip: in [0, 1], how far probabilities of negatives are shifted down; None is 0.
        eps: timm's, at most 1e-4 and without effect.
        disable_torch_grad_focal_loss: the powers are constants to the gradient.
        smoothing: s in [0, 1], of dense targets, which become y (1 - s) + s / 2.
        reduction: "mean", "sum", "none", or "batchmean": the sum divided by the number of samples, input.shape[0].
        pos_weight: c, a weight of the positives; broadcasts to input.
    """
    hyper = [checks.number("gamma_neg", gamma_neg, 0.0), checks.number("gamma_pos", gamma_pos, 0.0)]
    hyper.append(checks.number("clip", 0.0 if clip is None else clip, 0.0, 1.0))
    call = _with_pos_weight(ElementwiseCall("asymmetric", input, target, weight=weight, hyper=hyper), pos_weight)
    checks.number("eps", eps, 0.0, 1e-4)
    if disable_torch_grad_focal_loss:
        call = call._replace(loss="asymmetric_constant_powers")
    target = smoothed(target, input, smoothing)
    return elementwise_loss(call._replace(target=target, reduction=per_sample(reduction, input, options)), options)


@formula("poly_bce", DeviceFormula("binary.focal.poly_bce", "binary.focal.poly_bce_0", "binary.focal.is_0"))
def poly_bce_reference(x: Tensor, y: Tensor, epsilon: float, gamma: float, alpha: Tensor | float) -> Tensor:
    q = x.sigmoid() * (1 - y) + (-x).sigmoid() * y
    entropy = -y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)
    values = _balance(y, alpha) * q.clamp(min=torch.finfo(x.dtype).tiny) ** gamma * (entropy + epsilon * q)
    return lost(values, x, gamma != 0)


@loss(
    "poly_bce",
    ELEMENTWISE,
    Module("PolyBinaryCrossEntropy", "Poly-1 binary cross entropy as timm.loss.PolyBinaryCrossEntropy"),
    options=({"epsilon": -1.0, "gamma": 2.0, "alpha": 0.25}, {"epsilon": 0.5, "gamma": 0.5}, {"alpha": 0.6}),
    like="timm.loss:PolyBinaryCrossEntropy",
    paper="arXiv 2204.12511",
)
def poly_binary_cross_entropy(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    epsilon: Real = 2.0,
    gamma: NonNegative = 0.0,
    alpha: Balance | Tensor | None = None,
    smoothing: float = 0.0,
    reduction: BatchReduction = "mean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Poly-1 binary cross entropy on logits, as timm.loss.PolyBinaryCrossEntropy (Leng et al. 2022, arXiv 2204.12511).

    L = w α_t (1 - p_t)^γ [BCE(x, y) + ε (1 - p_t)], p_t = p y + (1 - p)(1 - y), α_t = α y + (1 - α)(1 - y), or 1 where α is None or
    negative. γ = 0 is Poly-1 of the cross entropy, other γ of the focal loss.

    When to use it: Take it where `bce` or `focal` works and you can tune one more number, ε.

    When not: Leave it where you cannot tune ε; its best value differs from task to task, and a wrong one costs accuracy.

    Args:
        epsilon: ε, the coefficient of the polynomial's first term; 0 is the plain loss.
        gamma: γ of at least 0, the focusing exponent; 0 is Poly-1 of the cross entropy.
        alpha: α in [0, 1], the weight of positives, where negatives have 1 - α; None or negative for none. Or one a class.
        smoothing: s in [0, 1], of dense targets, which become y (1 - s) + s / 2.
        reduction: "mean", "sum", "none", or "batchmean": the sum divided by the number of samples, input.shape[0].
        target: in [0, 1], dense; or class indices, -1 background and -2 ignored.
    """
    epsilon = checks.number("epsilon", epsilon)
    gamma = checks.number("gamma", gamma, 0.0)
    hyper, per_class = with_parameter([epsilon, gamma], "alpha", -1.0 if alpha is None else alpha, input, high=1.0)
    target = smoothed(target, input, smoothing)
    kept = per_sample(reduction, input, options)
    return elementwise_loss(ElementwiseCall("poly_bce", input, target, parameter=per_class, hyper=hyper, reduction=kept), options)


@loss(
    "preference_bce",
    ELEMENTWISE,
    Module(
        "PreferenceBCEWithLogitsLoss",
        "Preference-weighted binary cross entropy on logits, with a weight per group",
        positional=("group_weight",),
    ),
    formula="bce_with_logits",
    like="torch.nn.functional:binary_cross_entropy_with_logits",
)
def preference_bce_with_logits(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Preference-weighted binary cross entropy on logits.

    L = v g [y softplus(-x) + (1 - y) softplus(x)], v the element's preference weight, g = group_weight[group] the weight of its group,
    so that outcomes of different groups can be weighted for fairness. The mean is over the N elements that are not ignored: gradient
    v g (σ(x) - y) / N.

    When to use it: Take it where outcomes count differently. Each element has a preference weight, and each group a weight of its own, for
    instance for fairness.

    When not: Leave it where all weights are 1; that is `bce`. To learn from pairs of a better and a worse answer take the preference
    objectives, such as `bradley_terry_loss`.

    Args:
        target: in [0, 1], dense; or class indices, one against all, -1 background and -2 ignored.
        preference: v, one weight an element, or whatever broadcasts, such as (N, 1) for one a sample.
        group: ids of any integer dtype, one an element, or whatever broadcasts.
        group_weight: (G,), the weight of each group.
    """
    call = ElementwiseCall("bce_with_logits", input, target, group=group, group_weight=group_weight, hyper=[1.0], reduction=reduction)
    return elementwise_loss(call._replace(weight=preference), options, weight="preference")


@loss(
    "preference_bce_probability",
    ELEMENTWISE,
    Module(
        "PreferenceBCELoss",
        "Preference-weighted binary cross entropy on probabilities, with a weight per group",
        positional=("group_weight",),
    ),
    formula="bce",
    domain="probabilities",
    given="sigmoid",
    like="torch.nn.functional:binary_cross_entropy",
)
def preference_bce(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Preference-weighted binary cross entropy on probabilities. Prefer the one on logits: it is exact at every confidence.

    L = -v g [y ln p + (1 - y) ln(1 - p)], logarithms kept above -100 as in torch.nn.functional.binary_cross_entropy; the gradient
    v g [(1 - y) / (1 - p) - y / p] / N is exact down to p or 1 - p = 1e-12 (float16: 2⁻¹⁵) and finite at 0 and 1.

    When to use it: Take it where a model gives probabilities and nothing else.

    When not: Leave it where you have logits. A probability near 1 has lost its digits, and no loss brings them back.

    Args:
        input: probabilities in [0, 1]; outside, loss and gradient are nan.
        target: in [0, 1], dense; or class indices, one against all, -1 background and -2 ignored.
        preference: v, one weight an element, or whatever broadcasts, such as (N, 1) for one a sample.
        group: ids of any integer dtype, one an element, or whatever broadcasts.
        group_weight: (G,), the weight of each group.

    Examples:
        >>> p = torch.rand(8, 10, requires_grad=True)
        >>> preference_bce(p, torch.randint(10, (8,)), preference=torch.rand(8, 1)).backward()
    """
    call = ElementwiseCall("bce", input, target, group=group, group_weight=group_weight, hyper=[_floor(input)], reduction=reduction)
    return elementwise_loss(call._replace(weight=preference), options, weight="preference")


@loss(
    "bce_probability",
    ELEMENTWISE,
    Module("BCELoss", "Binary cross entropy on probabilities as torch.nn.BCELoss"),
    formula="bce",
    domain="probabilities",
    like="torch.nn.functional:binary_cross_entropy",
)
def binary_cross_entropy(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    weight: Tensor | None = None,  # broadcasts to input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[ElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Binary cross entropy on probabilities, as torch.nn.functional.binary_cross_entropy. Prefer the one on logits, which is exact.

    L = -w [y ln p + (1 - y) ln(1 - p)], logarithms kept above -100; the gradient is that of preference_bce, finite at 0 and 1.

    When to use it: Take it for models that end with a sigmoid that cannot be removed.

    When not: Leave it where you have logits; `bce` is exact at every confidence.

    Args:
        input: probabilities in [0, 1]; outside, loss and gradient are nan (torch raises, on CUDA by a device assertion).
        target: in [0, 1], dense; or class indices, one against all, -1 background and -2 ignored.

    Examples:
        >>> p = torch.rand(8, 10, requires_grad=True)
        >>> binary_cross_entropy(p, torch.randint(10, (8,))).backward()
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return elementwise_loss(ElementwiseCall("bce", input, target, weight=weight, hyper=[_floor(input)], reduction=reduction), options)


@formula("distribution_balanced", None)
def distribution_balanced_reference(x: Tensor, y: Tensor, neg_scale: float, gamma: float, balance: float, bias: float | Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny
    z = x + bias
    positive = -F.logsigmoid(z) * torch.sigmoid(-z).clamp(min=tiny) ** gamma
    negative = -F.logsigmoid(-neg_scale * z) / neg_scale * torch.sigmoid(neg_scale * z).clamp(min=tiny) ** gamma
    return lost(balance * (y * positive + (1 - y) * negative), x, gamma != 0)


def whole_counts(class_counts: Tensor | Sequence[float] | None) -> Tensor | None:
    """Return the counts as a tensor, of integers if they are whole: a change of a module's dtype does not round those."""
    if class_counts is None:
        return None
    try:
        counts = torch.as_tensor(class_counts)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"class_counts must be a tensor, or a list of numbers, got {class_counts!r:.60}") from None
    if not counts.is_floating_point() or counts.is_meta or not checks.known(counts):
        return counts
    return counts.long() if ((counts.round() == counts) & (counts.abs() < 2**53)).all() else counts


@loss(
    "distribution_balanced",
    ELEMENTWISE,
    Module(
        "DistributionBalancedLoss",
        "Distribution-balanced loss as timm.loss.DistributionBalancedLoss",
        converted={
            "class_counts": Converted(
                "class_counts",
                whole_counts,
                "(C,), the positive samples of each class in the training set, as a tensor or a list; those outside [1, S - 1] count as "
                "its ends.",
            )
        },
    ),
    options=({"neg_scale": 5.0, "focal_gamma": 0.0}, {"neg_scale": 1.0, "focal_gamma": 1.5, "focal_balance": 0.7}, {"focal_gamma": 0.5}),
    like="lossforge.losses.testing.oracles.elements:distribution_balanced",
    paper="arXiv 2007.09654",
)
def distribution_balanced_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    class_counts: Tensor | None = None,  # (C,)
    num_samples: int | None = None,
    map_alpha: Real = 0.1,
    map_beta: Real = 10.0,
    map_mu: Real = 0.2,
    neg_scale: Positive = 2.0,
    init_bias: Real = 0.05,
    focal_gamma: NonNegative = 2.0,
    focal_balance: Real = 2.0,
    smoothing: float = 0.0,
    reduction: BatchReduction = "mean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Distribution-balanced loss, as timm.loss.DistributionBalancedLoss (Wu et al. 2020, arXiv 2007.09654).

    L = w v b [y σ(-z)^γ softplus(-z) + (1 - y) σ(λz)^γ softplus(λz) / λ], z = x - κ / λ ln(S / n - 1). Class j has n = class_counts[j] of
    S = num_samples, λ = neg_scale, κ = init_bias, γ = focal_gamma, b = focal_balance, or 1 where γ is 0.

    v = map_alpha + σ(map_beta (r - map_mu)) with r = (1 / n) / Σⱼ yⱼ / nⱼ, how often class j alone would draw its sample, as a share of how
    often all of the sample's classes draw it. A sample without positives has r = ∞. Without class_counts v is 1 and z is x. The weights v
    are computed from the targets, as a tensor in the shape of input. The mean divides by the number of elements.

    In plain PyTorch: torch.compile of it took less time than a kernel (one H200, 4096×9605, float32: 0.60 ms to 0.77). So compile it.

    When to use it: Take it for samples with several labels under a long tail. It balances the classes without oversampling, and gives the
    many negatives of rare classes a smaller gradient.

    When not: Leave it on balanced classes (`bce`, `asymmetric`). It needs the classes' counts, and has six numbers that could be tuned.

    Args:
        target: in [0, 1], dense; or class indices, one against all, -1 background and -2 ignored.
        class_counts: (C,), the positive samples of each class in the training set; those outside [1, S - 1] count as its ends.
        num_samples: S of at least 2, the samples of the training set; needed with class_counts.
        map_alpha: the least weight of an element.
        map_beta: how steeply the weight rises with the share r.
        map_mu: the share r at which the weight is halfway between least and largest.
        neg_scale: λ above 0, a factor of the logits of negatives; 1 for none. The larger it is, the sooner their gradient fades.
        init_bias: κ, how far the classes' shares of the training set shift the logits; 0 for none.
        focal_gamma: γ of at least 0, the focusing exponent.
        focal_balance: b, a factor of the loss where γ is not 0.
        smoothing: s in [0, 1], of dense targets, which become y (1 - s) + s / 2.
        reduction: "mean", "sum", "none", or "batchmean": the sum divided by the number of samples, input.shape[0].
        gradient: without effect, because autograd computes it in backward.
        inplace: without effect, because autograd gives the gradient memory of its own.
    """
    gamma = checks.number("focal_gamma", focal_gamma, 0.0)
    scale = checks.number("neg_scale", neg_scale, 0.0, exclusive=True)
    balance = checks.number("focal_balance", focal_balance)
    rising = [checks.number(name, value) for name, value in (("map_alpha", map_alpha), ("map_beta", map_beta), ("map_mu", map_mu))]
    shift = checks.number("init_bias", init_bias) / scale
    hyper = [scale, gamma, balance if checks.nonzero(gamma) else 1.0]
    call = ElementwiseCall("distribution_balanced", input, smoothed(target, input, smoothing), hyper=[*hyper, 0.0])
    call = call._replace(reduction=per_sample(reduction, input, options))
    if class_counts is None:
        if num_samples is not None:
            raise ValueError(f"num_samples needs class_counts, got num_samples={num_samples!r} alone")
        return elementwise_loss(call, options)
    if num_samples is None:
        raise ValueError("num_samples must be given where class_counts is, got None")
    counts = _counts(class_counts, num_samples, input, checks.whole_number("dim", options.get("dim", -1)))
    checked = elementwise_loss(call._replace(hyper=hyper, parameter=-shift * torch.log(num_samples / counts - 1)), options)
    share = _rebalanced(1 / counts, checked.call._replace(target=dense(target, input)), rising, options.get("mask"))
    weight = checked.call.weight
    return checked._replace(call=checked.call._replace(weight=share if weight is None else share * weight))


def _counts(counts: Tensor, samples: float, x: Tensor, dim: int) -> Tensor:
    """Return the counts in [1, S - 1], in a shape that broadcasts to x."""
    checks.whole("input", x)
    of_dim(dim, x)
    checks.beside("class_counts", checks.tensor("class_counts", counts), x)
    checks.fits("class_counts", counts, counts.shape == (x.shape[dim],), "hold one count a class, shape ({},)", x.shape[dim])
    samples = checks.number("num_samples", samples, 2.0)
    counts = counts.to(torch.float64 if x.dtype == torch.float64 else torch.float32).clamp(1, samples - 1)
    return counts.view(-1, *(1,) * (x.ndim - 1 - dim % x.ndim))


def _rebalanced(frequency: Tensor, call: ElementwiseCall, rising: list[float], mask: Tensor | None) -> Tensor:
    """Return the weight of each element. frequency: 1 / n of each class. mask: a class that does not count is as if it did not hold."""
    least, slope, middle = rising
    target = call.target
    assert target is not None
    if mask is not None and target.is_floating_point():
        target = torch.where(mask == 0, 0.0, target)

    def of_index(index: Tensor) -> Tensor:
        found = frequency.flatten()[index.long().clamp(0, frequency.numel() - 1)]
        return torch.where(index < 0, 0.0, found).unsqueeze(call.dim)

    if target.is_floating_point():
        rate = (target * frequency).sum(call.dim, keepdim=True)
    else:
        share = None if call.lam is None else call.lam.unsqueeze(call.dim)
        rate = of_index(target) if share is None else share * of_index(target)
        if call.target_b is not None and share is not None:
            rate = rate + (1 - share) * of_index(call.target_b)
    ratio = frequency / rate.clamp(min=torch.finfo(frequency.dtype).tiny)
    return least + torch.sigmoid(slope * (ratio - middle))


def _check(input: Tensor, target: Tensor) -> None:
    """Check the logits and targets of samples with several labels."""
    checks.whole("input", input)
    if input.ndim == 0 or input.shape[-1] == 0:
        raise ValueError(f"input must have at least one class in its last dimension, got shape {tuple(input.shape)}")
    checks.tensor("target", target)
    if target.is_complex():
        raise TypeError(f"target must be of a real dtype or bool, got {target.dtype}")
    checks.without_gradient("target", target)
    checks.beside("target", target, input)
    if target.shape != input.shape:
        raise ValueError(
            f"target must have the shape of input, {tuple(input.shape)}, 1 for each class that holds, got shape {tuple(target.shape)}"
        )


@public(
    MULTILABEL.docs,
    Module("ZlprLoss", "ZLPR loss as timm.loss.ZlprLoss"),
    repeats=True,
)
def zlpr_loss(
    input: Tensor,  # (…, C)
    target: Tensor,  # as input
    reduction: Reduction = "mean",
    **options: Unpack[MaskedInplaceOptions],
) -> CheckedCall[MultilabelCall]:
    """ZLPR loss, softmax cross entropy of samples with several labels, as timm.loss.ZlprLoss (Su et al. 2022, arXiv 2208.02955).

    L = ln(1 + Σⱼ exp xⱼ) + ln(1 + Σₖ exp(-xₖ)) with j over the negative classes of a sample and k over its positive ones, those with a
    target above ½. Every positive logit is pushed above every negative one, and 0 is the threshold between them.

    One pass over the logits gives the value, another the gradient; no masked copy is made. "mean" divides by the number of samples.

    When to use it: Take it for samples with few of many labels. Its size does not grow with the number of negatives, it has nothing to
    tune, and 0 is the threshold.

    When not: Leave it where each label's probability must be calibrated alone; `bce` and `asymmetric` give these.

    Args:
        input: logits (…, C), of any floating dtype, the classes last.
        target: in the shape of input, of any real dtype or bool; above ½ where a class holds.
        mask: which classes of a sample count, bool, or floats as weights of their exponentials, as if a class were there as often. It
            broadcasts to input. The others may hold anything. A mean divides by the samples of which a class counts.

    Examples:
        >>> logits = torch.randn(8, 80, requires_grad=True)
        >>> zlpr_loss(logits, torch.rand(8, 80) > 0.9).backward()
    """
    _check(input, target)
    divisor = check_options(input, reduction, options, MaskedInplaceOptions)
    lead, mask = input.shape[:-1], options.get("mask")
    if mask is not None:
        mask = mask_of_elements(mask, input)
        counts = mask.expand(input.shape)
        if reduction == "mean" and options.get("normalizer") is None:
            divisor = (counts.amax(-1) if counts.shape[-1] else counts).sum(dtype=torch.promote_types(input.dtype, torch.float32))
            options["normalizer"] = divisor
        mask = mask if input.ndim == 2 else counts.reshape(-1, input.shape[-1])
    x, y = (t if t.ndim == 2 else t.reshape(-1, t.shape[-1]) for t in (input, target))
    call = MultilabelCall("zlpr", x, y, mask, reduction=reduction)
    shaped = len(lead) != 1 and reduction == "none"
    checked = checked_call(call, options, divisor)
    return checked.returning(functools.partial(_of_shape, lead)) if shaped else checked


def _of_shape(lead: Sequence[int], results: Sequence[Tensor | None]) -> Tensor:
    return first(results).view(lead)


@public(
    MULTILABEL.docs,
    Module("TwoWayLoss", "Two-way multi-label loss as timm.loss.TwoWayLoss"),
    repeats=True,
)
def two_way_loss(
    input: Tensor,  # (N, C)
    target: Tensor,  # as input
    tp: Positive = 4.0,
    tn: Positive = 1.0,
    reduction: ScalarReduction = "mean",
    **options: Unpack[MaskedScalarOptions],
) -> CheckedCall[MultilabelCall]:
    """Two-way multi-label loss, as timm.loss.TwoWayLoss (Kobayashi 2023, CVPR, "Two-way Multi-Label Loss").

    L = softplus(tn ln Σⱼ exp(xⱼ / tn) + tp ln Σₖ exp(-xₖ / tp)) with j over negatives and k over positives, those with a target above ½:
    the mean over the samples that have a positive, plus that over the classes of the batch that have one.

    Each direction is one pass over the logits, and one more writes the gradient of both. Logits are scores for a ranking, not calibrated
    probabilities.

    When to use it: Take it where labels are ranked within a sample, and samples within a label, as retrieval is judged.

    When not: Leave it where logits must become probabilities (`bce`), and where batches are so small that most labels have no positive.

    Args:
        input: logits (N, C), of any floating dtype.
        target: in the shape of input, of any real dtype or bool; above ½ where a class holds.
        mask: which classes of a sample count, bool, or floats as weights of their exponentials, as if a class were there as often. It
            broadcasts to input. The others may hold anything, and are neither positives nor negatives.
        tp: temperature above 0 of the positives' soft minimum.
        tn: temperature above 0 of the negatives' soft maximum.
        reduction: "mean", of each direction; or "sum".
        empty: without effect; the mean of no sample is 0, as timm's.

    Examples:
        >>> logits = torch.randn(8, 80, requires_grad=True)
        >>> two_way_loss(logits, torch.rand(8, 80) > 0.9).backward()
    """
    _check(input, target)
    checks.fits("input", input, input.ndim == 2, "have shape (N, C)")
    checks.one_of("reduction", reduction, ("mean", "sum"))
    check_options(input, reduction, options, MaskedScalarOptions)
    numbers: dict[str, Any] = {
        "tp": checks.number("tp", tp, 0.0, exclusive=True),
        "tn": checks.number("tn", tn, 0.0, exclusive=True),
        "paired": True,
        "reduction": reduction,
    }
    mask = options.get("mask")
    mask = None if mask is None else mask_of_elements(mask, input)
    return checked_call(MultilabelCall("two_way", input, target, mask, **numbers), options, None)
