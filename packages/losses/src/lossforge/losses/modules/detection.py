"""Classification losses of dense detectors, whose targets say how good a box is."""

from typing import Unpack

from lossforge.losses import functional
from lossforge.losses.functional.common import ElementwiseSettings
from lossforge.losses.modules.common import LossModule


class QualityFocalLoss(LossModule):
    """Quality focal loss as mmdetection's: see functional.quality_focal_loss."""

    function = staticmethod(functional.quality_focal_loss)

    def __init__(self, beta: float = 2.0, reduction: str = "mean", **options: Unpack[ElementwiseSettings]) -> None:
        super().__init__(reduction, {}, {"beta": beta}, options)


class VarifocalLoss(LossModule):
    """Varifocal loss as mmdetection's: see functional.varifocal_loss."""

    function = staticmethod(functional.varifocal_loss)

    def __init__(
        self,
        alpha: float = 0.75,
        gamma: float = 2.0,
        iou_weighted: bool = True,
        reduction: str = "mean",
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(reduction, {}, {"alpha": alpha, "gamma": gamma, "iou_weighted": iou_weighted}, options)
