"""ImageFolder data: train/ and val/ with one folder a class, read and transformed by worker processes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lab.config.errors import UserError
from lab.config.schema import FolderConfig
from lab.config.settings import ROOT, absolute
from lab.data.batch import Batch
from lab.data.images import UNREADABLE, Faults, as_seen, corrupt, unreadable
from lab.data.loading import WorkerLoader
from lab.data.samples import Annotations, annotate
from lab.data.seeds import seeded
from lab.data.sets import Data, Norm, count_groups, readable_folder


class Images(Dataset[tuple[Tensor, int, int]]):
    """A sample is asked for by its position and a seed, so that its augmentation does not depend on which process prepares it."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, int, int]:
        index, seed = place
        with seeded(seed):
            image, target = self.folder[index]
        return image, target, index


class FolderLoader(WorkerLoader):
    def __init__(self, folder: Any, notes: Annotations, config: FolderConfig, device: torch.device, seed: int | None) -> None:
        super().__init__(Images(folder), config, device, seed)
        self.notes = notes

    def __iter__(self) -> Iterator[Batch]:
        for images, target, index in self.epochs:
            weight = None if self.notes.weight is None else self._on_device(self.notes.weight[index])
            group = None if self.notes.group is None else self._on_device(self.notes.group[index])
            yield Batch(self._on_device(images), self._on_device(target), self._on_device(index), weight, group)

    def _on_device(self, value: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return value
        return (value if value.is_pinned() else value.pin_memory()).to(self.device, non_blocking=True)


def folder_data(config: FolderConfig, model_norm: dict[str, Any], device: torch.device, seed: int) -> Data:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    root = readable_folder("data.root", absolute(config.root, ROOT / "data"))
    size = (3, config.image_size, config.image_size)
    look: dict[str, Any] = {key: model_norm[key] for key in ("mean", "std", "interpolation") if key in model_norm}
    augmented: dict[str, Any] = {
        "is_training": True,
        "color_jitter": config.color_jitter or None,
        "auto_augment": config.auto_augment,
        "scale": (config.crop_scale, 1.0),
        "hflip": config.horizontal_flip,
        "re_prob": config.random_erase,
    }
    train = _folder("data.train", root / config.train, _transform(config, size, look | (augmented if config.augment else {})))
    val = _folder("data.val", root / config.val, _transform(config, size, look))
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(f"data.train and data.val hold different classes: {', '.join(odd[:10])} in one of them only.")
    _leave_out_corrupt(root, (train, val), config)
    notes, val_notes = (
        annotate(
            config,
            torch.tensor(part.targets),
            train.classes,
            [os.path.relpath(path, root).replace(os.sep, "/") for path, _ in part.samples],
            needed=part is train,
        )
        for part in (train, val)
    )
    return Data(
        list(train.classes),
        3,
        Norm(list(look.get("mean", IMAGENET_DEFAULT_MEAN)), list(look.get("std", IMAGENET_DEFAULT_STD))),
        FolderLoader(train, notes, config, device, seed),
        FolderLoader(val, val_notes, config, device, None),
        count_groups(notes, val_notes),
        torch.bincount(torch.tensor(train.targets), minlength=len(train.classes)),
    )


def _transform(config: FolderConfig, size: tuple[int, int, int], options: dict[str, Any]) -> Any:
    from timm.data import create_transform

    try:
        return create_transform(size, **options)
    except (AssertionError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"data.auto_augment={config.auto_augment}: timm knows no such policy ({error or type(error).__name__}); "
            "rand-m9-mstd0.5, augmix-m5-w4-d2, original, v0 and 3a are some."
        ) from None


def _folder(setting: str, path: Path, transform: Any) -> Any:
    from torchvision.datasets import ImageFolder

    try:
        return ImageFolder(str(readable_folder(setting, path)), transform, loader=_read)
    except FileNotFoundError as error:
        raise UserError(f"{setting}={path}: one folder of images per class is expected. {error}") from None


def _read(path: str) -> Image.Image:
    try:
        return as_seen(path)
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def _leave_out_corrupt(root: Path, folders: tuple[Any, Any], config: FolderConfig) -> None:
    """Look at the images of both parts and judge them together.

    Raises:
        UserError: some cannot be used and are not to be skipped, or none is left.
    """
    paths = [path for folder in folders for path, _ in folder.samples]
    about = sorted({Path(path).parent for path in paths})
    wrong = corrupt({number: (path, None) for number, path in enumerate(paths)}, about, config.check)
    faults = Faults(root)
    for number, said in wrong.items():
        faults.add(f"{os.path.relpath(paths[number], root)}: {said}")
    faults.judge(config.skip_corrupt)
    left_out = {paths[number] for number in wrong}
    for folder in folders:
        folder.samples = folder.imgs = [sample for sample in folder.samples if sample[0] not in left_out]
        folder.targets = [target for _, target in folder.samples]
        if not folder.samples:
            raise UserError(f"{folder.root}: has no image to use.")
