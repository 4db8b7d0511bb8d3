"""What losses of rows of vectors share: the checks of their arguments, and the call."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.features.calls import VectorsCall
from lossforge.losses.base import checks
from lossforge.losses.base.broadcast import of_one_shape
from lossforge.losses.base.options import WeightedOptions, broadcast_weight, check_options, checked_call
from lossforge.losses.base.record import SCALAR, CheckedCall, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, counted, reduced_call
from lossforge.losses.templates.plain_forms.infinite import with_call
from lossforge.losses.templates.pointwise import beside


def vectors_loss(
    formula: str, tensors: dict[str, Any], hyper: list[float], reduction: str, options: WeightedOptions, label: object = None
) -> CheckedCall[VectorsCall]:
    """Check arguments.

    Args:
        formula: its name.
        tensors: two or three of vectors, by the function's names for them, in its order.
        label: "target", one a row, in which the loss has no gradient.
    """
    (first, x), *others = tensors.items()
    checks.whole(first, x)
    for name, t in others:
        checks.floating_beside(name, t, x, first)
    checks.same_dimensions(tensors)
    checks.fits(first, x, x.ndim > 0 and x.shape[-1] > 0, "have shape (..., D) with at least one element a vector")
    divisor = check_options(x, reduction, options, WeightedOptions, first)
    x, y, *z = of_one_shape(tensors)
    rows = x.shape[:-1]
    labels: Tensor | None = None
    if label is not None:
        labels = beside("target", label, x, first)
        checks.without_gradient("target", labels)
        checks.fits("target", labels, labels.shape == rows, "have one label a row, shape {}", rows)
    weight = broadcast_weight(options, x, first, rows, "hold one weight a row and broadcast to")
    call = VectorsCall(formula, x, y, z[0] if z else None, labels, weight, hyper=hyper, reduction=reduction)
    return checked_call(call, options, divisor)


def vectors_reference(a: VectorsCall) -> Tensor:
    """Compute a call in plain torch."""
    x = accurate(a.x)
    others = [t.to(x.dtype) for t in (a.y, a.z) if t is not None]
    label = [] if a.label is None else [a.label.to(x.dtype)]

    def of_rows(*vectors: Tensor) -> Tensor:
        return with_call(lambda *tensors: FORMULAS[a.loss].reference(*tensors, *a.hyper), a, [*vectors, *label], a.weight, -1)

    values = counted(of_rows, a.weight, [x, *others], -1)
    return reduced_call(a, values, a.weight)


def vectors_samples(make: Make) -> Iterator[Sample]:
    """Yield every weight and layout."""

    def sample(name: str, x: Tensor, y: Tensor, scale: float = 1.0, **kwargs: Any) -> Sample:
        """Return a call with labels of the rows, or with third vectors `scale` as large as the others' logits."""
        third = 2 * make.index(0, 2, *x.shape[:-1]) - 1 if make.third == "target" else make.logits(*x.shape) * scale
        return Sample(name, x, y, {make.third: third, **kwargs})

    yield sample("dense", make.logits(9, 7), make.logits(9, 7))
    yield sample("one vector", make.logits(37), make.logits(37))
    yield sample("two elements", make.logits(5, 2), make.logits(5, 2))
    yield sample("several tiles", make.logits(300, 16), make.logits(300, 16))
    yield sample("long vectors", make.logits(3, 5001) / 16, make.logits(3, 5001) / 16, 1 / 16)
    yield sample("transposed", make.logits(11, 5).t(), make.logits(5, 11))
    yield sample("all transposed", make.logits(6, 5).t(), make.logits(6, 5).t())
    yield sample("every other element", make.logits(5, 20)[:, ::2], make.logits(5, 10))
    yield sample("elements beside others", make.logits(5, 20)[:, 3:13], make.logits(5, 10))
    yield sample("expanded", make.logits(1, 6).expand(5, 6), make.logits(5, 6))
    yield sample("four dimensions", make.logits(2, 3, 4, 6), make.logits(2, 4, 3, 6).transpose(1, 2))
    yield sample("four strides", make.logits(4, 4, 4, 6, 8)[::2, ::2, ::2, ::2], make.logits(2, 2, 2, 3, 8))
    yield sample("weights", make.logits(9, 7), make.logits(9, 7), weight=make.unit(9))
    yield sample("a weight a row", make.logits(5, 4, 6), make.logits(5, 4, 6), weight=make.unit(5, 1))
    yield sample("normalizer", make.logits(9, 7), make.logits(9, 7), normalizer=torch.tensor(3.0, device=make.device))
    yield sample("normalizer, number", make.logits(9, 7), make.logits(9, 7), normalizer=5, weight=make.unit(9))


DOCS = TemplateDocs(
    arguments={
        "target": "1 or -1 for each row, (...), of any real dtype; has no gradient.",
        "weight": "one a row, or what broadcasts to (...). A row of weight 0 adds nothing. A mean still divides by the number of rows.",
        "reduction": '"mean" over the rows, "sum", or "none" for one value a row.',
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, (...), in float32.',
    targets="1 or -1 a row",
)
VECTORS = Template(
    "vectors",
    "features.vectors",
    VectorsCall,
    differentiable=("x", "y", "z"),
    reference=vectors_reference,
    samples=vectors_samples,
    docs=DOCS,
)
