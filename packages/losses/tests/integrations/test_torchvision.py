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


@pytest.mark.parametrize("kind", ["RetinaNet", "RetinaNet giou", "FCOS"])
def test_detectors(kind):
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
    images = [torch.rand(3, 64, 64), torch.rand(3, 64, 48)]
    targets = [
        {"boxes": torch.tensor([[8.0, 8.0, 40.0, 44.0]]), "labels": torch.tensor([1])},
        {"boxes": torch.tensor([[4.0, 6.0, 30.0, 28.0], [20.0, 24.0, 44.0, 60.0]]), "labels": torch.tensor([2, 0])},
    ]

    def step():
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.zero_grad()
        losses = model(images, targets)
        sum(losses.values()).backward()
        for name, buffer in model.named_buffers():
            buffer.data.copy_(state[name])
        found = {name: p.grad.clone() for name, p in model.head.named_parameters() if p.grad is not None}
        return {name: loss.detach() for name, loss in losses.items()}, found

    expected = step()
    with ours.patch():
        found = step()
    assert any(not torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
