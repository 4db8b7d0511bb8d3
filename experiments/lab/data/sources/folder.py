"""Images in one folder a class."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from lab.base.errors import UserError, unknown
from lab.base.formats import visible
from lab.base.paths import ROOT, absolute
from lab.config.objects import find_object
from lab.config.schema import FolderConfig
from lab.data.images.files import SUFFIXES, Faults
from lab.data.images.pixels import ARRAY
from lab.data.listing import ClassFolders, held_out_folder, passed_over, read_class_folders
from lab.data.photos import Files, Photos
from lab.data.sets import existing_folder
from lab.data.specs import SOURCES


def read_folder(config: FolderConfig) -> Photos:
    """Return the images of each part.

    Raises:
        UserError: a folder or a setting is wrong.
    """
    root = existing_folder("data.root", absolute(config.root, ROOT / "data"))
    try:
        return _read(root, config)
    except UserError as error:
        if said := next(filter(None, (find_object(spec.found_in)(root) for spec in SOURCES.values() if spec.found_in)), ""):
            remedy = "task=detection data=boxes reads them, while data=folder takes one folder of images per class"
            raise UserError(f"data.root={root}: holds boxes ({said}); {remedy}.\n{error}") from None
        raise


def _read(root: Path, config: FolderConfig) -> Photos:
    folders = _folders(root, config)
    for name, folder in folders.items():
        if name == "train" and not folder.is_dir():
            raise UserError(f"data.train={folder}: no such folder. Give data.train=. if the folders of the classes are in {root} itself.")
        existing_folder(f"data.{name}", folder)
    listed = read_class_folders(folders, (*SUFFIXES, ARRAY) if config.channels else SUFFIXES)
    found, classes = dict[str, Files](), config.classes or []
    for name, folder in folders.items():
        found[name], classes = _files(name, root, folder, listed, config, classes if found else [])
    notes = [note for files in found.values() for note in _lacking(files, classes)] + _seen(root, folders, listed, config)
    if "val" in found and config.held_out != FolderConfig.held_out:
        notes.append(f"data.held_out={config.held_out}: has no effect, because {folders['val']} holds the held-out images")
    if config.test is None and folders["train"] != root and (root / "test").is_dir():
        notes.append(f"{root / 'test'} is not used; data.test=test scores its images once at the end")
    if len(classes) == 1:
        notes.append(f"{folders['train']} holds one class, {classes[0]}, so that every prediction is right.")
    return Photos(parts=found, classes=classes, of=f"of {folders.get('val', folders['train']).name}/", faults=Faults(root), notes=notes)


def _lacking(files: Files, classes: list[str]) -> list[str]:
    """Return a note on the classes that lack images."""
    counts = torch.bincount(files.targets, minlength=len(classes)).tolist()
    names = [name for name, count in zip(classes, counts, strict=True) if not count]
    more = f", … ({len(names)} classes)" if len(names) > 10 else ""
    return [f"{files.source} has no image of {', '.join(names[:10])}{more}"] * bool(names)


def _folders(root: Path, config: FolderConfig) -> dict[str, Path]:
    """Return the folder of each part; if val has none, its images are taken from the training images.

    Raises:
        UserError: two parts have the same folder, or data.test is a share.
    """
    val = config.val or held_out_folder(root)
    given = {"train": config.train, "val": val, "test": config.test}
    if config.test and config.test.replace(".", "", 1).isdecimal() and not (root / config.test).is_dir():
        raise UserError(f"data.test={config.test}: a folder in data.root is expected; only sets held in memory take a share.")
    folders = {name: root / folder for name, folder in given.items() if folder}
    for name, folder in folders.items():
        same = next(other for other in folders if folders[other].resolve() == folder.resolve())
        if same != name:
            raise UserError(f"data.{name}={given[name]}: is data.{same}, too; images that nothing else uses are expected.")
    return folders


def _files(part: str, root: Path, path: Path, listed: ClassFolders, config: FolderConfig, trained: list[str]) -> tuple[Files, list[str]]:
    """Return the images of a part, and the classes.

    Args:
        part: train, val or test.
        root: what the images' names are relative to.
        path: the part's folder.
        listed: what the folders hold.
        config: names the classes, if the folders do not.
        trained: the classes of the training images; empty for these themselves.

    Raises:
        UserError: a class has files but no images, is unknown, or is in one part only; or the folder has no image.
    """
    setting, held, named = f"data.{part}={path}", listed.of(part), config.classes
    arrays = "" if config.channels else f" Files {ARRAY} are read with data.channels=NUMBER."
    images = f"Images are files {', '.join(listed.kinds)}.{arrays}"
    none = [name for name, files in held.items() if not files and listed.passed[part, name] and name not in (named or ())]
    if none:
        what = ", ".join(f"{name} ({passed_over(listed.passed[part, name])})" for name in none[:5])
        said = f"{setting}: one folder of images per class is expected. Found no image for the classes {what}."
        raise UserError(f"{said} Remove a folder that is not a class. {images}")
    there = [name for name, files in held.items() if files]
    if not there:
        raise UserError(f"{setting}: has no image of a class. {images}")
    if named and (strange := [name for name in there if name not in named]):
        raise unknown(f"{setting}: class", strange[0], named)
    if not named and trained:
        empty = {name for name in held if name in trained}
        if odd := sorted(set(trained) ^ (set(there) | empty)):
            said = f"data.train and data.{part} hold different classes: {', '.join(odd[:10])} in one of them only."
            raise UserError(f"{said} A folder may lack some if data.classes=[NAME,NAME,...] names them all.")
    classes = named or trained or there
    number = {name: each for each, name in enumerate(classes)}
    files = [file for name in there for file in held[name]]
    targets = torch.tensor([number[name] for name in there for _ in held[name]])
    keys = [os.path.relpath(file, root).replace(os.sep, "/") for file in files]
    return Files(targets=targets, keys=keys, channels=config.channels, source=path, files=files), list(classes)


def _seen(root: Path, folders: Mapping[str, Path], listed: ClassFolders, config: FolderConfig) -> list[str]:
    """Return messages about files that are passed over, empty folders and links."""
    notes = [visible(f"{folder}: {said}") for part, folder in folders.items() if (said := passed_over(listed.passed_in(part)))]
    empty = [
        os.path.relpath(folders[part] / name, root)
        for (part, name), files in listed.images.items()
        if not files and name not in (config.classes or ()) and not listed.passed[part, name]
    ]
    if empty:
        more = f", … ({len(empty)} folders)" if len(empty) > 10 else ""
        notes.append(visible(f"{root}: folders without a file are no classes of their own: {', '.join(empty[:10])}{more}"))
    return notes + listed.notes(root)
