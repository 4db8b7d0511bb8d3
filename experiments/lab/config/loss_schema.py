"""Schemas of the losses' settings: from their signatures (loss_settings.py), and the app's additions."""

from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar, TypeVar

from lab.config import loss_settings
from lab.config.fields import choice, number, setting, some

Config = TypeVar("Config")


@dataclass
class LossConfig:
    """takes: the loss's input, one of those below. activation: turns its logits into probabilities.

    kernels: whether the loss has kernels; otherwise it is plain torch. fused: whether it can be fused with the model's last layer.

    A classifier's logits, their softmax or sigmoid (OF_CLASSIFIERS); logits with several classes of a sample ("label sets") or of regions;
    cosines of features with a vector of each class; features of images and texts; features of images with their labels, also with a
    learned proxy of each class ("proxies"), or of two views of an image (OF_FEATURES).
    """

    takes: ClassVar[str] = "logits"
    activation: ClassVar[str] = "softmax"
    kernels: ClassVar[bool] = True
    fused: ClassVar[bool] = True
    name: str = setting("ce", "the loss")
    implementation: str = choice("lossforge", "lossforge", "torch", meaning="whose code computes the loss")
    fused_head: bool = setting(False, "compute loss and last layer of the classifier together; logits are never in memory")

    @property
    def title(self) -> str:
        return self.name


OF_CLASSIFIERS = ("logits", "softmax", "sigmoid")
OF_FEATURES = ("labels", "proxies", "views")


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
    # negatives are weighted by p^γ₋, which is tiny if p starts at the share of a rare class: the model would hardly learn from them
    prior_bias: bool = setting(False, "start probabilities at the classes' mean share rather than at a half")


@dataclass
class LogitAdjustedConfig(LossConfig):
    """The classes' priors are their shares of the training samples."""


@dataclass
class PreferenceConfig(SigmoidConfig):
    group_weight: list[float] | None = number(None, "a factor for each group of annotators", least=0)


@dataclass
class BradleyTerryConfig(LossConfig):
    """The Bradley-Terry loss of pairs."""

    activation: ClassVar[str] = "sigmoid"
    kernels: ClassVar[bool] = False
    name: str = setting("bradley_terry", "the loss")
    implementation: str = choice("lossforge", "lossforge", meaning="whose code computes the loss")
    margin: float = number(0.0, "by how much the preferred reward should exceed the rejected one", least=0)
    label_smoothing: float = number(0.0, "share of preferences that are taken to be swapped", least=0, most=0.5)
    center_rewards_coefficient: float = number(0.0, "how strongly rewards are pulled to a mean of zero", least=0)


@dataclass
class SeesawConfig(LossConfig):
    """The seesaw loss; the classes' samples are counted in the training data, once, where mmdetection counts them as it trains."""

    kernels: ClassVar[bool] = False  # of its cross entropy; the app does not record them
    name: str = setting("seesaw", "the loss")
    implementation: str = choice("lossforge", "lossforge", meaning="whose code computes the loss")
    p: float = number(0.8, "how far rare classes are spared as negatives of frequent ones; 0: not", least=0)
    q: float = number(2.0, "how far classes with a larger score than the target's are pushed down again; 0: not", least=0)
    eps: float = number(1e-2, "the least score of the target", above=0, most=1)


@dataclass
class OwnHeadConfig(LossConfig):
    """A loss of cosines, which the model's last layer gives, times the scale: its weights and its features have length 1."""

    fused: ClassVar[bool] = False


@dataclass
class UnfusedConfig(LossConfig):
    fused: ClassVar[bool] = False


@dataclass
class GeneralizedDiceConfig(LossConfig):
    takes: ClassVar[str] = "regions"
    name: str = setting("generalized_dice", "the loss")
    weighting: str = choice("square", "square", "simple", "uniform", meaning="a class's weight: 1/Y² of its Y pixels in the image, 1/Y, 1")
    smooth_nr: float = number(1e-5, "n, added to the numerator", least=0)
    smooth_dr: float = number(1e-5, "d, added to the denominator", least=0)


@dataclass
class MccConfig(LossConfig):
    """1 less the Matthews correlation coefficient of each class of each image."""

    takes: ClassVar[str] = "regions"
    name: str = setting("mcc", "the loss")
    smooth_nr: float = number(0.0, "n, added to the numerator", least=0)
    smooth_dr: float = number(1e-5, "d, added below the root", least=0)


@dataclass
class BoundaryConfig(LossConfig):
    """A loss of distances to the true boundary, beside the Dice loss, because it alone hardly leaves an empty prediction."""

    takes: ClassVar[str] = "regions"
    name: str = setting("boundary", "the loss")
    lambda_dice: float = number(1.0, "factor of the Dice loss", least=0)
    lambda_distance: float = number(0.01, "factor of the loss of distances, which are in pixels", least=0)


@dataclass
class HausdorffConfig(BoundaryConfig):
    """A loss of distances to the true and the predicted boundary, beside the Dice loss."""

    name: str = setting("hausdorff", "the loss")
    alpha: float = number(2.0, "α of at least 0, how much far errors count more", least=0)


@dataclass
class ClipConfig(LossConfig):
    """Symmetric InfoNCE of the pairs of a batch, in a learned scale (CLIP)."""

    takes: ClassVar[str] = "features"
    name: str = setting("clip", "the loss")
    scale: float = number(1 / 0.07, "factor of cosines at the start, which is learned: 1 / temperature", above=0)


@dataclass
class SiglipConfig(ClipConfig):
    """The pairwise sigmoid loss of the pairs of a batch, in a learned scale and bias (SigLIP)."""

    activation: ClassVar[str] = "sigmoid"
    name: str = setting("siglip", "the loss")
    scale: float = number(10.0, "factor of cosines at the start, which is learned: 1 / temperature", above=0)
    bias: float = number(-10.0, "what is added to scaled cosines at the start, which is learned")


@dataclass
class CustomConfig(LossConfig):
    """A custom loss, from lossforge's decorators or plain torch: a function or a module of (logits, target)."""

    name: str = setting("custom", "a custom loss")
    target: str = setting("???", "the loss, as module:name or path/to/file.py:name", code=True)
    hyper: dict[str, float] = some(dict, "its hyper-parameters, by name")
    probabilities: str = choice(
        "auto", "auto", "softmax", "sigmoid", meaning="how its logits become probabilities; auto: sigmoid for an element-wise loss"
    )

    @property
    def title(self) -> str:
        return self.target.rpartition(":")[2]


def with_settings(base: type[Config], name: str, settings: dict[str, tuple[Any, Any]], **namespace: Any) -> type[Config]:
    """Return the schema `base` with the settings of a loss's signature."""
    added = [("name", str, name), *((each, kind, item) for each, (kind, item) in settings.items())]
    return make_dataclass(f"{base.__name__}_{name}", added, bases=(base,), namespace={"__module__": __name__, **namespace})


EXTENDED: dict[str, type[LossConfig]] = {
    "ce": CrossEntropyConfig,
    "bce": BceConfig,
    "asymmetric": AsymmetricConfig,
    "logit_adjusted_ce": LogitAdjustedConfig,
    "preference_bce": PreferenceConfig,
    "preference_bce_probability": PreferenceConfig,
    "arcface": OwnHeadConfig,
    "cosface": OwnHeadConfig,
    "ldam": OwnHeadConfig,
    "multi_margin": UnfusedConfig,
    "zlpr": UnfusedConfig,
    "two_way": UnfusedConfig,
}
"""Losses for which the app has settings beyond their signature."""
LOSSES: dict[str, type[LossConfig]] = {
    name: with_settings(
        EXTENDED.get(name, SigmoidConfig if activation == "sigmoid" else LossConfig), name, settings, takes=takes, activation=activation
    )
    for name, (takes, activation, settings) in loss_settings.LOSSES.items()
} | {
    "bradley_terry": BradleyTerryConfig,
    "seesaw": SeesawConfig,
    "generalized_dice": GeneralizedDiceConfig,
    "mcc": MccConfig,
    "boundary": BoundaryConfig,
    "hausdorff": HausdorffConfig,
    "clip": ClipConfig,
    "siglip": SiglipConfig,
    "custom": CustomConfig,
}
