"""The sources of data that every task may take; detectors bring their own (lab.detectors.schema).

They are read before torch is imported, so nothing here imports it; readers are named.
"""

import json
from collections.abc import Mapping
from typing import Any

from lab.base.errors import UserError
from lab.base.paths import ROOT, absolute
from lab.config import schema
from lab.data.listing import expanded, held_out_folder
from lab.data.spec import DataSpec


def in_folders(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the real path of each part's folder; the held-out folder is found if it is not named."""
    return FOLDER.paths_of(dict(data) | {"val": data.get("val") or held_out_folder(absolute(data.get("root"), ROOT / "data"))})


def on_the_hub(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return each part's split of the data set, which is named by its real path if it is here."""
    local = absolute(data.get("path"), "")
    where = str(local.resolve() if local.exists() else data.get("path"))
    return {part: {f"{where} {data.get('subset') or ''} {name}"} for part, name in HUB.named(data).items()}


def in_shards(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the real paths of each part's shards; the pattern itself if they are not there any more."""

    def shards(pattern: str) -> set[str]:
        try:
            return {str(path.resolve()) for path in expanded("data.shards", pattern)}
        except UserError:
            return {str(absolute(pattern, ""))}

    return {part: shards(str(pattern)) for part, pattern in SHARDS.named(data).items()}


def made_by(data: Mapping[str, Any]) -> dict[str, set[str]]:
    return {"train": {json.dumps([data.get("target"), data.get("args")], sort_keys=True, default=str)}}


FOLDER = DataSpec(
    name="folder",
    schema=schema.FolderConfig,
    read="lab.data.sources.folder:read_folder",
    parts=("train", "val", "test"),
    places=in_folders,
    files=("root",),
    existing=("root",),
    titled_by="root",
)
HUB = DataSpec(
    name="hf",
    schema=schema.HubConfig,
    read="lab.data.sources.hub:read_hub",
    parts=("train", "val", "test"),
    places=on_the_hub,
    splits=("test_share",),
    files=("path", "subset", "image", "label"),
    source="path",
)
SHARDS = DataSpec(
    name="webdataset",
    schema=schema.ShardsConfig,
    read="lab.data.sources.shards:read_shards",
    parts=("shards", "val", "test"),
    places=in_shards,
    files=("image", "label"),
    source="shards",
)
NPZ = DataSpec(
    name="npz",
    schema=schema.NpzConfig,
    read="lab.data.sources.npz:read_npz",
    parts=("file", "val", "test"),
    files=("images", "labels"),
    digested=("file", "val", "test"),
    existing=("file", "val", "test"),
    titled_by="file",
)
TABLE = DataSpec(
    name="table",
    schema=schema.TableConfig,
    read="lab.data.sources.table:read_classes",
    parts=("file",),
    splits=("split",),
    files=("root", "image", "label"),
    digested=("file",),
    existing=("file", "root"),
    titled_by="file",
)
CUSTOM = DataSpec(
    name="custom",
    schema=schema.CustomDataConfig,
    read="lab.data.sources.custom:read_custom",
    places=made_by,
    files=("target", "args"),
    source="target",
)
DIGITS = DataSpec(name="digits", schema=schema.DigitsConfig, read="lab.data.sets:digits")
DOWNLOADED = (
    DataSpec(name=name, schema=schema.DownloadedConfig, read="lab.data.sets:downloaded", files=("root",), source="root")
    for name in ("cifar10", "cifar100", "mnist")
)
SOURCES = {spec.name: spec for spec in (DIGITS, *DOWNLOADED, CUSTOM, FOLDER, HUB, NPZ, TABLE, SHARDS)}
