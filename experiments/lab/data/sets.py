"""Data sets and their splits; data sets that are held in the device's memory: digits, MNIST, CIFAR."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.base.errors import UserError
from lab.base.formats import LONGEST_CLASS
from lab.base.paths import ROOT, absolute
from lab.base.seeds import seed_of
from lab.config.schema import DataConfig, DownloadedConfig, SplitConfig
from lab.data.batch import Batch
from lab.data.loading import Shares, order_of
from lab.data.samples import Annotations
from lab.data.split import held_out_by, split
from lab.processes import distributed


class Loader(Protocol):
    """Batches of one task, on the device."""

    samples: int
    keys: list[str]  # the name of each sample, by its position

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration begin at this epoch's batch number `batch`; without this call, the next epoch follows.

        An epoch's order and augmentation depend only on the seed and the epoch's number.
        """


class Chained:
    """The batches of several loaders, one after the other, with the positions and the keys of all."""

    def __init__(self, loaders: list[Any]) -> None:
        self.loaders = loaders
        self.samples = sum(loader.samples for loader in loaders)
        self.keys = [key for loader in loaders for key in loader.keys]
        if all(hasattr(loader, "size") for loader in loaders):  # of masks' files
            self.size = lambda position: next(loader.size(at) for loader, at in self._places(position))

    def _places(self, position: int) -> Iterator[tuple[Any, int]]:
        for loader in self.loaders:
            if 0 <= position < len(loader.keys):
                yield loader, position
            position -= len(loader.keys)

    def __iter__(self) -> Iterator[Any]:
        before = 0
        for loader in self.loaders:
            for batch in loader:
                batch.index = batch.index + before
                yield batch
            before += len(loader.keys)


@dataclass
class Norm:
    """Mean and standard deviation of each channel, which normalise pixels from 0 to 1."""

    mean: list[float]
    std: list[float]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return both as tensors (C, 1, 1)."""
        mean, std = (torch.tensor(each, device=device).view(-1, 1, 1) for each in (self.mean, self.std))
        return mean, std


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images (N, C, H, W), uint8 or from 0 to 1, less the mean and divided by the standard deviation, (C, 1, 1).

    They have the same bits on every device: by a number, a GPU would multiply by its rounded reciprocal.
    """
    if images.dtype != torch.uint8:
        return (images - mean) / std
    return (images / torch.full((), 255.0, device=images.device)).sub_(mean).div_(std)


@dataclass
class Data:
    """The data of a task, as the trainer reads it.

    train: the training samples. val: the held-out samples, evaluated after each epoch. test: the test samples, scored once at the end.
    """

    classes: list[str]  # in the order of their indices
    channels: int
    norm: Norm  # normalises the images
    train: Loader
    val: Loader
    groups: int = 0  # 0 where the data has no groups
    counts: Tensor = field(default_factory=lambda: torch.zeros(0))  # (C,) training samples, or boxes
    test: Loader | None = None
    held_out: str = ""  # which images are held out, in words
    plain: Callable[[], Loader] | None = None  # makes a loader of the training samples in order, without augmentation
    notes: list[str] = field(default_factory=list)  # messages about the data, for the user

    def __post_init__(self) -> None:
        for name in self.classes:
            if len(name) > LONGEST_CLASS:
                raise UserError(f"class {name[:40]!r}…: its name has {len(name):,} characters; at most {LONGEST_CLASS:,} are taken.")
            try:
                name.encode()
            except UnicodeEncodeError:
                raise UserError(f"class {name!r}: its name is not UTF-8, so it cannot be written; rename the class in the data.") from None

    def identity(self, part: str) -> str:
        """Return what identifies the samples of train, val or test, wherever they lie: a digest of their names, targets and classes."""
        loader: Any = getattr(self, part)
        held = getattr(loader, "file", loader)  # of boxes, whose keys are whole paths
        names = list(loader.keys) if held is loader else [Path(key).name for key in loader.keys]
        digest = hashlib.sha256(json.dumps([self.classes, names]).encode())
        for name in ("image_ids", "boxes", "labels", "targets"):
            value = getattr(held, name, None)
            if isinstance(value, Tensor):
                digest.update(value.detach().cpu().contiguous().numpy().tobytes())
            elif isinstance(value, list):
                digest.update(json.dumps(value).encode())
        return digest.hexdigest()


@dataclass
class Split:
    images: Tensor  # (N, C, H, W), uint8 or float
    targets: Tensor  # (N,) classes, or (N, K) numbers
    keys: list[str]
    notes: Annotations = field(default_factory=Annotations)

    def only(self, positions: list[int]) -> "Split":
        return Split(self.images[positions], self.targets[positions], [self.keys[i] for i in positions])

    def of_classes(self, kept: list[int]) -> "Split":
        """Return the images of the classes `kept`, which are numbered anew."""
        chosen = self.targets[:, None] == torch.tensor(kept)  # (N, kept)
        found = self.only(chosen.any(1).nonzero()[:, 0].tolist())
        return Split(found.images, chosen[chosen.any(1)].long().argmax(1), found.keys)


@dataclass
class Splits:
    """The images of a data set; `held_out` says in words which ones are held out."""

    classes: list[str]
    train: Split
    val: Split
    test: Split | None
    held_out: str

    def mapped(self, function: Callable[[Split, int], Split]) -> "Splits":
        """Return the splits as a function of each and its number returns them: 0 for train, 1 for val and 2 for test."""
        return replace(self, train=function(self.train, 0), val=function(self.val, 1), test=self.test and function(self.test, 2))

    def of_classes(self, kept: list[int]) -> "Splits":
        """Return the images of the classes `kept`, which are numbered anew; which images are held out stays."""
        return replace(self.mapped(lambda part, _: part.of_classes(kept)), classes=[self.classes[i] for i in kept])

    def resized(self, size: int) -> "Splits":
        return self.mapped(lambda part, _: replace(part, images=resize_all(part.images, size)))


class MemoryLoader:
    """Batches of images that are held on the device; only one permutation an epoch is copied from the host.

    Several batches are made at once, because small batches cost the host more time than the device.
    """

    TOGETHER, ELEMENTS = 16, 2**24  # most batches made at once, and most elements of them

    def __init__(self, split: Split, notes: Annotations, batch_size: int, device: torch.device, norm: Norm) -> None:
        self.images, self.targets = split.images.to(device), split.targets.to(device)
        self.weight = None if notes.weight is None else notes.weight.to(device)
        self.group = None if notes.group is None else notes.group.to(device)
        self.mean, self.std = norm.on(device)
        self.device, self.samples, self.keys = device, len(self.targets), split.keys
        self.shares = Shares(self.samples, batch_size)
        self.augment: Any = None
        self.seed: int | None = None
        self.chances: Tensor | None = None
        self.kept: tuple[int, list[Batch]] = 0, []  # the first epoch's number, and the batches of several short epochs
        self.begin(1)

    def shuffled(self, seed: int, augment: Any, chances: Tensor | None = None) -> "MemoryLoader":
        self.seed, self.augment, self.chances, self.kept = seed, augment, chances, (0, [])
        return self

    def begin(self, epoch: int, batch: int = 0) -> None:
        self.epoch, self.batch = epoch, batch

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = self.epoch, self.batch
        self.begin(epoch + 1)
        largest = -(-max(self.shares.sizes) // self.shares.ranks)
        together = max(1, min(self.TOGETHER, self.ELEMENTS // (largest * self.images[0].numel())))
        epochs = 1 if self.seed is None else max(1, together // len(self))
        if epochs > 1:
            block = (epoch - 1) // epochs * epochs + 1
            if self.kept[0] != block:
                several = [index for number in range(block, block + epochs) for index in self._shares(number)]
                self.kept = block, self._made(several, block, 0)
            start = (epoch - block) * len(self)
            yield from self.kept[1][start + first : start + len(self)]
            return
        batches = self._shares(epoch)
        for start in range(first // together * together, len(batches), together):
            made = self._made(batches[start : start + together], epoch, start)
            yield from made[max(first - start, 0) :]

    def _made(self, group: list[Tensor], epoch: int, start: int) -> list[Batch]:
        """Make a batch for each index tensor; the first is batch `start` of the epoch."""
        every, sizes = torch.cat(group), [len(index) for index in group]
        images = normalised(self.images[every], self.mean, self.std)
        if self.augment is not None and self.seed is not None:
            noise = torch.Generator(self.device).manual_seed(distributed.own_seed(seed_of(self.seed, epoch, start)))
            images = self.augment(images, noise)
        others = (None if values is None else values[every] for values in (self.targets, self.weight, self.group))
        parts = [[None] * len(group) if t is None else t.split(sizes) for t in (images, *others)]
        return [Batch(part, target, index, *notes) for index, part, target, *notes in zip(group, *parts, strict=True)]

    def _shares(self, epoch: int) -> list[Tensor]:
        return self.shares.of(self._order(epoch))

    def _order(self, epoch: int) -> Tensor:
        if self.seed is None:
            return torch.arange(self.samples, device=self.device)
        order = order_of(self.samples, self.chances, torch.Generator().manual_seed(seed_of(self.seed, epoch)))
        return order.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else order


def memory_data(
    known: Splits,
    config: DataConfig,
    norm: Norm,
    device: torch.device,
    seed: int,
    *,
    loader: Callable[..., MemoryLoader] = MemoryLoader,
    augment: Any = None,
    chances: Tensor | None = None,
    counts: Tensor | None = None,
) -> Data:
    """Return the data of splits that are held on the device.

    Args:
        known: the splits.
        config: batch sizes, and whether training images are changed.
        norm: normalises the images.
        device: the device of the batches.
        seed: the seed of order and augmentation.
        loader: makes the batches of a split.
        augment: changes training images.
        chances: of the training samples to be drawn; None for each once.
        counts: the training samples of each class (C,); None where nothing asks for them.
    """
    splits = [split for split in (known.train, known.val, known.test) if split]
    make = partial(loader, device=device, norm=norm)
    plain, val, *test = (partial(make, split, split.notes, config.eval_batch_size) for split in splits)
    return Data(
        known.classes,
        len(norm.mean),
        norm,
        make(known.train, known.train.notes, config.batch_size).shuffled(seed, augment if config.augment else None, chances),
        val(),
        count_groups(*(split.notes for split in splits)),
        torch.zeros(0) if counts is None else counts,
        test[0]() if test else None,
        known.held_out,
        plain,
    )


def norm_of(images: Tensor, saved: Norm | None) -> Norm:
    """Return mean and standard deviation of a saved model, else of training images (N, C, H, W), uint8 or from 0 to 1.

    Raises:
        UserError: the saved model takes another number of channels.
    """
    if saved:
        check_channels(saved, images.shape[1])
        return saved
    scaled = images.float() / 255 if images.dtype == torch.uint8 else images
    return Norm(scaled.mean(dim=(0, 2, 3)).tolist(), scaled.std(dim=(0, 2, 3)).tolist())


def check_channels(saved: Norm, channels: int) -> None:
    """Raise UserError unless the saved model takes this number of channels."""
    if len(saved.mean) != channels:
        raise UserError(f"data: its images have {channels} channels; the model takes {len(saved.mean)}.")


def count_groups(*notes: Annotations) -> int:
    return max((int(each.group.max()) + 1 for each in notes if each.group is not None and len(each.group)), default=0)


def resize_all(images: Tensor, size: int) -> Tensor:
    if images.shape[-2:] == (size, size):
        return images
    parts = [F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True) for part in images.split(4096)]
    scaled = torch.cat(parts)
    return scaled.round().clamp(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else scaled


def digits(config: SplitConfig) -> Splits:
    """Return scikit-learn's handwritten digits; config: says what is held out, and in `test` which share is for testing."""
    from sklearn.datasets import load_digits

    known = load_digits()
    images = torch.tensor(known.images, dtype=torch.float32)[:, None] / 16
    everything = Split(images, torch.tensor(known.target, dtype=torch.int64), [str(i) for i in range(len(images))])
    names, share = [str(i) for i in range(10)], getattr(config, "test", None)
    train, val, test = (everything.only(part) for part in split(config, known.target.tolist(), names, share))
    return Splits(names, train, val, test if share else None, f"of the digits, {held_out_by(config)}")


def downloaded(config: DownloadedConfig) -> Splits:
    """Return MNIST or CIFAR, by torchvision."""
    import socket

    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[config.name]
    archive = {
        "mnist": "MNIST/raw/ with the four *-ubyte.gz files (train and t10k, images and labels)",
        "cifar10": "cifar-10-python.tar.gz, or cifar-10-batches-py/ unpacked from it",
        "cifar100": "cifar-100-python.tar.gz, or cifar-100-python/ unpacked from it",
    }[config.name]
    root = absolute(config.root, ROOT / "data")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)
    try:
        sets = [kind(str(root), train=train, download=config.download) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"data={config.name}: not found under data.root={root}, and "
            + (f"could not be downloaded ({reason})." if config.download else "data.download=false.")
            + f"\nPut there: {archive}; or set data.root to the folder that has it."
        ) from None
    finally:
        socket.setdefaulttimeout(before)
    splits = []
    for part in sets:
        pixels = torch.as_tensor(part.data)
        images = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        targets = torch.as_tensor(part.targets, dtype=torch.int64)
        splits.append(Split(images.contiguous(), targets, [str(i) for i in range(len(targets))]))
    names, (train, own) = [str(name) for name in sets[0].classes], splits
    if not config.test and config.fold is None:
        return Splits(names, train, own, None, "the set's own test images")
    parts = split(config, train.targets.tolist(), names)
    return Splits(
        names, train.only(parts[0]), train.only(parts[1]), own if config.test else None, f"of the training images, {held_out_by(config)}"
    )


def existing_folder(setting: str, path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{setting}={path}: no such folder.")
    return path
