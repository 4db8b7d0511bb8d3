"""Sizes and augmentation of images with boxes, by torchvision's transforms on tv_tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lab.config.detection_schema import DetectionDataConfig

Size = tuple[int, int]  # height, width
OUTSIDE = 255  # the value of a mask's pixels that have no class


def fitted(size: Size, config: DetectionDataConfig, fixed_size: list[int] | None) -> Size:
    """Return the size to which an image is resized: within `fixed_size`, or by its shorter and longer edges; proportions are kept."""
    if fixed_size:
        ratio = min(fixed_size[0] / size[0], fixed_size[1] / size[1])
    else:
        ratio = config.shortest / min(size) if config.shortest else 1.0
        if config.longest:
            ratio = min(ratio, config.longest / max(size))
    return scaled(size, ratio)


def scaled(size: Size, ratio: float) -> Size:
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


class RandomScale(v2.Transform):
    """Resize by a random factor, then crop to the size without it, or pad to it at a random place.

    Small factors zoom out, large ones crop; 0.1 to 2 is large-scale jitter.

    Args:
        scale: the smallest and the largest factor.
        fit: a function from an image's size to the size without the factor.
        fixed_size: height and width of the result; None: the result of `fit`.
        fill: the colour of padding, 0 to 255; a mask's is OUTSIDE.
    """

    def __init__(self, scale: list[float], fit: Callable[[Size], Size], fixed_size: list[int] | None, fill: list[int]) -> None:
        super().__init__()
        self.factors, self.fit, self.fixed_size, self.fill = scale, fit, fixed_size, fill

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
        fill = OUTSIDE if isinstance(inpt, tv_tensors.Mask) else self.fill
        return F.pad(inpt, padding, fill=fill) if any(padding) else inpt


class Prepare:
    """Turn a file's pixels and boxes into those of a batch.

    Args:
        config: sizes and augmentation.
        fixed_size: height and width that every image is fitted into.
        fill: the colour of padding, 0 to 255.
        train: augment if the config says so.
    """

    def __init__(self, config: DetectionDataConfig, fixed_size: list[int] | None, fill: list[int], *, train: bool) -> None:
        self.config, self.fixed_size, self.fill, self.augment = config, fixed_size, fill, train and config.augment
        self.before = v2.RandomHorizontalFlip(config.horizontal_flip)
        self.scale = RandomScale(config.scale, partial(fitted, config=config, fixed_size=fixed_size), fixed_size, fill)
        self.after = v2.RandomPhotometricDistort(p=config.photometric)
        self.sanitize = v2.Compose([v2.ClampBoundingBoxes(clamping_mode="hard"), v2.SanitizeBoundingBoxes(labels_getter=_labels)])

    def __call__(self, image: tv_tensors.Image, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return image (3, H, W) uint8, boxes (B, 4) xyxy float32 and labels (B,), without boxes that a crop removed."""
        size = (image.shape[-2], image.shape[-1])
        # unclamped until the visible share of each box is known
        found = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size, clamping_mode=None)
        if not self.augment:
            image, found = (F.resize(each, list(fitted(size, self.config, self.fixed_size)), antialias=True) for each in (image, found))
        else:
            image, found = self.scale(*self.before(image, found))
            kept = _visible(found) >= self.config.min_visible
            found, labels = tv_tensors.wrap(found[kept], like=found), labels[kept]
            image = self.after(image)
        image, found, labels = self.sanitize((image, found, labels))
        return image.as_subclass(Tensor), found.as_subclass(Tensor), labels


Prepared = tuple[Tensor, Tensor, Tensor]  # what Prepare returns


def mosaic(parts: list[Prepared], fill: list[int], min_visible: float) -> Prepared:
    """Put four prepared images side by side, two by two, and take a window of the first one's size at a random place.

    Source: Bochkovskiy et al., YOLOv4, 2020 (arXiv 2004.10934).

    Args:
        parts: of each the image (3, H, W) uint8, boxes (B, 4) xyxy and labels (B,). Each is cropped or padded to the first one's size.
        fill: colour of the padding, 0 to 255.
        min_visible: share of a box that the window must leave for the box to stay.
    """
    height, width = parts[0][0].shape[-2:]
    whole = torch.tensor(fill, dtype=torch.uint8).view(3, 1, 1).repeat(1, 2 * height, 2 * width)
    corners = []
    for number, (image, boxes, _) in enumerate(parts):
        top, left = height * (number // 2), width * (number % 2)
        part = image[:, :height, :width]
        whole[:, top : top + part.shape[1], left : left + part.shape[2]] = part
        corners.append(boxes + torch.tensor([left, top, left, top]))
    top, left = (int(torch.randint(side + 1, ())) for side in (height, width))
    window = whole[:, top : top + height, left : left + width]
    moved = torch.cat(corners) - torch.tensor([left, top, left, top])
    found = tv_tensors.BoundingBoxes(moved, format="XYXY", canvas_size=(height, width), clamping_mode=None)
    kept = _visible(found) >= min_visible
    boxes = F.clamp_bounding_boxes(tv_tensors.wrap(found[kept], like=found), clamping_mode="hard").as_subclass(Tensor)
    return window, boxes, torch.cat([labels for *_, labels in parts])[kept]


def _labels(sample: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return sample[2]


def _visible(boxes: tv_tensors.BoundingBoxes) -> Tensor:
    """Return the share of each box inside the canvas, (B,)."""
    height, width = boxes.canvas_size
    x1, y1, x2, y2 = boxes.as_subclass(Tensor).unbind(-1)
    inside = (x2.clamp(0, width) - x1.clamp(0, width)) * (y2.clamp(0, height) - y1.clamp(0, height))
    return inside / ((x2 - x1) * (y2 - y1)).clamp_min(torch.finfo(torch.float32).tiny)
