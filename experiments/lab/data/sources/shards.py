"""WebDataset shards on disk, read at random positions: of a tar file only images and labels are read, and nothing is unpickled."""

import contextlib
import glob
import json
import os
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from lab.base.errors import UserError, unknown
from lab.base.formats import one_form
from lab.base.paths import absolute
from lab.config.schema import ShardsConfig
from lab.data.images.files import SUFFIXES, UNREADABLE, CorruptError, Faults, ImageBytes, fault_of, find_corrupt, refuse_bytes, unreadable
from lab.data.images.pixels import ARRAY, PixelFault, read_image
from lab.data.samples import class_of
from lab.data.sets import Data, Norm
from lab.data.sources.folder import Samples, hold_out, photos_data
from lab.data.sources.table import by_number
from lab.data.split import held_out_by

LABELS = ("cls", "txt", "json")
LONGEST = 2**20  # bytes of a label, or of a header
FURTHER = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
BLOCK = 512
Member = tuple[int, int]  # first byte and size


class Header(tarfile.TarInfo):
    """A header, of which tarfile would read further ones, for long names and the like, whole: their size is looked at before."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in FURTHER and found.size > LONGEST:
            raise tarfile.ReadError(f"a header of a file has {found.size:,} bytes; at most {LONGEST:,} are read")
        return found


@dataclass(kw_only=True)
class ShardSamples(Samples):
    """Samples of shards.

    Args:
        shards: the files.
        members: shard, first byte and size of each image of the source (M, 3).
        stems: name of each sample of the source in its shard.
        endings: ending of each image's name.
        labels: class of each sample, as its shard says it.
    """

    shards: list[Path]
    members: Tensor
    stems: list[str]
    endings: list[str]
    labels: list[str]

    def image(self, index: int) -> Image.Image | Tensor:
        try:
            return read_image(self.content(index), self.channels)
        except UNREADABLE as error:
            raise unreadable(self.where(index), error) from None

    def content(self, index: int) -> ImageBytes:
        position = self.positions[index]
        shard, first, size = self.members[position].tolist()
        with self.shards[shard].open("rb") as file:
            file.seek(first)
            return ImageBytes(file.read(size), f"{self.stems[position]}.{self.endings[position]}")

    def where(self, index: int) -> str:
        position = self.positions[index]
        return f"{self.shards[int(self.members[position, 0])]}: sample {self.stems[position]}"

    def known_labels(self) -> list[str]:
        return [self.labels[position] for position in self.positions]


@dataclass(frozen=True)
class ImageFault:
    """Say what is wrong with an image of the samples, by its index; empty if nothing."""

    check: str
    channels: int | None
    samples: ShardSamples = field(repr=False)

    def __call__(self, entry: tuple[Any, Any]) -> str:
        file = (self.samples.content(int(entry[0])), None)
        return PixelFault(self.channels)(file) if self.channels else fault_of(file, self.check)


def shards_data(config: ShardsConfig, norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open shards; `norm` and `saved` as in lab.data.load.load_data.

    Raises:
        UserError: a shard, a sample or a setting is wrong.
    """
    given = {"train": ("shards", config.shards), "val": ("val", config.val), "test": ("test", config.test)}
    files = {name: expanded(f"data.{setting}", value) for name, (setting, value) in given.items() if value}
    if config.fold is not None and "val" in files:
        raise UserError(f"data.fold={config.fold}: divides the images of data.shards, but data.val={config.val} has held-out images.")
    every = [path.resolve() for paths in files.values() for path in paths]
    if again := [path for path in every if every.count(path) > 1]:
        raise UserError(f"data.shards, data.val and data.test: {again[0]} is named twice; different files are expected.")
    found = {name: _usable(paths, config) for name, paths in files.items()}
    classes = config.classes or sorted(set(found["train"].known_labels()), key=by_number)
    if len(classes) < 2:
        raise UserError(f"data.shards={config.shards}: has only the class {', '.join(classes)}; two or more are expected.")
    root = os.path.commonpath([path.parent for paths in files.values() for path in paths])
    for samples in found.values():
        samples.classes, samples.targets = classes, _targets(samples, classes, numbers=config.classes is not None)
        names, held_by = [os.path.relpath(path, root) for path in samples.shards], samples.members[samples.positions, 0].tolist()
        samples.keys = [f"{names[shard]}/{key}" for shard, key in zip(held_by, samples.keys, strict=True)]
    held_out = f"of {config.val}"
    if "val" not in found:
        found, held_out = hold_out(found, config), f"of {config.shards}, {held_out_by(config)}"
    return photos_data(found, held_out, config, norm, device, seed, saved)


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


def _usable(paths: list[Path], config: ShardsConfig) -> ShardSamples:
    """Return the samples of shards, without those that cannot be used.

    Raises:
        UserError: some cannot be used and are not to be skipped, or none is left.
    """
    faults = Faults(paths[0].parent)
    members: list[tuple[int, int, int]] = []
    endings, keys, labels = [], [], []
    for number, path in enumerate(paths):
        if not (samples := _scan(path, faults)):
            continue
        with path.open("rb") as file:
            for key, sample in samples.items():
                try:
                    ending, label = _ending_of_image(sample, config), _label(file, sample, config)
                    refuse_bytes(sample[ending][1], f".{ending} ")
                except CorruptError as error:
                    faults.add(f"{path.name}: sample {key}: {error}")
                    continue
                members.append((number, *sample[ending]))
                endings.append(ending)
                keys.append(key)
                labels.append(label)
    known: dict[str, Any] = {"classes": [], "targets": torch.zeros(len(keys)), "keys": keys, "channels": config.channels}
    places = torch.tensor(members, dtype=torch.int64).view(-1, 3)
    found = ShardSamples(**known, shards=paths, members=places, stems=keys, endings=endings, labels=labels)
    entries: Any = {index: (index, member) for index, member in enumerate(members)}
    wrong = find_corrupt(entries, paths, config.check, ImageFault(config.check, config.channels, found))
    for index, said in wrong.items():
        faults.add(f"{paths[members[index][0]].name}: sample {keys[index]}: {said}")
    faults.raise_or_report(config.skip_corrupt, usable=len(wrong) < len(keys))
    if len(wrong) == len(keys):
        raise UserError(f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: hold no sample to use.")
    return found.only([index for index in range(len(keys)) if index not in wrong])


def _scan(path: Path, faults: Faults) -> dict[str, dict[str, Member]]:
    """Return the members of each sample of a shard, by their endings."""
    found: dict[str, dict[str, Member]] = {}
    held = path.stat().st_size
    try:
        tar: Any
        with tarfile.open(path, "r:", tarinfo=Header) as tar:
            for member in tar:
                tar.members = []  # the list would keep all headers
                # before so much memory is taken for it
                if member.isreg() and not member.issparse() and member.offset_data + member.size > held:
                    raise tarfile.ReadError("unexpected end of data")
                folder, slash, file = member.name.rpartition("/")
                stem, _, ending = file.partition(".")
                if not (stem and ending and member.isreg()) or member.issparse():
                    continue
                sample = found.setdefault(f"{folder}{slash}{stem}", {})
                if ending.lower() in sample:
                    faults.add(f"{path.name}: sample {folder}{slash}{stem}: has two files .{ending.lower()}")
                sample[ending.lower()] = member.offset_data, member.size
            end = tar.offset
        with path.open("rb") as file_of_shard:  # tarfile takes a damaged header for the end
            file_of_shard.seek(end)
            rest = file_of_shard.read(BLOCK)
        if len(rest) < BLOCK or rest.strip(b"\0"):
            faults.add(f"{path.name}: is {'damaged' if len(rest) == BLOCK else 'cut off'} at byte {end}, after {len(found)} samples")
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:  # RecursionError: thousands of headers for one file
        compressed = False
        with contextlib.suppress(OSError), path.open("rb") as start:
            compressed = start.read(2) == b"\x1f\x8b"
        hint = (
            "is compressed; unpack it by gunzip, because its samples are read at random positions" if compressed else f"is broken: {error}"
        )
        faults.add(f"{path.name}: {hint}" + (f", after {len(found)} samples" if found else ""))
    return found


def _ending_of_image(sample: dict[str, Member], config: ShardsConfig) -> str:
    if config.image:
        return _there(sample, config.image.lower().removeprefix("."), "data.image")
    known = (*SUFFIXES, ARRAY) if config.channels else SUFFIXES
    images = [ending for ending in sample if f".{ending}" in known]
    if len(images) != 1:
        raise CorruptError(f"has {' and '.join(images) or 'no image'} (of {_listed(sample)}); data.image= names the ending of one")
    return images[0]


def _there(sample: dict[str, Member], ending: str, setting: str) -> str:
    if ending not in sample:
        raise CorruptError(f"has no .{ending}, as {setting} says, but {_listed(sample)}")
    return ending


def _listed(sample: dict[str, Member]) -> str:
    return ", ".join(f".{ending}" for ending in sample)


def _label(file: Any, sample: dict[str, Member], config: ShardsConfig) -> str:
    """Return the class that a sample's label names."""
    ending, _, name = (config.label or "").removeprefix(".").partition(":")
    if ending:
        if ending.rpartition(".")[2] not in LABELS or (name and not ending.endswith("json")):
            raise UserError(f"data.label={config.label}: an ending {', '.join(LABELS)} is expected, or json:FIELD.")
        _there(sample, ending, "data.label")
    else:
        there = [each for each in LABELS if each in sample]
        if len(there) != 1 and there[:1] != ["cls"]:
            raise CorruptError(f"has {' and '.join(there) or 'no label'} (of {_listed(sample)}); data.label= names the ending of one")
        ending = there[0]
    first, size = sample[ending]
    if size > LONGEST:
        raise CorruptError(f".{ending} has {size:,} bytes, too many for a class")
    file.seek(first)
    try:
        value: Any = file.read(size).decode().strip()
        value = json.loads(value) if ending.endswith("json") else value
    except (ValueError, RecursionError) as error:
        raise CorruptError(f".{ending} cannot be read: {error}") from None
    if isinstance(value, dict):
        if name not in value:
            raise CorruptError(f".{ending} has the fields {', '.join(map(str, value)) or 'none'}; data.label=json:FIELD names one of them")
        value = value[name]
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise CorruptError(f".{ending} says {value!r}; the name or number of a class is expected")
    return one_form(str(value).strip())


def _targets(samples: ShardSamples, classes: list[str], *, numbers: bool) -> Tensor:
    """Return the class index of each sample, whose label is a class's name, or with `numbers` its index."""
    known = {name: number for number, name in enumerate(classes)}
    labels = samples.known_labels()
    for index, label in enumerate(labels):
        if label not in known:
            if not numbers:
                raise unknown(f"{samples.where(index)}: class", label, classes)
            known[label] = class_of(label, classes, samples.where(index))
    return torch.tensor([known[label] for label in labels])
