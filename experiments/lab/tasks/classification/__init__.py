"""Classification: images of one class each."""

from lab.config.loss_schema import LOSSES, OF_CLASSIFIERS
from lab.config.schema import ClassificationConfig, ImagesConfig
from lab.tasks.spec import TaskSpec

SPEC = TaskSpec(
    config=ClassificationConfig,
    data=ImagesConfig,
    losses=tuple(name for name, schema in LOSSES.items() if schema.takes in (*OF_CLASSIFIERS, "cosines") and name != "bradley_terry"),
    build="lab.tasks.classification.task:build",
    fused_head=True,
    read=("top",),
)
