"""What the losses of pairs of rotated boxes share: the checks of their arguments, and the call."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lossforge.kernels.boxes.calls import WIDTH, RotatedCall
from lossforge.losses.base import checks
from lossforge.losses.base.options import WeightedOptions, broadcast_weight, check_options, checked_call
from lossforge.losses.base.record import SCALAR, SETTINGS, CheckedCall, Keeping, Make, Sample, Template, TemplateDocs
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, counted, reduced_call
from lossforge.losses.templates.plain_forms.infinite import with_call


def rotated_loss(
    formula: str,
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: str,
    eps: float,
    options: WeightedOptions,
    *hyper: float,
    above_0: bool = False,
) -> CheckedCall[RotatedCall]:
    """Check arguments. hyper: what the formula takes after eps. above_0: whether eps must not be 0, because a root divides by its own."""
    checks.whole("boxes1", boxes1)
    checks.floating_beside("boxes2", boxes2, boxes1, "boxes1")
    shape = boxes1.shape
    checks.fits("boxes1", boxes1, boxes1.ndim > 0 and shape[-1] == WIDTH, "have shape (..., 5)")
    checks.fits("boxes2", boxes2, boxes2.shape == shape, "have the shape of boxes1, {}", shape)
    numbers = [checks.number("eps", eps, 0.0, exclusive=above_0), *hyper]
    divisor = check_options(boxes1, reduction, options, WeightedOptions, "boxes1")
    weight = broadcast_weight(options, boxes1, "boxes1", shape[:-1], "hold one weight a pair and broadcast to")
    call = RotatedCall(formula, boxes1, boxes2, weight, hyper=numbers, reduction=reduction)
    return checked_call(call, {"empty": "zero", **options}, divisor)


def rotated_reference(a: RotatedCall) -> Tensor:
    """Compute a call in plain torch."""
    boxes1 = accurate(a.boxes1)

    def of_pairs(*boxes: Tensor) -> Tensor:
        return FORMULAS[a.loss].reference(*boxes, *a.hyper)

    values = counted(lambda *b: with_call(of_pairs, a, b, a.weight, -1), a.weight, [boxes1, a.boxes2.to(boxes1.dtype)], -1)
    return reduced_call(a, values, a.weight)


SPECIAL_ROTATED = {
    "equal": ([30, 40, 20, 10, 0.5], [30, 40, 20, 10, 0.5]),
    "equal centres and angles": ([30, 40, 20, 10, 0.5], [30, 40, 28, 6, 0.5]),
    "a square and a turned one": ([30, 40, 20, 20, 0.25], [33, 41, 16, 16, 1.0]),
    "wide and tall": ([30, 40, 20, 10, 0.0], [32, 41, 10, 21, 0.1]),
    "nested": ([30, 40, 40, 40, 0.5], [31, 39, 6, 4, 2.0]),
    "disjoint": ([30, 40, 10, 10, 0.5], [90, 20, 12, 14, -0.5]),
    "angles beyond a turn": ([30, 40, 20, 10, 7.0], [31, 42, 22, 12, -5.5]),
    "a negative side": ([30, 40, -20, 10, 0.5], [33, 41, 22, 9, 0.75]),
}
"""Where formulas change their branch, and boxes that are written in another way."""


def _rotated(make: Make, *shape: int) -> Tensor:
    """Return rotated boxes of which many overlap: sides of 1 to 61, angles within a half turn."""
    low_high = make.boxes(*shape).float()
    angle = (make.unit(*shape).float() - 0.5) * math.pi
    sides = low_high[..., 2:] - low_high[..., :2]
    boxes = torch.cat([(low_high[..., :2] + low_high[..., 2:]) / 2, sides, angle.unsqueeze(-1)], -1)
    return boxes.to(make.dtype)


def _scaled(boxes: Tensor, by: float) -> Tensor:
    return torch.cat([boxes[..., :4] * by, boxes[..., 4:]], -1)


def rotated_samples(make: Make) -> Iterator[Sample]:
    """Yield special pairs, and every weight and layout."""

    def some(*shape: int) -> Tensor:
        return _rotated(make, *shape)

    yield Sample("pairs", some(23), some(23))
    special1, special2 = (make.tensor(list(boxes)) for boxes in zip(*SPECIAL_ROTATED.values(), strict=True))
    yield Sample("special pairs", torch.cat([special1, some(17)]), torch.cat([special2, some(17)]))
    one = some()
    yield Sample("one pair", one, one + make.tensor([2, -3, 4, 1, 0.25]))
    yield Sample("several tiles", some(300), some(300))
    yield Sample("fractions of an image", _scaled(some(23), 1 / 256), _scaled(some(23), 1 / 256))
    yield Sample("huge coordinates", _scaled(some(23), 300), _scaled(some(23), 300))
    yield Sample("numbers first", some(21).mT.contiguous().mT, some(21))
    yield Sample("every other number", some(9).repeat_interleave(2, 1)[:, ::2], some(9).repeat(1, 2)[:, :5])
    yield Sample("anchors of an image", some(2, 3, 4, 5).permute(0, 2, 3, 1, 4), some(2, 4, 5, 3))
    yield Sample("four strides", some(4, 4, 4, 6)[::2, ::2, ::2, ::2], some(2, 2, 2, 3))
    yield Sample("a weight a row, transposed", some(3, 5).transpose(0, 1), some(5, 3), {"weight": make.unit(5, 1)})
    yield Sample("normalizer", some(9), some(9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", some(9), some(9), {"normalizer": 5, "weight": make.unit(9)})


DOCS = TemplateDocs(
    arguments={
        "boxes1": (
            "(..., 5), of a floating dtype: centre x and y, width, height, and the angle in radians by which the box is turned from the x "
            "axis to the y axis; gets a gradient. A negative side counts as its absolute value. Of a size up to 1e18, as an area beyond "
            "float32 makes loss and gradient nan."
        ),
        "boxes2": "(..., 5), as boxes1; gets a gradient, too.",
        "reduction": '"none", "mean" over the pairs, or "sum".',
        "eps": (
            "above 0; a side below it is eps, and below it the root that the loss takes is a line. So gradients stay finite, and "
            "equal boxes have none."
        ),
        "weight": (
            "one a pair, or what broadcasts to (...). A pair of weight 0 adds nothing, whatever it holds. A mean still divides by the "
            "number of pairs; see normalizer."
        ),
        "empty": 'what a mean over no pairs gives: "zero", as the losses of other boxes, or "nan".',
    },
    returns=f'{SCALAR}; with reduction "none" one value a pair, (...), in float32.',
    example=(
        "boxes, targets = torch.rand(2, 16, 5) + 0.5\nboxes.requires_grad_()",
        "boxes, targets",
    ),
    targets="a rotated box each, (cx, cy, w, h, angle)",
    keeping=Keeping({**SETTINGS, "empty": "zero"}, forward="boxes1: Tensor, boxes2: Tensor"),
)
ROTATED = Template(
    "rotated",
    "boxes.rotated",
    RotatedCall,
    differentiable=("boxes1", "boxes2"),
    variables=("x1", "y1", "w1", "h1", "t1", "x2", "y2", "w2", "h2", "t2"),
    slopes=10,
    reference=rotated_reference,
    samples=rotated_samples,
    docs=DOCS,
)
