"""Losses of a difference x - y."""

from typing import Unpack

from lossforge.losses import checks, functional
from lossforge.losses.modules.common import ElementwiseModule, WeightedSettings
from lossforge.losses.types import Reduction


class L1Loss(ElementwiseModule):
    """Mean absolute error as torch.nn.L1Loss: see functional.l1_loss."""

    function = staticmethod(functional.l1_loss)

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        **options: Unpack[WeightedSettings],
    ) -> None:
        super().__init__(options, reduction=checks.legacy_reduction(size_average, reduce, reduction))


class MSELoss(L1Loss):
    """Mean squared error as torch.nn.MSELoss: see functional.mse_loss."""

    function = staticmethod(functional.mse_loss)


class HuberLoss(ElementwiseModule):
    """Huber loss as torch.nn.HuberLoss: see functional.huber_loss."""

    function = staticmethod(functional.huber_loss)
    delta: float

    def __init__(self, reduction: Reduction = "mean", delta: float = 1.0, **options: Unpack[WeightedSettings]) -> None:
        super().__init__(options, reduction=reduction, delta=delta)


class SmoothL1Loss(ElementwiseModule):
    """Smooth L1 loss as torch.nn.SmoothL1Loss: see functional.smooth_l1_loss."""

    function = staticmethod(functional.smooth_l1_loss)
    beta: float

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        beta: float = 1.0,
        **options: Unpack[WeightedSettings],
    ) -> None:
        super().__init__(options, reduction=checks.legacy_reduction(size_average, reduce, reduction), beta=beta)
