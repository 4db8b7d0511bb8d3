"""Losses of pairs of boxes."""

from typing import Unpack

from lossforge.losses import functional
from lossforge.losses.functional.common import BoxSettings
from lossforge.losses.modules.common import LossModule


class BoxIoULoss(LossModule):
    """IoU loss of two boxes: see functional.box_iou_loss. As there and in torchvision, the default reduction is "none"."""

    function = staticmethod(functional.box_iou_loss)
    accepted: type = BoxSettings

    def __init__(self, reduction: str = "none", eps: float = 1e-7, *, format: str = "xyxy", **options: Unpack[BoxSettings]) -> None:
        super().__init__(reduction, {}, {"eps": eps, "format": format}, options)


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


class BoxL1Loss(LossModule):
    """Absolute error of boxes, summed over their coordinates: see functional.box_l1_loss."""

    function = staticmethod(functional.box_l1_loss)
    accepted: type = BoxSettings

    def __init__(self, reduction: str = "none", **options: Unpack[BoxSettings]) -> None:
        super().__init__(reduction, {}, {}, options)


class BoxSmoothL1Loss(LossModule):
    """Smooth L1 loss of boxes, summed over their coordinates: see functional.box_smooth_l1_loss."""

    function = staticmethod(functional.box_smooth_l1_loss)
    accepted: type = BoxSettings

    def __init__(self, reduction: str = "none", beta: float = 1.0, **options: Unpack[BoxSettings]) -> None:
        super().__init__(reduction, {}, {"beta": beta}, options)
