"""Losses of masks at sampled points: equal to Mask2Former's by grid_sample, gradients, determinism, uncertain points, one graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses import point_mask_loss, sample_uncertain_points
from lossforge.losses.testing import error


def theirs(x: Tensor, target: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Mask2Former's losses of each mask: both masks sampled by grid_sample in float64."""
    grid = 2 * points.to(x.dtype)[:, None] - 1
    logits, labels = (F.grid_sample(t[:, None].to(x.dtype), grid, align_corners=False)[:, 0, 0] for t in (x, target))
    bce = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
    p = logits.sigmoid()
    return bce, 1 - (2 * (p * labels).sum(1) + 1) / (p.sum(1) + labels.sum(1) + 1)


def problem(device: str, masks: int = 3, count: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and targets of different sizes, points up to the edges and two beyond."""
    x = 4 * torch.randn(masks, 11, 7, dtype=torch.float64, device=device)
    target = torch.rand(masks, 23, 30, device=device) > 0.6
    points = torch.rand(masks, count, 2, device=device)
    points[:, :3] = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.02, -0.03]])
    return x, target, points


def gradient(function, x, *args, weights=(0.7, -1.3), **options):
    leaf = x.detach().clone().requires_grad_()
    bce, dice = function(leaf, *args, **options)
    up = torch.linspace(0.5, 2, bce.numel(), device=x.device, dtype=bce.dtype).view(bce.shape)
    (weights[0] * bce * up + weights[1] * dice * up).sum().backward()
    return bce.detach(), dice.detach(), leaf.grad


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -1.3), (3e-8, 2e-8)], ids=str)
def test_as_mask2former(weights, device):
    x, target, points = problem(device)
    x = x.float().double()
    wanted = gradient(theirs, x, target, points, weights=weights)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 5e-6)):
        found = gradient(point_mask_loss, x.to(dtype), target, points, reduction="none", weights=weights)
        for got, right in zip(found, wanted, strict=True):
            assert got.dtype == dtype
            assert error(got, right) < bound
    assert not found[2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_layouts_and_targets(dtype, device):
    x, target, points = problem(device)
    x = x.to(dtype)
    wanted = gradient(theirs, x.double(), target, points)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.repeat_interleave(2, 2)[..., ::2], x[:, None]):
        for of in (target, target.to(dtype), target.long(), target.mT.contiguous().mT[:, None]):
            bce, dice, g = gradient(point_mask_loss, given, of, points.mT.contiguous().mT, reduction="none")
            assert bce.dtype == torch.float32
            assert g.dtype == dtype
            assert error(bce, wanted[0]) < 1e-5
            assert error(dice, wanted[1]) < 1e-5
            assert error(g.view(x.shape), wanted[2]) < 2.0**-7


def test_as_transformers(device):
    """transformers' functions, which take points of masks as logits and labels."""
    module = pytest.importorskip("transformers.models.mask2former.modeling_mask2former")
    x, target, points = problem(device)
    logits, labels = (module.sample_point(t[:, None].double(), points.double()).squeeze(1) for t in (x, target))
    bce, dice = point_mask_loss(x, target, points, normalizer=4)
    assert error(bce, module.sigmoid_cross_entropy_loss(logits, labels, 4)) < 1e-10
    assert error(dice, module.dice_loss(logits, labels, 4)) < 1e-10


def test_reductions(device):
    x, target, points = problem(device)
    x = x.float()
    each = point_mask_loss(x, target, points, "none")
    for k in range(2):
        torch.testing.assert_close(point_mask_loss(x, target, points)[k], each[k].mean())
        torch.testing.assert_close(point_mask_loss(x, target, points, "sum")[k], each[k].sum())
        torch.testing.assert_close(point_mask_loss(x, target, points, normalizer=torch.tensor(5.0, device=device))[k], each[k].sum() / 5)
    nothing = point_mask_loss(x[:0], target[:0], points[:0], normalizer=1)
    assert [t.item() for t in nothing] == [0.0, 0.0]


def test_losses_of_masks_may_be_changed_in_place(device):
    x, target, points = problem(device)
    wanted = gradient(point_mask_loss, x.float(), target, points, "none")[-1]
    found = gradient(lambda *given: [each.mul_(3.0) for each in point_mask_loss(*given)], x.float(), target, points, "none")[-1]
    torch.testing.assert_close(found, 3 * wanted)


def test_crowded_points(device):
    """All points in one cell: the same gradient bit for bit, because these tests ask torch for deterministic sums, and the right one."""
    x, target, points = problem(device, masks=2, count=3000)
    points = 0.5 + 0.01 * points
    wanted = gradient(theirs, x, target, points)[2]
    first, second = (gradient(point_mask_loss, x.float(), target, points, weights=(1.0, 0.0))[2] for _ in range(2))
    assert torch.equal(first, second)
    assert error(gradient(point_mask_loss, x.float(), target, points, reduction="none")[2], wanted) < 5e-6


def test_masks_that_are_not_finite(device):
    x, target, points = problem(device)
    x = x.float()
    x[0] = float("nan")
    x[1] = float("inf")
    bce, dice, g = gradient(point_mask_loss, x, target, points[:, 3:].clamp(0.2, 0.8), reduction="none")
    assert bce[0].isnan()
    assert dice[0].isnan()
    assert g[0].isnan().any()
    assert bce[2].isfinite()
    assert g[2].isfinite().all()


def test_uncertain_points(device):
    """The same points as the definition's, from the same generator."""
    x, _, _ = problem(device)
    x = x.float()
    for options, many, few in (({}, 60, 15), ({"oversample_ratio": 1.5, "importance_sample_ratio": 0.5}, 30, 10)):
        made = torch.Generator(device).manual_seed(3)
        points = torch.rand(3, many, 2, device=device, generator=made)
        logits = F.grid_sample(x[:, None], 2 * points[:, None] - 1, align_corners=False)[:, 0, 0]
        index = logits.abs().topk(few, 1, largest=False).indices
        wanted = [points.take_along_dim(index[..., None], 1), torch.rand(3, 20 - few, 2, device=device, generator=made)]
        for given in (x, x[:, None].requires_grad_(), x.double()):
            found = sample_uncertain_points(given, 20, **options, generator=torch.Generator(device).manual_seed(3))
            assert not found.requires_grad
            torch.testing.assert_close(found, torch.cat(wanted, 1))
    assert sample_uncertain_points(x, 20, importance_sample_ratio=0.0).shape == (3, 20, 2)


def test_mistakes(device):
    x, target, points = problem(device)
    for arguments, options, kind, message in (
        ((x[0], target, points), {}, ValueError, r"input must have shape \(N, H, W\) or \(N, 1, H, W\) .*, got \(11, 7\)"),
        ((x, target[:2], points), {}, ValueError, "target must have as many masks as input, 3, got"),
        ((x, target, points[:, :0]), {}, ValueError, r"points must have shape \(3, P, 2\) with at least one point, got \(3, 0, 2\)"),
        ((x, target, points.clone().requires_grad_()), {}, ValueError, "points has no gradient"),
    ):
        with pytest.raises(kind, match=message):
            point_mask_loss(*arguments, **options)
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None, got int"):
        sample_uncertain_points(x, 5, generator=3)
    with pytest.raises(ValueError, match="num_points must be at least 1, got 0"):
        sample_uncertain_points(x, 0)
    with pytest.raises(ValueError, match="oversample_ratio must be finite and at least 1"):
        sample_uncertain_points(x, 5, 0.5)
