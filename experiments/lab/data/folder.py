"""Images in one folder a class, read and transformed by worker processes."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lab.config.errors import UserError
from lab.config.schema import FolderConfig, PhotosConfig
from lab.config.settings import ROOT, absolute
from lab.data.batch import Batch
from lab.data.images import UNREADABLE, Faults, find_corrupt, hidden, read_rgb, unreadable
from lab.data.loading import WorkerLoader
from lab.data.samples import Annotations, annotate
from lab.data.seeds import seeded
from lab.data.sets import Data, Norm, count_groups, existing_folder
from lab.data.split import held_out_by, split

Transform = Callable[[Image.Image], Tensor]


@dataclass
class Files:
    """Paths of images with their classes."""

    folder: Path
    classes: list[str]
    paths: list[str]
    targets: list[int]

    def only(self, positions: Iterable[int]) -> "Files":
        kept = list(positions)
        return Files(self.folder, self.classes, [self.paths[i] for i in kept], [self.targets[i] for i in kept])

    def image(self, index: int) -> Image.Image:
        try:
            return read_rgb(self.paths[index])
        except UNREADABLE as error:
            raise unreadable(self.paths[index], error) from None


class Samples(Protocol):
    """Images of one class each, which are read one by one."""

    @property
    def classes(self) -> list[str]: ...

    @property
    def targets(self) -> list[int]: ...

    def image(self, index: int) -> Image.Image: ...

    def only(self, positions: Iterable[int]) -> "Samples": ...


class Images(Dataset[tuple[Tensor, int, int]]):
    """A sample is asked for by its position and a seed, so that its augmentation does not depend on which process prepares it."""

    def __init__(self, samples: Samples, transform: Transform) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples.targets)

    def __getitem__(self, sample: tuple[int, int]) -> tuple[Tensor, int, int]:
        index, seed = sample
        image = self.samples.image(index)
        with seeded(seed):
            return self.transform(image), self.samples.targets[index], index


class FolderLoader(WorkerLoader):
    def __init__(
        self,
        samples: Samples,
        keys: list[str],
        notes: Annotations,
        transform: Transform,
        config: PhotosConfig,
        device: torch.device,
        seed: int | None = None,
    ) -> None:
        super().__init__(Images(samples, transform), config, device, seed)
        self.keys, self.notes = keys, notes

    def __iter__(self) -> Iterator[Batch]:
        for images, target, index in self.epochs:
            weight = None if self.notes.weight is None else self._on_device(self.notes.weight[index])
            group = None if self.notes.group is None else self._on_device(self.notes.group[index])
            yield Batch(self._on_device(images), self._on_device(target), self._on_device(index), weight, group)

    def _on_device(self, value: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return value
        return (value if value.is_pinned() else value.pin_memory()).to(self.device, non_blocking=True)


def folder_data(config: FolderConfig, norm: Norm, device: torch.device, seed: int) -> Data:
    """Open the folders of a data set.

    Raises:
        UserError: a folder, an image or a setting is wrong.
    """
    root = existing_folder("data.root", absolute(config.root, ROOT / "data"))
    found = {name: _files(f"data.{name}", path) for name, path in _folders(root, config).items()}
    for name, files in found.items():
        if odd := sorted(set(found["train"].classes) ^ set(files.classes)):
            raise UserError(f"data.train and data.{name} hold different classes: {', '.join(odd[:10])} in one of them only.")
    found = dict(zip(found, _without_corrupt(root, list(found.values()), config), strict=True))
    held_out = f"of {found['val'].folder.name}/" if "val" in found else f"of {found['train'].folder.name}/, {held_out_by(config)}"
    if "val" not in found:
        train, val, _ = split(config, found["train"].targets, found["train"].classes)
        found |= {"train": found["train"].only(train), "val": found["train"].only(val)}
    keys = {name: [os.path.relpath(path, root).replace(os.sep, "/") for path in files.paths] for name, files in found.items()}
    return photos_data(found, keys, held_out, config, norm, device, seed)


def photos_data(
    found: Mapping[str, Samples],
    keys: Mapping[str, list[str]],
    held_out: str,
    config: PhotosConfig,
    norm: Norm,
    device: torch.device,
    seed: int,
) -> Data:
    """The data of samples that are read and transformed by workers.

    Args:
        found: train, val and perhaps test.
        keys: what each of their samples is called.
        held_out: in words, which ones are.
    """
    classes, seen, parts = found["train"].classes, held_out_transform(config, norm), {}
    for name, samples in found.items():
        notes = annotate(config, torch.tensor(samples.targets), classes, keys[name], needed=name == "train")
        parts[name] = samples, keys[name], notes
    evaluated = {name: FolderLoader(*part, seen, config, device) for name, part in parts.items() if name != "train"}
    return Data(
        classes,
        3,
        norm,
        FolderLoader(*parts["train"], _train_transform(config, norm) if config.augment else seen, config, device, seed),
        evaluated["val"],
        count_groups(*(notes for _, _, notes in parts.values())),
        torch.bincount(torch.tensor(found["train"].targets), minlength=len(classes)),
        evaluated.get("test"),
        held_out,
        lambda: FolderLoader(*parts["train"], seen, config, device),
    )


def held_out_transform(config: PhotosConfig, norm: Norm) -> Transform:
    """From an image in RGB to what the model sees of it, without augmentation: (3, H, W), normalised."""
    return _transform(config, norm, crop_pct=config.crop_pct, crop_mode=config.crop_mode)


def _train_transform(config: PhotosConfig, norm: Norm) -> Transform:
    scale, erase = (config.crop_scale, 1.0), config.random_erase
    augmented = {"auto_augment": config.auto_augment, "scale": scale, "hflip": config.horizontal_flip, "re_prob": erase}
    try:
        return _transform(config, norm, is_training=True, color_jitter=config.color_jitter or None, **augmented)
    except (AssertionError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"data.auto_augment={config.auto_augment}: timm knows no such policy ({error or type(error).__name__}); "
            "rand-m9-mstd0.5, augmix-m5-w4-d2, original, v0 and 3a are some."
        ) from None


def _transform(config: PhotosConfig, norm: Norm, **options: Any) -> Transform:
    from timm.data import create_transform

    size: Any = (3, config.image_size, config.image_size)
    look: dict[str, Any] = {"mean": tuple(norm.mean), "std": tuple(norm.std), "interpolation": config.interpolation}
    made = create_transform(size, **look, **options)
    return cast(Transform, made)


def _folders(root: Path, config: FolderConfig) -> dict[str, Path]:
    """The folder of each part; without one of held-out images, these are to be taken from the training images.

    Raises:
        UserError: two parts have the same folder, there are both held-out images and a fold, or a share stands for the test folder.
    """
    val = config.val or ("val" if (root / "val").is_dir() else None)
    given = {"train": config.train, "val": val, "test": config.test}
    if config.fold is not None and val:
        raise UserError(f"data.fold={config.fold}: divides the images of data.train, but data.root={root} has held-out images in {val}/.")
    if config.test and config.test.replace(".", "", 1).isdecimal() and not (root / config.test).is_dir():
        raise UserError(f"data.test={config.test}: a folder in data.root is expected; only sets held in memory take a share.")
    folders = {name: root / folder for name, folder in given.items() if folder}
    for name, folder in folders.items():
        same = next(other for other in folders if folders[other].resolve() == folder.resolve())
        if same != name:
            raise UserError(f"data.{name}={given[name]}: is data.{same}, too; images that nothing else uses are expected.")
    return folders


def _files(setting: str, path: Path) -> Files:
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import is_image_file

    class Seen(ImageFolder):
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            classes = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
            return classes, {name: number for number, name in enumerate(classes)}

    try:
        found = Seen(str(existing_folder(setting, path)), is_valid_file=lambda file: is_image_file(file) and not hidden(Path(file), path))
    except FileNotFoundError as error:
        raise UserError(f"{setting}={path}: one folder of images per class is expected. {error}") from None
    return Files(path, list(found.classes), [name for name, _ in found.samples], list(found.targets))


def _without_corrupt(root: Path, parts: list[Files], config: FolderConfig) -> list[Files]:
    """The files of all parts that can be used, judged together.

    Raises:
        UserError: some cannot be used and are not to be skipped, or none is left of a part.
    """
    paths = [path for files in parts for path in files.paths]
    about = sorted({Path(path).parent for path in paths})
    wrong = find_corrupt({number: (path, None) for number, path in enumerate(paths)}, about, config.check)
    faults = Faults(root)
    for number, said in wrong.items():
        faults.add(f"{os.path.relpath(paths[number], root)}: {said}")
    faults.raise_or_report(config.skip_corrupt)
    left_out = {paths[number] for number in wrong}
    kept = [files.only(i for i, path in enumerate(files.paths) if path not in left_out) for files in parts]
    for files in kept:
        if not files.paths:
            raise UserError(f"{files.folder}: has no image to use.")
    return kept
