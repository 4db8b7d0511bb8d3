"""torchvision's losses and detectors, patched, against torchvision's own."""

import compared
import pytest
import torch
from torchvision import ops
from torchvision.models import resnet18
from torchvision.models.detection import FCOS, RetinaNet, _utils, fcos, retinanet
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from lossforge.integrations import torchvision as ours

BOXES = ("generalized_box_iou_loss", "distance_box_iou_loss", "complete_box_iou_loss")


def compare(call, *leaves, exact=False):
    compared.compare(ours.patch, call, leaves, exact, differs=False, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alpha", [0.25, -1])
def test_focal_loss(alpha, reduction):
    logits, target = (3 * torch.randn(4, 5)).requires_grad_(), torch.rand(4, 5).round()
    compare(lambda: ops.sigmoid_focal_loss(logits, target, alpha=alpha, gamma=1.5, reduction=reduction), logits)


@pytest.mark.parametrize("shape", [(6,), ()], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", BOXES)
def test_box_losses(name, reduction, shape):
    corners = torch.rand(2, *shape, 2) * 20
    boxes, others = torch.cat([corners, corners + 5 + 10 * torch.rand(2, *shape, 2)], -1).unbind()
    boxes.requires_grad_()
    compare(lambda: getattr(ops, name)(boxes, others, reduction=reduction), boxes)


def test_names_are_replaced_where_detectors_imported_them_and_put_back():
    own = ops.sigmoid_focal_loss
    with ours.patch():
        assert ops.sigmoid_focal_loss is retinanet.sigmoid_focal_loss is fcos.sigmoid_focal_loss is not own
        assert ops.generalized_box_iou_loss is fcos.generalized_box_iou_loss is _utils.generalized_box_iou_loss
    assert ops.sigmoid_focal_loss is retinanet.sigmoid_focal_loss is own


def test_what_ours_lacks_is_left_to_torchvision(caplog):
    logits, target = torch.randn(4, 5, requires_grad=True), torch.rand(4, 5, requires_grad=True)
    compare(lambda: ops.sigmoid_focal_loss(logits, target, reduction="sum"), logits, target, exact=True)
    assert [r.message for r in caplog.records] == ["torchvision's own sigmoid_focal_loss runs: the targets require grad"]


def trained(kind, dtype, steps):
    """Return losses and gradients of all parameters of each step of a small detector."""
    torch.manual_seed(0)
    body = BackboneWithFPN(
        resnet18(weights=None),
        return_layers={"layer2": "0", "layer3": "1", "layer4": "2"},
        in_channels_list=[128, 256, 512],
        out_channels=32,
        extra_blocks=LastLevelP6P7(32, 32),
    )
    model = (FCOS if kind == "FCOS" else RetinaNet)(body, num_classes=3, min_size=64, max_size=64).train()
    if kind.endswith("giou"):
        model.head.regression_head._loss_type = "giou"
    model.to(dtype)
    images = [torch.rand(3, 64, 64, dtype=dtype), torch.rand(3, 64, 48, dtype=dtype)]
    targets = [
        {"boxes": torch.tensor([[8.0, 8.0, 40.0, 44.0]], dtype=dtype), "labels": torch.tensor([1])},
        {"boxes": torch.tensor([[4.0, 6.0, 30.0, 28.0], [20.0, 24.0, 44.0, 60.0]], dtype=dtype), "labels": torch.tensor([2, 0])},
    ]
    optimizer, found = torch.optim.SGD(model.parameters(), 1e-3), []
    for _ in range(steps):
        model.zero_grad()
        losses = model(images, targets)
        sum(losses.values()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append(({name: loss.detach() for name, loss in losses.items()}, gradients))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return found


KINDS = pytest.mark.parametrize("kind", ["RetinaNet", "RetinaNet giou", "FCOS"])


@KINDS
def test_detectors(kind):
    ((expected, own),) = trained(kind, torch.float32, 1)
    with ours.patch():
        ((found, gradients),) = trained(kind, torch.float32, 1)
    assert any(not torch.equal(gradients[name], gradient) for name, gradient in own.items())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    for name, gradient in own.items():
        if name.startswith("head"):
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@KINDS
def test_a_training_of_20_steps(kind):
    """Every step's losses and gradients in float64 are torchvision's own; after undo, to the bit."""
    expected = trained(kind, torch.float64, 20)
    with ours.patch():
        found = trained(kind, torch.float64, 20)
    assert any(not torch.equal(found[0][1][name], gradient) for name, gradient in expected[0][1].items())
    for (right, gradients), (losses, of_ours) in zip(expected, found, strict=True):
        torch.testing.assert_close(losses, right, rtol=1e-7, atol=1e-9)
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_ours[name], gradient, rtol=1e-7, atol=1e-7 * gradient.abs().max().item() + 1e-12)
    torch.testing.assert_close(trained(kind, torch.float64, 1), expected[:1], rtol=0, atol=0)
