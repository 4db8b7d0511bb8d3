"""Asymmetric loss of one class against the others under a softmax."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.rowwise import RowSettings
from lossforge.losses.modules.common import LossModule


class AsymmetricLossSingleLabel(LossModule):
    """Asymmetric loss as timm.loss.AsymmetricLossSingleLabel: see functional.asymmetric_loss_single_label."""

    function = staticmethod(functional.asymmetric_loss_single_label)
    accepted = RowSettings

    def __init__(
        self,
        gamma_pos: float = 1.0,
        gamma_neg: float = 4.0,
        eps: float = 0.1,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **options: Unpack[RowSettings],
    ) -> None:
        settings = {"gamma_pos": gamma_pos, "gamma_neg": gamma_neg, "eps": eps, "ignore_index": ignore_index}
        super().__init__(reduction, {"weight": weight}, settings, options)
