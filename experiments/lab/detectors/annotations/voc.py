"""Pascal VOC's XML files: one for each image, with boxes in pixels counted from 1."""

import posixpath
import re
from math import cos, isfinite, sin
from pathlib import Path
from xml.etree import ElementTree

from lab.base.formats import one_form
from lab.data.images.exif import Size
from lab.detectors.annotations.entries import Entries, Listing, read_small

IMAGES = ("JPEGImages", "images", "Images", "img", "imgs")
"""Names of folders of images beside the folder of their XML files."""


def read_xml(listing: Listing, name: str) -> ElementTree.Element:
    """Parse an XML file that declares no entities, which could stand for billions of characters or for other files.

    Raises:
        ValueError: it is not such a file; OSError: it cannot be read.
    """
    text = read_small(listing, name)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("declares a document type, which is not read")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"is not XML: {error}") from None


def annotations_of(listing: Listing) -> tuple[list[str], list[str]]:
    """Return the XML files that are of VOC, and the names of their classes, sorted.

    A file that cannot be parsed counts, so that its fault is named when it is read.
    """
    files, names = [], set()
    for file in listing.with_ending(".xml"):
        try:
            root = read_xml(listing, file)
        except (ValueError, OSError):
            files.append(file)
            continue
        if root.tag == "annotation":
            files.append(file)
            names |= {_text(each, "name") for each in root.iter("object")}
    return files, sorted(names - {""})


def read_voc(path: Path, classes: list[str], files: list[str], listing: Listing) -> Entries:
    """Read the boxes of these XML files.

    A box is `bndbox`, whose pixels count from 1, or `robndbox`, a turned one, around which the box is taken. A `difficult` object is
    neither learned nor missed, as a crowd of COCO's.

    Args:
        path: what names the part in messages.
        classes: the names, by label.
        files: the XML files, relative to the root.
        listing: the files below the root.
    """
    found, labels = Entries(path, classes), {name: label for label, name in enumerate(classes)}
    there, known = {one_form(posixpath.splitext(image)[0]): image for image in reversed(listing.images)}, set(listing.images)
    stems, lacking = {posixpath.basename(each) for each in there}, False
    owner: dict[str, str] = {}
    for file in sorted(files, key=lambda file: _own_name(file) not in stems):  # what has its own image's name takes it first
        try:
            root = read_xml(listing, file)
            size = _size(root)
        except (ValueError, OSError) as error:
            found.faults.add(f"{file}: {error}")
            continue
        image = _image_of(file, root, there, known, listing)
        if image is None:
            found.faults.add(f"{file}: its image {_text(root, 'filename')!r:.200} is not below {listing.root}")
            lacking = True
            continue
        if (other := owner.setdefault(image, file)) != file:
            found.faults.add(f"{file}: its image {image} is that of {other}, too; one file of boxes for an image is expected")
            continue
        number = found.image(image, size)
        lines = _lines(read_small(listing, file), len(root.findall(".//object")))
        for line, each in zip(lines, root.iter("object"), strict=True):
            where = f"{file}, {line}"
            try:
                label, bbox = labels.get(_text(each, "name")), _box(each)
            except ValueError as error:
                found.faults.add(f"{where}: {error}")
                continue
            if label is None:
                found.faults.add(f"{where}: an object without a name")
                continue
            found.box(number, label, bbox, where, crowd=_text(each, "difficult") == "1")
    found.faults.hint = listing.unnamed(owner) if lacking else ""
    return found


def _own_name(file: str) -> str:
    return one_form(posixpath.splitext(posixpath.basename(file))[0])


def _text(element: ElementTree.Element, name: str) -> str:
    return one_form((element.findtext(name) or "").strip())


def _size(root: ElementTree.Element) -> Size | None:
    """Return height and width; None where they are missing or 0, as some tools write them."""
    try:
        height, width = (int(float(_text(root, f"size/{name}") or 0)) for name in ("height", "width"))
    except (ValueError, OverflowError):
        raise ValueError("size: height and width in pixels are expected") from None
    return (height, width) if height > 0 and width > 0 else None


def _image_of(file: str, root: ElementTree.Element, there: dict[str, str], known: set[str], listing: Listing) -> str | None:
    """Return the image of an XML file: of its own name, else of its `filename`, in a folder beside or in the same one.

    Its own name comes first, because tools that copy or rename files leave an old `filename` in them.
    """
    folder = posixpath.dirname(file)
    above, _, below = f"/{folder}/".lower().rpartition("/annotations/")
    start, end = (folder[: max(len(above) - 1, 0)], folder[len(folder) - len(below.rstrip("/")) :] if below.strip("/") else "")
    folders = [
        folder,
        *(posixpath.normpath(posixpath.join(base, name, end)) for base in (start, posixpath.dirname(folder)) for name in (*IMAGES, ".")),
    ]
    given = posixpath.basename(_text(root, "filename").replace("\\", "/"))
    stem, ending = posixpath.splitext(given)
    for name in filter(None, (_own_name(file), stem, given)):
        for each in folders:
            path = posixpath.normpath(posixpath.join(each, name))
            if (image := listing.names.spelled(path + ending)) in known or (image := there.get(one_form(path), "")):
                return image
    return None


def _lines(text: str, count: int) -> list[str]:
    """Return the line of each object; its number where a comment makes the lines unsure."""
    found = [text.count("\n", 0, each.start()) + 1 for each in re.finditer(r"<object[\s>/]", text)]
    return [f"line {line}" for line in found] if len(found) == count else [f"object {number + 1}" for number in range(count)]


def _box(element: ElementTree.Element) -> list[float]:
    if (turned := element.find("robndbox")) is not None:
        x, y, width, height, angle = _numbers(turned, ("cx", "cy", "w", "h", "angle"))
        across, down = (abs(width * cos(angle)) + abs(height * sin(angle))), (abs(width * sin(angle)) + abs(height * cos(angle)))
        return [x - across / 2, y - down / 2, across, down]
    if (box := element.find("bndbox")) is None:
        raise ValueError("an object without bndbox")
    left, top, right, bottom = _numbers(box, ("xmin", "ymin", "xmax", "ymax"))
    left, top = max(left - 1, 0.0), max(top - 1, 0.0)
    return [left, top, right - left, bottom - top]


def _numbers(element: ElementTree.Element, names: tuple[str, ...]) -> list[float]:
    try:
        found = [float(_text(element, name)) for name in names]
    except ValueError:
        found = []
    if not found or not all(isfinite(each) for each in found):
        raise ValueError(f"{element.tag}: {', '.join(names)} are expected as finite numbers")
    return found
