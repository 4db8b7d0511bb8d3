"""Classification: images of one class each."""

from lab.config.loss_schema import LOSSES
from lab.config.schema import ClassificationConfig, ImagesConfig
from lab.tasks.spec import TaskSpec

SPEC = TaskSpec(
    config=ClassificationConfig,
    data=ImagesConfig,
    losses=tuple(name for name, schema in LOSSES.items() if schema.takes not in ("regions", "features") and name != "bradley_terry"),
    build="lab.tasks.classification.task:build",
    fused_head=True,
    read=("top",),
)
