"""The preference objectives as modules: their functions with the options kept.

`forward` takes the function's tensors in its order, and what each call brings (normalizer, margin, policy_nll_loss, mask, kl) by keyword.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from lossforge.losses import checks
from lossforge.losses.preference.grpo import grpo_loss
from lossforge.losses.preference.kto import kto_loss
from lossforge.losses.preference.pairwise import bradley_terry_loss, cpo_loss, dpo_loss, orpo_loss, simpo_loss


class _PreferenceLoss(nn.Module):
    """A function and its options."""

    function: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls) -> None:
        cls.__init__ = checks.named(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, reduction: str, empty: str, settings: dict[str, Any]) -> None:
        super().__init__()
        checks.one_of("reduction", reduction, checks.REDUCTIONS)
        checks.one_of("empty", empty, checks.EMPTY)
        self.settings = {**settings, "reduction": reduction, "empty": empty}

    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor:
        return type(self).function(*logps, **{**self.settings, **per_call})

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.settings.items())


class BradleyTerryLoss(_PreferenceLoss):
    """Bradley-Terry loss of a reward model: see bradley_terry_loss. The margin is given per call."""

    function = staticmethod(bradley_terry_loss)

    def __init__(
        self, label_smoothing: float = 0.0, center_rewards_coefficient: float = 0.0, reduction: str = "mean", *, empty: str = "nan"
    ) -> None:
        settings = {"label_smoothing": label_smoothing, "center_rewards_coefficient": center_rewards_coefficient}
        super().__init__(reduction, empty, settings)


class DPOLoss(_PreferenceLoss):
    """Direct preference optimisation: see dpo_loss."""

    function = staticmethod(dpo_loss)

    def __init__(
        self, beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = "sigmoid", reduction: str = "mean", *, empty: str = "nan"
    ) -> None:
        super().__init__(reduction, empty, {"beta": beta, "label_smoothing": label_smoothing, "loss_type": loss_type})


class CPOLoss(_PreferenceLoss):
    """Contrastive preference optimisation: see cpo_loss."""

    function = staticmethod(cpo_loss)

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        cpo_alpha: float = 1.0,
        reduction: str = "mean",
        *,
        empty: str = "nan",
    ) -> None:
        settings = {"beta": beta, "label_smoothing": label_smoothing, "loss_type": loss_type, "cpo_alpha": cpo_alpha}
        super().__init__(reduction, empty, settings)


class SimPOLoss(_PreferenceLoss):
    """Simple preference optimisation: see simpo_loss."""

    function = staticmethod(simpo_loss)

    def __init__(
        self,
        beta: float = 2.0,
        gamma: float = 0.5,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        reduction: str = "mean",
        *,
        empty: str = "nan",
    ) -> None:
        settings = {"beta": beta, "gamma": gamma, "label_smoothing": label_smoothing, "loss_type": loss_type}
        super().__init__(reduction, empty, settings)


class ORPOLoss(_PreferenceLoss):
    """Odds-ratio preference optimisation: see orpo_loss."""

    function = staticmethod(orpo_loss)

    def __init__(self, beta: float = 0.1, alpha: float = 1.0, reduction: str = "mean", *, empty: str = "nan") -> None:
        super().__init__(reduction, empty, {"beta": beta, "alpha": alpha})


class KTOLoss(_PreferenceLoss):
    """Kahneman-Tversky optimisation: see kto_loss. Weights per completion are given per call, as is the baseline kl."""

    function = staticmethod(kto_loss)

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reduction: str = "mean",
        *,
        empty: str = "nan",
    ) -> None:
        settings = {"beta": beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        super().__init__(reduction, empty, settings)


class GRPOLoss(_PreferenceLoss):
    """Group-relative policy optimisation: see grpo_loss."""

    function = staticmethod(grpo_loss)

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        importance_sampling_level: str = "token",
        loss_type: str = "grpo",
        delta: float | None = None,
        max_completion_length: int | None = None,
        reduction: str = "mean",
        *,
        empty: str = "nan",
    ) -> None:
        settings = {
            "epsilon": epsilon,
            "epsilon_high": epsilon_high,
            "beta": beta,
            "importance_sampling_level": importance_sampling_level,
            "loss_type": loss_type,
            "delta": delta,
            "max_completion_length": max_completion_length,
        }
        super().__init__(reduction, empty, settings)
