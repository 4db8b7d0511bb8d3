"""The options of those groups of conf/ whose option decides the settings, and which of them go together."""

from collections.abc import Mapping
from typing import Any

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
)

TASKS: dict[str, type[TaskConfig]] = {"classification": ClassificationConfig}
MODELS: dict[str, type[ModelConfig]] = {"classifier": ClassifierConfig}
DATA: dict[str, type[DataConfig]] = {
    "digits": DigitsConfig,
    "folder": FolderConfig,
    "cifar10": DownloadedConfig,
    "cifar100": DownloadedConfig,
    "mnist": DownloadedConfig,
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"task": TASKS, "model": MODELS, "loss": LOSSES, "data": DATA}


def schema_of(group: str, given: Any) -> Any:
    """The schema of what conf/ gives a group: by its name, a model's by whether it is a detector, and which."""
    return SCHEMAS[group][given.get("detector", "classifier") if group == "model" else given.name]
