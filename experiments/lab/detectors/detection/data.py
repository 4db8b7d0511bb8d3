"""Detection data: COCO files read by worker processes, including digit scenes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import resize

from lab.base.errors import UserError
from lab.base.paths import ROOT, absolute
from lab.base.seeds import seeded
from lab.config.schema import AUTO
from lab.data.fitting import ENLARGED, fit, median_size
from lab.data.images.files import Names
from lab.data.images.pixels import dark_note
from lab.data.loading import WorkerLoader
from lab.data.rle import decoded
from lab.data.sets import Data, Loader, Norm, normalised
from lab.data.split import held_out_by
from lab.detectors.annotations.coco_file import CocoFile, read_coco
from lab.detectors.annotations.layouts import read_boxes
from lab.detectors.detection.augment import Prepare, Prepared, fitted, mosaic
from lab.detectors.detection.boxes import turned_boxes
from lab.detectors.detection.types import MASK_STRIDE, DetectionBatch
from lab.detectors.scenes import PARTS, scenes_folder
from lab.detectors.schema import BoxesConfig, CocoConfig, DetectionDataConfig, DigitScenesConfig


@dataclass
class Sample:
    image: Tensor  # (3, H, W) uint8
    boxes: Tensor  # (B, 4) xyxy in pixels of `image`
    labels: Tensor  # (B,)
    original: tuple[int, int]  # height, width of the file
    index: int
    image_id: int
    seed: int = 0
    masks: Tensor | None = None  # (B, H / MASK_STRIDE, W / MASK_STRIDE) uint8, as `covered` returns them
    turned: Tensor | None = None  # (B, 5) oriented boxes, as `turned_boxes` returns them


class CocoImages(Dataset[Sample]):
    """Prepared samples of a COCO file, without crowds, by place in `order` and seed.

    The seed makes a sample's augmentation independent of the process that prepares it. order: positions in the file.
    """

    def __init__(self, file: CocoFile, prepare: Prepare, order: Sequence[int]) -> None:
        self.file, self.prepare, self.order = file, prepare, order

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, sample: tuple[int, int]) -> Sample:
        place, seed = sample
        position = self.order[place]
        share = self.prepare.config.mosaic if self.prepare.augment else 0.0
        with seeded(seed):
            if share and float(torch.rand(())) < share:
                others = torch.randint(len(self), (3,)).tolist()
                parts = [self._prepared(each) for each in (position, *others)]
                image, corners, labels, masks, points = mosaic(parts, self.prepare.fill, self.prepare.config.min_visible)
            else:
                image, corners, labels, masks, points = self._prepared(position)
        covered_cells = None if masks is None else covered(masks)
        shapes = covered_cells, None if points is None else turned_boxes(points)
        return Sample(image, corners, labels, self.file.sizes[position], position, self.file.image_ids[position], seed, *shapes)

    def _prepared(self, position: int) -> Prepared:
        file = self.file
        pixels = tv_tensors.Image(torch.from_numpy(np.array(file.open(position))).permute(2, 0, 1))
        single = ~file.crowd[file.rows(position)]
        boxes, labels = file.boxes[file.rows(position)][single], file.labels[file.rows(position)][single]
        corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1).float()
        if file.masks is None:
            points = None if file.corners is None else file.corners[file.rows(position)][single].float()
            return self.prepare(pixels, corners, labels, corners=points)
        rles = [mask for mask, one in zip(file.masks[file.rows(position)], single.tolist(), strict=True) if one]
        return self.prepare(pixels, corners, labels, torch.from_numpy(decoded(rles, file.sizes[position])))


def covered(masks: Tensor) -> Tensor:
    """Return how much of each cell of MASK_STRIDE pixels a side is covered by masks (B, H, W): 0 to 255, uint8."""
    rows, columns = (-side % MASK_STRIDE for side in masks.shape[-2:])
    padded = F.pad(masks, (0, columns, 0, rows)).float()[:, None]
    return (F.avg_pool2d(padded, MASK_STRIDE)[:, 0] * 255).round().byte()


class Collate:
    """Collect images in one padded tensor of uint8.

    Args:
        fixed_size: height and width of every batch; None pads to the batch's largest image.
        divisor: the padded height and width are multiples of this.
        fill: (3,) colour of the padding.
        boxes: K of every batch; None takes the next power of two, at least 8.
        scale: range of a factor of a batch's size, drawn by the first image's seed.
    """

    def __init__(
        self, fixed_size: list[int] | None, divisor: int, fill: list[int], boxes: int | None, scale: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self.fixed_size, self.divisor, self.boxes, self.scale = fixed_size, divisor, boxes, scale
        self.fill = torch.tensor(fill, dtype=torch.uint8).view(3, 1, 1)

    def __call__(self, samples: list[Sample]) -> DetectionBatch:
        sizes = torch.tensor([sample.image.shape[-2:] for sample in samples])
        height, width = self.fixed_size or (-(-sizes.amax(0) // self.divisor) * self.divisor).tolist()
        most = self.boxes or power_of_two(max(len(sample.labels) for sample in samples))
        images = self.fill.repeat(len(samples), 1, height, width)
        boxes, labels = torch.zeros(len(samples), most, 4), torch.full((len(samples), most), -1)
        masks = None
        turned = None if samples[0].turned is None else torch.zeros(len(samples), most, 5)
        if samples[0].masks is not None:
            masks = torch.zeros(len(samples), most, height // MASK_STRIDE, width // MASK_STRIDE, dtype=torch.uint8)
        for row, sample in enumerate(samples):
            images[row, :, : sizes[row, 0], : sizes[row, 1]] = sample.image
            boxes[row, : len(sample.boxes)] = sample.boxes
            labels[row, : len(sample.labels)] = sample.labels
            if turned is not None and (points := sample.turned) is not None:
                turned[row, : len(points)] = points
            if masks is not None and (own := sample.masks) is not None:
                masks[row, : len(own), : own.shape[1], : own.shape[2]] = own
        low, high = self.scale
        if high > low or low != 1:
            with seeded(samples[0].seed):
                factor = low + (high - low) * float(torch.rand(()))
            size = [max(1, round(side * factor / self.divisor)) * self.divisor for side in (height, width)]
            images = resize(images, size, antialias=True)
            if masks is not None:
                masks = resize(masks, [side // MASK_STRIDE for side in size], antialias=True)
            ratio = torch.tensor([size[0] / height, size[1] / width])
            if turned is not None:  # both sides have nearly one factor
                turned = turned * torch.cat([ratio.flip(0), ratio.mean()[None].expand(2), torch.ones(1)])
            boxes, sizes = boxes * ratio.flip(0).repeat(2), (sizes * ratio).round().long()
        return DetectionBatch(
            images,
            boxes,
            labels,
            sizes,
            torch.tensor([sample.original for sample in samples]),
            torch.tensor([sample.index for sample in samples]),
            torch.tensor([sample.image_id for sample in samples]),
            masks=masks,
            turned=turned,
        )


def power_of_two(count: int, least: int = 8) -> int:
    return max(least, 1 << (count - 1).bit_length()) if count else least


class DetectionLoader(WorkerLoader):
    """Batches on the device; they are copied as uint8 and normalised there."""

    def __init__(
        self,
        file: CocoFile,
        config: DetectionDataConfig,
        fixed_size: list[int] | None,
        norm: Norm,
        device: torch.device,
        seed: int | None,
    ) -> None:
        fill = [round(value * 255) for value in norm.mean]
        train = seed is not None and config.augment
        low, high = config.batch_scale if train else (1.0, 1.0)
        rect = config.rect and seed is None
        canvas, order = (None, by_proportions(file.sizes)) if rect else (fixed_size, range(len(file)))
        collate = Collate(canvas, config.divisor, fill, _boxes(file, config, canvas), (low, high))
        images = CocoImages(file, Prepare(config, fixed_size, fill, train=seed is not None), order)
        super().__init__(images, config, device, seed, collate)
        self.file, self.keys = file, file.files
        self.mean, self.std = norm.on(device)

    def __iter__(self) -> Iterator[DetectionBatch]:
        for batch in self.read():
            batch = batch.to(self.device, non_blocking=True)
            batch.images = normalised(batch.images, self.mean, self.std)
            yield batch

    def read(self) -> Iterator[DetectionBatch]:
        """Yield batches on the host, with the files' pixel values."""
        yield from self.epochs


def by_proportions(sizes: list[tuple[int, int]]) -> list[int]:
    """Return positions from the widest image to the tallest, so that a batch needs little padding. sizes: heights and widths."""
    return sorted(range(len(sizes)), key=lambda position: sizes[position][0] / sizes[position][1])


class FileLoader(Loader, Protocol):
    """Batches of a COCO file's images."""

    file: CocoFile


@dataclass(kw_only=True)
class DetectionData(Data):
    train: FileLoader
    val: FileLoader
    category_ids: list[int]  # the COCO file's, by class


def load_detection_data(
    config: DetectionDataConfig,
    fixed_size: list[int] | None,
    norm: Norm,
    device: torch.device,
    seed: int,
    loader: Callable[..., FileLoader] = DetectionLoader,
    *,
    shapes: str = "",
    square: bool = False,
) -> DetectionData:
    """Open the data set that a config names; draw digit scenes first if they do not exist.

    Args:
        config: one of the schemas of lab.detectors.schema.
        fixed_size: height and width of every batch; None pads a batch to its largest image.
        norm: mean and standard deviation of pixels.
        device: the device of the batches.
        seed: the seed of order and augmentation.
        loader: makes the batches.
        shapes: as in lab.detectors.annotations.coco_file.read_coco.
        square: whether every batch is a square of data.shortest, in place of fixed_size.

    Raises:
        UserError: a setting, a file or an entry of a file is wrong.
    """
    _check_sizes(config, fixed_size)
    files, held_out, seen = _read(config, shapes)
    train, val = files[:2]
    sized = settle_size(config, fixed_size, train.sizes, square=square)
    if square:
        fixed_size = list(size_of(config, None))
    for file in files:
        _refuse_different_categories(train, file)
    make = partial(loader, config=config, fixed_size=fixed_size, norm=norm, device=device)
    return DetectionData(
        train.classes,
        3,
        norm,
        train=make(train, seed=seed),
        val=make(val, seed=None),
        counts=train.counts(),
        category_ids=train.category_ids,
        test=make(files[2], seed=None) if len(files) > 2 else None,
        held_out=held_out,
        plain=partial(make, train, seed=None),
        notes=[
            *(sized or enlarged(config, fixed_size, train.sizes)),
            *seen,
            *(said for file in files for said in file.notes),
            *dark_note(train.files),
        ],
    )


def size_of(config: DetectionDataConfig, fixed_size: list[int] | None) -> tuple[int, int]:
    """Return height and width of a usual batch."""
    if fixed_size:
        return fixed_size[0], fixed_size[1]
    edge = config.edge or (config.scene_pixels if isinstance(config, DigitScenesConfig) else 640)
    side = -(-edge // config.divisor) * config.divisor
    return side, side


def settle_size(config: DetectionDataConfig, fixed_size: list[int] | None, sizes: list[tuple[int, int]], *, square: bool) -> list[str]:
    """Replace data.shortest=auto by a number; return what it stands for, in words.

    Args:
        config: the data's settings.
        fixed_size: height and width that every image is fitted into.
        sizes: height and width of the training images' files.
        square: whether images are fitted into a square of this edge.
    """
    if config.shortest != AUTO:
        return []
    size = median_size(sizes)
    config.shortest = config.usual
    if fixed_size:
        return []
    edge, step = (max(size), config.divisor) if square else (min(size), 1)
    config.shortest, said = fit("data.shortest", size, edge, config.usual, step)
    return [said]


def enlarged(config: DetectionDataConfig, fixed_size: list[int] | None, sizes: list[tuple[int, int]]) -> list[str]:
    """Return a message if images are enlarged much, because the larger computation may improve nothing.

    Args:
        config: the data's settings.
        fixed_size: height and width that every image is fitted into; None: the config's.
        sizes: height and width of the training images' files.
    """
    height, width = median_size(sizes)
    rows, columns = fitted((height, width), config, fixed_size)
    ratio = rows / height
    if ratio < ENLARGED:
        return []
    side = -(-max(height, width) // config.divisor) * config.divisor
    if fixed_size is None:
        setting, same = f"data.shortest={config.shortest}", f"data.shortest={min(height, width)}"
    elif tuple(fixed_size) == size_of(config, None):
        setting, same = f"data.shortest={config.shortest}", f"data.shortest={side}"
    else:
        setting, same = f"model.fixed_size={fixed_size}", f"model.fixed_size=[{side},{side}]"
    return [
        f"{setting}: images are enlarged {ratio:.1f} times, the median one from {width}×{height} to {columns}×{rows} pixels, "
        f"and a step computes {ratio**2:.0f} times as much; {same} keeps their size"
    ]


def _read(config: DetectionDataConfig, shapes: str) -> tuple[list[CocoFile], str, list[str]]:
    """Return the training, held-out and, if there are any, test images; which are held out, in words; messages for the user."""
    notes: list[str] = []
    if isinstance(config, BoxesConfig):
        if config.root is None:
            raise UserError("data.root=null: data=boxes needs the folder of the images and their boxes, or the data.yaml in it.")
        parts, held_out, notes = read_boxes(config, absolute(config.root, ROOT), shapes=shapes)
        read, settings = list(parts.values()), ["data.root"] * len(parts)
    else:
        how: dict[str, Any] = {"check": config.check, "skip_corrupt": config.skip_corrupt, "shapes": shapes}
        if isinstance(config, CocoConfig):
            how |= {"outside": config.images_outside, "exif": config.exif}
        named = _parts(config)
        read = [read_coco(each.annotations, each.images, settings=each.settings, **how) for each in named]
        settings = [each.settings[0] for each in named]
        held_out = f"scenes of other digits, {held_out_by(config)}" if isinstance(config, DigitScenesConfig) else f"of {read[1].path.name}"
    files, shared = _once(read)
    for file, setting in zip(files, settings, strict=True):
        if not file.counts().any():
            raise UserError(f"{setting}={file.path}: no image has a box.")
    return files, held_out, notes + shared


def _once(files: list[CocoFile]) -> tuple[list[CocoFile], list[str]]:
    """Remove images that a later part has, too, so that none is both learned and scored; return the parts, and messages that count them.

    A part of which nothing would be left stays as it is.
    """
    later: set[str] = set()
    kept, notes = [], []
    for file in reversed(files):
        names = Names(file.folder)
        real = [names.real(each) for each in file.files]
        new = [position for position, each in enumerate(real) if each not in later]
        later.update(real)
        if shared := len(file) - len(new):
            said = "and are left out here" if new else "and none is left; scores say nothing of unseen images"
            notes.append(f"{file.path}: {shared} of its {len(file)} images are scored in another part, too, {said}")
        kept.append(replace(file.only(new), notes=file.notes) if shared and new else file)
    return kept[::-1], notes


@dataclass
class Part:
    """Annotation file, image folder and the settings that name them."""

    annotations: Path
    images: Path
    settings: tuple[str, str]


def _parts(config: DetectionDataConfig) -> list[Part]:
    """Return the training, held-out and, if there are any, test images."""
    root = absolute(config.root, ROOT / "data")
    if isinstance(config, DigitScenesConfig):
        folder = scenes_folder(config, root / "digit_scenes")
        parts = PARTS if config.test else PARTS[:2]
        return [Part(folder / f"instances_{part}.json", folder / "images", ("data.root", "data.root")) for part in parts]
    coco = cast(CocoConfig, config)
    if not root.is_dir():
        raise UserError(f"data.root={root}: no such folder.")
    if (coco.test_annotations is None) != (coco.test_images is None):
        given, lacking = ("annotations", "images") if coco.test_images is None else ("images", "annotations")
        raise UserError(f"data.test_{given}={getattr(coco, f'test_{given}')}: data.test_{lacking} is expected with it.")
    found: list[Part] = []
    for name in ("train", "val", "test"):
        settings = f"data.{name}_annotations", f"data.{name}_images"
        annotations, images = getattr(coco, f"{name}_annotations"), getattr(coco, f"{name}_images")
        if annotations is None:
            continue
        here = (root / annotations).resolve()
        if name == "test" and (same := next((part for part in found if part.annotations.resolve() == here), None)):
            raise UserError(f"{settings[0]}={annotations}: is {same.settings[0]}, too; images that nothing else uses are expected.")
        found.append(Part(root / annotations, root / images, settings))
    return found


def _check_sizes(config: DetectionDataConfig, fixed_size: list[int] | None) -> None:
    if fixed_size is None:
        return
    if len(fixed_size) != 2:
        raise UserError(f"model.fixed_size={fixed_size}: height and width are expected.")
    if any(edge % config.divisor for edge in fixed_size):
        raise UserError(f"model.fixed_size={fixed_size}: multiples of data.divisor={config.divisor} are expected.")


def _boxes(file: CocoFile, config: DetectionDataConfig, fixed_size: list[int] | None) -> int | None:
    """Return K if all batches must have the same K, else None."""
    most, image_id = file.most_boxes()
    if config.max_boxes is not None and most > config.max_boxes:
        raise UserError(f"data.max_boxes={config.max_boxes}: image {image_id} of {file.path} has {most} boxes.")
    images = 4 if config.mosaic else 1
    return config.max_boxes * images if config.max_boxes else power_of_two(most * images) if fixed_size else None


def _refuse_different_categories(train: CocoFile, other: CocoFile) -> None:
    ours, others = (set(zip(file.category_ids, file.classes, strict=True)) for file in (train, other))
    if ours != others:
        odd = ", ".join(f"{category_id} {name!r}" for category_id, name in sorted(ours ^ others)[:10])
        remedy = "write the same list `categories` into both, also those without a box"
        raise UserError(f"{train.path} and {other.path} have different categories; in one of them only: {odd}. Remedy: {remedy}.")
