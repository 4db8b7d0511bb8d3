"""Image files: opened in one way, and checked before a run starts, so that all faults are named at once."""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import TypeVar

import numpy as np
from PIL import Image

from lab.base.errors import UserError
from lab.base.files import UnfitFileError, read_bytes, refuse_special, write_text
from lab.base.formats import one_form, one_line
from lab.base.paths import ROOT
from lab.config.user import user_limit
from lab.data.images.exif import BOTH, SHOWN, Size, is_shown, sizes_of, turn_of, turned

MOST_BYTES = 2**32
MOST_PIXELS = 89_478_485  # Pillow's own limit, from which on it warns; a picture so large takes 1.5 GB in predict.py
FEW = 5000  # so many images are checked within seconds
CACHE = ROOT / "data" / "checked"
Entry = TypeVar("Entry")
NAMED = 10  # faults that a message names
SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of files that count as images, in lower case; of several frames the first is read."""
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of these; it goes by the content, and for PostScript it would start Ghostscript, which runs the file."""
DEEP = ("I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of one grey channel of 16 bits."""
BITS_PER_SAMPLE = 258  # a TIFF's tag
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}
Files = dict[int, tuple[str, Size | None]]  # by id: the file, and the size that it must have


class ImageBytes(BytesIO):
    """An image in memory with the name of its file."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name

    def __repr__(self) -> str:
        """Return the name, which Pillow's messages then have."""
        return repr(self.name)


ImageFile = str | Path | ImageBytes


class CorruptError(Exception):
    """An entry that cannot be used; the message says why."""


# PIL raises SyntaxError for a damaged PNG; TypeError, LookupError and struct.error for damaged TIFF and EXIF tags. numpy raises TokenError
UNREADABLE = (
    *(CorruptError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError),
    *(TypeError, LookupError, ArithmeticError, struct.error, TokenError),
)


@dataclass
class Faults:
    """The faults of a data set, a line each, and what helps to understand them."""

    path: Path
    lines: list[str] = field(default_factory=list)
    hint: str = ""

    def add(self, line: str) -> None:
        self.lines.append(one_line(f"{line}."))

    def raise_or_report(self, skip: bool, *, usable: bool = True) -> None:
        """Raise UserError with the faults, or print that they are left out; `usable`: whether entries without a fault remain."""
        if self.lines and skip and usable:
            left_out = f"{len(self.lines)} corrupt entries are left out (data.skip_corrupt=true); the first: {self.lines[0]}"
            print(one_line(f"{self.path}: {left_out}"))
        elif self.lines:
            more = f"\n... and {len(self.lines) - NAMED} more" if len(self.lines) > NAMED else ""
            shown = "\n".join(self.lines[:NAMED])
            remedy = "data.skip_corrupt=true leaves them out" if usable else "no entry is left to use, so look at the settings, too"
            hint = f"\n{self.hint}" if self.hint else ""
            raise UserError(f"{self.path}: {len(self.lines)} corrupt entries; {remedy}.\n{shown}{more}{hint}")


def refuse_unfit(path: ImageFile) -> None:
    """Raise CorruptError for a path that is not a regular file, because opening a pipe waits for ever, or that is too large.

    Raises:
        OSError: there is nothing.
    """
    if not isinstance(path, ImageBytes):
        try:
            refuse_special(path)
        except UnfitFileError:
            raise CorruptError("is not a regular file") from None
        refuse_bytes(os.path.getsize(path))


def is_inside(path: str, folder: str | Path) -> bool:
    """Return whether a path leads to a file in a folder or below it, after links in both are followed."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def spelling(name: str) -> str:
    """Return the form in which names of files are compared: Unicode's composed form, and the ending in lower case.

    macOS writes é in file names as two characters, and cameras write .JPG.
    """
    stem, ending = os.path.splitext(one_form(name))
    return stem + ending.lower()


class Names:
    """Names of files in a folder, as tables and files of annotations write them.

    A folder is listed once, because asking for a hundred thousand files one by one takes minutes on a network's file system. What lies
    outside of the folder is not listed.

    Args:
        folder: the folder, which may be a link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listed = cache(self._list)

    def _list(self, parent: str) -> tuple[str, dict[str, str], set[str]] | None:
        """Return a folder's real path, the names in it by themselves and by their spelling, and those of links; None if it is outside."""
        try:
            if not is_inside(parent, self.folder):
                return None
            with os.scandir(parent) as found:
                entries = list(found)
        except OSError:
            entries = []
        except ValueError:  # no system has such a name
            return None
        names = {spelling(entry.name): entry.name for entry in entries} | {entry.name: entry.name for entry in entries}
        return os.path.realpath(parent), names, {entry.name for entry in entries if entry.is_symlink()}

    def spelled(self, name: str) -> str:
        """Return a name as the folder spells it, with `/` for the `\\` that Windows writes; a name of no file keeps its spelling."""
        if self._beside(name).get(file := os.path.basename(name)) == file:
            return name
        found, steps = "", [step for step in name.replace("\\", "/").split("/") if step not in ("", ".")]
        if name.startswith("/") or ".." in steps:
            return name.replace("\\", "/")
        for number, step in enumerate(steps):
            names = self._beside(os.path.join(found, step))
            if not names:
                return os.path.join(found, *steps[number:])
            found = os.path.join(found, names.get(step) or names.get(spelling(step), step))
        return found or name

    def _beside(self, name: str) -> dict[str, str]:
        listed = self._listed(os.path.dirname(os.path.join(self.folder, name)))
        return listed[1] if listed else {}

    def holds(self, name: str) -> bool:
        """Return whether the folder has this file; only outside of the folder the system is asked."""
        path = os.path.join(self.folder, name)
        listed = self._listed(os.path.dirname(path))
        return os.path.exists(path) if listed is None else listed[1].get(file := os.path.basename(path)) == file

    def leaves(self, name: str) -> bool:
        """Return whether a name leads out of the folder: as an absolute path, by `..` or through a link."""
        try:
            if b"\0" in os.fsencode(name):  # no system has such a file
                return True
        except UnicodeEncodeError:
            return True
        parent, file = os.path.split(os.path.join(self.folder, name))
        listed = self._listed(parent)
        return listed is None or (file in listed[2] and not is_inside(os.path.join(parent, file), self.folder))

    def real(self, name: str) -> str:
        """Return the path of the file that a name leads to, by which two names of one file are found."""
        path = os.path.join(self.folder, name)
        parent, file = os.path.split(path)
        listed = self._listed(parent)
        try:
            return os.path.join(listed[0], file) if listed and file not in listed[2] else os.path.realpath(path)
        except ValueError:  # no system has such a name
            return path


def open_any_mode(path: ImageFile) -> Image.Image:
    """Open an image of one of FORMATS, in any mode.

    Raises:
        one of UNREADABLE.
    """
    refuse_unfit(path)
    most_pixels()
    image = Image.open(path, formats=FORMATS)
    try:
        refuse_pixels(image.width, image.height)
    except CorruptError:
        image.close()
        raise
    if image.format == "TIFF":
        # without a name Pillow does not map the file into memory, where it mixes up grey pixels that EXIF turns on their side
        image.filename = ""
    return image


@cache
def most_pixels() -> int:
    """Return the most pixels of an image: LOSSFORGE_MAX_PIXELS, else the user's file, else MOST_PIXELS. Pillow's own limit follows it.

    Raises:
        UserError: it is not a number of pixels.
    """
    Image.MAX_IMAGE_PIXELS = user_limit("max_pixels", MOST_PIXELS)
    return Image.MAX_IMAGE_PIXELS


@cache
def most_bytes() -> int:
    """Return the most bytes that a file of data may say it has unpacked: LOSSFORGE_MAX_BYTES, else the user's file, else MOST_BYTES.

    Raises:
        UserError: it is not a number of bytes.
    """
    return user_limit("max_bytes", MOST_BYTES)


def refuse_bytes(size: int, what: str = "") -> None:
    """Raise CorruptError for more bytes than `most_bytes`, before they are read: a small file may say that it has very many."""
    if size > most_bytes():
        raise CorruptError(f"{what}takes {size:,} bytes; at most {most_bytes():,} are read, and LOSSFORGE_MAX_BYTES sets another limit")


def refuse_pixels(width: int, height: int) -> None:
    """Raise CorruptError for more pixels than `most_pixels`, before they are decoded: a small file may hold very many."""
    if width * height > most_pixels():
        raise CorruptError(
            f"has {width} x {height} pixels; at most {most_pixels():,} are read, and LOSSFORGE_MAX_PIXELS sets another limit"
        )


def open_image(path: ImageFile, *, deep: bool = False) -> Image.Image:
    """Open an image that `in_rgb` converts, without decoding its pixels yet.

    Args:
        path: the file.
        deep: whether grey pixels of 16 bits are taken, too.

    Raises:
        one of UNREADABLE.
    """
    image = open_any_mode(path)
    if image.mode in ("F", "I") or (image.mode.startswith("I;") and not (deep and image.mode in DEEP)):
        raise CorruptError(f"has pixels of mode {image.mode}; 8 bits a channel are expected")
    return image


def fits(image: Image.Image, size: Size) -> tuple[bool, bool]:
    """Return whether annotations of this height and width fit an image that is not decoded yet, as a viewer shows it and as it is stored.

    Raises:
        CorruptError: they fit neither.
    """
    shown, stored = sizes_of(image)
    if size not in (shown, stored):
        turn = "" if shown == stored else f" ({stored[1]}×{stored[0]} without its turn in EXIF)"
        raise CorruptError(f"has {shown[1]}×{shown[0]} pixels{turn}, the annotations say {size[1]}×{size[0]}")
    return size == shown, size == stored


def read_rgb(path: ImageFile, size: Size | None = None, exif: str = SHOWN, *, deep: bool = False) -> Image.Image:
    """Decode an image to RGB, turned as EXIF says.

    Args:
        path: the file.
        size: height and width that annotations give it; where only the stored pixels have this size, they are not turned.
        exif: data.exif.
        deep: as in open_image.

    Raises:
        one of UNREADABLE.
    """
    with open_image(path, deep=deep) as image:
        return in_rgb(whole_range(turned(image, shown=size is None or is_shown(fits(image, size), exif)), image))


def whole_range(image: Image.Image, file: Image.Image) -> Image.Image:
    """Return grey pixels of a TIFF of 12 bits in the range of 16 bits, and other images as they are; file: what the image was opened as."""
    if getattr(file, "tag_v2", {}).get(BITS_PER_SAMPLE) != (12,):
        return image
    values = np.asarray(image).astype(np.uint16)
    return Image.fromarray(values << 4 | values >> 8)  # 4095 becomes 65535


def in_rgb(image: Image.Image) -> Image.Image:
    """Decode an image, and convert it if it is not RGB; Pillow would copy RGB, which takes a fifth as long as decoding a JPEG.

    Grey of 16 bits is scaled from 65535 to 255.
    """
    image.load()
    if image.mode in DEEP:
        image = Image.fromarray((np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8))  # 65535 / 255
    return image if image.mode == "RGB" else image.convert("RGB")


def unreadable(name: str | Path, error: BaseException) -> UserError:
    """Return the error for an image that is found to be damaged during the run."""
    said = one_line(f"{name}: {reason(error)}.")
    return UserError(f"{said}\ndata.check=pixels with data.skip_corrupt=true finds such images before the run and leaves them out.")


def _faulty(files: dict[int, Entry], fault: Callable[[Entry], str]) -> dict[int, str]:
    """Return what is wrong with each bad file, by id, as `fault` says."""
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        said: Iterable[str] = pool.map(fault, files.values())
        return {number: each for number, each in zip(files, said, strict=True) if each}


def fault_of(file: tuple[ImageFile, Size | None], check: str, *, deep: bool = False) -> str:
    """Return what is wrong with an image in RGB; empty if nothing, and BOTH if the size fits it as shown and as stored."""
    path, size = file
    both = False

    def look() -> None:
        nonlocal both
        with open_image(path, deep=deep) as opened:
            both = size is not None and all(fits(opened, size)) and turn_of(opened) != 1
            if check == "pixels" or not _ends(path, opened.format):
                opened.load()

    return fault_in(look) or (BOTH if both else "")


def fault_in(look: Callable[[], object]) -> str:
    """Return what is wrong with an image that `look` reads; empty if nothing."""
    try:
        look()
    except UNREADABLE as error:
        return reason(error)
    return ""


def _ends(path: ImageFile, kind: str | None) -> bool:
    """Return whether the file ends as its format does; a truncated file does not, nor does one with data appended."""
    end = ENDS.get(kind or "", b"")
    if isinstance(path, ImageBytes):
        return path.getvalue().endswith(end)
    with open(path, "rb") as file:
        file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
        return file.read() == end


def reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return str(error) if isinstance(error, CorruptError) else f"cannot be read as an image ({error})"


def cached(
    fault: Callable[[Entry], str], images: dict[int, Entry], about: Sequence[Path], check: str, name: Callable[[Entry], str] = repr
) -> dict[int, str]:
    """Cache what `fault` finds wrong among `images`, by id, because opening a hundred thousand files takes a minute at every start.

    With many images, it looks again only at those that were wrong the last time, unless a file or folder of `about`, or which images there
    are, has changed since. A good image that is overwritten in place is not noticed here, but it is named when it is read.

    The cache names the images by their entries, as `name` does: an id may be a position, which another order of a table or fold changes.
    """
    if len(images) < FEW:
        return _faulty(images, fault)
    names = {image_id: name(entry) for image_id, entry in images.items()}
    known = [check, *([str(path.absolute()), path.stat().st_mtime_ns, path.stat().st_size] for path in about), *sorted(names.values())]
    stamp = CACHE / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    wrong: set[str] | None = None
    with contextlib.suppress(OSError, ValueError, TypeError):
        wrong = set(json.loads(read_bytes(stamp, 2**28)))
    if wrong is not None:
        return _faulty({image_id: images[image_id] for image_id, each in names.items() if each in wrong}, fault)
    found = _faulty(images, fault)
    with contextlib.suppress(UserError):  # without a writable folder the next start checks all images again
        write_text(stamp, json.dumps([names[image_id] for image_id in found]))
    return found
