"""Divergences of softmax distributions, for distillation."""

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.common import Settings
from lossforge.losses.functional.divergence import REDUCTIONS
from lossforge.losses.modules.common import LogitsModule
from lossforge.losses.types import BatchReduction


class DivergenceModule(LogitsModule):
    reductions = REDUCTIONS
    temperature: float
    temperature_squared: bool
    ignore_index: int


class KLDivWithLogitsLoss(DivergenceModule):
    """Kullback-Leibler divergence from a teacher's logits: see functional.kl_div_with_logits."""

    function = staticmethod(functional.kl_div_with_logits)
    reverse: bool

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: BatchReduction = "batchmean",
        *,
        reverse: bool = False,
        temperature_squared: bool = True,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        super().__init__(
            options,
            temperature=temperature,
            reduction=reduction,
            reverse=reverse,
            temperature_squared=temperature_squared,
            ignore_index=ignore_index,
        )


class JSDivWithLogitsLoss(DivergenceModule):
    """Generalised Jensen-Shannon divergence from a teacher's logits: see functional.js_div_with_logits."""

    function = staticmethod(functional.js_div_with_logits)
    beta: float

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: BatchReduction = "batchmean",
        *,
        temperature_squared: bool = False,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        super().__init__(
            options,
            beta=beta,
            temperature=temperature,
            reduction=reduction,
            temperature_squared=temperature_squared,
            ignore_index=ignore_index,
        )


class TotalVariationWithLogitsLoss(DivergenceModule):
    """Total variation distance from a teacher's logits: see functional.total_variation_with_logits."""

    function = staticmethod(functional.total_variation_with_logits)

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: BatchReduction = "batchmean",
        *,
        temperature_squared: bool = False,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        super().__init__(
            options,
            temperature=temperature,
            reduction=reduction,
            temperature_squared=temperature_squared,
            ignore_index=ignore_index,
        )


class TopKKLDivWithLogitsLoss(DivergenceModule):
    """Kullback-Leibler divergence from a teacher's K likeliest classes: see functional.topk_kl_div_with_logits.

    forward(input, values, indices=…).
    """

    function = staticmethod(functional.topk_kl_div_with_logits)
    renormalize: bool
    tail: bool

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: BatchReduction = "batchmean",
        *,
        renormalize: bool = False,
        tail: bool = False,
        temperature_squared: bool = True,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        super().__init__(
            options,
            temperature=temperature,
            reduction=reduction,
            renormalize=renormalize,
            tail=tail,
            temperature_squared=temperature_squared,
            ignore_index=ignore_index,
        )

    def forward(self, input: Tensor, *teacher: Tensor, **per_call: Any) -> Tensor:
        return self.compute(input, *teacher, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, *teacher: Tensor, **per_call: Any) -> Tensor: ...
