"""What the element-wise losses share: the checks of their arguments, and the call."""

import math
from typing import Literal

import torch
from torch import Tensor

from lossforge.kernels.call import ROW_MEAN, ElementCall
from lossforge.losses import checks
from lossforge.losses.autograd import value
from lossforge.losses.templates.options import (
    ElementwiseOptions,
    check_options,
    row_score,
    rows_of,
    share,
    with_options,
)

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
    call: ElementCall, options: ElementwiseOptions, mean: Literal["elements", "weights", "rows"] = "elements", diagonal: bool = False
) -> Tensor:
    """Check arguments and compute. call: with the function's arguments as they are.

    mean: what a mean divides by: the elements not ignored, the weights that count, where weights are given, or the rows not ignored.
    diagonal: a target of None is the diagonal, `call.offset` columns to the right.
    """
    x = call.x
    checks.whole("input", x)
    if isinstance(call.target, Tensor):
        call = call._replace(target=dense(call.target, x))
    divisor = check_options(x, call.reduction, options, ElementwiseOptions)
    call = call._replace(dim=checks.whole_number("dim", options.get("dim", -1)), ignore_index=IGNORED, target_b=options.get("target_b"))
    call = _with_target(call, options, mean, diagonal)
    for name, t in (("weight", call.weight), ("pos_weight or alpha", call.parameter)):
        if t is not None:
            checks.floating_beside(name, t, x)
            checks.broadcasts(name, t, x)
    call = _with_groups(call, options.get("validate"))
    reduces = call.reduction == "mean" and options.get("normalizer") is None
    if mean == "weights" and call.weight is not None and reduces:
        options["normalizer"] = divisor = _counted_weights(call)
    if call.target is not None:
        lam, score = options.get("lam"), options.get("score")
        of_row = share(lam, call.target, call.target_b, x) if score is None else row_score(score, call.target, call.target_b, x)
        call = call._replace(lam=of_row)
    if mean == "rows" and reduces:
        call = call._replace(reduction=ROW_MEAN)
    call = call._replace(hyper=[1.0 * h for h in call.hyper])
    return value(with_options(call, options, divisor), options)


def _with_target(call: ElementCall, options: ElementwiseOptions, mean: str, diagonal: bool) -> ElementCall:
    x, target, dim = call.x, call.target, call.dim
    if target is None and diagonal:
        if x.ndim != 2:
            raise ValueError(f"input must be a matrix where target is None, got shape {tuple(x.shape)}")
        given = {"target_b": call.target_b, "lam": options.get("lam"), "score": options.get("score")}
        if names := [name for name, t in given.items() if t is not None]:
            raise TypeError(f"target must hold class indices where {names[0]} is given, got None")
        of_dim(dim, x)
        return call
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if target.is_floating_point():
        checks.dense(target, x, rows_of(x, dim) if x.ndim else ())
        checks.beside("target", target, x)
        if mean == "rows" and x.ndim:
            of_dim(dim, x)
        return call
    checks.integer("target", target)
    of_dim(dim, x)
    rows = rows_of(x, dim)
    if target.shape != rows:
        raise ValueError(
            f"target must have shape {rows}, got {tuple(target.shape)}: an integer target holds class indices along "
            f"dim {dim}, or has the shape of input, {tuple(x.shape)}"
        )
    allowed = checks.Allowed(-1, x.shape[dim], IGNORED, options.get("validate"))
    pair = [
        None if t is None else checks.indices(name, t, x, allowed, rows) for name, t in (("target", target), ("target_b", call.target_b))
    ]
    return call._replace(target=pair[0], target_b=pair[1])


def _with_groups(call: ElementCall, validate: bool | None) -> ElementCall:
    group, weights = call.group, call.group_weight
    if (group is None) != (weights is None):
        raise ValueError(f"group and group_weight go together, got only {'group' if weights is None else 'group_weight'}")
    if group is None or weights is None:
        return call
    checks.floating_beside("group_weight", weights, call.x)
    if weights.ndim != 1 or not len(weights):
        raise ValueError(f"group_weight must hold one weight a group, shape (G,), got {tuple(weights.shape)}")
    group = checks.indices("group", group, call.x, checks.Allowed(0, len(weights), None, validate))
    checks.broadcasts("group", group, call.x)
    return call._replace(group=group, group_weight=weights.contiguous())


def _counted_weights(call: ElementCall) -> Tensor:
    """Return the sum of the weights of the elements not ignored."""
    assert call.weight is not None
    counted, x = call.weight.expand(call.x.shape), call.x
    if call.target is not None and not call.target.is_floating_point():
        counts = call.target != IGNORED
        if call.target_b is not None:
            counts = counts | (call.target_b != IGNORED)
        counted = torch.where(counts.unsqueeze(call.dim % x.ndim), counted, 0.0)
    return counted.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
