"""The options of those groups of conf/ whose option decides the settings, and which of them go together."""

from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any

from omegaconf import OmegaConf

from lab.config.errors import UserError, unknown
from lab.config.loss_schema import LOSSES
from lab.config.model_view import fill_from_model
from lab.config.objects import find
from lab.config.schema import (
    ClassifierConfig,
    CustomDataConfig,
    CustomModelConfig,
    DataConfig,
    DigitsConfig,
    DownloadedConfig,
    FolderConfig,
    ModelConfig,
    PhotosConfig,
    TaskConfig,
    TrainConfig,
)
from lab.tasks.classification.spec import SPEC as CLASSIFICATION
from lab.tasks.detection.spec import BOX_LOSSES
from lab.tasks.detection.spec import SPEC as DETECTION
from lab.tasks.distillation.spec import SPEC as DISTILLATION
from lab.tasks.multilabel.spec import SPEC as MULTILABEL
from lab.tasks.preference.spec import SPEC as PREFERENCE
from lab.tasks.segmentation.spec import SPEC as SEGMENTATION
from lab.tasks.spec import TaskSpec

OWN = "custom"
"""The option of a group that takes code of the user's own, which its setting `target` names."""
TASKS: dict[str, TaskSpec] = {spec.name: spec for spec in (CLASSIFICATION, DETECTION, MULTILABEL, DISTILLATION, PREFERENCE, SEGMENTATION)}
MODELS: dict[str, type[ModelConfig]] = {"classifier": ClassifierConfig, OWN: CustomModelConfig}
DATA: dict[str, type[DataConfig]] = {
    "digits": DigitsConfig,
    "folder": FolderConfig,
    OWN: CustomDataConfig,
    "cifar10": DownloadedConfig,
    "cifar100": DownloadedConfig,
    "mnist": DownloadedConfig,
}
for spec in TASKS.values():
    MODELS |= spec.model_schemas
    DATA |= spec.data_schemas
TASK_SCHEMAS: dict[str, type[TaskConfig]] = {name: spec.config for name, spec in TASKS.items()} | {OWN: TaskConfig}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"task": TASK_SCHEMAS, "model": MODELS, "loss": LOSSES, "box_loss": BOX_LOSSES, "data": DATA}


def spec_of(config: TaskConfig) -> TaskSpec:
    return TASKS[config.name] if config.name in TASKS else own_task(str(config.target))


def own_task(target: str) -> TaskSpec:
    """The record of a user's own task, whose schemas of data and models are known from now on.

    Raises:
        UserError: `target` names none.
    """
    spec = find("task.target", target)
    if not isinstance(spec, TaskSpec):
        raise UserError(f"task.target={target}: is a {type(spec).__name__}; a lab.tasks.spec.TaskSpec is expected.")
    MODELS.update(spec.model_schemas)
    DATA.update(spec.data_schemas)
    return spec


def schema_of(group: str, schemas: Mapping[str, Any], given: Any) -> Any:
    """The schema of what conf/ gives a group: by its name, a model's by which detector it is, a task of one's own by its record."""
    if group == "task" and given.name == OWN:
        if OmegaConf.is_missing(given, "target"):
            return TaskConfig
        own = own_task(given.target).config
        return make_dataclass(own.__name__, [("name", str, OWN), ("target", str, given.target)], bases=(own,))
    if group == "model":
        return schemas[given.get("detector") or given.get("kind") or (OWN if given.get("name") == OWN else "classifier")]
    return schemas[given.name]


def agree(config: TrainConfig) -> None:
    """Raise UserError unless model, data and losses are of the task; give what the data leaves to the model its values."""
    task, spec = config.task.name, spec_of(config.task)
    if not isinstance(config.model, spec.model):
        raise UserError(f"task={task} takes {spec.example}; got model.name={config.model.name} of another task.")
    if not isinstance(config.data, spec.data):
        names = [name for name, schema in DATA.items() if issubclass(schema, spec.data)]
        raise UserError(f"data={config.data.name}: task={task} takes {', '.join(names)}.")
    if config.loss.name not in spec.losses:
        raise unknown(f"loss={config.loss.name} with task={task}", config.loss.name, spec.losses)
    if config.loss.fused_head:
        _check_fused_head(config)
    if not spec.boxes and config.box_loss.name != "auto":
        raise UserError(f"box_loss={config.box_loss.name}: only task=detection has boxes.")
    if isinstance(config.data, PhotosConfig):
        fill_from_model(config.data, config.model)


def _check_fused_head(config: TrainConfig) -> None:
    """Raise UserError unless the loss is the only one of logits, and of the logits themselves; the model is judged once it is made."""
    task, loss, reason = config.task.name, config.loss, None
    if not spec_of(config.task).fused_head:
        having = " and ".join(name for name, spec in TASKS.items() if spec.fused_head)
        reason = f"task={task} does not have one loss of one head's logits; {having} have"
    elif loss.implementation != "lossforge":
        reason = f"loss.implementation={loss.implementation} has no fused losses; lossforge has"
    elif loss.takes != "logits":
        reason = f"loss={loss.name} is computed from the {loss.takes} of all logits, which a fused loss does not have"
    if reason:
        raise UserError(f"loss.fused_head=true: {reason}.")
