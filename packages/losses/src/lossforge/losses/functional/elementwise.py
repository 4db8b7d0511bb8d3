"""What the element-wise losses share: the checks of their arguments, and the call."""

import math

import torch
from torch import Tensor

from lossforge.kernels.call import ROW_MEAN, ElementCall
from lossforge.losses import checks
from lossforge.losses.dispatch import value
from lossforge.losses.functional.common import ElementwiseOptions, check_options, factor, row_score, share

IGNORED = -2
"""The class index of a row that does not count; -1 is background."""
BATCH_REDUCTIONS = (*checks.REDUCTIONS, "batchmean")


def of_dim(dim: int, x: Tensor) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be at least {-x.ndim} and below {x.ndim} for an input of shape {tuple(x.shape)}, got {dim}")


def with_parameter(
    hyper: list[float], name: str, value: float | Tensor, x: object, high: float = math.inf
) -> tuple[list[float], Tensor | None]:
    """The hyper-parameters with `value` as the last, or a tensor that takes the last one's place."""
    if checks.is_parameter(value, x):
        return hyper, value
    return [*hyper, checks.number(name, value, high=high)], None


def dense(target: Tensor, x: Tensor) -> Tensor:
    """A target of the input's shape in a floating dtype, one that holds class indices as it is."""
    if target.is_floating_point() or target.is_complex() or target.shape != x.shape:
        return target
    return target.to(x.dtype if target.dtype == torch.bool else torch.promote_types(x.dtype, torch.float32))


def per_sample(reduction: str, input: Tensor, options: ElementwiseOptions) -> str:
    """The reduction, with "batchmean" as a sum whose normalizer, unless one is given, is the number of samples."""
    checks.one_of("reduction", reduction, BATCH_REDUCTIONS)
    if reduction != "batchmean":
        return reduction
    if options.get("normalizer") is None and isinstance(input, Tensor):
        options["normalizer"] = input.shape[0] if input.ndim else 1
    return "sum"


def elementwise_loss(
    loss: str,
    x: Tensor,
    target: Tensor | None,
    hyper: list[float],
    reduction: str,
    options: ElementwiseOptions,
    *,
    weight: Tensor | None = None,
    parameter: Tensor | None = None,
    group: Tensor | None = None,
    group_weight: Tensor | None = None,
    offset: int | None = None,
    mean_of_weights: bool = False,
    mean_of_rows: bool = False,
) -> Tensor:
    """Check arguments and compute. parameter: a tensor in place of the last hyper-parameter.

    offset: a target of None is the diagonal, this many columns to the right.
    mean_of_weights: a mean divides by the sum of the weights that count, where weights are given; mean_of_rows: by the number of rows.
    """
    checks.floating("input", x)
    if isinstance(target, Tensor):
        target = dense(target, x)
    divisor = check_options(x, reduction, options, ElementwiseOptions)
    normalizer, dim, target_b = options.get("normalizer"), options.get("dim", -1), options.get("target_b")
    lam, score = options.get("lam"), options.get("score")
    dim = checks.whole_number("dim", dim)
    if target is None and offset is not None:
        if x.ndim != 2:
            raise ValueError(f"input must be a matrix where target is None, got shape {tuple(x.shape)}")
        if given := [name for name, t in (("target_b", target_b), ("lam", lam), ("score", score)) if t is not None]:
            raise TypeError(f"target must hold class indices where {given[0]} is given, got None")
        of_dim(dim, x)
    elif not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    elif target.is_floating_point():
        if target.shape != x.shape:
            raise ValueError(f"target must have the shape of input, {tuple(x.shape)}, got {tuple(target.shape)}")
        checks.beside("target", target, x)
        if mean_of_rows and x.ndim:
            of_dim(dim, x)
    else:
        checks.integer("target", target)
        of_dim(dim, x)
        rows = [n for d, n in enumerate(x.shape) if d != dim % x.ndim]
        if target.shape != torch.Size(rows):
            raise ValueError(
                f"target must have shape {tuple(rows)}, got {tuple(target.shape)}: an integer target holds class indices along "
                f"dim {dim}, or has the shape of input, {tuple(x.shape)}"
            )
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
        if target is not None and not target.is_floating_point():
            counts = target != IGNORED if target_b is None else (target != IGNORED) | (target_b != IGNORED)
            counted = torch.where(counts.unsqueeze(dim % x.ndim), counted, 0.0)
        divisor = normalizer = counted.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    of_row = None
    if target is not None:
        of_row = share(lam, target, target_b, x) if score is None else row_score(score, target, target_b, x)
    if normalizer is not None:
        reduction = "sum"
    elif reduction == "mean" and mean_of_rows:
        reduction = ROW_MEAN
    call = ElementCall(
        loss=loss,
        x=x,
        target=target,
        target_b=target_b,
        lam=of_row,
        weight=weight,
        group=group,
        group_weight=group_weight,
        parameter=parameter,
        normalizer=divisor,
        hyper=[1.0 * h for h in hyper],
        loss_scale=factor(options),
        dim=dim,
        ignore_index=IGNORED,
        offset=offset or 0,
        reduction=reduction,
        empty_is_zero=options.get("empty") == "zero",
    )
    return value(call, options.get("gradient"), options.get("inplace", False))
