"""The losses as functions. Where torch, torchvision or timm has the loss, names, order and defaults are theirs; our options are keyword-only.

Options that every function has:

normalizer: number or 0-d tensor that takes the place of the mean's divisor: Σ loss / normalizer.
empty: what a mean over nothing (a divisor of 0) gives: "nan" as in torch, or "zero", with gradient 0.
gradient: "forward" writes the gradient in the same launch as the loss, "backward" computes it when it is asked for. By default
    forward where the result is a scalar, except for float16 (whose small gradients a scaler must first lift) and under torch.compile.
inplace: the gradient takes the memory of the logits, which must be an intermediate result; using them afterwards raises. The value is
    the same; under torch.compile, on CPU and in float64 nothing is overwritten.
validate: check class indices on CUDA too, which synchronises with the host (default: the environment's LOSSFORGE_VALIDATE). On CPU they
    always are. Unchecked, a row with an index out of range has loss and gradient nan; other rows are unharmed.

Every loss computes and sums in float32 (float64 for float64). Scalars and per-row losses of half-precision inputs come back in float32,
per-element losses and gradients in the dtype of the input. What the kernels do not differentiate (targets, weights) is differentiated
through the plain-torch reference when it requires grad.
"""

from typing import NamedTuple

import torch
from lossforge.losses import checks
from lossforge.losses.dispatch import elementwise, rowwise
from lossforge.losses.operators.elementwise import Elementwise
from lossforge.losses.operators.rowwise import Rowwise
from torch import Tensor


class CrossEntropyOutput(NamedTuple):
    """What `cross_entropy` returns when further outputs are asked for; None for the others."""

    loss: Tensor
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None


def _lam(lam: float | Tensor | None, target: Tensor, target_b: Tensor | None, x: Tensor) -> Tensor | None:
    """λ of a mixup pair as a tensor that expands to the shape of the target: 0-d, per sample, or per row."""
    if (target_b is None) != (lam is None):
        raise ValueError(f"target_b and lam go together, got target_b={target_b is not None and 'a tensor'}, lam={lam!r}")
    if lam is None:
        return None
    if target.is_floating_point():
        raise TypeError(f"target must hold class indices where target_b is given, got {target.dtype}")
    if not isinstance(lam, Tensor):
        checks.number("lam", lam, 0.0, 1.0)
        return torch.full((), lam, dtype=torch.float32, device=x.device)
    checks.floating_beside("lam", lam, x)
    if lam.ndim == 1 and target.ndim > 1:
        lam = lam.view(-1, *(1,) * (target.ndim - 1))
    if lam.ndim > target.ndim or any(a not in (1, b) for a, b in zip(reversed(lam.shape), reversed(target.shape), strict=False)):
        raise ValueError(f"lam must be a number, 0-d, or one a sample or row of target {tuple(target.shape)}, got shape {tuple(lam.shape)}")
    return lam


def _common(reduction: str, normalizer: float | Tensor | None, empty: str, gradient: str | None, inplace: bool, x: Tensor) -> Tensor | None:
    """Check the options every loss has; the normalizer where it is a tensor."""
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("empty", empty, checks.EMPTY)
    checks.one_of("gradient", gradient, checks.MODES)
    if reduction == "none":
        if gradient == "forward":
            raise ValueError('gradient="forward" needs a scalar result: reduction "mean" or "sum", got "none"')
        if normalizer is not None:
            raise ValueError('normalizer needs a scalar result: reduction "mean" or "sum", got "none"')
    if inplace and x.is_leaf and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("inplace=True needs logits that are an intermediate result, got a leaf that requires grad")
    if normalizer is None:
        return None
    if not isinstance(normalizer, Tensor):
        checks.number("normalizer", normalizer)
        return None
    if normalizer.ndim != 0:
        raise ValueError(f"normalizer must be a number or a 0-d tensor, got shape {tuple(normalizer.shape)}")
    checks.beside("normalizer", normalizer, x)
    return normalizer


def _elementwise(
    loss: str,
    x: Tensor,
    target: Tensor,
    hyper: list[float],
    reduction: str,
    *,
    weight: Tensor | None,
    target_b: Tensor | None,
    lam: float | Tensor | None,
    dim: int,
    normalizer: float | Tensor | None,
    empty: str,
    gradient: str | None,
    inplace: bool,
    validate: bool | None,
    parameter: Tensor | None = None,
    group: Tensor | None = None,
    group_weight: Tensor | None = None,
    ignore_index: int = -2,
) -> Tensor:
    checks.floating("input", x)
    divisor = _common(reduction, normalizer, empty, gradient, inplace, x)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if target.is_floating_point():
        if target.shape != x.shape:
            raise ValueError(f"target must have the shape of input, {tuple(x.shape)}, got {tuple(target.shape)}")
        checks.beside("target", target, x)
        lam_ = _lam(lam, target, target_b, x)
    else:
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim must be at least {-x.ndim} and below {x.ndim} for an input of shape {tuple(x.shape)}, got {dim}")
        rows = [n for d, n in enumerate(x.shape) if d != dim % x.ndim]
        checks.integer("target", target, tuple(rows), x)
        checks.class_range("target", target, x.shape[dim], ignore_index, True, validate)
        if target_b is not None:
            checks.integer("target_b", target_b, tuple(rows), x)
            checks.class_range("target_b", target_b, x.shape[dim], ignore_index, True, validate)
        lam_ = _lam(lam, target, target_b, x)
        if lam_ is not None:
            lam_ = lam_.expand(target.shape)
    for name, t in (("weight", weight), ("pos_weight or alpha", parameter)):
        if t is not None:
            checks.floating_beside(name, t, x)
            checks.broadcasts(name, t, x)
    if (group is None) != (group_weight is None):
        raise ValueError("group and group_weight go together, got only one of them")
    if group is not None and group_weight is not None:
        checks.floating_beside("group_weight", group_weight, x)
        if group_weight.ndim != 1 or not len(group_weight):
            raise ValueError(f"group_weight must hold one weight a group, shape (G,), got {tuple(group_weight.shape)}")
        checks.integer("group", group, group.shape, x)
        checks.broadcasts("group", group, x)
        checks.class_range("group", group, len(group_weight), 0, False, validate)
        group_weight = group_weight.contiguous()
    a = Elementwise(
        loss,
        x,
        target,
        target_b,
        lam_,
        weight,
        group,
        group_weight,
        parameter,
        divisor,
        [1.0 * h for h in hyper],
        1.0 if normalizer is None or divisor is not None else 1.0 / normalizer,
        dim,
        ignore_index,
        reduction if normalizer is None else "sum",
        empty == "zero",
    )
    return elementwise(a, gradient, inplace)


def l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    *,
    target_b: Tensor | None = None,
    lam: float | Tensor | None = None,
    dim: int = -1,
    normalizer: float | Tensor | None = None,
    empty: str = "nan",
    gradient: str | None = None,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Mean absolute error (MAE), as torch.nn.functional.l1_loss.

    L = w |x - y|; the mean divides by Σ w where weights are given. A class-index target stands for its one-hot vector: on softmax
    probabilities that is the noise-robust MAE of Ghosh et al. 2017 (arXiv 1712.09482).

    Args: input and target of a floating dtype, or an integer target with -1 background and -2 ignored; target_b, lam: a mixup pair,
    y = λ [j = target] + (1 - λ) [j = target_b]; dim: the classes' dimension. Others: see the module.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    if weight is not None:
        checks.floating_beside("weight", weight, input)
        checks.broadcasts("weight", weight, input)
        if reduction == "mean" and normalizer is None:
            normalizer = weight.expand(input.shape).sum(dtype=torch.float64 if input.dtype == torch.float64 else torch.float32)
    return _elementwise(
        "l1",
        input,
        target,
        [],
        reduction,
        weight=weight,
        target_b=target_b,
        lam=lam,
        dim=dim,
        normalizer=normalizer,
        empty=empty,
        gradient=gradient,
        inplace=inplace,
        validate=validate,
    )


def binary_cross_entropy_with_logits(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    weight: Tensor | None = None,  # broadcasts to input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,  # broadcasts to input
    *,
    target_b: Tensor | None = None,
    lam: float | Tensor | None = None,
    dim: int = -1,
    normalizer: float | Tensor | None = None,
    empty: str = "nan",
    gradient: str | None = None,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Binary cross entropy on logits, as torch.nn.functional.binary_cross_entropy_with_logits.

    L = w [c y softplus(-x) + (1 - y) softplus(x)] with c = pos_weight. Exact at any logit.

    Args: target in [0, 1], or class indices (one against all: the row's class 1, the others 0; -1 background, -2 ignored), with
    target_b and lam a mixup pair; dim: the classes' dimension. Others: see the module.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    return _elementwise(
        "bce_with_logits",
        input,
        target,
        [] if pos_weight is not None else [1.0],
        checks.legacy_reduction(size_average, reduce, reduction),
        weight=weight,
        target_b=target_b,
        lam=lam,
        dim=dim,
        normalizer=normalizer,
        empty=empty,
        gradient=gradient,
        inplace=inplace,
        validate=validate,
        parameter=pos_weight,
    )


def preference_bce_with_logits(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: str = "mean",
    target_b: Tensor | None = None,
    lam: float | Tensor | None = None,
    dim: int = -1,
    normalizer: float | Tensor | None = None,
    empty: str = "nan",
    gradient: str | None = None,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Preference-weighted binary cross entropy on logits.

    L = v g [y softplus(-x) + (1 - y) softplus(x)], v the element's preference weight, g = group_weight[group] the weight of its group,
    so that outcomes of different groups can be weighted for fairness. The mean is over all N elements: gradient v g (σ(x) - y) / N.

    Args: preference: one weight an element, or whatever broadcasts, such as (N, 1) for one a sample; group: a group id each, with
    group_weight (G,). Target and others: as in binary_cross_entropy_with_logits.
    Raises: TypeError, ValueError naming the argument; IndexError for an index or group out of range.
    """
    return _elementwise(
        "bce_with_logits",
        input,
        target,
        [1.0],
        reduction,
        weight=preference,
        group=group,
        group_weight=group_weight,
        target_b=target_b,
        lam=lam,
        dim=dim,
        normalizer=normalizer,
        empty=empty,
        gradient=gradient,
        inplace=inplace,
        validate=validate,
    )


def preference_bce(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: str = "mean",
    target_b: Tensor | None = None,
    lam: float | Tensor | None = None,
    dim: int = -1,
    normalizer: float | Tensor | None = None,
    empty: str = "nan",
    gradient: str | None = None,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Preference-weighted binary cross entropy on probabilities. Prefer the one on logits: it is exact at every confidence.

    L = -v g [y ln p + (1 - y) ln(1 - p)], logarithms kept above -100 as in torch.nn.functional.binary_cross_entropy; the gradient
    v g [(1 - y) / (1 - p) - y / p] / N is exact down to p or 1 - p = 1e-12 (float16: 2⁻¹⁶) and finite at 0 and 1.

    Args: input in [0, 1]; outside, loss and gradient are nan. Others: as in preference_bce_with_logits.
    Raises: TypeError, ValueError naming the argument; IndexError for an index or group out of range.
    """
    floor = 2.0**-16 if isinstance(input, Tensor) and input.dtype == torch.float16 else 1e-12
    return _elementwise(
        "bce",
        input,
        target,
        [floor],
        reduction,
        weight=preference,
        group=group,
        group_weight=group_weight,
        target_b=target_b,
        lam=lam,
        dim=dim,
        normalizer=normalizer,
        empty=empty,
        gradient=gradient,
        inplace=inplace,
        validate=validate,
    )


def sigmoid_focal_loss(
    inputs: Tensor,  # any shape
    targets: Tensor,  # as inputs, or class indices: as inputs without dim
    alpha: float | Tensor = 0.25,
    gamma: float = 2.0,
    reduction: str = "none",
    *,
    weight: Tensor | None = None,  # broadcasts to inputs
    target_b: Tensor | None = None,
    lam: float | Tensor | None = None,
    dim: int = -1,
    normalizer: float | Tensor | None = None,
    empty: str = "nan",
    gradient: str | None = None,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Sigmoid focal loss, as torchvision.ops.sigmoid_focal_loss (Lin et al. 2017, arXiv 1708.02002).

    L = α_t (1 - p_t)^γ BCE(x, y), p_t = p y + (1 - p)(1 - y), α_t = α y + (1 - α)(1 - y), or 1 where α is negative.

    Args: targets in [0, 1], or class indices (the row's class 1, the others 0; -1 background, -2 ignored), so that a detector builds no
    one-hot tensor, with target_b and lam a mixup pair; dim: the classes' dimension; alpha: a number, or one a class (broadcasts to
    inputs, so of shape (C,) where the classes come last); gamma: at least 0; normalizer: such as the number of positives.
    Others: see the module. For γ < 1 and saturated logits the gradient takes its limit (torchvision: nan).
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    checks.number("gamma", gamma, 0.0)
    if not isinstance(alpha, Tensor):
        checks.number("alpha", alpha, high=1.0)
    per_class = alpha if isinstance(alpha, Tensor) else None
    return _elementwise(
        "focal",
        inputs,
        targets,
        [gamma] if per_class is not None else [gamma, alpha],
        reduction,
        weight=weight,
        target_b=target_b,
        lam=lam,
        dim=dim,
        normalizer=normalizer,
        empty=empty,
        gradient=gradient,
        inplace=inplace,
        validate=validate,
        parameter=per_class,
    )


def cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as input
    weight: Tensor | None = None,  # (C,)
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    target_b: Tensor | None = None,
    lam: float | Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    empty: str = "nan",
    gradient: str | None = None,
    inplace: bool = False,
    validate: bool | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy, as torch.nn.functional.cross_entropy.

    L = Σⱼ wⱼ qⱼ (lse(x) - xⱼ) + z_loss · lse(x)², lse(x) = ln Σ exp xⱼ, qⱼ = (1 - ε) yⱼ + ε / C with ε = label_smoothing. The mean divides
    by the weights of the classes of the rows not ignored, with probabilities by the number of rows.

    Args: target: indices of any integer dtype, or probabilities; target_b and lam: a mixup pair of indices, y = λ [j = target] +
    (1 - λ) [j = target_b], λ a number, one a sample or one a row; scale, softcap: the logits become cap · tanh(scale · x / cap);
    z_loss: its coefficient (PaLM, arXiv 2204.02311). Others: see the module.
    Returns: the loss, a scalar or (N, d…); with any return_…, CrossEntropyOutput: z_loss (reduced as the loss, which holds it),
    lse and entropy of softmax(x) per row, all three differentiable, and correct: whether the first of the largest logits is the target.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    checks.floating("input", input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-d tensor")
    divisor = _common(reduction, normalizer, empty, gradient, inplace, input)
    checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    checks.number("scale", scale)
    checks.number("z_loss", z_loss, 0.0)
    if softcap is not None:
        checks.number("softcap", softcap, 0.0, exclusive=True)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    class_dim = 0 if input.ndim == 1 else 1
    classes = input.shape[class_dim]
    per_row = [n for d, n in enumerate(input.shape) if d != class_dim]
    if target.is_floating_point():
        if target.shape != input.shape:
            raise ValueError(
                f"target must have the shape of input, {tuple(input.shape)}, where it holds probabilities, got {tuple(target.shape)}"
            )
        checks.beside("target", target, input)
        if return_correct:
            raise ValueError("return_correct needs class indices as target, got probabilities")
    else:
        for name, t in (("target", target), ("target_b", target_b)):
            if t is not None:
                checks.integer(name, t, tuple(per_row), input)
                checks.class_range(name, t, classes, ignore_index, False, validate)
    lam_ = _lam(lam, target, target_b, input)
    if weight is not None:
        checks.floating_beside("weight", weight, input)
        if weight.shape != (classes,):
            raise ValueError(f"weight must hold one weight a class, shape ({classes},), got {tuple(weight.shape)}")
        weight = weight.contiguous()
    one = input.ndim == 1
    a = Rowwise(
        "cross_entropy",
        input.unsqueeze(0) if one else input,
        target.unsqueeze(0) if one else target,
        target_b.unsqueeze(0) if one and target_b is not None else target_b,
        lam_,
        weight,
        divisor,
        [],
        ignore_index,
        1.0 * label_smoothing,
        1.0 * scale,
        softcap,
        1.0 * z_loss,
        1.0 if normalizer is None or divisor is not None else 1.0 / normalizer,
        reduction if normalizer is None else "sum",
        empty == "zero",
        [return_z_loss, return_lse, return_entropy, return_correct],
    )
    results = rowwise(a, gradient, inplace)
    if one:
        results = [t if t is None or t.ndim == 0 else t.squeeze(0) for t in results]
    return CrossEntropyOutput(*results) if any(a.outputs) else results[0]
