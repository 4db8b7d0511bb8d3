"""The preference objectives as modules: their functions with the options kept.

`forward` takes the function's tensors in its order, and what each call brings (normalizer, margin, policy_nll_loss, mask, kl) by keyword.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.modules.common import LossModule
from lossforge.losses.preference.grpo import grpo_loss
from lossforge.losses.preference.kto import kto_loss
from lossforge.losses.preference.pairwise import bradley_terry_loss, cpo_loss, dpo_loss, orpo_loss, simpo_loss
from lossforge.losses.types import Empty, Reduction


class PreferenceModule(LossModule):
    empty: Empty

    def __init_subclass__(cls) -> None:
        cls.__init__ = checks.named(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, *, reduction: str, empty: str, **named: Any) -> None:
        checks.one_of("empty", empty, checks.EMPTY)
        super().__init__({}, **named, reduction=reduction, empty=empty)

    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor:
        return self.compute(*logps, **per_call)

    if TYPE_CHECKING:

        def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...


class BradleyTerryLoss(PreferenceModule):
    """Bradley-Terry loss of a reward model: see bradley_terry_loss. The margin is given per call."""

    function = staticmethod(bradley_terry_loss)
    label_smoothing: float
    center_rewards_coefficient: float

    def __init__(
        self, label_smoothing: float = 0.0, center_rewards_coefficient: float = 0.0, reduction: Reduction = "mean", *, empty: Empty = "nan"
    ) -> None:
        super().__init__(
            label_smoothing=label_smoothing, center_rewards_coefficient=center_rewards_coefficient, reduction=reduction, empty=empty
        )


class DPOLoss(PreferenceModule):
    """Direct preference optimisation: see dpo_loss."""

    function = staticmethod(dpo_loss)
    beta: float
    label_smoothing: float
    loss_type: str

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        reduction: Reduction = "mean",
        *,
        empty: Empty = "nan",
    ) -> None:
        super().__init__(beta=beta, label_smoothing=label_smoothing, loss_type=loss_type, reduction=reduction, empty=empty)


class CPOLoss(PreferenceModule):
    """Contrastive preference optimisation: see cpo_loss."""

    function = staticmethod(cpo_loss)
    beta: float
    label_smoothing: float
    loss_type: str
    cpo_alpha: float

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        cpo_alpha: float = 1.0,
        reduction: Reduction = "mean",
        *,
        empty: Empty = "nan",
    ) -> None:
        super().__init__(
            beta=beta, label_smoothing=label_smoothing, loss_type=loss_type, cpo_alpha=cpo_alpha, reduction=reduction, empty=empty
        )


class SimPOLoss(PreferenceModule):
    """Simple preference optimisation: see simpo_loss."""

    function = staticmethod(simpo_loss)
    beta: float
    gamma: float
    label_smoothing: float
    loss_type: str

    def __init__(
        self,
        beta: float = 2.0,
        gamma: float = 0.5,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        reduction: Reduction = "mean",
        *,
        empty: Empty = "nan",
    ) -> None:
        super().__init__(beta=beta, gamma=gamma, label_smoothing=label_smoothing, loss_type=loss_type, reduction=reduction, empty=empty)


class ORPOLoss(PreferenceModule):
    """Odds-ratio preference optimisation: see orpo_loss."""

    function = staticmethod(orpo_loss)
    beta: float
    alpha: float

    def __init__(self, beta: float = 0.1, alpha: float = 1.0, reduction: Reduction = "mean", *, empty: Empty = "nan") -> None:
        super().__init__(beta=beta, alpha=alpha, reduction=reduction, empty=empty)


class KTOLoss(PreferenceModule):
    """Kahneman-Tversky optimisation: see kto_loss. Weights per completion are given per call, as is the baseline kl."""

    function = staticmethod(kto_loss)
    beta: float
    desirable_weight: float
    undesirable_weight: float

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reduction: Reduction = "mean",
        *,
        empty: Empty = "nan",
    ) -> None:
        super().__init__(
            beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight, reduction=reduction, empty=empty
        )


class GRPOLoss(PreferenceModule):
    """Group-relative policy optimisation: see grpo_loss."""

    function = staticmethod(grpo_loss)
    epsilon: float
    epsilon_high: float | None
    beta: float
    importance_sampling_level: str
    loss_type: str
    delta: float | None
    max_completion_length: int | None

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        importance_sampling_level: str = "token",
        loss_type: str = "grpo",
        delta: float | None = None,
        max_completion_length: int | None = None,
        reduction: Reduction = "mean",
        *,
        empty: Empty = "nan",
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            beta=beta,
            importance_sampling_level=importance_sampling_level,
            loss_type=loss_type,
            delta=delta,
            max_completion_length=max_completion_length,
            reduction=reduction,
            empty=empty,
        )
