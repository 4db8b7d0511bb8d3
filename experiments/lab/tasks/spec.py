"""What a task registers: all that the app must know of it before torch is imported."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lab.config.schema import ClassifierConfig, DataConfig, ModelConfig, TaskConfig


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task, as its own folder describes it; lab.config.choices lists the app's, and `task=custom` takes one of a user's own.

    Args:
        config: the schema of the group `task`; the default of its field `name` is the task's name.
        data: the schema of which the run's data must be.
        model: the schema of which the run's model must be.
        losses: names of the losses that fit, `custom` among them where a loss of one's own does.
        build: a function of (config, device, norm), or its module:name, which opens the data and returns a lab.tasks.task.Task. norm is
            what a saved model's images were normalised by, None for a new model.
        predict: a function of (config, classes, lab.runs.predict.Asked), or its module:name, which returns the model and a function from an
            image to a lab.runs.predict.Prediction; None where predict.py cannot ask such models. The default is of classifiers.
        export: a function of (config, classes, norm), or its module:name, which returns a lab.runs.export.Exportable; None where the
            task's models are not exported. The default is of classifiers.
        scored_as: from the settings of the task to those of the task as which evaluate.py scores a saved model; None: they are the same.
        data_schemas: of data sets that come with the task, by name.
        model_schemas: of models that come with the task, by name.
        example: words for a model that fits, for a message.
        boxes: whether the group `box_loss` has a meaning.
        fused_head: whether `loss.fused_head` fits: the task has one loss, of one head's logits.
    """

    config: type[TaskConfig]
    data: type[DataConfig]
    losses: tuple[str, ...]
    build: str | Callable[..., Any]
    model: type[ModelConfig] = ClassifierConfig
    predict: str | Callable[..., Any] | None = "lab.tasks.inference:predict"
    export: str | Callable[..., Any] | None = "lab.tasks.inference:export"
    scored_as: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    data_schemas: Mapping[str, type[DataConfig]] = field(default_factory=dict)
    model_schemas: Mapping[str, type[ModelConfig]] = field(default_factory=dict)
    example: str = "a classifier, such as resnet18"
    boxes: bool = False
    fused_head: bool = False

    @property
    def name(self) -> str:
        return self.config().name


def find_object(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function, or the one that its module:name names."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))
