"""Multi-label classification: which classes an image contains."""

from dataclasses import dataclass

from lab.config.fields import number, setting, some
from lab.config.schema import LabelSetConfig, TableConfig, TaskConfig
from lab.tasks.spec import TaskSpec


@dataclass
class MultilabelConfig(TaskConfig):
    """Images held in memory are augmented on the device: by small rotations, shifts and scales instead of data.scale, data.horizontal_flip
    and data.photometric.
    """

    name: str = setting("multilabel", "the task")
    threshold: float = number(0.5, "probability above which a class counts as present, in F1 and right_labels", above=0, below=1)
    metrics: dict[str, str] = some(
        dict, "custom metrics of (probability, target; masked: -1), by name: module:name or path/to/file.py:name", code=True
    )
    in_memory: bool = setting(False, "hold all images on the device, without workers: for small sets")


SPEC = TaskSpec(
    config=MultilabelConfig,
    data=(LabelSetConfig, TableConfig),
    losses=(
        *("bce", "focal", "asymmetric", "poly_bce", "quality_focal", "varifocal", "distribution_balanced", "multilabel_soft_margin"),
        *("zlpr", "two_way", "custom"),
    ),
    build="lab.tasks.multilabel.task:build",
    predict="lab.tasks.multilabel.task:predict",
    read=("score",),
    export="lab.tasks.multilabel.task:export",
    fused_head=True,
)
