"""Element-wise losses."""

from typing import Unpack

import torch
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.dispatch import elementwise
from lossforge.losses.functional.common import ElementwiseOptions, check_options, factor, share
from lossforge.losses.operators.elementwise import Elementwise

IGNORED = -2
"""The class index of a row that does not count; -1 is background."""


def _elementwise(
    loss: str,
    x: Tensor,
    target: Tensor,
    hyper: list[float],
    reduction: str,
    options: ElementwiseOptions,
    *,
    weight: Tensor | None = None,
    parameter: Tensor | None = None,
    group: Tensor | None = None,
    group_weight: Tensor | None = None,
    mean_of_weights: bool = False,
) -> Tensor:
    """Check arguments and compute. parameter: a tensor in place of the last hyper-parameter.

    mean_of_weights: a mean divides by the sum of the weights that count, where weights are given.
    """
    checks.floating("input", x)
    divisor = check_options(x, reduction, options, ElementwiseOptions)
    normalizer, dim, target_b = options.get("normalizer"), options.get("dim", -1), options.get("target_b")
    checks.whole_number("dim", dim)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if target.is_floating_point():
        if target.shape != x.shape:
            raise ValueError(f"target must have the shape of input, {tuple(x.shape)}, got {tuple(target.shape)}")
        checks.beside("target", target, x)
    else:
        checks.integer("target", target)
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim must be at least {-x.ndim} and below {x.ndim} for an input of shape {tuple(x.shape)}, got {dim}")
        rows = [n for d, n in enumerate(x.shape) if d != dim % x.ndim]
        target = checks.indices("target", target, rows, x, -1, x.shape[dim], IGNORED, options.get("validate"))
        if target_b is not None:
            target_b = checks.indices("target_b", target_b, rows, x, -1, x.shape[dim], IGNORED, options.get("validate"))
    for name, t in (("weight", weight), ("pos_weight or alpha", parameter)):
        if t is not None:
            checks.floating_beside(name, t, x)
            checks.broadcasts(name, t, x)
    if (group is None) != (group_weight is None):
        raise ValueError(f"group and group_weight go together, got only {'group' if group_weight is None else 'group_weight'}")
    if group is not None and group_weight is not None:
        checks.floating_beside("group_weight", group_weight, x)
        if group_weight.ndim != 1 or not len(group_weight):
            raise ValueError(f"group_weight must hold one weight a group, shape (G,), got {tuple(group_weight.shape)}")
        group = checks.indices("group", group, None, x, 0, len(group_weight), None, options.get("validate"))
        checks.broadcasts("group", group, x)
        group_weight = group_weight.contiguous()
    if mean_of_weights and weight is not None and reduction == "mean" and normalizer is None:
        counted = weight.expand(x.shape)
        if not target.is_floating_point():
            counts = target != IGNORED if target_b is None else (target != IGNORED) | (target_b != IGNORED)
            counted = torch.where(counts.unsqueeze(dim % x.ndim), counted, 0.0)
        divisor = normalizer = counted.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    a = Elementwise(
        loss,
        x,
        target,
        target_b,
        share(options.get("lam"), target, target_b, x),
        weight,
        group,
        group_weight,
        parameter,
        divisor,
        [1.0 * h for h in hyper],
        factor(options),
        dim,
        IGNORED,
        reduction if normalizer is None else "sum",
        options.get("empty") == "zero",
    )
    return elementwise(a, options.get("gradient"), options.get("inplace", False))


def l1_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Mean absolute error (MAE), as torch.nn.functional.l1_loss.

    L = w |x - y|; the mean divides by Σ w where weights are given. A class-index target stands for its one-hot vector: on softmax
    probabilities that is the noise-robust MAE of Ghosh et al. 2017 (arXiv 1712.09482).

    Args: input and target of a floating dtype, or an integer target with -1 background and -2 ignored; target_b, lam: a mixup pair,
    y = λ [j = target] + (1 - λ) [j = target_b]; dim: the classes' dimension. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    return _elementwise(
        "l1",
        input,
        target,
        [],
        reduction,
        options,
        weight=weight,
        mean_of_weights=True,
    )


def binary_cross_entropy_with_logits(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    weight: Tensor | None = None,  # broadcasts to input
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Binary cross entropy on logits, as torch.nn.functional.binary_cross_entropy_with_logits.

    L = w [c y softplus(-x) + (1 - y) softplus(x)] with c = pos_weight. Exact at any logit.

    Args: target in [0, 1], or class indices (one against all: the row's class 1, the others 0; -1 background, -2 ignored), with
    target_b and lam a mixup pair; dim: the classes' dimension. Others: see lossforge.losses.functional.
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    """
    return _elementwise(
        "bce_with_logits",
        input,
        target,
        [] if pos_weight is not None else [1.0],
        checks.legacy_reduction(size_average, reduce, reduction),
        options,
        weight=weight,
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
    return _elementwise(
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


def preference_bce(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    preference: Tensor | None = None,  # broadcasts to input
    *,
    group: Tensor | None = None,  # integer, broadcasts to input
    group_weight: Tensor | None = None,  # (G,)
    reduction: str = "mean",
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Preference-weighted binary cross entropy on probabilities. Prefer the one on logits: it is exact at every confidence.

    L = -v g [y ln p + (1 - y) ln(1 - p)], logarithms kept above -100 as in torch.nn.functional.binary_cross_entropy; the gradient
    v g [(1 - y) / (1 - p) - y / p] / N is exact down to p or 1 - p = 1e-12 (float16: 2⁻¹⁵) and finite at 0 and 1.

    Args: input in [0, 1]; outside, loss and gradient are nan. Others: as in preference_bce_with_logits.
    Raises: TypeError, ValueError naming the argument; IndexError for an index or group out of range.
    """
    floor = 2.0**-15 if isinstance(input, Tensor) and input.dtype == torch.float16 else 1e-12
    return _elementwise(
        "bce",
        input,
        target,
        [floor],
        reduction,
        options,
        weight=preference,
        group=group,
        group_weight=group_weight,
    )


def sigmoid_focal_loss(
    inputs: Tensor,  # any shape
    targets: Tensor,  # as inputs, or class indices: as inputs without dim
    alpha: float | Tensor = 0.25,
    gamma: float = 2.0,
    reduction: str = "none",
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
    checks.number("gamma", gamma, 0.0)
    if not isinstance(alpha, Tensor):
        checks.number("alpha", alpha, high=1.0)
    per_class = alpha if isinstance(alpha, Tensor) else None
    return _elementwise(
        "focal",
        inputs,
        targets,
        [gamma] if isinstance(alpha, Tensor) else [gamma, alpha],
        reduction,
        options,
        weight=weight,
        parameter=per_class,
    )
