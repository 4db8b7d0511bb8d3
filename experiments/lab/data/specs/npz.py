"""Images and their classes in arrays of NumPy's .npz files."""

from collections.abc import Mapping
from typing import Any

from lab.base.paths import absolute
from lab.config.schema import NpzConfig
from lab.data.spec import DataSpec

PARTS = {"train": "file", "val": "val", "test": "test"}


def places(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the real path of each part's file."""
    return {part: {str(absolute(data[name], "").resolve())} for part, name in PARTS.items() if data.get(name)}


SPECS = (
    DataSpec(
        name="npz",
        schema=NpzConfig,
        open="lab.data.sources.npz:npz_data",
        parts=tuple(PARTS.values()),
        places=places,
        files=("images", "labels"),
        digested=tuple(PARTS.values()),
        existing=tuple(PARTS.values()),
        titled_by="file",
    ),
)
