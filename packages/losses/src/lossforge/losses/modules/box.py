"""Losses of pairs of boxes."""

from typing import Unpack

from lossforge.losses import functional
from lossforge.losses.functional.common import BoxSettings
from lossforge.losses.modules.common import BoxModule
from lossforge.losses.types import BoxFormat, Reduction


class BoxIoULoss(BoxModule):
    """IoU loss of two boxes: see functional.box_iou_loss. As there and in torchvision, the default reduction is "none"."""

    function = staticmethod(functional.box_iou_loss)
    eps: float
    format: BoxFormat

    def __init__(
        self, reduction: Reduction = "none", eps: float = 1e-7, *, format: BoxFormat = "xyxy", **options: Unpack[BoxSettings]
    ) -> None:
        super().__init__(options, reduction=reduction, eps=eps, format=format)


class GeneralizedBoxIoULoss(BoxIoULoss):
    """Generalized IoU loss: see functional.generalized_box_iou_loss."""

    function = staticmethod(functional.generalized_box_iou_loss)


class DistanceBoxIoULoss(BoxIoULoss):
    """Distance IoU loss: see functional.distance_box_iou_loss."""

    function = staticmethod(functional.distance_box_iou_loss)


class CompleteBoxIoULoss(BoxIoULoss):
    """Complete IoU loss: see functional.complete_box_iou_loss."""

    function = staticmethod(functional.complete_box_iou_loss)


class EfficientBoxIoULoss(BoxIoULoss):
    """Efficient IoU loss: see functional.efficient_box_iou_loss."""

    function = staticmethod(functional.efficient_box_iou_loss)


class BoxL1Loss(BoxModule):
    """Absolute error of boxes, summed over their coordinates: see functional.box_l1_loss."""

    function = staticmethod(functional.box_l1_loss)

    def __init__(self, reduction: Reduction = "none", **options: Unpack[BoxSettings]) -> None:
        super().__init__(options, reduction=reduction)


class BoxSmoothL1Loss(BoxModule):
    """Smooth L1 loss of boxes, summed over their coordinates: see functional.box_smooth_l1_loss."""

    function = staticmethod(functional.box_smooth_l1_loss)
    beta: float

    def __init__(self, reduction: Reduction = "none", beta: float = 1.0, **options: Unpack[BoxSettings]) -> None:
        super().__init__(options, reduction=reduction, beta=beta)
