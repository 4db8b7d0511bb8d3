"""The settings of detection data."""

from dataclasses import dataclass

from lab.config.fields import choice, number, some
from lab.config.schema import DataConfig


@dataclass
class DetectionDataConfig(DataConfig):
    """A batch is padded to its largest image, unless model.fixed_size says how large all are.

    shortest, longest: what the image's shorter edge becomes, unless the longer one would exceed `longest`.
    scale: range of the random scale; above 1 the image is cropped, below 1 padded.
    min_visible: share of a box that a crop must leave for the box to be kept.
    check: how much of the images is looked at before the run starts.
    workers: processes that read and prepare images; None takes this process's share of the cores, up to 16.
    """

    name: str = "digit_scenes"
    root: str | None = None
    batch_size: int = number(16, least=1)
    eval_batch_size: int = number(32, least=1)
    workers: int | None = number(None, least=0)
    augment: bool = True
    scale: list[float] = some(lambda: [0.8, 1.25], above=0, most=16)
    min_visible: float = number(0.3, least=0, most=1)
    horizontal_flip: float = number(0.0, least=0, most=1)
    photometric: float = number(0.0, least=0, most=1)
    shortest: int | None = number(None, least=8)
    longest: int | None = number(None, least=8)
    divisor: int = number(32, least=1)
    max_boxes: int | None = number(None, least=1)
    check: str = choice("headers", "off", "headers", "pixels")
    skip_corrupt: bool = False


@dataclass
class DigitScenesConfig(DetectionDataConfig):
    """Scenes drawn from handwritten digits; `digits` and `digit_pixels` are ranges, `clutter` scales noise, strokes and shapes."""

    train_scenes: int = number(1000, least=1)
    val_scenes: int = number(200, least=1)
    scene_pixels: int = number(128, least=32, most=2048)
    digits: list[int] = some(lambda: [1, 8], least=1, most=100)
    digit_pixels: list[int] = some(lambda: [14, 48], least=8)
    max_iou: float = number(0.1, least=0, most=1)
    max_cover: float = number(0.25, least=0, most=1)
    clutter: float = number(1.0, least=0, most=4)
    scene_seed: int = number(0, least=0)
    held_out: float = number(0.2, above=0, below=1)
    split_seed: int = number(0, least=0)


@dataclass
class CocoConfig(DetectionDataConfig):
    """Folders and files count from `root`."""

    name: str = "coco"
    horizontal_flip: float = number(0.5, least=0, most=1)
    photometric: float = number(0.5, least=0, most=1)
    shortest: int | None = number(800, least=8)
    longest: int | None = number(1333, least=8)
    train_images: str = "train2017"
    val_images: str = "val2017"
    train_annotations: str = "annotations/instances_train2017.json"
    val_annotations: str = "annotations/instances_val2017.json"


DETECTION_DATA: dict[str, type[DetectionDataConfig]] = {"digit_scenes": DigitScenesConfig, "coco": CocoConfig}
