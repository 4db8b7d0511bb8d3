"""YOLO's text files: a line for each box, class and shares of the image; described by a data.yaml, or by names of folders."""

import os
import posixpath
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from lab.base.errors import UserError, first_line
from lab.base.formats import one_form
from lab.base.yaml_limits import are_plain, is_shallow
from lab.detectors.annotations.entries import Entries, Listing, listed, read_small, sizes_and_turns

OUTSIDE = 0.01  # how far a share may lie outside of 0 to 1, by rounding; the box is cut off at the image's edge
CLASSES = ("classes.txt", "obj.names", "labels.txt", "_darknet.labels")
"""Names of files with a class in each line, which label tools write beside labels."""
MOST_CLASSES = 100_000
NOTHING = ("", "null", "~")
"""Values of a data.yaml that stand for none."""
Description = dict[str, Any]


class Texts(yaml.CSafeLoader):
    """Load each value as the text that is written: YAML takes yes, no, on and off for true and false, 007 for 7, and 1:30 for 90."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


class Images(NamedTuple):
    """The images that a data.yaml names for a part: relative to the root, what is wrong with others, and messages for the user."""

    names: list[str]
    faults: list[str]
    notes: list[str]


def read_description(listing: Listing, name: str) -> Description | None:
    """Return the content of a data.yaml; None if a YAML file is something else.

    It is data: no tag makes an object, no reference is followed, and its `download` is never run.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = read_small(listing, name)
        tree = yaml.load(text, Texts) if is_shallow(text) else None
    except (ValueError, OSError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{listing.root / name}: cannot be read: {first_line(error)}") from None
    if tree is None or not are_plain(tree):
        raise UserError(f"{listing.root / name}: holds references, many levels or other values than texts and numbers, and is not read.")
    return tree if isinstance(tree, dict) and "names" in tree and "train" in tree else None


def class_names(description: Description, where: Path) -> list[str]:
    """Return the names of the classes, by number.

    Raises:
        UserError: they are neither a list nor numbered from 0 on, or their number differs from `nc`.
    """
    given = description["names"]
    if isinstance(given, dict):
        numbers = [str(number) for number in range(len(given))]
        if set(given) != set(numbers):
            raise UserError(f"{where}: names: numbers from 0 to {len(given) - 1} are expected, got {list(given)[:10]}.")
        given = [given[number] for number in numbers]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_CLASSES or not all(isinstance(each, str) and each for each in given):
        raise UserError(f"{where}: names: a list of names, or names by number, is expected, got {given!r:.100}.")
    count = value_of(description, "nc")
    if count is not None and str(count) != str(len(given)):
        raise UserError(f"{where}: nc: {count!s:.100} is said, while names has {len(given)}.")
    return distinct([one_form(each) for each in given])


def value_of(description: Description, key: str) -> Any:
    """Return a value of a data.yaml; None if it has none."""
    value = description.get(key)
    return None if isinstance(value, str) and value.lower() in NOTHING else value


def distinct(names: list[str]) -> list[str]:
    """Append its number to a name that is given twice."""
    times = Counter(names)
    return [f"{name} ({number})" if times[name] > 1 else name for number, name in enumerate(names)]


def described_images(description: Description, part: str, file: str, listing: Listing) -> Images | None:
    """Return the images that a data.yaml names for a part; None if it names none.

    A path is looked for in the description's `path`, where that is inside of the root, beside the description, and in the root, without a
    `../` at its start: Roboflow writes one too many. Of an absolute one, also of Windows, the end is looked for.

    Args:
        description: its content.
        part: "train", "val" or "test".
        file: the description's name, relative to the root.
        listing: the files below the root.

    Raises:
        UserError: a path is neither a folder nor a list of files below the root, or a list names no image there.
    """
    given = value_of(description, part) or (value_of(description, "valid") if part == "val" else None)
    if not given:
        return None
    found = Images([], [], [])
    for each in given if isinstance(given, list) else [given]:
        if not isinstance(each, str):
            raise UserError(f"{listing.root / file}: {part}: a folder or a list of files is expected, got {each!s:.100}.")
        _add_images(found, each, description, part, file, listing)
    names = list(dict.fromkeys(found.names))
    if twice := len(found.names) - len(names):
        found.notes.append(f"{listing.root / file}: {part}: {twice} images are named twice, and taken once")
    return found._replace(names=names)


def _add_images(found: Images, path: str, description: Description, part: str, file: str, listing: Listing) -> None:
    base, path = (each.replace("\\", "/") for each in (str(value_of(description, "path") or ""), path))
    shorter = path
    while shorter.startswith(("../", "./")):
        shorter = shorter.partition("/")[2]
    folders, texts = listing.folders(), set(listing.with_ending(".txt"))
    for way in dict.fromkeys((posixpath.join(base, path), path, shorter)):
        for name in listing.places_of(way, posixpath.dirname(file), ""):
            if name == "." or name in folders:
                found.names.extend(listing.below(name))
                return
            if name in texts:
                _add_listed(found, name, listing)
                return
    raise UserError(
        f"{listing.root / file}: {part}: {path}: no such folder or list of files below {listing.root}; other places are not read. "
        "data.root= names the folder that holds all of it."
    )


def _add_listed(found: Images, name: str, listing: Listing) -> None:
    """Add the images that a text file lists, each relative to that file or to the root; of absolute paths the ends count."""
    try:
        lines = read_small(listing, name).splitlines()
    except (ValueError, OSError) as error:
        raise UserError(f"{listing.root / name}: cannot be read: {error}.") from None
    known, there, wrong = set(listing.images), len(found.names), []
    for number, line in enumerate(lines, 1):
        if path := line.strip():
            image = next((each for each in listing.places_of(path, posixpath.dirname(name), "") if each in known), None)
            if image is None:
                wrong.append(f"{listing.root / name}, line {number}: {path!r:.200} is not an image below {listing.root}")
            else:
                found.names.append(image)
    if wrong and len(found.names) == there:
        raise UserError(f"{wrong[0]}. It lists no image that is there.")
    found.faults.extend(wrong)


def label_file(image: str) -> str:
    """Return the file of an image's boxes: in labels/ where the image is in images/, else beside it."""
    stem = "/" + os.path.splitext(image)[0]
    above, found, below = stem.rpartition("/images/")
    return f"{above}/labels/{below}.txt"[1:] if found else f"{stem}.txt"[1:]


def unpaired(listing: Listing) -> str:
    """Return a message that names the files of boxes without an image beside the images without a file of boxes; "" if there are none."""
    there = set(listing.with_ending(".txt"))
    label_of = {image: listing.names.spelled(label_file(image)) for image in listing.images}
    paired, folders = set(label_of.values()), {posixpath.dirname(label) for label in label_of.values()}
    alone = [name for name in sorted(there - paired) if posixpath.dirname(name) in folders or "labels" in name.split("/")[:-1]]
    alone = [name for name in alone if is_label(listing, name, empty=False)]
    if not alone:
        return ""
    bare = [image for image, label in label_of.items() if label not in there]
    stems = {posixpath.splitext(posixpath.basename(name))[0] for name in alone}
    other = [name for name in listing.others if name not in there and posixpath.splitext(posixpath.basename(name))[0] in stems]
    return listed(
        ("files of boxes have no picture", alone),
        ("pictures have no file of boxes", bare),
        ("files of the same names are not read as pictures", other),
    )


def read_yolo(path: Path, classes: list[str], images: Images, listing: Listing, exif: str, keypoints: bool) -> Entries:
    """Read the boxes of these images.

    A line is `class x y width height`, `class x1 y1 x2 y2 x3 y3 …` of a polygon or of an oriented box (its box is the one around it), or
    with `keypoints` a box with more numbers after it. All are shares of the image.

    Args:
        path: what names the part in messages.
        classes: the names, by number.
        images: the images.
        listing: the files below the root.
        exif: data.exif.
        keypoints: whether lines hold keypoints after the box.

    Raises:
        UserError: none of the images has a file of boxes.
    """
    found, there = Entries(path, classes), set(listing.others)
    found.notes += images.notes
    for fault in images.faults:
        found.faults.add(fault)
    names = images.names
    labels = [listing.names.spelled(label_file(image)) for image in names]
    if names and not there.intersection(labels):
        raise UserError(f"{path}: none of its {len(names)} images has a file of boxes; the first would be {listing.root / labels[0]}.")
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        texts = list(pool.map(lambda name: _text(listing, name) if name in there else None, labels))
    bare = 0
    for image, label, text, looked in zip(names, labels, texts, sizes_and_turns(listing, names, exif), strict=True):
        number = found.image(image, looked[0] if looked else None)
        bare += text is None
        if isinstance(text, Exception):
            found.faults.add(f"{label}: {text}")
        elif text is not None and looked is not None:
            found.turned += [number] if looked[1] else []
            _read_lines(found, number, label, text, looked[0], keypoints)
    paired = [label for label in labels if label in there]
    if shared := len(paired) - len(set(paired)):
        found.notes.append(f"{path}: {shared} images share their file of boxes with an image of another ending")
    if bare:
        found.notes.append(f"{path}: {bare} of {len(names)} images have no file of boxes, and count as images without boxes")
    return found


def _text(listing: Listing, name: str) -> str | Exception:
    try:
        return read_small(listing, name)
    except (ValueError, OSError) as error:
        return error


def _read_lines(found: Entries, image: int, label: str, text: str, size: tuple[int, int], keypoints: bool) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if not (cells := line.split()):
            continue
        where = f"{label}, line {number}"
        try:
            category, bbox, polygon = _box(cells, len(found.classes), keypoints)
        except ValueError as error:
            found.faults.add(f"{where}: {error}")
            continue
        x, y, width, height = bbox
        scaled = [share * size[1 - place % 2] for place, share in enumerate(polygon)]
        found.box(image, category, [x * size[1], y * size[0], width * size[1], height * size[0]], where, polygon=scaled)


def _box(cells: list[str], classes: int, keypoints: bool) -> tuple[int, list[float], list[float]]:
    """Return class, box [x, y, width, height] and polygon [x, y, x, y, ...] of a line, in shares of the image; a box has no polygon."""
    try:
        category, *numbers = (float(cell) for cell in cells)
    except ValueError:
        raise ValueError(f"{' '.join(cells):.100} has something else than numbers") from None
    if not category.is_integer() or not 0 <= category < classes:
        raise ValueError(f"class {cells[0]:.20} is not among the {classes} classes, 0 to {classes - 1}")
    box = len(numbers) == 4 or (keypoints and len(numbers) > 4)
    if not box and (len(numbers) < 6 or len(numbers) % 2):
        raise ValueError(f"has {len(cells)} numbers; class, x, y, width, height, or a class and the corners of a polygon are expected")
    numbers = numbers[:4] if box else numbers
    if not all(isfinite(each) and -OUTSIDE <= each <= 1 + OUTSIDE for each in numbers):
        raise ValueError(f"{' '.join(cells[1:]):.100} are not shares of the image, from 0 to 1")
    if box:
        x, y, width, height = numbers
        return int(category), [x - width / 2, y - height / 2, width, height], []
    across, down = numbers[::2], numbers[1::2]
    return int(category), [min(across), min(down), max(across) - min(across), max(down) - min(down)], numbers


def listed_classes(listing: Listing) -> tuple[str, list[str]] | None:
    """Return the file that names the classes where no data.yaml does, and the names; None if there is none."""
    for name in CLASSES:
        for each in (each for each in listing.others if posixpath.basename(each) == name):
            try:
                lines = [one_form(line.strip()) for line in read_small(listing, each).splitlines() if line.strip()]
            except (ValueError, OSError) as error:
                raise UserError(f"{listing.root / each}: the names of the classes cannot be read: {error}.") from None
            if 0 < len(lines) <= MOST_CLASSES:
                return each, distinct(lines)
    return None


def looks_like_labels(listing: Listing) -> list[str]:
    """Return the images that have a text file at the place of YOLO's labels."""
    there = set(listing.with_ending(".txt"))
    return [image for image in listing.images if listing.names.spelled(label_file(image)) in there]


def is_label(listing: Listing, name: str, *, empty: bool) -> bool:
    """Return whether a text file's first line is numbers alone, as YOLO's are; `empty`: whether a file without lines is one, too."""
    try:
        lines = [line for line in read_small(listing, name).splitlines() if line.strip()]
        return empty if not lines else len([float(cell) for cell in lines[0].split()]) >= 5
    except (ValueError, OSError):
        return False
