"""The images in folders of classes: which files count, which are passed over, and which links are followed.

A file manager's own folders and hidden files are left out without a word. Other files that are no images are counted by their endings. A
link to a folder is followed once, unless it leads to a folder that is read already or that holds such a folder: its images would be read
twice, or for another class.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lab.base.errors import UserError
from lab.base.formats import one_form, visible
from lab.base.paths import absolute

SYSTEM = (
    *("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found", "System Volume Information", "Thumbs.db", "ehthumbs.db"),
    *("desktop.ini", "Icon\r"),
)
"""Names of files and folders that systems put beside images, some with copies of these; hidden ones (.DS_Store) begin with a dot."""
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)
"""The part that a folder, a file, a split or a cell of a table means by its name."""
HELD_OUT = ("val", "valid", "validation")
"""Names of folders that are taken for the held-out images."""
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
KINDS = 8  # endings that a message names


def ignored(name: str) -> bool:
    """Return whether a file or folder is hidden, or a system's own; macOS writes hidden files beside images (._x.jpg)."""
    return name.startswith(".") or name in SYSTEM


def hidden(path: Path, folder: Path) -> bool:
    """Return whether a file, or a folder between `folder` and it, is ignored."""
    return any(ignored(part) for part in path.relative_to(folder).parts)


def held_out_folder(root: Path, remedy: str = "data.val= names one of them") -> str | None:
    """Return the name of the folder of held-out images in `root`; None if there is none.

    Raises:
        UserError: there are several.
    """
    found = [name for name in HELD_OUT if (root / name).is_dir()]
    if len(found) > 1:
        raise UserError(f"data.root={root}: has {' and '.join(f'{name}/' for name in found)}; {remedy}.")
    return found[0] if found else None


def kinds_of(names: Iterable[str]) -> Counter[str]:
    """Count files by their endings in lower case."""
    return Counter(os.path.splitext(name)[1].lower() or "without an ending" for name in names)


def passed_over(counts: Counter[str]) -> str:
    """Return how many files are passed over, by their kinds; empty if none are."""
    if not counts:
        return ""
    known = [f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
    listed = ", ".join([*known[:KINDS], *["…"] * (len(known) > KINDS)])
    return f"{counts.total()} file{'s' * (counts.total() > 1)} passed over: {listed}"


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return what a folder holds, sorted, without what is ignored.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not ignored(entry.name)), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}.") from None


Place = tuple[str, str]  # part and class


@dataclass
class ClassFolders:
    """What the folders of classes of all parts hold.

    Args:
        images: by part and class, the images' paths in order.
        passed: by part and class, the files that are no images, by kind; class "": files beside the folders of classes.
        owner: by real folder, what it is read for.
        above: real folders that hold one of these.
        followed: links that lead elsewhere, and are followed.
        refused: links that are not followed.
        folder_links, file_links: links that are still to be looked at.
    """

    kinds: tuple[str, ...]
    images: dict[Place, list[str]] = field(default_factory=dict)
    passed: dict[Place, Counter[str]] = field(default_factory=dict)
    owner: dict[str, Place] = field(default_factory=dict)
    above: set[str] = field(default_factory=set)
    followed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    folder_links: list[tuple[Place, str]] = field(default_factory=list)
    file_links: list[tuple[Place, str]] = field(default_factory=list)

    def of(self, part: str) -> dict[str, list[str]]:
        """Return the images of each class folder of a part, sorted by name."""
        return dict(sorted((name, files) for (each, name), files in self.images.items() if each == part))

    def passed_in(self, part: str) -> Counter[str]:
        return sum((counts for (each, _), counts in self.passed.items() if each == part), Counter())

    def notes(self, root: Path) -> list[str]:
        """Return messages about links for the user."""
        said = []
        if self.followed:
            where = os.path.relpath(self.followed[0], root)
            said.append(f"{root}: {len(self.followed)} links to folders or files elsewhere are followed (the first: {where})")
        if self.refused:
            where = os.path.relpath(self.refused[0], root)
            what = f"{len(self.refused)} links are not followed (the first: {where})"
            said.append(f"{root}: {what}; they lead to folders that are read for themselves, or that hold such folders")
        return [visible(each) for each in said]

    def _walk(self, place: Place, folder: str, real: str) -> None:
        """Read a folder and those below it; links are kept for later."""
        left = [(folder, real)]
        while left:
            path, real = left.pop()
            self.owner[real] = place
            for entry in _entries(path):
                if entry.is_dir(follow_symlinks=False):
                    left.append((entry.path, os.path.join(real, entry.name)))
                elif entry.is_symlink() and entry.is_dir():
                    self.folder_links.append((place, entry.path))
                elif not entry.name.lower().endswith(self.kinds):
                    self.passed[place] += kinds_of([entry.name])
                elif entry.is_symlink():
                    self.file_links.append((place, entry.path))
                else:
                    self.images[place].append(entry.path)

    def _part(self, part: str, folder: Path) -> None:
        real = os.path.realpath(folder)
        self._hold(real)
        self.above.add(real)
        beside = self.passed[part, ""] = Counter()
        for entry in _entries(folder):
            place = part, one_form(entry.name)
            if not entry.is_dir():
                beside.update(kinds_of([entry.name]))
                continue
            self.images.setdefault(place, [])
            self.passed.setdefault(place, Counter())
            if entry.is_symlink():
                self.folder_links.append((place, entry.path))
            else:
                self._walk(place, entry.path, os.path.join(real, entry.name))

    def _hold(self, real: str) -> None:
        """Enter the folders above a folder that is read."""
        while (parent := os.path.dirname(real)) != real and parent not in self.above:
            self.above.add(parent)
            real = parent

    def _follow(self) -> None:
        """Follow the links to folders, and then those to files."""
        while self.folder_links:
            waiting, self.folder_links = sorted(self.folder_links, key=lambda each: each[1]), []
            for place, path in waiting:
                real = os.path.realpath(path)
                if real in self.owner or real in self.above:
                    self.refused.append(path)
                    continue
                self.followed.append(path)
                self._hold(real)
                self._walk(place, path, real)
        real_folder = cache(os.path.realpath)  # of a hundred thousand links into few folders
        for place, path in self.file_links:
            folder = real_folder(os.path.dirname(os.path.join(os.path.dirname(path), os.readlink(path))))
            if folder in self.owner and self.owner[folder] != place:
                self.refused.append(path)
                continue
            if folder not in self.owner:
                self.followed.append(path)
            self.images[place].append(path)
        self.followed.sort()
        self.refused.sort()


def read_class_folders(parts: Mapping[str, Path], kinds: tuple[str, ...]) -> ClassFolders:
    """Read the folders of classes of all parts.

    Args:
        parts: the folder of each part.
        kinds: endings of images, in lower case.
    """
    found = ClassFolders(kinds)
    for part, folder in parts.items():
        found._part(part, folder)
    found._follow()
    for files in found.images.values():
        files.sort(key=lambda file: os.path.split(one_form(file)))  # the same order, and so the same split, on each system
    return found


def expanded(setting: str, pattern: str) -> list[Path]:
    """Return the files of a pattern with ranges {000..009} or wildcards.

    Raises:
        UserError: a file does not exist, or none matches.
    """
    if found := RANGE.search(pattern):
        first, last = found.groups()
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))  # the first missing file ends it
        paths = [path for each in numbers for path in expanded(setting, f"{pattern[: found.start()]}{each}{pattern[found.end() :]}")]
    elif glob.has_magic(pattern):
        paths = [Path(path) for path in sorted(glob.glob(str(absolute(pattern, ""))))]
    else:
        paths = [absolute(pattern, "")]
    if not paths:
        raise UserError(f"{setting}={pattern}: matches no file.")
    if lacking := [path for path in paths if not path.is_file()]:
        raise UserError(f"{setting}: {lacking[0]}: no such file; tar files such as 'train-{{000..009}}.tar' or 'train-*.tar' are expected.")
    return paths
