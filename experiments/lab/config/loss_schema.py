"""The settings of each loss: those of its signature, from loss_settings.py, and what the app adds."""

from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar, TypeVar

from lab.config import loss_settings
from lab.config.fields import choice, number, setting, some

Config = TypeVar("Config")


@dataclass
class LossConfig:
    """takes: what the loss takes of a model: its logits, or their softmax or sigmoid. activation: what makes probabilities of its logits.

    kernels: whether it has any; what has none is plain torch.
    fused_head: compute it together with the classifier's last layer, so that in training the logits of a batch never exist at once.
    """

    takes: ClassVar[str] = "logits"
    activation: ClassVar[str] = "softmax"
    kernels: ClassVar[bool] = True
    name: str = "ce"
    implementation: str = choice("lossforge", "lossforge", "torch")
    fused_head: bool = False

    @property
    def title(self) -> str:
        return self.name


@dataclass
class CrossEntropyConfig(LossConfig):
    class_weight: list[float] | None = number(None, least=0)


@dataclass
class SigmoidConfig(LossConfig):
    """prior_bias: start a classifier's probabilities at the classes' mean share rather than at a half."""

    prior_bias: bool = True


@dataclass
class BceConfig(SigmoidConfig):
    pos_weight: list[float] | None = number(None, least=0)


@dataclass
class AsymmetricConfig(SigmoidConfig):
    prior_bias: bool = False  # negatives count by p^γ₋: at the share of a rare class they would hardly be learned from


@dataclass
class LogitAdjustedConfig(LossConfig):
    """The classes' priors are their shares of the training samples."""


@dataclass
class PreferenceConfig(SigmoidConfig):
    group_weight: list[float] | None = number(None, least=0)


@dataclass
class BradleyTerryConfig(LossConfig):
    """Of pairs. margin: by how much the preferred one's reward shall lead. label_smoothing: share of preferences taken to be swapped.

    center_rewards_coefficient: draws rewards to a mean of zero.
    """

    activation: ClassVar[str] = "sigmoid"
    kernels: ClassVar[bool] = False
    name: str = "bradley_terry"
    implementation: str = choice("lossforge", "lossforge")
    margin: float = number(0.0, least=0)
    label_smoothing: float = number(0.0, least=0, most=0.5)
    center_rewards_coefficient: float = number(0.0, least=0)


@dataclass
class CustomConfig(LossConfig):
    """A loss of one's own, of lossforge's decorators or plain torch: a function or a module of (logits, target)."""

    name: str = setting("custom", "a loss of one's own")
    target: str = setting("???", "the loss, as module:name or path/to/file.py:name")
    hyper: dict[str, float] = some(dict, "its hyper-parameters, by name")
    probabilities: str = choice(
        "auto", "auto", "softmax", "sigmoid", meaning="what its logits are trained for; auto: sigmoid for an element-wise loss"
    )

    @property
    def title(self) -> str:
        return self.target.rpartition(":")[2]


def with_settings(base: type[Config], name: str, settings: dict[str, tuple[Any, Any]], **namespace: Any) -> type[Config]:
    """Return the schema `base` with the settings of a loss's signature."""
    added = [("name", str, name), *((each, kind, item) for each, (kind, item) in settings.items())]
    return make_dataclass(f"{base.__name__}_{name}", added, bases=(base,), namespace={"__module__": __name__, **namespace})


OWN: dict[str, type[LossConfig]] = {
    "ce": CrossEntropyConfig,
    "bce": BceConfig,
    "asymmetric": AsymmetricConfig,
    "logit_adjusted_ce": LogitAdjustedConfig,
    "preference_bce": PreferenceConfig,
    "preference_bce_probability": PreferenceConfig,
}
"""Losses of which the app sets more than their signature has."""
LOSSES: dict[str, type[LossConfig]] = {
    name: with_settings(
        OWN.get(name, SigmoidConfig if activation == "sigmoid" else LossConfig), name, settings, takes=takes, activation=activation
    )
    for name, (takes, activation, settings) in loss_settings.LOSSES.items()
} | {"bradley_terry": BradleyTerryConfig, "custom": CustomConfig}
