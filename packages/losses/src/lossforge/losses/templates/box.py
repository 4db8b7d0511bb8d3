"""What the losses of pairs of boxes share: the checks of their arguments, and the call."""

from torch import Tensor

from lossforge.kernels.call import BoxCall
from lossforge.losses import checks
from lossforge.losses.autograd import value
from lossforge.losses.templates.options import BoxOptions, CornerOptions, check_options, with_options

FORMATS = ("xyxy", "cxcywh")


def corner_loss(formula: str, boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float, options: CornerOptions) -> Tensor:
    """Compute a loss of how boxes overlap, which bounds its denominators by eps."""
    if options.get("validate") is None:
        options["validate"] = checks.VALIDATE
    return box_loss(BoxCall(formula, boxes1, boxes2, hyper=[checks.number("eps", eps, 0.0)], reduction=reduction), options)


def box_loss(call: BoxCall, options: BoxOptions | CornerOptions) -> Tensor:
    """Check arguments and compute. call: with the function's arguments as they are."""
    boxes1, boxes2, weight, format = call.boxes1, call.boxes2, options.get("weight"), options.get("format", "xyxy")
    checks.whole("boxes1", boxes1)
    checks.floating_beside("boxes2", boxes2, boxes1, "boxes1")
    shape = boxes1.shape
    if not shape or shape[-1] != 4:
        raise ValueError(f"boxes1 must have shape (..., 4), got {tuple(shape)}")
    if boxes2.shape != shape:
        raise ValueError(f"boxes2 must have the shape of boxes1, {tuple(shape)}, got {tuple(boxes2.shape)}")
    checks.one_of("format", format, FORMATS)
    if options.get("validate"):
        for name, boxes in (("boxes1", boxes1), ("boxes2", boxes2)):
            checks.unflipped(name, boxes, format == "cxcywh")
    divisor = check_options(boxes1, call.reduction, options, CornerOptions, "boxes1")
    if weight is not None:
        checks.floating_beside("weight", weight, boxes1, "boxes1")
        if not checks.expands(weight, shape[:-1]):
            raise ValueError(f"weight must hold one weight a pair and broadcast to {tuple(shape[:-1])}, got {tuple(weight.shape)}")
    given: CornerOptions = {"empty": "zero", **options}
    call = call._replace(weight=weight, hyper=[1.0 * h for h in call.hyper], centered=format == "cxcywh")
    return value(with_options(call, given, divisor), given)
