"""What losses of two or three tensors share, element by element: the checks of their arguments, and the call."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.elements.calls import PointwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.broadcast import of_one_shape
from lossforge.losses.base.options import MaskedWeightedOptions, broadcast_weight, check_options, checked_call, mask_of_elements
from lossforge.losses.base.record import SCALAR, CheckedCall, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, counted, product_with_mask, reduced_call
from lossforge.losses.templates.plain_forms.infinite import with_call


def pointwise_loss(
    formula: str, tensors: dict[str, Any], hyper: list[float], reduction: str, options: MaskedWeightedOptions, labels: str = ""
) -> CheckedCall[PointwiseCall]:
    """Check arguments.

    Args:
        formula: its name.
        tensors: by the function's names for them, in its order.
        labels: the name of a tensor of labels, in which the loss has no gradient.
    """
    (first, x), *others = tensors.items()
    checks.whole(first, x)
    for name, t in others:
        tensors[name] = beside(name, t, x, first)
    if labels:
        checks.without_gradient(labels, tensors[labels])
    divisor = check_options(x, reduction, options, MaskedWeightedOptions, first)
    x, y, *z = of_one_shape(tensors)
    weight = broadcast_weight(options, x, first, x.shape, f"broadcast to the shape of {first},")
    call = PointwiseCall(formula, x, y, z[0] if z else None, weight=weight, hyper=hyper, reduction=reduction)
    if options.get("mask") is not None:
        call = call._replace(mask=mask_of_elements(options["mask"], x, first))
    return checked_call(call, options, divisor)


def beside(name: str, value: object, x: Tensor, of: str) -> Tensor:
    """Return a tensor on the device of x, of a floating dtype: bools and integers become numbers."""
    t = checks.tensor(name, value)
    if not t.is_floating_point() and not t.is_complex():
        t = t.to(x.dtype if t.dtype == torch.bool else torch.promote_types(x.dtype, torch.float32))
    checks.floating_beside(name, t, x, of)
    return t


def pointwise_reference(a: PointwiseCall) -> Tensor:
    """Compute a call in plain torch."""
    x = accurate(a.x)
    others = [t.to(x.dtype) for t in (a.y, a.z) if t is not None]
    weight = product_with_mask(a.weight, a.mask)

    def of_elements(*tensors: Tensor) -> Tensor:
        return with_call(lambda *each: FORMULAS[a.loss].reference(*each, *a.hyper), a, tensors, weight)

    values = counted(lambda *tensors: counted(of_elements, a.weight, tensors), a.mask, [x, *others])
    count = a.mask.expand(x.shape).sum(dtype=x.dtype) if a.mask is not None and a.counted else None
    result = reduced_call(a, values, weight, count)
    return result.to(a.x.dtype) if a.reduction == "none" else result


def pointwise_samples(make: Make) -> Iterator[Sample]:
    """Yield every weight and layout."""

    def sample(name: str, x: Tensor, y: Tensor, change: Callable[[Tensor], Tensor] = lambda t: t, **kwargs: Any) -> Sample:
        """Return a call with the third tensor, where the loss takes three."""
        third = {make.third: change(make.unit(*x.shape) + 0.1)} if make.third else {}
        return Sample(name, x, y, {**third, **kwargs})

    yield sample("dense", make.logits(7, 33), make.unit(7, 33) * 4)
    yield sample("one dimension", make.logits(1037), make.unit(1037) * 4)
    yield sample("no dimension", make.logits(), make.unit())
    yield sample("transposed", make.logits(6, 5).t(), make.unit(5, 6) * 4)
    yield sample("all transposed", make.logits(6, 6).t(), make.unit(6, 6).t(), torch.t)
    yield sample("sliced", make.logits(6, 10)[:, ::2], make.unit(6, 5))
    yield sample("expanded", make.logits(6, 1).expand(6, 5), make.unit(1, 5).expand(6, 5))
    yield sample("channels last", make.logits(2, 3, 4, 5).to(memory_format=torch.channels_last), make.unit(2, 3, 4, 5))
    yield sample("four strides", make.logits(3, 4, 4, 6)[:, ::2, :, ::2].permute(3, 0, 2, 1)[:, :, 1:3], make.unit(3, 3, 2, 2))
    yield sample("signs", make.logits(9, 7), 2 * make.index(0, 2, 9, 7) - 1)
    yield sample("weights", make.logits(9, 7), make.unit(9, 7), weight=make.unit(9, 1))
    yield sample("normalizer", make.logits(9, 7), make.unit(9, 7), normalizer=torch.tensor(3.0, device=make.device))
    yield sample("normalizer, number", make.logits(9, 7), make.unit(9, 7), normalizer=5, weight=make.unit(7))


DOCS = TemplateDocs(
    arguments={
        "input": "of any shape and floating dtype; gets a gradient.",
        "target": "in the shape of input, of any real dtype; gets a gradient where it asks for one.",
        "weight": (
            "broadcasts to input, a factor of each element's loss. An element of weight 0 adds nothing, whatever it holds. A mean still "
            "divides by the number of elements."
        ),
        "mask": (
            "which elements count, bool, or floats as weights; broadcasts to input. A mean divides by the elements that count, or by the "
            "sum of the mask; what the others hold reaches neither value nor gradient."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" a tensor in the shape and dtype of input.',
    example=("x = torch.randn(8, 10, requires_grad=True)", "x, torch.randn(8, 10).sign()"),
    targets="dense",
)
POINTWISE = Template(
    "pointwise",
    "elements.pointwise",
    PointwiseCall,
    kept=("divisor",),
    differentiable=("x", "y", "z"),
    reference=pointwise_reference,
    samples=pointwise_samples,
    docs=DOCS,
)
