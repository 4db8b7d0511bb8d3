"""The loss of masks that are products of coefficients and prototypes, as YOLACT and YOLO's segmentation train."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.torch_internals import transformed
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import Reduction
from lossforge.losses.base.options import checked_reduction
from lossforge.losses.base.state import KERNEL_DTYPES, kernels_apply, without_autocast
from lossforge.losses.detection.counts import counts_on_device
from lossforge.losses.engine.operators import define_differentiable, launched
from lossforge.losses.segmentation.points import reduced_values, true_masks
from lossforge.losses.templates.plain_forms import accurate

__all__ = ["prototype_mask_loss"]

NO_MASK = -1
"""The target_index of a row without a mask."""


class Masks(NamedTuple):
    """What the operator takes of N masks beside coefficients and prototypes.

    Attributes:
        boxes: (N, 4).
        image: (N,), the image of each; the number of images for those beyond the last.
        target: true masks, or maps of integers where there is a label.
        target_index: (N,), the target of each mask, or NO_MASK.
        label: (N,), the number of each mask's pixels in its target; None: targets are masks.
        ends, order: for the operator alone; without an order each mask has a target.
    """

    boxes: Tensor
    image: Tensor
    target: Tensor
    target_index: Tensor
    label: Tensor | None
    ends: Tensor
    order: Tensor | None


@checks.named
def prototype_mask_loss(
    coefficients: Tensor,
    prototypes: Tensor,
    target: Tensor,
    boxes: Tensor,
    counts: Sequence[int] | Tensor,
    reduction: Reduction = "mean",
    *,
    target_index: Tensor | None = None,
    label: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Binary cross entropy of masks that are sums of prototypes, within their boxes, as YOLACT (arXiv 1904.02689) and ultralytics.

    L = 1/A Σ [y softplus(-x) + (1 - y) softplus(x)] with x = Σₖ cₖ prototypeₖ, over the pixels (column, row) with x₁ ≤ column < x₂ and
    y₁ ≤ row < y₂ of the mask's box, and A = (x₂ - x₁) (y₂ - y₁). A box without area has loss and gradient 0; one
    that is nan has loss nan and gradient 0.

    The masks' logits are never in memory: one launch computes them in the boxes, with the losses and the gradients of the coefficients;
    backward computes them again for the gradient of the prototypes. Both are the same bit for bit each time.

    Nothing waits for the device, but plain PyTorch for a `target_index`. Where the host does not know the number of masks, as with the
    anchors that an assigner chose, give all anchors of all images, and a `target_index` of -1 for those without an object: they cost
    next to nothing.

    When to use it: Take it for instances by prototypes (YOLACT, YOLOv8-seg to YOLO26-seg).

    When not: Leave it where each mask has a network of its own, as RTMDet-Ins or CondInst.

    Args:
        coefficients: (N, K), those of all images' masks one image after the other, of any floating dtype.
        prototypes: (B, K, H, W).
        target: true masks (T, H, W) in [0, 1], of any dtype; or with `label` maps of integers, such as ultralytics' (B, H, W) with
            overlap_mask=True, where a pixel has the number of its object.
        boxes: (N, 4), (x1, y1, x2, y2) in pixels of the prototypes.
        counts: how many masks each image has: B numbers, or a tensor (B,), which is not read by the host. Masks beyond its sum are nan.
        reduction: "mean" over masks, "sum" or "none".
        target_index: (N,), the target of each mask; -1: none, so that loss and gradient are 0 for any numbers, and the mean leaves the
            mask out. By default mask n has target n; with `label`, that of its image. Another one that does not exist makes loss and
            gradient nan.
        label: (N,), the number of each mask's pixels in its target; None: targets are masks.
        normalizer: number or 0-d tensor that takes the place of the mean's divisor.

    Returns:
        a scalar; with reduction "none" (N,). In float32 (float64 for float64). Gradients go to coefficients and prototypes.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import prototype_mask_loss
        >>> coefficients, prototypes = torch.randn(3, 32, requires_grad=True), torch.randn(2, 32, 40, 40, requires_grad=True)
        >>> boxes = torch.tensor([[2.0, 3.0, 20.0, 30.0], [5.0, 5.0, 9.0, 9.0], [0.0, 0.0, 40.0, 40.0]])
        >>> prototype_mask_loss(coefficients, prototypes, torch.rand(3, 40, 40) > 0.5, boxes, [2, 1]).backward()

        Two images with 100 anchors each; an assigner gave some of them one of their image's 5 boxes, or -1:

        >>> anchors, prototypes = torch.randn(2, 100, 32, requires_grad=True), torch.randn(2, 32, 40, 40)
        >>> boxes, masks = torch.tensor([2.0, 3.0, 20.0, 30.0]).expand(2, 5, 4), torch.rand(2, 5, 40, 40) > 0.5
        >>> index = torch.randint(-1, 5, (2, 100))
        >>> own = boxes.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, 4)).flatten(0, 1)
        >>> which = torch.where(index < 0, -1, index + 5 * torch.arange(2)[:, None]).flatten()
        >>> loss = prototype_mask_loss(anchors.flatten(0, 1), prototypes, masks.flatten(0, 1), own, [100, 100], target_index=which)
        >>> loss.backward()
    """
    checks.whole("prototypes", prototypes)
    checks.fits("prototypes", prototypes, prototypes.ndim == 4 and prototypes.numel() > 0, "have shape (B, K, H, W) with elements")
    images, k, height, width = prototypes.shape
    checks.floating_beside("coefficients", coefficients, prototypes, "prototypes")
    right = coefficients.ndim == 2 and coefficients.shape[1] == k
    checks.fits("coefficients", coefficients, right, "have shape (N, {}), one a prototype", k)
    n = len(coefficients)
    checks.floating_beside("boxes", boxes, prototypes, "prototypes")
    checks.fits("boxes", boxes, boxes.shape == (n, 4), "have shape ({}, 4)", n)
    true_masks(target, prototypes, "prototypes")
    checks.fits("target", target, target.ndim == 3 and target.shape[1:] == (height, width), "have shape (T, {}, {})", height, width)
    checks.without_gradient("boxes", boxes)
    for name, numbers in (("target_index", target_index), ("label", label)):
        if numbers is not None:
            checks.integer(name, numbers)
            checks.beside(name, numbers, prototypes, "prototypes")
            checks.fits(name, numbers, numbers.shape == (n,), "have shape ({},)", n)
    if label is not None and target.is_floating_point():
        raise TypeError(f"target must hold integers where label is given, got {target.dtype}")
    divisor = checked_reduction(reduction, normalizer, prototypes, "prototypes")
    ends = counts_on_device(counts, images, n, prototypes, "prototypes").long().cumsum(0).clamp(0, n)
    each = torch.arange(n, device=prototypes.device)
    image = torch.searchsorted(ends, each, right=True)
    order: Tensor | None = None
    count: int | Tensor = n
    if target_index is None:
        checks.fits("target", target, len(target) == (n if label is None else images), "hold one mask each, or one map an image")
        target_index = each if label is None else image
    else:
        target_index = target_index.long()
        given = target_index != NO_MASK
        order, count = (~given).byte().argsort(stable=True), given.sum()
        ends = F.pad(given.cumsum(0), (1, 0))[ends]
    label = None if label is None else label.long()
    masks = Masks(boxes.to(accurate(boxes[:0]).dtype), image, target, target_index, label, ends, order)
    narrow = coefficients.dtype in KERNEL_DTYPES and (not target.is_floating_point() or target.dtype in KERNEL_DTYPES)
    if n and narrow and kernels_apply(prototypes) and kernels_apply(coefficients):
        target = target.view(torch.uint8) if target.dtype == torch.bool else target.resolve_neg()
        masks = masks._replace(boxes=boxes.float(), target=target)
        found = OPERATORS.prototype_mask(coefficients.resolve_neg(), prototypes.resolve_neg(), *masks)
    else:
        found = prototype_mask_reference(coefficients, prototypes, *masks)
    return reduced_values(found[:, 0], reduction, count if reduction == "mean" and divisor is None else divisor)


def prototype_mask_reference(coefficients: Tensor, prototypes: Tensor, *of_masks: Any) -> Tensor:
    """Compute what the operator returns in plain torch, with zeros in place of the gradients: (N, 1 + K). of_masks: the fields of Masks."""
    masks = Masks(*of_masks)
    maps = accurate(prototypes)
    maps = maps.to(torch.promote_types(maps.dtype, coefficients.dtype))
    own, given = coefficients.to(maps.dtype), masks.target_index != NO_MASK
    readable = checks.known(masks.target_index) and not transformed(masks.target_index)
    if masks.order is not None and readable:  # masks without target may be very many
        rows = given.nonzero()[:, 0]
        label = None if masks.label is None else masks.label[rows]
        some = masks._replace(boxes=masks.boxes[rows], image=masks.image[rows], target_index=masks.target_index[rows], label=label)
        values = _values(own[rows], maps, some)
        values = values.new_zeros(len(own)).index_put((rows,), values)
    else:
        boxes, index = torch.where(given[:, None], masks.boxes, 0.0), torch.where(given, masks.target_index, 0)
        values = _values(torch.where(given[:, None], own, 0.0), maps, masks._replace(boxes=boxes, target_index=index))
    return torch.cat([values[:, None], torch.zeros_like(own)], 1)


def _values(own: Tensor, maps: Tensor, masks: Masks) -> Tensor:
    """Return the loss of each mask, of coefficients `own` and prototypes `maps`."""
    images, _, height, width = maps.shape
    boxes, image, index = masks.boxes, masks.image, masks.target_index
    exists = (image < images) & (index >= 0) & (index < len(masks.target))
    area = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).to(maps.dtype)
    own = torch.where((area <= 0)[:, None], 0.0, own)  # which may be nan
    with without_autocast(maps):
        x = torch.einsum("nk,nkhw->nhw", own, maps[torch.where(image < images, image, 0)])
    y = masks.target[torch.where(exists, index, 0)]
    y = (y == masks.label[:, None, None] if masks.label is not None else y).to(x.dtype)
    y = torch.where(exists[:, None, None], y, torch.nan)
    x1, y1, x2, y2 = (side[:, None, None] for side in boxes.unbind(1))
    column, row = torch.arange(width, device=x.device), torch.arange(height, device=x.device)[:, None]
    inside = (column >= x1) & (column < x2) & (row >= y1) & (row < y2)
    values = torch.where(inside, F.binary_cross_entropy_with_logits(x, y, reduction="none"), 0.0).sum((1, 2))
    return torch.where(area <= 0, 0.0, values / torch.where(area <= 0, 1.0, area))


def _forward(*tensors: Any) -> Tensor:
    found: tuple[Tensor] = launched("masks.prototypes", "forward", tensors[:-2])
    return found[0]


def _fake(coefficients: Tensor, *_: Any) -> Tensor:
    n, k = coefficients.shape
    return coefficients.new_empty((n, 1 + k), dtype=torch.float32)


def _backward(grad: Tensor, result: Tensor, *rest: Any) -> None:
    *read, ends, order, of_coefficients, of_prototypes = rest
    if of_coefficients is not None:
        up = grad[:, :1]
        if order is not None:  # the mean over no mask is nan, and so is its gradient
            up = torch.where(read[5].unsqueeze(1) == NO_MASK, 0.0, up)
        of_coefficients.copy_(up * result[:, 1:])
    if of_prototypes is not None:
        launched("masks.prototypes", "backward", (grad[:, 0], ends, order, of_prototypes, *read))


define_differentiable(
    "prototype_mask",
    "Tensor coefficients, Tensor prototypes, Tensor boxes, Tensor image, Tensor target, Tensor index, Tensor? label, Tensor ends, "
    "Tensor? order",
    _forward,
    _fake,
    _backward,
    prototype_mask_reference,
    inputs=2,
)
