"""Predictions and exports of classifiers, for the tasks that use one, and a model's mean prediction over several views of an image."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

from lab.base.errors import UserError, unknown
from lab.config.model_view import timm_name
from lab.config.schema import ClassifierConfig, CustomModelConfig, DataConfig, PhotosConfig, TrainConfig
from lab.data.sets import Norm, normalised
from lab.data.transforms import held_out_transform
from lab.registry import spec_of
from lab.run.export import Exportable, Images
from lab.run.predict import Asked, Prediction, Predictor
from lab.tasks.losses import activation_of, probabilities
from lab.tasks.models import build_classifier, timm_options

Reader = Callable[[Any], Tensor]


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to its most probable classes."""
    size = image_size(config)
    model, read = classifier(config, classes, asked.norm, size), reader(config.data, size, asked.norm)

    return model, lambda image: likeliest(model(read(image).to(asked.device)), config, classes, most=asked.top)


def likeliest(logits: Tensor, config: TrainConfig, classes: list[str], *, most: int | None = None, score: float = 0.0) -> Prediction:
    """Return the classes of logits (1, C) whose probability is at least `score`, the most probable first."""
    values, order = probabilities(logits.float(), activation_of(config.loss))[0].sort(descending=True)
    kept = values[: int((values >= score).sum())][:most].tolist()
    return Prediction([classes[label] for label in order[: len(kept)].tolist()], kept)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the model, from images to the classes' probabilities, to export."""
    return of_probabilities(config, classes, norm, image_size(config))


def of_probabilities(config: TrainConfig, classes: list[str], norm: Norm, size: int) -> Exportable:
    model = classifier(config, classes, norm, size)
    said = partial(probabilities, kind=activation_of(config.loss))
    return Exportable(
        Images(model, norm, said, config.data),
        model,
        [len(norm.mean), size, size],
        "probabilities of the classes",
        prepare=prepared_as(config.data, size, norm),
        timm=_timm(config, classes, norm, size),
    )


def _timm(config: TrainConfig, classes: list[str], norm: Norm, size: int) -> dict[str, Any]:
    """Return the arguments by which timm.create_model makes the same model; empty where it has none, as the user's own."""
    model = cast(ClassifierConfig, config.model)
    if isinstance(model, CustomModelConfig) or config.loss.takes == "cosines":
        return {}
    options = timm_options(model, channels=len(norm.mean), classes=len(classes), image_size=size)
    return {"model_name": timm_name(model.name)} | options | model.args


def image_size(config: TrainConfig) -> int:
    """Return the side of the images that a task's classifiers take.

    Raises:
        UserError: the task's models are not classifiers, or its data has no image_size.
    """
    size = getattr(config.data, "image_size", None)
    models = spec_of(config.task).model
    if isinstance(models, tuple) or not issubclass(models, ClassifierConfig) or size is None:
        raise UserError(
            f"task={config.task.name}: its models are not classifiers of images of data.image_size pixels a side; "
            "its TaskSpec needs a predict and an export of its own, or None where it has none."
        )
    return int(size)


def classifier(config: TrainConfig, classes: list[str], norm: Norm, size: int) -> nn.Module:
    return build_classifier(config, channels=len(norm.mean), classes=len(classes), image_size=size)


def prepared_as(config: DataConfig, size: int, norm: Norm) -> dict[str, Any]:
    """Return how `reader` prepares an image, for the metadata of an exported model."""
    square = {"height": size, "width": size}
    if not isinstance(config, PhotosConfig):
        resize: dict[str, Any] = {"rule": "exactly", **square}
        return {"resize": resize, "interpolation": "bilinear", "antialias": True, "crop": None, "pad": None}
    if config.val_transform:
        return {"transform": config.val_transform, "size": square}
    from timm.data.constants import DEFAULT_CROP_PCT

    side = round(size / (config.crop_pct or 1.0)) if config.channels else int(size / (config.crop_pct or DEFAULT_CROP_PCT))
    pad = None
    if config.crop_mode == "squash":
        side = size if config.channels else side
        resize = {"rule": "exactly", "height": side, "width": side}
    elif config.crop_mode == "border" and not config.channels:
        resize = {"rule": "longer side, keep proportions", "longest": side}
        pad = {"side": "all, image in the centre", **square, "fill": [round(255 * value) for value in norm.mean]}
    else:
        resize = {"rule": "shorter side, keep proportions", "shortest": side}
    by = config.interpolation or "bilinear"
    if config.channels and by != "nearest":
        by = "bilinear"
    return {"resize": resize, "interpolation": by, "antialias": by != "nearest", "crop": {"from": "centre", **square}, "pad": pad}


def reader(config: DataConfig, size: int, norm: Norm) -> Reader:
    """Return a function that prepares an image like the run's held-out ones: (1, C, H, W), normalised."""
    if isinstance(config, PhotosConfig):
        transform = held_out_transform(config, norm)
        mean, std = norm.on(torch.device("cpu"))

        def seen(image: Any) -> Tensor:
            pixels = transform(image)[None]
            return normalised(pixels, mean, std) if pixels.dtype == torch.uint8 else pixels

        return seen

    def read(image: Image.Image) -> Tensor:
        pixels = pil_to_tensor(image.convert("L") if len(norm.mean) == 1 else image).float() / 255
        return cast(Tensor, normalize(resize(pixels, [size] * 2, antialias=True), norm.mean, norm.std))[None]

    return read


SIDE = 0.875  # of a crop, as a share of the image's


def flip(images: Tensor) -> list[Tensor]:
    """Return the images, and their mirror images."""
    return [images, images.flip(-1)]


def five_crop(images: Tensor) -> list[Tensor]:
    """Return the four corners and the centre of the images (N, C, H, W), each scaled to the whole size."""
    height, width = images.shape[-2:]
    h, w = round(SIDE * height), round(SIDE * width)
    places = [(0, 0), (0, width - w), (height - h, 0), (height - h, width - w), ((height - h) // 2, (width - w) // 2)]
    crops = [images[:, :, top : top + h, left : left + w] for top, left in places]
    return [F.interpolate(crop, size=(height, width), mode="bilinear", antialias=True) for crop in crops]


VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {"flip": flip, "five_crop": five_crop}


class SeveralViews(nn.Module):
    """Call a model on several views of the images, and merge its outputs."""

    def __init__(self, model: nn.Module, name: str, merged: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.model, self.views, self.merged = model, VIEWS[name], merged

    def forward(self, images: Tensor) -> Tensor:
        return self.merged([self.model(view) for view in self.views(images)])


def several_views(model: nn.Module, name: str, task: object, task_name: str) -> nn.Module:
    """Return the model with the views of `tta=name`.

    Raises:
        UserError: there are no such views, or the task cannot merge outputs.
    """
    if name not in VIEWS:
        raise unknown(f"tta={name}", name, VIEWS)
    if (merged := getattr(task, "merged", None)) is None:
        raise UserError(f"tta={name}: task={task_name} has no mean of several views; tasks of one output an image have.")
    return SeveralViews(model, name, merged)


def mean_of_probabilities(outputs: list[Tensor], activation: str) -> Tensor:
    """Return logits whose probabilities are the mean of those of several logits (N, C); activation: softmax or sigmoid."""
    logits = torch.stack([output.float() for output in outputs])
    if activation == "softmax":
        return logits.log_softmax(-1).logsumexp(0)
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)
