"""Divergences of softmax distributions, for distillation."""

from typing import Unpack

from lossforge.losses import functional
from lossforge.losses.functional.common import Settings
from lossforge.losses.functional.divergence import REDUCTIONS
from lossforge.losses.modules.common import LossModule


class KLDivWithLogitsLoss(LossModule):
    """Kullback-Leibler divergence from a teacher's logits: see functional.kl_div_with_logits."""

    function = staticmethod(functional.kl_div_with_logits)
    accepted = Settings
    reductions = REDUCTIONS

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        *,
        reverse: bool = False,
        temperature_squared: bool = True,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        settings = {
            "temperature": temperature,
            "reverse": reverse,
            "temperature_squared": temperature_squared,
            "ignore_index": ignore_index,
        }
        super().__init__(reduction, {}, settings, options)


class JSDivWithLogitsLoss(LossModule):
    """Generalised Jensen-Shannon divergence from a teacher's logits: see functional.js_div_with_logits."""

    function = staticmethod(functional.js_div_with_logits)
    accepted = Settings
    reductions = REDUCTIONS

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        *,
        temperature_squared: bool = False,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        settings = {
            "beta": beta,
            "temperature": temperature,
            "temperature_squared": temperature_squared,
            "ignore_index": ignore_index,
        }
        super().__init__(reduction, {}, settings, options)


class TotalVariationWithLogitsLoss(LossModule):
    """Total variation distance from a teacher's logits: see functional.total_variation_with_logits."""

    function = staticmethod(functional.total_variation_with_logits)
    accepted = Settings
    reductions = REDUCTIONS

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        *,
        temperature_squared: bool = False,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        settings = {"temperature": temperature, "temperature_squared": temperature_squared, "ignore_index": ignore_index}
        super().__init__(reduction, {}, settings, options)


class TopKKLDivWithLogitsLoss(LossModule):
    """Kullback-Leibler divergence from a teacher's K likeliest classes: see functional.topk_kl_div_with_logits.

    forward(input, values, indices=…).
    """

    function = staticmethod(functional.topk_kl_div_with_logits)
    accepted = Settings
    reductions = REDUCTIONS

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        *,
        renormalize: bool = False,
        tail: bool = False,
        temperature_squared: bool = True,
        ignore_index: int = -100,
        **options: Unpack[Settings],
    ) -> None:
        settings = {
            "temperature": temperature,
            "renormalize": renormalize,
            "tail": tail,
            "temperature_squared": temperature_squared,
            "ignore_index": ignore_index,
        }
        super().__init__(reduction, {}, settings, options)
