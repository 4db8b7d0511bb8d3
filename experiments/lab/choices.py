"""The options of those groups of conf/ whose option decides the settings, and which of them go together."""

from collections.abc import Mapping
from typing import Any

from lab.detection_schema import DETECTION_DATA, DetectionDataConfig
from lab.detector_schema import BOX_LOSSES, DETECTORS, DetectionConfig, DetectorConfig
from lab.errors import UserError, unknown
from lab.loss_schema import LOSSES
from lab.schema import (
    ClassificationConfig,
    ClassifierConfig,
    DataConfig,
    DigitsConfig,
    DownloadedConfig,
    FolderConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
)

TASKS: dict[str, type[TaskConfig]] = {"classification": ClassificationConfig, "detection": DetectionConfig}
MODELS: dict[str, type[ModelConfig]] = {"classifier": ClassifierConfig, **DETECTORS}
DATA: dict[str, type[DataConfig]] = {
    "digits": DigitsConfig,
    "folder": FolderConfig,
    "cifar10": DownloadedConfig,
    "cifar100": DownloadedConfig,
    "mnist": DownloadedConfig,
    **DETECTION_DATA,
}
# beside loss=custom and box_loss=custom
DETECTION_LOSSES = ("focal", "quality_focal", "varifocal", "bce", "asymmetric", "poly_bce")
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"task": TASKS, "model": MODELS, "loss": LOSSES, "box_loss": BOX_LOSSES, "data": DATA}


def schema_of(group: str, given: Any) -> Any:
    """The schema of what conf/ gives a group: by its name, a model's by whether it is a detector, and which."""
    return SCHEMAS[group][given.get("detector", "classifier") if group == "model" else given.name]


def agree(config: TrainConfig) -> None:
    """Raise UserError unless model, data and losses are of the task."""
    detects = isinstance(config.task, DetectionConfig)
    if isinstance(config.model, DetectorConfig) != detects:
        wanted = "a detector, such as fcos_resnet50 or retinanet_tiny" if detects else "a classifier, such as resnet18"
        raise UserError(f"task={config.task.name} takes {wanted}; got model.name={config.model.name} of another task.")
    if isinstance(config.data, DetectionDataConfig) != detects:
        fitting = [name for name, schema in DATA.items() if issubclass(schema, DetectionDataConfig) == detects]
        raise UserError(f"data={config.data.name}: task={config.task.name} takes {', '.join(fitting)}.")
    if detects and config.loss.name not in (*DETECTION_LOSSES, "custom"):
        raise unknown(f"loss={config.loss.name} with task=detection", config.loss.name, (*DETECTION_LOSSES, "custom"))
    if not detects and config.box_loss.name != "auto":
        raise UserError(f"box_loss={config.box_loss.name}: only task=detection has boxes.")
