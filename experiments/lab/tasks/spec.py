"""The record of a task: all that the app must know of it before torch is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.config.schema import BoxLossConfig, ClassifierConfig, DataConfig, ModelConfig, TaskConfig
from lab.data.spec import DataSpec


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task, as its folder describes it: lab.registry finds `SPEC` in each folder, and `task=custom` adds a user's own.

    Args:
        config: the schema of the group `task`; the default of its field `name` is the task's name.
        data: the schema, or schemas, one of which the run's data must have.
        model: the schema, or schemas, one of which the run's model must have.
        losses: names of the losses that fit, with `custom` if custom losses do.
        build: a function of (config, device, norm), or its module:name, which opens the data and returns a lab.tasks.task.Task. norm is
            the normalisation of a saved model's images, None for a new model.
        predict: a function of (config, classes, lab.run.predict.Asked), or its module:name, which returns the model and a function from an
            image to a lab.run.predict.Prediction; None if predict.py does not support the task. The default is for classifiers.
        read: which of `top` and `score` of predict.py its predictor reads.
        export: a function of (config, classes, norm), or its module:name, which returns a lab.run.export.Exportable; None if the
            task's models are not exported. The default is for classifiers.
        scored_as: a function from the task's settings to those under which evaluate.py scores a saved model; None: they are the same.
        data_sources: records of data sources that come with the task.
        model_schemas: schemas of models that come with the task, by name.
        example: a description of a model that fits, for a message.
        boxes: names of the losses of boxes that fit, beside `auto`, with `custom` if custom losses do.
        box_losses: schemas of losses of boxes that come with the task, by name.
        usual_loss: the loss that loss=auto stands for where the model's schema has no `usual_loss`; None: the task has none.
        fused_head: whether `loss.fused_head` fits: the task has one loss, of one head's logits.
    """

    config: type[TaskConfig]
    data: type[DataConfig] | tuple[type[DataConfig], ...]
    losses: tuple[str, ...]
    build: str | Callable[..., Any]
    model: type[ModelConfig] | tuple[type[ModelConfig], ...] = ClassifierConfig
    predict: str | Callable[..., Any] | None = "lab.tasks.inference:predict"
    read: tuple[str, ...] = ("top", "score")
    export: str | Callable[..., Any] | None = "lab.tasks.inference:export"
    scored_as: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    data_sources: tuple[DataSpec, ...] = ()
    model_schemas: Mapping[str, type[ModelConfig]] = field(default_factory=dict)
    example: str = "a classifier, such as resnet18"
    boxes: tuple[str, ...] = ()
    box_losses: Mapping[str, type[BoxLossConfig]] = field(default_factory=dict)
    usual_loss: str | None = None
    fused_head: bool = False

    @property
    def name(self) -> str:
        return self.config().name
