"""What the losses of rows of classes share: the checks of their arguments, and the call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lossforge.kernels.call import RowCall
from lossforge.losses import checks
from lossforge.losses.dispatch import compute
from lossforge.losses.functional.common import Options, Settings, check_options, factor, share
from lossforge.losses.reference import row_weight


class RowSettings(Settings, total=False):
    """scale, softcap: the logits become cap · tanh(scale · x / cap); z_loss: the coefficient of lse², which is added to each row; a
    mean of it is over the rows that count, whatever their class weights (without these, a mixup pair with one ignored index counts by the
    share of the other)."""

    scale: float
    softcap: float | None
    z_loss: float


class RowOptions(Options, RowSettings, total=False):
    pass


def rowwise_loss(
    loss: str,
    x: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as x
    hyper: list[float],
    reduction: str,
    options: RowOptions,
    *,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    bias: Tensor | None = None,  # (C,)
    tau: float = 1.0,
    spread: float = 0.0,
    focus: float = 0.0,
    outputs: Sequence[bool] = (False,) * 4,
    probabilities: bool = True,
    mean_of_rows: bool = False,
    factor_of: float = 1.0,
    target_name: str = "target",
) -> Sequence[Tensor | None]:
    """Check arguments and compute (loss, z_loss, lse, entropy, correct), None where `outputs` has not asked for it.

    probabilities: whether the loss takes them as targets. mean_of_rows: a mean divides by the number of rows not ignored,
    whatever their weights. factor_of: a number that multiplies the loss. target_name: in messages.
    """
    checks.floating("input", x)
    if x.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-d tensor")
    divisor = check_options(x, reduction, options, RowOptions)
    normalizer, target_b = options.get("normalizer"), options.get("target_b")
    scale, softcap, z_loss = options.get("scale", 1.0), options.get("softcap"), options.get("z_loss", 0.0)
    ignore_index = checks.whole_number("ignore_index", ignore_index)
    label_smoothing = checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    scale = checks.number("scale", scale)
    z_loss = checks.number("z_loss", z_loss, 0.0)
    if softcap is not None:
        softcap = checks.number("softcap", softcap, 0.0, exclusive=True)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    class_dim = 0 if x.ndim == 1 else 1
    classes = x.shape[class_dim]
    per_row = [n for d, n in enumerate(x.shape) if d != class_dim]
    if target.is_floating_point():
        if target.shape != x.shape:
            raise ValueError(
                f"target must have the shape of input, {tuple(x.shape)}, where it holds probabilities, got {tuple(target.shape)}"
            )
        checks.beside("target", target, x)
        if not probabilities:
            raise TypeError(f"target must hold class indices, with target_b and lam for a mixture of two, got {target.dtype}")
        if outputs[3]:
            raise ValueError("return_correct needs class indices as target, got probabilities")
    else:
        target = checks.indices(target_name, target, per_row, x, 0, classes, ignore_index, options.get("validate"))
        if target_b is not None:
            target_b = checks.indices("target_b", target_b, per_row, x, 0, classes, ignore_index, options.get("validate"))
    weight, bias = per_class("weight", weight, x, classes), per_class("log_prior", bias, x, classes)
    lam = share(options.get("lam"), target, target_b, x)
    by_weight = reduction == "mean" and normalizer is None and not mean_of_rows and not target.is_floating_point()
    if weight is not None and by_weight and checks.nonzero(z_loss):
        weight = _average_one(weight, target, target_b, lam, ignore_index, options.get("empty") == "zero")
        mean_of_rows = True  # of z_loss; and thereby of the rest, by such weights
    one = x.ndim == 1
    call = RowCall(
        loss=loss,
        x=x.unsqueeze(0) if one else x,
        target=target.unsqueeze(0) if one else target,
        target_b=target_b.unsqueeze(0) if one and target_b is not None else target_b,
        lam=lam,
        weight=weight,
        bias=bias,
        normalizer=divisor,
        hyper=[1.0 * h for h in hyper],
        ignore_index=ignore_index,
        label_smoothing=1.0 * label_smoothing,
        logit_scale=1.0 * scale,
        softcap=softcap,
        tau=1.0 * tau,
        spread=1.0 * spread,
        focus=1.0 * focus,
        z_loss=1.0 * z_loss,
        loss_scale=factor_of * factor(options),
        reduction=reduction if normalizer is None else "sum",
        empty_is_zero=options.get("empty") == "zero",
        mean_of_rows=mean_of_rows,
        outputs=list(outputs),
    )
    results = compute(call, options.get("gradient"), options.get("inplace", False))
    return [t if t is None or t.ndim == 0 else t.squeeze(0) for t in results] if one else results


def _average_one(
    weight: Tensor, target: Tensor, target_b: Tensor | None, lam: Tensor | None, ignore_index: int, empty_is_zero: bool
) -> Tensor:
    """The class weights, scaled so that the rows that count have an average weight of 1."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    keep, w = target != ignore_index, row_weight(target, weight, ignore_index)
    if target_b is not None and lam is not None:
        keep = keep | (target_b != ignore_index)
        w = lam * w + (1 - lam) * row_weight(target_b, weight, ignore_index)
    total, rows = w.sum(), keep.sum()
    return weight * torch.where(total == 0, 0.0 if empty_is_zero else torch.nan, rows / total)


def total(results: Sequence[Tensor | None]) -> Tensor:
    """The loss of `rowwise_loss` alone."""
    loss = results[0]
    assert loss is not None
    return loss


def per_class(name: str, t: Tensor | None, x: Tensor, classes: int) -> Tensor | None:
    if t is None:
        return None
    checks.floating_beside(name, t, x)
    if t.shape != (classes,):
        raise ValueError(f"{name} must hold one {name} a class, shape ({classes},), got {tuple(t.shape)}")
    return t.contiguous()
