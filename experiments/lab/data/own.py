"""A user's own data set: any torch.utils.data.Dataset of images and class indices."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lab.config.errors import UserError
from lab.config.objects import find
from lab.config.schema import CustomDataConfig
from lab.data.folder import photos_data
from lab.data.sets import Data, Norm
from lab.data.split import held_out_by, split

SPLITS = ("train", "val", "test")


@dataclass
class OwnSamples:
    """Some samples of a data set, by their positions in it."""

    dataset: Any
    classes: list[str]
    positions: list[int]
    targets: list[int]

    def image(self, index: int) -> Image.Image:
        return as_rgb(self.dataset[self.positions[index]][0])

    def only(self, positions: Iterable[int]) -> "OwnSamples":
        kept = list(positions)
        return OwnSamples(self.dataset, self.classes, [self.positions[i] for i in kept], [self.targets[i] for i in kept])


def as_rgb(image: Any) -> Image.Image:
    """A PIL image, or a tensor (H, W) or (C, H, W) of 1 or 3 channels, uint8 or from 0 to 1.

    Raises:
        TypeError: it is something else.
    """
    from torchvision.transforms.v2.functional import to_pil_image

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, Tensor) and image.ndim in (2, 3):
        return to_pil_image(image).convert("RGB")
    shape = f" of the shape {tuple(image.shape)}" if isinstance(image, Tensor) else ""
    raise TypeError(f"an image is a {type(image).__name__}{shape}; a PIL image or a tensor (C, H, W) is expected")


def own_data(config: CustomDataConfig, norm: Norm, device: torch.device, seed: int) -> Data:
    """Open it.

    Raises:
        UserError: it cannot be found or called, or its samples are something else than images with class indices.
    """
    setting = f"data.target={config.target}"
    function = find("data.target", config.target)
    names = SPLITS if callable(function) and "split" in inspect.signature(function).parameters else SPLITS[:1]
    found: dict[str, OwnSamples] = {}
    for name in names:
        if (dataset := _made(setting, function, config.args | ({"split": name} if len(names) > 1 else {}))) is not None:
            found[name] = _samples(setting, name, dataset)
    if "train" not in found:
        raise UserError(f"{setting}: returns nothing for split='train'.")
    classes, held_out = found["train"].classes, "of split='val'"
    if odd := [name for name, samples in found.items() if samples.classes != classes]:
        raise UserError(f"{setting}: split={odd[0]!r} has other classes than split='train'.")
    if "val" not in found:
        train, val, _ = split(config, found["train"].targets, classes)
        held_out = f"of the data set, {held_out_by(config)}"
        found |= {"train": found["train"].only(train), "val": found["train"].only(val)}
    elif config.fold is not None:
        raise UserError(f"data.fold={config.fold}: divides split='train', but {setting} has split='val', too.")
    keys = {name: [str(position) for position in samples.positions] for name, samples in found.items()}
    return photos_data(found, keys, held_out, config, norm, device, seed)


def _made(setting: str, function: Any, options: dict[str, Any]) -> Any:
    try:
        return function(**options) if callable(function) else function
    except Exception as error:
        raise UserError(f"{setting}: cannot be called with {options}: {type(error).__name__}: {error}") from error


def _samples(setting: str, name: str, dataset: Any) -> OwnSamples:
    """Look at the classes, the first image and all targets, which are `dataset.targets` or read sample by sample."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(f"{setting}: returns a {type(dataset).__name__} for {name}; a torch.utils.data.Dataset with a length is expected.")
    classes = getattr(dataset, "classes", None)
    if not isinstance(classes, (list, tuple)) or not classes:
        raise UserError(f"{setting}: the data set of {name} needs `classes`, the list of its classes' names.")
    try:
        as_rgb(dataset[0][0])
        given = getattr(dataset, "targets", None)
        targets = [int(target) for target in (given if given is not None else (dataset[i][1] for i in range(len(dataset))))]
    except Exception as error:
        raise UserError(f"{setting}: a sample of {name} is no (image, class index): {type(error).__name__}: {error}") from error
    if len(targets) != len(dataset) or not all(0 <= target < len(classes) for target in targets):
        wrong = next((target for target in targets if not 0 <= target < len(classes)), None)
        found = f"{len(targets)} targets of {len(dataset)} samples" if wrong is None else f"the class {wrong}"
        raise UserError(f"{setting}: {name} has {found}; each sample needs a class from 0 to {len(classes) - 1}.")
    return OwnSamples(dataset, [str(each) for each in classes], list(range(len(dataset))), targets)
