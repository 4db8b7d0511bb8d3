"""Hugging Face data sets: from the hub, from its cache, or from local files."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lab.config.errors import UserError, unknown
from lab.config.schema import HubConfig
from lab.config.settings import absolute
from lab.data.sets import Data, Norm
from lab.data.sources.folder import norm_of_files, photos_data
from lab.data.sources.own import as_rgb, of_channels
from lab.data.split import held_out_by, split

HELD_OUT = ("validation", "valid", "val", "dev")
MOST_CLASSES = 10000


@dataclass
class HubSamples:
    """Some rows of a data set, by their positions in it."""

    dataset: Any
    column: str
    classes: list[str]
    positions: list[int]
    targets: Tensor  # (N,)
    channels: int | None = None

    def image(self, index: int) -> Image.Image | Tensor:
        image = self.dataset[self.positions[index]][self.column]
        try:
            return as_rgb(image) if self.channels is None else of_channels(image, self.channels)
        except TypeError as error:
            raise UserError(f"data.image={self.column}, row {self.positions[index]}: {error}") from None

    def only(self, positions: Iterable[int]) -> "HubSamples":
        kept = list(positions)
        return replace(self, positions=[self.positions[i] for i in kept], targets=self.targets[kept])


def hub_data(config: HubConfig, norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open a Hugging Face data set; `norm` and `saved` as in lab.data.load.load_data.

    Raises:
        UserError: the library is not installed, the data set is not found, or has no such split or column.
    """
    whole = _opened(config)
    parts = _splits(config, whole)
    image, label = _columns(config, parts["train"])
    classes = _classes(config, parts["train"], label)
    found = {name: _samples(config, name, part, image, label, classes) for name, part in parts.items()}
    held_out = "the set's own held-out images"
    if "val" not in found:
        train, val, test = split(config, found["train"].targets.tolist(), classes, config.test_share)
        everything, held_out = found["train"], f"of {config.path}, {held_out_by(config)}"
        found |= {"train": everything.only(train), "val": everything.only(val)} | ({"test": everything.only(test)} if test else {})
    elif config.fold is not None or config.test_share is not None:
        raise UserError("data.fold and data.test_share divide the training split, but the data set has a held-out split, too.")
    keys = {name: [f"{name}-{position}" for position in samples.positions] for name, samples in found.items()}
    return photos_data(found, keys, held_out, config, norm_of_files(found["train"], config, norm, saved), device, seed)


def _opened(config: HubConfig) -> Any:
    """Return the data set, a DatasetDict; no code of its repository is run."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError("data=hf: the library datasets is not installed; install it by: uv pip install datasets")
    import datasets

    local = absolute(config.path, "")
    try:
        if local.is_dir() and (local / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(local))
        if local.is_dir() and (local / "state.json").is_file():
            return datasets.DatasetDict({"train": datasets.load_from_disk(str(local))})
        return datasets.load_dataset(str(local) if local.exists() else config.path, config.subset)
    except Exception as error:  # the library raises many kinds of errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"data.path={config.path}: cannot be opened: {reason}\n"
            "A name of the hub (or of its cache), a folder that save_to_disk wrote, or a folder of images is expected."
        ) from None


def _splits(config: HubConfig, whole: Any) -> dict[str, Any]:
    given = {"train": config.train, "val": config.val, "test": config.test}
    for name, split_name in given.items():
        if split_name is not None and split_name not in whole:
            raise unknown(f"data.{name}={split_name}: split of {config.path}", split_name, list(whole))
    given["val"] = given["val"] or next((each for each in HELD_OUT if each in whole), None)
    named = [each for each in given.values() if each is not None]
    if len(set(named)) < len(named):
        raise UserError(f"data.train, data.val and data.test: {', '.join(named)}; different splits are expected.")
    return {name: whole[split_name] for name, split_name in given.items() if split_name is not None}


def _columns(config: HubConfig, part: Any) -> tuple[str, str]:
    """Return the columns of the images and of the labels, found by their types if they are not given."""
    import datasets

    columns = dict(part.features)
    for setting, name in (("image", config.image), ("label", config.label)):
        if name is not None and name not in columns:
            raise unknown(f"data.{setting}={name}: column", name, columns)
    images = [config.image] if config.image else [name for name, kind in columns.items() if isinstance(kind, datasets.Image)]
    labels = [config.label] if config.label else [name for name, kind in columns.items() if isinstance(kind, datasets.ClassLabel)]
    for setting, found in (("image", images), ("label", labels)):
        if len(found) != 1:
            which = f"{', '.join(found)} could be it" if found else "none is of such a type"
            raise UserError(f"data.{setting}: name the column ({which}). Columns: {', '.join(columns)}")
    return images[0], labels[0]


def _classes(config: HubConfig, part: Any, label: str) -> list[str]:
    names = getattr(part.features[label], "names", None)
    if names:
        return [str(name) for name in names]
    found = sorted({str(each) for each in part[label]})
    if not 2 <= len(found) <= MOST_CLASSES:
        raise UserError(f"data.label={label}: has {len(found)} values; 2 to {MOST_CLASSES} classes are expected.")
    return found


def _samples(config: HubConfig, name: str, part: Any, image: str, label: str, classes: list[str]) -> HubSamples:
    given = part[label]
    if getattr(part.features[label], "names", None):
        targets = torch.tensor([-1 if each is None else int(each) for each in given])
    else:
        index = {each: number for number, each in enumerate(classes)}
        targets = torch.tensor([index.get(str(each), -1) for each in given])
    if (targets < 0).any():
        row = int((targets < 0).int().argmax())
        raise UserError(f"data.label={label}, split {name}, row {row}: {given[row]!r} is not one of the classes; leave it out, or name it.")
    return HubSamples(part, image, classes, list(range(len(targets))), targets, config.channels)
