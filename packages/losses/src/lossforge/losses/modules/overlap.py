"""Losses of the overlap of predicted and true regions."""

import inspect
from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.common import Settings
from lossforge.losses.modules.common import LogitsModule
from lossforge.losses.types import Activation, Reduction, ScalarReduction


class OverlapSettings(Settings, total=False):
    """What these functions share."""

    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool


_OF_DICE = {name: parameter.default for name, parameter in inspect.signature(functional.dice_loss).parameters.items()}


class OverlapModule(LogitsModule):
    shared: Mapping[str, Any] = {
        **LogitsModule.shared,
        **{name: _OF_DICE[name] for name in OverlapSettings.__annotations__ if name in _OF_DICE},
    }
    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool


class DiceLoss(OverlapModule):
    """Soft Dice loss as monai.losses.DiceLoss: see functional.dice_loss."""

    function = staticmethod(functional.dice_loss)
    squared_pred: bool

    def __init__(self, *, squared_pred: bool = False, reduction: Reduction = "mean", **options: Unpack[OverlapSettings]) -> None:
        super().__init__(options, squared_pred=squared_pred, reduction=reduction)


class JaccardLoss(OverlapModule):
    """Soft Jaccard loss, 1 - IoU: see functional.jaccard_loss."""

    function = staticmethod(functional.jaccard_loss)
    squared_pred: bool

    def __init__(self, *, squared_pred: bool = False, reduction: Reduction = "mean", **options: Unpack[OverlapSettings]) -> None:
        super().__init__(options, squared_pred=squared_pred, reduction=reduction)


class TverskyLoss(OverlapModule):
    """Tversky loss as monai.losses.TverskyLoss: see functional.tversky_loss."""

    function = staticmethod(functional.tversky_loss)
    alpha: float
    beta: float

    def __init__(self, *, alpha: float = 0.5, beta: float = 0.5, reduction: Reduction = "mean", **options: Unpack[OverlapSettings]) -> None:
        super().__init__(options, alpha=alpha, beta=beta, reduction=reduction)


class FocalTverskyLoss(OverlapModule):
    """Focal Tversky loss; gamma is the exponent: see functional.focal_tversky_loss."""

    function = staticmethod(functional.focal_tversky_loss)
    alpha: float
    beta: float
    gamma: float

    def __init__(
        self,
        *,
        alpha: float = 0.3,
        beta: float = 0.7,
        gamma: float = 0.75,
        reduction: Reduction = "mean",
        **options: Unpack[OverlapSettings],
    ) -> None:
        super().__init__(options, alpha=alpha, beta=beta, gamma=gamma, reduction=reduction)


class DiceCELoss(OverlapModule):
    """Dice loss plus cross entropy as monai.losses.DiceCELoss: see functional.dice_ce_loss."""

    function = staticmethod(functional.dice_ce_loss)
    reductions = ("mean", "sum")
    squared_pred: bool
    lambda_dice: float
    lambda_ce: float

    def __init__(
        self,
        *,
        squared_pred: bool = False,
        reduction: ScalarReduction = "mean",
        lambda_dice: float = 1.0,
        lambda_ce: float = 1.0,
        **options: Unpack[OverlapSettings],
    ) -> None:
        super().__init__(options, squared_pred=squared_pred, reduction=reduction, lambda_dice=lambda_dice, lambda_ce=lambda_ce)
