"""Classification losses of dense detectors, whose targets say how good a box is."""

from typing import Unpack

from lossforge.losses import functional
from lossforge.losses.modules.common import ElementwiseModule, WeightedSettings
from lossforge.losses.types import Reduction


class QualityFocalLoss(ElementwiseModule):
    """Quality focal loss as mmdetection's: see functional.quality_focal_loss."""

    function = staticmethod(functional.quality_focal_loss)
    beta: float

    def __init__(self, beta: float = 2.0, reduction: Reduction = "mean", **options: Unpack[WeightedSettings]) -> None:
        super().__init__(options, beta=beta, reduction=reduction)


class VarifocalLoss(ElementwiseModule):
    """Varifocal loss as mmdetection's: see functional.varifocal_loss."""

    function = staticmethod(functional.varifocal_loss)
    alpha: float
    gamma: float
    iou_weighted: bool

    def __init__(
        self,
        alpha: float = 0.75,
        gamma: float = 2.0,
        iou_weighted: bool = True,
        reduction: Reduction = "mean",
        **options: Unpack[WeightedSettings],
    ) -> None:
        super().__init__(options, alpha=alpha, gamma=gamma, iou_weighted=iou_weighted, reduction=reduction)
