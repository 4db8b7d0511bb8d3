"""What the losses of overlapping regions share: the checks of their arguments, and the call."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.masks.calls import OverlapCall
from lossforge.losses.base import checks
from lossforge.losses.base.options import (
    RegionOptions,
    Regions,
    RegionSettings,
    check_options,
    checked_call,
    mask_of_pixels,
    rows_of,
    weights_of_classes,
)
from lossforge.losses.base.record import SCALAR, SETTINGS, CheckedCall, Keeping, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, reduced, softmax

ACTIVATIONS = ("softmax", "sigmoid", None)
INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def overlap_loss(call: OverlapCall, hyper: dict[str, float], options: Any) -> CheckedCall[OverlapCall]:
    """Check arguments and compute. call: with the function's arguments as they are. options: RegionSettings beside a cross entropy."""
    call = call._replace(**{name: options[name] for name in Regions.__annotations__ if name in options})
    input, target, activation = call.x, call.target, call.activation
    checks.whole("input", input)
    checks.fits("input", input, input.ndim >= 2, "have shape (N, C, d…)")
    normalizer = check_options(input, call.reduction, options, RegionOptions if call.lambda_ce is None else RegionSettings)
    checks.one_of("activation", activation, ACTIVATIONS)
    numbers = [checks.number(name, number, 0.0) for name, number in hyper.items()]
    ignore_index = checks.whole_number("ignore_index", call.ignore_index)
    classes = input.shape[1]
    if classes == 1 and activation == "softmax":
        raise ValueError(
            f"input must have more than one class under a softmax, which gives one class probability 1 whatever its logits are, got shape "
            f'{tuple(input.shape)}: for the mask of one class pass activation="sigmoid"'
        )
    if classes == 1 and not call.include_background:
        raise ValueError("include_background=False needs more than one class, got an input of one channel")
    checks.real("target", target)
    first = int(classes == 1)
    if target.shape == input.shape and not target.is_floating_point() and (classes > 1 or target.dtype == torch.bool):
        target = target.to(input.dtype)
    if target.is_floating_point():
        checks.ignores_none(ignore_index)
        checks.dense(target, input, rows_of(input, 1), ", where it is dense")
        checks.beside("target", target, input)
        if call.mask is not None:
            mask = mask_of_pixels(call.mask, input, activation != "softmax")
            call = call._replace(mask=mask.view(torch.uint8) if mask.dtype == torch.bool else mask)
    else:
        if target.ndim == input.ndim and target.shape[1] == 1:
            target = target.squeeze(1)
        if call.mask is not None and target.shape == rows_of(input, 1):
            mask = mask_of_pixels(call.mask, input, False)
            target = torch.where(mask[:, 0].bool(), target.long(), ignore_index)
            call = call._replace(mask=None if mask.dtype == torch.bool else mask)
        allowed = checks.Allowed(0, classes + first, ignore_index, options.get("validate"))
        target = checks.indices("target", target, input, allowed, rows_of(input, 1), INDICES)
    weight = weights_of_classes("weight", call.weight, input, classes)
    call = call._replace(target=target, weight=weight, hyper=numbers, ignore_index=ignore_index)
    return checked_call(call, options, normalizer)


class Elements(NamedTuple):
    """The elements of a call's regions, in plain torch.

    Attributes:
        x: logits, in float32 or float64, 0 where ignored.
        p: their probabilities, 0 where ignored, nan where the class index is of no class.
        y: targets, 0 where the mask is.
        counts: which pixels are not ignored; broadcasts to the logits.
        mask: how much each element counts; None: wholly.
    """

    x: Tensor
    p: Tensor
    y: Tensor
    counts: Tensor
    mask: Tensor | None


def elements(a: OverlapCall) -> Elements:
    """Return the elements of a call's regions."""
    x = accurate(a.x)
    classes = x.shape[1]
    hard = not a.target.is_floating_point()
    counts = torch.ones((), dtype=torch.bool, device=x.device)
    if hard:
        index = a.target.long()
        keep = index != a.ignore_index
        counts = keep.unsqueeze(1)
        index = index - a.first()
        columns = torch.arange(classes, device=x.device).view(1, -1, *(1,) * (x.ndim - 2))
        y = (counts & (index.unsqueeze(1) == columns)).to(x.dtype)
        invalid = (keep & ((index < -a.first()) | (index >= classes))).unsqueeze(1)
        x = torch.where(counts, x, 0.0)
    else:
        y = a.target.to(x.dtype)
    mask = None if a.mask is None else a.mask.to(x.dtype)
    if mask is not None:
        x, y = torch.where(mask == 0, 0.0, x), torch.where(mask == 0, 0.0, y)
    p = softmax(x) if a.activation == "softmax" else x.sigmoid() if a.activation == "sigmoid" else x
    if hard:
        p = torch.where(counts, p * torch.where(invalid, torch.nan, 1.0).to(p.dtype), 0.0)
    return Elements(x, p, y, counts, mask)


def times(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values of elements times their mask."""
    return values if mask is None else values * mask


def overlap_reference(a: OverlapCall) -> Tensor:
    """Compute a call in plain torch."""
    parts = elements(a)
    x, p, y, _, mask = parts

    def summed(t: Tensor) -> Tensor:
        """(N, classes that are included), or (classes,) of the batch."""
        t = times(t, mask)
        sums = (t.flatten(2).sum(2) if t.ndim > 2 else t)[:, a.skip() :]
        return sums.sum(0) if a.batch else sums

    sums = [summed(t) for t in (p * y, p * p if a.squared_pred else p, y * y if a.squared_pred else y)]
    if a.present_only:
        absent = (sums[2] == 0) & ~sums[1].isnan()
        sums = [torch.where(absent, 1.0, s) for s in sums]
    values = FORMULAS[a.loss].reference(*sums, *a.hyper)
    weight = None if a.weight is None else a.weight.to(x.dtype)
    if weight is not None:
        values = values * weight[a.skip() :]
    if a.present_only:
        values = torch.where(absent, 0.0, values)
    divisor = a.normalizer
    if a.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=x.device)
    result = reduced(values, a.loss_scale, divisor, a.reduction, a.empty_is_zero)
    return result if a.lambda_ce is None else result + _cross_entropy(a, parts, weight)


def _cross_entropy(a: OverlapCall, of: Elements, weight: Tensor | None) -> Tensor:
    """λ times the cross entropy of softmax, or the binary one of sigmoid; a mean over pixels, or over elements."""
    assert a.lambda_ce is not None
    x, _, y, counts, mask = of
    w = torch.ones((), dtype=x.dtype, device=x.device) if weight is None else weight.view(1, -1, *(1,) * (x.ndim - 2))
    if a.activation == "softmax":
        log_p = x.log_softmax(1)
        values = -w * y * torch.where((y == 0) & log_p.isinf(), 0.0, log_p)
        count = times(w * y, mask) if not a.target.is_floating_point() else torch.ones_like(x[:, 0]) if mask is None else mask[:, 0]
    else:
        values = torch.where(counts, w * FORMULAS["bce_with_logits"].reference(x, y, 1.0), 0.0)
        count = times(counts.expand(x.shape), mask)
    return reduced(times(values, mask), a.lambda_ce, count.sum() if a.reduction == "mean" else None, a.reduction, a.empty_is_zero)


def overlap_samples(make: Make) -> Iterator[Sample]:
    """Yield every target, activation, option and layout."""
    index = make.index(0, 5, 2, 3, 4)
    index[0, 1] = -100
    yield Sample("class index", make.logits(2, 5, 3, 4), index)
    yield Sample("class index, uint8, one channel", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 1, 3, 4).byte(), {"ignore_index": 3})
    yield Sample("dense", make.logits(2, 5, 3, 4), make.unit(2, 5, 3, 4))
    yield Sample("no pixels", make.logits(4, 5), make.index(0, 5, 4))
    yield Sample("volume", make.logits(2, 3, 2, 3, 4), make.index(0, 3, 2, 2, 3, 4))
    yield Sample("several programs", make.logits(2, 3, 40, 40), make.index(0, 3, 2, 40, 40))
    yield Sample("whole tiles", make.logits(1, 4, 32, 64), make.unit(1, 4, 32, 64))
    yield Sample("one class", make.logits(2, 1, 3, 4), make.unit(2, 1, 3, 4), {"activation": "sigmoid"})
    yield Sample("many classes", make.logits(2, 600, 5, 14), make.index(0, 600, 2, 5, 14))
    yield Sample("many classes, dense", make.logits(1, 600, 3), make.unit(1, 600, 3), {"batch": True})
    yield Sample("channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), index)
    yield Sample("targets transposed", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 4, 3).transpose(1, 2))
    yield Sample("cropped", make.logits(2, 5, 5, 6)[:, 1:4, 1:4, 2:5], make.unit(2, 3, 5, 6)[:, :, 2:, 3:])
    yield Sample("three strides", make.logits(2, 3, 4, 6, 8)[:, :, :2, :3, ::2], make.index(0, 3, 2, 2, 3, 4))
    yield Sample("batch", make.logits(2, 5, 3, 4), index, {"batch": True})
    yield Sample("without background", make.logits(2, 5, 3, 4), index, {"include_background": False})
    every = {"weight": make.unit(5), "include_background": False}
    yield Sample("class weights", make.logits(2, 5, 3, 4), index, {"weight": make.unit(5)})
    yield Sample("class weights, batch", make.logits(2, 5, 3, 4), make.unit(2, 5, 3, 4), {**every, "batch": True})
    yield Sample("present only", make.logits(2, 5, 3, 4), index.clamp(max=2), {**every, "present_only": True})
    sigmoid: dict[str, Any] = {"activation": "sigmoid"}
    yield Sample("sigmoid", make.logits(2, 5, 3, 4), index, sigmoid)
    yield Sample("sigmoid, dense", make.logits(2, 11, 3, 4), make.unit(2, 11, 3, 4), sigmoid)
    mask = make.index(0, 2, 2, 50, 50)
    mask[:, 3] = 255
    yield Sample("mask", make.logits(2, 1, 50, 50), mask, {**sigmoid, "ignore_index": 255})
    yield Sample("mask, batch", make.logits(2, 1, 3, 4), make.index(0, 2, 2, 3, 4), {**sigmoid, "batch": True, "weight": make.unit(1)})
    counted = {"mask": make.index(0, 2, 2, 3, 4).bool()}
    shares = {"mask": make.unit(2, 1, 3, 4) * make.index(0, 2, 2, 1, 3, 4)}
    yield Sample("counted pixels", make.logits(2, 5, 3, 4), index, counted)
    yield Sample("counted pixels, dense", make.logits(2, 5, 3, 4), make.unit(2, 5, 3, 4), counted)
    yield Sample("shares of pixels", make.logits(2, 5, 3, 4), index, shares)
    yield Sample("shares of pixels, dense", make.logits(2, 20, 3, 4), make.unit(2, 20, 3, 4), shares)
    yield Sample("shares of pixels, many classes", make.logits(2, 600, 3, 4), make.unit(2, 600, 3, 4), shares)
    shares = {**sigmoid, "mask": make.unit(2, 5, 3, 4) * make.index(0, 2, 2, 5, 3, 4)}
    yield Sample("sigmoid, shares of elements", make.logits(2, 5, 3, 4), make.unit(2, 5, 3, 4), shares)
    yield Sample("sigmoid, shares of pixels", make.logits(2, 5, 3, 4), index, {**sigmoid, "mask": make.unit(2, 3, 4)})


COUNTED = {
    "include_background": True,
    "activation": "softmax",
    "batch": False,
    "weight": None,
    "ignore_index": -100,
    "present_only": False,
}
DOCS = TemplateDocs(
    arguments={
        "input": "logits (N, C, d…) with any number of spatial dimensions; probabilities where activation is None.",
        "target": (
            "class indices (N, d…) or (N, 1, d…) of any integer dtype; or dense (N, C, d…): floating, bool, or with C > 1 integers. For "
            "one channel, indices are the mask itself: 1 is the channel's class, 0 background."
        ),
        "activation": '"softmax" over two or more classes, "sigmoid" of each, or None.',
        "include_background": "class 0 counts.",
        "squared_pred": "P = Σ p² and Y = Σ y² in place of Σ p and Σ y.",
        "reduction": (
            '"mean" and "sum" over images and classes, or "none": (N, C), with batch (C,), without class 0 where it does not count.'
        ),
        "batch": "a region is a class over all images, as in segmentation_models_pytorch; else one of each image, as in MONAI.",
        "weight": "(C,), one a class; a mean does not divide by them.",
        "ignore_index": "pixels with this class index belong to no region and get gradient 0, whatever their logits are.",
        "mask": (
            "which pixels count: (N, d…) or (N, 1, d…), bool, or floats of at least 0 as weights in every sum over pixels; with a dense "
            "target that is no softmax's also (N, C, d…). Others belong to no region and get gradient 0, whatever they hold."
        ),
        "present_only": ("the loss of a class without target pixels is 0, as in segmentation_models_pytorch; the mean still counts it."),
        "smooth_nr": "n, added to the numerator.",
        "smooth_dr": "d, added to the denominator. An empty region has the ratio n / d, so a loss of 0 by default; nan where both are 0.",
    },
    returns=f'{SCALAR}; with reduction "none" one value a region, in float32.',
    example=("maps = torch.randn(2, 5, 32, 32, requires_grad=True)", "maps, torch.randint(5, (2, 32, 32))"),
    targets="class index a pixel, dense",
    keeping=Keeping({**COUNTED, **SETTINGS}, quiet=("smooth_nr", "smooth_dr")),
)
OVERLAP = Template(
    "overlap",
    "masks.overlap.launch",
    OverlapCall,
    kept=("coefficients",),
    without=("gradient of mask",),
    reference=overlap_reference,
    samples=overlap_samples,
    docs=DOCS,
)
