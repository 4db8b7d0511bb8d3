"""Images in one folder a class."""

from collections.abc import Mapping
from typing import Any

from lab.base.paths import ROOT, absolute
from lab.config.schema import FolderConfig
from lab.data.listing import held_out_folder
from lab.data.spec import DataSpec

PARTS = ("train", "val", "test")


def places(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the real path of each part's folder; the held-out folder is found if it is not named."""
    root = absolute(data.get("root"), ROOT / "data")
    named = {part: str(data[part]) for part in PARTS if data.get(part)}
    if "val" not in named and (held_out := held_out_folder(root)):
        named["val"] = held_out
    return {part: {str((root / folder).resolve())} for part, folder in named.items()}


SPECS = (
    DataSpec(
        name="folder",
        schema=FolderConfig,
        open="lab.data.sources.folder:folder_data",
        parts=PARTS,
        places=places,
        files=("root",),
        existing=("root",),
        titled_by="root",
    ),
)
