"""Predictions of a saved model for image files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from lab.config.choices import spec_of
from lab.config.errors import UserError
from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.runs.saved import load_weights
from lab.tasks.fonts import drawable, font_for
from lab.tasks.spec import find_object

SAID = 5  # of an image's labels, on the terminal


@dataclass
class Prediction:
    """Classes of one image with their probabilities, the surest first, and for a detector their boxes."""

    labels: list[str]
    scores: list[float]
    boxes: list[list[float]] | None = None  # xyxy in pixels of the file
    mask: Tensor | None = None  # (H, W) classes of the file's pixels, whose shares are the scores
    colors: Sequence[tuple[int, int, int]] = ()  # of each class of the mask; the pixels of class 0 stay as they are
    numbers: Sequence[int] = ()  # of the labels' classes in the mask

    def tree(self) -> list[dict[str, Any]]:
        boxes: list[Any] = [{}] * len(self.labels) if self.boxes is None else [{"box": box} for box in self.boxes]
        return [{"label": label, "score": score} | box for label, score, box in zip(self.labels, self.scores, boxes, strict=True)]

    def parts(self) -> list[str]:
        return [f"{label} {score:.1%}" for label, score in zip(self.labels, self.scores, strict=True)]

    def line(self) -> str:
        """Return the surest in words, as many as a line of a terminal takes; predictions.jsonl has all."""
        said = self.parts()
        return ", ".join(said[:SAID] + ([f"and {len(said) - SAID} more"] if len(said) > SAID else [])) or "nothing"


Predictor = Callable[[Image.Image], Prediction]


@dataclass
class Asked:
    """How predictions are made: normalisation, device, number of classes, and the least score."""

    norm: Norm
    device: torch.device
    top: int
    score: float


def predictor(config: TrainConfig, state: dict[str, Any], device: torch.device, *, top: int, score: float) -> Predictor:
    """Make a function from an image to the prediction of the checkpoint's model, with its averaged weights if it has them.

    Args:
        config: of the run.
        state: its checkpoint.
        device: where to compute.
        top: how many classes a classifier names.
        score: the least that a detection has, or a class among several that an image has.
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
    """Draw boxes and their labels into the image, or a line with its classes above it, with their colours where they have pixels."""
    from PIL import ImageDraw, ImageFont
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    if prediction.mask is not None:
        there = [label for label in prediction.mask.unique().tolist() if label > 0]
        if there:
            shown, colors = torch.stack([prediction.mask == label for label in there]), [prediction.colors[label] for label in there]
            image = to_pil_image(draw_segmentation_masks(pil_to_tensor(image), shown, alpha=0.5, colors=colors))
    ratio = max(1.0, 320 / max(image.size))
    large = image.resize((round(image.width * ratio), round(image.height * ratio)))
    if prediction.boxes is None:
        page = Image.new("RGB", (large.width, large.height + 20), "white")
        page.paste(large, (0, 20))
        font = font_for([prediction.line()])
        pen, letters, left = ImageDraw.Draw(page), ImageFont.truetype(font, 11), 4.0
        if prediction.mask is None:
            pen.text((left, 3), drawable(prediction.line(), font), fill="black", font=letters)
            return page
        for part, number in zip(prediction.parts(), prediction.numbers, strict=True):
            pen.rectangle((left, 5, left + 9, 14), fill=prediction.colors[number] if number else None, outline="grey")
            pen.text((left + 13, 3), drawable(part, font), fill="black", font=letters)
            left += 23 + pen.textlength(drawable(part, font), font=letters)
        return page
    if not prediction.boxes:
        return large
    text = [f"{label} {score:.2f}" for label, score in zip(prediction.labels, prediction.scores, strict=True)][
        ::-1
    ]  # the surest are drawn last
    boxes, font = torch.tensor(prediction.boxes[::-1]) * ratio, font_for(text)
    text = [drawable(each, font) for each in text]
    found = draw_bounding_boxes(pil_to_tensor(large), boxes, text, colors="red", width=2, font=font, font_size=11)
    return cast(Image.Image, to_pil_image(found))
