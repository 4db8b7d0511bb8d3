"""Images with a class for each pixel: drawn and held in device memory, or files that workers read."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from lab.base.errors import UserError
from lab.base.formats import one_form, visible
from lab.base.paths import ROOT, absolute
from lab.base.seeds import seeded
from lab.config.schema import AUTO
from lab.data.batch import Batch
from lab.data.fitting import STEP, fit, median_size
from lab.data.images.exif import BOTH, is_shown, sizes_of, turn_of, turned
from lab.data.images.files import (
    DEEP,
    SUFFIXES,
    UNREADABLE,
    CorruptError,
    Faults,
    fault_of,
    in_rgb,
    open_any_mode,
    open_image,
    reason,
    unreadable,
    whole_range,
)
from lab.data.images.pixels import dark_note
from lab.data.listing import HELD_OUT, held_out_folder, ignored, kinds_of, passed_over
from lab.data.load import without_corrupt
from lab.data.loading import WorkerLoader
from lab.data.photos import Photos, Pictures
from lab.data.sets import Data, Norm, Split, Splits, digits, memory_data, norm_of, normalised
from lab.data.transforms import RandomScale
from lab.tasks.segmentation import OUTSIDE, DigitMasksConfig, MaskFolderConfig, MasksConfig


def load_masks(config: MasksConfig, device: torch.device, seed: int, norm: Norm | None) -> Data:
    """Open the data set that a config names.

    Args:
        config: DigitMasksConfig or MaskFolderConfig.
        device: the device of the batches.
        seed: the seed of order and augmentation.
        norm: mean and standard deviation of pixels; None computes them from the drawn training images.

    Raises:
        UserError: a folder, an image, a mask or a setting is wrong.
    """
    if not isinstance(config, MaskFolderConfig):
        scenes = _drawn(cast(DigitMasksConfig, config))
        return memory_data(scenes, config, norm_of(scenes.train.images, norm), device, seed)  # a mirrored digit is not a digit
    assert norm is not None
    found = _read(config)
    parts: dict[str, Pairs] = without_corrupt(found, config)
    if config.check != "off":
        for name, pairs in parts.items():
            _refuse_unlabelled(pairs, 2 if name == "train" else 1)
    sized = settle_size(config, parts["train"])
    load = partial(MaskFileLoader, config=config, norm=norm, device=device)
    return Data(
        config.classes,
        3,
        norm,
        load(parts["train"], seed=seed),
        load(parts["val"], seed=None),
        test=load(parts["test"], seed=None) if "test" in parts else None,
        held_out=found.of,
        plain=partial(load, parts["train"], seed=None),
        notes=[*sized, *found.notes, *dark_note(list(map(parts["train"].where, range(len(parts["train"])))))],
    )


def _drawn(config: DigitMasksConfig) -> Splits:
    """Draw scenes of digits, whose targets are masks (N, H, W); each part has different digits."""
    known = digits(config)
    parts = {}
    for number, (name, split) in enumerate({"train": known.train, "val": known.val}.items()):
        generator = torch.Generator().manual_seed(2 * config.scene_seed + number)
        keys = [f"{name}-{position}" for position in range(getattr(config, f"{name}_scenes"))]
        images, masks = zip(*(_scene(config, split, generator) for _ in keys), strict=True)
        parts[name] = Split(torch.stack(images), torch.stack(masks).long(), keys)
    return Splits(["background", *known.classes], parts["train"], parts["val"], None, "images of held-out digits")


def _scene(config: DigitMasksConfig, split: Split, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw an image (1, H, W) and its mask (H, W); later digits cover earlier ones."""
    size = config.image_size
    image, mask = torch.zeros(size, size), torch.zeros(size, size, dtype=torch.uint8)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(drawn(1, config.digits)):
        position, side = drawn(0, len(split.targets) - 1), drawn(size // 4, size // 2)
        ink = F.interpolate(split.images[position][None], size=(side, side), mode="bilinear", antialias=True)[0, 0]
        top, left = drawn(0, size - side), drawn(0, size - side)
        place = (slice(top, top + side), slice(left, left + side))
        there = ink > 0.4
        image[place] = torch.where(there, ink, image[place])
        mask[place] = torch.where(there, split.targets[position].to(torch.uint8) + 1, mask[place])
    return (image + config.noise * torch.randn(size, size, generator=generator))[None], mask


@dataclass(kw_only=True)
class Pairs(Pictures):
    """Files of images and of their masks.

    Args:
        pairs: the image and the mask of each sample of the source.
        classes: the number of classes.
        ignore_value: data.ignore_value.
        overlapping: data.overlapping.
        exif: data.exif.
    """

    pairs: list[tuple[Path, Path]]
    classes: int
    ignore_value: int | None = OUTSIDE
    overlapping: bool = False
    exif: str

    def where(self, index: int) -> str:
        return str(self.pairs[self.positions[index]][0])

    def about(self) -> set[Path]:
        return {path.parent for pair in self.pairs for path in pair}

    def fault(self, index: int, check: str) -> str:
        image, mask = self.pairs[self.positions[index]]
        if said := fault_of((image, None), check, deep=True):
            return f"{image}: {said}"
        try:
            self.mask(mask)
            fits, same = _fits(image, mask)
        except UNREADABLE as error:
            return f"{mask}: {reason(error)}"
        return BOTH if all(fits) and not same else ""

    def shown(self, index: int) -> bool:
        """Return whether a mask belongs to its image as a viewer shows both."""
        return is_shown(_fits(*self.pairs[self.positions[index]])[0], self.exif)

    def mask(self, path: Path, *, shown: bool = True) -> Tensor:
        """Read a mask, as read_mask or read_channels does."""
        read = read_channels if self.overlapping else read_mask
        return read(path, self.classes, self.ignore_value, shown=shown)

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (3, H, W) and its mask (H, W), with overlapping classes (C, H, W), uint8.

        Raises:
            UserError: one of them cannot be read.
        """
        image, mask = self.pairs[self.positions[index]]
        path = image
        try:
            with open_image(image, deep=True) as opened:
                path = mask
                shown = self.shown(index)
                values = self.mask(mask, shown=shown)
                path = image
                return pil_to_tensor(in_rgb(whole_range(turned(opened, shown=shown), opened))), values
        except UNREADABLE as error:
            raise unreadable(path, error) from None


LOOKED_AT = 200  # images by which their usual size is found


def settle_size(config: MaskFolderConfig, pairs: Pairs) -> list[str]:
    """Replace data.image_size=auto by a number; return what it stands for, in words."""
    if config.image_size != AUTO:
        return []
    sizes = []
    for position in pairs.positions[:: max(len(pairs) // LOOKED_AT, 1)]:
        with contextlib.suppress(*UNREADABLE), open_any_mode(pairs.pairs[position][0]) as image:
            sizes.append((image.height, image.width))
    size = median_size(sizes) if sizes else (config.usual, config.usual)
    config.image_size, said = fit("data.image_size", size, max(size), config.usual, STEP)
    return [said]


def _read(config: MaskFolderConfig) -> Photos:
    """Find the pairs of each part.

    Raises:
        UserError: a folder does not exist, or there are too many classes.
    """
    if len(config.classes) > OUTSIDE:
        raise UserError(f"data.classes has {len(config.classes)} names; at most {OUTSIDE} are possible.")
    root = absolute(config.root, ROOT / "data")
    faults, passed, found = Faults(root), Counter[str](), dict[str, Pairs]()
    for part in ("train", held_out_folder(root, "one of them is expected") or "val", "test"):
        if part == "test" and not (root / part).is_dir():
            continue
        images, masks = (_files(root / part / name, faults, passed) for name in ("images", "masks"))
        for stem in sorted(set(images) ^ set(masks)):
            there, lacks = (images[stem], "masks") if stem in images else (masks[stem], "images")
            faults.add(f"{there.relative_to(root)}: has no {lacks}/{stem}.* beside it in {part}/")
        pairs = [(image, masks[stem]) for stem, image in images.items() if stem in masks]
        known: dict[str, Any] = {"targets": torch.zeros(len(pairs)), "classes": len(config.classes)}
        known |= {"ignore_value": config.ignore_value, "overlapping": config.overlapping, "exif": config.exif}
        keys = [image.relative_to(root).as_posix() for image, _ in pairs]
        found["val" if part in HELD_OUT else part] = Pairs(**known, keys=keys, source=root / part, pairs=pairs)
    notes = [visible(f"{root}: {said}")] if (said := passed_over(passed)) else []
    of = f"the images of {Path(found['val'].source).name}/"
    return Photos(parts=found, classes=config.classes, of=of, faults=faults, notes=notes)


def _refuse_unlabelled(pairs: Pairs, least: int) -> None:
    """Raise UserError where all masks of a part together have fewer than `least` classes; most often the first mask has them."""
    seen: set[int] = set()
    for position in pairs.positions:
        with contextlib.suppress(*UNREADABLE):  # named when it is read
            seen |= set(pairs.mask(pairs.pairs[position][1]).unique().tolist())
        if len(seen - {OUTSIDE}) >= min(least, 2 if pairs.overlapping else pairs.classes):
            return
    nothing = pairs.ignore_value
    if pairs.overlapping:
        found = {0: "in no class", 1: "in a class", OUTSIDE: f"of data.ignore_value={nothing}"}
        raise UserError(
            f"data.root: the masks of {pairs.source} have no pixel but {' and '.join(found[each] for each in sorted(seen))}; with "
            "data.overlapping=true a pixel is in a channel's class where its value is neither 0 nor data.ignore_value."
        )
    values = ", ".join(map(str, sorted(nothing if each == OUTSIDE and nothing is not None else each for each in seen)))
    meant = f", and {nothing} means no class. Where {nothing} stands for a class, write its number." if OUTSIDE in seen else "."
    raise UserError(
        f"data.root: the masks of {pairs.source} have no pixel but of {values}; data.classes numbers the classes from 0 to "
        f"{pairs.classes - 1}{meant}"
    )


def _files(folder: Path, faults: Faults, passed: Counter[str]) -> dict[str, Path]:
    """Return the images in a folder by their stems; count those that are passed over."""
    if not folder.is_dir():
        raise UserError(f"data.root: {folder}: no such folder.")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if ignored(path.name):
            continue
        if path.suffix.lower() not in SUFFIXES:
            passed += kinds_of([path.name] * (not path.is_dir()))
        elif (other := found.setdefault(one_form(path.stem), path)) != path:
            faults.add(f"{path}: has the stem of {other.name}; different stems are expected")
    return found


def _fits(image_path: Path, mask_path: Path) -> tuple[tuple[bool, bool], bool]:
    """Return whether a mask fits its image, both as a viewer shows them and both as they are stored; and whether EXIF turns both equally.

    Raises:
        CorruptError: it fits neither.
        one of UNREADABLE.
    """
    with open_any_mode(image_path) as image, open_any_mode(mask_path) as mask:
        sizes, masks = sizes_of(image), sizes_of(mask)
        if sizes[0] != masks[0] and sizes[1] != masks[1]:
            raise CorruptError(f"is {masks[0][1]}×{masks[0][0]}, its image {sizes[0][1]}×{sizes[0][0]}")
        return (sizes[0] == masks[0], sizes[1] == masks[1]), turn_of(image) == turn_of(mask)


def read_mask(path: Path, classes: int, ignore_value: int | None = OUTSIDE, *, shown: bool = True) -> Tensor:
    """Read a mask (H, W) uint8, as a viewer shows it or as the file stores it; OUTSIDE where it has the ignored value.

    Raises:
        one of UNREADABLE.
    """
    with open_any_mode(path) as image:
        if image.mode not in ("1", "L", "P", *DEEP):
            raise CorruptError(f"has pixels of mode {image.mode}; one channel of class numbers is expected")
        values = pil_to_tensor(turned(image, shown=shown))[0].to(torch.int32)
    there = torch.ones_like(values, dtype=torch.bool) if ignore_value is None else values != ignore_value
    if (wrong := values[((values < 0) | (values >= classes)) & there]).numel():
        known = f"data.classes has 0 to {classes - 1}" + ("" if ignore_value is None else f", and {ignore_value} means no class")
        raise CorruptError(f"has the value {int(wrong[0])}; {known}")
    return values.where(there, OUTSIDE).to(torch.uint8)


def read_channels(path: Path, classes: int, ignore_value: int | None = OUTSIDE, *, shown: bool = True) -> Tensor:
    """Read a mask (C, H, W) uint8 whose channels, of one page or of several, are classes: 1 where a pixel is in one, OUTSIDE where it does
    not count.

    Raises:
        one of UNREADABLE.
    """
    pages = []
    with open_any_mode(path) as image:
        if image.mode not in ("1", "L", "P", "LA", "RGB", "RGBA", *DEEP):
            raise CorruptError(f"has pixels of mode {image.mode}; channels of 8 or 16 bits are expected")
        for page in range(min(getattr(image, "n_frames", 1), classes + 1)):
            image.seek(page)
            pages.append(pil_to_tensor(turned(image, shown=shown)).to(torch.int32))
    if sum(map(len, pages)) != classes or len({page.shape[1:] for page in pages}) > 1:
        raise CorruptError(f"has pages of {', '.join(str(len(page)) for page in pages)} channels; data.classes names {classes} classes")
    values = torch.cat(pages)
    found = (values != 0).to(torch.uint8)
    return found if ignore_value is None else found.masked_fill(values == ignore_value, OUTSIDE)


class MaskFiles(Dataset[tuple[Tensor, Tensor, int]]):
    """Images (3, S, S) and masks (S, S), or of overlapping classes (C, S, S), uint8, by position and seed.

    The seed makes a sample's augmentation independent of the process that prepares it.
    """

    def __init__(self, pairs: Pairs, config: MaskFolderConfig, fill: list[int], *, train: bool) -> None:
        self.pairs, self.augment, self.size = pairs, train and config.augment, [cast(int, config.image_size)] * 2
        self.before = v2.RandomHorizontalFlip(config.horizontal_flip)
        self.scale = RandomScale(config.scale, self.fit, None, fill)
        self.after = v2.RandomPhotometricDistort(p=config.photometric)

    def __len__(self) -> int:
        return len(self.pairs)

    def fit(self, _size: tuple[int, int]) -> tuple[int, int]:
        return self.size[0], self.size[1]

    def __getitem__(self, sample: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        index, seed = sample
        pixels, values = self.pairs.pair(index)
        image, mask = tv_tensors.Image(pixels), tv_tensors.Mask(values)
        if self.augment:
            with seeded(seed):
                image, mask = self.scale(*self.before(image, mask))
                image = self.after(image)
        else:
            image, mask = (resize(each, self.size, antialias=True) for each in (image, mask))
        return image.as_subclass(Tensor), mask.as_subclass(Tensor), index


class MaskFileLoader(WorkerLoader):
    """Batches on the device; they are copied as uint8 and normalised there."""

    def __init__(self, pairs: Pairs, config: MaskFolderConfig, norm: Norm, device: torch.device, seed: int | None) -> None:
        fill = [round(value * 255) for value in norm.mean]
        super().__init__(MaskFiles(pairs, config, fill, train=seed is not None), config, device, seed)
        self.pairs, self.keys = pairs, pairs.keys
        self.mean, self.std = norm.on(device)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.epochs:
            images, masks, index = (each.to(self.device, non_blocking=True) for each in batch)
            yield Batch(normalised(images, self.mean, self.std), masks.long(), index)

    def size(self, position: int) -> tuple[int, int]:
        """Return height and width of the mask, as shown or as stored."""
        with open_any_mode(self.pairs.pairs[self.pairs.positions[position]][1]) as mask:
            return sizes_of(mask)[0 if self.pairs.shown(position) else 1]
