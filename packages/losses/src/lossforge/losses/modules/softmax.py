"""Losses of rows of classes under a softmax."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import Settings
from lossforge.losses.modules.common import LossModule


class CrossEntropyLoss(LossModule):
    """Cross entropy as torch.nn.CrossEntropyLoss, with more options: see functional.cross_entropy."""

    function = staticmethod(functional.cross_entropy)
    accepted = Settings

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_correct: bool = False,
        **options: Unpack[Settings],
    ) -> None:
        settings = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "scale": scale,
            "softcap": softcap,
            "z_loss": z_loss,
            "return_z_loss": return_z_loss,
            "return_lse": return_lse,
            "return_entropy": return_entropy,
            "return_correct": return_correct,
        }
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), {"weight": weight}, settings, options)
