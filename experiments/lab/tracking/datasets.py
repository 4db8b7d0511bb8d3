"""The data sets of a run as its record and MLflow name them: what they are called, what is in them, how large they are."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from lab.config.schema import DataConfig, TrainConfig
from lab.data.sets import Loader, Sets

READING = ("name", "batch_size", "eval_batch_size", "augment", "workers", "download", "check", "in_memory")
"""Settings of data that say how it is read and not what it is."""


def data_sets(config: TrainConfig, data: Sets, **contexts: str) -> list[dict[str, Any]]:
    """One entry a part of the data: name, digest, context, samples, classes, source.

    Args:
        config: of the run.
        data: opened.
        contexts: what `train`, `val` and `test` are for, as far as there are any: training, validation or test.
    """
    root = getattr(config.data, "root", None)
    name = Path(root).name if root and config.data.name in ("folder", "coco", "mask_folder") else config.data.name
    found = []
    for part, context in contexts.items():
        loader: Loader | None = getattr(data, part)
        if loader is None:
            continue
        digest = _digest(config.data, part, data.classes, loader)
        about = {"name": name, "digest": digest, "context": context, "samples": loader.samples, "classes": len(data.classes)}
        found.append(about | {"source": str(root or config.data.name)})
    return found


def _digest(config: DataConfig, part: str, classes: list[str], loader: Loader) -> str:
    """Of the pixels and targets where they are in memory, of the annotations of a COCO file, else of the settings and the size."""
    digest = hashlib.sha256(json.dumps([classes, loader.samples]).encode())
    content = list(_content(loader))
    for each in content:
        digest.update(each)
    if not content:
        settings = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in READING}
        digest.update(json.dumps([part, settings], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:8]


def _content(loader: Any) -> Iterator[bytes]:
    held = loader.file if hasattr(loader, "file") else loader
    for name in ("image_ids", "boxes", "images", "labels", "targets"):
        value = getattr(held, name, None)
        if isinstance(value, Tensor):
            yield value.detach().cpu().contiguous().numpy().tobytes()
        elif isinstance(value, list):
            yield json.dumps(value).encode()
