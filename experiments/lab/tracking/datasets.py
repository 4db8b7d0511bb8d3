"""The data sets of a run, for its record and for MLflow: names, contents and sizes."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from lab.base.files import sha256_of
from lab.config.schema import DataConfig, TrainConfig
from lab.data.sets import Data, Loader

READING = ("name", "batch_size", "eval_batch_size", "augment", "workers", "download", "check", "in_memory")
"""Data settings that change how data is read, but not its contents."""


def data_sets(config: TrainConfig, data: Data, **contexts: str) -> list[dict[str, Any]]:
    """Return one entry for each part of the data: name, digest, context, samples, classes, source.

    Args:
        config: the run's settings.
        data: the opened data.
        contexts: the uses of `train`, `val` and `test`, for those that exist: training, validation or test.
    """
    root = getattr(config.data, "root", None)
    table = getattr(config.data, "file", None)
    name = Path(root).name if root and config.data.name in ("folder", "coco", "mask_folder") else config.data.name
    name = Path(table).stem if table else name
    found = []
    for part, context in contexts.items():
        loader: Loader | None = getattr(data, part)
        if loader is None:
            continue
        digest = _digest(config.data, part, data.classes, loader)
        about = {"name": name, "digest": digest, "context": context, "samples": loader.samples, "classes": len(data.classes)}
        found.append(about | {"source": str(table or root or config.data.name)})
    return found


def _digest(config: DataConfig, part: str, classes: list[str], loader: Loader) -> str:
    """Return a digest of pixels and targets that are in memory, of a COCO file's annotations, else of settings and size."""
    digest = hashlib.sha256(json.dumps([classes, loader.samples]).encode())
    content = list(_content(loader))
    for each in content:
        digest.update(each)
    if not content:
        settings = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in READING}
        digest.update(json.dumps([part, settings], sort_keys=True, default=str).encode())
        if table := getattr(config, "file", None):
            digest.update(sha256_of(Path(table).expanduser()).encode())
    return digest.hexdigest()[:8]


def _content(loader: Any) -> Iterator[bytes]:
    held = loader.file if hasattr(loader, "file") else loader
    for name in ("image_ids", "boxes", "images", "labels", "targets"):
        value = getattr(held, name, None)
        if isinstance(value, Tensor):
            yield value.detach().cpu().contiguous().numpy().tobytes()
        elif isinstance(value, list):
            yield json.dumps(value).encode()
