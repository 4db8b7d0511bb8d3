"""Tables with a box in each row, as Kaggle, TensorFlow and Roboflow write them."""

import csv
import json
import posixpath
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from lab.base.files import refuse_special
from lab.base.formats import one_form
from lab.data.cells import first_row, read_cells, rows_of
from lab.data.images.exif import Size
from lab.data.images.files import spelling
from lab.detectors.annotations.entries import STEPS, Entries, Listing, sizes_and_turns
from lab.detectors.annotations.yolo import OUTSIDE

IMAGE = ("filename", "file_name", "image_id", "imageid", "image", "image_path", "image_name", "path", "img", "id")
CLASS = ("class", "label", "class_name", "category", "name", "labelname")
CORNERS = (("xmin", "ymin", "xmax", "ymax"), ("x_min", "y_min", "x_max", "y_max"), ("x1", "y1", "x2", "y2"))
SIDES = (("x", "y", "w", "h"), ("bbox_x", "bbox_y", "bbox_width", "bbox_height"))
ONE = "object"
"""The class of a table without a column of classes."""


def columns_of(names: Sequence[str]) -> dict[str, Any] | None:
    """Return the columns of image, class, box and size, by their usual names in any case; None if no box is there."""
    known = {name.lower(): name for name in reversed(names)}
    image, label = (next((known[name] for name in each if name in known), None) for each in (IMAGE, CLASS))
    box: list[str] | None = next(
        ([known[name] for name in each] for each in (*CORNERS, *SIDES) if all(name in known for name in each)), None
    )
    corners = box is not None and box[2].lower() in ("xmax", "x_max", "x2")
    if box is None and "bbox" in known:
        box = [known["bbox"]]
    if image is None or box is None:
        return None
    size = [known[name] for name in ("height", "width")] if "height" in known and "width" in known else None
    return {"image": image, "class": label, "box": box, "corners": corners, "size": size}


def tables_of(listing: Listing) -> list[str]:
    """Return the CSV files whose first line names the columns of boxes."""
    return [name for name in listing.with_ending(".csv") if not listing.names.leaves(name) and columns_of(_first_line(listing.root / name))]


def _first_line(file: Path) -> list[str]:
    try:
        refuse_special(file)
        return [cell.strip() for cell in first_row(file, "replace")[0]]  # what is not UTF-8 is named when it is read
    except (OSError, ValueError, csv.Error):
        return []


def classes_in(names: list[str], listing: Listing) -> list[str]:
    """Return the classes of these tables, sorted; `object` where they have no column of classes."""
    found: set[str] = set()
    for name in names:
        table = read_cells(listing.root / name, "data.root")
        column = (columns_of(list(table.columns)) or {})["class"]
        found |= {ONE} if column is None else {one_form(str(each).strip()) for each in table[column] if each is not None}
    return sorted(found - {""})


def read_rows(path: Path, classes: list[str], name: str, listing: Listing, exif: str) -> Entries:
    """Read a table of boxes in pixels, or in shares of the image if no number exceeds 1. A row with an empty box is an image without boxes.

    Args:
        path: what names the part in messages.
        classes: the names, by label.
        name: the table, relative to the root.
        listing: the files below the root.
        exif: data.exif.
    """
    table = read_cells(listing.root / name, "data.root")
    columns = columns_of(list(table.columns))
    assert columns is not None
    found, labels, where_of = Entries(path, classes), {each: label for label, each in enumerate(classes)}, rows_of(Path(name))
    places, numbers = _places(listing), dict[str, int]()
    found_for: dict[str, str | None] = {}
    for row, cells in enumerate(table.to_dict("records")):
        where = where_of(row)
        given = str(cells[columns["image"]] or "").strip()
        if given not in found_for:
            try:
                found_for[given] = _image_of(given, name, places, listing)
            except ValueError as error:
                found_for[given] = None
                found.faults.add(f"{where}: the image {given!r:.200} {error}")
        if (image := found_for[given]) is None:
            continue
        if image not in numbers:
            numbers[image] = found.image(image, _size(cells, columns["size"]))
        number = numbers[image]
        try:
            bbox = _box(cells, columns)
        except ValueError as error:
            found.faults.add(f"{where}: {error}")
            continue
        if bbox is None:
            continue
        label = ONE if columns["class"] is None else one_form(str(cells[columns["class"]] or "").strip())
        if label not in labels:
            found.faults.add(f"{where}, column {columns['class']}: is empty; a class is expected")
            continue
        found.box(number, labels[label], bbox, where)
    found.faults.hint = listing.unnamed(numbers) if None in found_for.values() else ""
    if found.boxes and all(_is_share(box["bbox"]) for box in found.boxes):
        _to_pixels(found, listing, exif)
    return found


def _is_share(bbox: list[float]) -> bool:
    x, y, width, height = bbox
    return min(x, y) >= -OUTSIDE and max(x + width, y + height) <= 1 + OUTSIDE


def _to_pixels(found: Entries, listing: Listing, exif: str) -> None:
    """Turn boxes in shares of their images into pixels; those of an image that cannot be opened, which the checks name, are left out."""
    looked = sizes_and_turns(listing, [image["file_name"] for image in found.images], exif)
    for image, seen in zip(found.images, looked, strict=True):
        if seen:
            (image["height"], image["width"]), turned = seen
            found.turned += [image["id"]] if turned else []
    kept = [(box, where) for box, where in zip(found.boxes, found.where, strict=True) if looked[box["image_id"] - 1]]
    found.boxes, found.where = [box for box, _ in kept], [where for _, where in kept]
    for box in found.boxes:
        image, (x, y, width, height) = found.images[box["image_id"] - 1], box["bbox"]
        box["bbox"] = [x * image["width"], y * image["height"], width * image["width"], height * image["height"]]
    found.notes.append(f"{found.path}: no number of its boxes exceeds 1, so they are taken as shares of the image")


def _places(listing: Listing) -> dict[str, list[str]]:
    """Return the images by the spelling of their names, with and without ending."""
    found: dict[str, list[str]] = defaultdict(list)
    for image in listing.images:
        name = spelling(posixpath.basename(image))
        for each in {name, posixpath.splitext(name)[0]}:
            found[each].append(image)
    return found


def _image_of(given: str, table: str, places: dict[str, list[str]], listing: Listing) -> str:
    """Return the image whose path ends as a cell's does, with or without ending.

    Of several it is the one beside the table, or else the one of that very name.

    Raises:
        ValueError: there is none, or several may be meant.
    """
    steps = spelling(posixpath.normpath(given.replace("\\", "/"))).split("/")[-STEPS:]
    named = [(each, f"/{spelling(each)}") for each in places.get(steps[-1], [])]
    if not named:
        raise ValueError(f"is not below {listing.root}")
    ends = ("/" + "/".join(steps[number:]) for number in range(len(steps)))
    near = ([each for each, path in named if path.endswith(end) or posixpath.splitext(path)[0].endswith(end)] for end in ends)
    found = next(filter(None, near))
    beside = [each for each in found if posixpath.dirname(each) == posixpath.dirname(table)]
    found = beside if len(beside) == 1 else found
    same = [each for each in found if posixpath.basename(each) == posixpath.basename(given)]
    found = same if len(same) == 1 else found
    if len(found) > 1:
        raise ValueError(f"may be {found[0]} or {found[1]}")
    return found[0]


def _size(cells: dict[str, Any], columns: list[str] | None) -> Size | None:
    try:
        height, width = (int(float(cells[name])) for name in columns or [])
    except (ValueError, TypeError, OverflowError):
        return None
    return (height, width) if height > 0 and width > 0 else None


def _box(cells: dict[str, Any], columns: dict[str, Any]) -> list[float] | None:
    """Return the box [x, y, width, height] of a row; None if its cells are empty."""
    given = [cells[name] for name in columns["box"]]
    if all(each is None or not str(each).strip() for each in given):
        return None
    try:
        values = json.loads(str(given[0])) if len(given) == 1 else given
        box = [float(each) for each in values]
    except (ValueError, TypeError, RecursionError):
        box = []
    if len(box) != 4 or not all(isfinite(each) for each in box):
        raise ValueError(f"column {', '.join(columns['box'])}: {', '.join(str(each) for each in given):.100}; four numbers are expected")
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]] if columns["corners"] else box
