"""What the element-wise losses share: the checks of their arguments, and the call."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lossforge.kernels.call import ROW_MEAN, Head
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.options import ElementwiseOptions, check_options, checked_call, mask_of_elements, row_score, rows_of, share
from lossforge.losses.base.record import SCALAR, SETTINGS, CheckedCall, Fusing, Keeping, Make, Sample, Template, TemplateDocs, first
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, counted, product_with_mask, reduced, which_count
from lossforge.losses.templates.plain_forms.infinite import with_factor

IGNORED = -2
"""The class index of a row that does not count; -1 is background."""
BATCH_REDUCTIONS = (*checks.REDUCTIONS, "batchmean")


def of_dim(dim: int, x: Tensor) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be at least {-x.ndim} and below {x.ndim} for input of shape {tuple(x.shape)}, got {dim}")


def with_parameter(
    hyper: list[float], name: str, value: float | Tensor, x: Tensor, low: float = -math.inf, high: float = math.inf
) -> tuple[list[float], Tensor | None]:
    """Return the hyper-parameters with `value` as the last, or a tensor that takes the last one's place, which broadcasts to x."""
    if checks.is_parameter(value, x):
        checks.whole("input", x)
        checks.floating_beside(name, value, x)
        checks.broadcasts(name, value, x)
        return hyper, value
    return [*hyper, checks.number(name, value, low, high)], None


def dense(target: Tensor, x: Tensor) -> Tensor:
    """Return a target of the input's shape in a floating dtype, and class indices as they are."""
    if target.is_floating_point() or target.is_complex() or target.shape != x.shape:
        return target
    return target.to(x.dtype if target.dtype == torch.bool else torch.promote_types(x.dtype, torch.float32))


def per_sample(reduction: str, input: Tensor, options: ElementwiseOptions) -> str:
    """Return the reduction, with "batchmean" as a sum whose normalizer, unless one is given, is the number of samples."""
    checks.one_of("reduction", reduction, BATCH_REDUCTIONS)
    if reduction != "batchmean":
        return reduction
    if options.get("normalizer") is None and isinstance(input, (Tensor, Head)):
        mask = options.get("mask")
        options["normalizer"] = (input.shape[0] if input.ndim else 1) if mask is None else _samples(mask_of_elements(mask, input), input)
    return "sum"


def summed_over(dim: int, results: Sequence[Tensor | None]) -> Tensor:
    """Return the losses of the rows, from those of their elements."""
    return first(results).sum(dim)


def elementwise_loss(
    call: ElementwiseCall,
    options: Any,
    mean: Literal["elements", "weights", "rows"] = "elements",
    diagonal: bool = False,
    weight: str = "weight",
) -> CheckedCall[ElementwiseCall]:
    """Check arguments. call: with the function's arguments as they are. options: WeightedElementwiseOptions.

    mean: what a mean divides by: the elements not ignored, the weights that count, where weights are given, or the rows not ignored.
    diagonal: a target of None is the diagonal, `call.offset` columns to the right. weight: what the function calls the weight.
    """
    x = call.x
    checks.whole("input", x)
    call = call._replace(weight=options.pop("weight", call.weight))
    if isinstance(call.target, Tensor):
        call = call._replace(target=dense(call.target, x))
    divisor = check_options(x, call.reduction, options, ElementwiseOptions)
    call = call._replace(dim=checks.whole_number("dim", options.get("dim", -1)), ignore_index=IGNORED, target_b=options.get("target_b"))
    mask = None if options.get("mask") is None else mask_of_elements(options["mask"], x)
    call = _with_target(call, options, mean, diagonal, mask)
    if call.weight is not None:
        checks.floating_beside(weight, call.weight, x)
        checks.broadcasts(weight, call.weight, x)
    call = _with_groups(call._replace(mask=mask), options.get("validate"))
    reduces = call.reduction == "mean" and options.get("normalizer") is None
    counting = _counting(call, mean) if reduces else None
    if counting is not None:
        options["normalizer"] = divisor = _counted(call, counting)
        reduces = False
    if call.target is not None:
        pair, score = {"target_b": call.target_b, "lam": options.get("lam")}, options.get("score")
        of_row = share(pair["lam"], call.target, call.target_b, x) if score is None else row_score(score, call.target, pair, x)
        call = call._replace(lam=of_row)
    if mean == "rows" and reduces:
        call = call._replace(reduction=ROW_MEAN)
    return checked_call(call, options, divisor)


def _with_target(call: ElementwiseCall, options: ElementwiseOptions, mean: str, diagonal: bool, mask: Tensor | None) -> ElementwiseCall:
    x, target, dim = call.x, call.target, call.dim
    if target is None and diagonal:
        if x.ndim != 2:
            raise ValueError(f"input must be a matrix where target is None, got shape {tuple(x.shape)}")
        given = {"target_b": call.target_b, "lam": options.get("lam"), "score": options.get("score")}
        if names := [name for name, t in given.items() if t is not None]:
            raise TypeError(f"target must hold class indices where {names[0]} is given, got None")
        of_dim(dim, x)
        return call
    target = checks.tensor("target", target)
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
            f"target must have shape {rows}, got {tuple(target.shape)}: one of integers holds class indices along "
            f"dim {dim}, or has the shape of input, {tuple(x.shape)}"
        )
    allowed = checks.Allowed(-1, x.shape[dim], IGNORED, options.get("validate"))
    given = {"target": target, "target_b": call.target_b}
    if mask is not None:
        given = {
            k: _without_masked_rows(t, mask, x.shape, dim) if isinstance(t, Tensor) and t.shape == rows else t for k, t in given.items()
        }
    pair = [None if t is None else checks.indices(name, t, x, allowed, rows) for name, t in given.items()]
    return call._replace(target=pair[0], target_b=pair[1])


def _with_groups(call: ElementwiseCall, validate: bool | None) -> ElementwiseCall:
    group, weights = call.group, call.group_weight
    if (group is None) != (weights is None):
        raise ValueError(f"group and group_weight go together, got only {'group' if weights is None else 'group_weight'}")
    if group is None or weights is None:
        return call
    checks.floating_beside("group_weight", weights, call.x)
    checks.fits("group_weight", weights, weights.ndim == 1 and len(weights) > 0, "hold one weight a group, shape (G,)")
    if call.mask is not None and isinstance(group, Tensor):  # that of an element that does not count may be any
        group = torch.where(call.mask == 0, 0, group)
    group = checks.indices("group", group, call.x, checks.Allowed(0, len(weights), None, validate))
    checks.broadcasts("group", group, call.x)
    return call._replace(group=group, group_weight=weights.contiguous())


def _without_masked_rows(index: Tensor, mask: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Return class indices that are ignored in rows of which the mask, which broadcasts to `shape`, counts no element."""
    return torch.where(mask.expand(shape).any(dim), index.long(), IGNORED)


def _counting(call: ElementwiseCall[Any], mean: str) -> Tensor | None:
    """Return what a mean sums that divides by the weights, or with a mask by rows, each of which counts as its element that counts most."""
    shape, mask = call.x.shape, call.mask
    if mean == "weights" and call.weight is not None:
        weight = _weight_of_elements(call)
        assert weight is not None
        return weight.expand(shape)
    if mean == "rows" and mask is not None:
        return mask.expand(shape).amax(call.dim, keepdim=True) if shape and shape[call.dim] else mask.expand(shape)
    return None


def _samples(mask: Tensor, x: Tensor | Head) -> Tensor:
    """Return how many samples have an element that counts; by weights, the sum over samples of the largest of each."""
    of_each = mask.expand(x.shape)
    if x.ndim > 1 and x.numel():
        of_each = of_each.amax(tuple(range(1, x.ndim)))
    return of_each.sum(dtype=torch.promote_types(x.dtype, torch.float32))


def _counted(call: ElementwiseCall[Any], counted: Tensor) -> Tensor:
    """Return the sum of weights over what is not ignored. counted: expanded to the shape of x, or with one entry a row."""
    if call.by_class():
        counted = counted.masked_fill(~which_count(call).unsqueeze(call.dim % call.x.ndim), 0)
    return counted.sum(dtype=torch.promote_types(call.x.dtype, torch.float32))


def _one_hot(index: Tensor, classes: int, ignore_index: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y along `dim`, and per row whether it counts; nan where an index is out of range."""
    index = index.long()
    counts = index != ignore_index
    columns = torch.arange(classes, device=index.device)
    y = (index.unsqueeze(-1) == columns).to(dtype)
    y = torch.where((counts & ((index < -1) | (index >= classes))).unsqueeze(-1), torch.nan, y)
    return y.movedim(-1, dim), counts.unsqueeze(dim)


def _diagonal(x: Tensor, dim: int, offset: int) -> Tensor:
    """y of a matrix x: 1 in column row + offset along `dim`."""
    rows, columns = (torch.arange(n, device=x.device) for n in (x.shape[1 - dim % 2], x.shape[dim]))
    return (rows.unsqueeze(dim) + offset == columns.unsqueeze(1 - dim % 2)).to(x.dtype)


def _saturated(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the formula of targets y of 0 and 1 with its limit at a logit of ±inf that is a right answer, where it computes 0 · inf."""

    def computed(x: Tensor, y: Tensor, *hyper: Any) -> Tensor:
        right = x == torch.where(y == 1, torch.inf, -torch.inf)
        return formula(torch.where(right, x.nan_to_num(), x), y, *hyper)

    return computed


def _weight_of_elements(a: ElementwiseCall[Any]) -> Tensor | None:
    """Return the product of the elements' own weights, their groups' and their mask: nan where a group does not exist, 0 where the mask
    is; None without any."""
    weight = a.weight
    if a.group is not None and a.group_weight is not None:
        group = a.group.long()
        exists = (group >= 0) & (group < len(a.group_weight))
        of_group = torch.where(exists, a.group_weight[group.clamp(0, len(a.group_weight) - 1)], torch.nan)
        weight = of_group if weight is None else weight * of_group
    return product_with_mask(weight, a.mask)


def elementwise_reference(a: ElementwiseCall) -> Tensor:
    """Compute a call in plain torch."""
    x = accurate(a.x)
    indices = a.by_class()
    if a.target is None:
        y, counts = _diagonal(x, a.dim, a.offset), None
    elif a.by_class():
        classes, dim = x.shape[a.dim], a.dim % x.ndim
        y, counts = _one_hot(a.target, classes, a.ignore_index, dim, x.dtype)
        if a.target_b is None and a.lam is not None:
            y = torch.where(y == 1, a.lam.to(x.dtype).unsqueeze(dim), y)
        elif a.target_b is not None and a.lam is not None:
            y_b, counts_b = _one_hot(a.target_b, classes, a.ignore_index, dim, x.dtype)
            lam = a.lam.to(x.dtype).unsqueeze(dim)
            y = torch.where(counts, lam * y, 0.0) + torch.where(counts_b, (1 - lam) * y_b, 0.0)
            counts = counts | counts_b
        x = torch.where(counts, x, 0.0)
    else:
        y, counts = a.target.to(x.dtype), None
    divisor, weight = a.normalizer, _weight_of_elements(a)
    if divisor is None and a.mean():
        if a.mask is not None:
            divisor = _counted(a, a.mask.expand(x.shape))
        else:
            divisor = torch.tensor(x.numel(), device=x.device) if counts is None else counts.expand(x.shape).sum()
    formula = FORMULAS[a.loss]
    compute, hyper = formula.reference, a.hyper
    if formula.saturates and (a.by_class() or a.target is None) and a.lam is None:
        compute = _saturated(compute)
    inputs = [x, y] if a.parameter is None else [x, y, a.parameter.to(x.dtype)]

    def of_elements(x: Tensor, y: Tensor, *parameter: Tensor) -> Tensor:
        if weight is None and a.normalizer is None and not isinstance(a.loss_scale, Tensor) and a.loss_scale != math.inf:
            values = compute(x, y, *hyper, *parameter)
        else:
            factor = reduced(x.new_ones(()) if weight is None else weight.to(x.dtype), a.factor(), divisor, "none", a.empty_is_zero)
            values = with_factor(compute, factor, [x, y, *parameter], hyper)
        return torch.where(y.isnan(), torch.nan, values) if indices else values

    values = counted(lambda *tensors: counted(of_elements, a.weight, tensors), a.mask, inputs)
    if weight is not None:
        values = values * weight.to(x.dtype)
    if counts is not None:
        values = torch.where(counts, values, 0.0)
    result = reduced(values, a.factor(), divisor, a.reduction, a.empty_is_zero)
    return result.to(a.x.dtype) if a.reduction == "none" else result


def elementwise_samples(make: Make) -> Iterator[Sample]:
    """Yield every target, weight and layout."""
    yield Sample("dense", make.logits(7, 33), make.unit(7, 33))
    yield Sample("one dimension", make.logits(1037), make.unit(1037))
    yield Sample("no dimension", make.logits(), make.unit())
    yield Sample("transposed", make.logits(6, 5).t(), make.unit(5, 6))
    yield Sample("both transposed", make.logits(6, 5).t(), make.unit(6, 5).t())
    yield Sample("sliced", make.logits(6, 10)[:, ::2], make.unit(6, 5))
    yield Sample("expanded", make.logits(6, 1).expand(6, 5), make.unit(1, 5).expand(6, 5))
    yield Sample("channels last", make.logits(2, 3, 4, 5).to(memory_format=torch.channels_last), make.unit(2, 3, 4, 5))
    yield Sample("four strides", make.logits(3, 4, 4, 6)[:, ::2, :, ::2].permute(3, 0, 2, 1)[:, :, 1:3], make.unit(3, 3, 2, 2))
    index = make.index(-1, 7, 9)
    index[4] = -2
    yield Sample("class index", make.logits(9, 7), index)
    yield Sample("class index, int32", make.logits(9, 7), index.int())
    index = torch.cat([make.index(0, 1501, 2), make.index(-2, 0, 3)])
    yield Sample("class index, rows longer than a tile", make.logits(5, 1501), index)
    yield Sample("class index, scores, rows longer than a tile", make.logits(5, 1501), index, {"score": make.unit(5)})
    pair = {"target_b": make.index(-2, 1501, 5), "lam": make.unit(5)}
    yield Sample("mixup pair, rows longer than a tile", make.logits(5, 1501), index, pair)
    index = make.index(-2, 5, 2, 3, 4)
    yield Sample("class index, middle dimension", make.logits(2, 5, 3, 4), index, {"dim": 1})
    yield Sample("class index, middle dimension last in memory", make.logits(2, 3, 4, 5).permute(0, 3, 1, 2), index, {"dim": 1})
    yield Sample("class index, scores", make.logits(9, 7), make.index(-2, 7, 9), {"score": make.unit(9)})
    yield Sample("class index, scores, middle dimension", make.logits(2, 5, 3, 4), index, {"dim": 1, "score": make.unit(2, 4, 3).mT})
    yield Sample("mixup pair", make.logits(2, 4, 7), make.index(-2, 7, 2, 4), {"target_b": make.index(-2, 7, 2, 4), "lam": 0.3})
    yield Sample(
        "mixup pair, λ a sample", make.logits(3, 4, 7), make.index(0, 7, 3, 4), {"target_b": make.index(0, 7, 3, 4), "lam": make.unit(3)}
    )
    yield Sample("normalizer", make.logits(9, 7), make.index(-1, 7, 9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), make.unit(9, 7), {"normalizer": 5})


def elementwise_divisor(call: ElementwiseCall[Any]) -> Tensor | int:
    """Return what a mean divides by: see Fusing."""
    rows, classes = call.x.shape
    if call.mask is not None:
        return _counted(call, call.mask.expand(call.x.shape))
    return which_count(call).sum(dtype=torch.float32) * classes if call.counted else rows * classes


DOCS = TemplateDocs(
    arguments={
        "input": "of any shape and floating dtype.",
        "target": "in the shape of input, dense; or class indices in its shape without dim, -1 background and -2 ignored.",
        "weight": "broadcasts to input, a factor of each element's loss. An element of weight 0 adds nothing, whatever it holds.",
        "mask": (
            "which elements count; broadcasts to input, bool, or floats of at least 0 as weights. Others add nothing, whatever they hold. "
            "A mean divides by the mask's sum; one over rows or samples counts each by its largest entry."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" a tensor in the shape and dtype of input.',
    example=("logits = torch.randn(8, 10, requires_grad=True)", "logits, torch.randint(10, (8,))"),
    targets="dense, class index, class index and score, mixup pair",
    keeping=Keeping({"weight": None, **SETTINGS}, quiet=("weight",)),
)
ELEMENTWISE = Template(
    "elementwise",
    "elements.elementwise.launch",
    ElementwiseCall,
    kept=("divisor",),
    fusing=Fusing(
        elementwise_divisor,
        rows=("target", "target_b", "lam"),
        elements=("weight", "mask", "group", "parameter"),
        by_classes=False,
        factor=ElementwiseCall.factor,
    ),
    by_rows=True,
    ignored=IGNORED,
    variables=("x", "y"),
    reference=elementwise_reference,
    samples=elementwise_samples,
    docs=DOCS,
)
