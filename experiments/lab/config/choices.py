"""The options of those groups of conf/ whose option decides the settings, and which of them go together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.config.detection_schema import DETECTION_DATA, DetectionDataConfig
from lab.config.detector_schema import BOX_LOSSES, DETECTORS, DetectionConfig, DetectorConfig
from lab.config.errors import UserError, unknown
from lab.config.loss_schema import LOSSES, CustomConfig
from lab.config.schema import (
    ClassificationConfig,
    ClassifierConfig,
    DataConfig,
    DigitsConfig,
    DownloadedConfig,
    FolderConfig,
    ImagesConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
)
from lab.config.task_schema import DigitPairsConfig, DistillationConfig, MultilabelConfig, PreferenceTaskConfig

TASKS: dict[str, type[TaskConfig]] = {
    "classification": ClassificationConfig,
    "detection": DetectionConfig,
    "multilabel": MultilabelConfig,
    "distillation": DistillationConfig,
    "preference": PreferenceTaskConfig,
}
MODELS: dict[str, type[ModelConfig]] = {"classifier": ClassifierConfig, **DETECTORS}
DATA: dict[str, type[DataConfig]] = {
    "digits": DigitsConfig,
    "folder": FolderConfig,
    "cifar10": DownloadedConfig,
    "cifar100": DownloadedConfig,
    "mnist": DownloadedConfig,
    "digit_pairs": DigitPairsConfig,
    **DETECTION_DATA,
}
# beside loss=custom and box_loss=custom
DETECTION_LOSSES = ("focal", "quality_focal", "varifocal", "bce", "asymmetric", "poly_bce")
MULTILABEL_LOSSES = ("bce", "focal", "asymmetric", "poly_bce", "quality_focal", "varifocal", "custom")
PREFERENCE_LOSSES = ("bradley_terry", "preference_bce", "preference_bce_probability")
SOFTMAX_LOSSES = tuple(name for name, schema in LOSSES.items() if schema.says == "softmax" and schema is not CustomConfig)
CLASSIFIER_LOSSES = tuple(name for name in LOSSES if name != "bradley_terry")
FUSED_HEAD_TASKS = ("classification", "multilabel")
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"task": TASKS, "model": MODELS, "loss": LOSSES, "box_loss": BOX_LOSSES, "data": DATA}


def schema_of(group: str, schemas: Mapping[str, Any], given: Any) -> Any:
    """The schema of what conf/ gives a group: by its name, a model's by whether it is a detector, and which."""
    return schemas[given.get("detector", "classifier") if group == "model" else given.name]


@dataclass(frozen=True)
class Fitting:
    """What a task takes."""

    data: type[DataConfig]
    losses: tuple[str, ...]
    model: type[ModelConfig] = ClassifierConfig


FITTING = {
    "classification": Fitting(ImagesConfig, CLASSIFIER_LOSSES),
    "detection": Fitting(DetectionDataConfig, (*DETECTION_LOSSES, "custom"), DetectorConfig),
    "multilabel": Fitting(DetectionDataConfig, MULTILABEL_LOSSES),
    "distillation": Fitting(ImagesConfig, SOFTMAX_LOSSES),
    "preference": Fitting(DigitPairsConfig, PREFERENCE_LOSSES),
}


def agree(config: TrainConfig) -> None:
    """Raise UserError unless model, data and losses are of the task."""
    task, fitting = config.task.name, FITTING[config.task.name]
    if not isinstance(config.model, fitting.model):
        detects = fitting.model is DetectorConfig
        wanted = "a detector, such as fcos_resnet50 or retinanet_tiny" if detects else "a classifier, such as resnet18"
        raise UserError(f"task={task} takes {wanted}; got model.name={config.model.name} of another task.")
    if not isinstance(config.data, fitting.data):
        names = [name for name, schema in DATA.items() if issubclass(schema, fitting.data)]
        raise UserError(f"data={config.data.name}: task={task} takes {', '.join(names)}.")
    if config.loss.name not in fitting.losses:
        raise unknown(f"loss={config.loss.name} with task={task}", config.loss.name, fitting.losses)
    if config.loss.fused_head:
        _check_fused_head(config)
    if task != "detection" and config.box_loss.name != "auto":
        raise UserError(f"box_loss={config.box_loss.name}: only task=detection has boxes.")


def _check_fused_head(config: TrainConfig) -> None:
    """Raise UserError unless the loss is the only one of logits, and of the logits themselves; the model is judged once it is made."""
    task, loss, reason = config.task.name, config.loss, None
    if task not in FUSED_HEAD_TASKS:
        reason = f"task={task} does not have one loss of one head's logits; {' and '.join(FUSED_HEAD_TASKS)} have"
    elif loss.implementation != "lossforge":
        reason = f"loss.implementation={loss.implementation} has no fused losses; lossforge has"
    elif loss.given != "logits":
        reason = f"loss={loss.name} is computed from the {loss.given} of all logits, which a fused loss does not have"
    if reason:
        raise UserError(f"loss.fused_head=true: {reason}.")
