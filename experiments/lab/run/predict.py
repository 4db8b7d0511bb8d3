"""Predictions of a saved model for image files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lab.base.drawing import colour_of, with_boxes, with_masks
from lab.base.errors import UserError
from lab.base.fonts import drawable, font_for
from lab.config.objects import find_object
from lab.config.schema import TrainConfig
from lab.data.rle import as_coco, framed
from lab.data.sets import Norm
from lab.registry import spec_of
from lab.run.saved import load_weights

SAID = 5  # how many of an image's labels the terminal shows


@dataclass
class Prediction:
    """Classes of one image with their probabilities, the most probable first; for a detector also their boxes."""

    labels: list[str]
    scores: list[float]
    boxes: list[list[float]] | None = None  # xyxy in pixels of the file, or all corners of oriented boxes
    mask: Tensor | None = None  # (H, W) class of each pixel of the file; the scores are the classes' shares
    masks: Tensor | None = None  # (C, H, W) in place of the mask where classes overlap: which pixels are in each class
    colors: Sequence[tuple[int, int, int]] = ()  # one for each class of the mask; class 0 is not coloured, unless classes overlap
    instances: Sequence[bytes] | None = None  # masks of the boxes' objects, as lab.data.rle encodes them
    size: tuple[int, int] = (0, 0)  # height and width of the file, of instances
    numbers: Sequence[int] = ()  # numbers of the labels' classes, by which boxes and masks have their colours

    def tree(self) -> list[dict[str, Any]]:
        boxes: list[Any] = [{}] * len(self.labels)
        if self.boxes is not None:
            boxes = [{"box" if len(box) == 4 else "polygon": box} for box in self.boxes]
        if self.instances is not None:
            boxes = [box | {"mask": as_coco(mask, self.size)} for box, mask in zip(boxes, self.instances, strict=True)]
        return [{"label": label, "score": score} | box for label, score, box in zip(self.labels, self.scores, boxes, strict=True)]

    def parts(self) -> list[str]:
        return [f"{label} {score:.1%}" for label, score in zip(self.labels, self.scores, strict=True)]

    def line(self) -> str:
        """Return the most probable labels as one line for a terminal; predictions.jsonl has all."""
        said = self.parts()
        return ", ".join(said[:SAID] + ([f"and {len(said) - SAID} more"] if len(said) > SAID else [])) or "nothing"


Predictor = Callable[[Any], Prediction]  # of a PIL image in RGB, or with data.channels of a tensor (C, H, W)


@dataclass
class Asked:
    """How to predict: normalisation, device, number of classes, and the lowest score."""

    norm: Norm
    device: torch.device
    top: int
    score: float


def predictor(config: TrainConfig, state: dict[str, Any], device: torch.device, *, top: int, score: float) -> Predictor:
    """Return a function that predicts for an image by the checkpoint's model, with averaged weights if it has them.

    Args:
        config: the run's settings.
        state: the run's checkpoint.
        device: the device to compute on.
        top: how many classes a classifier names.
        score: the lowest score that is reported, of a detection or of one of an image's several classes.
    """
    norm = Norm(**state["norm"])
    spec = spec_of(config.task)
    if spec.predict is None:
        raise UserError(f"task={config.task.name}: its models are not asked by predict.py; evaluate.py scores them.")
    model, predict = find_object(spec.predict)(config, state["classes"], Asked(norm, device, top, score))
    load_weights(model, state)
    model.to(device).eval()
    return torch.no_grad()(predict)


def draw(image: Image.Image, prediction: Prediction) -> Image.Image:
    """Draw boxes with their labels into the image, or write its classes above it, in their colours if they have pixels."""
    from PIL import ImageDraw, ImageFont
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_segmentation_masks

    masks = {} if prediction.masks is None else {label: mask for label, mask in enumerate(prediction.masks) if mask.any()}
    if prediction.mask is not None:
        masks = {label: prediction.mask == label for label in prediction.mask.unique().tolist() if label > 0}
    if masks:
        colors = [prediction.colors[label] for label in masks]
        image = to_pil_image(draw_segmentation_masks(pil_to_tensor(image), torch.stack([*masks.values()]), alpha=0.5, colors=colors))
    if prediction.instances:
        colours = [colour_of(number) for number in prediction.numbers]
        image = with_masks(image, framed(reversed(prediction.instances), prediction.size), colours[::-1])
    ratio = max(1.0, 320 / max(image.size))
    large = image.resize((round(image.width * ratio), round(image.height * ratio)))
    if prediction.boxes is None:
        page = Image.new("RGB", (large.width, large.height + 20), "white")
        page.paste(large, (0, 20))
        font = font_for([prediction.line()])
        pen, letters, left = ImageDraw.Draw(page), ImageFont.truetype(font, 11), 4.0
        if prediction.mask is None and prediction.masks is None:
            pen.text((left, 3), drawable(prediction.line(), font), fill="black", font=letters)
            return page
        for part, number in zip(prediction.parts(), prediction.numbers, strict=True):
            fill = prediction.colors[number] if number or prediction.masks is not None else None
            pen.rectangle((left, 5, left + 9, 14), fill=fill, outline="grey")
            pen.text((left + 13, 3), drawable(part, font), fill="black", font=letters)
            left += 23 + pen.textlength(drawable(part, font), font=letters)
        return page
    if not prediction.boxes:
        return large
    names = [f"{label} {score:.2f}" for label, score in zip(prediction.labels, prediction.scores, strict=True)]
    boxes = [[side * ratio for side in box] for box in prediction.boxes]
    colours = [colour_of(number) for number in prediction.numbers or [0] * len(boxes)]
    return with_boxes(large, boxes[::-1], names[::-1], colours[::-1])  # the most probable are drawn last, on top
