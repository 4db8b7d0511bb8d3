"""What the losses of margins between a row's classes share: the checks of their arguments, and the call."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import MarginsCall
from lossforge.kernels.torch_internals import transformed
from lossforge.losses.base import checks
from lossforge.losses.base.options import CheckedOptions, check_options, checked_call, weights_of_classes
from lossforge.losses.base.record import SCALAR, CheckedCall, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, reduced_call
from lossforge.losses.templates.plain_forms.infinite import with_call

MOST_LISTED = 16384
"""The most classes of rows with lists of targets, which a program of the kernel holds in registers."""


def margins_loss(call: MarginsCall, options: CheckedOptions, lists: bool) -> CheckedCall[MarginsCall]:
    """Check arguments. call: with the function's arguments as they are. lists: whether a row has a list of targets."""
    x, target = call.x, call.target
    checks.whole("input", x)
    shape, classes = x.shape, x.shape[-1] if x.ndim else 1
    checks.fits("input", x, x.ndim <= 2 and classes > 0, "have shape (C,) or (N, C) with at least one class")
    if lists and classes > MOST_LISTED:
        raise ValueError(f"input must have at most {MOST_LISTED} classes where targets are lists, got {classes}")
    divisor = check_options(x, call.reduction, options, CheckedOptions)
    allowed = checks.Allowed(-1 if lists else 0, classes, None, options.get("validate"))
    alone = isinstance(target, Tensor) and not lists and x.ndim == 1 and target.shape == (1,)  # torch takes it, and returns (1,)
    target = checks.indices("target", target, x, allowed, shape if lists else (1,) if alone else shape[:-1])
    weight = weights_of_classes("weight", call.weight, x, classes)
    one = x.ndim < 2
    if one:
        x, target = x.view(1, classes), target.view(1, classes) if lists else target.view(1)
    call = call._replace(x=x, target=_used(target) if lists else target, weight=weight)
    return checked_call(call, options, divisor, one and not alone)


def _used(lists: Tensor) -> Tensor:
    """Return lists without the columns that are used by none, where the host can read them now."""
    if lists.device.type != "cpu" or not checks.known(lists) or transformed(lists) or not lists.numel():
        return lists
    return lists[:, : max(1, int((lists != -1).long().cumprod(1).sum(1).max()))]


def margins_reference(a: MarginsCall) -> Tensor:
    """Compute a call in plain torch."""
    x, classes = accurate(a.x), a.x.shape[1]
    index = a.target.long() if a.target.ndim == 2 else a.target.long().unsqueeze(1)
    listed = (index != -1).long().cumprod(1).bool() if a.target.ndim == 2 else torch.ones_like(index, dtype=torch.bool)
    valid = (index >= 0) & (index < classes)
    place = index.clamp(0, classes - 1)
    member = ((place.unsqueeze(2) == torch.arange(classes, device=x.device)) & (listed & valid).unsqueeze(2)).any(1)
    counts = listed.unsqueeze(2) & ~member.unsqueeze(1)  # (N, K, C)

    def of_pairs(x: Tensor) -> Tensor:
        differences = x.gather(1, place).unsqueeze(2) - x.unsqueeze(1)
        return torch.where(counts, FORMULAS[a.loss].reference(torch.where(counts, differences, 0.0), *a.hyper), 0.0)

    values = with_call(of_pairs, a, [x])
    if a.weight is not None:
        values = torch.where(values == 0, 0.0, values * a.weight.to(x.dtype)[place].unsqueeze(2))
    rows = values.sum((1, 2)) / classes * torch.where((listed & ~valid).any(1), torch.nan, 1.0).to(x.dtype)
    return reduced_call(a, rows)


def margins_samples(make: Make) -> Iterator[Sample]:
    """Yield every weight and layout."""
    yield Sample("class index", make.logits(9, 7), make.index(0, 7, 9))
    yield Sample("class index, int32", make.logits(9, 7), make.index(0, 7, 9).int())
    yield Sample("one class", make.logits(3, 1), make.index(0, 1, 3))
    yield Sample("one row", make.logits(37), make.index(0, 37))
    yield Sample("several tiles", make.logits(300, 16), make.index(0, 16, 300))
    yield Sample("many classes", make.logits(3, 9001), make.index(0, 9001, 3))
    yield Sample("transposed", make.logits(11, 5).t(), make.index(0, 11, 5))
    yield Sample("class stride", make.logits(5, 20)[:, ::2], make.index(0, 10, 10)[::2])
    yield Sample("expanded", make.logits(1, 6).expand(5, 6), make.index(0, 6, 5))
    yield Sample("class weights", make.logits(9, 7), make.index(0, 7, 9), {"weight": make.unit(7)})
    yield Sample("class weights, many classes", make.logits(2, 9001), make.index(0, 9001, 2), {"weight": make.unit(9001)})
    yield Sample("normalizer", make.logits(9, 7), make.index(0, 7, 9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), make.index(0, 7, 9), {"normalizer": 5})


def margin_lists_samples(make: Make) -> Iterator[Sample]:
    """Yield lists of targets, and every layout."""

    def lists(rows: int, classes: int) -> Tensor:
        """Return lists of up to 5 classes, of which some are empty, and some name a class twice."""
        index = make.index(0, classes, rows, classes)
        ends = make.index(0, min(classes, 5) + 1, rows, 1)
        return torch.where(torch.arange(classes, device=make.device) == ends, -1, index)

    yield Sample("class index", make.logits(9, 7), lists(9, 7))
    yield Sample("class index, int32", make.logits(9, 7), lists(9, 7).int())
    yield Sample("all classes", make.logits(3, 5), make.index(0, 5, 3, 5))
    yield Sample("one class", make.logits(3, 1), lists(3, 1))
    yield Sample("one row", make.logits(37), lists(1, 37)[0])
    yield Sample("several tiles", make.logits(300, 16), lists(300, 16))
    yield Sample("many classes", make.logits(3, 2001), lists(3, 2001))
    yield Sample("transposed", make.logits(11, 5).t(), lists(11, 11)[:5])
    yield Sample("class stride", make.logits(5, 20)[:, ::2], lists(10, 10).t()[:5])
    yield Sample("normalizer", make.logits(9, 7), lists(9, 7), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), lists(9, 7), {"normalizer": 5})


DOCS = TemplateDocs(
    arguments={
        "input": "logits (C,) or (N, C), of any floating dtype; gets a gradient.",
        "target": "class indices of any integer dtype, () or (N,).",
        "weight": "(C,), a factor of what the target's class adds. A mean still divides by the number of rows.",
        "reduction": '"mean" over the rows, "sum", or "none" for one value a row.',
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, in float32.',
    example=("logits = torch.randn(8, 10, requires_grad=True)", "logits, torch.randint(10, (8,))"),
    targets="class index",
)
LISTS = replace(
    DOCS,
    arguments={
        **DOCS.arguments,
        "target": "in the shape of input, of any integer dtype: the classes of a row, then -1. What follows the first -1 does not matter.",
    },
    example=(
        "logits = torch.randn(2, 4, requires_grad=True)\ntarget = torch.tensor([[3, 0, -1, -1], [1, -1, -1, -1]])",
        "logits, target",
    ),
    targets="lists of class indices",
)
MARGINS = Template("margins", "classes.margins", MarginsCall, reference=margins_reference, samples=margins_samples, docs=DOCS)
MARGIN_LISTS = replace(MARGINS, name="margin_lists", samples=margin_lists_samples, docs=LISTS)
"""Of rows with lists of targets."""
