"""The settings of each loss."""

# ruff: noqa: RUF009 (number and choice return dataclass fields)

from dataclasses import dataclass, field
from typing import ClassVar

from lab.fields import choice, number


@dataclass
class LossConfig:
    """given: what the loss takes of a model: its logits, or their softmax or sigmoid. says: what its trained logits' probabilities are.

    kernels: whether it has any; what has none is plain torch.
    """

    given: ClassVar[str] = "logits"
    says: ClassVar[str] = "softmax"
    kernels: ClassVar[bool] = True
    name: str = "ce"
    implementation: str = choice("lossforge", "lossforge", "torch")

    @property
    def title(self) -> str:
        return self.name


@dataclass
class CrossEntropyConfig(LossConfig):
    label_smoothing: float = number(0.0, least=0, most=1)
    z_loss: float = number(0.0, least=0)
    softcap: float | None = number(None, above=0)
    class_weight: list[float] | None = number(None, least=0)


@dataclass
class DifferenceConfig(LossConfig):
    given: ClassVar[str] = "softmax"


@dataclass
class MaeConfig(DifferenceConfig):
    name: str = "mae"


@dataclass
class MseConfig(DifferenceConfig):
    name: str = "mse"


@dataclass
class HuberConfig(DifferenceConfig):
    name: str = "huber"
    delta: float = number(1.0, above=0)


@dataclass
class SmoothL1Config(DifferenceConfig):
    name: str = "smooth_l1"
    beta: float = number(1.0, least=0)


@dataclass
class SigmoidConfig(LossConfig):
    """prior_bias: start a classifier's probabilities at the classes' mean share rather than at a half."""

    says: ClassVar[str] = "sigmoid"
    prior_bias: bool = True


@dataclass
class BceConfig(SigmoidConfig):
    name: str = "bce"
    pos_weight: list[float] | None = number(None, least=0)


@dataclass
class FocalConfig(SigmoidConfig):
    name: str = "focal"
    alpha: float = number(0.25, least=-1, most=1)
    gamma: float = number(2.0, least=0)


@dataclass
class AsymmetricConfig(SigmoidConfig):
    name: str = "asymmetric"
    prior_bias: bool = False  # negatives count by p^γ₋: at the share of a rare class they would hardly be learned from
    gamma_neg: float = number(4.0, least=0)
    gamma_pos: float = number(1.0, least=0)
    clip: float | None = number(0.05, least=0, most=1)


@dataclass
class PolyBceConfig(SigmoidConfig):
    name: str = "poly_bce"
    epsilon: float = number(2.0)
    gamma: float = number(0.0, least=0)
    alpha: float | None = number(None, least=-1, most=1)


@dataclass
class BceSmoothedConfig(SigmoidConfig):
    name: str = "bce_smoothed"
    smoothing: float = number(0.1, least=0, below=1)
    target_threshold: float | None = number(None)


@dataclass
class QualityFocalConfig(SigmoidConfig):
    name: str = "quality_focal"
    beta: float = number(2.0, least=0)


@dataclass
class VarifocalConfig(SigmoidConfig):
    name: str = "varifocal"
    alpha: float = number(0.75, least=0)
    gamma: float = number(2.0, least=0)


@dataclass
class SoftmaxFocalConfig(LossConfig):
    name: str = "softmax_focal"
    gamma: float = number(2.0, least=0)


@dataclass
class PolyCrossEntropyConfig(LossConfig):
    name: str = "poly_ce"
    epsilon: float = number(2.0)
    label_smoothing: float = number(0.0, least=0, below=1)


@dataclass
class GeneralizedCrossEntropyConfig(LossConfig):
    name: str = "generalized_ce"
    q: float = number(0.7, least=0, most=1)


@dataclass
class LogitAdjustedConfig(LossConfig):
    """The classes' priors are their shares of the training samples."""

    name: str = "logit_adjusted_ce"
    tau: float = number(1.0)
    label_smoothing: float = number(0.0, least=0, most=1)


@dataclass
class AsymmetricSingleLabelConfig(LossConfig):
    name: str = "asymmetric_single_label"
    gamma_pos: float = number(1.0, least=0)
    gamma_neg: float = number(4.0, least=0)
    eps: float = number(0.1, least=0, most=1)


@dataclass
class PreferenceConfig(SigmoidConfig):
    name: str = "preference_bce"
    group_weight: list[float] | None = number(None, least=0)


@dataclass
class PreferenceProbabilityConfig(PreferenceConfig):
    given: ClassVar[str] = "sigmoid"
    name: str = "preference_bce_probability"


@dataclass
class BradleyTerryConfig(LossConfig):
    """Of pairs. margin: by how much the preferred one's reward shall lead. label_smoothing: share of preferences taken to be swapped.

    center_rewards_coefficient: draws rewards to a mean of zero.
    """

    says: ClassVar[str] = "sigmoid"
    kernels: ClassVar[bool] = False
    name: str = "bradley_terry"
    implementation: str = choice("lossforge", "lossforge")
    margin: float = number(0.0, least=0)
    label_smoothing: float = number(0.0, least=0, most=0.5)
    center_rewards_coefficient: float = number(0.0, least=0)


@dataclass
class CustomConfig(LossConfig):
    """A loss of one's own: target is module:name or path/to/file.py:name. It takes logits; an element-wise one teaches sigmoids."""

    name: str = "custom"
    target: str = "???"
    hyper: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.target.rpartition(":")[2]


LOSSES: dict[str, type[LossConfig]] = {
    "ce": CrossEntropyConfig,
    "mae": MaeConfig,
    "mse": MseConfig,
    "huber": HuberConfig,
    "smooth_l1": SmoothL1Config,
    "bce": BceConfig,
    "focal": FocalConfig,
    "asymmetric": AsymmetricConfig,
    "poly_bce": PolyBceConfig,
    "bce_smoothed": BceSmoothedConfig,
    "quality_focal": QualityFocalConfig,
    "varifocal": VarifocalConfig,
    "softmax_focal": SoftmaxFocalConfig,
    "poly_ce": PolyCrossEntropyConfig,
    "generalized_ce": GeneralizedCrossEntropyConfig,
    "logit_adjusted_ce": LogitAdjustedConfig,
    "asymmetric_single_label": AsymmetricSingleLabelConfig,
    "preference_bce": PreferenceConfig,
    "preference_bce_probability": PreferenceProbabilityConfig,
    "bradley_terry": BradleyTerryConfig,
    "custom": CustomConfig,
}
