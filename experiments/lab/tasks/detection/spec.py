"""Detection: RetinaNet and FCOS under any of the losses that take class indices; the settings of detectors and of their boxes' loss."""

from dataclasses import dataclass, field

from lab.config import loss_settings
from lab.config.detection_schema import DETECTION_DATA, DetectionDataConfig
from lab.config.fields import choice, number, some
from lab.config.loss_schema import with_settings
from lab.config.schema import BoxLossConfig, ModelConfig, TaskConfig
from lab.tasks.spec import TaskSpec


@dataclass
class DetectionConfig(TaskConfig):
    """pictures: how many held-out images are drawn with what was found and what is there."""

    name: str = "detection"
    pictures: int = number(6, least=0, most=64)


@dataclass
class DetectorConfig(ModelConfig):
    """name: timm's, of the backbone. channels: of the pyramid. frozen_stride: weights up to the stage of this stride stay as they are.

    fixed_size: height and width of every batch; null pads a batch to its largest image. score_threshold, nms_threshold, candidates (of each
    level), detections (of each image): which boxes an evaluation and a prediction keep.
    """

    detector: str = ""
    channels: int = number(256, least=1)
    frozen_stride: int = number(0, least=0, most=32)
    frozen_norm: bool = False
    fixed_size: list[int] | None = number(None, least=32)
    score_threshold: float = number(0.05, least=0, below=1)
    nms_threshold: float = number(0.5, above=0, most=1)
    candidates: int = number(1000, least=1)
    detections: int = number(100, least=1)

    @property
    def title(self) -> str:
        return f"{self.detector}_{self.name}"


@dataclass
class FcosConfig(DetectorConfig):
    """convolutions: of each branch of the head. centre_radius: how far from a box's centre its points lie, in strides."""

    detector: str = choice("fcos", "fcos")
    nms_threshold: float = number(0.6, above=0, most=1)
    convolutions: int = number(4, least=1)
    centre_radius: float = number(1.5, above=0)


@dataclass
class RetinaNetConfig(DetectorConfig):
    """anchor_sizes: of the five levels. head_norm: group norms in the head. foreground_iou, background_iou: what is between is left out."""

    detector: str = choice("retinanet", "retinanet")
    anchor_sizes: list[int] = some(lambda: [32, 64, 128, 256, 512], least=1)
    head_norm: bool = False
    foreground_iou: float = number(0.5, above=0, most=1)
    background_iou: float = number(0.4, least=0, most=1)


@dataclass
class CustomBoxConfig(BoxLossConfig):
    """A loss of one's own over predicted boxes and theirs, both as corners in pixels: target is module:name or path/to/file.py:name."""

    name: str = "custom"
    target: str = "???"
    hyper: dict[str, float] = field(default_factory=dict)


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
    model=DetectorConfig,
    data_schemas=DETECTION_DATA,
    model_schemas=DETECTORS,
    example="a detector, such as fcos_resnet50 or retinanet_tiny",
    boxes=True,
)
