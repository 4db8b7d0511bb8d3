"""Losses of a difference x - y."""

from typing import Unpack

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import ElementwiseSettings
from lossforge.losses.modules.common import LossModule


class L1Loss(LossModule):
    """Mean absolute error as torch.nn.L1Loss: see functional.l1_loss."""

    function = staticmethod(functional.l1_loss)

    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean", **options: Unpack[ElementwiseSettings]
    ) -> None:
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), {}, {}, options)


class MSELoss(L1Loss):
    """Mean squared error as torch.nn.MSELoss: see functional.mse_loss."""

    function = staticmethod(functional.mse_loss)


class HuberLoss(LossModule):
    """Huber loss as torch.nn.HuberLoss: see functional.huber_loss."""

    function = staticmethod(functional.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0, **options: Unpack[ElementwiseSettings]) -> None:
        super().__init__(reduction, {}, {"delta": delta}, options)


class SmoothL1Loss(LossModule):
    """Smooth L1 loss as torch.nn.SmoothL1Loss: see functional.smooth_l1_loss."""

    function = staticmethod(functional.smooth_l1_loss)

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        beta: float = 1.0,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), {}, {"beta": beta}, options)
