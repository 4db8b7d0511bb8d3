"""Losses of rows of classes under a softmax for imbalanced, hard or noisily labelled data."""

from typing import Annotated, TypedDict, Unpack, cast

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import RowwiseCall, ViewsCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Converted, Module, loss, public
from lossforge.losses.base.option_types import BelowOne, Gradient, NonNegative, Range, Real, Reduction, UnitInterval
from lossforge.losses.base.options import check_options, of_classes, per_class, weights_of_classes
from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.engine.calls import compute
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import complement, tl
from lossforge.losses.templates.divergence import VIEWS
from lossforge.losses.templates.plain_forms import focused, one_minus_exp
from lossforge.losses.templates.rowwise import ROWWISE, ClassOptions, RowOptions, class_loss, rowwise_loss

__all__ = ["class_balanced_weight"]

ORACLES = "lossforge.losses.testing.oracles.classification"
Order = Annotated[float, Range(least=1, most=6)]
WITH_PROBABILITIES = "class index, probabilities, mixup pair"
FAR = 50.0
"""z from which e^-z no longer changes 1 - e^-z, in float64 either."""


@formula("softmax_focal", DeviceFormula("softmax.focal"))
def softmax_focal_reference(z: Tensor, gamma: float) -> Tensor:
    near = z.clamp(max=FAR)
    u = -torch.expm1(-near)
    some = u > 0
    least = torch.where(gamma == 0, 1.0, 0.0) if isinstance(gamma, Tensor) else float(gamma == 0)
    power = torch.where(some, torch.where(some, u, 1.0) ** gamma, least)  # the derivative at u = 0 is the limit, 0
    return torch.where(z > FAR, z, torch.where(u.isnan(), u, power) * near)


formula("softmax_focal_soft", None)(softmax_focal_reference)


@loss(
    "softmax_focal",
    ROWWISE,
    Module("SoftmaxFocalLoss", "Focal loss under a softmax", ' As there, the default reduction is kornia\'s "none".'),
    options=({"gamma": 0.5, "alpha": 0.25}, {"gamma": 0.0}, {"gamma": 3.5, "alpha": torch.linspace(0.1, 2, 10)}),
    targets=WITH_PROBABILITIES,
    like=f"{ORACLES}:softmax_focal",
    paper="arXiv 1708.02002",
)
def softmax_focal_loss(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as input
    alpha: UnitInterval | Tensor | None = None,  # number or (C,)
    gamma: NonNegative = 2.0,
    reduction: Reduction = "none",
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    *,
    label_smoothing: UnitInterval = 0.0,
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall]:
    """Softmax focal loss of one class against the others, as kornia.losses.focal_loss (Lin et al. 2017, arXiv 1708.02002).

    L = Σⱼ qⱼ wⱼ αⱼ (1 - pⱼ)^γ (-ln pⱼ), p = softmax(x), qⱼ = (1 - s) yⱼ + s / C with s = label_smoothing and y the target, of a class index
    one-hot. αⱼ = α, for class 0, the background, 1 - α; 1 where α is None.

    The weights multiply the loss and do not enter the mean's divisor, which is the number of rows not ignored (kornia from 0.7 on gives
    "none" per class and divides by the number of logits). For γ < 1 and p_t = 1 the gradient takes its limit, 0.

    Probabilities as target, and label smoothing, are plain PyTorch on every device, so compile them.

    When to use it: Take it for exclusive classes with many easy samples, such as segmentation with much background.

    When not: Leave it where the only trouble is a long tail; `logit_adjusted_ce` treats the cause. Its probabilities lean towards the
    middle, so calibrate them before use.

    Args:
        target: class indices of any integer dtype; or probabilities in the shape of input, such as a teacher's. A mixup pair's loss is
            λ L(target) + (1 - λ) L(target_b). It counts once in the mean.
        alpha: α in [0, 1], a factor of the loss; class 0, the background, has 1 - α; None for none. Or one a class.
        gamma: γ of at least 0, the focusing exponent: the larger, the less easy examples count.
        weight: (C,), a factor of each class, which the mean does not divide by.
        label_smoothing: s in [0, 1], the share of the target that is spread over all classes.
    """
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    gamma = checks.number("gamma", gamma, 0.0)
    dim = of_classes(input)
    classes = input.shape[dim]
    if checks.is_parameter(alpha, input):
        alpha = weights_of_classes("alpha", alpha, input, classes)
    elif alpha is not None:
        alpha = checks.number("alpha", alpha, 0.0, 1.0)
        per_class = alpha * torch.ones(classes, dtype=torch.promote_types(input.dtype, torch.float32), device=input.device)
        background = torch.arange(len(per_class), device=input.device) == 0
        alpha = torch.where(background, 1.0 - per_class, per_class)
    weight = weights_of_classes("weight", weight, input, classes)
    combined = weight if alpha is None else alpha if weight is None else alpha * weight
    name = "softmax_focal_soft" if of_all_classes(target) or checks.nonzero(label_smoothing) else "softmax_focal"
    call = RowwiseCall(name, input, target, weight=combined, hyper=[gamma], ignore_index=ignore_index, reduction=reduction)
    return rowwise_loss(call._replace(label_smoothing=label_smoothing, mean_of_rows=True), options, probabilities=True)


def of_all_classes(target: object) -> bool:
    """Return whether a target holds probabilities, not class indices."""
    return isinstance(target, Tensor) and target.is_floating_point()


@formula("poly_ce", DeviceFormula("softmax.poly"))
def poly_reference(z: Tensor, epsilon: float, offset: float) -> Tensor:
    return z - epsilon * torch.expm1(-z) + offset


formula("poly_ce_soft", None)(poly_reference)


@loss(
    "poly_ce",
    ROWWISE,
    Module("PolyCrossEntropyLoss", "Poly-1 cross entropy as timm.loss.PolyCrossEntropy"),
    options=({"epsilon": -0.5}, {"epsilon": 1.0, "label_smoothing": 0.1}),
    without=("probabilities", "label_smoothing with weight"),
    targets=WITH_PROBABILITIES,
    like=f"{ORACLES}:poly_ce",
    paper="arXiv 2204.12511",
)
def poly_cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as input
    epsilon: Real = 2.0,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: BelowOne = 0.0,
    *,
    smoothing: float | None = None,
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall]:
    """Poly-1 cross entropy, as timm.loss.PolyCrossEntropy (Leng et al. 2022, arXiv 2204.12511).

    L = Σⱼ wⱼ qⱼ (-ln pⱼ + ε (1 - pⱼ)), p = softmax(x), qⱼ = (1 - s) yⱼ + s / C with s = label_smoothing and y the target, of a class index
    one-hot. As in the paper's code, smoothing changes both terms. The mean divides as that of cross_entropy, which is ε = 0.

    Probabilities as target are plain PyTorch on every device, so compile them.

    When to use it: Take it where cross entropy works and you can tune one more number, ε. A larger ε gives samples of medium confidence a
    larger gradient.

    When not: Leave it where you cannot tune ε. It changes little on saturated tasks.

    Args:
        target: class indices of any integer dtype; or probabilities in the shape of input, such as a teacher's. A mixup pair's loss is
            λ L(target) + (1 - λ) L(target_b).
        epsilon: ε, the coefficient of the polynomial's first term; 0 is the cross entropy.
        label_smoothing: s in [0, 1), the share of the target that is spread over all classes. Class indices take it without weight. If
            one index of a pair is ignored, it adds its constant ε s (1 - 1 / C) in the other's share.
        smoothing: timm's name for label_smoothing.
    """
    epsilon = checks.number("epsilon", epsilon)
    if smoothing is not None:
        if checks.nonzero(checks.number("label_smoothing", label_smoothing)):
            raise ValueError(f"smoothing is label_smoothing, got both, {smoothing!r} and {label_smoothing!r}")
        label_smoothing = checks.number("smoothing", smoothing, 0.0, 1.0, below=True)
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 1.0, below=True)
    dim = of_classes(input)
    name, offset = "poly_ce_soft" if of_all_classes(target) else "poly_ce", 0.0
    if not of_all_classes(target) and checks.nonzero(label_smoothing):
        if weight is not None:
            raise ValueError(f"label_smoothing must be 0 where weight is given beside class indices, got {label_smoothing!r}")
        offset = epsilon * label_smoothing / (1.0 - label_smoothing)
        offset = offset - per_class(offset, input.shape[dim])
    call = RowwiseCall(name, input, target, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return rowwise_loss(call._replace(hyper=[epsilon, offset], reduction=reduction), options, probabilities=True)


@formula("generalized_ce", DeviceFormula("softmax.generalized"))
def generalized_reference(z: Tensor, q: float) -> Tensor:
    if isinstance(q, Tensor):
        q = q.clamp(min=1e-30)
    elif q <= 1e-30:
        return z
    return one_minus_exp(q * z) / q


@loss(
    "generalized_ce",
    ROWWISE,
    Module("GeneralizedCrossEntropyLoss", "Generalised cross entropy for noisy labels"),
    options=({"q": 1.0}, {"q": 1e-3}, {"q": 0.0}),
    like=f"{ORACLES}:generalized_ce",
    paper="arXiv 1805.07836",
)
def generalized_cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    q: UnitInterval = 0.7,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall]:
    """Generalised cross entropy, for noisy labels (Zhang and Sabuncu 2018, arXiv 1805.07836).

    L = w_t (1 - p_t^q) / q, p = softmax(x): the cross entropy as q → 0, 1 - p_t, half the mean absolute error, at q = 1. Exact at small q
    and where p_t is near 1. The mean divides as that of cross_entropy.

    When to use it: Take it where a good part of the labels is wrong. q trades the speed of cross entropy (0) for the robustness of the
    absolute error (1).

    When not: Leave it on clean labels, where cross entropy learns faster. With many classes and q near 1 it may not learn at all.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        q: in [0, 1]; 0 is the cross entropy, 1 the mean absolute error.
    """
    q = checks.number("q", q, 0.0, 1.0)
    call = RowwiseCall("generalized_ce", input, target, weight=weight, hyper=[q], ignore_index=ignore_index, reduction=reduction)
    return rowwise_loss(call, options)


def taylor(z, order):
    u, _ = complement(z)
    rest = tl.clamp(order - 3.0, 0.0, 1.0) / 4.0 + u * (tl.clamp(order - 4.0, 0.0, 1.0) / 5.0 + u * tl.clamp(order - 5.0, 0.0, 1.0) / 6.0)
    return u * (1.0 + u * (tl.clamp(order - 1.0, 0.0, 1.0) / 2.0 + u * (tl.clamp(order - 2.0, 0.0, 1.0) / 3.0 + u * rest)))


@formula("taylor_ce", DeviceFormula(taylor))
def taylor_reference(z: Tensor, order: float) -> Tensor:
    k = torch.arange(1, 7, dtype=z.dtype, device=z.device)
    return ((order + 1 - k).clamp(0, 1) / k * generalized_reference(z, 1.0).unsqueeze(-1) ** k).sum(-1)


@loss(
    "taylor_ce",
    ROWWISE,
    Module("TaylorCrossEntropyLoss", "Taylor cross entropy for noisy labels"),
    options=({"order": 1.0}, {"order": 3.5}, {"order": 6.0}),
    paper="doi 10.24963/ijcai.2020/305",
)
def taylor_cross_entropy(
    input: Tensor, target: Tensor, order: Order = 2.0, reduction: Reduction = "mean", **options: Unpack[ClassOptions]
) -> CheckedCall[RowwiseCall]:
    """Taylor cross entropy, for noisy labels (Feng et al. 2020, doi 10.24963/ijcai.2020/305).

    L = w_t Σₖ (1 - p_t)ᵏ / k for k from 1 to the order, p = softmax(x): 1 - p_t at order 1, towards the cross entropy as the order grows.

    When to use it: Take it where labels are wrong, as `generalized_ce`. A low order is robust, a high order learns faster.

    When not: Leave it on clean labels. Few publications compare it, so try `generalized_ce` first.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        order: in [1, 6], how many terms of the logarithm's series count. Between whole numbers the last term counts in part.
    """
    return class_loss("taylor_ce", input, target, [checks.number("order", order, 1.0, 6.0)], reduction, options)


def symmetric(z, alpha, gain):
    u, _ = complement(z)
    return alpha * z + gain * u


@formula("symmetric_ce", DeviceFormula(symmetric))
def symmetric_reference(z: Tensor, alpha: float, gain: float) -> Tensor:
    return alpha * z + gain * one_minus_exp(z)


@loss(
    "symmetric_ce",
    ROWWISE,
    Module("SymmetricCrossEntropyLoss", "Symmetric cross entropy for noisy labels"),
    options=({"alpha": 6.0, "beta": 0.1}, {"alpha": 0.0, "log_zero": -9.2}, {"beta": 0.0}),
    like=f"{ORACLES}:symmetric_ce",
    paper="arXiv 1908.06112",
)
def symmetric_cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    alpha: NonNegative = 0.1,
    beta: NonNegative = 1.0,
    log_zero: Annotated[float, Range(most=0)] = -4.0,
    reduction: Reduction = "mean",
    **options: Unpack[ClassOptions],
) -> CheckedCall[RowwiseCall]:
    """Symmetric cross entropy, for noisy labels (Wang et al. 2019, arXiv 1908.06112).

    L = w_t [α (-ln p_t) + β (-A)(1 - p_t)], p = softmax(x). The second term is the reverse cross entropy -Σⱼ pⱼ ln qⱼ of the one-hot target
    q, with A in place of ln 0. The mean divides as that of cross_entropy.

    When to use it: Take it where a good part of the labels is wrong. α keeps the speed of cross entropy, β adds the robustness of the
    absolute error. The paper has α = 0.1, β = 1 for ten classes and α = 6, β = 0.1 for a hundred.

    When not: Leave it on clean labels, where cross entropy suffices. Of its three numbers two need tuning; `generalized_ce` has one.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        alpha: α of at least 0, the weight of the cross entropy.
        beta: β of at least 0, the weight of the reverse cross entropy.
        log_zero: A of at most 0, in place of ln 0. The paper has -4, its code ln 1e-4, about -9.2.
        reduction: "mean", "sum" or "none".
    """
    alpha, beta = checks.number("alpha", alpha, 0.0), checks.number("beta", beta, 0.0)
    gain = -beta * checks.number("log_zero", log_zero, high=0.0)
    return class_loss("symmetric_ce", input, target, [alpha, gain], reduction, options)


def log_shares(class_counts: Tensor | None) -> Tensor | None:
    """Return ln π, the logarithms of the classes' shares."""
    if class_counts is None:
        return None
    checks.tensor("class_counts", class_counts)
    checks.fits("class_counts", class_counts, class_counts.ndim == 1 and len(class_counts) > 0, "hold one count a class, shape (C,)")
    if not (class_counts > 0).all():
        raise ValueError(f"class_counts must be above 0, got {class_counts.min().item():g}")
    counts = class_counts.double()
    return (counts / counts.sum()).log().to(torch.float64 if class_counts.dtype == torch.float64 else torch.float32)


@loss(
    "logit_adjusted_ce",
    ROWWISE,
    Module(
        "LogitAdjustedCrossEntropyLoss",
        "Logit-adjusted cross entropy for long-tailed classes",
        converted={
            "log_prior": Converted(
                "class_counts",
                log_shares,
                "samples of each class in the training set, or their shares, (C,), all above 0. Kept as the buffer log_prior; None: given "
                "as log_prior at each call.",
            )
        },
    ),
    formula="cross_entropy",
    options=(
        {"log_prior": torch.linspace(-4, -1, 10)},
        {"log_prior": torch.linspace(-4, -1, 10).square(), "tau": -0.7, "label_smoothing": 0.1},
        {"log_prior": torch.linspace(-4, -1, 10), "scale": 0.5},
    ),
    without=(),
    like=f"{ORACLES}:logit_adjusted_ce",
    paper="arXiv 2007.07314",
)
def logit_adjusted_cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as input
    log_prior: Tensor | None = None,  # (C,)
    tau: Real = 1.0,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: UnitInterval = 0.0,
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall]:
    """Logit-adjusted cross entropy, for long-tailed classes (Menon et al. 2020, arXiv 2007.07314).

    L = cross_entropy(x + τ ln π, t), π the classes' prior: their shares of the training set. Predict with x alone. At τ = 1 it is balanced
    softmax (arXiv 2007.10740).

    The adjusted logits are never stored: τ ln π is added as they are read.

    When to use it: Take it for training data with a long tail that is judged on balanced data. Give the classes' shares as `log_prior`, and
    predict with the logits alone.

    When not: Leave it where the test data have the tail of the training data, because it then gives up accuracy on frequent classes for
    rare ones.

    Args:
        target: class indices of any integer dtype; or probabilities in the shape of input.
        log_prior: (C,), ln π, to which any constant may be added; None: equal classes, the plain cross entropy.
        tau: τ, the strength of the adjustment by the classes' shares.
        scale: multiplies x alone.
        label_smoothing: ε in [0, 1], the share of the target that is spread over all classes.
    """
    tau = checks.number("tau", tau)
    if options.get("softcap") is not None:
        raise ValueError(f"softcap must be None for logit_adjusted_cross_entropy, got {options['softcap']!r}")
    call = RowwiseCall("cross_entropy", input, target, weight=weight, bias=log_prior, tau=tau, label_smoothing=label_smoothing)
    return rowwise_loss(call._replace(ignore_index=ignore_index, reduction=reduction), options, probabilities=True)


@checks.named
def class_balanced_weight(counts: Tensor, beta: float = 0.9999) -> Tensor:
    """Class weights from the effective number of samples (Cui et al. 2019, arXiv 1901.05555), to be given as `weight`.

    w_c ∝ (1 - β) / (1 - β^n_c), Σ w = C.

    Args:
        counts: (C,), the samples of each class n_c, of any real dtype; a class without samples counts as having one.
        beta: β in [0, 1): 0 gives equal weights, β → 1 the inverse frequencies.

    Returns:
        (C,), float32 (float64 for float64), on the device of counts.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import class_balanced_weight, cross_entropy
        >>> weight = class_balanced_weight(torch.tensor([5000, 200, 10]))
        >>> cross_entropy(torch.randn(8, 3), torch.randint(3, (8,)), weight=weight)
    """
    checks.tensor("counts", counts)
    if counts.is_complex() or counts.dtype == torch.bool:
        raise TypeError(f"counts must be of a real dtype, got {counts.dtype}")
    checks.fits("counts", counts, counts.ndim == 1 and len(counts) > 0, "hold one count a class, shape (C,)")
    beta = checks.number("beta", beta, 0.0, 1.0, below=True)
    n = counts.double().clamp(min=1.0)
    log_beta = torch.tensor(beta, dtype=torch.float64, device="cpu").log().item()
    inverse = torch.ones_like(n) if beta == 0 else -1.0 / torch.expm1(n * log_beta)
    return (inverse * (len(counts) / inverse.sum())).to(torch.float64 if counts.dtype == torch.float64 else torch.float32)


@formula("asymmetric_single_label", DeviceFormula("softmax.asymmetric"))
def asymmetric_reference(z: Tensor, gamma_pos: float, gamma_neg: float, own: float, spread: float) -> Tensor:
    return own * softmax_focal_reference(z, gamma_pos) - spread * focused(z.clamp(max=1e30), gamma_neg)


@loss(
    "asymmetric_single_label",
    ROWWISE,
    Module("AsymmetricLossSingleLabel", "Asymmetric loss as timm.loss.AsymmetricLossSingleLabel"),
    options=(
        {"eps": 0.0},
        {"gamma_pos": 0.0, "gamma_neg": 0.0, "eps": 0.3},
        {"gamma_pos": 0.5, "gamma_neg": 1.5, "eps": 0.2},
        {"gamma_pos": 2.0, "gamma_neg": 0.3, "eps": 1.0},
    ),
    like=f"{ORACLES}:asymmetric_single_label",
    paper="arXiv 2009.14119",
)
def asymmetric_loss_single_label(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    gamma_pos: NonNegative = 1.0,
    gamma_neg: NonNegative = 4.0,
    eps: UnitInterval = 0.1,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall]:
    """Asymmetric loss under a softmax, as timm.loss.AsymmetricLossSingleLabel (Ben-Baruch et al. 2020, arXiv 2009.14119).

    L = -w_t Σⱼ qⱼ aⱼ ln pⱼ with p = softmax(x), qⱼ = (1 - eps) [j = t] + eps / C, a_t = (1 - p_t)^γ₊, and aⱼ = pⱼ^γ₋ elsewhere.

    The powers are differentiated too. A class of logit -inf that is not the target adds nothing (timm: nan), except at γ₋ = 0, where it
    makes the loss infinite as label smoothing does. Where a power's derivative is infinite (γ₊ < 1 and p_t = 1) the gradient takes its
    limit, 0. The mean divides as that of cross_entropy, by the weights of the classes of the rows not ignored.

    When to use it: Take it in recipes that train with timm's loss of the same name. It moves weight away from easy samples.

    When not: Leave it as a first choice; cross entropy with label smoothing is easier to tune.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        gamma_pos: γ₊ of at least 0, the focusing exponent of the target's class.
        gamma_neg: γ₋ of at least 0, the focusing exponent of the other classes.
        eps: in [0, 1], the share of label smoothing.
        weight: (C,), one factor a class.
    """
    gamma_pos = checks.number("gamma_pos", gamma_pos, 0.0)
    gamma_neg = checks.number("gamma_neg", gamma_neg, 0.0)
    eps = checks.number("eps", eps, 0.0, 1.0)
    dim = of_classes(input)
    spread = per_class(eps, input.shape[dim])
    call = RowwiseCall("asymmetric_single_label", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    hyper = [gamma_pos, gamma_neg, 1.0 - eps + spread, spread]
    return rowwise_loss(call._replace(hyper=hyper, spread=spread, focus=gamma_neg), options)


MOST_VIEWS = 64
"""More views do not fit in a tile."""


class ViewOptions(TypedDict, total=False):
    """As every loss has them."""

    gradient: Gradient | None
    validate: bool | None


@public(VIEWS.docs, repeats=True)
def jsd_cross_entropy(
    input: Tensor,  # (S N, C)
    target: Tensor,  # class indices (S N,) or (N,)
    num_splits: int = 3,
    alpha: NonNegative = 12.0,
    smoothing: UnitInterval = 0.1,
    **options: Unpack[ViewOptions],
) -> Tensor:
    """Cross entropy of clean samples and the Jensen-Shannon divergence of their views, as timm.loss.JsdCrossEntropy (AugMix, Hendrycks et
    al. 2019, arXiv 1912.02781).

    L = cross_entropy(x₁, t) + α JS(p₁, …, p_S), JS = 1 / (S N) Σ Σⱼ p (ln p - ln max(m, 1e-7)) with p = softmax(x), m = Σ p / S.

    When to use it: Take it with AugMix and other augmentations in several views, for a classifier that is robust to corrupted images.

    When not: Leave it where a sample has one view. Each further view costs another pass of the model.

    The first N rows are the clean samples, the next N their first augmented views in the same order, and so on. The divergence reads the
    views of a sample together, once for its value and once for its gradient; no probabilities are kept.

    Args:
        input: logits (S N, C) of S views of N samples, one view of all samples after the other.
        target: class indices of any integer dtype, of the clean samples (N,), or of all rows; the first N are used.
        num_splits: S in [2, 64], the number of views.
        alpha: α of at least 0, the weight of the divergence.
        smoothing: in [0, 1], the share of label smoothing of the cross entropy.

    Examples:
        >>> logits = torch.randn(3 * 8, 10, requires_grad=True)
        >>> jsd_cross_entropy(logits, torch.randint(10, (3 * 8,))).backward()
    """
    checks.whole("input", input)
    check_options(input, "mean", options, ViewOptions)
    num_splits = checks.whole_number("num_splits", num_splits)
    if not 2 <= num_splits <= MOST_VIEWS:
        raise ValueError(f"num_splits must be at least 2 and at most {MOST_VIEWS}, got {num_splits}")
    whole = input.ndim == 2 and input.shape[0] % num_splits == 0 and input.shape[1] > 0
    checks.fits("input", input, whole, "have shape (S N, C) with S = num_splits = {}", num_splits)
    alpha = checks.number("alpha", alpha, 0.0)
    samples = input.shape[0] // num_splits
    if isinstance(target, Tensor) and target.shape == input.shape[:1]:
        target = target[:samples]
    smoothing = checks.number("smoothing", smoothing, 0.0, 1.0)
    call = RowwiseCall("cross_entropy", input[:samples], target, label_smoothing=smoothing, reduction="mean")
    clean = rowwise_loss(call, cast(RowOptions, options))
    call_of_views = ViewsCall("jsd", input, splits=num_splits, loss_scale=alpha)
    return compute(clean) + compute(CheckedCall(call_of_views, {"gradient": options.get("gradient")}, first))
