"""Detection: RetinaNet and FCOS under any of the losses that take class indices; the settings of detectors and of their boxes' loss."""

from dataclasses import dataclass

from lab.config import loss_settings
from lab.config.detection_schema import DETECTION_DATA, DetectionDataConfig
from lab.config.fields import choice, number, setting, some
from lab.config.loss_schema import with_settings
from lab.config.schema import BoxLossConfig, ModelConfig, TaskConfig
from lab.tasks.spec import TaskSpec


@dataclass
class DetectionConfig(TaskConfig):
    name: str = setting("detection", "the task")
    pictures: int = number(6, "held-out images that are drawn with what was found and what is there", least=0, most=64)


@dataclass
class DetectorConfig(ModelConfig):
    detector: str = setting("", "which detector")
    channels: int = number(256, "of the pyramid", least=1)
    frozen_stride: int = number(0, "weights of the backbone up to the stage of this stride stay as they are; 0: none", least=0, most=32)
    frozen_norm: bool = setting(False, "batch norms of the backbone stay as they are")
    fixed_size: list[int] | None = number(None, "height and width of every batch; null: that of its largest image", least=32)
    score_threshold: float = number(0.05, "least score of a detection that is kept", least=0, below=1)
    nms_threshold: float = number(0.5, "IoU above which the less sure of two boxes of a class goes", above=0, most=1)
    candidates: int = number(1000, "boxes of each level that are looked at", least=1)
    detections: int = number(100, "boxes of an image that are kept", least=1)

    @property
    def title(self) -> str:
        return f"{self.detector}_{self.name}"


@dataclass
class FcosConfig(DetectorConfig):
    detector: str = choice("fcos", "fcos", meaning="which detector")
    nms_threshold: float = number(0.6, "IoU above which the less sure of two boxes of a class goes", above=0, most=1)
    convolutions: int = number(4, "of each branch of the head", least=1)
    centre_radius: float = number(1.5, "how far from a box's centre its points lie, in strides", above=0)


@dataclass
class RetinaNetConfig(DetectorConfig):
    detector: str = choice("retinanet", "retinanet", meaning="which detector")
    anchor_sizes: list[int] = some(lambda: [32, 64, 128, 256, 512], "of the five levels, in pixels", least=1)
    head_norm: bool = setting(False, "group norms in the head")
    foreground_iou: float = number(0.5, "least IoU of a positive anchor with its box", above=0, most=1)
    background_iou: float = number(0.4, "IoU below which an anchor is negative; between both it is left out", least=0, most=1)


@dataclass
class CustomBoxConfig(BoxLossConfig):
    """A loss of one's own over predicted boxes and theirs, both as corners in pixels."""

    name: str = setting("custom", "a loss of one's own")
    target: str = setting("???", "the loss, as module:name or path/to/file.py:name", code=True)
    hyper: dict[str, float] = some(dict, "its hyper-parameters, by name")


DETECTORS: dict[str, type[DetectorConfig]] = {"fcos": FcosConfig, "retinanet": RetinaNetConfig}
BOX_LOSSES: dict[str, type[BoxLossConfig]] = {
    "auto": BoxLossConfig,
    **{name: with_settings(BoxLossConfig, name, settings) for name, settings in loss_settings.BOX_LOSSES.items()},
    "custom": CustomBoxConfig,
}
LOSSES = ("focal", "quality_focal", "varifocal", "bce", "asymmetric", "poly_bce")
"""Losses that take class indices, beside loss=custom."""


SPEC = TaskSpec(
    config=DetectionConfig,
    data=DetectionDataConfig,
    losses=(*LOSSES, "custom"),
    build="lab.tasks.detection.task:build",
    predict="lab.tasks.detection.inference:predict",
    export="lab.tasks.detection.inference:export",
    model=DetectorConfig,
    data_schemas=DETECTION_DATA,
    model_schemas=DETECTORS,
    example="a detector, such as fcos_resnet50 or retinanet_tiny",
    boxes=True,
)
