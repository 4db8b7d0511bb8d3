"""MONAI: its Dice loss, and the losses that contain it, computed by ours.

    from lossforge.integrations import monai

    monai.patch()                       # then DiceLoss, DiceCELoss and DiceFocalLoss as before

Tested with MONAI 1.6.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.losses import dice_loss, jaccard_loss
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "1.6"


def _dice(self: Any, input: Tensor, target: Tensor) -> Tensor | str:
    classes = input.shape[1]
    softmax = self.softmax and classes > 1
    indices = softmax and self.to_onehot_y
    if self.other_act is not None or self.soft_label:
        return "other_act and soft_label are not taken over"
    if not indices and (not (self.sigmoid or softmax) or self.to_onehot_y or target.shape != input.shape):
        return "ours takes logits with class indices and a softmax, or with masks of their shape"
    if indices and target.shape != (len(input), 1, *input.shape[2:]):
        return "the targets are not (N, 1, …)"
    if self.ignore_index is not None and (not indices or 0 <= self.ignore_index < classes):
        return "ours ignores pixels of class indices alone, of an index that is not a class"
    if not self.include_background and not indices:
        return "ours leaves the background out of class indices alone"
    if self.batch and self.reduction == "none":
        return "batch with the reduction none is not taken over"
    options: dict[str, Any] = {"batch": self.batch, "reduction": self.reduction, "include_background": self.include_background}
    if indices:
        target = target[:, 0].long()
        if self.ignore_index is not None:
            options["ignore_index"] = int(self.ignore_index)
    else:
        options["activation"], target = "softmax" if softmax else "sigmoid", target.to(input.dtype)
    counted = classes - (not self.include_background)
    if self.class_weight is not None and counted > 1:
        weight = self.class_weight.to(input.device, torch.float32).expand(counted)
        options["weight"] = weight if self.include_background else torch.cat([weight.new_ones(1), weight])
    half = 2 if self.jaccard else 1
    options |= {"smooth_nr": self.smooth_nr / half, "smooth_dr": self.smooth_dr / half, "squared_pred": self.squared_pred}
    loss = (jaccard_loss if self.jaccard else dice_loss)(input, target, **options)
    return loss.view(*loss.shape, *[1] * (input.ndim - 2)) if self.reduction == "none" else loss


def patch(force: bool = False) -> Patch:
    """Replace MONAI's Dice loss by ours.

    Args:
        force: go on where MONAI is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: monai is not installed.
        IntegrationError: its names or parameters are not those that were tested. Nothing was replaced.
    """
    made = Replacement("monai.losses.dice:DiceLoss.forward", or_theirs("monai", _dice), "(self, input, target)")
    return patch_names("monai", TESTED, [made], force=force)
