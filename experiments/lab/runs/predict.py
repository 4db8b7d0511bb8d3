"""Predictions of a saved model for image files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from lab.config.detection_schema import DetectionDataConfig
from lab.config.schema import ClassifierConfig, DataConfig, ImagesConfig, PhotosConfig, TrainConfig
from lab.config.task_schema import DigitPairsConfig
from lab.data.sets import Norm
from lab.runs.saved import load_weights
from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.spec import DetectorConfig
from lab.tasks.fonts import drawable, font_for
from lab.tasks.multilabel.spec import MultilabelConfig
from lab.tasks.preference.spec import PreferenceTaskConfig


@dataclass
class Prediction:
    """Classes of one image with their probabilities, the surest first, and for a detector their boxes."""

    labels: list[str]
    scores: list[float]
    boxes: list[list[float]] | None = None  # xyxy in pixels of the file

    def tree(self) -> list[dict[str, Any]]:
        boxes: list[Any] = [{}] * len(self.labels) if self.boxes is None else [{"box": box} for box in self.boxes]
        return [{"label": label, "score": score} | box for label, score, box in zip(self.labels, self.scores, boxes, strict=True)]

    def line(self) -> str:
        return ", ".join(f"{label} {score:.1%}" for label, score in zip(self.labels, self.scores, strict=True)) or "nothing"


@dataclass
class Reward(Prediction):
    """The reward that a model of preferences gives one image."""

    def tree(self) -> list[dict[str, Any]]:
        return [{"reward": self.scores[0]}]

    def line(self) -> str:
        return f"reward {self.scores[0]:.3f}"


Predictor = Callable[[Image.Image], Prediction]
Reader = Callable[[Image.Image], Tensor]


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
    if isinstance(config.model, DetectorConfig):
        model, predict = _detector(config, state["classes"], norm, device, score)
    else:
        model, predict = _classifier(config, state["classes"], norm, device, top, score)
    load_weights(model, state)
    model.to(device).eval()
    return torch.no_grad()(predict)


def _classifier(
    config: TrainConfig, classes: list[str], norm: Norm, device: torch.device, top: int, score: float
) -> tuple[nn.Module, Predictor]:
    """Make the model and the predictor of one class, of sets of classes, or of rewards."""
    from lab.tasks.detection.data import size_of
    from lab.tasks.losses import activation_of, probabilities
    from lab.tasks.models import build_model

    several, reward = isinstance(config.task, MultilabelConfig), isinstance(config.task, PreferenceTaskConfig)
    if several:
        size = size_of(cast(DetectionDataConfig, config.data), None)[0]
    else:
        size = cast(ImagesConfig | DigitPairsConfig, config.data).image_size
    read = _as_held_out(config.data, size, norm)
    architecture = cast(ClassifierConfig, config.model)
    model = build_model(architecture, channels=len(norm.mean), classes=len(classes), image_size=size)

    def predict(image: Image.Image) -> Prediction:
        logits = model(read(image).to(device)).float()
        if reward:
            return Reward(["reward"], [float(logits)])
        values, order = probabilities(logits, activation_of(config.loss))[0].sort(descending=True)
        count = int((values >= score).sum()) if several else top
        return Prediction([classes[label] for label in order[:count].tolist()], values[:count].tolist())

    return model, predict


def _as_held_out(config: DataConfig, image_size: int, norm: Norm) -> Reader:
    """Make a function that reads an image as the run's held-out ones: (1, C, H, W), normalised."""
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

    if isinstance(config, PhotosConfig):
        from lab.data.folder import held_out_transform

        transform = held_out_transform(config, norm)
        return lambda image: transform(image)[None]
    if isinstance(config, DetectionDataConfig):
        batch_of = _batches(config, [image_size, image_size], norm)
        return lambda image: batch_of(image).images

    def read(image: Image.Image) -> Tensor:
        pixels = pil_to_tensor(image.convert("L") if len(norm.mean) == 1 else image).float() / 255
        return cast(Tensor, normalize(resize(pixels, [image_size] * 2, antialias=True), norm.mean, norm.std))[None]

    return read


def _batches(config: DetectionDataConfig, fixed_size: list[int] | None, norm: Norm) -> Callable[[Image.Image], DetectionBatch]:
    """Make a function from an image to a batch of it alone, normalised."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor

    from lab.tasks.detection.augment import Prepare
    from lab.tasks.detection.data import Collate, Sample

    fill = [round(value * 255) for value in norm.mean]
    prepare, collate = Prepare(config, fixed_size, fill, train=False), Collate(fixed_size, config.divisor, fill, None)

    def batch_of(image: Image.Image) -> DetectionBatch:
        pixels, boxes, labels = prepare(tv_tensors.Image(pil_to_tensor(image)), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        batch = collate([Sample(pixels, boxes, labels, (image.height, image.width), 0, 0)])
        batch.images = normalize(batch.images.float() / 255, norm.mean, norm.std)
        return batch

    return batch_of


def _detector(config: TrainConfig, classes: list[str], norm: Norm, device: torch.device, score: float) -> tuple[nn.Module, Predictor]:
    from lab.tasks.detection.data import size_of
    from lab.tasks.detection.task import build_detector, criterion

    scenes, architecture = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model)
    fixed = architecture.fixed_size
    model = build_detector(architecture, criterion(config.loss, config.box_loss, architecture), len(classes), size_of(scenes, fixed))
    batch_of = _batches(scenes, fixed, norm)

    def predict(image: Image.Image) -> Prediction:
        batch = batch_of(image).to(device)
        (found,) = model.detections(model(batch.images), batch.sizes, (batch.images.shape[-2], batch.images.shape[-1]))
        sure = found["scores"] >= score
        ratio = (batch.originals / batch.sizes).flip(1).repeat(1, 2)
        names = [classes[label] for label in found["labels"][sure].tolist()]
        return Prediction(names, found["scores"][sure].tolist(), (found["boxes"] * ratio)[sure].tolist())

    return model, predict


def draw(image: Image.Image, prediction: Prediction) -> Image.Image:
    """Draw boxes and their labels into the image, or a line with its classes above it."""
    from PIL import ImageDraw, ImageFont
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes

    ratio = max(1.0, 320 / max(image.size))
    large = image.resize((round(image.width * ratio), round(image.height * ratio)))
    if prediction.boxes is None:
        page = Image.new("RGB", (large.width, large.height + 20), "white")
        page.paste(large, (0, 20))
        font = font_for([prediction.line()])
        ImageDraw.Draw(page).text((4, 3), drawable(prediction.line(), font), fill="black", font=ImageFont.truetype(font, 11))
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
