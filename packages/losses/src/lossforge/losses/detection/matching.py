"""One query for each box, as DETR has it: the costs of all pairs of a batch in one launch, and the Hungarian method on the host.

The cost of the class is Deformable DETR's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge import kernels
from lossforge.losses import checks
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.namespace import OPERATORS
from lossforge.losses.operators import define, launched
from lossforge.losses.option_types import BoxFormat
from lossforge.losses.reference import accurate, corners
from lossforge.losses.state import KERNEL_DTYPES, kernels_apply
from lossforge.losses.templates.boxes import FORMATS

__all__ = ["hungarian_match", "matching_cost"]


@checks.named
def matching_cost(
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    target_boxes: Tensor,
    counts: Sequence[int] | Tensor,
    *,
    cost_class: float = 2.0,
    cost_bbox: float = 5.0,
    cost_giou: float = 2.0,
    alpha: float = 0.25,
    gamma: float = 2.0,
    format: BoxFormat = "cxcywh",
) -> Tensor:
    """Cost of giving each box to each query of its image (Carion et al. 2020, arXiv 2005.12872), as Deformable DETR and DINO have it.

    C = c₁ [α (1 - p)^γ (-ln p) - (1 - α) p^γ (-ln(1 - p))] + c₂ Σ |b - b̂| - c₃ GIoU with p = σ(x) of the box's class. One launch computes
    the pairs of a whole batch, and no pair of one image's query with another's box.

    DETR itself has a softmax, and -p of the box's class in place of the focal term: other queries are then matched.

    The layers of a decoder can share that launch, and the copy of `hungarian_match`: stack their predictions along the batch, and repeat
    labels, boxes and counts.

    Args:
        logits: (B, Q, C), before the sigmoid, of any floating dtype and strides.
        boxes: (B, Q, 4), predicted.
        labels: (T,), the classes of all images' boxes one after the other, of any integer dtype. On CPU a class that does not exist raises.
            On CUDA its costs are nan.
        target_boxes: (T, 4), the boxes.
        counts: how many boxes each image has: B numbers, or a tensor (B,) on the device of the logits, whose sum is not checked.
        cost_class: c₁, the weight of the class.
        cost_bbox: c₂, the weight of the distance, of boxes as `format` has them.
        cost_giou: c₃, the weight of the overlap.
        alpha: α in [0, 1], of focal loss.
        gamma: γ of at least 0, of focal loss.
        format: of all boxes: "cxcywh" (centre, width, height), or "xyxy". DETR's are fractions of the image.

    Returns:
        (Q, T), float32 (float64 for float64), without gradient: column t has the costs of box t for the queries of its image.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hungarian_match, matching_cost
        >>> logits, boxes, counts = torch.randn(2, 100, 7), torch.rand(2, 100, 4), [3, 1]
        >>> cost = matching_cost(logits, boxes, torch.tensor([0, 4, 6, 2]), torch.rand(4, 4), counts)
        >>> (queries, targets), _ = hungarian_match(cost, counts)
    """
    checks.whole("logits", logits)
    for name, t in (("boxes", boxes), ("target_boxes", target_boxes)):
        checks.floating_beside(name, t, logits, "logits")
    checks.integer("labels", labels)
    checks.beside("labels", labels, logits, "logits")
    checks.one_of("format", format, FORMATS)
    checks.fits("logits", logits, logits.ndim == 3 and logits.shape[2] > 0, "have shape (B, Q, C)")
    images, queries, classes = logits.shape
    checks.fits("boxes", boxes, boxes.shape == (images, queries, 4), "have shape {}", (images, queries, 4))
    checks.fits("target_boxes", target_boxes, target_boxes.ndim == 2 and target_boxes.shape[1] == 4, "have shape (T, 4)")
    checks.fits("labels", labels, labels.shape == target_boxes.shape[:1], "have shape ({},)", len(target_boxes))
    if checks.known(labels) and labels.device.type == "cpu":
        checks.in_range("labels", labels, 0, classes, None)
    of_image = _counts(counts, images, len(target_boxes), logits)
    numbers = [checks.number(name, v) for name, v in (("cost_class", cost_class), ("cost_bbox", cost_bbox), ("cost_giou", cost_giou))]
    numbers += [checks.number("alpha", alpha, 0.0, 1.0), checks.number("gamma", gamma, 0.0)]
    tensors = [t.detach().resolve_neg() for t in (logits, boxes, labels, target_boxes)]
    arguments: tuple[Any, ...] = (*tensors, of_image, *numbers, format == "cxcywh")
    narrow = boxes.dtype in KERNEL_DTYPES and target_boxes.dtype in KERNEL_DTYPES
    if narrow and kernels_apply(tensors[0]) and len(target_boxes) and not any(isinstance(n, Tensor) for n in numbers):
        found: Tensor = OPERATORS.matching_cost(*arguments)
        return found
    return matching_cost_reference(*arguments)


def _counts(counts: Sequence[int] | Tensor, images: int, total: int, x: Tensor) -> Tensor:
    """Return how many boxes each image has, on the device, without a wait for it."""
    if isinstance(counts, Tensor):
        checks.integer("counts", counts)
        checks.beside("counts", counts, x, "logits")
        checks.fits("counts", counts, counts.shape == (images,), "have shape ({},)", images)
        return counts
    numbers = [checks.whole_number("counts", n) for n in counts]
    if len(numbers) != images or sum(numbers) != total or min(numbers, default=0) < 0:
        raise ValueError(f"counts must hold {images} numbers of at least 0 with the sum {total}, got {numbers}")
    made = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    return made.pin_memory().to(x.device, non_blocking=True) if x.is_cuda else made.to(x.device)


def matching_cost_reference(
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    targets: Tensor,
    counts: Tensor,
    cost_class: float,
    cost_bbox: float,
    cost_giou: float,
    alpha: float,
    gamma: float,
    centered: bool,
) -> Tensor:
    """Compute the costs in plain torch."""
    t = torch.arange(len(targets), device=targets.device)
    image = (counts.cumsum(0) <= t.unsqueeze(1)).sum(1)
    exists = (image < logits.shape[0]) & (labels >= 0) & (labels < logits.shape[2])
    image, label = torch.where(exists, image, 0), torch.where(exists, labels.long(), 0)
    x = accurate(logits)[image, :, label].T
    positive = alpha * (-x).sigmoid() ** gamma * -F.logsigmoid(x)
    value = cost_class * (positive - (1 - alpha) * x.sigmoid() ** gamma * -F.logsigmoid(-x))
    own, other = accurate(boxes)[image].transpose(0, 1), accurate(targets)
    value = value + cost_bbox * (own - other).abs().sum(-1)
    if centered:
        own, other = corners(own), corners(other)
    value = value + cost_giou * (FORMULAS["giou"].reference(own, other.expand_as(own), 1e-7) - 1)
    return torch.where(exists, value, torch.nan)


@checks.named
def hungarian_match(cost: Tensor, counts: Sequence[int] | Tensor) -> list[tuple[Tensor, Tensor]]:
    """Match queries and boxes of each image at the least total cost, by scipy.optimize.linear_sum_assignment.

    The costs of the whole batch are copied to the host once, which waits for the device; counts as a tensor on the device are copied, too.
    A cost that is nan or infinite counts as larger than any other, so that a step with such predictions does not end the training.

    Args:
        cost: (Q, T), of matching_cost or your own, of a floating dtype.
        counts: how many boxes each image has; best as numbers of the host.

    Returns:
        of each image the queries and the boxes that belong together, int64 on the CPU, by ascending queries; min(Q, boxes) of each. Boxes
        are numbered within their image.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        ModuleNotFoundError: scipy is not installed.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hungarian_match
        >>> [(queries, targets)] = hungarian_match(torch.tensor([[3.0, 1.0], [2.0, 4.0], [9.0, 9.0]]), [2])
        >>> queries.tolist(), targets.tolist()
        ([0, 1], [1, 0])
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ModuleNotFoundError:
        raise ModuleNotFoundError("hungarian_match needs scipy, which is not installed: pip install scipy", name="scipy") from None
    checks.whole("cost", cost)
    checks.fits("cost", cost, cost.ndim == 2, "have shape (Q, T)")
    numbers = [checks.whole_number("counts", n) for n in (counts.tolist() if isinstance(counts, Tensor) else counts)]
    if sum(numbers) != cost.shape[1] or min(numbers, default=0) < 0:
        raise ValueError(f"counts must hold numbers of at least 0 with the sum {cost.shape[1]}, got {numbers}")
    values = cost.detach().to("cpu", torch.float64 if cost.dtype == torch.float64 else torch.float32).double()
    found = [linear_sum_assignment(_comparable(part).numpy()) for part in values.split(numbers, 1)]
    return [(torch.from_numpy(queries).long(), torch.from_numpy(targets).long()) for queries, targets in found]


def _comparable(cost: Tensor) -> Tensor:
    """Replace costs that are nan or infinite, which scipy refuses, by one that is larger than what all others could save together."""
    usable = cost.isfinite()
    if usable.all():
        return cost
    least, most = (cost[usable].min(), cost[usable].max()) if usable.any() else (cost.new_zeros(()), cost.new_zeros(()))
    return torch.where(usable, cost, most + most.abs() + min(cost.shape) * (most - least) + 1.0)


def _cost(*arguments: Any) -> Tensor:
    logits, boxes, labels, targets, counts, *numbers, centered = arguments
    tensors = logits, boxes, labels.contiguous(), targets, counts.contiguous()
    found: tuple[Tensor] = launched("matching", "costs", tensors, kernels.of_folder("matching").Weights(*numbers), centered)
    return found[0]


def _fake(logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty((logits.shape[1], targets.shape[0]), dtype=torch.float32)


define(
    "matching_cost(Tensor logits, Tensor boxes, Tensor labels, Tensor targets, Tensor counts, float cost_class, float cost_bbox, "
    "float cost_giou, float alpha, float gamma, bool centered) -> Tensor",
    _cost,
    _fake,
)
