"""Asymmetric loss of one class against the others under a softmax."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.rowwise import RowSettings
from lossforge.losses.modules.common import RowModule
from lossforge.losses.types import Reduction


class AsymmetricLossSingleLabel(RowModule):
    """Asymmetric loss as timm.loss.AsymmetricLossSingleLabel: see functional.asymmetric_loss_single_label."""

    function = staticmethod(functional.asymmetric_loss_single_label)
    gamma_pos: float
    gamma_neg: float
    eps: float

    def __init__(
        self,
        gamma_pos: float = 1.0,
        gamma_neg: float = 4.0,
        eps: float = 0.1,
        reduction: Reduction = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **options: Unpack[RowSettings],
    ) -> None:
        super().__init__(
            options,
            gamma_pos=gamma_pos,
            gamma_neg=gamma_neg,
            eps=eps,
            reduction=reduction,
            weight=weight,
            ignore_index=ignore_index,
        )
