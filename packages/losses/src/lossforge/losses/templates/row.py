"""What the losses of rows of classes share: the checks of their arguments, and the call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lossforge.kernels.call import RowCall
from lossforge.losses import checks
from lossforge.losses.autograd import compute
from lossforge.losses.reference import row_weights, which_count
from lossforge.losses.templates.options import (
    Options,
    check_options,
    of_classes,
    rows_of,
    share,
    weights_of_classes,
    with_options,
)


class RowOptions(Options, total=False):
    """scale, softcap: the logits become cap · tanh(scale · x / cap); z_loss: the coefficient of lse², which is added to each row; a
    mean of it is over the rows that count, whatever their class weights (without these, a mixup pair with one ignored index counts by the
    share of the other)."""

    scale: float
    softcap: float | None
    z_loss: float


class ClassOptions(RowOptions, total=False):
    """weight: (C,), one a class. ignore_index: rows with this index have loss and gradient 0."""

    weight: Tensor | None
    ignore_index: int


def rowwise_results(
    call: RowCall, options: RowOptions, probabilities: bool = False, target_name: str = "target"
) -> Sequence[Tensor | None]:
    """Check arguments and compute (loss, z_loss, lse, entropy, correct), None where `call.outputs` has not asked for it.

    call: with the function's arguments as they are, x (C,), (N, C) or (N, C, d…); mean_of_rows: a mean divides by the number of rows not
    ignored, whatever their weights. probabilities: whether the loss takes them as targets. target_name: in messages.
    """
    x, target = call.x, call.target
    dim = of_classes(x)
    divisor = check_options(x, call.reduction, options, RowOptions)
    normalizer, target_b = options.get("normalizer"), options.get("target_b")
    softcap, classes, rows = options.get("softcap"), x.shape[dim], rows_of(x, dim)
    call = call._replace(
        hyper=[1.0 * h for h in call.hyper],
        ignore_index=checks.whole_number("ignore_index", call.ignore_index),
        label_smoothing=checks.number("label_smoothing", call.label_smoothing, 0.0, 1.0),
        logit_scale=checks.number("scale", options.get("scale", 1.0)),
        z_loss=checks.number("z_loss", options.get("z_loss", 0.0), 0.0),
        softcap=None if softcap is None else checks.number("softcap", softcap, 0.0, exclusive=True),
        **{name: 1.0 * getattr(call, name) for name in ("tau", "spread", "focus")},
    )
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if target.is_floating_point():
        checks.dense(target, x, rows, ", where it holds probabilities")
        checks.beside("target", target, x)
        if not probabilities:
            raise TypeError(f"target must hold class indices, with target_b and lam for a mixture of two, got {target.dtype}")
        if call.outputs[3]:
            raise ValueError("return_correct needs class indices as target, got probabilities")
    else:
        allowed = checks.Allowed(0, classes, call.ignore_index, options.get("validate"))
        target = checks.indices(target_name, target, x, allowed, rows)
        if target_b is not None:
            target_b = checks.indices("target_b", target_b, x, allowed, rows)
    call = call._replace(
        target=target,
        target_b=target_b,
        lam=share(options.get("lam"), target, target_b, x),
        weight=weights_of_classes("weight", call.weight, x, classes),
        bias=weights_of_classes("log_prior", call.bias, x, classes),
    )
    by_weight = call.reduction == "mean" and normalizer is None and not call.mean_of_rows and not target.is_floating_point()
    if call.weight is not None and by_weight and checks.nonzero(call.z_loss):
        # the mean of z_loss is over rows; and thereby of the rest, by such weights
        call = call._replace(weight=_average_one(call, options.get("empty") == "zero"), mean_of_rows=True)
    if x.ndim == 1:
        call = call._replace(
            x=x.unsqueeze(0), target=target.unsqueeze(0), target_b=None if call.target_b is None else call.target_b.unsqueeze(0)
        )
    results = compute(with_options(call, options, divisor), options)
    return [t if t is None or t.ndim == 0 else t.squeeze(0) for t in results] if x.ndim == 1 else results


def rowwise_loss(call: RowCall, options: RowOptions, probabilities: bool = False) -> Tensor:
    """Return the loss alone."""
    loss = rowwise_results(call, options, probabilities)[0]
    assert loss is not None
    return loss


def class_loss(formula: str, input: Tensor, target: Tensor, hyper: list[float], reduction: str, options: ClassOptions) -> Tensor:
    """Compute a loss of the probability of a row's class, whose mean divides by the weights of the classes."""
    call = RowCall(formula, input, target, hyper=hyper, weight=options.get("weight"), reduction=reduction)
    of_call = ("weight", "ignore_index")
    rest: RowOptions = {k: v for k, v in options.items() if k not in of_call}  # type: ignore[assignment]  # keys are no literals
    return rowwise_loss(call._replace(ignore_index=options.get("ignore_index", -100)), rest)


def _average_one(call: RowCall, empty_is_zero: bool) -> Tensor:
    """The class weights, scaled so that the rows that count have an average weight of 1."""
    assert call.weight is not None
    weight = call.weight if call.weight.dtype == torch.float64 else call.weight.float()
    total, rows = row_weights(call, weight).sum(), which_count(call).sum()
    return weight * torch.where(total == 0, 0.0 if empty_is_zero else torch.nan, rows / total)
