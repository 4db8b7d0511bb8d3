"""What a saved model says of image files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from lab.config.detection_schema import DetectionDataConfig
from lab.config.schema import ClassifierConfig, DataConfig, FolderConfig, ImagesConfig, TrainConfig
from lab.config.task_schema import DigitPairsConfig
from lab.data.sets import Norm
from lab.runs.saved import load_weights
from lab.tasks.detection.spec import DetectorConfig
from lab.tasks.fonts import drawable, font_for
from lab.tasks.multilabel.spec import MultilabelConfig
from lab.tasks.preference.spec import PreferenceTaskConfig


@dataclass
class Said:
    """Of one image: classes with their probabilities, the surest first, and for a detector their boxes."""

    labels: list[str]
    scores: list[float]
    boxes: list[list[float]] | None = None  # xyxy in pixels of the file

    def tree(self) -> list[dict[str, Any]]:
        boxes: list[Any] = [{}] * len(self.labels) if self.boxes is None else [{"box": box} for box in self.boxes]
        return [{"label": label, "score": score} | box for label, score, box in zip(self.labels, self.scores, boxes, strict=True)]

    def line(self) -> str:
        return ", ".join(f"{label} {score:.1%}" for label, score in zip(self.labels, self.scores, strict=True)) or "nothing"


@dataclass
class Rated(Said):
    """Of one image: the reward that a model of preferences gives it."""

    def tree(self) -> list[dict[str, Any]]:
        return [{"reward": self.scores[0]}]

    def line(self) -> str:
        return f"reward {self.scores[0]:.3f}"


Predictor = Callable[[Image.Image], Said]


def predictor(config: TrainConfig, state: dict[str, Any], device: torch.device, *, top: int, score: float) -> Predictor:
    """From an image to what the checkpoint's model says, its averaged weights if it has them.

    Args:
        config: of the run.
        state: its checkpoint.
        device: where to compute.
        top: how many classes a classifier names.
        score: the least that a detection has, or a class among several that an image has.
    """
    given = config, state["classes"], Norm(**state["norm"]), device
    if isinstance(config.task, MultilabelConfig):
        model, say = _label_sets(*given, score)
    elif isinstance(config.task, PreferenceTaskConfig):
        model, say = _rewards(config, Norm(**state["norm"]), device)
    else:
        model, say = _detector(*given, score) if isinstance(config.model, DetectorConfig) else _classifier(*given, top)
    load_weights(model, state)
    model.to(device).eval()
    return torch.no_grad()(say)


def _classifier(config: TrainConfig, classes: list[str], norm: Norm, device: torch.device, top: int) -> tuple[nn.Module, Predictor]:
    from lab.tasks.losses import activation_of, probabilities
    from lab.tasks.models import build_model

    images, channels = cast(ImagesConfig, config.data), len(norm.mean)
    model = build_model(cast(ClassifierConfig, config.model), channels=channels, classes=len(classes), image_size=images.image_size)
    read = _as_trained(images, images.image_size, norm)
    kind = activation_of(config.loss)

    def say(image: Image.Image) -> Said:
        probability = probabilities(model(read(image)[None].to(device)).float(), kind)[0]
        values, places = probability.topk(min(top, len(classes)))
        return Said([classes[place] for place in places.tolist()], values.tolist())

    return model, say


def _label_sets(config: TrainConfig, classes: list[str], norm: Norm, device: torch.device, score: float) -> tuple[nn.Module, Predictor]:
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor

    from lab.data.coco import Collate, Sample
    from lab.tasks.detection.augment import Prepare
    from lab.tasks.detection.data import size_of
    from lab.tasks.losses import activation_of, probabilities
    from lab.tasks.models import build_model

    scenes = cast(DetectionDataConfig, config.data)
    size = list(size_of(scenes, None))
    model = build_model(cast(ClassifierConfig, config.model), channels=3, classes=len(classes), image_size=size[0])
    fill = [round(value * 255) for value in norm.mean]
    prepare, collate = Prepare(scenes, size, fill, train=False), Collate(size, scenes.divisor, fill, None)

    def say(image: Image.Image) -> Said:
        pixels, boxes, labels = prepare(tv_tensors.Image(pil_to_tensor(image)), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        batch = collate([Sample(pixels, boxes, labels, (image.height, image.width), 0, 0)])
        inputs = normalize(batch.images.float() / 255, norm.mean, norm.std).to(device)
        values, places = probabilities(model(inputs).float(), activation_of(config.loss))[0].sort(descending=True)
        sure = int((values >= score).sum())
        return Said([classes[place] for place in places[:sure].tolist()], values[:sure].tolist())

    return model, say


def _rewards(config: TrainConfig, norm: Norm, device: torch.device) -> tuple[nn.Module, Predictor]:
    from lab.tasks.models import build_model

    size = cast(DigitPairsConfig, config.data).image_size
    model = build_model(cast(ClassifierConfig, config.model), channels=len(norm.mean), classes=1, image_size=size)
    read = _as_trained(config.data, size, norm)
    return model, lambda image: Rated(["reward"], [float(model(read(image)[None].to(device)))])


def _as_trained(config: DataConfig, image_size: int, norm: Norm) -> Callable[[Image.Image], Tensor]:
    """An image as the run's held-out ones: (C, H, W), normalised."""
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

    if isinstance(config, FolderConfig):
        from lab.data.folder import held_out_transform

        return held_out_transform(config, norm)

    def read(image: Image.Image) -> Tensor:
        pixels = pil_to_tensor(image.convert("L") if len(norm.mean) == 1 else image).float() / 255
        return normalize(resize(pixels, [image_size] * 2, antialias=True), norm.mean, norm.std)

    return read


def _detector(config: TrainConfig, classes: list[str], norm: Norm, device: torch.device, score: float) -> tuple[nn.Module, Predictor]:
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor

    from lab.data.coco import Collate, Sample
    from lab.tasks.detection.augment import Prepare
    from lab.tasks.detection.data import size_of
    from lab.tasks.detection.task import build_detector, criterion

    scenes, architecture = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model)
    fixed = architecture.fixed_size
    model = build_detector(architecture, criterion(config.loss, config.box_loss, architecture), len(classes), size_of(scenes, fixed))
    fill = [round(value * 255) for value in norm.mean]
    prepare, collate = Prepare(scenes, fixed, fill, train=False), Collate(fixed, scenes.divisor, fill, None)

    def say(image: Image.Image) -> Said:
        nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
        pixels, boxes, labels = prepare(tv_tensors.Image(pil_to_tensor(image)), *nothing)
        batch = collate([Sample(pixels, boxes, labels, (image.height, image.width), 0, 0)])
        inputs = normalize(batch.images.float() / 255, norm.mean, norm.std).to(device)
        (found,) = model.detections(model(inputs), batch.sizes, (inputs.shape[-2], inputs.shape[-1]))
        sure = found["scores"] >= score
        ratio = (batch.originals / batch.sizes).flip(1).repeat(1, 2).to(device)
        corners = (found["boxes"] * ratio)[sure].cpu()
        names = [classes[label] for label in found["labels"][sure].tolist()]
        return Said(names, found["scores"][sure].tolist(), corners.tolist())

    return model, say


def drawn(image: Image.Image, said: Said) -> Image.Image:
    """The image with boxes and their labels, or under a line with its classes."""
    from PIL import ImageDraw, ImageFont
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes

    ratio = max(1.0, 320 / max(image.size))
    large = image.resize((round(image.width * ratio), round(image.height * ratio)))
    if said.boxes is None:
        page = Image.new("RGB", (large.width, large.height + 20), "white")
        page.paste(large, (0, 20))
        font = font_for([said.line()])
        ImageDraw.Draw(page).text((4, 3), drawable(said.line(), font), fill="black", font=ImageFont.truetype(font, 11))
        return page
    if not said.boxes:
        return large
    text = [f"{label} {score:.2f}" for label, score in zip(said.labels, said.scores, strict=True)][::-1]  # the surest are drawn last
    boxes, font = torch.tensor(said.boxes[::-1]) * ratio, font_for(text)
    text = [drawable(each, font) for each in text]
    found = draw_bounding_boxes(pil_to_tensor(large), boxes, text, colors="red", width=2, font=font, font_size=11)
    return cast(Image.Image, to_pil_image(found))
