"""Distance transforms equal scipy's; boundary and Hausdorff losses equal MONAI's, with their gradients."""

import warnings

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F

from lossforge.losses import boundary_loss, distance_transform, hausdorff_loss, plain_torch, signed_distance_map
from lossforge.losses.testing import error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    monai = pytest.importorskip("monai.losses")


def scipys(mask, spacing=None):
    found = [[scipy.ndimage.distance_transform_edt(m, sampling=spacing) for m in image] for image in mask.cpu().numpy()]
    return torch.tensor(np.array(found), device=mask.device)


@pytest.mark.parametrize("shape", [(2, 1, 5, 90), (1, 2, 70, 7), (1, 1, 6, 9, 11), (3, 2, 130), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("share", [0.5, 0.02], ids=["many", "few"])
def test_as_scipy(shape, share, device):
    mask = torch.rand(shape, device=device) > share
    mask[..., -1] = False  # scipy's distances to no background are undefined
    for spacing in (None, [0.5, 2.0, 1.3][: len(shape) - 2], [3e-30, 2e-30, 2e-30][: len(shape) - 2], [2e30] * (len(shape) - 2)):
        wanted = scipys(mask, spacing)
        for given in (mask, mask.long() * 3, mask.transpose(0, -1).contiguous().transpose(0, -1)):
            found = distance_transform(given, spacing=spacing)
            assert found.dtype == torch.float32
            assert error(found, wanted) < 2e-7
        with plain_torch():
            assert error(distance_transform(mask, spacing=spacing), wanted) < 2e-7


def test_long_distances_and_no_background(device):
    mask = torch.ones(2, 1, 3, 300, dtype=torch.bool, device=device)
    mask[0, 0, 1, 3] = False
    found = distance_transform(mask)
    assert error(found[0], scipys(mask[:1])[0]) < 2e-7
    assert found[1].isinf().all()
    full = mask[1:, ..., :5]
    assert not signed_distance_map(full).any()
    assert not signed_distance_map(~full).any()
    assert distance_transform(mask[:0]).shape == (0, 1, 3, 300)


@pytest.mark.parametrize("loss", ["boundary", "hausdorff"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_as_monai(loss, activation, device):
    x = torch.randn(2, 4, 9, 13, dtype=torch.float64, device=device)
    target = torch.randint(0, 4, (2, 9, 13), device=device)
    target[0] = target[0].clamp(max=2)  # a class without pixels
    ours, theirs = {"boundary": (boundary_loss, monai.BoundaryLoss), "hausdorff": (hausdorff_loss, monai.HausdorffDTLoss)}[loss]
    one_hot = F.one_hot(target, 4).movedim(-1, 1)
    for options in (
        {"include_background": True},
        {"include_background": False},
        *([{"alpha": 1.3, "include_background": False}] if loss == "hausdorff" else []),
    ):
        for reduction in ("mean", "sum", "none"):
            leaf = x.clone().requires_grad_()
            exact = theirs(**options, reduction=reduction, **{activation: True})(leaf, one_hot.double()).flatten()
            up = torch.linspace(-1, 2, exact.numel(), dtype=torch.float64, device=device)
            (wanted,) = torch.autograd.grad((exact * up).sum(), leaf)
            for given, dtype, bound in ((target, torch.float64, 1e-6), (one_hot, torch.float32, 3e-6), (target, torch.bfloat16, 2.0**-6)):
                leaf = x.to(dtype).requires_grad_()
                value = ours(leaf, given, reduction=reduction, activation=activation, **options).flatten()
                (g,) = torch.autograd.grad((value * up).sum(), leaf)
                assert g.dtype == dtype
                if dtype != torch.bfloat16:
                    assert error(value, exact) < bound
                    assert error(g, wanted) < bound
                elif loss == "boundary":  # whose distances do not depend on the rounded logits
                    assert error(g, wanted) < bound


def test_float64_losses_have_distances_of_float64(device):
    x, target = 4 * torch.randn(2, 3, 9, 13, dtype=torch.float64, device=device), torch.randint(0, 3, (2, 9, 13), device=device)
    p, mask = x.softmax(1), F.one_hot(target, 3).movedim(-1, 1).bool()
    inside, outside, predicted = scipys(mask), scipys(~mask), p > 0.5
    far = (inside + outside) ** 3 + (scipys(predicted) + scipys(~predicted)) ** 3
    assert error(hausdorff_loss(x, target, 3.0), ((p - mask.double()).square() * far).mean()) < 1e-14
    assert error(boundary_loss(x, target), (p * torch.where(mask, 1 - inside, outside)).mean()) < 1e-14


def test_maps_of_a_data_loader(device):
    x = torch.randn(2, 3, 9, 13, device=device)
    masks = F.one_hot(torch.randint(0, 3, (2, 9, 13), device=device), 3).movedim(-1, 1).bool()
    for spacing in (None, [2.0, 0.7]):
        maps = signed_distance_map(masks, spacing=spacing)
        torch.testing.assert_close(boundary_loss(x, maps), boundary_loss(x, masks, spacing=spacing))
    p = x.softmax(1)
    torch.testing.assert_close(boundary_loss(p, masks, activation=None), boundary_loss(x, masks))
    torch.testing.assert_close(hausdorff_loss(p, masks, activation=None), hausdorff_loss(x, masks))


@pytest.mark.parametrize("spacing", [None, (1.0, 2.5), (0.5, 0.5), (0.3, 2.0), (20.0, 7.0)])
def test_signs_at_any_spacing(spacing, device):
    """The authors' one_hot2dist in units of the smallest spacing. A step down the gradient raises the probability of the inside."""
    masks = torch.zeros(2, 1, 9, 13, dtype=torch.bool, device=device)
    masks[0, :, 2:6, 3:11], masks[1, :, 4:, 5] = True, True
    unit = min(spacing or (1.0,))
    steps = None if spacing is None else [s / unit for s in spacing]
    wanted = unit * torch.where(masks, 1 - scipys(masks, steps), scipys(~masks, steps))
    found = signed_distance_map(masks, spacing=spacing)
    assert error(found, wanted) < 3e-7
    assert (found[masks] <= 0).all()
    assert (found[~masks] > 0).all()
    x = torch.zeros(masks.shape, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(boundary_loss(x, masks, activation="sigmoid", spacing=spacing), x)
    assert error(g, wanted / (4 * masks.numel())) < 1e-6


@pytest.mark.parametrize("loss", [boundary_loss, hausdorff_loss])
@pytest.mark.parametrize(("classes", "activation"), [(3, "softmax"), (1, "sigmoid")])
def test_ignored_pixels_add_nothing(loss, classes, activation, device):
    """Whatever their logits are, which for Hausdorff distances belong to no predicted region."""
    x = torch.randn(2, classes, 8, 5, device=device)
    target = torch.randint(0, max(classes, 2), (2, 8, 5), device=device)
    target[:, 3:6] = -100
    found = []
    for logits in (9.0, float("nan")):
        leaf = x.clone()
        leaf[:, :, 3:6] = logits
        value = loss(leaf.requires_grad_(), target, activation=activation)
        found.append((value.detach(), *torch.autograd.grad(2 * value, leaf)))
    assert all(map(torch.equal, *found))
    g = found[0][1]
    assert not g[:, :, 3:6].any()
    assert g[:, :, :3].any()
    torch.testing.assert_close(loss(leaf, target, reduction="none", activation=activation).mean(), value)


@pytest.mark.parametrize("loss", [boundary_loss, hausdorff_loss])
def test_a_class_that_does_not_exist_is_nan(loss, device):
    """In its image alone, where the host does not read the target, as on CUDA."""
    x, target = torch.randn(2, 3, 4, 5, device=device), torch.randint(0, 3, (2, 4, 5), device=device)
    target[1, 2, 3] = 7

    def of_image(x, t):
        return torch.func.grad_and_value(lambda x: loss(x, t, reduction="sum"))(x)

    g, values = torch.func.vmap(of_image)(x[:, None], target[:, None])
    assert values.isnan().tolist() == [False, True]
    assert g.isnan()[1, 0].any(0).nonzero().tolist() == [[2, 3]]
    assert g[0].isfinite().all()


def test_boundary_loss_of_half_precision(device):
    """The distances are not rounded to the logits' dtype."""
    x = torch.randn(1, 2, 3, 150, device=device).bfloat16()
    target = torch.zeros(1, 3, 150, dtype=torch.int64, device=device)
    target[..., 0] = 1
    value, exact = (boundary_loss(t, target, spacing=[1.0, 0.7]) for t in (x, x.double()))
    assert error(value, exact) < 5e-6


def test_mistakes(device):
    x, mask = torch.randn(1, 2, 4, 4, device=device), torch.ones(1, 2, 4, 4, device=device)
    for call, kind, message in (
        (lambda: distance_transform(mask[0, 0]), ValueError, "mask must have shape .N, C, d…. with at least one spatial dimension"),
        (
            lambda: distance_transform(mask, spacing=[1.0]),
            ValueError,
            "spacing must have one number for each of 2 spatial dimensions, got 1",
        ),
        (lambda: signed_distance_map(mask, spacing=[1.0, 0.0]), ValueError, "spacing must be finite and above 0, got 0.0"),
        (lambda: boundary_loss(x, mask[:, :1]), ValueError, "target must have"),
        (lambda: boundary_loss(x, mask, spacing=[1.0, 1.0]), ValueError, "spacing must be None where target has the distance maps"),
    ):
        with pytest.raises(kind, match=message):
            call()
