"""Losses of masks at sampled points, as PointRend and Mask2Former train: no mask is resized as a whole."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import Reduction
from lossforge.losses.base.options import checked_reduction
from lossforge.losses.templates.plain_forms import accurate

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

    Nothing waits for the device. The same generator in the same state gives the same points. In plain PyTorch: a kernel gained 4 % (one
    H200, 37,632 points of 100 masks: 0.435 ms, 0.452 without).

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
    x = accurate(x).unsqueeze(1)
    logits = F.grid_sample(x, 2 * points.to(x.dtype).unsqueeze(1) - 1, align_corners=False)[:, 0, 0]
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

    In plain PyTorch: torch.compile of it took less time than a kernel (one H200, 100 masks of 256×256 at 12,544 points, float32: 0.217 ms
    to 0.362). Points of one pixel add up in its gradient: on CUDA in an order that changes from run to run, unless
    torch.use_deterministic_algorithms(True) is set. No gradient goes to the points.

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
    divisor = len(x) if reduction == "mean" and divisor is None else divisor
    x = accurate(x)
    points = points.to(x.dtype)
    logit, y = bilinear(x, points), bilinear(y, points)
    p = logit.sigmoid()
    whole = p.sum(1) + y.sum(1)
    bce = F.binary_cross_entropy_with_logits(logit, y, reduction="none").mean(1)
    dice = (whole - 2 * (p * y).sum(1)) / (whole + 1)
    return reduced_values(bce, reduction, divisor), reduced_values(dice, reduction, divisor)


def true_masks(target: object, x: Tensor, of: str) -> Tensor:
    """Check that a target is a tensor of real numbers, without gradient, on the device of x, the argument `of`."""
    t = checks.real("target", target)
    checks.beside("target", t, x, of)
    checks.without_gradient("target", t)
    return t


def reduced_values(values: Tensor, reduction: str, divisor: float | Tensor | None) -> Tensor:
    """Return the losses of masks for reduction "none", in memory of their own, because backward may keep the values; else their sum."""
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
    """Return the values (N, P) of masks (N, H, W) of any dtype at points (N, P, 2), in the dtype of the points.

    F.grid_sample cannot be differentiated twice, and takes masks of the dtype of the points alone.
    """
    height, width = x.shape[1:]
    at_x, at_y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = at_x.floor(), at_y.floor()
    across, down = (torch.stack([1 - share, share], -1) for share in (at_x - left, at_y - top))
    columns, rows = (torch.stack([corner, corner + 1], -1) for corner in (left.long(), top.long()))
    columns, rows = columns.unsqueeze(2), rows.unsqueeze(3)  # (N, P, 1, 2) and (N, P, 2, 1)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    index = torch.where(inside, rows * width + columns, 0)
    values = x.flatten(1).gather(1, index.flatten(1)).view(index.shape).to(points.dtype)
    return (torch.where(inside, values, 0.0) * down.unsqueeze(3) * across.unsqueeze(2)).sum((2, 3))
