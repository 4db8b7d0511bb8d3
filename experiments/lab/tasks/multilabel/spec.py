"""Multi-label classification: which classes are somewhere in an image."""

from dataclasses import dataclass

from lab.config.detection_schema import DETECTION_DATA, DetectionDataConfig
from lab.config.fields import number, setting, some
from lab.config.schema import TaskConfig
from lab.tasks.spec import TaskSpec


@dataclass
class MultilabelConfig(TaskConfig):
    """Held in memory, images are augmented on the device, by small turns, moves and changes of size in place of data.scale,
    data.horizontal_flip and data.photometric.
    """

    name: str = setting("multilabel", "the task")
    threshold: float = number(0.5, "probability above which a class counts as present, in F1 and right labels", above=0, below=1)
    metrics: dict[str, str] = some(dict, "own metrics of (probability, target), by name: module:name or path/to/file.py:name", code=True)
    in_memory: bool = setting(False, "hold all images on the device, without workers: for small sets")


SPEC = TaskSpec(
    config=MultilabelConfig,
    data=DetectionDataConfig,
    losses=("bce", "focal", "asymmetric", "poly_bce", "quality_focal", "varifocal", "custom"),
    build="lab.tasks.multilabel.task:build",
    predict="lab.tasks.multilabel.task:predict",
    export="lab.tasks.multilabel.task:export",
    data_schemas=DETECTION_DATA,
    fused_head=True,
)
