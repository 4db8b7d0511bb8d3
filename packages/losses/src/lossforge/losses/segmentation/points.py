"""Losses of masks at sampled points, as PointRend and Mask2Former train: no mask is resized as a whole."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.base.options import checked_reduction
from lossforge.losses.namespace import OPERATORS
from lossforge.losses.operators import define, define_differentiable, launched
from lossforge.losses.option_types import Reduction
from lossforge.losses.reference import accurate
from lossforge.losses.state import KERNEL_DTYPES, kernels_apply

__all__ = ["point_mask_loss", "sample_uncertain_points"]


@checks.named
def sample_uncertain_points(
    input: Tensor,
    num_points: int,
    oversample_ratio: float = 3.0,
    importance_sample_ratio: float = 0.75,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random points of masks, most of them where the mask is uncertain, as PointRend and Mask2Former sample them.

    Of num_points · oversample_ratio uniform points of each mask, the num_points · importance_sample_ratio with the smallest |x| are kept,
    x the logit there. Uniform points are added to make num_points. (Kirillov et al. 2020, arXiv 1912.08193.)

    Nothing waits for the device. The same generator in the same state gives the same points.

    Args:
        input: logits (N, H, W) or (N, 1, H, W), of any floating dtype and strides.
        num_points: P, the points of each mask. Mask2Former takes 12,544.
        oversample_ratio: of at least 1, how many times P points are drawn first.
        importance_sample_ratio: in [0, 1], the share of uncertain points.
        generator: on the device of input; None for torch's own.

    Returns:
        (N, P, 2), float32: positions (x, y) in [0, 1], without gradient. The uncertain points stand first.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import sample_uncertain_points
        >>> sample_uncertain_points(torch.randn(5, 64, 64), 112).shape
        torch.Size([5, 112, 2])
    """
    x = _masks(input).detach()
    if not (generator is None or isinstance(generator, torch.Generator)):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(f"generator must be on the device of input, {x.device}, got {generator.device}")
    count = checks.whole_number("num_points", num_points)
    if count < 1:
        raise ValueError(f"num_points must be at least 1, got {count}")
    many = checks.whole_number("num_points · oversample_ratio", int(count * checks.number("oversample_ratio", oversample_ratio, 1.0)))
    few = int(count * checks.number("importance_sample_ratio", importance_sample_ratio, 0.0, 1.0))
    masks, device = x.shape[0], x.device
    points = torch.rand(masks, many, 2, device=device, generator=generator)
    logits = OPERATORS.sample_points(x.resolve_neg(), points) if kernels_apply(x) else bilinear(accurate(x), points)
    chosen = logits.abs().neg().topk(few, 1).indices
    certain = torch.rand(masks, count - few, 2, device=device, generator=generator)
    return torch.cat([points.take_along_dim(chosen.unsqueeze(2), 1), certain], 1)


@checks.named
def point_mask_loss(
    input: Tensor, target: Tensor, points: Tensor, reduction: Reduction = "mean", *, normalizer: float | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Binary cross entropy and Dice loss of masks at sampled points, as Mask2Former trains (Cheng et al. 2022, arXiv 2112.01527).

    L₁ = 1/P Σ [y softplus(-x) + (1 - y) softplus(x)] and L₂ = 1 - (2 Σ p y + 1) / (Σ p + Σ y + 1) with p = σ(x), over the P points of
    each mask. Logits x and targets y there are bilinear interpolations as grid_sample(align_corners=False) has them. PointRend takes L₁
    alone.

    One launch reads both masks at their points, and computes both losses. Backward adds the points' gradients as integers of 64 bits, in
    units of 2⁻⁴⁷ of the largest possible one of 12,544 points: so it is the same bit for bit each time. Beside the gradient it takes 8
    bytes a logit. No gradient goes to the points.

    When to use it: Take it for masks of queries (Mask2Former, MaskDINO, OneFormer, RF-DETR), whose targets are larger than the logits.

    When not: Leave it for semantic segmentation, where each pixel has one class: `dice_ce_loss` reads all pixels once.

    Args:
        input: logits (N, H, W) or (N, 1, H, W) of the masks that were matched, of any floating dtype and strides.
        target: their true masks (N, H', W') or (N, 1, H', W') of any size, in [0, 1], of any dtype; bool takes the least memory.
        points: (N, P, 2), positions (x, y) in [0, 1], such as those of `sample_uncertain_points`.
        reduction: "mean" over masks, "sum" or "none".
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: Mask2Former's num_masks.

    Returns:
        both losses, scalars; with reduction "none" of each mask, (N,). In float32 (float64 for float64). A logit at a point that is nan
        makes both losses of its mask nan, and the mask's gradient.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import point_mask_loss, sample_uncertain_points
        >>> logits, masks = torch.randn(5, 64, 64, requires_grad=True), torch.rand(5, 256, 256) > 0.5
        >>> bce, dice = point_mask_loss(logits, masks, sample_uncertain_points(logits, 112))
        >>> (5 * bce + 5 * dice).backward()
    """
    x = _masks(input)
    y = _masks(true_masks(target, x, "input"), "target")
    checks.fits("target", y, len(y) == len(x), "have as many masks as input, {}", len(x))
    checks.floating_beside("points", points, x)
    checks.without_gradient("points", points)
    right = points.ndim == 3 and len(points) == len(x) and points.shape[1] > 0 and points.shape[2] == 2
    checks.fits("points", points, right, "have shape ({}, P, 2) with at least one point", len(x))
    divisor = checked_reduction(reduction, normalizer, x)
    if kernels_apply(x) and (not y.is_floating_point() or y.dtype in KERNEL_DTYPES):
        y = y.view(torch.uint8) if y.dtype == torch.bool else y.resolve_neg()
        found = OPERATORS.point_loss(x.resolve_neg(), y, points.float())
    else:
        found = point_loss_reference(x, y, points)
    divisor = len(x) if reduction == "mean" and divisor is None else divisor
    bce, dice = (reduced_values(values, reduction, divisor) for values in found[:2])
    return bce, dice


def true_masks(target: object, x: Tensor, of: str) -> Tensor:
    """Check that a target is a tensor of real numbers, without gradient, on the device of x, the argument `of`."""
    t = checks.real("target", target)
    checks.beside("target", t, x, of)
    checks.without_gradient("target", t)
    return t


def reduced_values(values: Tensor, reduction: str, divisor: float | Tensor | None) -> Tensor:
    """Return the losses of masks for reduction "none", in memory of their own, because backward keeps the operator's; else their sum."""
    total = values.clone() if reduction == "none" else values.sum()
    return total if divisor is None else total / divisor


def _masks(t: Tensor, name: str = "input") -> Tensor:
    """Check masks; return them as (N, H, W)."""
    if name == "input":
        checks.whole(name, t)
    right = t.ndim == 3 or (t.ndim == 4 and t.shape[1] == 1)
    checks.fits(name, t, right and t.shape[-1] > 0 and t.shape[-2] > 0, "have shape (N, H, W) or (N, 1, H, W) with at least one pixel")
    return t.squeeze(1) if t.ndim == 4 else t


def bilinear(x: Tensor, points: Tensor) -> Tensor:
    """Return the values (N, P) of masks (N, H, W) at points (N, P, 2), in plain torch that can be differentiated twice."""
    height, width = x.shape[1:]
    at = points.to(x.dtype) * torch.tensor([width, height], dtype=x.dtype, device=x.device) - 0.5
    corner = at.floor()
    shares = at - corner
    flat, value = x.flatten(1), torch.zeros((), dtype=x.dtype, device=x.device)
    for i in (0, 1):
        for j in (0, 1):
            column, row = corner[..., 0] + j, corner[..., 1] + i
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            taken = flat.gather(1, torch.where(inside, row * width + column, 0).long())
            across, down = (s if k else 1 - s for s, k in zip(shares.unbind(-1), (j, i), strict=True))
            value = value + across * down * torch.where(inside, taken, 0.0)
    return value


def point_loss_reference(x: Tensor, target: Tensor, points: Tensor) -> Tensor:
    """Compute what the operator returns in plain torch: (5, N), both losses, then Σ p y, Σ p and Σ y."""
    x = accurate(x)
    logit, y = bilinear(x, points), bilinear(target.to(x.dtype), points)
    bce = F.binary_cross_entropy_with_logits(logit, y, reduction="none").mean(1)
    p = logit.sigmoid()
    shared, predicted, wanted = (p * y).sum(1), p.sum(1), y.sum(1)
    return torch.stack([bce, (predicted + wanted - 2 * shared) / (predicted + wanted + 1), shared, predicted, wanted])


def _sample(x: Tensor, points: Tensor) -> Tensor:
    found: tuple[Tensor] = launched("points", "sample", (x, points))
    return found[0]


def _forward(x: Tensor, target: Tensor, points: Tensor) -> Tensor:
    found: tuple[Tensor] = launched("points", "forward", (x, target, points))
    return found[0]


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((5, x.shape[0]), dtype=torch.float32)


def _backward(grad: Tensor, results: Tensor, x: Tensor, target: Tensor, points: Tensor, gradient: Tensor) -> None:
    launched("points", "backward", (x, target, points, results, grad, gradient))


define("sample_points(Tensor x, Tensor points) -> Tensor", _sample, lambda x, points: x.new_empty(points.shape[:2], dtype=torch.float32))
define_differentiable("point_loss", "Tensor x, Tensor target, Tensor points", _forward, _fake, _backward, point_loss_reference)
