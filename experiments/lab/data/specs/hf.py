"""Data sets of Hugging Face's library `datasets`."""

from collections.abc import Mapping
from typing import Any

from lab.base.paths import absolute
from lab.config.schema import HubConfig
from lab.data.spec import DataSpec

PARTS = ("train", "val", "test")


def places(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return each part's split of the data set, which is named by its real path if it is here."""
    local = absolute(data.get("path"), "")
    where = str(local.resolve() if local.exists() else data.get("path"))
    return {part: {f"{where} {data.get('subset') or ''} {data[part]}"} for part in PARTS if data.get(part)}


SPECS = (
    DataSpec(
        name="hf",
        schema=HubConfig,
        open="lab.data.sources.hub:hub_data",
        parts=PARTS,
        places=places,
        splits=("test_share",),
        files=("path", "subset", "image", "label"),
        source="path",
    ),
)
