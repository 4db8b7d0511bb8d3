"""Images that worker processes read and transform one by one, whatever they lie in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lab.base.seeds import seeded
from lab.config.schema import PhotosConfig
from lab.data.batch import Batch
from lab.data.images.files import UNREADABLE, Faults, ImageFile, fault_in, fault_of, reason, unreadable
from lab.data.images.pixels import read_image
from lab.data.loading import WorkerLoader
from lab.data.samples import Annotations
from lab.data.sets import Norm, normalised
from lab.data.transforms import CustomTransform, Transform


@dataclass(kw_only=True)
class Samples:
    """Samples of a source of images, which are read one by one.

    Args:
        targets: classes (N,), several labels (N, C) or numbers (N, K).
        keys: name of each sample.
        positions: of the samples in the source; empty for all.
        channels: as data.channels.
        source: what holds the samples, for messages.
        notes: weights and groups, by position in the source; None for those of the settings.
    """

    targets: Tensor
    keys: list[str]
    positions: list[int] = field(default_factory=list)
    channels: int | None = None
    source: str | Path = "data"
    notes: Annotations | None = None

    def __post_init__(self) -> None:
        self.positions = self.positions or list(range(len(self.keys)))

    def __len__(self) -> int:
        return len(self.positions)

    def image(self, index: int) -> Image.Image | Tensor:
        """Return the image of a sample: in RGB of 8 bits, or with data.channels a tensor (C, H, W).

        Raises:
            UserError: it cannot be read.
        """
        raise NotImplementedError

    def only(self, kept: list[int]) -> Self:
        """Return the samples with these indices."""
        keys, positions = [self.keys[i] for i in kept], [self.positions[i] for i in kept]
        return replace(self, targets=self.targets[kept], keys=keys, positions=positions)


@dataclass(kw_only=True)
class Pictures(Samples):
    """Samples whose images are files, or lie in files as such. They are checked before a run."""

    def file(self, index: int) -> ImageFile:
        """Return the file of a sample's image, or its bytes.

        Raises:
            one of UNREADABLE.
        """
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Name a sample in messages, beginning with its file's path."""
        raise NotImplementedError

    def about(self) -> set[Path]:
        """Return the files or folders that change where an image does."""
        return set()

    def fault(self, index: int, check: str) -> str:
        """Return what is wrong with a sample's file, with its path; empty if nothing, and BOTH as in lab.data.images.exif."""
        try:
            file = self.file(index)
            said = fault_in(lambda: read_image(file, self.channels)) if self.channels else fault_of((file, None), check)
        except UNREADABLE as error:
            said = reason(error)
        hint = "; data.channels reads it as it is" if "8 bits a channel" in said else ""
        return said and f"{self.where(index)}: {said}{hint}"

    def image(self, index: int) -> Image.Image | Tensor:
        try:
            return read_image(self.file(index), self.channels)
        except UNREADABLE as error:
            raise unreadable(self.where(index), error) from None


@dataclass(kw_only=True)
class Files(Pictures):
    """Images in files of their own; files: those of the source."""

    files: list[str]

    def file(self, index: int) -> str:
        return self.files[self.positions[index]]

    where = file

    def about(self) -> set[Path]:
        return {Path(file).parent for file in self.files}


@dataclass(kw_only=True)
class Photos:
    """What a reader finds; lab.data.load.opened does the rest.

    Args:
        parts: samples of train and, where the source says so, of val and test.
        classes: names of the classes, or of the numbers.
        of: where the held-out images come from, in words, such as "of val.npz"; without a part val, where the training images do.
        faults: the folder of the images, and what cannot be used of the source, beside the images.
        test: the setting of a share of test images, and its value.
        notes: messages for the user.
    """

    parts: Mapping[str, Samples]
    classes: list[str]
    of: str
    faults: Faults = field(default_factory=lambda: Faults(Path()))
    test: tuple[str, float | None] = ("test", None)
    notes: list[str] = field(default_factory=list)


def untrained(parts: Mapping[str, Samples], classes: list[str]) -> str:
    """Return that no training image is of some classes that held-out images have, in words; empty if there are none."""

    def there(samples: Samples) -> set[int]:
        targets = samples.targets
        return set((targets if targets.ndim == 1 else (targets > 0).any(0).nonzero()[:, 0]).tolist())

    held = set().union(*map(there, parts.values()))
    names = [classes[number] for number in sorted(held - there(parts["train"]))]
    more = f", … ({len(names)} classes)" if len(names) > 10 else ""
    return f"no training image is of {', '.join(names[:10])}{more}, which held-out images have" if names else ""


class Images(Dataset[tuple[Tensor, Tensor, int]]):
    """Images by position and seed, so that augmentation does not depend on which process prepares the image."""

    def __init__(self, samples: Samples, transform: Transform) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        index, seed = sample
        with seeded(seed):
            return self.transform(self.samples.image(index)), self.samples.targets[index], index


TRIED = 8  # images by which the user's own transform is tried


def refuse_unfit_transform(images: Images) -> None:
    """Call the user's own transform with a few images, evenly spaced, so that an unsuitable one is refused before the run.

    Raises:
        UserError: it fails, or returns something else than an image of the model's size.
    """
    if isinstance(images.transform, CustomTransform):
        for index in range(0, len(images), -(-len(images) // TRIED)):
            images[index, 0]


class PhotoLoader(WorkerLoader):
    def __init__(
        self,
        samples: Samples,
        notes: Annotations,
        transform: Transform,
        config: PhotosConfig,
        norm: Norm,
        device: torch.device,
        seed: int | None = None,
        chances: Tensor | None = None,
    ) -> None:
        images = Images(samples, transform)
        refuse_unfit_transform(images)
        super().__init__(images, config, device, seed, chances=chances)
        self.keys, self.targets, self.notes = samples.keys, samples.targets, notes
        self.mean, self.std = norm.on(device)

    def __iter__(self) -> Iterator[Batch]:
        for images, target, index in self.epochs:
            weight = None if self.notes.weight is None else self._on_device(self.notes.weight[index])
            group = None if self.notes.group is None else self._on_device(self.notes.group[index])
            seen = self._on_device(images)
            if seen.dtype == torch.uint8:
                seen = normalised(seen, self.mean, self.std)
            yield Batch(seen, self._on_device(target), self._on_device(index), weight, group)

    def _on_device(self, value: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return value
        return (value if value.is_pinned() else value.pin_memory()).to(self.device, non_blocking=True)
