"""Predictions of a saved model for image files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from lab.config.choices import spec_of
from lab.config.detection_schema import DetectionDataConfig
from lab.config.errors import UserError
from lab.config.schema import ClassifierConfig, DataConfig, ImagesConfig, PhotosConfig, TrainConfig
from lab.config.task_schema import DigitPairsConfig
from lab.data.sets import Norm
from lab.runs.saved import load_weights
from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.spec import DetectorConfig
from lab.tasks.fonts import drawable, font_for
from lab.tasks.multilabel.spec import MultilabelConfig
from lab.tasks.preference.spec import PreferenceTaskConfig
from lab.tasks.spec import find_object

SAID = 5  # of an image's labels, on the terminal


@dataclass
class Prediction:
    """Classes of one image with their probabilities, the surest first, and for a detector their boxes."""

    labels: list[str]
    scores: list[float]
    boxes: list[list[float]] | None = None  # xyxy in pixels of the file
    mask: Tensor | None = None  # (H, W) classes of the file's pixels, whose shares are the scores

    def tree(self) -> list[dict[str, Any]]:
        boxes: list[Any] = [{}] * len(self.labels) if self.boxes is None else [{"box": box} for box in self.boxes]
        return [{"label": label, "score": score} | box for label, score, box in zip(self.labels, self.scores, boxes, strict=True)]

    def line(self) -> str:
        """Return the surest in words, as many as a line of a terminal takes; predictions.jsonl has all."""
        said = [f"{label} {score:.1%}" for label, score in zip(self.labels, self.scores, strict=True)]
        return ", ".join(said[:SAID] + ([f"and {len(said) - SAID} more"] if len(said) > SAID else [])) or "nothing"


@dataclass
class Reward(Prediction):
    """The reward that a model of preferences gives one image."""

    def tree(self) -> list[dict[str, Any]]:
        return [{"reward": self.scores[0]}]

    def line(self) -> str:
        return f"reward {self.scores[0]:.3f}"


Predictor = Callable[[Image.Image], Prediction]
Reader = Callable[[Image.Image], Tensor]


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


def classifier(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Make the model and the predictor of one class, of sets of classes, or of rewards."""
    from lab.tasks.detection.data import size_of
    from lab.tasks.losses import activation_of, probabilities
    from lab.tasks.models import build_model

    several, reward = isinstance(config.task, MultilabelConfig), isinstance(config.task, PreferenceTaskConfig)
    if several:
        size = size_of(cast(DetectionDataConfig, config.data), None)[0]
    else:
        size = cast(ImagesConfig | DigitPairsConfig, config.data).image_size
    read = _as_held_out(config.data, size, asked.norm)
    architecture = cast(ClassifierConfig, config.model)
    model = build_model(architecture, channels=len(asked.norm.mean), classes=len(classes), image_size=size)

    def predict(image: Image.Image) -> Prediction:
        logits = model(read(image).to(asked.device)).float()
        if reward:
            return Reward(["reward"], [float(logits)])
        values, order = probabilities(logits, activation_of(config.loss))[0].sort(descending=True)
        count = int((values >= asked.score).sum()) if several else asked.top
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


def detector(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    from lab.tasks.detection.data import size_of
    from lab.tasks.detection.task import build_detector, criterion

    scenes, architecture = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model)
    fixed = architecture.fixed_size
    model = build_detector(architecture, criterion(config.loss, config.box_loss, architecture), len(classes), size_of(scenes, fixed))
    batch_of = _batches(scenes, fixed, asked.norm)

    def predict(image: Image.Image) -> Prediction:
        batch = batch_of(image).to(asked.device)
        (found,) = model.detections(model(batch.images), batch.sizes, (batch.images.shape[-2], batch.images.shape[-1]))
        sure = found["scores"] >= asked.score
        ratio = (batch.originals / batch.sizes).flip(1).repeat(1, 2)
        names = [classes[label] for label in found["labels"][sure].tolist()]
        return Prediction(names, found["scores"][sure].tolist(), (found["boxes"] * ratio)[sure].tolist())

    return model, predict


def draw(image: Image.Image, prediction: Prediction) -> Image.Image:
    """Draw boxes and their labels into the image, or a line with its classes above it."""
    from PIL import ImageDraw, ImageFont
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    if prediction.mask is not None:
        shown = [prediction.mask == label for label in prediction.mask.unique().tolist() if label > 0]
        if shown:
            image = to_pil_image(draw_segmentation_masks(pil_to_tensor(image), torch.stack(shown), alpha=0.5))
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
