"""Detection of oriented boxes: a rectangle at any angle around each object, by a YOLO that also predicts the angle."""

from dataclasses import dataclass

from lab.config.fields import number, setting
from lab.config.loss_settings import ORIENTED_LOSSES
from lab.detectors.detection import LOSSES, DetectionConfig, DetectorConfig, YoloConfig
from lab.detectors.schema import DetectionDataConfig
from lab.tasks.spec import TaskSpec


@dataclass
class OrientedConfig(DetectionConfig):
    name: str = setting("oriented", "the task")
    pictures: int = number(6, "held-out images that are drawn with their found and true oriented boxes", least=0, most=64)


SPEC = TaskSpec(
    config=OrientedConfig,
    data=DetectionDataConfig,
    losses=(*LOSSES, "custom"),
    build="lab.detectors.oriented.task:build",
    predict="lab.detectors.oriented.task:predict",
    read=("score",),
    export="lab.detectors.oriented.task:export",
    model=YoloConfig,
    example="a YOLO, such as yolo_tiny or yolo_resnet50",
    boxes=tuple(ORIENTED_LOSSES),
    usual_loss=DetectorConfig.usual_loss,
)
