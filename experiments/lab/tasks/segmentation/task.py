"""The segmentation task: a class for each pixel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lab.base.errors import UserError, first_line
from lab.base.fonts import letters_of
from lab.config.loss_schema import BoundaryConfig, CrossEntropyConfig, GeneralizedDiceConfig, HausdorffConfig, LossConfig, MccConfig
from lab.config.model_view import timm_name
from lab.config.schema import TrainConfig
from lab.data.batch import Batch
from lab.data.sets import Data, Norm
from lab.processes import distributed
from lab.run.export import Exportable, Images
from lab.run.predict import Asked, Prediction, Predictor
from lab.tasks.inference import prepared_as
from lab.tasks.losses import hyper_of, loss_of, per_class
from lab.tasks.metrics import Counts
from lab.tasks.models import model_norm
from lab.tasks.segmentation import OUTSIDE, MaskFolderConfig, MasksConfig, SegmenterConfig
from lab.tasks.segmentation.data import load_masks
from lab.tasks.segmentation.plots import Shown, masks_picture, palette
from lab.tasks.task import BaseTask, table_of


class Segmenter(nn.Module):
    """Map images (N, C, H, W) to logits (N, classes, H, W)."""

    def __init__(self, backbone: nn.Module, levels: list[int], channels: int, classes: int) -> None:
        """Make the layers; levels: channels of each of the backbone's levels, the finest first."""
        super().__init__()
        self.backbone = backbone
        self.reduce = nn.ModuleList(nn.Conv2d(count, channels, 1) for count in levels)
        self.mix = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = [reduce(level) for reduce, level in zip(self.reduce, self.backbone(images), strict=True)]
        size = levels[0].shape[-2:]
        together = levels[0]
        for level in levels[1:]:
            together = together + F.interpolate(level, size=size, mode="bilinear", align_corners=False)
        logits = self.classifier(self.mix(together))
        return F.interpolate(logits, size=images.shape[-2:], mode="bilinear", align_corners=False)


def build_segmenter(config: SegmenterConfig, *, channels: int, classes: int, image_size: int) -> Segmenter:
    """Return a segmenter on a timm backbone.

    Raises:
        UserError: timm's model has no levels of (N, C, H, W).
    """
    import timm

    try:
        name = timm_name(config.name)
        backbone: Any = timm.create_model(name, pretrained=config.pretrained, features_only=True, in_chans=channels, **config.args)
        with torch.no_grad():
            shapes = [tuple(level.shape) for level in backbone.eval()(torch.zeros(2, channels, image_size, image_size))]
    except Exception as error:  # an argument that timm looks up or calculates with raises any error
        raise UserError(f"model.name={config.name} cannot be a segmenter's backbone: {first_line(error)}") from None
    levels = list(backbone.feature_info.channels())
    if [shape[1] for shape in shapes] != levels or any(len(shape) != 4 for shape in shapes):
        raise UserError(f"model.name={config.name}: its levels have the shapes {shapes}; (N, channels, height, width) is expected.")
    return Segmenter(backbone.train(), levels, config.channels, classes)


@dataclass
class SegmentationResult:
    values: dict[str, float]
    confusion: list[list[int]]  # pixels; rows: true classes, columns: predicted classes; of overlapping ones, a row has tn, fp, fn and tp
    pixels: Tensor  # (C,), those of each class
    iou: Tensor  # (C,), nan for a class that does not occur
    shown: list[Shown]

    def tree(self) -> dict[str, Any]:
        return {"confusion": self.confusion}


class SegmentationCounts(Counts):
    """Count pixels, and keep the images that will be drawn."""

    def __init__(
        self,
        classes: list[str],
        pictures: int,
        device: torch.device,
        size: Callable[[int], tuple[int, int]] | None = None,
        *,
        overlapping: bool = False,
    ) -> None:
        """Make empty counts.

        Args:
            classes: their names.
            pictures: images to draw.
            device: of the counts.
            size: a function from an image's position to its file's height and width; None: those that the model sees.
            overlapping: whether targets and predictions are (N, C, H, W), 1 where a pixel is in a class.
        """
        super().__init__(device)
        self.classes, self.pictures, self.size, self.overlapping = classes, pictures, size, overlapping
        self.confusion = torch.zeros(len(classes) * (4 if overlapping else len(classes)), dtype=torch.int64, device=device)
        self.samples = torch.zeros((), dtype=torch.int64, device=device)
        self.shown: list[Shown] = []

    def add(self, found: Tensor, batch: Batch, loss_sum: Tensor, divisor: Tensor) -> None:
        there = batch.target != OUTSIDE
        if self.overlapping:
            first = torch.arange(len(self.classes), device=found.device).view(-1, 1, 1) * 4
            pairs = (first + 2 * batch.target + found)[there]
        else:
            pairs = batch.target[there] * len(self.classes) + found[there]
        self.confusion += torch.bincount(pairs, minlength=len(self.confusion))
        self.add_loss(loss_sum, divisor)
        self.samples += len(batch)
        left = self.pictures - len(self.shown)
        if left:
            for image, mask, said, position in zip(
                *(each[:left].cpu() for each in (batch.images, covered(batch.target), covered(found), batch.index)), strict=True
            ):
                size = self.size(int(position)) if self.size else (mask.shape[0], mask.shape[1])
                self.shown.append(Shown(image, mask, said, size))

    def result(self) -> SegmentationResult:
        """Return the result over all ranks."""
        for counts in (self.confusion, self.samples):
            distributed.total(counts)
        confusion = self.confusion.view(len(self.classes), -1).double().cpu()
        if self.overlapping:
            neither, false, missed, right = confusion.unbind(1)
            true, said, agreed = right + missed, right + false, right + neither
        else:
            right = agreed = confusion.diagonal()
            true, said = confusion.sum(1), confusion.sum(0)
        iou = right / (true + said - right)  # 0 / 0 for a class that does not occur
        values = {
            "miou": iou[~iou.isnan()].mean().item(),
            "pixel_accuracy": (agreed.sum() / confusion.sum()).item(),
            "loss": self.mean_loss(),
            "samples": float(self.samples),
        }
        return SegmentationResult(values, confusion.long().tolist(), true, iou, self.shown)


def covered(masks: Tensor) -> Tensor:
    """Return masks of classes, to be drawn: of overlapping ones (N, C, H, W) the last that each pixel is in, OUTSIDE where in none."""
    if masks.ndim < 4:
        return masks
    numbers = torch.arange(masks.shape[-3], device=masks.device).view(-1, 1, 1)
    last = torch.where(masks == 1, numbers, -1).amax(-3)
    return last.masked_fill(last < 0, OUTSIDE)


class Segmentation(BaseTask):
    monitor = "miou"
    score_names: tuple[str, ...] = ("pixel_accuracy",)
    line = "held-out mIoU {miou:.4f} · pixels {pixel_accuracy:.2%} · loss {loss:.4f}"
    table: Mapping[str, str] = {"held-out mIoU": "{miou:.4f}", "held-out pixels right": "{pixel_accuracy:.2%}"}

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        super().__init__(config, data, device)
        self.overlapping = classes_overlap(config)
        self.criterion = PixelCriterion(config, len(data.classes), device)

    def model(self) -> nn.Module:
        size = cast(MasksConfig, self.config.data).image_size
        architecture = cast(SegmenterConfig, self.config.model)
        return build_segmenter(architecture, channels=self.data.channels, classes=len(self.data.classes), image_size=size)

    def first_batch(self, batch: Batch) -> list[tuple[Image.Image, str]]:
        """Return images blended with the colours of their masks, pixels without a class as they are; the classes are the title."""
        colours = (torch.tensor(palette(len(self.data.classes))) * 255).round()
        found = []
        for image, mask in zip(self.seen(batch), covered(batch.target).cpu(), strict=False):
            pixels, there = torch.from_numpy(np.array(image)).float(), mask != OUTSIDE
            pixels[there] = (pixels[there] + colours[mask[there]]) / 2
            names = [self.data.classes[label] for label in mask[there].unique().tolist()]
            found.append((Image.fromarray(pixels.byte().numpy()), ", ".join(names)))
        return found

    def normalizer(self, batch: Batch) -> Tensor:
        return self.criterion.normalizer(batch.target)

    def loss(self, output: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch.target, normalizer)

    def scores(self, output: Tensor, batch: Batch) -> Tensor:
        """Sum each image's share of right pixels."""
        there = batch.target != OUTSIDE
        right = (self.found(output) == batch.target) & there
        return (right.flatten(1).sum(1) / there.flatten(1).sum(1).clamp(min=1)).sum()[None]

    def counts(self, loader: Any) -> SegmentationCounts:
        size = getattr(loader, "size", None)
        return SegmentationCounts(self.data.classes, self.settings.pictures, self.device, size, overlapping=self.overlapping)

    def found(self, output: Tensor) -> Tensor:
        """Return the predicted classes (N, H, W); of overlapping ones, which each pixel is in, (N, C, H, W)."""
        return (output > 0).long() if self.overlapping else output.argmax(1)

    def count(self, counts: SegmentationCounts, output: Tensor, batch: Batch) -> None:
        counts.add(self.found(output), batch, *self.whole_loss(output, batch))

    def per_class(self, result: SegmentationResult) -> list[dict[str, Any]]:
        return table_of(self.data.classes, {"pixels": result.pixels.long(), "iou": result.iou})

    def pictures(self, result: SegmentationResult, folder: Path) -> list[Path]:
        if not result.shown:
            return []
        path = folder / "masks.png"
        with letters_of(self.data.classes):
            masks_picture(result.shown, self.data.classes, self.data.norm, path)
        return [path]


OF_REGIONS: dict[str, dict[str, Any]] = {"lovasz": {"per_image": True}, "rowwise": {"empty": "zero"}}
"""What makes parts of a batch add up, as overlap losses do: Lovász losses of each image; no hard pixels where none has a class."""
NO_CLASS = -100
"""The index of pixels without a class in losses of distances, which take no other."""


class PixelCriterion:
    """Losses of pixels are summed over pixels with a class and divided by their number (with class weights, by their sum). Losses of
    regions are means of each image, and divided by the number of images; so is the mean over the hardest pixels of a batch, which each
    process, and each part of an accumulated batch, chooses among its own. Where classes overlap, a pixel's classes count one by one.
    """

    def __init__(self, config: TrainConfig, classes: int, device: torch.device) -> None:
        loss, self.overlapping = config.loss, classes_overlap(config)
        self.regions = regions_of(loss, overlapping=self.overlapping)
        if self.regions is None:
            self.loss, self.hyper = loss_of(loss, device)
            kind = self.loss.template.name
            if kind == "overlap" and self.overlapping:
                self.regions = of_channels(partial(self.loss.function, **self.hyper))
            elif self.overlapping:
                if kind != "elementwise":
                    raise UserError(f"loss={loss.title}: data.overlapping=true takes losses of classes under a sigmoid, or of overlaps.")
                if (factors := per_class("loss.pos_weight", getattr(loss, "pos_weight", None), classes, device)) is not None:
                    self.hyper["pos_weight"] = factors.view(-1, 1, 1)
            elif kind in ("overlap", "lovasz") or loss.name == "ohem_ce":
                self.regions = partial(self.loss.function, **self.hyper, **OF_REGIONS.get(kind, {}), ignore_index=OUTSIDE)
            elif kind != "rowwise":
                raise UserError(f"loss={loss.title}: task=segmentation takes losses of classes under a softmax, or of regions.")
        self.torch = loss.implementation == "torch"
        if self.torch and loss.name != "ce":
            raise UserError(f"loss.implementation=torch: torch has no loss={loss.name}; only loss=ce can be compared with.")
        given = loss.class_weight if isinstance(loss, CrossEntropyConfig) else None
        self.weight = per_class("loss.class_weight", given, classes, device)

    def normalizer(self, target: Tensor) -> Tensor:
        if self.regions is not None:
            return torch.full((), float(len(target)), device=target.device)
        there = target != OUTSIDE
        return there.sum().float() if self.weight is None else self.weight[target[there]].sum()

    def __call__(self, logits: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        if self.regions is not None:
            return self.regions(logits, target) * len(target) / normalizer
        if self.overlapping:
            given: dict[str, Any] = {"mask": target != OUTSIDE, "reduction": "sum", "normalizer": normalizer}
            return cast(Tensor, self.loss.function(logits, target == 1, **self.hyper, **given))
        options = self.hyper if self.weight is None else {**self.hyper, "weight": self.weight}
        if self.torch:
            known: dict[str, Any] = {name: value for name, value in options.items() if name in ("label_smoothing", "weight")}
            return F.cross_entropy(logits.float(), target, ignore_index=OUTSIDE, reduction="sum", **known) / normalizer
        return cast(Tensor, self.loss.function(logits, target, **options, ignore_index=OUTSIDE, reduction="sum", normalizer=normalizer))


def classes_overlap(config: TrainConfig) -> bool:
    """Return whether each class has a mask of its own."""
    return isinstance(config.data, MaskFolderConfig) and config.data.overlapping


def of_channels(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss of regions for masks (N, C, H, W) of overlapping classes, each with its own pixels that count."""
    return lambda logits, target: loss(logits, target == 1, activation="sigmoid", mask=target != OUTSIDE)


def regions_of(config: LossConfig, *, overlapping: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the function of a loss of regions that is not in the registry; None for other losses."""
    from lossforge.losses import boundary_loss, dice_loss, generalized_dice_loss, hausdorff_loss, mcc_loss

    if isinstance(config, (GeneralizedDiceConfig, MccConfig)):
        function: Callable[..., Tensor] = mcc_loss if isinstance(config, MccConfig) else generalized_dice_loss
        of_classes = partial(function, **hyper_of(config))
        return of_channels(of_classes) if overlapping else partial(of_classes, ignore_index=OUTSIDE)
    if not isinstance(config, BoundaryConfig):
        return None
    distances = partial(hausdorff_loss, alpha=config.alpha) if isinstance(config, HausdorffConfig) else boundary_loss

    if overlapping:
        dice, far = of_channels(dice_loss), of_channels(distances)
        return lambda logits, target: config.lambda_dice * dice(logits, target) + config.lambda_distance * far(logits, target)

    def beside_dice(logits: Tensor, target: Tensor) -> Tensor:
        of_distances = distances(logits, target.where(target != OUTSIDE, NO_CLASS))
        return config.lambda_dice * dice_loss(logits, target, ignore_index=OUTSIDE) + config.lambda_distance * of_distances

    return beside_dice


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Segmentation:
    files = isinstance(config.data, MaskFolderConfig)
    norm = model_norm(config.model, saved) if saved or config.model.pretrained or files else None
    return Segmentation(config, load_masks(cast(MasksConfig, config.data), device, config.seed, norm), device)


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to its pixels' classes and each class's share."""
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

    size, channels = cast(MasksConfig, config.data).image_size, len(asked.norm.mean)
    model = build_segmenter(cast(SegmenterConfig, config.model), channels=channels, classes=len(classes), image_size=size)

    colors = [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in palette(len(classes))]
    overlapping = classes_overlap(config)

    def predicted(image: Image.Image) -> Prediction:
        pixels = pil_to_tensor(image.convert("L") if channels == 1 else image).float() / 255
        seen = normalize(resize(pixels, [size, size], antialias=True), asked.norm.mean, asked.norm.std)
        logits = F.interpolate(model(seen[None].to(asked.device)), size=(image.height, image.width), mode="bilinear", align_corners=False)
        if overlapping:
            each = (logits[0] > 0).cpu()
            found = each.flatten(1).float().mean(1)
        else:
            mask = logits[0].argmax(0).cpu()
            found = torch.bincount(mask.flatten(), minlength=len(classes)) / mask.numel()
        share, order = found.sort(descending=True)
        count = min(asked.top, int((share > 0).sum()))
        numbers = order[:count].tolist()
        known: dict[str, Any] = {"masks": each} if overlapping else {"mask": mask}
        return Prediction([classes[label] for label in numbers], share[:count].tolist(), **known, colors=colors, numbers=numbers)

    return model, predicted


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the model, from images to the probabilities of each pixel's classes, to export."""
    size, channels = cast(MasksConfig, config.data).image_size, len(norm.mean)
    model = build_segmenter(cast(SegmenterConfig, config.model), channels=channels, classes=len(classes), image_size=size)
    return Exportable(
        Images(model, norm, nn.Sigmoid() if classes_overlap(config) else nn.Softmax(1)),
        model,
        [channels, size, size],
        "probabilities of each pixel's classes: class, row, column",
        prepare=prepared_as(config.data, size, norm),
    )
