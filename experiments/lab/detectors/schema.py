"""The settings of data with boxes, and its records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from lab.base.paths import ROOT, absolute
from lab.config.fields import choice, number, setting, some
from lab.config.schema import AUTO, EXIF, WHERE_EXIF, LabelSetConfig, SplitConfig
from lab.data.spec import DataSpec

OF_SHORTEST = "shorter edge in pixels; auto: {}, or the images' own if much smaller; null: as in the file"


@dataclass
class DetectionDataConfig(LabelSetConfig):
    """A batch is padded to its largest image, unless model.fixed_size gives one size for all.

    usual: the shorter edge that data.shortest=auto stands for, unless it would enlarge the images much.
    """

    usual: ClassVar[int] = 640
    name: str = "digit_scenes"
    root: str | None = setting(None, "folder of the data; null: data/ of the repository", path="always")
    batch_size: int = number(16, "training images a batch, on each process", least=1)
    eval_batch_size: int = number(32, "images a batch where the model is evaluated", least=1)
    workers: int | None = number(None, "processes that read images; null: this process's share of the cores, up to 16", least=0)
    scale: list[float] = some(lambda: [0.8, 1.25], "range of the random scale: above 1 crops, below 1 pads", above=0, most=16, pair=True)
    min_visible: float = number(0.3, "share of a box that a crop must leave for the box to stay", least=0, most=1)
    horizontal_flip: float = number(0.0, "share of the training images that are mirrored", least=0, most=1)
    photometric: float = number(0.0, "share of the training images whose colours are changed", least=0, most=1)
    mosaic: float = number(0.0, "share of the training images that are a window of four others side by side", least=0, most=1)
    batch_scale: list[float] = some(lambda: [1.0, 1.0], "range of a factor of whole training batches' sizes", above=0, most=4, pair=True)
    shortest: int | str | None = number(None, OF_SHORTEST.format("640"), least=8, most=8192, text=AUTO)
    longest: int | None = number(None, "limit of the longer edge in pixels; has precedence over data.shortest", least=8, most=8192)
    divisor: int = number(32, "padded sizes are multiples of this", least=1)
    rect: bool = setting(False, "evaluate images at their own proportions: padded to the largest of a batch, not to model.fixed_size")
    max_boxes: int | None = number(None, "largest number of boxes in an image; null: found in the data", least=1)
    check: str = choice("headers", "off", "headers", "pixels", meaning="how much of each image is checked before the run")
    skip_corrupt: bool = setting(False, "leave out images and boxes that cannot be used")

    @property
    def edge(self) -> int | None:
        """Return data.shortest as a number, the usual one before the data is opened."""
        return self.usual if self.shortest == AUTO else cast(int | None, self.shortest)


@dataclass
class DigitScenesConfig(SplitConfig, DetectionDataConfig):
    """Scenes drawn from handwritten digits; no digit is in two splits."""

    train_scenes: int = number(1000, "scenes to train on", least=1)
    val_scenes: int = number(200, "held-out scenes", least=1)
    test_scenes: int = number(200, "test scenes, where data.test is set", least=1)
    scene_pixels: int = number(128, "pixels of a scene's side", least=32, most=2048)
    digits: list[int] = some(lambda: [1, 8], "fewest and most digits of a scene", least=1, most=100, pair=True)
    digit_pixels: list[int] = some(lambda: [14, 48], "smallest and largest digit, in pixels", least=8, pair=True)
    turn: float = number(0.0, "largest turn of a digit in degrees, whose corners are then written for task=oriented", least=0, most=180)
    max_iou: float = number(0.1, "largest IoU of two digits' boxes", least=0, most=1)
    max_cover: float = number(0.25, "largest share of a digit's box that another digit covers", least=0, most=1)
    clutter: float = number(1.0, "factor of noise, strokes and shapes in the background", least=0, most=4)
    scene_seed: int = number(0, "seed of what is drawn", least=0)
    held_out: float = number(0.2, "share of the digits that appear in held-out scenes only", above=0, below=1)
    test: float | None = number(None, "share of the digits that appear in test scenes only, which are scored at the end", above=0, below=1)


@dataclass
class CocoConfig(DetectionDataConfig):
    """Paths of folders and files are relative to `root`."""

    usual: ClassVar[int] = 800
    name: str = "coco"
    horizontal_flip: float = number(0.5, "share of the training images that are mirrored", least=0, most=1)
    photometric: float = number(0.5, "share of the training images whose colours are changed", least=0, most=1)
    shortest: int | str | None = number(AUTO, OF_SHORTEST.format("800"), least=8, most=8192, text=AUTO)
    longest: int | None = number(1333, "limit of the longer edge in pixels; has precedence over data.shortest", least=8, most=8192)
    train_images: str = setting("train2017", "folder of the training images")
    val_images: str = setting("val2017", "folder of the held-out images")
    test_images: str | None = setting(None, "folder of the images scored once at the end")
    train_annotations: str = setting("annotations/instances_train2017.json", "file of the training images' boxes")
    val_annotations: str = setting("annotations/instances_val2017.json", "file of the held-out images' boxes")
    test_annotations: str | None = setting(None, "file of the test images' boxes")
    exif: str = choice(*EXIF, meaning=WHERE_EXIF)
    images_outside: bool = setting(False, "read files outside of the images' folder, if a file_name leads there by a path or a link")


@dataclass
class BoxesConfig(SplitConfig, DetectionDataConfig):
    """A folder with images and boxes in any usual form, which is found by itself; all files lie below `root`."""

    name: str = "boxes"
    root: str | None = setting(None, "folder of images and boxes, or the data.yaml in it", path="always")
    layout: str = choice("auto", "auto", "yolo", "coco", "voc", "csv", meaning="form of the boxes; auto: found by the files")
    score_test: bool = setting(False, "score the folder's test images once at the end")
    horizontal_flip: float = number(0.5, "share of the training images that are mirrored", least=0, most=1)
    photometric: float = number(0.5, "share of the training images whose colours are changed", least=0, most=1)
    shortest: int | str | None = number(AUTO, OF_SHORTEST.format("640"), least=8, most=8192, text=AUTO)
    longest: int | None = number(1066, "limit of the longer edge in pixels; has precedence over data.shortest", least=8, most=8192)
    held_out: float = number(0.2, "share of the images held out, where the folder has no held-out ones", above=0, below=1)
    exif: str = choice(*EXIF, meaning=WHERE_EXIF)


def whole_folder(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the folder, or the description in it, that all parts are found by."""
    return {"train": {str(absolute(data["root"], ROOT).resolve())}} if data.get("root") else {}


OF_LABELS = "lab.detectors.label_sets:BoxLabels"
DATA_SOURCES = (
    DataSpec(name="digit_scenes", schema=DigitScenesConfig, label_sets=OF_LABELS, source="root"),
    DataSpec(
        name="coco",
        schema=CocoConfig,
        label_sets=OF_LABELS,
        parts=("train_annotations", "val_annotations", "test_annotations"),
        files=("root", "train_images", "val_images", "test_images"),
        existing=("root",),
        titled_by="root",
    ),
    DataSpec(
        name="boxes",
        schema=BoxesConfig,
        label_sets=OF_LABELS,
        found_in="lab.detectors.annotations.layouts:boxes_in",
        parts=("root",),
        places=whole_folder,
        files=("layout",),
        existing=("root",),
        titled_by="root",
    ),
)
