"""From an image to the model's input: timm's transforms, those of images with other channels, and the user's own."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lab.base.errors import UserError
from lab.config.objects import find, made
from lab.config.schema import PhotosConfig
from lab.data.images.pixels import as_pixels
from lab.data.sets import Norm

Transform = Callable[[Any], Tensor]
"""Of a PIL image in RGB, or with data.channels of a tensor (C, H, W), to uint8, which the device normalises, or to normalised floats."""


def held_out_transform(config: PhotosConfig, norm: Norm) -> Transform:
    """Return the transform of an image into (C, H, W), without augmentation."""
    if config.val_transform:
        return CustomTransform(
            f"data.val_transform={config.val_transform}", _found("data.val_transform", config.val_transform), config, norm
        )
    if config.channels:
        return _of_channels(config, norm, train=False)
    return _of_timm(config, norm, crop_pct=config.crop_pct, crop_mode=config.crop_mode)


def train_transform(config: PhotosConfig, norm: Norm) -> Transform:
    """Return the transform of training images, with augmentation if data.augment is set.

    Raises:
        UserError: the user's own is not found, or timm has no such policy.
    """
    if config.transform:
        _refuse_unused(config)
        return CustomTransform(f"data.transform={config.transform}", _found("data.transform", config.transform), config, norm)
    if not config.augment:
        return held_out_transform(config, norm)
    if config.channels:
        if config.auto_augment:
            raise UserError(f"data.auto_augment={config.auto_augment}: changes images in RGB of 8 bits; leave data.channels out.")
        return _of_channels(config, norm, train=True)
    scale, erase = (config.crop_scale, 1.0), config.random_erase
    augmented = {"auto_augment": config.auto_augment, "scale": scale, "hflip": config.horizontal_flip, "re_prob": erase}
    try:
        return _of_timm(config, norm, is_training=True, color_jitter=config.color_jitter or None, **augmented)
    except (AssertionError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"data.auto_augment={config.auto_augment}: timm knows no such policy ({error or type(error).__name__}); "
            "rand-m9-mstd0.5, augmix-m5-w4-d2, original, v0 and 3a are some."
        ) from None


def _refuse_unused(config: PhotosConfig) -> None:
    """Raise UserError for a setting of our augmentation, which a transform of the user's own replaces."""
    defaults = {item.name: item.default for item in fields(config)}
    for name in ("augment", "auto_augment", "crop_scale", "horizontal_flip", "color_jitter", "random_erase"):
        if getattr(config, name) != defaults[name]:
            raise UserError(f"data.{name}={getattr(config, name)}: has no effect beside data.transform={config.transform}; leave it out.")


def _of_timm(config: PhotosConfig, norm: Norm, **options: Any) -> Transform:
    from timm.data import create_transform

    size: Any = (3, config.image_size, config.image_size)
    look: dict[str, Any] = {"mean": tuple(norm.mean), "std": tuple(norm.std), "interpolation": config.interpolation}
    if options.get("re_prob"):  # what is erased is 0 after normalisation
        return cast(Transform, create_transform(size, **look, **options))
    made: Any = create_transform(size, use_prefetcher=True, **look, **options)  # a quarter of the bytes, and less of a worker's time
    made.transforms += [torch.as_tensor, torch.Tensor.contiguous]
    return cast(Transform, made)


def _of_channels(config: PhotosConfig, norm: Norm, *, train: bool) -> Transform:
    """Return the same geometry for tensors of any number of channels; colours are not changed."""
    from torchvision.transforms import InterpolationMode, v2

    size = cast(int, config.image_size)
    by = {"interpolation": InterpolationMode.NEAREST if config.interpolation == "nearest" else InterpolationMode.BILINEAR}
    steps: list[Any]
    if train:
        steps = [v2.RandomResizedCrop(size, scale=(config.crop_scale, 1.0), **by), v2.RandomHorizontalFlip(config.horizontal_flip)]
    elif config.crop_mode == "squash":
        steps = [v2.Resize([size, size], **by)]
    else:
        steps = [v2.Resize(round(size / (config.crop_pct or 1.0)), **by), v2.CenterCrop(size)]
    steps.append(v2.Normalize(norm.mean, norm.std))
    if train and config.random_erase:
        steps.append(v2.RandomErasing(config.random_erase))
    return cast(Transform, v2.Compose(steps))


def _found(setting: str, target: str) -> Any:
    function = made(setting, target, find(setting, target))
    if not callable(function):
        raise UserError(f"{setting}={target}: is a {type(function).__name__}; a function of an image, or an object to call, is expected.")
    return function


class CustomTransform:
    """The user's function of an image, followed by normalisation.

    It gets a PIL image in RGB, or with data.channels a tensor (C, H, W), and returns an image of data.image_size pixels a side: a PIL
    image, an array (H, W, C) or a tensor (C, H, W), of 8 bits or from 0 to 1.
    """

    def __init__(self, setting: str, function: Any, config: PhotosConfig, norm: Norm) -> None:
        self.setting, self.function, self.any_range = setting, function, bool(config.channels)
        self.shape = (len(norm.mean), config.image_size, config.image_size)
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (norm.mean, norm.std))

    def __call__(self, image: Any) -> Tensor:
        try:
            made = self.function(image)
        except Exception as error:
            raise UserError(f"{self.setting}: fails: {type(error).__name__}: {error}") from error
        if isinstance(made, np.ndarray) and made.ndim in (2, 3) and made.dtype.kind in "fiub":
            made = torch.from_numpy(np.ascontiguousarray(made if made.ndim == 3 else made[:, :, None])).permute(2, 0, 1)
        if not isinstance(made, (Tensor, Image.Image)):
            what = f"an array {made.shape} of {made.dtype}" if isinstance(made, np.ndarray) else f"a {type(made).__name__}"
            raise UserError(f"{self.setting}: returns {what}; a PIL image, an array (H, W, C) or a tensor (C, H, W) is expected.")
        pixels = as_pixels(made)
        if tuple(pixels.shape) != self.shape:
            raise UserError(f"{self.setting}: returns an image {tuple(pixels.shape)}; {self.shape} is expected, as data.image_size says.")
        if not self.any_range and not (-0.01 <= float(pixels.min()) <= float(pixels.max()) <= 1.01):
            raise UserError(
                f"{self.setting}: returns pixels from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}; 0 to 1 is expected, "
                "because the app normalises them. Leave the normalisation out."
            )
        return (pixels - self.mean) / self.std


Size = tuple[int, int]  # height, width
OUTSIDE = 255  # the value of a mask's pixels that have no class


def scaled(size: Size, ratio: float) -> Size:
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


class RandomScale(v2.Transform):
    """Resize by a random factor, then crop to the size without it, or pad to it at a random place.

    Small factors zoom out, large ones crop; 0.1 to 2 is large-scale jitter.

    Args:
        scale: the smallest and the largest factor.
        fit: a function from an image's size to the size without the factor.
        fixed_size: height and width of the result; None: the result of `fit`.
        fill: the colour of padding, 0 to 255.
        outside: the value of a mask's padding.
    """

    def __init__(
        self, scale: list[float], fit: Callable[[Size], Size], fixed_size: list[int] | None, fill: list[int], outside: int = OUTSIDE
    ) -> None:
        super().__init__()
        self.factors, self.fit, self.fixed_size, self.fill, self.outside = scale, fit, fixed_size, fill, outside

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = F.get_size(flat_inputs[0])
        low, high = self.factors
        plain = self.fit((height, width))
        canvas = tuple(self.fixed_size or plain)
        resized = scaled(plain, low + (high - low) * float(torch.rand(())))
        # the canvas's corner in the resized image; negative means padding
        top, left = (round((inner - outer) * float(torch.rand(()))) for inner, outer in zip(resized, canvas, strict=True))
        return {"resized": list(resized), "canvas": canvas, "top": top, "left": left}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        (height, width), top, left = params["canvas"], params["top"], params["left"]
        rows, columns = params["resized"]
        inpt = F.resize(inpt, params["resized"], antialias=True)
        inpt = F.crop(inpt, max(top, 0), max(left, 0), min(height, rows), min(width, columns))
        above, before = max(-top, 0), max(-left, 0)
        padding = [before, above, width - min(width, columns) - before, height - min(height, rows) - above]
        fill = self.outside if isinstance(inpt, tv_tensors.Mask) else self.fill
        return F.pad(inpt, padding, fill=fill) if any(padding) else inpt
