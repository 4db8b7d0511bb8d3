"""The Lovász extension: by hand, against segmentation_models_pytorch, and at its edges."""

import pytest
import torch
from loss_calls import gradient_of

from lossforge.losses import jaccard_loss, lovasz_hinge_loss, lovasz_softmax_loss

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])


def maps(device, *shape, classes=4, void=-100):
    """Return logits and class indices, of which some are ignored and the last class has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape[0], classes, *shape[1:], generator=generator)
    target = torch.randint(classes - 1, shape, generator=generator)
    target[torch.rand(shape, generator=generator) < 0.1] = void
    return x.to(device), target.to(device)


def test_by_hand(device):
    """Three pixels of logits 0, 2 and -3, of which the second and the third are of the class: errors 1, -1 and 4.

    Sorted: 4 of the class (g = 1/2), 1 of background (g = 1 / (3 · 2)), -1, which is cut off.
    """
    x, target = torch.tensor([[0.0, 2.0, -3.0]], device=device), torch.tensor([[0, 1, 1]], device=device)
    value, g = gradient_of(lovasz_hinge_loss, x, target)
    torch.testing.assert_close(value.cpu(), torch.tensor(2 + 1 / 6))
    torch.testing.assert_close(g.cpu(), torch.tensor([[1 / 6, 0.0, -1 / 2]]))


def test_sure_predictions_have_the_jaccard_loss(device):
    """At probabilities of 0 and 1 the extension is the loss of the sets itself."""
    x, target = maps(device, 2, 9, 8, void=0)
    x = 1e4 * torch.nn.functional.one_hot(x.argmax(1), 4).movedim(-1, 1)
    exact = jaccard_loss(x, target, batch=True, reduction="none", smooth_nr=0.0, smooth_dr=0.0)
    torch.testing.assert_close(lovasz_softmax_loss(x, target, "all", reduction="none"), exact)


NOISE = 1e-3
"""Of the largest entry of their gradient: their weights are differences in float32. Of float64, which they refuse, the oracle is exact."""


@MODES
@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("mask", [False, True], ids=["softmax", "hinge"])
def test_segmentation_models_pytorch(mask, per_image, mode, device):
    smp = pytest.importorskip("segmentation_models_pytorch", reason="the library needs: uv sync --group recipes").losses
    x, target = maps(device, 3, 21, 17, void=255)
    x = x[:, :1] if mask else x
    target = torch.where(target == 255, 255, target.clamp(max=1)) if mask else target
    ours = lovasz_hinge_loss if mask else lovasz_softmax_loss
    theirs = smp.LovaszLoss("binary" if mask else "multiclass", per_image=per_image, ignore_index=255)
    value, g = gradient_of(ours, x, target, per_image=per_image, ignore_index=255, gradient=mode)
    exact, g_exact = gradient_of(theirs, x, target)
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(g, g_exact, rtol=0, atol=NOISE * g_exact.abs().max().item())


@pytest.mark.parametrize("classes", ["present", "all", [1, 3], [3, 3, 0]], ids=str)
@pytest.mark.parametrize("per_image", [False, True])
def test_classes_as_segmentation_models_pytorch(classes, per_image, device):
    lovasz = pytest.importorskip("segmentation_models_pytorch.losses.lovasz", reason="the library needs: uv sync --group recipes")
    x, target = maps(device, 2, 6, 7)
    value, g = gradient_of(lovasz_softmax_loss, x, target, classes, per_image)
    exact, g_exact = gradient_of(
        lambda x: lovasz._lovasz_softmax(x.softmax(1), target, classes=classes, per_image=per_image, ignore=-100), x
    )
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(g, g_exact, rtol=0, atol=NOISE * g_exact.abs().max().item())


def test_weights_keep_their_digits_in_large_regions(device):
    """The differences of a cumulated float32 loss, which the authors take, are off by a hundredth here."""
    x, target = maps(device, 1, 150, 150)
    _, g = gradient_of(lovasz_softmax_loss, x, target)
    _, exact = gradient_of(lovasz_softmax_loss, x.double(), target)
    assert (g.double() - exact).norm() < 1e-5 * exact.norm()


@MODES
def test_an_error_of_0_has_no_gradient(mode, device):
    """As the authors' relu, and unlike torch's clamp."""
    x, target = torch.tensor([[1.0, -1.0, 3.0, -2.0]], device=device), torch.tensor([[1, 0, 0, 1]], device=device)
    _, g = gradient_of(lovasz_hinge_loss, x, target, gradient=mode)
    assert torch.equal(g == 0, torch.tensor([[True, True, False, False]], device=device))


@MODES
def test_nothing_counts(mode, device):
    """The mean over no class is 0, as segmentation_models_pytorch has it, and so is that over no pixel."""
    x = torch.randn(2, 3, 4, device=device)
    void = torch.full((2, 4), -100, device=device)
    for per_image in (False, True):
        value, g = gradient_of(lovasz_softmax_loss, x, void, per_image=per_image, gradient=mode)
        assert value == 0
        assert torch.equal(g, torch.zeros_like(g))
    value, g = gradient_of(lovasz_hinge_loss, x[:, 0], void, gradient=mode)
    assert value == 0
    assert torch.equal(g, torch.zeros_like(g))
    assert lovasz_softmax_loss(x[:0], void[:0]) == 0


@MODES
def test_ignored_pixels_may_hold_nan(mode, device):
    x, target = maps(device, 2, 5, 6)
    expected, g_expected = gradient_of(lovasz_softmax_loss, x, target, gradient=mode)
    ignored = (target == -100).unsqueeze(1).expand_as(x)
    value, g = gradient_of(lovasz_softmax_loss, x.masked_fill(ignored, torch.nan), target, gradient=mode)
    assert torch.equal(value, expected)
    assert torch.equal(g, g_expected)


@MODES
def test_an_absent_class_counts_where_it_is_listed(mode, device):
    """Its loss is its largest probability, whose pixel alone has a gradient."""
    x, target = maps(device, 1, 3, 4)
    p = x.softmax(1)[:, 3].masked_fill(target == -100, 0.0)
    value, g = gradient_of(lovasz_softmax_loss, x, target, [3], gradient=mode)
    torch.testing.assert_close(value, p.max())
    assert (g.abs().sum(1) > 0).sum() == 1


@MODES
def test_index_out_of_range_unchecked_is_nan_at_its_pixel(mode, device, monkeypatch):
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    x, target = maps(device, 1, 3, 4)
    target[0, 1, 2] = 9
    value, g = gradient_of(lovasz_softmax_loss, x, target, gradient=mode)
    assert value.isnan()
    assert g[0, :, 1, 2].isnan().all()
    assert g.isnan().sum() == 4


def test_what_is_refused(device):
    x, target = maps(device, 2, 3, 4)
    with pytest.raises(ValueError, match=r"at least two classes, got \(2, 1, 3, 4\): of one class take lovasz_hinge_loss"):
        lovasz_softmax_loss(x[:, :1], target)
    with pytest.raises(ValueError, match=r"classes must be of the 4 of input, 0 to 3, got 4"):
        lovasz_softmax_loss(x, target, [0, 4])
    with pytest.raises(ValueError, match="got an empty list"):
        lovasz_softmax_loss(x, target, [])
    with pytest.raises(ValueError, match="classes must be"):
        lovasz_softmax_loss(x, target, "none")
    with pytest.raises(ValueError, match=r"target must have shape \(2, 3, 4\), got \(2, 3\)"):
        lovasz_softmax_loss(x, target[..., 0])
    with pytest.raises(TypeError, match="target"):
        lovasz_hinge_loss(x[:, 0], torch.rand(2, 3, 4, device=device))
