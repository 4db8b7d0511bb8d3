"""The record of a data source: all that the app must know of it before torch is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.base.paths import ROOT, absolute
from lab.config.schema import DataConfig

SPLITS = ("split_seed", "held_out", "folds", "fold", "test")
"""Settings that decide which images are held out, as far as a source has them."""
Places = Callable[[Mapping[str, Any]], dict[str, set[str]]]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data source. Those of the app are in lab.data.specs, and a task's record may bring more.

    Args:
        name: the value of `data=`, which conf/data/ has a file for.
        schema: its settings.
        read: a function of the settings, or its module:name, that returns images of one class each: lab.data.sets.Splits that are held in
            memory, or a lab.data.photos.Photos of images that are read one by one; lab.data.load.load_data does the rest. None if the
            tasks that take such data open it themselves.
        label_sets: a class, or its module:name, made of a run's settings: a lab.tasks.multilabel.task.LabelSets; None: no task=multilabel.
        found_in: a function from a folder, or its module:name, that says which data of this source the folder holds; "" for none.
        parts: settings that name the training, the held-out and the test images.
        places: a function from the settings, by name, to what identifies the images of each part, such as the real paths of files; None:
            the parts' settings are paths, in data.root or as the user gave them.
        splits: further settings that decide which images are held out, in addition to SPLITS.
        files: settings, in addition to the parts, that say which files, columns or arguments the data is made of.
        digested: settings that name files, or are None; the files' bytes identify the data, too.
        existing: settings of files and folders that are there before a run, or None.
        titled_by: the setting whose path names the data in MLflow; None: `name` does.
        source: the setting that MLflow shows as the data's source; None: that of titled_by.
    """

    name: str
    schema: type[DataConfig]
    read: str | Callable[..., Any] | None = None
    label_sets: str | Callable[..., Any] | None = None
    found_in: str | Callable[[Path], str] | None = None
    parts: tuple[str, ...] = ()
    places: Places | None = None
    splits: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    digested: tuple[str, ...] = ()
    existing: tuple[str, ...] = ()
    titled_by: str | None = None
    source: str | None = None

    def has(self, setting: str) -> bool:
        return any(item.name == setting for item in fields(self.schema))

    @property
    def divided_by(self) -> tuple[str, ...]:
        """Return the settings that decide which images are held out, without those that name a part."""
        return tuple(name for name in (*SPLITS, *self.splits) if self.has(name) and name not in self.parts)

    @property
    def identity(self) -> tuple[str, ...]:
        """Return the settings that are equal in two runs of the same images, held out equally."""
        return ("name", *(["image_size"] if self.has("image_size") else []), *self.divided_by, *self.parts, *self.files)

    def places_of(self, data: Mapping[str, Any]) -> dict[str, set[str]]:
        """Return what identifies the images of each part that these settings name."""
        return self.paths_of(data) if self.places is None else self.places(data)

    def paths_of(self, data: Mapping[str, Any]) -> dict[str, set[str]]:
        """Return the real path of each part that these settings name."""
        root = absolute(data.get("root"), ROOT / "data")
        given = {item.name for item in fields(self.schema) if item.metadata.get("path")}
        return {
            part: {str((absolute(str(data[name]), "") if name in given else root / str(data[name])).resolve())}
            for part, name in zip(("train", "val", "test"), self.parts, strict=False)
            if data.get(name)
        }

    def named(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the parts' settings, by train, val and test, as far as they are given."""
        return {part: data[name] for part, name in zip(("train", "val", "test"), self.parts, strict=False) if data.get(name)}

    def title(self, config: DataConfig) -> str:
        """Return the data's name in MLflow."""
        path = self.titled_by and getattr(config, self.titled_by)
        return Path(path).stem if path and self.titled_by in self.digested else Path(path).name if path else self.name

    def source_of(self, config: DataConfig) -> str:
        """Return where the data comes from, for MLflow."""
        given = (getattr(config, name) for name in (self.source, self.titled_by) if name)
        return str(next(filter(None, given), self.name))
