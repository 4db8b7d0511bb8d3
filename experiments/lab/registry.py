"""The tasks, models, losses and sources of data that there are, by the records of their folders, and which go together."""

from collections.abc import Iterable, Mapping
from dataclasses import make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lab.base.errors import UserError
from lab.config import schema
from lab.config.loss_schema import LOSSES
from lab.config.model_view import fill_from_model
from lab.config.objects import CUSTOM, find
from lab.data.specs import SOURCES
from lab.tasks.spec import TaskSpec

ROOMS = ("tasks", "detectors")
"""Folders of the app in which each package is a task, whose record is its `SPEC`."""
FOLDERS = sorted(
    (path.parent for room in ROOMS for path in Path(__file__).parent.glob(f"{room}/*/__init__.py")), key=lambda path: path.name
)
SPECS: list[TaskSpec] = [import_module(f"lab.{folder.parent.name}.{folder.name}").SPEC for folder in FOLDERS]
TASKS = {spec.name: spec for spec in SPECS}
MODELS: dict[str, type[schema.ModelConfig]] = {"classifier": schema.ClassifierConfig, CUSTOM: schema.CustomModelConfig}
DATA: dict[str, type[schema.DataConfig]] = {name: spec.schema for name, spec in SOURCES.items()}
BOX_LOSSES: dict[str, type[schema.BoxLossConfig]] = {"auto": schema.BoxLossConfig}


def _add(spec: TaskSpec) -> None:
    """Register the models, the losses of boxes and the data sources that come with a task."""
    MODELS.update(spec.model_schemas)
    BOX_LOSSES.update(spec.box_losses)
    SOURCES.update({source.name: source for source in spec.data_sources})
    DATA.update({source.name: source.schema for source in spec.data_sources})


for each in SPECS:
    _add(each)
TASK_SCHEMAS: dict[str, type[schema.TaskConfig]] = {name: spec.config for name, spec in TASKS.items()} | {CUSTOM: schema.TaskConfig}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"task": TASK_SCHEMAS, "model": MODELS, "loss": LOSSES, "box_loss": BOX_LOSSES, "data": DATA}


def spec_of(config: schema.TaskConfig) -> TaskSpec:
    return TASKS[config.name] if config.name in TASKS else custom_task(str(config.target))


def custom_task(target: str) -> TaskSpec:
    """Return the record of a user's own task, and register its schemas of data and models.

    Raises:
        UserError: `target` does not name a TaskSpec.
    """
    spec = find("task.target", target)
    if not isinstance(spec, TaskSpec):
        raise UserError(f"task.target={target}: is a {type(spec).__name__}; a lab.tasks.spec.TaskSpec is expected.")
    _add(spec)
    return spec


def schema_of(group: str, schemas: Mapping[str, Any], given: Any) -> Any:
    """Return the schema of a group's settings: by name; by detector for a detection model; by its record for a custom task."""
    if group == "task" and given.name == CUSTOM:
        if OmegaConf.is_missing(given, "target"):
            return schema.TaskConfig
        own = custom_task(given.target).config
        return make_dataclass(own.__name__, [("name", str, CUSTOM), ("target", str, given.target)], bases=(own,))
    if group == "model":
        return schemas[given.get("detector") or given.get("kind") or (CUSTOM if given.get("name") == CUSTOM else "classifier")]
    return schemas[given.name]


def tasks_with_loss(name: str) -> list[str]:
    """Return the tasks that take a loss."""
    return [task for task, spec in TASKS.items() if name in spec.losses]


def tasks_with_box_loss(name: str) -> list[str]:
    """Return the tasks that take a loss of boxes."""
    return [task for task, spec in TASKS.items() if name in spec.boxes]


def usual_loss(composed: Any) -> str:
    """Return the loss that loss=auto stands for, the detector's `usual_loss`.

    Raises:
        UserError: the task has no detectors.
    """
    task, detector = composed.task.name, composed.model.get("detector")
    usual = getattr(MODELS.get(detector), "usual_loss", TASKS[task].usual_loss if task in TASKS else None)
    if usual is None:
        raise UserError(f"loss=auto: task={task} needs the name of a loss; only a detector has a usual one.")
    return str(usual)


def _tasks(names: Iterable[str]) -> str:
    """Return "task=a, task=b and task=c"."""
    *others, last = [f"task={name}" for name in names] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def agree(config: schema.TrainConfig) -> None:
    """Raise UserError unless model, data and losses fit the task; fill in the data settings that are left to the model."""
    task, spec = config.task.name, spec_of(config.task)
    if not isinstance(config.model, spec.model):
        raise UserError(f"task={task} takes {spec.example}; got {config.model.title}, a model of another task.")
    if not isinstance(config.data, spec.data):
        names = [name for name, kind in DATA.items() if issubclass(kind, spec.data)]
        raise UserError(f"data={config.data.name}: task={task} takes {', '.join(names)}.")
    if (loss := config.loss.name) not in spec.losses:
        others = _tasks(tasks_with_loss(loss))
        raise UserError(f"loss={loss}: is a loss of {others or 'no task here'}; task={task} takes {', '.join(sorted(spec.losses))}.")
    if config.loss.fused_head:
        _check_fused_head(config)
    box_loss = config.box_loss.name
    if box_loss not in ("auto", *spec.boxes):
        others = _tasks(tasks_with_box_loss(box_loss))
        known = f"one of auto, {', '.join(spec.boxes)}" if spec.boxes else "box_loss=auto alone"
        raise UserError(f"box_loss={box_loss}: task={task} takes {known}; it is for {others}.")
    if isinstance(config.data, schema.PhotosConfig):
        fill_from_model(config.data, config.model)


def _check_fused_head(config: schema.TrainConfig) -> None:
    """Raise UserError unless the task has one loss, of logits; the model itself is checked after it is made."""
    task, loss, reason = config.task.name, config.loss, None
    if not spec_of(config.task).fused_head:
        having = ", ".join(name for name, spec in TASKS.items() if spec.fused_head)
        reason = f"task={task} does not have one loss of one head's logits; {having} have"
    elif loss.implementation != "lossforge":
        reason = f"loss.implementation={loss.implementation} has no fused losses; lossforge has"
    elif not (loss.kernels and loss.fused):
        reason = f"loss={loss.name} has no fused form"
    elif loss.takes != "logits":
        reason = f"loss={loss.name} is computed from the {loss.takes} of all logits, which a fused loss does not have"
    if reason:
        raise UserError(f"loss.fused_head=true: {reason}.")
