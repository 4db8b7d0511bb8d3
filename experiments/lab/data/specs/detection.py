"""Images with boxes, which the tasks detection and multilabel open."""

from lab.config.detection_schema import CocoConfig, DigitScenesConfig
from lab.data.spec import DataSpec

SPECS = (
    DataSpec(name="digit_scenes", schema=DigitScenesConfig, source="root"),
    DataSpec(
        name="coco",
        schema=CocoConfig,
        parts=("train_annotations", "val_annotations", "test_annotations"),
        files=("root", "train_images", "val_images", "test_images"),
        titled_by="root",
    ),
)
