"""Segmentation of instances: a box and a mask of each object, by a YOLO or a DETR with prototypes of masks."""

from dataclasses import dataclass

from lab.config.fields import number, setting
from lab.detectors.detection import LOSSES, UPRIGHT, DetectionConfig, DetectorConfig, DetrConfig, YoloConfig
from lab.detectors.schema import DetectionDataConfig
from lab.tasks.spec import TaskSpec


@dataclass
class InstancesConfig(DetectionConfig):
    name: str = setting("instances", "the task")
    pictures: int = number(6, "held-out images that are drawn with their found and true masks", least=0, most=64)
    prototypes: int = number(32, "masks of a whole image that the masks of its objects are sums of", least=1)
    points: int = number(1024, "points of a mask at which a DETR's loss is computed", least=1)
    mask_factor: float = number(2.0, "factor of the masks' loss", least=0)


SPEC = TaskSpec(
    config=InstancesConfig,
    data=DetectionDataConfig,
    losses=(*LOSSES, "custom"),
    build="lab.detectors.instances.task:build",
    predict="lab.detectors.instances.task:predict",
    read=("score",),
    export="lab.detectors.instances.task:export",
    model=(YoloConfig, DetrConfig),
    example="a YOLO or a DETR, such as yolo_tiny or detr_resnet50",
    boxes=UPRIGHT,
    usual_loss=DetectorConfig.usual_loss,
)
