"""Losses of the overlap of predicted and true regions."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.common import Settings
from lossforge.losses.modules.common import LossModule


class OverlapSettings(Settings, total=False):
    """What these functions share, with their defaults."""

    include_background: bool
    activation: str | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    ignore_index: int
    present_only: bool


class DiceLoss(LossModule):
    """Soft Dice loss as monai.losses.DiceLoss: see functional.dice_loss."""

    function = staticmethod(functional.dice_loss)
    accepted = OverlapSettings

    def __init__(
        self, *, squared_pred: bool = False, reduction: str = "mean", weight: Tensor | None = None, **options: Unpack[OverlapSettings]
    ) -> None:
        super().__init__(reduction, {"weight": weight}, {"squared_pred": squared_pred}, options)


class JaccardLoss(LossModule):
    """Soft Jaccard loss, 1 - IoU: see functional.jaccard_loss."""

    function = staticmethod(functional.jaccard_loss)
    accepted = OverlapSettings

    def __init__(
        self, *, squared_pred: bool = False, reduction: str = "mean", weight: Tensor | None = None, **options: Unpack[OverlapSettings]
    ) -> None:
        super().__init__(reduction, {"weight": weight}, {"squared_pred": squared_pred}, options)


class TverskyLoss(LossModule):
    """Tversky loss as monai.losses.TverskyLoss: see functional.tversky_loss."""

    function = staticmethod(functional.tversky_loss)
    accepted = OverlapSettings

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        beta: float = 0.5,
        reduction: str = "mean",
        weight: Tensor | None = None,
        **options: Unpack[OverlapSettings],
    ) -> None:
        super().__init__(reduction, {"weight": weight}, {"alpha": alpha, "beta": beta}, options)


class FocalTverskyLoss(LossModule):
    """Focal Tversky loss; gamma is the exponent: see functional.focal_tversky_loss."""

    function = staticmethod(functional.focal_tversky_loss)
    accepted = OverlapSettings

    def __init__(
        self,
        *,
        alpha: float = 0.3,
        beta: float = 0.7,
        gamma: float = 0.75,
        reduction: str = "mean",
        weight: Tensor | None = None,
        **options: Unpack[OverlapSettings],
    ) -> None:
        super().__init__(reduction, {"weight": weight}, {"alpha": alpha, "beta": beta, "gamma": gamma}, options)


class DiceCELoss(LossModule):
    """Dice loss plus cross entropy as monai.losses.DiceCELoss: see functional.dice_ce_loss."""

    function = staticmethod(functional.dice_ce_loss)
    accepted = OverlapSettings
    reductions = ("mean", "sum")

    def __init__(
        self,
        *,
        squared_pred: bool = False,
        reduction: str = "mean",
        weight: Tensor | None = None,
        lambda_dice: float = 1.0,
        lambda_ce: float = 1.0,
        **options: Unpack[OverlapSettings],
    ) -> None:
        settings = {"squared_pred": squared_pred, "lambda_dice": lambda_dice, "lambda_ce": lambda_ce}
        super().__init__(reduction, {"weight": weight}, settings, options)
