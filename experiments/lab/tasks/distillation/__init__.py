"""Distillation: a classifier that learns from labels and from another classifier's logits."""

from dataclasses import dataclass

from lab.config.fields import choice, number, setting
from lab.config.loss_schema import LOSSES, OF_CLASSIFIERS, CustomConfig
from lab.config.schema import ClassificationConfig, ImagesConfig
from lab.tasks.spec import TaskSpec


@dataclass
class DistillationConfig(ClassificationConfig):
    """The loss is (1 - weight) · loss= + weight · divergence from the teacher, both models' logits divided by the temperature."""

    name: str = setting("distillation", "the task")
    teacher: str = setting("???", "checkpoint or run folder of the classifier to learn from")
    temperature: float = number(4.0, "divisor T of both models' logits", above=0)
    divergence: str = choice(
        "kl",
        *("kl", "js", "total_variation", "cosine_distance", "dkd", "dist"),
        meaning="of the teacher; dkd: decoupled by the label, dist: of relations; cosine_distance has no temperature",
    )
    weight: float = number(0.9, "weight of the teacher's part in the loss", least=0, most=1)


SPEC = TaskSpec(
    config=DistillationConfig,
    data=ImagesConfig,
    losses=tuple(
        name
        for name, schema in LOSSES.items()
        if schema.activation == "softmax" and schema.takes in OF_CLASSIFIERS and schema is not CustomConfig
    ),
    fused_head=True,
    read=("top",),
    build="lab.tasks.distillation.task:build",
    # without the teacher, because its file may no longer exist
    scored_as=lambda task: {"name": "classification"} | {name: task[name] for name in ("calibration_bins",) if name in task},
)
