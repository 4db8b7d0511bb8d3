"""Distances to the boundaries of masks, on the device, and the losses that weigh pixels by them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.masks.calls import OverlapCall
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import Activation, Reduction
from lossforge.losses.base.options import mask_of_pixels
from lossforge.losses.base.state import kernels_apply
from lossforge.losses.engine.operators import define, launched
from lossforge.losses.functional import mse_loss
from lossforge.losses.segmentation.regions import (
    checked_regions,
    dense_target,
    kept_pixels,
    left_out,
    region_sums,
    unknown_pixels,
)

__all__ = ["boundary_loss", "distance_transform", "hausdorff_loss", "signed_distance_map"]


@checks.named
def distance_transform(mask: Tensor, *, spacing: Sequence[float] | None = None) -> Tensor:
    """Exact Euclidean distance of each pixel to the nearest that is 0, as scipy.ndimage.distance_transform_edt of each mask.

    One launch a dimension computes it on the device, without a wait (Felzenszwalb and Huttenlocher 2012, doi 10.4086/toc.2012.v008a019).
    The time grows with the distances.

    Args:
        mask: (N, C, d…) with any number of spatial dimensions, of any dtype: 0 is background, all else the region.
        spacing: the distance of neighbours along each spatial dimension, above 0; None for 1.

    Returns:
        as mask, in float32; 0 in the background. A mask without background has inf everywhere, where scipy's values are undefined.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import distance_transform
        >>> distance_transform(torch.tensor([[[0, 1, 1, 1, 0]]]))
        tensor([[[0., 1., 2., 1., 0.]]])
    """
    return _distance(_mask(mask), _spacing(mask, spacing), False)


@checks.named
def signed_distance_map(mask: Tensor, *, spacing: Sequence[float] | None = None) -> Tensor:
    """Signed distance of each pixel to a region's boundary, as `boundary_loss` takes it.

    Outside of the region it is the distance to the region. Inside it is s minus the distance to the background, where s is the smallest
    spacing: so it is never positive. It is 0 where a mask is empty or has no background.

    With s = 1 it is the authors' one_hot2dist, which subtracts the distance from 1 at any spacing: below 1 the inside then has the sign of
    the outside.

    Args:
        mask: (N, C, d…), of any dtype: 0 is background, all else the region.
        spacing: the distance of neighbours along each spatial dimension, above 0; None for 1.

    Returns:
        as mask, in float32.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import signed_distance_map
        >>> signed_distance_map(torch.tensor([[[0, 0, 1, 1, 1]]]))
        tensor([[[ 2.,  1.,  0., -1., -2.]]])
    """
    return _signed(_mask(mask), _spacing(mask, spacing), torch.float32)


def _signed(region: Tensor, spacing: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    outside, inside = _distance(region, spacing, True, dtype), _distance(region, spacing, False, dtype)
    found = torch.where(inside > 0, (min(spacing) - inside).clamp(max=0.0), outside)
    return found.masked_fill_(found.isinf(), 0.0)


@checks.named
def boundary_loss(
    input: Tensor,
    target: Tensor,
    reduction: Reduction = "mean",
    *,
    activation: Activation | None = "softmax",
    include_background: bool = True,
    spacing: Sequence[float] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Boundary loss (Kervadec et al. 2019, arXiv 1812.07032), as monai.losses.BoundaryLoss.

    L = 1/M Σ p φ for each class of each image, over its M pixels, with φ the `signed_distance_map` of the class. Two launches read logits
    and maps once each. It may be negative. With class indices the logits are copied first, without those of ignored pixels.

    When to use it: Take it beside a Dice loss for very small regions, with a weight that grows as training goes on: the authors go from
    0.01 to 1.

    When not: Leave it as the only loss: an empty prediction is a minimum that it hardly leaves.

    Args:
        input: logits (N, C, d…); probabilities where activation is None.
        target: class indices (N, d…), or masks (N, C, d…) of bool or integers, whose maps are computed; a floating (N, C, d…) is taken
            as the maps themselves, which a data loader may compute once. A pixel with index -100 belongs to no region, adds 0 and gets
            gradient 0, whatever its logits are.
        reduction: "mean" over images and classes, "sum", or "none": (N, C).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        spacing: as in signed_distance_map; None where target has the maps themselves.
        mask: which pixels count, as in `dice_loss`. Maps that are computed take the others as background. M is the mask's sum.

    Returns:
        a scalar; with reduction "none" one value a region. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import boundary_loss
        >>> logits = torch.randn(2, 3, 16, 16, requires_grad=True)
        >>> boundary_loss(logits, torch.randint(3, (2, 16, 16)), include_background=False).backward()
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.real("target", target)
    if spacing is not None and target.is_floating_point():
        raise ValueError("spacing must be None where target has the distance maps themselves, which are floating")
    options = {"activation": activation, "include_background": include_background, "mask": mask}
    if not target.is_floating_point():
        call = checked_regions(input, target, options)
        spacings, dtype = _spacing(input, spacing), torch.promote_types(input.dtype, torch.float32)
        input, target = kept_pixels(call), _without_ignored(call, _signed(dense_target(call) > 0.5, spacings, dtype))
    call = checked_regions(input, target, options)
    total = region_sums(call)[0]
    values = total / (math.prod(input.shape[2:]) if mask is None else _counts(call, mask, total.dtype)[1])
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


@checks.named
def hausdorff_loss(
    input: Tensor,
    target: Tensor,
    alpha: float = 2.0,
    reduction: Reduction = "mean",
    *,
    activation: Activation | None = "softmax",
    include_background: bool = True,
    spacing: Sequence[float] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Hausdorff distance loss by distance transforms (Karimi and Salcudean 2019, arXiv 1904.10030), as monai.losses.HausdorffDTLoss.

    L = 1/M Σ (p - y)² (d_p^α + d_y^α) for each class of each image, over its M pixels, with d_p and d_y the distances to the boundaries of
    the predicted region, p > 1/2, and of the true one. An empty region has distances of 0. No gradient goes through the distances.

    When to use it: Take it beside a Dice loss where a model is judged by its worst errors, far from the true boundary.

    When not: Do not use it alone at the start of training, where all is far from the boundary, nor where time counts: each step transforms
    four masks a class.

    Args:
        input: logits (N, C, d…); probabilities where activation is None.
        target: class indices (N, d…), or masks (N, C, d…). A pixel with index -100 belongs to no region, neither the true nor the predicted
            one, adds 0 and gets gradient 0, whatever its logits are.
        alpha: α of at least 0, how much far errors count more.
        reduction: "mean" over images and classes, "sum", or "none": (N, C).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts; MONAI leaves it out by default.
        spacing: the distance of neighbours along each spatial dimension, above 0; None for 1.
        mask: which pixels count, as in `dice_loss`. Distances take the others as background. M is the mask's sum.

    Returns:
        a scalar; with reduction "none" one value a region. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hausdorff_loss
        >>> logits = torch.randn(2, 3, 16, 16, requires_grad=True)
        >>> hausdorff_loss(logits, torch.randint(3, (2, 16, 16))).backward()
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    alpha = checks.number("alpha", alpha, 0.0)
    call = checked_regions(input, target, {"activation": activation, "include_background": include_background, "mask": mask})
    spacings = _spacing(input, spacing)
    x = kept_pixels(call)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    p = x.softmax(1) if activation == "softmax" else x.sigmoid() if activation == "sigmoid" else x
    p, y = p[:, call.skip() :], dense_target(call).to(p.dtype)[:, call.skip() :]
    predicted = p.detach() > 0.5
    if (nothing := left_out(call)) is not None:
        predicted = predicted & ~(nothing[:, call.skip() :] if nothing.shape[1] > 1 else nothing)
    far = _without_ignored(call, _to_boundary(predicted, spacings, p.dtype) ** alpha + _to_boundary(y > 0.5, spacings, p.dtype) ** alpha)
    pixels = math.prod(p.shape[2:])
    if mask is not None:
        counts, of_region = _counts(call, mask, p.dtype)
        far, pixels = far * (counts / of_region.view(*of_region.shape, *(1,) * (p.ndim - 2))), 1
    if reduction == "none":
        return ((p - y).square() * far).flatten(2).sum(2) / pixels
    total = mse_loss(p, y, weight=far, reduction="sum")
    return total / (pixels * math.prod(p.shape[:2]) if reduction == "mean" else pixels)


def _without_ignored(call: OverlapCall, maps: Tensor) -> Tensor:
    """Return maps that are 0 at ignored pixels, and nan where a class does not exist."""
    if call.target.is_floating_point():
        return maps
    nothing = left_out(call)
    assert nothing is not None
    return maps.masked_fill(nothing, 0.0).masked_fill_(unknown_pixels(call), torch.nan)


def _counts(call: OverlapCall, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return how much each element of the regions counts, and each region's sum of that, (N, C); 1 where nothing counts."""
    by_class = call.target.is_floating_point() and call.activation != "softmax"
    counts = mask_of_pixels(mask, call.x, by_class)[:, call.skip() :].to(dtype)
    pixels = counts.flatten(2).sum(2)
    return counts, torch.where(pixels == 0, 1.0, pixels)


def _to_boundary(mask: Tensor, spacing: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Return the distance of each pixel to the nearest of the other kind; 0 without one."""
    found = _distance(mask, spacing, False, dtype) + _distance(mask, spacing, True, dtype)
    return found.masked_fill_(found.isinf(), 0.0)


def _mask(mask: Tensor) -> Tensor:
    checks.real("mask", mask)
    checks.fits("mask", mask, mask.ndim > 2, "have shape (N, C, d…) with at least one spatial dimension")
    return mask if mask.dtype == torch.bool else mask != 0


def _spacing(mask: Tensor, spacing: Sequence[float] | None) -> tuple[float, ...]:
    """Return the spacing of each spatial dimension."""
    count = mask.ndim - 2
    if spacing is None:
        return (1.0,) * count
    found = tuple(checks.number("spacing", s, 0.0, exclusive=True) for s in checks.several("spacing", spacing))
    if len(found) != count:
        raise ValueError(f"spacing must have one number for each of {count} spatial dimensions, got {len(found)}")
    if min(found) < 1e-15 * max(found):
        raise ValueError(f"spacing must have numbers within 15 powers of ten of each other, whose squares float32 can add, got {found}")
    return found


@torch.no_grad()
def _distance(mask: Tensor, spacing: tuple[float, ...], background: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the distance to the nearest pixel that is not in the mask; with `background` to the nearest that is."""
    unit = 2.0 ** (math.frexp(max(spacing))[1] - 1)  # over it, squares of spacings are in float32's range, and no digit changes
    steps = [s / unit for s in spacing]
    if dtype == torch.float32 and mask.numel() and kernels_apply(torch.empty(1, device=mask.device)):
        found: Tensor = OPERATORS.distance_transform(mask.view(torch.uint8), steps, background)
    else:
        found = distance_reference(mask, steps, background, dtype)
    return found if unit == 1.0 else found * unit


def distance_reference(mask: Tensor, spacing: Sequence[float], background: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute a transform in plain torch: along each dimension the least over all shifts."""
    found = torch.where(mask != background, torch.inf, 0.0).to(dtype)
    for dim, size in enumerate(spacing, 2):
        best = found
        for shift in range(1, mask.shape[dim]):
            more = size * size * shift * shift
            near, far = slice(0, mask.shape[dim] - shift), slice(shift, None)
            index = (slice(None),) * dim
            least = best.clone()
            least[(*index, near)] = torch.minimum(least[(*index, near)], found[(*index, far)] + more)
            least[(*index, far)] = torch.minimum(least[(*index, far)], found[(*index, near)] + more)
            best = least
        found = best
    return found.sqrt()


def _transform(mask: Tensor, spacing: Sequence[float], background: bool) -> Tensor:
    found: tuple[Tensor] = launched("masks.distance", "transform", (mask,), tuple(spacing), background)
    return found[0]


def _fake(mask: Tensor, *_: Any) -> Tensor:
    return mask.new_empty(mask.shape, dtype=torch.float32)


define("distance_transform(Tensor mask, float[] spacing, bool background) -> Tensor", _transform, _fake)
