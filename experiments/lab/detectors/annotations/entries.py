"""Images and boxes of one part of a data set, as readers of all formats give them to the checks of COCO files."""

import codecs
import os
import posixpath
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import UnfitFileError, read_bytes
from lab.base.formats import one_form
from lab.data.images.exif import STORED, Size, sizes_of, turn_of
from lab.data.images.files import SUFFIXES, UNREADABLE, Faults, Names, open_any_mode
from lab.data.listing import ignored

LARGEST = 2**24  # bytes of one image's file of boxes, or of a description of a data set
MOST_FILES = 20_000_000
ABSOLUTE = re.compile(r"/|[A-Za-z]:/")
STEPS = 50  # of another machine's path whose ends are looked for
LONGEST = 4096  # characters of a path
SHOWN = 5  # names of a kind in a message
XML_ENCODING = re.compile(rb"""^<\?xml[^>]*\sencoding\s*=\s*["']([\w.:-]+)["']""")
TEXTS = re.compile(r"utf-(8|16|32)|ascii|iso8859|cp\d|gb|big5|euc|shift|koi8|hz$|johab|mac|tis", re.ASCII)
"""Python's names of the encodings of texts; decoding others, such as Punycode, may take time without end."""


@dataclass
class Entries:
    """What a part holds, in COCO's words, with the place that each box is written at.

    Attributes:
        path: the file or folder that names the part in messages.
        classes: the names, by label.
        images: file_name (relative to the data's root), height and width of each image.
        boxes: image (position), category_id (the label), bbox [x, y, width, height] in pixels and iscrowd of each box; segmentation, if it
            is a polygon.
        where: file and line of each box.
        faults: what cannot be read.
        turned: ids of images that EXIF turns, whose boxes are shares of the image.
        notes: messages for the user.
    """

    path: Path
    classes: list[str]
    images: list[dict[str, Any]] = field(default_factory=list)
    boxes: list[dict[str, Any]] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    faults: Faults = field(init=False)
    turned: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.faults = Faults(self.path)

    def image(self, name: str, size: Size | None) -> int:
        """Add an image; return its id, from 1."""
        height, width = size or (None, None)
        self.images.append({"id": len(self.images) + 1, "file_name": name, "height": height, "width": width})
        return len(self.images)

    def box(
        self, image: int, label: int, bbox: list[float], where: str, *, crowd: bool = False, polygon: list[float] | None = None
    ) -> None:
        entry = {"image_id": image, "category_id": label, "bbox": bbox, "iscrowd": int(crowd)}
        self.boxes.append(entry | ({"segmentation": [polygon]} if polygon else {}))
        self.where.append(where)

    def tree(self) -> dict[str, Any]:
        """Return the content of a COCO file."""
        categories = [{"id": label, "name": name} for label, name in enumerate(self.classes)]
        return {"images": self.images, "annotations": self.boxes, "categories": categories}


@dataclass
class Listing:
    """The files below a folder: names relative to it, with slashes, sorted; what is hidden or a system's own is left out.

    Attributes:
        root: the folder.
        images, others: the files, by their endings.
        names: finds files by names that others wrote.
    """

    root: Path
    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.names = Names(self.root)

    def places_of(self, path: str, *folders: str) -> Iterator[str]:
        """Yield the names below the root that a path in a file may stand for, as the root spells them.

        Args:
            path: relative, or absolute on this or another machine, also of Windows; of an absolute one the ends count, the longest first.
            folders: what a relative path may begin in, relative to the root; "" for the root.
        """
        if len(path) > LONGEST:
            return
        ends = [path := path.replace("\\", "/")]
        if ABSOLUTE.match(path):
            steps = path.strip("/").split("/")[-STEPS:]
            ends = [os.path.relpath(path, self.root), *("/".join(steps[number:]) for number in range(len(steps)))]
        for end in ends:
            for folder in folders:
                yield self.names.spelled(posixpath.normpath(posixpath.join(folder, end)))

    def below(self, folder: str) -> list[str]:
        """Return the images in a folder and in those below it; "" for all."""
        start = f"{folder}/" if folder not in ("", ".") else ""
        return [name for name in self.images if name.startswith(start)]

    def unnamed(self, named: Collection[str]) -> str:
        """Return a message about the pictures beside those that labels name, which no label names; "" if there are none."""
        folders = {posixpath.dirname(name) for name in named}
        found = [image for image in self.images if image not in named and (posixpath.dirname(image) in folders or not folders)]
        return listed(("pictures there are named by no label", found))

    def with_ending(self, *endings: str) -> list[str]:
        return [name for name in self.others if name.lower().endswith(endings)]

    def folders(self) -> set[str]:
        """Return the folders that hold files, with those above them."""
        found: set[str] = set()
        for name in (*self.images, *self.others):
            while (name := os.path.dirname(name)) and name not in found:
                found.add(name)
        return found


def listed(*kinds: tuple[str, list[str]]) -> str:
    """Return how many names there are of each kind, with the first of them; kinds without a name are left out."""
    return "; ".join(f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', …' * (len(names) > SHOWN)}" for kind, names in kinds if names)


def list_files(root: Path) -> Listing:
    """List the files below a folder, without following links to folders.

    Raises:
        UserError: a folder cannot be read, or there are very many files.
    """
    found = Listing(root)

    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}.")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not ignored(name)]
        relative = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in files:
            if not ignored(name):
                (found.images if name.lower().endswith(SUFFIXES) else found.others).append(
                    name if relative == "." else f"{relative}/{name}"
                )
        if len(found.images) + len(found.others) > MOST_FILES:
            raise UserError(f"data.root={root}: holds more than {MOST_FILES:,} files; the folder of the data is expected.")
    found.images.sort(key=one_form)
    found.others.sort(key=one_form)
    return found


def read_small(listing: Listing, name: str) -> str:
    """Return the text of a file of a listing, in UTF-8 with or without a mark at its start; of XML, in the encoding that it declares.

    Raises:
        ValueError: it leads out of the folder, is not a regular file, is too large, or is not text; OSError: it cannot be read.
    """
    if listing.names.leaves(name):
        raise ValueError(f"leads out of {listing.root}")
    try:
        content = read_bytes(listing.root / name, LARGEST)
    except UnfitFileError as error:
        raise ValueError(str(error).partition(": ")[2].rstrip(".")) from None
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    declared = XML_ENCODING.match(content)
    encoding = "utf-16" if wide else declared[1].decode() if declared else "utf-8"
    try:
        known = codecs.lookup(encoding).name
        if not TEXTS.match(known):
            raise LookupError
        return content.decode({"utf-8": "utf-8-sig", "gb2312": "gb18030", "gbk": "gb18030"}.get(known, known))
    except LookupError:
        raise ValueError(f"declares the encoding {encoding:.50}, which is not read; save it as UTF-8") from None
    except UnicodeDecodeError as error:
        declare = ", or declare its encoding in its first line: <?xml version='1.0' encoding='gbk'?>" * name.lower().endswith(".xml")
        said = f"is not text in {encoding} (byte {error.start + 1} is 0x{content[error.start]:02x})"
        raise ValueError(f"{said}; save it as UTF-8{declare}") from None


def sizes_and_turns(listing: Listing, names: list[str], exif: str) -> list[tuple[Size, bool] | None]:
    """Return height and width of each image, and whether EXIF turns it; None for one that cannot be opened.

    Args:
        listing: the files of the data's folder; an image that leads out of it is not opened.
        names: the images.
        exif: data.exif: the size of the picture as shown, or as stored.
    """

    def look(name: str) -> tuple[Size, bool] | None:
        try:
            with open_any_mode(listing.root / name) as image:
                return sizes_of(image)[exif == STORED], turn_of(image) != 1
        except UNREADABLE:
            return None

    inside = [not listing.names.leaves(name) for name in names]
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        return list(pool.map(lambda name, keep: look(name) if keep else None, names, inside))
