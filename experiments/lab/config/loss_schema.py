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
    """

    takes: ClassVar[str] = "logits"
    activation: ClassVar[str] = "softmax"
    kernels: ClassVar[bool] = True
    name: str = setting("ce", "the loss")
    implementation: str = choice("lossforge", "lossforge", "torch", meaning="whose code computes it")
    fused_head: bool = setting(False, "compute it with the classifier's last layer, so that the logits of a training batch are never kept")

    @property
    def title(self) -> str:
        return self.name


@dataclass
class CrossEntropyConfig(LossConfig):
    class_weight: list[float] | None = number(None, "a factor for each class", least=0)


@dataclass
class SigmoidConfig(LossConfig):
    prior_bias: bool = setting(True, "start probabilities at the classes' mean share rather than at a half")


@dataclass
class BceConfig(SigmoidConfig):
    pos_weight: list[float] | None = number(None, "a factor for the positives of each class", least=0)


@dataclass
class AsymmetricConfig(SigmoidConfig):
    # negatives count by p^γ₋: at the share of a rare class they would hardly be learned from
    prior_bias: bool = setting(False, "start probabilities at the classes' mean share rather than at a half")


@dataclass
class LogitAdjustedConfig(LossConfig):
    """The classes' priors are their shares of the training samples."""


@dataclass
class PreferenceConfig(SigmoidConfig):
    group_weight: list[float] | None = number(None, "a factor for each group of annotators", least=0)


@dataclass
class BradleyTerryConfig(LossConfig):
    """Of pairs."""

    activation: ClassVar[str] = "sigmoid"
    kernels: ClassVar[bool] = False
    name: str = setting("bradley_terry", "the loss")
    implementation: str = choice("lossforge", "lossforge", meaning="whose code computes it")
    margin: float = number(0.0, "by how much the preferred one's reward shall lead", least=0)
    label_smoothing: float = number(0.0, "share of preferences that are taken to be swapped", least=0, most=0.5)
    center_rewards_coefficient: float = number(0.0, "how strongly rewards are drawn to a mean of zero", least=0)


@dataclass
class CustomConfig(LossConfig):
    """A loss of one's own, of lossforge's decorators or plain torch: a function or a module of (logits, target)."""

    name: str = setting("custom", "a loss of one's own")
    target: str = setting("???", "the loss, as module:name or path/to/file.py:name", code=True)
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
