"""WebDataset shards on disk, read at random positions: of a tar file only images and labels are read, and nothing is unpickled."""

import contextlib
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.base.formats import one_form
from lab.config.schema import ShardsConfig
from lab.data.images.files import SUFFIXES, CorruptError, Faults, ImageBytes, refuse_bytes
from lab.data.images.pixels import ARRAY
from lab.data.listing import expanded
from lab.data.photos import Photos, Pictures
from lab.data.samples import classes_in, numbered

LABELS = ("cls", "txt", "json")
LONGEST = 2**20  # bytes of a label, or of a header
FURTHER = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
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
class ShardSamples(Pictures):
    """Samples of shards.

    Args:
        shards: the files.
        members: shard, first byte and size of each image of the source (M, 3).
        names: name of each sample's image in its shard, and of the sample (M).
    """

    shards: list[Path]
    members: Tensor
    names: list[tuple[str, str]]

    def file(self, index: int) -> ImageBytes:
        shard, first, size = self.members[self.positions[index]].tolist()
        with self.shards[shard].open("rb") as file:
            file.seek(first)
            return ImageBytes(file.read(size), self.names[self.positions[index]][0])

    def where(self, index: int) -> str:
        position = self.positions[index]
        return f"{self.shards[int(self.members[position, 0])]}: sample {self.names[position][1]}"

    def about(self) -> set[Path]:
        return set(self.shards)


def read_shards(config: ShardsConfig) -> Photos:
    """Return the samples of shards.

    Raises:
        UserError: a shard, a label or a setting is wrong.
    """
    given = {"train": ("shards", config.shards), "val": ("val", config.val), "test": ("test", config.test)}
    files = {name: expanded(f"data.{setting}", value) for name, (setting, value) in given.items() if value}
    every = [path for paths in files.values() for path in paths]
    real = [path.resolve() for path in every]
    if again := [path for path in real if real.count(path) > 1]:
        raise UserError(f"data.shards, data.val and data.test: {again[0]} is named twice; different files are expected.")
    root = Path(os.path.commonpath([path.parent for path in every]))
    faults = Faults(root)
    found = {name: _samples(paths, config, faults) for name, paths in files.items()}
    if lacking := next((samples.source for samples, labels in found.values() if not labels), None):
        faults.raise_or_report(skip=False, usable=False)
        raise UserError(f"{lacking}: has no sample to use.")
    classes = config.classes or classes_in(found["train"][1], f"data.shards={config.shards}")
    for samples, labels in found.values():
        samples.targets = numbered(labels, classes, samples.where, by_index=config.classes is not None)
        where = [os.path.relpath(path, root) for path in samples.shards]
        samples.keys = [f"{where[shard]}/{key}" for shard, key in zip(samples.members[:, 0].tolist(), samples.keys, strict=True)]
    parts = {name: samples for name, (samples, _) in found.items()}
    return Photos(parts=parts, classes=classes, of=f"of {config.val or config.shards}", faults=faults)


def _samples(paths: list[Path], config: ShardsConfig, faults: Faults) -> tuple[ShardSamples, list[str]]:
    """Return the samples of shards that have an image and a label, and the labels; add the others to `faults`."""
    members: list[tuple[int, int, int]] = []
    names, labels = [], []
    for number, path in enumerate(paths):
        if not (samples := _scan(path, faults)):
            continue
        with path.open("rb") as file:
            for key, sample in samples.items():
                try:
                    ending, label = _ending_of_image(sample, config), _label(file, sample, config)
                    refuse_bytes(sample[ending][1], f".{ending} ")
                except CorruptError as error:
                    faults.add(f"{os.path.relpath(path, faults.path)}: sample {key}: {error}")
                    continue
                members.append((number, *sample[ending]))
                names.append((f"{key}.{ending}", key))
                labels.append(label)
    more = f" and {len(paths) - 1} more" if paths[1:] else ""
    known: dict[str, Any] = {"targets": torch.zeros(len(labels)), "keys": [key for _, key in names], "channels": config.channels}
    places = torch.tensor(members, dtype=torch.int64).view(-1, 3)
    return ShardSamples(**known, source=f"{paths[0]}{more}", shards=paths, members=places, names=names), labels


def _scan(path: Path, faults: Faults) -> dict[str, dict[str, Member]]:
    """Return the members of each sample of a shard, by their endings."""
    found: dict[str, dict[str, Member]] = {}
    held, name = path.stat().st_size, os.path.relpath(path, faults.path)
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
                    faults.add(f"{name}: sample {folder}{slash}{stem}: has two files .{ending.lower()}")
                sample[ending.lower()] = member.offset_data, member.size
            end = tar.offset
        with path.open("rb") as file_of_shard:  # tarfile takes a damaged header for the end
            file_of_shard.seek(end)
            rest = file_of_shard.read(BLOCK)
        if len(rest) < BLOCK or rest.strip(b"\0"):
            faults.add(f"{name}: is {'damaged' if len(rest) == BLOCK else 'cut off'} at byte {end}, after {len(found)} samples")
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:  # RecursionError: thousands of headers for one file
        compressed = False
        with contextlib.suppress(OSError), path.open("rb") as start:
            compressed = start.read(2) == b"\x1f\x8b"
        hint = (
            "is compressed; unpack it by gunzip, because its samples are read at random positions" if compressed else f"is broken: {error}"
        )
        faults.add(f"{name}: {hint}" + (f", after {len(found)} samples" if found else ""))
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
