"""torchvision: focal and box losses of `torchvision.ops`, and of the detectors that import them, computed by ours.

    from lossforge.integrations import torchvision

    torchvision.patch()                       # then torchvision.ops, RetinaNet and FCOS as before

Tested with torchvision 0.26.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lossforge.losses import complete_box_iou_loss, distance_box_iou_loss, generalized_box_iou_loss, sigmoid_focal_loss
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "0.26"


def _focal(inputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2, reduction: Any = "none") -> Tensor | str:
    if targets.shape != inputs.shape or not targets.is_floating_point():
        return "the targets are not numbers of the logits' shape"
    if targets.requires_grad:
        return "the targets require grad"
    return sigmoid_focal_loss(inputs, targets, alpha, gamma, reduction)


def _boxes(ours: Callable[..., Tensor]) -> Callable[..., Tensor | str]:
    def loss(boxes1: Tensor, boxes2: Tensor, reduction: Any = "none", eps: float = 1e-7) -> Tensor | str:
        if boxes1.shape != boxes2.shape or not (boxes1.is_floating_point() and boxes2.is_floating_point()):
            return "the boxes differ in shape, or are whole numbers"
        return ours(boxes1, boxes2, reduction, eps)

    return loss


BOXES: dict[str, Callable[..., Tensor]] = {
    "giou_loss:generalized_box_iou_loss": generalized_box_iou_loss,
    "diou_loss:distance_box_iou_loss": distance_box_iou_loss,
    "ciou_loss:complete_box_iou_loss": complete_box_iou_loss,
}


def patch(force: bool = False) -> Patch:
    """Replace torchvision's losses by ours, in `torchvision.ops` and in the detectors that import them.

    Args:
        force: go on where torchvision is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        IntegrationError: torchvision's names or parameters are not those that were tested. Nothing was replaced.
    """
    called = "(inputs, targets, alpha=0.25, gamma=2, reduction='none')", "(boxes1, boxes2, reduction='none', eps=1e-07)"
    replacements = [Replacement("torchvision.ops.focal_loss:sigmoid_focal_loss", or_theirs("torchvision", _focal), called[0])]
    replacements += [
        Replacement(f"torchvision.ops.{name}", or_theirs("torchvision", _boxes(ours)), called[1]) for name, ours in BOXES.items()
    ]
    return patch_names("torchvision", TESTED, replacements, force=force)
