"""The data sets of a run, for its record and for MLflow: names, contents and sizes."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from lab.base.files import sha256_of
from lab.config.schema import DataConfig, TrainConfig
from lab.data.sets import Data, Loader
from lab.data.spec import DataSpec
from lab.data.specs import SOURCES

READING = ("name", "batch_size", "eval_batch_size", "augment", "workers", "download", "check", "in_memory")
"""Data settings that change how data is read, but not its contents."""


def data_sets(config: TrainConfig, data: Data, **contexts: str) -> list[dict[str, Any]]:
    """Return one entry for each part of the data: name, digest, context, samples, classes, source.

    Args:
        config: the run's settings.
        data: the opened data.
        contexts: the uses of `train`, `val` and `test`, for those that exist: training, validation or test.
    """
    spec = SOURCES[config.data.name]
    name, source = spec.title(config.data), spec.source_of(config.data)
    found = []
    for part, context in contexts.items():
        loader: Loader | None = getattr(data, part)
        if loader is None:
            continue
        digest = _digest(spec, config.data, part, data.identity(part), loader)
        about = {"name": name, "digest": digest, "context": context, "samples": loader.samples, "classes": len(data.classes)}
        found.append(about | {"source": source})
    return found


def _digest(spec: DataSpec, config: DataConfig, part: str, identity: str, loader: Any) -> str:
    """Return a digest of samples' names and targets, and of pixels in memory, else of the settings and of the files that hold the data."""
    digest = hashlib.sha256(identity.encode())
    images = getattr(loader, "images", None)
    if isinstance(images, Tensor):
        digest.update(images.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:8]
    settings = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in READING}
    digest.update(json.dumps([part, settings], sort_keys=True, default=str).encode())
    for file in filter(None, (getattr(config, name) for name in spec.digested)):
        digest.update(sha256_of(Path(file).expanduser()).encode())
    return digest.hexdigest()[:8]
