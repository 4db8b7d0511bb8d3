"""Images and their labels in a table."""

from collections.abc import Mapping
from typing import Any

from lab.base.paths import absolute
from lab.config.schema import TableConfig
from lab.data.spec import DataSpec


def places(data: Mapping[str, Any]) -> dict[str, set[str]]:
    return {"train": {str(absolute(data["file"], "").resolve())}} if data.get("file") else {}


SPECS = (
    DataSpec(
        name="table",
        schema=TableConfig,
        open="lab.data.sources.table:class_data",
        parts=("file",),
        places=places,
        splits=("split",),
        files=("root", "image", "label"),
        digested=("file",),
        existing=("file", "root"),
        titled_by="file",
    ),
)
