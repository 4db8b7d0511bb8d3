"""Losses of log-probabilities."""

from typing import Unpack

from torch import Tensor

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import Settings
from lossforge.losses.functional.elementwise import BATCH_REDUCTIONS
from lossforge.losses.modules.common import ElementwiseModule, LogitsModule, WeightedSettings
from lossforge.losses.types import BatchReduction, Reduction


class NLLLoss(LogitsModule):
    """Negative log-likelihood of log-probabilities as torch.nn.NLLLoss: see functional.nll_loss."""

    function = staticmethod(functional.nll_loss)
    weight: Tensor | None
    ignore_index: int

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        **options: Unpack[Settings],
    ) -> None:
        super().__init__(
            options, weight=weight, ignore_index=ignore_index, reduction=checks.legacy_reduction(size_average, reduce, reduction)
        )


class KLDivLoss(ElementwiseModule):
    """Kullback-Leibler divergence of log-probabilities as torch.nn.KLDivLoss: see functional.kl_div."""

    function = staticmethod(functional.kl_div)
    reductions = BATCH_REDUCTIONS
    log_target: bool

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: BatchReduction = "mean",
        log_target: bool = False,
        **options: Unpack[WeightedSettings],
    ) -> None:
        super().__init__(options, reduction=checks.legacy_reduction(size_average, reduce, reduction), log_target=log_target)
