"""Find how a folder keeps its boxes, and read each part of it."""

import contextlib
import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import open_to_read
from lab.base.formats import one_form, visible
from lab.data.images.files import Faults
from lab.data.listing import PARTS, kinds_of, passed_over
from lab.data.split import held_out_by, split_any
from lab.detectors.annotations import rows, voc, yolo
from lab.detectors.annotations.coco_file import CocoFile, checked_file, load_tree
from lab.detectors.annotations.entries import Entries, Listing, list_files, read_small
from lab.detectors.schema import BoxesConfig

SETTINGS = ("data.root", "data.root")
LABELS = (".txt", ".xml", ".json", ".csv", ".yaml", ".yml")
"""Endings of files that hold boxes, or describe them."""
LOOKED_AT = 1000  # images of a COCO file by which their folder is found
DEEP = 3  # folders in a folder that are gone through, where each holds nothing else


@dataclass
class Layout:
    """How a folder keeps its boxes.

    Attributes:
        kind: "yolo", "coco", "voc" or "csv".
        said: what was found, in words.
        parts: what each part is made of; "train" is always there.
        read: reads a part by its name and by that.
        unpaired: returns a message that names labels without a picture; "" if there are none.
    """

    kind: str
    said: str
    parts: dict[str, Any]
    read: Callable[[str, Any], CocoFile]
    unpaired: Callable[[], str] = str


def part_of(name: str) -> str | None:
    """Return the part that a name of a file or folder says, such as instances_train2017.json; None if it says none."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in PARTS]
    return PARTS[words[-1]] if words else None


def part_of_path(path: str) -> str | None:
    """Return the part that the last folder or name of a path says."""
    said = [part_of(each) for each in path.split("/")]
    return next((each for each in reversed(said) if each), None)


def read_boxes(config: BoxesConfig, root: Path, *, shapes: str = "") -> tuple[dict[str, CocoFile], str, list[str]]:
    """Read the boxes of a folder.

    Args:
        config: the data's settings.
        root: the folder, or a data.yaml in it.
        shapes: as in lab.detectors.annotations.coco_file.read_coco.

    Returns:
        the parts; which images are held out, in words; messages for the user.

    Raises:
        UserError: the folder holds no boxes in a known form, or several forms, or an entry is corrupt.
    """
    root, file = (root.parent, root.name) if root.is_file() else (root, None)
    if not root.is_dir():
        raise UserError(f"data.root={root}: no such folder.")
    root = _unwrapped(root) if file is None else root
    listing = list_files(root)
    layout = _layout(config, listing, file, shapes)
    if config.score_test and "test" not in layout.parts:
        raise UserError(f"data.score_test=true: {root} has no test images; leave it out.")
    if (unpaired := layout.unpaired()) and not config.skip_corrupt:
        raise UserError(
            f"data.root={root}: {unpaired}.\nA picture and its boxes have one name: rename them, convert the pictures to .jpg or .png, or "
            "remove such boxes. data.skip_corrupt=true passes over them."
        )
    found = {part: layout.read(part, made_of) for part, made_of in layout.parts.items() if part != "test" or config.score_test}
    where = {part: os.path.relpath(file.path, root) for part, file in found.items()}
    notes = [f"{root}: {layout.said}: " + ", ".join(f"{len(file)} {part} images of {where[part]}" for part, file in found.items())]
    notes += [f"{root}: passed over (data.skip_corrupt=true): {unpaired}"] * bool(unpaired)
    if other := passed_over(kinds_of(name for name in listing.others if not name.lower().endswith(LABELS))):
        notes.append(f"{root}: {other}")
    if "test" in layout.parts and not config.score_test:
        notes.append(f"{root}: has test images, which data.score_test=true scores at the end")
    images = {name for part in found.values() for name in part.files}
    unused = sum(os.path.join(root, name) not in images for name in listing.images) if len(found) == len(layout.parts) else 0
    if unused:
        notes.append(f"{root}: {unused} of {len(listing.images)} images are in no part, and are passed over")
    if "val" in found:
        held_out = f"of {where['val']}"
    else:
        train, held_out = found["train"], f"of {where['train']}, {held_out_by(config)}"
        notes += train.notes
        kept, taken, _ = split_any(config, len(train))
        found = {"train": train.only(sorted(kept)), "val": train.only(sorted(taken))} | {
            k: file for k, file in found.items() if k == "test"
        }
    return found, held_out, [visible(each) for each in notes]


def _unwrapped(root: Path) -> Path:
    """Return the folder in a folder that holds nothing else, as an unpacked archive often is."""
    for _ in range(DEEP):
        try:
            inside = [each for each in root.iterdir() if not each.name.startswith((".", "__MACOSX"))]
        except OSError as error:
            raise UserError(f"data.root={root}: cannot be read: {error.strerror}.") from None
        if len(inside) != 1 or not inside[0].is_dir() or inside[0].is_symlink():
            break
        root = inside[0]
    return root


def boxes_in(root: Path) -> str:
    """Return which boxes a folder holds, in words, or why they cannot be read; "" if it holds none."""
    said = []
    with contextlib.suppress(UserError):
        listing = list_files(_unwrapped(root))
        for find in _finders(BoxesConfig(root=str(root)), listing, None, "").values():
            try:
                said += [layout.said] if (layout := find()) else []
            except UserError as error:
                said.append(str(error).rstrip("."))
    return "; ".join(said)


def _finders(config: BoxesConfig, listing: Listing, file: str | None, shapes: str) -> dict[str, Callable[[], Layout | None]]:
    return {
        "yolo": lambda: _yolo(config, listing, file, shapes),
        "coco": lambda: _coco(config, listing, shapes),
        "voc": lambda: _voc(config, listing, shapes),
        "csv": lambda: _csv(config, listing, shapes),
    }


def _layout(config: BoxesConfig, listing: Listing, file: str | None, shapes: str) -> Layout:
    finders = _finders(config, listing, file, shapes)
    if config.layout != "auto" or file:
        kind = "yolo" if file else config.layout
        if (only := finders[kind]()) is None:
            raise UserError(
                f"data.{'root' if file else 'layout'}={listing.root / file if file else kind}: {listing.root} holds no such boxes."
            )
        return only
    found = [layout for find in finders.values() if (layout := find())]
    if not found:
        kinds = passed_over(kinds_of(listing.others)) or "no other file"
        raise UserError(
            f"data.root={listing.root}: no boxes are found: {len(listing.images)} images, {kinds}.\n"
            "Expected is one of: YOLO's data.yaml with images/ and labels/; COCO's .json, such as annotations/train.json or "
            "train/_annotations.coco.json; Pascal VOC's .xml beside images or in Annotations/; a .csv with a box in each row."
        )
    if len(found) > 1:
        said = "; ".join(f"data.layout={each.kind}: {each.said}" for each in found)
        raise UserError(f"data.root={listing.root}: holds boxes in {len(found)} forms. Choose one: {said}.")
    return found[0]


def _checked(config: BoxesConfig, entries: Entries, root: Path, shapes: str) -> CocoFile:
    return checked_file(
        entries.tree(),
        entries.path,
        root,
        settings=SETTINGS,
        check=config.check,
        skip_corrupt=config.skip_corrupt,
        exif=config.exif,
        shapes=shapes,
        where=entries.where,
        faults=entries.faults,
        turned=entries.turned,
        notes=entries.notes,
    )


def _yolo(config: BoxesConfig, listing: Listing, file: str | None, shapes: str) -> Layout | None:
    root = listing.root
    names = [file] if file else [name for name in listing.with_ending(".yaml", ".yml") if name.count("/") <= 1]
    described = {name: tree for name in names if (tree := yolo.read_description(listing, name))}
    if file and not described:
        raise UserError(f"data.root={root / file}: is not a data.yaml of YOLO, with `train` and `names`.")
    if len(described) > 1:
        plain = [name for name in described if posixpath.basename(name) in ("data.yaml", "dataset.yaml")]
        if len(plain) != 1:
            raise UserError(f"data.root={root}: has {', '.join(described)}; name one, such as data.root={root / next(iter(described))}.")
        described = {plain[0]: described[plain[0]]}
    parts: dict[str, yolo.Images] = {}

    def layout(said: str, classes: list[str], *, keypoints: bool) -> Layout:
        def read(_part: str, images: yolo.Images) -> CocoFile:
            found = yolo.read_yolo(_common(root, images.names), classes, images, listing, config.exif, keypoints)
            return _checked(config, found, root, shapes)

        return Layout("yolo", said, parts, read, partial(yolo.unpaired, listing))

    if described:
        name, tree = next(iter(described.items()))
        classes = yolo.class_names(tree, root / name)
        for part in ("train", "val", "test"):
            try:
                images = yolo.described_images(tree, part, name, listing)
            except UserError:
                if part == "test" and not config.score_test:
                    continue  # many descriptions name test images that are not handed out
                raise
            if images is not None:
                if not images.names:
                    raise UserError(f"{root / name}: {part}: {tree.get(part)!r:.100} holds no image.")
                parts[part] = images
        return layout(f"YOLO's {name}, {len(classes)} classes", classes, keypoints=bool(yolo.value_of(tree, "kpt_shape")))
    labelled = yolo.looks_like_labels(listing)
    if not labelled or not yolo.is_label(listing, listing.names.spelled(yolo.label_file(labelled[0])), empty=True):
        return None
    if (listed := yolo.listed_classes(listing)) is None:
        raise UserError(
            f"data.root={root}: holds YOLO's labels ({yolo.label_file(labelled[0])}), but neither a data.yaml nor a classes.txt; "
            "the classes' names are expected in one of them."
        )
    folders = {posixpath.dirname(image) for image in labelled}
    parted = _parted([image for image in listing.images if posixpath.dirname(image) in folders], root)
    parts |= {part: yolo.Images(found, [], []) for part, found in parted.items()}
    return layout(f"YOLO's labels, {len(listed[1])} classes of {listed[0]}", listed[1], keypoints=False)


def _common(root: Path, names: list[str]) -> Path:
    """Return the lowest folder that holds all of these files."""
    return root / (os.path.commonpath([posixpath.dirname(name) or "." for name in names]) if names else "")


def _parted(names: list[str], root: Path) -> dict[str, list[str]]:
    """Divide files by what their folders say; all are for training where none says so.

    Raises:
        UserError: some say a part, but none train.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(part_of_path(posixpath.dirname(name)) or "", []).append(name)
    if set(found) <= {""}:
        return {"train": names}
    if "train" not in found:
        raise UserError(f"data.root={root}: has folders of {', '.join(sorted(each for each in found if each))}, but none of train.")
    return {part: found[part] for part in ("train", "val", "test") if part in found}


def _voc(config: BoxesConfig, listing: Listing, shapes: str) -> Layout | None:
    files, classes = voc.annotations_of(listing) if listing.images else ([], [])
    if not files:
        return None

    def read(_part: str, names: list[str]) -> CocoFile:
        return _checked(config, voc.read_voc(_common(listing.root, names), classes, names, listing), listing.root, shapes)

    parted = _listed_parts(files, listing) or _parted(files, listing.root)
    return Layout("voc", f"Pascal VOC's XML files, {len(classes)} classes", parted, read)


def _listed_parts(files: list[str], listing: Listing) -> dict[str, list[str]] | None:
    """Return the XML files of each part as ImageSets/Main lists them; None without such lists."""
    by_stem = {one_form(posixpath.splitext(posixpath.basename(name))[0]): name for name in files}
    found: dict[str, list[str]] = {}
    for name in listing.with_ending(".txt"):
        folder, stem = posixpath.split(posixpath.splitext(name)[0])
        if posixpath.basename(posixpath.dirname(folder)) != "ImageSets" or stem not in ("train", "val", "test", "trainval"):
            continue
        try:
            lines = list(dict.fromkeys(one_form(line.split()[0]) for line in read_small(listing, name).splitlines() if line.strip()))
        except (ValueError, OSError) as error:
            raise UserError(f"{listing.root / name}: cannot be read: {error}.") from None
        if (lacking := next((stem for stem in lines if stem not in by_stem), None)) is not None and stem != "test":
            raise UserError(f"{listing.root / name}: {lacking!r:.200} has no XML file in {listing.root}.")
        found[stem] = [by_stem[stem] for stem in lines if stem in by_stem]
    if "train" not in found and "trainval" in found:
        found["train"] = found["trainval"]
    found.pop("trainval", None)
    return {part: found[part] for part in ("train", "val", "test") if found.get(part)} if found.get("train") else None


def _csv(config: BoxesConfig, listing: Listing, shapes: str) -> Layout | None:
    tables = rows.tables_of(listing) if listing.images else []
    if not tables:
        return None
    parted = _parted_tables(tables, listing.root)
    classes = rows.classes_in(list(parted.values()), listing)

    def read(_part: str, name: str) -> CocoFile:
        return _checked(config, rows.read_rows(listing.root / name, classes, name, listing, config.exif), listing.root, shapes)

    return Layout("csv", f"boxes in {', '.join(parted.values())}, {len(classes)} classes", parted, read)


def _parted_tables(names: list[str], root: Path) -> dict[str, str]:
    """Return the file of each part by what its folder or name says; a single file is for training.

    Raises:
        UserError: two files say the same part, or none says train.
    """
    found: dict[str, str] = {}
    for name in names:
        part = part_of_path(posixpath.splitext(name)[0]) or ("train" if len(names) == 1 else None)
        if part is None:
            continue
        if part in found:
            raise UserError(f"data.root={root}: {found[part]} and {name} both say {part}; one file a part is expected.")
        found[part] = name
    if "train" not in found:
        raise UserError(f"data.root={root}: {', '.join(names)}: one of these is expected to be named for train.")
    return {part: found[part] for part in ("train", "val", "test") if part in found}


def _coco(config: BoxesConfig, listing: Listing, shapes: str) -> Layout | None:
    files = [name for name in listing.with_ending(".json") if _starts_as_coco(listing, name)] if listing.images else []
    named = [name for name in files if posixpath.basename(name).startswith("instances_")]
    files = named or files
    if not files:
        return None
    parted = _parted_tables(files, listing.root)

    def read(part: str, name: str) -> CocoFile:
        path = listing.root / name
        tree = load_tree(path, "data.root")
        folder, hint = _find_images(tree["images"], part, name, listing)
        how: dict[str, Any] = {"check": config.check, "skip_corrupt": config.skip_corrupt, "exif": config.exif, "shapes": shapes}
        return checked_file(tree, path, folder, settings=SETTINGS, faults=Faults(path, hint=hint), **how)

    return Layout("coco", f"COCO's {', '.join(parted.values())}", parted, read)


def _starts_as_coco(listing: Listing, name: str) -> bool:
    """Return whether a JSON file is an object that names images and annotations of boxes; large ones are not parsed for it."""
    if listing.names.leaves(name):
        return False
    try:
        with open_to_read(listing.root / name) as file:
            head = file.read(2**16).lstrip(b"\xef\xbb\xbf \r\n\t")
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 2**16, 0))
            ends = head + file.read(2**16)
    except OSError:  # also what is not a regular file
        return False
    known = [word in ends for word in (b'"images"', b'"annotations"', b'"categories"')]
    return head.startswith(b"{") and sum(known) >= 2


def _find_images(entries: list[Any], part: str, name: str, listing: Listing) -> tuple[Path, str]:
    """Make the names in a COCO file relative to the folder in which most of its images are.

    Returns:
        the folder; a message about the pictures there that the file does not name, if it names one that is not there.

    Raises:
        UserError: no image is below the root.
    """
    named = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("file_name"), str)]
    stem = posixpath.splitext(posixpath.basename(name))[0].removeprefix("instances_")
    said = [key for key, value in PARTS.items() if value == part]
    above = posixpath.dirname(name)
    places = [
        above,
        posixpath.dirname(above),
        *(posixpath.join(base, each) for each in (stem, *said) for base in ("", "images", posixpath.dirname(above))),
        *("images", posixpath.join(above, "images"), posixpath.join(posixpath.dirname(above), "images"), ""),
    ]
    known = set(listing.images)

    def found(entry: dict[str, Any], place: str) -> str | None:
        return next((each for each in listing.places_of(entry["file_name"], place) if each in known), None)

    some = named[:: -(-len(named) // LOOKED_AT) or 1]
    counts = {place: sum(found(entry, place) is not None for entry in some) for place in dict.fromkeys(places)}
    place = max(counts, key=counts.__getitem__)
    if named and not counts[place]:
        raise UserError(f"{listing.root / name}: none of its images, such as {named[0]['file_name']!r:.200}, is below {listing.root}.")
    images = [found(entry, place) for entry in named]
    for entry, image in zip(named, images, strict=True):
        entry["file_name"] = posixpath.relpath(image, place or ".") if image else entry["file_name"]
    return listing.root / place, listing.unnamed(set(filter(None, images))) if None in images else ""
