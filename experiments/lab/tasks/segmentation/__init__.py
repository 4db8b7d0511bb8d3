"""Segmentation: a class for each pixel, under losses of pixels and of regions."""

from dataclasses import dataclass
from typing import ClassVar

from lab.config.fields import choice, number, setting, some
from lab.config.loss_schema import LOSSES
from lab.config.schema import AUTO, EXIF, WHERE_EXIF, DataConfig, ModelConfig, SplitConfig, TaskConfig
from lab.data.spec import DataSpec
from lab.tasks.spec import TaskSpec

OUTSIDE = 255
"""The target of pixels that have no class: they count neither in the loss nor in the metrics."""
PIXEL_LOSSES = ("ce", "softmax_focal", "poly_ce", "generalized_ce", "ohem_ce")
ELEMENT_LOSSES = ("bce", "focal", "asymmetric", "poly_bce")
"""Losses of each class of each pixel, where classes may overlap."""


@dataclass
class SegmentationConfig(TaskConfig):
    name: str = setting("segmentation", "the task")
    pictures: int = number(6, "held-out images that are drawn with their true and predicted masks", least=0, most=64)


@dataclass
class SegmenterConfig(ModelConfig):
    """The levels of a timm backbone, each reduced to `channels`, scaled to the finest size and summed; a convolution classifies the sum."""

    channels: int = number(64, "channels of the sum of the backbone's levels", least=1)
    kind: str = choice("segmenter", "segmenter", meaning="which kind of model")

    @property
    def title(self) -> str:
        return f"segmenter_{self.name}"


@dataclass
class MasksConfig(DataConfig):
    image_size: int = number(64, "pixels a side that the model sees", least=32)


@dataclass
class DigitMasksConfig(MasksConfig, SplitConfig):
    """Digits drawn over noise; a pixel of ink has its digit's class, all other pixels are background."""

    name: str = setting("digit_masks", "the data set")
    train_scenes: int = number(500, "training images, of training digits", least=1)
    val_scenes: int = number(100, "held-out images, of held-out digits", least=1)
    digits: int = number(2, "largest number of digits in an image", least=1, most=20)
    noise: float = number(0.1, "standard deviation of the noise, where ink is 1", least=0)
    scene_seed: int = number(0, "seed of what is drawn", least=0)


@dataclass
class MaskFolderConfig(MasksConfig):
    """root/train, root/val (or valid, validation) and optionally root/test, each with images/ and masks/.

    An image and its mask have the same stem; a mask's values are classes, but for data.ignore_value, or with data.overlapping each of its
    channels is a class.
    Images and masks are read by worker processes and resized to data.image_size a side.
    """

    usual: ClassVar[int] = 256
    # MasksConfig declares an int, which it is once the data is open: hence the ignore
    image_size: int | str = number(  # type: ignore[assignment]
        AUTO, "pixels a side that the model sees; auto: 256, or the images' own if that enlarges them much", least=32, text=AUTO
    )

    name: str = setting("mask_folder", "the data set")
    root: str | None = setting(None, "folder with train/, val/ and optionally test/; null: data/", path="always")
    classes: list[str] = setting(
        "???", "names of the classes, in the order of their values in masks, such as [background,cat]", distinct=True
    )
    ignore_value: int | None = number(
        OUTSIDE, "value of the mask's pixels that have no class, and count nowhere; null: none has it", least=0, most=65535
    )
    overlapping: bool = setting(False, "a mask has a channel or page a class; a pixel is in it unless it is 0 or data.ignore_value")
    workers: int | None = number(None, "processes that read images; null: this process's share of the cores, up to 16", least=0)
    scale: list[float] = some(lambda: [0.8, 1.25], "range of the random scale: above 1 crops, below 1 pads", above=0, most=16, pair=True)
    horizontal_flip: float = number(0.5, "share of the training images that are mirrored", least=0, most=1)
    photometric: float = number(0.5, "share of the training images whose colours are changed", least=0, most=1)
    check: str = choice("headers", "off", "headers", "pixels", meaning="how much of each image is checked before the run; masks completely")
    exif: str = choice(*EXIF, meaning=WHERE_EXIF)
    skip_corrupt: bool = setting(False, "leave out images and masks that cannot be used")


SPEC = TaskSpec(
    config=SegmentationConfig,
    data=MasksConfig,
    losses=(*PIXEL_LOSSES, *ELEMENT_LOSSES, *(name for name, schema in LOSSES.items() if schema.takes == "regions"), "custom"),
    build="lab.tasks.segmentation.task:build",
    predict="lab.tasks.segmentation.task:predict",
    read=("top",),
    export="lab.tasks.segmentation.task:export",
    model=SegmenterConfig,
    data_sources=(
        DataSpec(name="digit_masks", schema=DigitMasksConfig),
        DataSpec(name="mask_folder", schema=MaskFolderConfig, files=("root",), existing=("root",), titled_by="root"),
    ),
    model_schemas={"segmenter": SegmenterConfig},
    example="a segmenter, such as segmenter_tiny or segmenter_resnet50",
)
