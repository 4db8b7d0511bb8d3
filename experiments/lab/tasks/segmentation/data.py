"""Images with a class for each pixel, held in memory on the device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from lab.config.errors import UserError
from lab.config.schema import DigitsConfig
from lab.config.settings import ROOT, absolute
from lab.data.augment import crop_and_flip
from lab.data.batch import Batch
from lab.data.images import UNREADABLE, hidden, read_rgb
from lab.data.samples import Annotations
from lab.data.sets import Data, MemoryLoader, Norm, Split, digits, norm_of
from lab.tasks.segmentation.spec import OUTSIDE, DigitMasksConfig, MaskFolderConfig, MasksConfig

FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


@dataclass
class Masks:
    """Images (N, C, H, W) from 0 to 1 or uint8, with masks (N, H, W) of classes or OUTSIDE, uint8."""

    images: Tensor
    masks: Tensor
    keys: list[str]


class MaskLoader(MemoryLoader):
    """The mask goes with its image as one more channel, so that both are cropped and mirrored alike."""

    def __init__(self, masks: Masks, batch_size: int, device: torch.device, norm: tuple[Tensor, Tensor]) -> None:
        scale = 1.0 if masks.images.dtype == torch.uint8 else 1 / 255
        images = torch.cat([masks.images, masks.masks[:, None].to(masks.images.dtype) * scale], 1).to(masks.images.dtype)
        mean, std = (torch.cat([value, torch.tensor([last])]) for value, last in zip(norm, (0.0, 1 / 255), strict=True))
        split = Split(images, torch.zeros(len(images), dtype=torch.int64), masks.keys)
        super().__init__(split, Annotations(), batch_size, device, (mean, std))

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield replace(batch, images=batch.images[:, :-1].contiguous(), target=batch.images[:, -1].round().long())


def load_masks(config: MasksConfig, device: torch.device, seed: int, norm: Norm | None) -> Data:
    """Open the data set a config names.

    Args:
        config: DigitMasksConfig or MaskFolderConfig.
        device: where batches are wanted.
        seed: of the order and the augmentation.
        norm: what a saved model was trained with, or a pretrained one expects; None computes it from the training images.

    Raises:
        UserError: a folder, an image or a mask is wrong.
    """
    if isinstance(config, DigitMasksConfig):
        classes, parts = _drawn(config)
        said = "images of held-out digits"
    else:
        assert isinstance(config, MaskFolderConfig)
        classes, parts = config.classes, _read(config)
        said = "the images of val/"
    mean, std = norm_of(parts["train"].images, norm)
    augment = crop_and_flip if config.augment and isinstance(config, MaskFolderConfig) else None  # a mirrored digit is none

    def loader(part: str, batch_size: int) -> MaskLoader:
        return MaskLoader(parts[part], batch_size, device, (mean, std))

    counts = torch.bincount(parts["train"].masks.long().flatten(), minlength=OUTSIDE + 1)[: len(classes)]
    train = loader("train", config.batch_size).shuffled(seed, augment)
    val, test = loader("val", config.eval_batch_size), loader("test", config.eval_batch_size) if "test" in parts else None
    channels = parts["train"].images.shape[1]
    plain = partial(loader, "train", config.eval_batch_size)
    return Data(classes, channels, Norm(mean.tolist(), std.tolist()), train, val, 0, counts, test, said, plain)


def _drawn(config: DigitMasksConfig) -> tuple[list[str], dict[str, Masks]]:
    """Scenes of digits, of each part from its own digits."""
    known = digits(DigitsConfig(held_out=config.held_out, split_seed=config.split_seed))
    counts = {"train": (known.train, config.train_scenes), "val": (known.val, config.val_scenes)}
    parts = {}
    for number, (name, (split, count)) in enumerate(counts.items()):
        generator = torch.Generator().manual_seed(2 * config.scene_seed + number)
        scenes = [_scene(config, split, generator) for _ in range(count)]
        images, masks = (torch.stack(each) for each in zip(*scenes, strict=True))
        parts[name] = Masks(images, masks, [f"{name}-{position}" for position in range(count)])
    return ["background", *known.classes], parts


def _scene(config: DigitMasksConfig, split: Split, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One image (1, H, W) and its mask (H, W); a later digit lies above the earlier ones."""
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


def _read(config: MaskFolderConfig) -> dict[str, Masks]:
    root = absolute(config.root, ROOT / "data")
    parts = {}
    for name in ("train", "val", "test"):
        if (root / name).is_dir() or name != "test":
            parts[name] = _part(root / name, config)
    return parts


def _part(folder: Path, config: MaskFolderConfig) -> Masks:
    images, masks = (_files(folder / name) for name in ("images", "masks"))
    if odd := sorted(set(images) ^ set(masks)):
        raise UserError(f"data.root: {folder}: an image and a mask of one stem are expected; of {', '.join(odd[:10])} there is only one.")
    if not images:
        raise UserError(f"data.root: {folder}/images has no image.")
    size, read = [config.image_size] * 2, []
    for stem, path in images.items():
        try:
            image, mask = read_rgb(path), Image.open(masks[stem])
            mask.load()
        except UNREADABLE as error:
            raise UserError(f"data.root: {path} or its mask cannot be read: {error}") from None
        if image.size != mask.size:
            raise UserError(f"data.root: {masks[stem]} is {mask.width}×{mask.height}, its image {image.width}×{image.height}.")
        values = pil_to_tensor(mask)[0]
        if (wrong := values[(values >= len(config.classes)) & (values != OUTSIDE)]).numel():
            known = f"0 to {len(config.classes) - 1} and {OUTSIDE}, which is no class"
            raise UserError(f"data.root: {masks[stem]} has the value {int(wrong[0])}; with data.classes={config.classes} {known}.")
        small = F.interpolate(pil_to_tensor(image)[None].float(), size=size, mode="bilinear", antialias=True)[0].round().clamp(0, 255)
        read.append((small.to(torch.uint8), F.interpolate(values[None, None].float(), size=size, mode="nearest")[0, 0].to(torch.uint8)))
    pictures, classes = (torch.stack(each) for each in zip(*read, strict=True))
    return Masks(pictures, classes, [str(path.relative_to(folder.parent)) for path in images.values()])


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise UserError(f"data.root: {folder}: there is no such folder.")
    return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in FILES and not hidden(path, folder)}
