"""Image files: opened in one way, and looked at before a run starts, so that every fault is named at once."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageOps

from lab.config.errors import UserError
from lab.config.settings import ROOT

FEW = 5000  # images that are looked at within seconds
CACHE = ROOT / "data" / "checked"
Entry = TypeVar("Entry")
SHOWN = 10
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}
Size = tuple[int, int]  # height, width
Files = dict[int, tuple[str, Size | None]]  # by id: the file, and the size that it must have


class CorruptError(Exception):
    """An entry that cannot be used, and why."""


# PIL says SyntaxError of a damaged PNG
UNREADABLE = (CorruptError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


@dataclass
class Faults:
    """The faults of a data set, an entry a line."""

    path: Path
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(f"{line}.")

    def raise_or_report(self, skip: bool) -> None:
        if self.lines and skip:
            print(f"{self.path}: {len(self.lines)} corrupt entries are left out (data.skip_corrupt=true); the first: {self.lines[0]}")
        elif self.lines:
            more = f"\n... and {len(self.lines) - SHOWN} more" if len(self.lines) > SHOWN else ""
            shown = "\n".join(self.lines[:SHOWN])
            raise UserError(f"{self.path}: {len(self.lines)} corrupt entries; data.skip_corrupt=true leaves them out.\n{shown}{more}")


def hidden(path: Path, folder: Path) -> bool:
    """Tell whether a file, or a folder between `folder` and it, is hidden, as the files that macOS writes beside others (._x.jpg) are."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def open_image(path: str | Path, size: Size | None = None) -> Image.Image:
    """Open an image without decoding its pixels yet.

    Args:
        path: the file.
        size: height and width that it must have; an EXIF orientation is followed only where it leads to them.

    Raises:
        one of UNREADABLE.
    """
    image: Image.Image = Image.open(path)
    if size and (image.height, image.width) != size:
        image = ImageOps.exif_transpose(image)
    if size and (image.height, image.width) != size:
        raise CorruptError(f"has {image.width}×{image.height} pixels, the annotations say {size[1]}×{size[0]}")
    if image.mode in ("F", "I") or image.mode.startswith("I;"):
        raise CorruptError(f"has pixels of mode {image.mode}; 8 bits a channel are expected")
    return image


def read_rgb(path: str | Path) -> Image.Image:
    """Decode an image to RGB, turned as people see it.

    Raises:
        one of UNREADABLE.
    """
    with open_image(path) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")


def unreadable(name: str | Path, error: BaseException) -> UserError:
    """Make the error for an image that turns out to be damaged while the run goes on."""
    return UserError(
        f"{name}: {reason(error)}.\ndata.check=pixels with data.skip_corrupt=true finds such images before the run and leaves them out."
    )


def find_corrupt(files: Files, about: Sequence[Path], check: str) -> dict[int, str]:
    """Say what is wrong with each file, by id; what was found in many files is kept until one of the paths in `about` changes.

    check: "off", "headers" (each image is opened, and decoded where its end is missing) or "pixels" (each image is decoded).
    """
    return {} if check == "off" else cached(partial(_look, check=check), files, about, check)


def _look(files: Files, check: str) -> dict[int, str]:
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        said: Iterable[str] = pool.map(partial(_fault, check=check), files.values())
        return {number: each for number, each in zip(files, said, strict=True) if each}


def _fault(file: tuple[str, Size | None], check: str) -> str:
    try:
        with open_image(*file) as opened:
            if check == "pixels" or not _ends(file[0], opened.format):
                opened.load()
    except UNREADABLE as error:
        return reason(error)
    return ""


def _ends(path: str, kind: str | None) -> bool:
    """Tell whether the file ends as its format does; a truncated file does not, nor one that something was added to."""
    end = ENDS.get(kind or "", b"")
    with open(path, "rb") as file:
        file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
        return file.read() == end


def reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CorruptError) else f"cannot be read as an image ({error})"


def cached(
    look: Callable[[dict[int, Entry]], dict[int, str]], images: dict[int, Entry], about: Sequence[Path], check: str
) -> dict[int, str]:
    """Keep what `look` finds wrong among `images`, by id, because opening a hundred thousand files takes a minute at every start.

    Of many images it looks anew only at those that were wrong the last time, unless a file or folder of `about` has changed since.
    An image that was good and is written over in its place is not noticed here, but named when it is read.
    """
    if len(images) < FEW:
        return look(images)
    known = [check, *([str(path.absolute()), path.stat().st_mtime_ns, path.stat().st_size] for path in about)]
    stamp = CACHE / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    wrong: list[int] | None = None
    with contextlib.suppress(OSError, ValueError):
        wrong = json.loads(stamp.read_bytes())
    if wrong is not None:
        return look({image_id: images[image_id] for image_id in wrong if image_id in images})
    found = look(images)
    with contextlib.suppress(OSError):  # a folder that cannot be written to costs the next start its time
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = stamp.with_name(f".{stamp.name}.{os.getpid()}")
        draft.write_text(json.dumps(list(found)))
        draft.replace(stamp)
    return found
