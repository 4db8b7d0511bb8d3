"""Sizes and augmentation of images with boxes, by torchvision's transforms on tv_tensors."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lab.data.transforms import RandomScale, Size, scaled
from lab.detectors.schema import DetectionDataConfig


def fitted(size: Size, config: DetectionDataConfig, fixed_size: list[int] | None) -> Size:
    """Return the size to which an image is resized: within `fixed_size`, or by its shorter and longer edges; proportions are kept."""
    if fixed_size:
        ratio = min(fixed_size[0] / size[0], fixed_size[1] / size[1])
    else:
        ratio = config.edge / min(size) if config.edge else 1.0
        if config.longest:
            ratio = min(ratio, config.longest / max(size))
    return scaled(size, ratio)


class Prepared(NamedTuple):
    """An image as a batch takes it."""

    image: Tensor  # (3, H, W) uint8
    boxes: Tensor  # (B, 4) xyxy float32
    labels: Tensor  # (B,)
    masks: Tensor | None = None  # (B, H, W) uint8, 1 inside
    corners: Tensor | None = None  # (B, 4, 2) float32, of oriented boxes


class Prepare:
    """Turn a file's pixels, boxes and masks into those of a batch.

    Args:
        config: sizes and augmentation.
        fixed_size: height and width that every image is fitted into.
        fill: the colour of padding, 0 to 255.
        train: augment if the config says so.
    """

    def __init__(self, config: DetectionDataConfig, fixed_size: list[int] | None, fill: list[int], *, train: bool) -> None:
        self.config, self.fixed_size, self.fill, self.augment = config, fixed_size, fill, train and config.augment
        self.before = v2.RandomHorizontalFlip(config.horizontal_flip)
        self.scale = RandomScale(config.scale, partial(fitted, config=config, fixed_size=fixed_size), fixed_size, fill, 0)
        self.after = v2.RandomPhotometricDistort(p=config.photometric)
        self.sanitize = v2.Compose([v2.ClampBoundingBoxes(clamping_mode="hard"), v2.SanitizeBoundingBoxes(labels_getter=_labels)])

    def __call__(
        self, image: tv_tensors.Image, boxes: Tensor, labels: Tensor, masks: Tensor | None = None, corners: Tensor | None = None
    ) -> Prepared:
        """Return the image without the objects that a crop removed; masks: (B, H, W) uint8; corners: (B, 4, 2)."""
        size = (image.shape[-2], image.shape[-1])
        # unclamped until the visible share of each box is known
        found = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size, clamping_mode=None)
        shapes: list[Any] = [image, found]
        if masks is not None:
            shapes.append(tv_tensors.Mask(masks))
        if corners is not None:  # a box without area for each corner
            points = corners.repeat(1, 1, 2).flatten(0, 1)
            shapes.append(tv_tensors.BoundingBoxes(points, format="XYXY", canvas_size=size, clamping_mode=None))
        if not self.augment:
            shapes = [F.resize(each, list(fitted(size, self.config, self.fixed_size)), antialias=True) for each in shapes]
        else:
            shapes = list(self.scale(*self.before(*shapes)))
            shapes[0] = self.after(shapes[0])
        least = self.config.min_visible if self.augment else 0.0
        visible = (_visible(shapes[1]) >= least).nonzero()[:, 0]
        found = tv_tensors.wrap(shapes[1][visible], like=shapes[1])
        image, found, there = self.sanitize((shapes[0], found, visible))
        others = [each.as_subclass(Tensor) for each in shapes[2:]]
        if masks is not None:
            inside = others[0][there].bool().flatten(1).any(1)
            found, there = found[inside], there[inside]
            return Prepared(image.as_subclass(Tensor), found.as_subclass(Tensor), labels[there], others[0][there])
        turned = others[0][:, :2].unflatten(0, (-1, 4))[there] if others else None
        return Prepared(image.as_subclass(Tensor), found.as_subclass(Tensor), labels[there], corners=turned)


def mosaic(parts: list[Prepared], fill: list[int], min_visible: float) -> Prepared:
    """Put four prepared images side by side, two by two, and take a window of the first one's size at a random place.

    Source: Bochkovskiy et al., YOLOv4, 2020 (arXiv 2004.10934).

    Args:
        parts: the images with their objects, all with masks or all without. Each is cropped or padded to the first one's size.
        fill: colour of the padding, 0 to 255.
        min_visible: share of a box that the window must leave for the box to stay.
    """
    height, width = parts[0].image.shape[-2:]
    whole = torch.tensor(fill, dtype=torch.uint8).view(3, 1, 1).repeat(1, 2 * height, 2 * width)
    corners, masks, turned = [], [], []
    for number, (image, boxes, _, own, points) in enumerate(parts):
        top, left = height * (number // 2), width * (number % 2)
        part = image[:, :height, :width]
        whole[:, top : top + part.shape[1], left : left + part.shape[2]] = part
        corners.append(boxes + torch.tensor([left, top, left, top]))
        if own is not None:
            mask = own.new_zeros(len(own), *whole.shape[-2:])
            mask[:, top : top + part.shape[1], left : left + part.shape[2]] = own[:, :height, :width]
            masks.append(mask)
        if points is not None:
            turned.append(points + torch.tensor([left, top]))
    top, left = (int(torch.randint(side + 1, ())) for side in (height, width))
    window = whole[:, top : top + height, left : left + width]
    moved = torch.cat(corners) - torch.tensor([left, top, left, top])
    found = tv_tensors.BoundingBoxes(moved, format="XYXY", canvas_size=(height, width), clamping_mode=None)
    kept = _visible(found) >= min_visible
    boxes = F.clamp_bounding_boxes(tv_tensors.wrap(found[kept], like=found), clamping_mode="hard").as_subclass(Tensor)
    labels = torch.cat([part.labels for part in parts])[kept]
    if not masks:
        return Prepared(window, boxes, labels, corners=(torch.cat(turned) - torch.tensor([left, top]))[kept] if turned else None)
    inside = torch.cat(masks)[kept, top : top + height, left : left + width]
    there = inside.bool().flatten(1).any(1)
    return Prepared(window, boxes[there], labels[there], inside[there])


def _labels(sample: tuple[Tensor, ...]) -> Tensor:
    return sample[2]


def _visible(boxes: tv_tensors.BoundingBoxes) -> Tensor:
    """Return the share of each box inside the canvas, (B,)."""
    height, width = boxes.canvas_size
    x1, y1, x2, y2 = boxes.as_subclass(Tensor).unbind(-1)
    inside = (x2.clamp(0, width) - x1.clamp(0, width)) * (y2.clamp(0, height) - y1.clamp(0, height))
    return inside / ((x2 - x1) * (y2 - y1)).clamp_min(torch.finfo(torch.float32).tiny)
