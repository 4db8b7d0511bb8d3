"""What the losses of sorted errors of regions share: the checks of their arguments, and the call."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lossforge.kernels.masks.calls import LovaszCall
from lossforge.losses.base import checks
from lossforge.losses.base.options import MaskedOptions, check_options, checked_call, mask_of_pixels
from lossforge.losses.base.record import SCALAR, CheckedCall, Keeping, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, reduced
from lossforge.losses.templates.plain_forms.infinite import with_call


def lovasz_loss(call: LovaszCall, classes: Sequence[int] | str, options: MaskedOptions) -> CheckedCall[LovaszCall]:
    """Check arguments. call: with the function's arguments as they are; of logits without classes, x is (N, 1, d…)."""
    x, target = call.x, call.target
    divisor = check_options(x, call.reduction, options, MaskedOptions)
    ignore_index = checks.whole_number("ignore_index", call.ignore_index)
    channels, rows = x.shape[1], (x.shape[0], *x.shape[2:])
    if isinstance(target, Tensor) and target.ndim == x.ndim and target.shape[1] == 1:
        target = target.squeeze(1)
    if isinstance(target, Tensor) and target.dtype == torch.bool:
        target = target.to(torch.uint8)
    if (mask := options.get("mask")) is not None:
        counts = mask_of_pixels(mask, x, False)
        if counts.dtype != torch.bool:
            raise TypeError(f"mask must be of dtype bool, because a pixel among the sorted errors counts or does not, got {counts.dtype}")
        if isinstance(target, Tensor) and not target.is_floating_point() and target.shape == rows:
            target = torch.where(counts[:, 0], target.long(), ignore_index)
    allowed = checks.Allowed(0, channels + call.first(), ignore_index, options.get("validate"))
    target = checks.indices("target", target, x, allowed, rows)
    if x.ndim == 2 and not call.per_image:  # rows without pixels are the pixels of one image
        x, target = x.t().unsqueeze(0), target.unsqueeze(0)
    else:
        x, target = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2), target.flatten(1) if target.ndim > 1 else target.unsqueeze(1)
    listed = _listed(classes, channels, x) if isinstance(classes, Collection) and not isinstance(classes, str) else None
    if listed is None and classes not in ("present", "all"):
        raise ValueError(f'classes must be "present", "all", or a list of class indices, got {classes!r}')
    call = call._replace(x=x, target=target, included=listed, ignore_index=ignore_index)
    return checked_call(call._replace(present=classes == "present"), options, divisor)


def _listed(classes: Sequence[int], channels: int, x: Tensor) -> Tensor:
    """Return how often each class is listed, made on the device alone."""
    often = torch.zeros(channels, device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if len(checks.several("classes", classes)) == 0:
        raise ValueError('classes must be "present", "all", or a list of at least one class index, got an empty list')
    for each in classes:
        c = checks.whole_number("classes", each)
        if not 0 <= c < channels:
            raise ValueError(f"classes must be of the {channels} of input, 0 to {channels - 1}, got {c}")
        often[c] += 1
    return often


def lovasz_reference(a: LovaszCall) -> Tensor:
    """Compute a call in plain torch."""
    x, target = accurate(a.x), a.target.long().unsqueeze(1)
    channels = x.shape[1]
    counts = target != a.ignore_index
    y = counts & (target == torch.arange(channels, device=x.device).view(1, -1, 1) + a.first())
    invalid = counts & ((target < 0) | (target >= channels + a.first()))
    x = torch.where(counts, x, 0.0)

    def of_regions(t: Tensor) -> Tensor:
        """Return (images or 1, channels, pixels of a region)."""
        return t if a.per_image else t.transpose(0, 1).reshape(1, channels, -1)

    def losses(x: Tensor) -> Tensor:
        """Return the regions' losses."""
        errors = FORMULAS[a.loss].reference(x.softmax(1) if a.softmax else x, y.to(x.dtype))
        errors = torch.where(counts, errors * torch.where(invalid, torch.nan, 1.0).to(x.dtype), -1.0)
        ordered, order = of_regions(errors).sort(dim=2, descending=True, stable=True)
        own = of_regions(y).gather(2, order)
        total = own.sum(2, keepdim=True)
        rest = total - own.cumsum(2)
        union = (rest + torch.arange(1, own.shape[2] + 1, device=x.device)).to(x.dtype)
        others = torch.where(union == 1, 1.0, rest / (union - 1).clamp(min=1))
        slopes = torch.where(own, 1.0, others) / union
        values = (torch.where(ordered <= 0, 0.0, ordered) * slopes).sum(2)
        often = (total.squeeze(2) > 0).to(x.dtype) if a.present else torch.ones_like(values)
        often = often if a.included is None else a.included.to(x.dtype).expand_as(values)
        values = torch.where(often == 0, 0.0, values) * often
        return values / (often.sum(1, keepdim=True).clamp(min=1) * max(1, len(values))) if a.reduction == "mean" else values

    values = losses(x) if a.softmax else with_call(losses, a, [x])
    result = reduced(values, a.loss_scale, a.normalizer, a.reduction, a.empty_is_zero)
    if a.reduction != "none":
        return result
    result = result if a.softmax else result.squeeze(1)
    return result if a.per_image else result.squeeze(0)


def lovasz_samples(make: Make) -> Iterator[Sample]:
    """Yield every target, option and layout."""
    index = make.index(0, 5, 2, 3, 4)
    index[0, 1] = -100
    yield Sample("class index", make.logits(2, 5, 3, 4), index)
    yield Sample("class index, uint8, one channel", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 1, 3, 4).byte(), {"ignore_index": 3})
    yield Sample("per image", make.logits(2, 5, 3, 4), index, {"per_image": True})
    yield Sample("absent classes", make.logits(2, 5, 3, 4), index.clamp(max=2))
    yield Sample("all classes", make.logits(2, 5, 3, 4), index.clamp(max=2), {"classes": "all"})
    yield Sample("listed classes", make.logits(2, 5, 3, 4), index.clamp(max=2), {"classes": [0, 3, 0]})
    yield Sample("no pixels", make.logits(7, 5), make.index(0, 5, 7))
    yield Sample("no pixels, per image", make.logits(3, 5), make.index(0, 5, 3), {"per_image": True})
    yield Sample("volume", make.logits(2, 3, 2, 3, 4), make.index(0, 3, 2, 2, 3, 4))
    yield Sample("several chunks", make.logits(1, 3, 50, 50), make.index(0, 3, 1, 50, 50))
    yield Sample("many classes", make.logits(2, 70, 5, 4), make.index(0, 70, 2, 5, 4))
    yield Sample("channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), index)
    yield Sample("cropped", make.logits(2, 5, 5, 6)[:, 1:4, 1:4, 2:5], make.index(0, 3, 2, 4, 4)[:, 1:, 1:])


def hinge_samples(make: Make) -> Iterator[Sample]:
    """Yield every target, option and layout."""
    mask = make.index(0, 2, 2, 3, 4)
    mask[0, 1] = -100
    yield Sample("mask", make.logits(2, 3, 4), mask)
    void = mask.clamp(min=-1).byte()
    yield Sample("mask, per image", make.logits(2, 3, 4), void, {"ignore_index": 255, "per_image": True})
    yield Sample("mask, one channel", make.logits(2, 1, 3, 4), make.index(0, 2, 2, 3, 4).bool())
    yield Sample("empty masks", make.logits(2, 3, 4), make.index(0, 1, 2, 3, 4), {"per_image": True})
    yield Sample("several chunks", make.logits(1, 50, 50), make.index(0, 2, 1, 50, 50))
    yield Sample("transposed", make.logits(4, 6).t(), make.index(0, 2, 6, 4), {"per_image": True})


def _docs(input: str, target: str, each: str, example: tuple[str, str]) -> TemplateDocs:
    return TemplateDocs(
        arguments={
            "input": input,
            "target": target,
            "per_image": "a region is of one image, and the mean that of the images' losses; else of the whole batch.",
            "reduction": f'"mean", as the authors have it, "sum" over the regions that count, or "none": {each}.',
            "ignore_index": "pixels with this class index belong to no region and get gradient 0, whatever their logits are.",
            "mask": (
                "which pixels count, of dtype bool: (N, d…) or (N, 1, d…). Others belong to no region and get gradient 0, whatever they "
                "hold."
            ),
            "empty": (
                'what a normalizer of 0 gives: "nan", or "zero", with gradient 0. A mean over nothing is 0, as the authors\' and '
                "segmentation_models_pytorch's."
            ),
        },
        returns=f'{SCALAR}; with reduction "none" one value a region, in float32.',
        example=example,
        targets="class index a pixel",
        keeping=Keeping(quiet=("ignore_index",)),
    )


LOVASZ = Template(
    "lovasz",
    "masks.lovasz",
    LovaszCall,
    kept=("slopes", "weights"),
    reference=lovasz_reference,
    samples=lovasz_samples,
    docs=_docs(
        "logits (N, C, d…) with any number of spatial dimensions and at least two classes.",
        "class indices (N, d…) or (N, 1, d…) of any integer dtype.",
        "(C,), with per_image (N, C), 0 where a class does not count",
        ("maps = torch.randn(2, 5, 32, 32, requires_grad=True)", "maps, torch.randint(5, (2, 32, 32))"),
    ),
)
LOVASZ_MASKS = replace(
    LOVASZ,
    samples=hinge_samples,
    docs=_docs(
        "logits (N, d…) or (N, 1, d…) with any number of spatial dimensions.",
        "1 where a pixel is of the class, 0 where not, in the shape of input or without its channel; of any integer dtype or bool.",
        "(), with per_image (N,)",
        ("maps = torch.randn(2, 32, 32, requires_grad=True)", "maps, torch.randint(2, (2, 32, 32))"),
    ),
)
"""The template of masks of one class."""
