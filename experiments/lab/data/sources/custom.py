"""A user's own data set: any torch.utils.data.Dataset of images and class indices."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lab.base.errors import UserError
from lab.base.formats import one_form
from lab.config.objects import find
from lab.config.schema import CustomDataConfig
from lab.data.images.exif import turned
from lab.data.images.pixels import as_pixels
from lab.data.photos import Photos, Samples

SPLITS = ("train", "val", "test")


@dataclass(kw_only=True)
class CustomSamples(Samples):
    """Some samples of a user's data set."""

    dataset: Any

    def image(self, index: int) -> Image.Image | Tensor:
        image = self.dataset[self.positions[index]][0]
        return as_rgb(image) if self.channels is None else of_channels(image, self.channels)


def as_rgb(image: Any) -> Image.Image:
    """Convert a PIL image, or a tensor (H, W) or (C, H, W) of 1 or 3 channels, uint8 or from 0 to 1, to a PIL image in RGB.

    Raises:
        TypeError: the image has another type or shape.
    """
    from torchvision.transforms.v2.functional import to_pil_image

    if isinstance(image, Image.Image):
        return turned(image).convert("RGB")
    if isinstance(image, Tensor) and image.ndim in (2, 3):
        return to_pil_image(image).convert("RGB")
    shape = f" of the shape {tuple(image.shape)}" if isinstance(image, Tensor) else ""
    raise TypeError(f"an image is a {type(image).__name__}{shape}; a PIL image or a tensor (C, H, W) is expected")


def of_channels(image: Any, channels: int) -> Tensor:
    """Return an image as a tensor (channels, H, W), uint8 scaled to 0 to 1.

    Raises:
        TypeError: the image has another type or number of channels.
    """
    image = turned(image) if isinstance(image, Image.Image) else image
    pixels = as_pixels(image) if isinstance(image, (Image.Image, Tensor)) else None
    pixels = pixels[None] if pixels is not None and pixels.ndim == 2 else pixels
    if pixels is None or pixels.ndim != 3 or pixels.shape[0] != channels:
        got = type(image).__name__ if pixels is None else f"tensor {tuple(pixels.shape)}"
        raise TypeError(f"an image is a {got}; data.channels={channels} expects a PIL image or a tensor ({channels}, H, W)")
    return pixels


def read_custom(config: CustomDataConfig) -> Photos:
    """Return the images of a user's own data set.

    Raises:
        UserError: the data set cannot be found or called, or its samples are not images with class indices.
    """
    setting = f"data.target={config.target}"
    function = find("data.target", config.target)
    names = SPLITS if callable(function) and "split" in inspect.signature(function).parameters else SPLITS[:1]
    found: dict[str, CustomSamples] = {}
    classes: dict[str, list[str]] = {}
    for name in names:
        if (dataset := _made(setting, function, config.args | ({"split": name} if len(names) > 1 else {}))) is not None:
            found[name], classes[name] = _samples(setting, name, dataset, config.channels)
    if "train" not in found:
        raise UserError(f"{setting}: returns nothing for split='train'.")
    if odd := [name for name in found if classes[name] != classes["train"]]:
        raise UserError(f"{setting}: split={odd[0]!r} has other classes than split='train'.")
    return Photos(parts=found, classes=classes["train"], of="of split='val'" if "val" in found else "of the data set")


def _made(setting: str, function: Any, options: dict[str, Any]) -> Any:
    try:
        return function(**options) if callable(function) else function
    except Exception as error:
        raise UserError(f"{setting}: cannot be called with {options}: {type(error).__name__}: {error}") from error


def _samples(setting: str, name: str, dataset: Any, channels: int | None) -> tuple[CustomSamples, list[str]]:
    """Check the classes, the first image and all targets (`dataset.targets`, else read sample by sample); return samples and classes."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(f"{setting}: returns a {type(dataset).__name__} for {name}; a torch.utils.data.Dataset with a length is expected.")
    classes = getattr(dataset, "classes", None)
    if not isinstance(classes, (list, tuple)) or not classes:
        raise UserError(f"{setting}: the data set of {name} needs `classes`, the list of its classes' names.")
    try:
        as_rgb(dataset[0][0]) if channels is None else of_channels(dataset[0][0], channels)
        given = getattr(dataset, "targets", None)
        targets = [int(target) for target in (given if given is not None else (dataset[i][1] for i in range(len(dataset))))]
    except Exception as error:
        raise UserError(f"{setting}: a sample of {name} is not (image, class index): {type(error).__name__}: {error}") from error
    if len(targets) != len(dataset) or not all(0 <= target < len(classes) for target in targets):
        wrong = next((target for target in targets if not 0 <= target < len(classes)), None)
        found = f"{len(targets)} targets of {len(dataset)} samples" if wrong is None else f"the class {wrong}"
        raise UserError(f"{setting}: {name} has {found}; each sample needs a class from 0 to {len(classes) - 1}.")
    keys, names = [str(position) for position in range(len(dataset))], [one_form(str(each)) for each in classes]
    return CustomSamples(targets=torch.tensor(targets), keys=keys, channels=channels, dataset=dataset), names
