"""segmentation_models_pytorch: its losses of regions, focal, Lovász and cross entropy losses, computed by ours.

    from lossforge.integrations import segmentation_models_pytorch

    segmentation_models_pytorch.patch()                       # then smp.losses as before

Tested with segmentation_models_pytorch 0.6.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    dice_loss,
    jaccard_loss,
    lovasz_hinge_loss,
    lovasz_softmax_loss,
    sigmoid_focal_loss,
    tversky_loss,
)
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "0.6"
SOFT = "the targets are not whole numbers, and for soft ones the formulas differ"


def _region(self: Any, y_pred: Tensor, y_true: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]] | str:
    """Return logits, target and the options that losses of regions share."""
    if self.classes is not None or self.log_loss or not self.from_logits:
        return "classes, log_loss and from_logits=False are not taken over"
    if y_true.is_floating_point():
        return SOFT
    options: dict[str, Any] = {"batch": True, "present_only": True}
    if self.class_weights is not None:
        weights = self.class_weights.to(y_pred.device)
        options["weight"] = weights / weights.mean()
    if self.mode == "multiclass":
        if self.ignore_index is not None:
            options["ignore_index"] = int(self.ignore_index)
        return y_pred.flatten(2), y_true.reshape(len(y_true), -1).long(), options
    if self.ignore_index is not None:
        return "ours ignores pixels of class indices alone"
    options["activation"] = "sigmoid"
    if self.mode == "binary":
        return y_pred.reshape(len(y_pred), 1, -1), y_true.reshape(len(y_true), 1, -1).to(y_pred.dtype), options
    return y_pred.flatten(2), y_true.reshape(len(y_true), y_pred.shape[1], -1).to(y_pred.dtype), options


def _dice(self: Any, y_pred: Tensor, y_true: Tensor) -> Tensor | str:
    from segmentation_models_pytorch.losses import DiceLoss, TverskyLoss

    if type(self) not in (DiceLoss, TverskyLoss):
        return f"{type(self).__qualname__} may have its own score"
    found = _region(self, y_pred, y_true)
    if isinstance(found, str):
        return found
    logits, target, options = found
    if type(self) is TverskyLoss:
        numbers = {"alpha": self.alpha, "beta": self.beta, "smooth_nr": self.smooth, "smooth_dr": self.smooth}
        loss = tversky_loss(logits, target, **numbers, **options)
        return loss if self.gamma == 1 else loss**self.gamma
    return dice_loss(logits, target, smooth_nr=2 * self.smooth, smooth_dr=2 * self.smooth, **options)


def _jaccard(self: Any, y_pred: Tensor, y_true: Tensor) -> Tensor | str:
    found = _region(self, y_pred, y_true)
    if isinstance(found, str):
        return found
    logits, target, options = found
    return jaccard_loss(logits, target, smooth_nr=self.smooth, smooth_dr=self.smooth, **options)


def _focal(self: Any, y_pred: Tensor, y_true: Tensor) -> Tensor | str:
    of = self.focal_loss_fn.keywords
    if not self.from_logits or of["normalized"] or of["reduced_threshold"] is not None or of["reduction"] != "mean":
        return "from_logits=False, normalized, reduced_threshold and other reductions than the mean are not taken over"
    if self.class_weights is not None or (self.ignore_index is not None and self.mode != "multiclass"):
        return "class_weights, and ignored pixels of masks, are not taken over"
    if y_true.is_floating_point():
        return SOFT
    alpha = -1.0 if of["alpha"] is None else of["alpha"]
    if self.mode != "multiclass":
        return sigmoid_focal_loss(y_pred, y_true.to(y_pred.dtype).view_as(y_pred), alpha, of["gamma"], "mean")
    index = y_true.long()
    if self.ignore_index is not None:
        index = index.masked_fill(index == self.ignore_index, -2)
    return sigmoid_focal_loss(y_pred, index, alpha, of["gamma"], "mean", dim=1)


def _lovasz(self: Any, y_pred: Tensor, y_true: Tensor) -> Tensor | str:
    if self.mode == "multiclass":
        ignore: dict[str, Any] = {} if self.ignore_index is None else {"ignore_index": int(self.ignore_index)}
        return lovasz_softmax_loss(y_pred, y_true.long(), per_image=self.per_image, **ignore)
    if self.ignore_index is not None:
        return "ours ignores pixels of class indices alone"
    return SOFT if y_true.is_floating_point() else lovasz_hinge_loss(y_pred, y_true.bool().view_as(y_pred), per_image=self.per_image)


def _soft_cross_entropy(self: Any, y_pred: Tensor, y_true: Tensor) -> Tensor | str:
    if self.dim != 1 or self.reduction not in ("mean", "sum") or self.ignore_index is None or not y_pred.ndim > 1:
        return "other dimensions and reductions, and ignore_index=None, are not taken over"
    options: dict[str, Any] = {"label_smoothing": self.smooth_factor or 0.0, "ignore_index": int(self.ignore_index)}
    if self.reduction == "mean":  # over all pixels, ignored ones too
        options["normalizer"] = y_true.numel()
    found = cross_entropy(y_pred, y_true.long(), reduction=self.reduction, **options)
    assert isinstance(found, Tensor)
    return found


def _soft_bce(self: Any, y_pred: Tensor, y_true: Tensor) -> Tensor | str:
    if y_true.shape != y_pred.shape or self.reduction not in ("mean", "sum"):
        return "targets of another shape than the logits, and other reductions, are not taken over"
    target = y_true.to(y_pred.dtype)
    if self.smooth_factor is not None:
        target = (1 - target) * self.smooth_factor + target * (1 - self.smooth_factor)
    weight = self.weight
    if self.ignore_index is not None:
        counts = (y_true != self.ignore_index).to(y_pred.dtype)
        weight = counts if weight is None else counts * weight
        target = torch.where(counts > 0, target, 0.0)
    options: dict[str, Any] = {"normalizer": y_pred.numel()} if self.reduction == "mean" else {}
    return binary_cross_entropy_with_logits(y_pred, target, weight, reduction=self.reduction, pos_weight=self.pos_weight, **options)


NAMES = {
    "dice:DiceLoss": _dice,
    "jaccard:JaccardLoss": _jaccard,
    "focal:FocalLoss": _focal,
    "lovasz:LovaszLoss": _lovasz,
    "soft_ce:SoftCrossEntropyLoss": _soft_cross_entropy,
    "soft_bce:SoftBCEWithLogitsLoss": _soft_bce,
}


def patch(force: bool = False) -> Patch:
    """Replace the losses of segmentation_models_pytorch by ours.

    Args:
        force: go on where the library is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: segmentation-models-pytorch is not installed.
        IntegrationError: its names or parameters are not those that were tested. Nothing was replaced.
    """
    library = "segmentation_models_pytorch"
    replacements = [
        Replacement(f"{library}.losses.{name}.forward", or_theirs(library, ours), "(self, y_pred, y_true)") for name, ours in NAMES.items()
    ]
    return patch_names("segmentation-models-pytorch", TESTED, replacements, force=force)
