"""What the losses of rows of classes share: the checks of their arguments, and the call."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.checks import nonzero
from lossforge.losses.base.options import Options, check_options, checked_call, of_classes, rows_of, share, weights_of_classes
from lossforge.losses.base.record import (
    SCALAR,
    SETTINGS,
    CheckedCall,
    Fusing,
    Keeping,
    Make,
    R,
    Sample,
    Template,
    TemplateDocs,
)
from lossforge.losses.formulas import FORMULAS, has_kernel
from lossforge.losses.templates.plain_forms import accurate, focused, reduced, row_weight, row_weights, weighted, which_count, with_weight
from lossforge.losses.templates.plain_forms.infinite import with_call
from lossforge.losses.templates.plain_forms.margin import with_margin

BY_PROBABILITY = "cross_entropy_by_probability"
"""The formula of cross entropy weighed by the probability of each row's class, which has no gradient."""

LARGEST = 20
"""The most classes whose equal probabilities have an entropy of weight 1."""


def entropy_weight(classes: int) -> float:
    """Return what a row's entropy is multiplied by as the row's weight."""
    return 1.0 / math.log(max(min(classes, LARGEST), 2))


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


class OwnOptions(ClassOptions, total=False):
    """class_bias: (C,), added to the logits after scale; class_margin: (C,), subtracted from the target's logit before."""

    class_bias: Tensor | None
    class_margin: Tensor | None


def rowwise_results(
    call: RowwiseCall,
    options: RowOptions,
    probabilities: bool = False,
    target_name: str = "target",
) -> CheckedCall[RowwiseCall, Any]:
    """Check arguments of a loss, whose further results `call.outputs` asks for.

    call: with the function's arguments as they are, x (C,), (N, C) or (N, C, d…); mean_of_rows: a mean divides by the number of rows not
    ignored, whatever their weights. probabilities: whether the loss takes them as targets. target_name: in messages.
    """
    x, target = call.x, call.target
    dim = of_classes(x)
    divisor = check_options(x, call.reduction, options, RowOptions)
    normalizer, target_b = options.get("normalizer"), options.get("target_b")
    softcap, classes, rows = options.get("softcap"), x.shape[dim], rows_of(x, dim)
    call = call._replace(
        ignore_index=checks.whole_number("ignore_index", call.ignore_index),
        label_smoothing=checks.number("label_smoothing", call.label_smoothing, 0.0, 1.0),
        logit_scale=checks.number("scale", options.get("scale", 1.0)),
        z_loss=checks.number("z_loss", options.get("z_loss", 0.0), 0.0),
        softcap=None if softcap is None else checks.number("softcap", softcap, 0.0, exclusive=True),
    )
    checks.tensor("target", target)
    if target.is_floating_point():
        checks.dense(target, x, rows, ", where it holds probabilities")
        checks.beside("target", target, x)
        if not probabilities:
            raise TypeError(f"target must hold class indices, with target_b and lam for a mixture of two, got {target.dtype}")
        checks.ignores_none(call.ignore_index)
        if call.outputs[3]:
            raise ValueError('outputs "correct" needs class indices as target, got probabilities')
    else:
        allowed = checks.Allowed(0, classes, call.ignore_index, options.get("validate"))
        target = checks.indices(target_name, target, x, allowed, rows)
        if target_b is not None:
            target_b = checks.indices("target_b", target_b, x, allowed, rows)
    if call.lam is not None or call.entropy_weight or call.loss == BY_PROBABILITY:
        _check_weighted(call, target, options)
    call = call._replace(
        target=target,
        target_b=target_b,
        lam=share(options.get("lam"), target, target_b, x) if call.lam is None else _token_weight(call, x, target),
        weight=weights_of_classes("weight", call.weight, x, classes),
        bias=weights_of_classes("log_prior", call.bias, x, classes),
        margins=weights_of_classes("margin", call.margins, x, classes),
        parameter=weights_of_classes("parameter", call.parameter, x, classes),
    )
    by_weight = call.reduction == "mean" and normalizer is None and not call.mean_of_rows and not target.is_floating_point()
    if call.weight is not None and by_weight and checks.nonzero(call.z_loss):
        # the mean of z_loss is over rows; and thereby of the rest, by such weights
        call = call._replace(weight=_average_one(call, options.get("empty") == "zero"), mean_of_rows=True)
    if x.ndim == 1:
        call = call._replace(
            x=x.unsqueeze(0), target=target.unsqueeze(0), target_b=None if call.target_b is None else call.target_b.unsqueeze(0)
        )
    return checked_call(call, options, divisor, x.ndim == 1)


def _check_weighted(call: RowwiseCall, target: Tensor, options: RowOptions) -> None:
    """Check that a call takes a weight of each row."""
    if target.is_floating_point():
        raise TypeError(f"target must hold class indices where token_weight is given, got {target.dtype}")
    for name in ("target_b", "lam"):
        if options.get(name) is not None:
            raise ValueError(f"token_weight excludes target_b and lam, got {name} too")
    if nonzero(call.label_smoothing):
        raise ValueError(f"token_weight excludes label_smoothing, got label_smoothing={call.label_smoothing}")


def _token_weight(call: RowwiseCall, x: Tensor, target: Tensor) -> Tensor:
    """Return the weights of rows in the shape of their class indices, once they are checked."""
    weight = call.lam
    checks.floating_beside("token_weight", weight, x)
    assert weight is not None
    checks.fits("token_weight", weight, checks.expands(weight, target.shape), "broadcast to the shape of target, {}", target.shape)
    return weight.expand(target.shape)


def rowwise_loss(call: RowwiseCall, options: RowOptions, probabilities: bool = False) -> CheckedCall[RowwiseCall]:
    """Check arguments of a loss that is returned alone."""
    return with_several_classes(rowwise_results(call, options, probabilities=probabilities))


def with_several_classes(checked: CheckedCall[RowwiseCall, R]) -> CheckedCall[RowwiseCall, R]:
    """Return a call of all classes; warn where there is one, for which torch gives 0 without a word."""
    if not torch.compiler.is_compiling() and checked.call.x.shape[1] == 1:
        warnings.warn(
            "input has one class, whose softmax is 1 whatever its logit is: the loss and its gradient are 0. For one logit of two classes "
            "take a loss with a sigmoid, such as binary_cross_entropy_with_logits or sigmoid_focal_loss",
            stacklevel=5,
        )
    return checked


def class_loss(
    formula: str, input: Tensor, target: Tensor, hyper: list[float], reduction: str, options: ClassOptions
) -> CheckedCall[RowwiseCall]:
    """Check a loss of the probability of a row's class, whose mean divides by the weights of the classes."""
    return _with_class_options(RowwiseCall(formula, input, target, hyper=hyper, reduction=reduction), options)


def _with_class_options(call: RowwiseCall, options: ClassOptions) -> CheckedCall[RowwiseCall]:
    of_call = ("weight", "ignore_index")
    rest: RowOptions = {k: v for k, v in options.items() if k not in of_call}  # type: ignore[assignment]  # keys are no literals
    return rowwise_loss(call._replace(weight=options.get("weight"), ignore_index=options.get("ignore_index", -100)), rest)


def own_loss(call: RowwiseCall, hyper: dict[str, Any], power: str | None, options: OwnOptions) -> CheckedCall[RowwiseCall]:
    """Check a loss whose formula a user wrote.

    hyper: numbers by name; the last may be a tensor, one number a class. power: the name of k, where the formula takes Σ p^k.
    """
    dim = of_classes(call.x)

    def of_each(name: str, t: "Tensor | None") -> "Tensor | None":  # torch.compile of torch 2.9 makes no such types
        return weights_of_classes(name, t, call.x, call.x.shape[dim])

    bias, margin = of_each("class_bias", options.pop("class_bias", None)), of_each("class_margin", options.pop("class_margin", None))
    if bias is not None and options.get("softcap") is not None:
        raise ValueError(f"class_bias excludes softcap, got softcap={options['softcap']!r}: give the bias without one")
    if margin is not None and options.get("target_b") is not None:
        raise ValueError("class_margin excludes target_b, because a row has the margin of one class: call once for each target of a pair")
    names, parameter = [*hyper], None
    if names and names[-1] != power and isinstance(hyper[names[-1]], Tensor) and hyper[names[-1]].ndim:
        parameter = of_each(names[-1], hyper.pop(names[-1]))
    numbers = {name: checks.number(name, value, 0.0 if name == power else -math.inf, exclusive=True) for name, value in hyper.items()}
    k = 0.0 if power is None else numbers[power]
    call = call._replace(bias=bias, margins=margin, parameter=parameter, hyper=[*numbers.values()], power=k)
    return _with_class_options(call, options)


def _average_one(call: RowwiseCall, empty_is_zero: bool) -> Tensor:
    """Return the class weights, scaled so that the rows that count have an average weight of 1."""
    assert call.weight is not None
    weight = call.weight if call.weight.dtype == torch.float64 else call.weight.float()
    total, rows = row_weights(call, weight).sum(), which_count(call).sum()
    return weight * torch.where(total == 0, 0.0 if empty_is_zero else torch.nan, rows / total)


def _as_read(a: RowwiseCall, x: Tensor) -> Tensor:
    """Return the logits with margin, scale, soft cap and bias."""
    if nonzero(a.angle) or nonzero(a.margin) or a.margins is not None:
        x = with_margin(x, a.target, a.angle, a.margin, a.margins)
    x = x * a.logit_scale
    if a.softcap is not None:
        x = a.softcap * torch.tanh(x / a.softcap)
    if a.row_scale is not None:
        x = x * a.row_scale.to(x.dtype).unsqueeze(1)
    return x if a.bias is None else x + a.tau * a.bias.to(x.dtype).view(1, -1, *(1,) * (x.ndim - 2))


def _without_lost_rows(a: RowwiseCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits as read, for the loss and for the further results. The loss reads 0 in rows without softmax that do not count.

    A row has no softmax if its largest logit is not finite. Of one that does not count, the loss has gradient 0.
    """
    read = _as_read(a, x)
    if a.target.is_floating_point() or not (nonzero(a.z_loss) or any(a.outputs) or a.softcap is not None):
        return read, read
    counts = with_weight(which_count(a), None if a.target_b is not None else a.lam)
    lost = ~(read.detach().amax(1).isfinite() | counts)
    return _as_read(a, torch.where(lost.unsqueeze(1), 0.0, x)), read


def _entropy(x: Tensor) -> Tensor:
    log_p = x.log_softmax(1)
    p = log_p.exp()
    return torch.where(p.isnan(), torch.nan, torch.where(p > 0, -p * torch.where(p > 0, log_p, 0.0), 0.0)).sum(1)


def _first_largest(x: Tensor) -> Tensor:
    """Return the first class of the largest logit that is not nan; 0 where there is none."""
    x = torch.where(x.isnan(), -torch.inf, x)
    columns = torch.arange(x.shape[1], device=x.device).view(1, -1, *(1,) * (x.ndim - 2))
    return torch.where(x == x.amax(1, keepdim=True), columns, x.shape[1]).amin(1)


def _correct(x: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """Whether the first of the largest logits is the row's class."""
    return keep & (_first_largest(x) == target) & ~x.isnan().any(1)


def _hard(log_p: Tensor, index: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Per row: -ln p of its class, nan where the index is out of range, and the class's weight; 0 where ignored."""
    index = index.long()
    counts = index != ignore_index
    classes = log_p.shape[1]
    valid = (index >= 0) & (index < classes)
    nll = -log_p.gather(1, index.clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
    w = counts.to(nll.dtype) if weight is None else row_weight(index, weight, ignore_index).to(nll.dtype)
    return torch.where(counts, torch.where(valid, nll, torch.nan), 0.0), w


def rowwise_reference(a: RowwiseCall) -> tuple[Tensor | None, ...]:
    """Compute a call in plain torch."""
    x, shown = _without_lost_rows(a, accurate(a.x))
    per_class = (1, -1) + (1,) * (x.ndim - 2)
    weight = None if a.weight is None else a.weight.to(x.dtype)
    want_z_loss, want_lse, want_entropy, want_correct, want_argmax, want_log_p2, want_mean = a.outputs
    lse = x.logsumexp(1) if nonzero(a.z_loss) or want_z_loss else None
    lse_of_rows = entropy = None
    if want_lse or want_entropy:  # of a row of +inf both are nan, and a row of -inf has no gradient
        top = shown.detach().amax(1, keepdim=True)
        nothing = top == -torch.inf
        of_rows = torch.where(nothing, 0.0, shown * torch.where(top < torch.inf, 1.0, torch.nan))
        lse_of_rows = of_rows.logsumexp(1).masked_fill(nothing.squeeze(1), -torch.inf) if want_lse else None
        entropy = _entropy(of_rows).masked_fill(nothing.squeeze(1), torch.nan) if want_entropy else None
    shown = shown.detach()
    dense, formula = None, FORMULAS[a.loss].reference
    divisor: Tensor | None

    def of_class(nll: Tensor, w: Tensor, index: Tensor) -> Tensor:
        first = [] if not nonzero(a.power) else [torch.exp(a.power * log_p).sum(1)]
        last = [] if a.parameter is None else [a.parameter.to(x.dtype)[index.long().clamp(0, x.shape[1] - 1)]]

        def values_of(nll: Tensor, *hyper: float) -> Tensor:
            def of_tensors(z: Tensor, *others: Tensor) -> Tensor:
                return formula(z, *others[: len(first)], *hyper, *others[len(first) :])

            return with_call(of_tensors, a, [nll, *first, *last], None if weight is None else w)

        return weighted(values_of, a.hyper, nll, w)

    if a.target.is_floating_point():
        log_p, dense = x.log_softmax(1), a.target.to(x.dtype) * (1 - a.label_smoothing)
        values = torch.zeros_like(x[:, 0])
        keep, divisor = torch.ones_like(values, dtype=torch.bool), torch.tensor(values.numel(), device=x.device)
    else:
        keep = which_count(a)
        rows = keep.sum()
        factor = None if a.target_b is not None or a.lam is None else a.lam.to(x.dtype)
        keep = with_weight(keep, factor)
        if nonzero(a.entropy_weight):
            factor = (a.entropy_weight * _entropy(x)).clamp(max=1.0).detach()
        log_p = torch.where(keep.unsqueeze(1), x, 0.0).log_softmax(1)
        nll, w = _hard(log_p, a.target, weight, a.ignore_index)
        if a.target_b is not None and a.lam is not None:
            lam = a.lam.to(x.dtype)
            nll_b, w_b = _hard(log_p, a.target_b, weight, a.ignore_index)
            w, w_b = lam * w, (1 - lam) * w_b
            values, w = of_class(nll, w, a.target) + of_class(nll_b, w_b, a.target_b), w + w_b
        else:
            values = of_class(nll, w if factor is None else factor * w, a.target)
        values, divisor = values * (1 - a.label_smoothing), w.sum()
        if nonzero(a.spread):
            values = values + w * (a.spread * focused(-log_p, a.focus)).sum(1)
        if a.mean_of_rows:
            divisor = rows
    if nonzero(a.label_smoothing) or dense is not None:
        q = torch.zeros_like(x) if dense is None else dense
        q = q + a.label_smoothing / x.shape[1]
        if weight is not None:
            q = q * weight.view(per_class)
        of_each = torch.where((q == 0) & log_p.isinf(), 0.0, -log_p)
        # kernels take q linearly in z, which is cross entropy; formulas without one take every class as the row's
        values = values + (q * (of_each if has_kernel(a.loss) else formula(of_each, *a.hyper))).sum(1)
    z_loss = None if lse is None else torch.where(keep, a.z_loss * lse.square(), 0.0)
    if nonzero(a.z_loss) and z_loss is not None:
        values = values + z_loss
    values = torch.where(keep, values, 0.0)
    if a.normalizer is not None:
        divisor = a.normalizer
    elif a.reduction != "mean":
        divisor = None

    def total(v: Tensor) -> Tensor:
        return reduced(v, a.loss_scale, divisor, a.reduction, a.empty_is_zero)

    return (
        total(values),
        total(z_loss) if want_z_loss and z_loss is not None else None,
        lse_of_rows,
        entropy,
        _correct(x, a.target, keep) if want_correct else None,
        _first_largest(shown) if want_argmax else None,
        shown.log_softmax(1).mul(2).logsumexp(1) if want_log_p2 else None,
        shown.mean(1) if want_mean else None,
    )


def rowwise_samples(make: Make) -> Iterator[Sample]:
    """Yield every target, weight and layout."""
    index = make.index(0, 10, 7)
    index[2] = -100
    yield Sample("class index", make.logits(7, 10), index)
    yield Sample("class index, int32", make.logits(7, 10), index.int())
    yield Sample("class index, uint8", make.logits(7, 10), make.index(0, 10, 7).byte())
    yield Sample("one class", make.logits(3, 1), make.index(0, 1, 3))
    yield Sample("two classes", make.logits(3, 2), make.index(0, 2, 3))
    yield Sample("one row", make.logits(1001), make.index(0, 1001))
    yield Sample("many classes", make.logits(2, 9001), make.index(0, 9001, 2))
    yield Sample("row stride", make.logits(5, 20)[:, :11], make.index(0, 11, 5))
    yield Sample("class stride", make.logits(5, 20)[:, ::2], make.index(0, 10, 5))
    yield Sample("transposed", make.logits(11, 5).t(), make.index(0, 11, 5))
    image = make.index(0, 5, 2, 3, 4)
    image[0, 1] = -100
    yield Sample("image", make.logits(2, 5, 3, 4), image)
    square = make.index(0, 5, 2, 4, 8)
    square[0, 1, ::3] = -100
    yield Sample("image, rows at once", make.logits(2, 5, 4, 8), square)
    square = make.index(0, 70, 1, 4, 8)
    square[0, 1, ::3] = -100
    yield Sample("image, rows at once, many classes", make.logits(1, 70, 4, 8), square)
    yield Sample("image, channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), image)
    yield Sample("image, sliced", make.logits(2, 5, 3, 8)[..., ::2], image)
    yield Sample("image, targets transposed", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 4, 3).transpose(1, 2))
    yield Sample("class weights", make.logits(7, 10), index, {"weight": make.unit(10)})
    yield Sample("class weights and smoothing", make.logits(7, 10), index, {"weight": make.unit(10), "label_smoothing": 0.2})
    yield Sample("smoothing, many classes", make.logits(2, 9001), make.index(0, 9001, 2), {"label_smoothing": 0.1})
    yield Sample("probabilities", make.logits(7, 10), make.logits(7, 10).softmax(1))
    yield Sample("probabilities, many classes", make.logits(2, 9001), make.logits(2, 9001).softmax(1))
    every = {"weight": make.unit(5), "label_smoothing": 0.2}
    yield Sample("probabilities, image", make.logits(2, 5, 3, 4), make.logits(2, 5, 3, 4).softmax(1), every)
    yield Sample("mixup pair", make.logits(7, 10), index, {"target_b": make.index(0, 10, 7), "lam": 0.3})
    yield Sample("mixup pair, image", make.logits(2, 5, 3, 4), image, {**every, "target_b": make.index(0, 5, 2, 3, 4), "lam": make.unit(2)})
    yield Sample("normalizer", make.logits(7, 10), index, {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(7, 10), index, {"normalizer": 5})


def rowwise_divisor(call: RowwiseCall[Any]) -> Tensor | int:
    """Return what a mean divides by: see Fusing."""
    if not call.counted:
        rows: int = call.x.shape[0]
        return rows
    if call.mean_of_rows or (call.weight is None and (call.lam is None or call.target_b is None)):  # all rows count equally
        return which_count(call).sum(dtype=torch.float32)
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    return row_weights(call, None if call.weight is None else call.weight.to(dtype)).sum()


DOCS = TemplateDocs(
    arguments={
        "input": "logits (C,), (N, C) or (N, C, d…), of any floating dtype.",
        "target": "class indices of any integer dtype, in the shape of input without the classes.",
        "weight": "(C,), a factor of each class, which the mean divides by.",
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, in float32.',
    example=("logits = torch.randn(8, 10, requires_grad=True)", "logits, torch.randint(10, (8,))"),
    targets="class index, probabilities, mixup pair",
    keeping=Keeping(
        {**SETTINGS, "weight": None, "ignore_index": -100, "class_bias": None, "class_margin": None},
        per_call=("classes",),
        quiet=("scale", "softcap", "z_loss"),
    ),
)
ROWWISE = Template(
    "rowwise",
    "classes.rowwise.launch",
    RowwiseCall,
    results=("loss", "z_loss", "lse", "entropy", "correct", "argmax", "log_p2", "mean_logit"),
    graded=4,
    kept=("divisor", "stats"),
    saved=("entropy",),
    fusing=Fusing(rowwise_divisor, rows=("target", "target_b", "lam", "row_scale"), classes=("bias",), product=True),
    by_rows=True,
    without=("probabilities", "label_smoothing"),
    variables=("z",),
    reference=rowwise_reference,
    samples=rowwise_samples,
    docs=DOCS,
)
OF_POWERS = dataclasses.replace(ROWWISE, variables=("z", "s"), slopes=2)
"""The template as formulas have it that take s = Σ p^k beside z."""
