"""Detection: RetinaNet, FCOS, YOLO and DETR under any loss that takes class indices; the settings of detectors and of their boxes' loss."""

from dataclasses import dataclass
from typing import ClassVar

from lab.config import loss_settings
from lab.config.fields import choice, number, setting, some
from lab.config.loss_schema import with_settings
from lab.config.schema import BoxLossConfig, ModelConfig, TaskConfig
from lab.detectors.schema import DATA_SOURCES, DetectionDataConfig
from lab.tasks.spec import TaskSpec


@dataclass
class DetectionConfig(TaskConfig):
    name: str = setting("detection", "the task")
    pictures: int = number(6, "held-out images that are drawn with their detections and true boxes", least=0, most=64)


@dataclass
class DetectorConfig(ModelConfig):
    """usual_loss: what loss=auto takes; YOLO and DETR reached the most under theirs (docs/benchmarks/detection.md)."""

    usual_loss: ClassVar[str] = "focal"
    detector: str = setting("", "which detector")
    channels: int = number(256, "channels of the pyramid's levels", least=1)
    frozen_stride: int = number(0, "weights of the backbone up to the stage of this stride are not trained; 0: all are", least=0, most=32)
    frozen_norm: bool = setting(False, "do not train or update the backbone's batch norms")
    fixed_size: list[int] | None = number(None, "height and width of every batch; null: of its largest image", least=32)
    score_threshold: float = number(0.05, "lowest score of a detection that is kept", least=0, below=1)
    nms_threshold: float = number(0.5, "IoU above which the lower-scoring of two boxes of a class is removed", above=0, most=1)
    candidates: int = number(1000, "candidate boxes of each level", least=1)
    detections: int = number(100, "boxes of an image that are kept", least=1)

    @property
    def title(self) -> str:
        return f"{self.detector}_{self.name}"


@dataclass
class FcosConfig(DetectorConfig):
    detector: str = choice("fcos", "fcos", meaning="which detector")
    nms_threshold: float = number(0.6, "IoU above which the lower-scoring of two boxes of a class is removed", above=0, most=1)
    convolutions: int = number(4, "convolutions of each branch of the head", least=1)
    centre_radius: float = number(1.5, "largest distance of a box's points from its centre, in strides", above=0)


@dataclass
class RetinaNetConfig(DetectorConfig):
    detector: str = choice("retinanet", "retinanet", meaning="which detector")
    anchor_sizes: list[int] = some(lambda: [32, 64, 128, 256, 512], "anchors' sizes on the five levels, in pixels", least=1)
    head_norm: bool = setting(False, "use group norms in the head")
    foreground_iou: float = number(0.5, "smallest IoU of a positive anchor with its box", above=0, most=1)
    background_iou: float = number(0.4, "IoU below which an anchor is negative; between both thresholds it is ignored", least=0, most=1)


@dataclass
class YoloConfig(DetectorConfig):
    """The loss of the classes takes the alignment as its target; varifocal, quality focal and BCE are usual."""

    usual_loss: ClassVar[str] = "varifocal"

    detector: str = choice("yolo", "yolo", meaning="which detector")
    channels: int = number(128, "channels of the pyramid's levels", least=1)
    nms_threshold: float = number(0.65, "IoU above which the lower-scoring of two boxes of a class is removed", above=0, most=1)
    convolutions: int = number(2, "convolutions of each branch of the head", least=1)
    bins: int = number(17, "distances of a box's side from its anchor, 0 to bins - 1 strides", least=2, most=4096)
    assigned: int = number(10, "anchors that a box may have", least=1, most=64)
    alpha: float = number(1.0, "exponent of the class's probability in the alignment of an anchor with a box", least=0)
    beta: float = number(6.0, "exponent of the IoU in the alignment of an anchor with a box", least=0)
    one_to_one: bool = setting(False, "add a head that gives each box one anchor, and predict by it: nothing is suppressed")
    box_factor: float = number(2.0, "factor of the boxes' loss beside box_loss.weight", least=0)
    side_factor: float = number(0.25, "factor of the loss of the sides' distributions (distribution focal)", least=0)


@dataclass
class DetrConfig(DetectorConfig):
    """Each query is matched with at most one box, so that nothing is suppressed and nms_threshold has no effect."""

    usual_loss: ClassVar[str] = "mal"

    detector: str = choice("detr", "detr", meaning="which detector")
    queries: int = number(100, "boxes that an image can have", least=1)
    layers: int = number(3, "layers of the decoder, each with a loss", least=1)
    encoder_layers: int = number(1, "layers of attention on the coarsest level", least=0)
    heads: int = number(8, "heads of the attention", least=1)
    cost: list[float] = some(lambda: [2.0, 5.0, 2.0], "weights of class, L1 and GIoU in the cost that matching minimises", least=0)
    box_factor: float = number(2.0, "factor of the boxes' loss beside box_loss.weight", least=0)
    l1_factor: float = number(5.0, "factor of the L1 loss of the boxes in shares of the image", least=0)
    denoising: int = number(0, "queries of an image that training makes of its boxes with noise; 0: none", least=0, most=10000)
    label_noise: float = number(0.25, "share of the denoising queries that are made of a class at random", least=0, most=1)
    box_noise: float = number(1.0, "twice the largest move of a corner of a denoising query's box, in sides of the box", least=0, most=2)


@dataclass
class CustomBoxConfig(BoxLossConfig):
    """A custom loss of predicted boxes and their targets, both as corners in pixels."""

    name: str = setting("custom", "a custom loss")
    target: str = setting("???", "the loss, as module:name or path/to/file.py:name", code=True)
    hyper: dict[str, float] = some(dict, "its hyper-parameters, by name")


DETECTORS: dict[str, type[DetectorConfig]] = {"fcos": FcosConfig, "retinanet": RetinaNetConfig, "yolo": YoloConfig, "detr": DetrConfig}
BOX_LOSSES: dict[str, type[BoxLossConfig]] = {
    **{
        name: with_settings(BoxLossConfig, name, settings)
        for name, settings in (loss_settings.BOX_LOSSES | loss_settings.ORIENTED_LOSSES).items()
    },
    "custom": CustomBoxConfig,
}
UPRIGHT = (*loss_settings.BOX_LOSSES, "custom")
"""Losses of boxes with upright sides."""
LOSSES = ("focal", "quality_focal", "varifocal", "mal", "ia_bce", "bce", "asymmetric", "poly_bce")
"""Losses that take class indices, beside loss=custom."""


SPEC = TaskSpec(
    config=DetectionConfig,
    data=DetectionDataConfig,
    losses=(*LOSSES, "custom"),
    build="lab.detectors.detection.task:build",
    predict="lab.detectors.detection.inference:predict",
    read=("score",),
    export="lab.detectors.detection.inference:export",
    model=DetectorConfig,
    model_schemas=DETECTORS,
    example="a detector, such as fcos_resnet50 or yolo_tiny",
    boxes=UPRIGHT,
    box_losses=BOX_LOSSES,
    usual_loss=DetectorConfig.usual_loss,
    data_sources=DATA_SOURCES,
)
