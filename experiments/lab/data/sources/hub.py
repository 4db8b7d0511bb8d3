"""Hugging Face data sets: from the hub, from its cache, or from local files.

Rows are read as Arrow holds them, because the library's own decoding opens the paths and addresses in a row, of all its columns.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from torch import Tensor

from lab.base.errors import UserError, first_line, unknown
from lab.base.files import read_text, refuse_special
from lab.base.formats import one_form
from lab.base.paths import absolute
from lab.base.yaml_limits import is_shallow
from lab.config.schema import HubConfig
from lab.data.cells import as_text, refuse_large_parquet
from lab.data.images.exif import turned
from lab.data.images.files import (
    UNREADABLE,
    CorruptError,
    ImageBytes,
    ImageFile,
    fault_in,
    in_rgb,
    is_inside,
    open_any_mode,
    reason,
    refuse_bytes,
    whole_range,
)
from lab.data.images.pixels import pixels_of, read_image
from lab.data.photos import Photos, Pictures
from lab.data.samples import classes_in, numbered

STATE, PARTS = "state.json", "dataset_dict.json"  # describe a part, and the parts, of a data set that save_to_disk wrote
FRONT = re.compile(r"\s*---[\r\n]+([\S\s]*?)[\r\n]+---")  # the YAML at the beginning of a README, as the library finds it
MOST_CLASSES = 10000


@dataclass(kw_only=True)
class HubSamples(Pictures):
    """Some rows of a data set.

    Args:
        dataset: its rows, as Arrow holds them.
        column: the column of the images.
        mode: Pillow's mode that the data set gives its images; None as they are.
        folders: where the files lie whose paths the rows may have; None: anywhere on this machine.
    """

    dataset: Any
    column: str
    mode: str | None
    folders: list[str] | None

    def image(self, index: int) -> Image.Image | Tensor:
        try:
            file = self.file(index)
            if self.mode is None:
                return read_image(file, self.channels, deep=True)
            with open_any_mode(file) as opened:
                image = whole_range(turned(opened), opened).convert(self.mode)
            return in_rgb(image) if self.channels is None else pixels_of(np.asarray(image), self.channels)
        except UNREADABLE as error:
            raise UserError(f"{self.where(index)}: {reason(error)}.") from None

    def where(self, index: int) -> str:
        return f"data.image={self.column}, row {self.positions[index]}"

    def file(self, index: int) -> ImageFile:
        cells = self.dataset[self.positions[index]][self.column]
        refuse_bytes(cells.nbytes)
        content, path = map(cells[0].as_py().get, ("bytes", "path"))
        if content is not None:
            return ImageBytes(content, str(path or "its bytes"))
        if "://" in str(path):
            raise CorruptError(f"has the address {path!r} in place of an image, which is not opened")
        whole = os.path.join(self.folders[0] if self.folders else "", str(path))
        if self.folders is not None and not any(is_inside(whole, folder) for folder in self.folders):
            raise CorruptError(f"its path {path!r} leads out of the data set; data.images_outside=true takes such files")
        if not os.path.isfile(whole):
            raise CorruptError(f"has the path {path!r}, and {os.path.abspath(whole)} is not a file")
        return whole


def read_hub(config: HubConfig) -> Photos:
    """Return the images of a Hugging Face data set.

    Raises:
        UserError: the library is not installed, the data set is not found, or has no such split or column.
    """
    splits = _splits(config, _opened(config))
    image, label = _columns(config, splits["train"])
    classes, values = _classes(config, splits["train"], label)
    parts = {name: _samples(config, name, rows, image, label, values) for name, rows in splits.items()}
    of = "of the set's own held-out split" if "val" in parts else f"of {config.path}"
    return Photos(parts=parts, classes=classes, of=of, test=("test_share", config.test_share))


def _opened(config: HubConfig) -> Any:
    """Return the data set, a DatasetDict; no code of its repository is run.

    Raises:
        UserError: the library is not installed, the data set is not found, or a folder's description leads out of it.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError("data=hf: the library datasets is not installed; install it by: uv pip install datasets")
    import datasets

    local = absolute(config.path, "")
    parted, single = (local / PARTS).is_file(), (local / STATE).is_file()
    if local.is_dir():
        _refuse_unfit(local, _folders(config), saved=parted or single)
    try:
        if parted or single:
            whole = datasets.load_from_disk(str(local))
            whole = whole if parted else datasets.DatasetDict({"train": whole})
            for part in whole.values():
                part.data.table.validate(full=True)  # a wrong offset in a file that is mapped into memory would end the process
            return whole
        return datasets.load_dataset(str(local) if local.exists() else config.path, config.subset)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds of errors
        raise UserError(
            f"data.path={config.path}: cannot be opened: {first_line(error)}\n"
            "A name of the hub (or of its cache), a folder that save_to_disk wrote, or a folder of images is expected."
        ) from None


def _refuse_unfit(folder: Path, allowed: list[str] | None, *, saved: bool) -> None:
    """Raise UserError if a link in a folder leads out, a pipe or a device is there, or its description names files elsewhere.

    The library would open them.

    Args:
        folder: of the data set.
        allowed: folders in which files may lie; None for all.
        saved: whether save_to_disk wrote the data set.
    """
    inside = (Path(above, name) for above, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in inside:
        if path.is_symlink() and allowed is not None and not any(is_inside(str(path), each) for each in allowed):
            raise UserError(f"data.path={folder}: the link {path} leads out of it; data.images_outside=true takes such files.")
        if path.exists() and not path.is_dir():
            refuse_special(path)
        if path.suffix == ".parquet":
            _refuse_large(path)
        if saved and path.name in (STATE, PARTS):
            _refuse_files_of(path)
    if not saved:
        _refuse_description(folder)


def _refuse_large(path: Path) -> None:
    """Raise UserError for a Parquet file that unpacks to more bytes than are read; the library itself names a damaged one."""
    try:
        refuse_large_parquet(path)
    except CorruptError as error:
        raise UserError(f"data.path={path}: {error}.") from None
    except Exception:
        return


def _refuse_files_of(state: Path) -> None:
    """Raise UserError if the description of a saved data set names a file that is not beside it."""
    try:
        tree = json.loads(read_text(state))
        names = [each["filename"] for each in tree["_data_files"]] if state.name == STATE else list(tree["splits"])
        wrong = [name for name in names if os.path.basename(name) != name or name in ("", ".", "..")]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{state}: does not describe a data set that save_to_disk wrote: {first_line(error)}") from None
    if wrong:
        raise UserError(f"{state}: names {wrong[0]!r}; files and folders beside it are expected.")


def _refuse_description(folder: Path) -> None:
    """Raise UserError if a folder's description names files outside of it or addresses: the library opens them."""
    from huggingface_hub import DatasetCard

    readme, other = folder / "README.md", folder / ".huggingface.yaml"
    found = []
    try:
        if readme.is_file():
            head = FRONT.match(text := read_text(readme))
            _refuse_expanding(readme, head[1] if head else "")
            found.append(DatasetCard(text).data.to_dict())
        if other.is_file():
            _refuse_expanding(other, text := read_text(other))
            found.append(yaml.safe_load(text))
    except UserError:
        raise
    except Exception as error:  # values that are not of the type that they are marked with raise any error
        raise UserError(f"data.path={folder}: its description cannot be read: {first_line(error)}") from None
    for text in _texts([each.get("configs") for each in found if isinstance(each, dict)]):
        if os.path.isabs(text) or ".." in Path(text).parts or ":" in text:
            raise UserError(f"data.path={folder}: its description names {text!r}, and files within the folder are expected.")


def _refuse_expanding(path: Path, text: str) -> None:
    """Raise UserError for YAML with references, which may stand for billions of values, or with very many levels."""
    if not is_shallow(text):
        raise UserError(f"{path}: has references (*name) or too many levels; plain YAML is expected.")


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (dict, list)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(each)


def _folders(config: HubConfig) -> list[str] | None:
    """Return the folders of the data set's files: its own, and the library's caches."""
    from datasets import config as library
    from huggingface_hub import constants

    local = absolute(config.path, "")
    caches = (library.HF_DATASETS_CACHE, library.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return None if config.images_outside else [str(each) for each in ([local] if local.is_dir() else []) + [*caches]]


def _splits(config: HubConfig, whole: Any) -> dict[str, Any]:
    given = {"train": config.train, "val": config.val, "test": config.test}
    for name, split_name in given.items():
        if split_name is not None and split_name not in whole:
            raise unknown(f"data.{name}={split_name}: split of {config.path}", split_name, list(whole))
    given["val"] = given["val"] or next((each for each in ("validation", "valid", "val", "dev") if each in whole), None)
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
    if not isinstance(kind := columns[images[0]], datasets.Image):
        raise UserError(f"data.image={images[0]}: holds {getattr(kind, 'dtype', kind)}; a column of images is expected.")
    return images[0], labels[0]


def _classes(config: HubConfig, part: Any, label: str) -> tuple[list[str], list[str]]:
    """Return the classes' names, and the value of each in the labels' column, as a text."""
    if names := getattr(part.features[label], "names", None):
        return [one_form(str(name)) for name in names], [str(number) for number in range(len(names))]
    found = classes_in(_values(part, label), f"data.label={label}")
    if len(found) > MOST_CLASSES:
        raise UserError(f"data.label={label}: has {len(found)} different values; at most {MOST_CLASSES} classes are expected.")
    return found, found


def _samples(config: HubConfig, name: str, part: Any, image: str, label: str, values: list[str]) -> HubSamples:
    given = _values(part, label)
    targets = numbered(given, values, lambda row: f"data.label={label}, split {name}, row {row}", by_index=False)
    rows, mode = part.select_columns([image]).with_format("arrow"), part.features[image].mode
    known: dict[str, Any] = {"targets": targets, "keys": [f"{name}-{row}" for row in range(len(given))], "channels": config.channels}
    return HubSamples(**known, source=f"data.path={config.path}", dataset=rows, column=image, mode=mode, folders=_folders(config))


def _values(part: Any, column: str) -> list[str]:
    """Return a column's cells as texts."""
    found = part.select_columns([column]).with_format("arrow")[:][column]
    if said := fault_in(lambda: refuse_bytes(found.nbytes)):
        raise UserError(f"data.label={column}: {said}.")
    return [one_form(as_text(each)) for each in found.to_pylist()]
