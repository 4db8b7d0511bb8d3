"""Detection data: COCO files read by worker processes, digit scenes among them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lab.config.detection_schema import CocoConfig, DetectionDataConfig, DigitScenesConfig
from lab.config.errors import UserError
from lab.config.settings import ROOT, absolute
from lab.data.coco import CocoImages, Collate, power_of_two
from lab.data.coco_file import CocoFile, read_coco
from lab.data.loading import WorkerLoader
from lab.data.sets import Loader, Norm
from lab.tasks.detection.augment import Prepare
from lab.tasks.detection.batch import DetectionBatch

# of ImageNet, where a model does not say
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class DetectionLoader(WorkerLoader):
    """Batches on the device; they travel as uint8 and are normalised there."""

    def __init__(
        self,
        file: CocoFile,
        config: DetectionDataConfig,
        fixed_size: list[int] | None,
        norm: tuple[Tensor, Tensor],
        device: torch.device,
        seed: int | None,
    ) -> None:
        fill = (norm[0] * 255).round().int().tolist()
        collate = Collate(fixed_size, config.divisor, fill, _boxes(file, config, fixed_size))
        super().__init__(CocoImages(file, Prepare(config, fixed_size, fill, train=seed is not None)), config, device, seed, collate)
        self.file = file
        self.mean, self.deviation = (value.view(1, 3, 1, 1).to(device) for value in norm)

    def __iter__(self) -> Iterator[DetectionBatch]:
        for batch in self.read():
            batch = batch.to(self.device, non_blocking=True)
            batch.images = (batch.images.float() / 255 - self.mean) / self.deviation
            yield batch

    def read(self) -> Iterator[DetectionBatch]:
        """Batches on the host, pixels as the files have them."""
        yield from self.epochs


class FileLoader(Loader, Protocol):
    """Batches of a COCO file's images."""

    file: CocoFile


@dataclass
class DetectionData:
    classes: list[str]
    category_ids: list[int]  # the COCO file's, by class
    norm: Norm
    train: FileLoader
    val: FileLoader
    counts: Tensor  # (C,) training boxes


def load_detection_data(
    config: DetectionDataConfig,
    fixed_size: list[int] | None,
    norm: dict[str, Any],
    device: torch.device,
    seed: int,
    loader: Callable[..., FileLoader] = DetectionLoader,
) -> DetectionData:
    """Open the data set a config names; digit scenes are drawn first if they are not there yet.

    Args:
        config: one of the schemas of lab.config.detection_schema.DETECTION_DATA.
        fixed_size: height and width of every batch; None pads a batch to its largest image.
        norm: mean and std that a pretrained model expects.
        device: where batches are wanted.
        seed: of the order and the augmentation.
        loader: what makes batches of it.

    Raises:
        UserError: a setting, a file or an entry of a file is wrong.
    """
    _check_sizes(config, fixed_size)
    train, val = (
        read_coco(path, folder, settings=settings, check=config.check, skip_corrupt=config.skip_corrupt)
        for path, folder, settings in _parts(config)
    )
    _refuse_different_categories(train, val)
    for file, setting in ((train, "data.train_annotations"), (val, "data.val_annotations")):
        if not len(file.labels):
            raise UserError(f"{setting}={file.path}: no image has a box.")
    mean, deviation = (torch.tensor(norm.get(key, default)) for key, default in (("mean", MEAN), ("std", DEVIATION)))
    return DetectionData(
        train.classes,
        train.category_ids,
        Norm(mean.tolist(), deviation.tolist()),
        loader(train, config, fixed_size, (mean, deviation), device, seed),
        loader(val, config, fixed_size, (mean, deviation), device, None),
        train.counts(),
    )


def size_of(config: DetectionDataConfig, fixed_size: list[int] | None) -> tuple[int, int]:
    """Height and width of a usual batch."""
    if fixed_size:
        return fixed_size[0], fixed_size[1]
    edge = config.shortest or (config.scene_pixels if isinstance(config, DigitScenesConfig) else 640)
    side = -(-edge // config.divisor) * config.divisor
    return side, side


def _parts(config: DetectionDataConfig) -> list[tuple[Path, Path, tuple[str, str]]]:
    """Annotation file, image folder and the settings that name them, of the training and the held-out images."""
    root = absolute(config.root, ROOT / "data")
    if isinstance(config, DigitScenesConfig):
        from lab.data.scenes import PARTS, scenes_folder

        folder = scenes_folder(config, root / "digit_scenes")
        return [(folder / f"instances_{part}.json", folder / "images", ("data.root", "data.root")) for part in PARTS]
    coco = cast(CocoConfig, config)
    if not root.is_dir():
        raise UserError(f"data.root={root}: there is no such folder.")
    return [
        (root / coco.train_annotations, root / coco.train_images, ("data.train_annotations", "data.train_images")),
        (root / coco.val_annotations, root / coco.val_images, ("data.val_annotations", "data.val_images")),
    ]


def _check_sizes(config: DetectionDataConfig, fixed_size: list[int] | None) -> None:
    if len(config.scale) != 2 or config.scale[0] > config.scale[1]:
        raise UserError(f"data.scale={config.scale}: the smallest and the largest factor are expected.")
    if fixed_size is None:
        return
    if len(fixed_size) != 2:
        raise UserError(f"model.fixed_size={fixed_size}: height and width are expected.")
    if any(edge % config.divisor for edge in fixed_size):
        raise UserError(f"model.fixed_size={fixed_size}: multiples of data.divisor={config.divisor} are expected.")


def _boxes(file: CocoFile, config: DetectionDataConfig, fixed_size: list[int] | None) -> int | None:
    """K of all batches, where it is to be the same."""
    most, image_id = file.most_boxes()
    if config.max_boxes is not None and most > config.max_boxes:
        raise UserError(f"data.max_boxes={config.max_boxes}: image {image_id} of {file.path} has {most} boxes.")
    return config.max_boxes or (power_of_two(most) if fixed_size else None)


def _refuse_different_categories(train: CocoFile, val: CocoFile) -> None:
    ours, others = (set(zip(file.category_ids, file.classes, strict=True)) for file in (train, val))
    if ours != others:
        odd = ", ".join(f"{category_id} {name!r}" for category_id, name in sorted(ours ^ others)[:10])
        raise UserError(f"{train.path} and {val.path} have different categories; in one of them only: {odd}.")
