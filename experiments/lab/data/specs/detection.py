"""Images with boxes, which the tasks detection and multilabel open."""

from collections.abc import Mapping
from typing import Any

from lab.base.paths import ROOT, absolute
from lab.config.detection_schema import BoxesConfig, CocoConfig, DigitScenesConfig
from lab.data.spec import DataSpec


def whole_folder(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the folder, or the description in it, that all parts are found by."""
    return {"train": {str(absolute(data["root"], ROOT).resolve())}} if data.get("root") else {}


SPECS = (
    DataSpec(name="digit_scenes", schema=DigitScenesConfig, source="root"),
    DataSpec(
        name="coco",
        schema=CocoConfig,
        parts=("train_annotations", "val_annotations", "test_annotations"),
        files=("root", "train_images", "val_images", "test_images"),
        existing=("root",),
        titled_by="root",
    ),
    DataSpec(
        name="boxes", schema=BoxesConfig, parts=("root",), places=whole_folder, files=("layout",), existing=("root",), titled_by="root"
    ),
)
