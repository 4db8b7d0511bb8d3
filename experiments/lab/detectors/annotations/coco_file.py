"""COCO annotation files: read once; every fault is named with its id.

The indexes of pycocotools and faster-coco-eval take a file as it is: a fault in it would end the run later, without the entry's id.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import hypot
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from lab.base.errors import UserError
from lab.base.files import UnfitFileError, read_bytes
from lab.base.formats import one_form, visible
from lab.data.images.exif import SHOWN, note, sizes_of, take_both
from lab.data.images.files import (
    UNREADABLE,
    CorruptError,
    Faults,
    Files,
    Names,
    cached,
    fault_in,
    fault_of,
    most_bytes,
    open_any_mode,
    read_rgb,
    reason,
    refuse_pixels,
    unreadable,
)
from lab.data.rle import areas_of, checked_polygon, rle_of

Images = dict[int, tuple[str, tuple[int, int]]]  # by id: file, and height and width
Row = tuple[list[float], int, bool, float, Any]  # xywh, label, crowd, area, mask or corners if they are wanted
NARROWEST = 1e-3  # pixels of an oriented box's shorter side; less is an error of rounding
WHOLE = re.compile(r"-?[0-9]{1,19}")
VISIBLE = 0.5  # smallest share of a box inside the image; less is taken as a mistake, such as corners given as width and height


@dataclass
class CocoFile:
    """Images and their boxes; image i has the boxes from offsets[i] to offsets[i + 1]."""

    path: Path
    classes: list[str]
    category_ids: list[int]
    files: list[str]
    image_ids: list[int]
    sizes: list[tuple[int, int]]  # height, width
    offsets: list[int]  # (N + 1)
    boxes: Tensor  # (M, 4) float64, xywh in pixels of the file, inside the image
    labels: Tensor  # (M,) indices of `classes`
    crowd: Tensor  # (M,) bool
    areas: Tensor  # (M,) float64, as the file gives them
    folder: Path  # that the images' names are relative to
    exif: str = SHOWN  # data.exif
    notes: list[str] = field(default_factory=list)  # messages for the user
    masks: list[bytes] | None = None  # (M) masks as lab.data.rle encodes them, where they are wanted
    corners: Tensor | None = None  # (M, 4, 2) float64, x and y of oriented boxes' corners in their order around, where they are wanted

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, position: int) -> slice:
        return slice(self.offsets[position], self.offsets[position + 1])

    def counts(self) -> Tensor:
        """Return the number of boxes of each class (C,), without crowds."""
        return torch.bincount(self.labels[~self.crowd], minlength=len(self.classes))

    def most_boxes(self) -> tuple[int, int]:
        """Return the largest number of boxes of an image, without crowds, and that image's id."""
        counts = [int((~self.crowd[self.rows(i)]).sum()) for i in range(len(self))]
        most = max(range(len(self)), key=counts.__getitem__)
        return counts[most], self.image_ids[most]

    def only(self, positions: Sequence[int]) -> "CocoFile":
        """Return these images with their boxes."""
        taken = [range(self.offsets[i], self.offsets[i + 1]) for i in positions]
        rows = torch.tensor([row for each in taken for row in each], dtype=torch.int64)
        return replace(
            self,
            files=[self.files[i] for i in positions],
            image_ids=[self.image_ids[i] for i in positions],
            sizes=[self.sizes[i] for i in positions],
            offsets=[0, *accumulate(len(each) for each in taken)],
            boxes=self.boxes[rows],
            labels=self.labels[rows],
            crowd=self.crowd[rows],
            areas=self.areas[rows],
            notes=[],
            masks=None if self.masks is None else [self.masks[row] for row in rows.tolist()],
            corners=None if self.corners is None else self.corners[rows],
        )

    def open(self, position: int) -> Image.Image:
        """Decode an image to RGB.

        Raises:
            UserError: the image cannot be read, or its size differs from the annotations.
        """
        path = self.files[position]
        try:
            return read_rgb(path, self.sizes[position], self.exif, deep=True)
        except UNREADABLE as error:
            raise unreadable(f"{self.path}: image {self.image_ids[position]} ({path})", error) from None


def read_coco(
    path: Path,
    folder: Path,
    *,
    settings: tuple[str, str],
    check: str,
    skip_corrupt: bool,
    outside: bool = False,
    exif: str = SHOWN,
    shapes: str = "",
) -> CocoFile:
    """Read an annotation file whose images lie in `folder`.

    Args:
        path: the JSON file.
        folder: the folder that its file names are relative to.
        settings: the names of the settings that gave `path` and `folder`.
        check: "off", "headers" (open each image, and decode it if its end is missing) or "pixels" (decode each image).
        skip_corrupt: leave out corrupt images and boxes, and print how many.
        outside: read files outside of `folder`, too.
        exif: data.exif.
        shapes: "masks" or "corners" of oriented boxes, which each annotation must then have; "": boxes alone.

    Raises:
        UserError: a path does not exist, the file is not a COCO file, or it has corrupt entries that are not to be skipped.
    """
    tree = load_tree(path, settings[0])
    if not folder.is_dir():
        raise UserError(f"{settings[1]}={folder}: no such folder.")
    how: dict[str, Any] = {"check": check, "skip_corrupt": skip_corrupt, "outside": outside, "exif": exif, "shapes": shapes}
    return checked_file(tree, path, folder, settings=settings, **how)


def checked_file(
    tree: dict[str, Any],
    path: Path,
    folder: Path,
    *,
    settings: tuple[str, str],
    check: str,
    skip_corrupt: bool,
    outside: bool | None = None,
    exif: str = SHOWN,
    shapes: str = "",
    where: Sequence[str] | None = None,
    faults: Faults | None = None,
    turned: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> CocoFile:
    """Check the content of an annotation file, which may have been made from files of another form.

    Args:
        tree: lists of images, annotations and categories.
        path, folder, settings, check, skip_corrupt, exif, shapes: as in read_coco.
        outside: as in read_coco; None: False, where no setting offers it.
        where: file and line of each annotation; None: its id names it.
        faults: what could not be read before.
        turned: ids of images whose boxes fit the picture both as shown and as stored; those found here are added.
        notes: messages for the user.

    Raises:
        UserError: as read_coco.
    """
    names = _categories(path, settings[0], tree["categories"])
    faults = Faults(path) if faults is None else faults
    files = Names(folder)
    images = _images(tree["images"], files, faults, outside)
    both = _take_unreadable(images, files, faults, check, settings)
    rows = _rows(tree, names, images, faults, where, shapes=shapes)
    _refuse_relative(path, settings[0], rows)
    doubles = _drop_doubles(path, images, rows, files, faults)
    faults.raise_or_report(skip_corrupt, usable=bool(images))
    if not images:
        raise UserError(f"{settings[0]}={path}: has no image to use.")
    flat = [row for image_id in images for row in rows[image_id]]
    offsets = [0, *accumulate(len(rows[image_id]) for image_id in images)]
    return CocoFile(
        path,
        list(names.values()),
        list(names),
        [file for file, _ in images.values()],
        list(images),
        [size for _, size in images.values()],
        offsets,
        torch.tensor([row[0] for row in flat], dtype=torch.float64).view(-1, 4),
        torch.tensor([row[1] for row in flat], dtype=torch.int64),
        torch.tensor([row[2] for row in flat], dtype=torch.bool),
        torch.tensor([row[3] for row in flat], dtype=torch.float64),
        folder,
        exif,
        notes=[*notes, *doubles, *note(path, _turned(images, [*turned, *both]), exif, "boxes")],
        masks=[row[4] for row in flat] if shapes == "masks" else None,
        corners=torch.tensor([row[4] for row in flat], dtype=torch.float64).view(-1, 4, 2) if shapes == "corners" else None,
    )


def load_tree(path: Path, setting: str) -> dict[str, Any]:
    """Read the JSON of an annotation file, which has lists of images, annotations and categories.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    try:
        tree = json.loads(read_bytes(path, most_bytes()))
    except UnfitFileError as error:
        raise UserError(f"{setting}={error} LOSSFORGE_MAX_BYTES sets another limit.") from None
    except OSError as error:
        raise UserError(f"{setting}={path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{setting}={path}: is not JSON: {error}") from None
    keys = ("images", "annotations", "categories")
    lacking = [key for key in keys if not (isinstance(tree, dict) and isinstance(tree.get(key), list))]
    if lacking:
        raise UserError(f"{setting}={path}: is not a COCO file for detection: it has no list {' and no list '.join(lacking)}.")
    return tree


def _categories(path: Path, setting: str, entries: list[Any]) -> dict[int, str]:
    """Return the names by id, in the order of the ids; append the id to a name that is given twice."""
    names: dict[int, str] = {}
    for entry in entries:
        category_id, name = (_whole(entry.get("id")), entry.get("name")) if isinstance(entry, dict) else (None, None)
        if type(category_id) is not int or not isinstance(name, str):
            raise UserError(f"{setting}={path}: categories: an integer id and a name are expected, got {entry!r}.")
        if category_id in names:
            raise UserError(f"{setting}={path}: categories: id {category_id} is given to {names[category_id]!r} and to {name!r}.")
        names[category_id] = one_form(name)
    if not names:
        raise UserError(f"{setting}={path}: has no categories.")
    unique = {i: names[i] for i in sorted(names)}
    while len(set(unique.values())) < len(unique):
        given = Counter(unique.values())
        unique = {i: f"{name} ({i})" if given[name] > 1 else name for i, name in unique.items()}
    return unique


def _turned(images: Images, ids: Iterable[int]) -> list[str]:
    return [images[image_id][0] for image_id in dict.fromkeys(ids) if image_id in images]


def _images(entries: list[Any], files: Names, faults: Faults, outside: bool | None) -> Images:
    """Return file and size of each valid image, by id; `outside`: as in checked_file.

    An image to which the file gives neither height nor width has those of the picture as a viewer shows it.
    """
    found: Images = {}
    folder, remedy = files.folder, "; data.images_outside=true takes such files" if outside is False else ""
    for entry in entries:
        image_id = _id(entry)
        if image_id is None:
            faults.add(
                f"image {entry!r:.100}: has no integer id of 64 bits; number the images, and give their boxes these numbers as image_id"
            )
            continue
        name, height, width = entry.get("file_name"), _whole(entry.get("height")), _whole(entry.get("width"))
        name = files.spelled(name) if isinstance(name, str) else name
        if image_id in found:
            faults.add(f"image {image_id}: its id is given twice")
        elif isinstance(name, str) and not outside and files.leaves(name):
            faults.add(f"image {image_id}: file_name {name!r} leads out of {folder}{remedy}")
        elif isinstance(name, str) and height is None and width is None:
            file = os.path.join(folder, name)
            try:
                with open_any_mode(file) as image:
                    found[image_id] = file, sizes_of(image)[0]
            except UNREADABLE as error:
                faults.add(f"image {image_id} ({file}): has no height and width in the annotations, and {reason(error)}")
        elif not (isinstance(name, str) and type(height) is int and type(width) is int and min(height, width) > 0):
            faults.add(f"image {image_id}: file_name, height and width are expected, got {name!r}, {height!r}, {width!r}")
        elif fault := fault_in(partial(refuse_pixels, width, height)):  # of which the masks are made
            faults.add(f"image {image_id}: {fault}")
        else:
            found[image_id] = (os.path.join(folder, name), (height, width))
    return found


def _take_unreadable(found: Images, files: Names, faults: Faults, check: str, settings: tuple[str, str]) -> list[int]:
    """Remove the images whose files are missing or cannot be read; return the ids of those that their size fits as shown and as stored."""
    missing = [image_id for image_id, (file, _) in found.items() if not files.holds(os.path.abspath(file))]
    if missing and len(missing) == len(found):
        file = found[missing[0]][0]
        raise UserError(
            f"{settings[1]}={files.folder}: none of the {len(found)} images of {settings[0]} is there; the first would be {file}"
        )
    _drop(found, ((image_id, "no such file") for image_id in missing), faults)
    look = partial(fault_of, check=check, deep=True)
    said = {} if check == "off" else cached(look, cast(Files, found), (faults.path, files.folder), f"{check} deep")
    both = take_both(said)
    _drop(found, said.items(), faults)
    return both


def _drop(found: Images, reasons: Iterable[tuple[int, str]], faults: Faults) -> None:
    for image_id, said in reasons:
        file, _ = found.pop(image_id)
        faults.add(f"image {image_id} ({file}): {said}")


def _rows(
    tree: dict[str, Any], names: dict[int, str], images: Images, faults: Faults, where: Sequence[str] | None, *, shapes: str
) -> dict[int, list[Row]]:
    """Return the boxes of each usable image; a corrupt image's boxes are not reported again."""
    known = {_id(entry) for entry in tree["images"]} - {None}
    index = {category_id: i for i, category_id in enumerate(names)}
    rows: dict[int, list[Row]] = {image_id: [] for image_id in images}
    for number, entry in enumerate(tree["annotations"]):
        if not isinstance(entry, dict):
            faults.add(f"annotation number {number}: {entry!r:.100} is not an annotation")
            continue
        image_id = _whole(entry.get("image_id"))
        try:
            if type(image_id) is not int or image_id not in known:
                raise CorruptError("no such image")
            if image_id in images:
                rows[image_id].append(_row(entry, images[image_id][1], index, shapes=shapes))
        except CorruptError as error:
            given = f"annotation {entry.get('id', f'number {number}')} of image {image_id}" if where is None else where[number]
            faults.add(f"{given}: {error}")
    return rows


def _drop_doubles(path: Path, images: Images, rows: dict[int, list[Row]], files: Names, faults: Faults) -> list[str]:
    """Remove boxes that their image has twice, and images that are given under two ids; return messages that count them.

    One image under two ids with different boxes is a fault, because each may lack some.
    """
    first: dict[str, int] = {}
    boxes: list[str] = []
    doubles: list[str] = []
    for image_id, (file, _) in list(images.items()):
        unique: dict[Any, Row] = {}
        for row in rows[image_id]:
            unique.setdefault(_known_by(row), row)
        boxes += [file] * (len(rows[image_id]) - len(unique))
        rows[image_id] = list(unique.values())
        if (other := first.setdefault(files.real(file), image_id)) == image_id:
            continue
        del images[image_id]
        if unique.keys() == set(map(_known_by, rows[other])):
            doubles.append(file)
        else:
            faults.add(
                f"image {image_id} ({file}): is the file of image {other}, with other boxes; one id for all boxes of a file is expected"
            )
    return [
        visible(f"{path}: {len(found)} {what}, and taken once (the first: {found[0]})")
        for what, found in (("boxes are given twice for their image", boxes), ("images are given under two ids", doubles))
        if found
    ]


def _known_by(row: Row) -> Any:
    """Return what two rows of one object share: box, class, whether it is a crowd, and shape."""
    box, label, crowd, _, shape = row
    return *box, label, crowd, tuple(shape) if isinstance(shape, list) else shape


def _row(entry: dict[str, Any], size: tuple[int, int], index: dict[int, int], *, shapes: str) -> Row:
    category, box, area, crowd = _whole(entry.get("category_id")), *(entry.get(key) for key in ("bbox", "area", "iscrowd"))
    if type(category) is not int or category not in index:
        raise CorruptError(f"category_id {category!r} is not among the categories")
    box = _around(entry.get("segmentation")) if box is None else box
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_finite, box))):
        raise CorruptError(f"bbox {box!r}; four finite numbers [x, y, width, height] are expected")
    if crowd not in (None, 0, 1):
        raise CorruptError(f"iscrowd {crowd!r}; 0 or 1 is expected")
    x, y, width, height = box
    if width <= 0 or height <= 0:
        raise CorruptError(f"bbox {box} has no area; [x, y, width, height] is expected")
    left, top, right, bottom = max(x, 0), max(y, 0), min(x + width, size[1]), min(y + height, size[0])
    if max(right - left, 0) * max(bottom - top, 0) < VISIBLE * width * height:
        raise CorruptError(f"bbox {box} is mostly outside of the image ({size[1]}×{size[0]}); [x, y, width, height] is expected")
    # a box that lies inside keeps its numbers exactly
    inside = box if (left, top, right, bottom) == (x, y, x + width, y + height) else [left, top, right - left, bottom - top]
    shape: Any = None
    if shapes:
        shape = (rle_of if shapes == "masks" else _corners_of)(entry.get("segmentation"), size)
    if area is None or not _is_finite(area) or area <= 0:
        area = areas_of([shape], size)[0] if shapes == "masks" else inside[2] * inside[3]
    return inside, index[category], bool(crowd), area, shape


def _corners_of(segmentation: Any, size: tuple[int, int]) -> list[float]:
    """Return the corners [x, y, x, y, ...] of an oriented box, the only polygon of an annotation.

    Raises:
        CorruptError: the annotation has another shape.
    """
    if not (isinstance(segmentation, list) and len(segmentation) == 1 and isinstance(segmentation[0], list) and len(segmentation[0]) == 8):
        raise CorruptError(f"segmentation {segmentation!r:.100}; one polygon of four corners, an oriented box, is expected")
    corners = checked_polygon(segmentation[0], size)
    x1, y1, x2, y2, x3, y3, x4, y4 = corners
    # the mean of opposite sides, which is 0 where the corners are given crosswise
    sides = hypot(x2 - x1 + x3 - x4, y2 - y1 + y3 - y4) / 2, hypot(x3 - x2 + x4 - x1, y3 - y2 + y4 - y1) / 2
    if min(sides) < NARROWEST:
        raise CorruptError(
            f"segmentation {segmentation!r:.100} has a side of no length; corners in their order around the box are expected"
        )
    return corners


def _around(polygons: Any) -> list[float] | None:
    """Return the box [x, y, width, height] around polygons [[x, y, x, y, ...], ...]; None if there are none."""
    if not (isinstance(polygons, list) and polygons and all(isinstance(each, list) and len(each) >= 6 for each in polygons)):
        return None
    if any(len(each) % 2 or not all(map(_is_finite, each)) for each in polygons):
        return None
    across, down = ([value for each in polygons for value in each[start::2]] for start in (0, 1))
    return [min(across), min(down), max(across) - min(across), max(down) - min(down)]


def _whole(value: Any) -> Any:
    """Return a number such as 3.0 or "3", which many tools write, as an integer, and anything else as it is."""
    if isinstance(value, str):
        return int(value) if WHOLE.fullmatch(value) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _id(entry: Any) -> int | None:
    """Return the id of an entry of a file; None if it has no integer of 64 bits."""
    value = _whole(entry.get("id")) if isinstance(entry, dict) else None
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max  # an integer may be larger


def _refuse_relative(path: Path, setting: str, rows: dict[int, list[Row]]) -> None:
    edges = [edge for each in rows.values() for row in each for edge in row[0]]
    if edges and max(edges) <= 1 and any(edge != int(edge) for edge in edges):
        raise UserError(f"{setting}={path}: all boxes lie within [0, 1]; pixels are expected, not shares of the image.")
