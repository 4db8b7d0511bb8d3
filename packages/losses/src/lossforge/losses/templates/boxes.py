"""What the losses of pairs of boxes share: the checks of their arguments, and the call."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.losses.base import checks
from lossforge.losses.base.options import CornerOptions, WeightedOptions, broadcast_weight, check_options, checked_call
from lossforge.losses.base.record import SCALAR, SETTINGS, CheckedCall, Keeping, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, corners, counted, reduced_call
from lossforge.losses.templates.plain_forms.infinite import with_call

FORMATS = ("xyxy", "cxcywh")


def corner_loss(
    formula: str, boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float, options: CornerOptions, *hyper: float
) -> CheckedCall[BoxesCall]:
    """Check a loss of how boxes overlap, which bounds its denominators by eps. hyper: what its formula takes after eps."""
    if options.get("validate") is None:
        options["validate"] = checks.VALIDATE
    numbers = [checks.number("eps", eps, 0.0), *hyper]
    return box_loss(BoxesCall(formula, boxes1, boxes2, hyper=numbers, reduction=reduction), options)


def box_loss(call: BoxesCall, options: WeightedOptions | CornerOptions) -> CheckedCall[BoxesCall]:
    """Check arguments. call: with the function's arguments as they are."""
    boxes1, boxes2, format = call.boxes1, call.boxes2, options.get("format", "xyxy")
    checks.whole("boxes1", boxes1)
    checks.floating_beside("boxes2", boxes2, boxes1, "boxes1")
    shape = boxes1.shape
    checks.fits("boxes1", boxes1, boxes1.ndim > 0 and shape[-1] == 4, "have shape (..., 4)")
    checks.fits("boxes2", boxes2, boxes2.shape == shape, "have the shape of boxes1, {}", shape)
    checks.one_of("format", format, FORMATS)
    if options.get("validate"):
        for name, boxes in (("boxes1", boxes1), ("boxes2", boxes2)):
            checks.unflipped(name, boxes, format == "cxcywh")
    divisor = check_options(boxes1, call.reduction, options, CornerOptions, "boxes1")
    weight = broadcast_weight(options, boxes1, "boxes1", shape[:-1], "hold one weight a pair and broadcast to")
    return checked_call(call._replace(weight=weight, centered=format == "cxcywh"), {"empty": "zero", **options}, divisor)


def boxes_reference(a: BoxesCall) -> Tensor:
    """Compute a call in plain torch."""
    boxes1 = accurate(a.boxes1)

    def of_pairs(*boxes: Tensor) -> Tensor:
        values: Tensor = FORMULAS[a.loss].reference(*(corners(each) if a.centered else each for each in boxes), *a.hyper)
        return values

    values = counted(lambda *b: with_call(of_pairs, a, b, a.weight, -1), a.weight, [boxes1, a.boxes2.to(boxes1.dtype)], -1)
    return reduced_call(a, values, a.weight)


SPECIAL_PAIRS = {
    "equal": ([10, 20, 50, 80], [10, 20, 50, 80]),
    "two edges shared": ([0, 0, 10, 10], [0, 0, 20, 10]),
    "touching at an edge": ([0, 0, 10, 10], [10, 2, 20, 12]),
    "touching at a corner": ([0, 0, 10, 10], [10, 10, 20, 30]),
    "disjoint": ([0, 0, 10, 10], [40, 50, 60, 90]),
    "nested": ([0, 0, 60, 60], [20, 10, 30, 40]),
    "no width": ([5, 0, 5, 10], [0, 2, 10, 20]),
    "no height": ([0, 2, 10, 20], [2, 8, 8, 8]),
    "a point in a box": ([5, 5, 5, 5], [0, 0, 10, 10]),
    "equal points": ([3, 4, 3, 4], [3, 4, 3, 4]),
    "two points": ([1, 1, 1, 1], [3, 4, 3, 4]),
    "equal lines": ([5, 0, 5, 10], [5, 0, 5, 10]),
}
"""Where minima, maxima and quotients change their branch."""


def boxes_samples(make: Make) -> Iterator[Sample]:
    """Yield special pairs, and every weight and layout."""
    yield Sample("pairs", make.boxes(23), make.boxes(23))
    special1, special2 = (make.tensor(list(boxes)) for boxes in zip(*SPECIAL_PAIRS.values(), strict=True))
    yield Sample("special pairs", torch.cat([special1, make.boxes(17)]), torch.cat([special2, make.boxes(17)]))
    yield Sample("one pair", make.boxes(), make.boxes())
    yield Sample("several tiles", make.boxes(300), make.boxes(300))
    yield Sample("fractions of an image", make.boxes(23) / 256, make.boxes(23) / 256)
    scale = 300 if make.dtype == torch.float16 else 1e6
    yield Sample("huge coordinates", make.boxes(23) * scale, make.boxes(23) * scale)
    yield Sample("transposed", _fields_first(make.boxes(21)), make.boxes(21))
    yield Sample("both transposed", _fields_first(make.boxes(21)), _fields_first(make.boxes(21)))
    own, others = make.boxes(9), make.boxes(9)
    beside = torch.cat([others[:, :2], own, others[:, 2:]], 1)[:, 2:6]
    yield Sample("coordinates beside others", beside, make.boxes(9).repeat(1, 2)[:, :4])
    yield Sample("every other coordinate", make.boxes(9).repeat_interleave(2, 1)[:, ::2], make.boxes(9))
    yield Sample("expanded", make.boxes(6, 1).expand(6, 5, 4), make.boxes(5).expand(6, 5, 4))
    image = _fields_first(make.boxes(2, 3, 5).flatten(1, 2)).unflatten(1, (3, 5))
    yield Sample("image", image, make.boxes(2, 3, 5))
    yield Sample("anchors of an image", make.boxes(2, 3, 4, 5).permute(0, 2, 3, 1, 4), make.boxes(2, 4, 5, 3))
    yield Sample("four strides", make.boxes(4, 4, 4, 6)[::2, ::2, ::2, ::2], make.boxes(2, 2, 2, 3))
    yield Sample("weights", make.boxes(9), make.boxes(9), {"weight": make.unit(9)})
    yield Sample("a weight a row", make.boxes(3, 5), make.boxes(3, 5), {"weight": make.unit(3, 1)})
    yield Sample("weights, transposed", make.boxes(3, 5).transpose(0, 1), make.boxes(5, 3), {"weight": make.unit(3, 5).t()})
    yield Sample("normalizer", make.boxes(9), make.boxes(9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.boxes(9), make.boxes(9), {"normalizer": 5, "weight": make.unit(9)})


def _fields_first(boxes: Tensor) -> Tensor:
    """Return the same boxes (..., P, 4), stored as (..., 4, P)."""
    return boxes.mT.contiguous().mT


DOCS = TemplateDocs(
    arguments={
        "boxes1": (
            "(..., 4), of a floating dtype, in the units of an image or as fractions of it, of a size up to 1e18; gets a gradient. An area "
            "that float32 does not hold makes loss and gradient nan."
        ),
        "boxes2": "(..., 4), likewise; gets a gradient, too.",
        "reduction": '"none", "mean" over the pairs, or "sum".',
        "eps": "of at least 0; a denominator (an area, a squared length) below it is eps. So divisions stay finite.",
        "weight": (
            "one a pair, or what broadcasts to (...). A pair of weight 0 adds nothing, whatever it holds. A mean still divides by the "
            "number of pairs; see normalizer."
        ),
        "format": '"xyxy" (x1, y1, x2, y2), x1 < x2 and y1 < y2, or "cxcywh" (centre, width, height).',
        "empty": 'what a mean over no pairs gives: "zero", as in torchvision, or "nan".',
        "validate": (
            "raise a ValueError where a box is flipped, x2 < x1 or y2 < y1, which waits for the device. Default: the environment's "
            "LOSSFORGE_VALIDATE. Unchecked, such a box is an empty one. torch.compile leaves the check out."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" one value a pair, (...), in float32.',
    example=(
        "corners = torch.rand(2, 16, 2, requires_grad=True)\nboxes, targets = torch.cat([corners, corners + 0.5], -1)",
        "boxes, targets",
    ),
    targets="a box each, `xyxy` or `cxcywh`",
    keeping=Keeping({**SETTINGS, "empty": "zero", "format": "xyxy"}, forward="boxes1: Tensor, boxes2: Tensor"),
)
BOXES = Template(
    "boxes",
    "boxes.boxes",
    BoxesCall,
    differentiable=("boxes1", "boxes2"),
    variables=("x1", "y1", "x2", "y2", "u1", "v1", "u2", "v2"),
    slopes=8,
    reference=boxes_reference,
    samples=boxes_samples,
    docs=DOCS,
)
