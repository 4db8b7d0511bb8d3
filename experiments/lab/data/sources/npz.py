"""Images and their classes in arrays of NumPy's .npz files."""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lab.base.errors import UserError, unknown
from lab.base.formats import one_form
from lab.base.paths import absolute
from lab.config.schema import NpzConfig
from lab.data.images.files import CorruptError, refuse_bytes, refuse_unfit
from lab.data.images.pixels import pixels_of, shape_of
from lab.data.photos import Photos, Samples
from lab.data.samples import classes_in, numbered

PARTS = ("file", "val", "test")
BROKEN = (OSError, ValueError, EOFError, RuntimeError, CorruptError, zipfile.BadZipFile, zlib.error)
"""What reading an archive raises where it is damaged, encrypted or no archive, or where an array holds Python objects."""
MEANING = "images are (N, H, W) or (N, H, W, channels)"


@dataclass(kw_only=True)
class ArraySamples(Samples):
    """Images (N, H, W, channels) that are held in memory."""

    images: Any

    def image(self, index: int) -> Image.Image | Tensor:
        array = self.images[self.positions[index]]
        if self.channels is None:
            return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).convert("RGB")
        return pixels_of(array, self.channels)


def read_npz(config: NpzConfig) -> Photos:
    """Return the images of .npz files.

    Raises:
        UserError: a file, an array or a setting is wrong.
    """
    found: dict[str, ArraySamples] = {}
    classes = config.classes
    for part, name in zip(("train", "val", "test"), PARTS, strict=True):
        if path := getattr(config, name):
            found[part], classes = _samples(f"data.{name}={path}", absolute(path, ""), config, classes)
    return Photos(parts=found, classes=classes or [], of=f"of {Path(config.val or config.file).name}")


def _samples(setting: str, path: Path, config: NpzConfig, classes: list[str] | None) -> tuple[ArraySamples, list[str]]:
    """Return the images of a file, and the classes, which are those of its labels where they are not known.

    Raises:
        UserError: the file or one of its arrays cannot be read, or has another shape, type or class than expected.
    """
    images, labels = _arrays(setting, path, (config.images, config.labels))
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(f"{setting}: the array {config.images} has the shape {images.shape}; {MEANING}, and not empty.")
    if config.channels is None and (images.dtype != np.uint8 or images.shape[3] not in (1, 3)):
        raise UserError(
            f"{setting}: the array {config.images} is of {images.dtype} with {images.shape[3]} channels; uint8 with 1 or 3 is expected. "
            "data.channels=NUMBER reads other pixels."
        )
    if config.channels:
        try:
            pixels_of(images[0], config.channels)
        except CorruptError as error:
            raise UserError(f"{setting}: an image of the array {config.images} {error}.") from None
        if images.dtype.kind == "f" and not np.isfinite(images).all():
            raise UserError(f"{setting}: the array {config.images} has pixels that are nan or infinite.")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != images.shape[:1]:
        raise UserError(
            f"{setting}: the array {config.labels} has the shape {labels.shape}; a class for each of {len(images)} images is expected."
        )
    if labels.dtype.kind == "U":
        given = [one_form(str(label)) for label in labels.tolist()]
        classes = classes or classes_in(given, setting)
        targets = numbered(given, classes, lambda _: setting, by_index=config.classes is not None)
    elif labels.dtype.kind in "iu":
        classes = [str(each) for each in range(int(labels.max()) + 1)] if classes is None else classes
        if odd := [label for label in labels.tolist() if not 0 <= label < len(classes)]:
            raise UserError(f"{setting}: has the class {odd[0]}; classes are from 0 to {len(classes) - 1}.")
        targets = torch.tensor(labels.tolist())
    else:
        raise UserError(f"{setting}: the array {config.labels} is of {labels.dtype}; whole numbers from 0 or texts are expected.")
    keys = [str(position) for position in range(len(images))]
    return ArraySamples(targets=targets, keys=keys, channels=config.channels, images=images, source=path), list(classes)


def _arrays(setting: str, path: Path, names: tuple[str, ...]) -> list[Any]:
    """Return arrays of a file, by name, without unpickling.

    Raises:
        UserError: the file cannot be read, or lacks an array.
    """
    try:
        refuse_unfit(path)
        with zipfile.ZipFile(path) as archive:
            held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in names if name not in held]:
                raise unknown(f"{setting}: array", missing[0], list(held))
            return [_array(archive, held[name]) for name in names]
    except BROKEN as error:
        raise UserError(f"{setting}: cannot be read as an .npz file: {error}.") from None


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    """Read an array. Its header and the archive's directory may say more than the file or the memory holds, which would be taken first."""
    with archive.open(info) as file:
        try:
            shape_of(file, info.file_size)
        except CorruptError as error:
            raise CorruptError(f"{info.filename} {error}") from None
    refuse_bytes(info.file_size, f"{info.filename} ")
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
