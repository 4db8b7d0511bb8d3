"""The detection task: RetinaNet and FCOS under any of the losses that take class indices."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.config.detection_schema import DetectionDataConfig
from lab.config.errors import UserError
from lab.config.loss_schema import CustomConfig
from lab.config.schema import BoxLossConfig, LossConfig, TrainConfig
from lab.data.coco_file import CocoFile
from lab.data.sets import Norm
from lab.processes import distributed
from lab.tasks.detection.backbone import backbone
from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.data import DetectionData, FileLoader, enlarged, load_detection_data, size_of
from lab.tasks.detection.detectors import FCOS, RetinaNet
from lab.tasks.detection.loss import DetectionLoss
from lab.tasks.detection.metrics import DetectionCounts, DetectionResult
from lab.tasks.detection.plots import detections_picture, precision_recall_picture
from lab.tasks.detection.spec import CustomBoxConfig, DetectionConfig, DetectorConfig, FcosConfig, RetinaNetConfig
from lab.tasks.detection.types import DetectorOutput, Matched
from lab.tasks.fonts import letters_of
from lab.tasks.losses import custom_loss
from lab.tasks.models import model_norm
from lab.tasks.task import Stateless, table_of
from lossforge.losses.registry import LOSSES, Loss

FIGURES = ("map", "map50", "map75")


class Counts:
    """Of an evaluation: what was found, and the loss."""

    def __init__(self, data: DetectionData, device: torch.device, truth: CocoFile) -> None:
        self.detections = DetectionCounts(data.classes, data.category_ids, device, truth)
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, positives

    def result(self) -> DetectionResult:
        result = self.detections.result()
        total, positives = distributed.total(self.loss).tolist()
        result.values["loss"] = total / positives if positives else float("nan")
        result.values |= {f"ap/{name}": value for name, value in result.per_class.items()}
        return result


class Detection(Stateless):
    monitor = "map"
    score_names: tuple[str, ...] = ("positives",)

    def __init__(self, config: TrainConfig, data: DetectionData, image_size: tuple[int, int], device: torch.device) -> None:
        """image_size: height and width of a batch, which backbones of fixed size are made for."""
        self.data, self.device = data, device
        self.settings = cast(DetectionConfig, config.task)
        model = cast(DetectorConfig, config.model)
        self.detector = build_detector(model, criterion(config.loss, config.box_loss, model), len(data.classes), image_size)

    def model(self) -> nn.Module:
        return self.detector

    def prepare(self, batch: DetectionBatch, *, training: bool) -> DetectionBatch:
        """With what each anchor shall predict."""
        batch.matched = self.detector.match(batch)
        return batch

    def normalizer(self, batch: DetectionBatch) -> Tensor:
        """The number of positives."""
        return _matched(batch).positives

    def loss(self, output: DetectorOutput, batch: DetectionBatch, normalizer: Tensor) -> Tensor:
        """The batch's losses together."""
        return torch.stack(list(self.detector.loss(output, _matched(batch), normalizer.clamp(min=1)).values())).sum()

    def scores(self, output: DetectorOutput, batch: DetectionBatch) -> Tensor:
        return self.normalizer(batch)[None]

    def counts(self, loader: FileLoader) -> Counts:
        return Counts(self.data, self.device, loader.file)

    def count(self, counts: Counts, output: DetectorOutput, batch: DetectionBatch) -> None:
        positives = self.normalizer(batch)
        counts.loss += torch.stack([self.loss(output, batch, torch.ones_like(positives)), positives]).double()
        height, width = batch.images.shape[-2:]
        counts.detections.add(self.detector.detections(output, batch.sizes, (height, width)), batch)

    def per_class(self, result: DetectionResult) -> list[dict[str, Any]]:
        assert result.truth is not None
        nothing = [float("nan")]
        average = [result.per_class[name] for name in self.data.classes]
        at_half = [sum(curve) / len(curve) for curve in (result.precision.get(name, nothing) for name in self.data.classes)]
        return table_of(self.data.classes, {"boxes": result.truth.counts(), "ap": torch.tensor(average), "ap50": torch.tensor(at_half)})

    def pictures(self, result: DetectionResult, folder: Path) -> list[Path]:
        """Beside the pictures, all that was found as COCO results."""
        found, curves, results = folder / "detections.png", folder / "precision_recall.png", folder / "detections.json"
        assert result.truth is not None
        detections_picture(result, result.truth, self.data.classes, found, images=self.settings.pictures)
        with letters_of(self.data.classes):
            precision_recall_picture(result, curves)
        result.export_coco(results)
        return [found, curves, results]

    def headline(self, result: DetectionResult) -> str:
        figures = " · ".join(f"{name} {result.values[name.lower()]:.4f}" for name in ("mAP", "mAP50", "mAP75"))
        return f"held-out {figures} · loss {result.values['loss']:.4f}"

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        return {f"held-out {name}": f"{best[name.lower()]:.4f}" for name in ("mAP", "mAP50", "mAP75")}


def _matched(batch: DetectionBatch) -> Matched:
    assert batch.matched is not None, "prepare the batch first"
    return batch.matched


def criterion(loss: LossConfig, box: BoxLossConfig, model: DetectorConfig) -> DetectionLoss:
    """`auto` boxes are compared as the detector's paper does.

    Raises:
        UserError: a setting has no effect here, or a loss of one's own cannot be found or is of another kind.
    """
    own = "l1" if isinstance(model, RetinaNetConfig) else "giou"
    classes: str | Loss = loss.name
    boxes: str | Loss = own if box.name == "auto" else box.name
    box_hyper = {item.name: getattr(box, item.name) for item in fields(box) if item.name not in ("name", "weight")}
    if isinstance(loss, CustomConfig):
        classes, hyper = _own("loss", loss, "elementwise"), loss.hyper
    else:
        hyper = _hyper("loss", loss, LOSSES[loss.name].hyper)
    if isinstance(box, CustomBoxConfig):
        boxes, box_hyper = _own("box_loss", box, "boxes"), box.hyper
    return DetectionLoss(classes, boxes, hyper=hyper, box_hyper=box_hyper, box_weight=box.weight, implementation=loss.implementation)


WANTED = {
    "elementwise": "a detector asks of each class whether it is there, so that only losses of elements fit (lossforge.losses.elementwise)",
    "boxes": "only losses of pairs of boxes fit (lossforge.losses.boxes)",
}


def _own(group: str, config: CustomConfig | CustomBoxConfig, template: str) -> Loss:
    """The loss that the settings of `group` name, of this template."""
    found = cast(Loss, custom_loss(group, config.target, config.hyper))
    if found.template != template:
        kinds = {"rowwise": "of rows under a softmax", "elementwise": "of elements", "boxes": "of pairs of boxes"}
        kind = kinds.get(found.template, "without kernels")
        raise UserError(f"{group}.target={config.target}: is a loss {kind}; {WANTED[template]}.")
    return found


def _hyper(group: str, config: LossConfig, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters among a loss's settings; what else is set would have no effect."""
    for item in fields(config):
        if item.name not in (*hyper, "name", "implementation", "prior_bias") and getattr(config, item.name) != item.default:
            raise UserError(
                f"{group}.{item.name}={getattr(config, item.name)}: task=detection does not use it; leave it at {item.default}."
            )
    return {item.name: getattr(config, item.name) for item in fields(config) if item.name in hyper}


def build_detector(config: DetectorConfig, criterion: DetectionLoss, classes: int, image_size: tuple[int, int]) -> FCOS | RetinaNet:
    """The detector of these settings.

    Raises:
        UserError: the backbone, or a number of channels, does not fit.
    """
    pyramid = backbone(
        config.name,
        image_size,
        pretrained=config.pretrained,
        channels=config.channels,
        frozen_stride=config.frozen_stride,
        frozen_norm=config.frozen_norm,
        args=config.args,
    )
    kept: dict[str, Any] = {
        "score_thresh": config.score_threshold,
        "nms_thresh": config.nms_threshold,
        "detections_per_img": config.detections,
        "topk_candidates": config.candidates,
    }
    if isinstance(config, FcosConfig):
        radius = config.centre_radius
        return FCOS(pyramid, classes, criterion, convolutions=config.convolutions, center_sampling_radius=radius, **kept)
    anchors = cast(RetinaNetConfig, config)
    ious = {"fg_iou_thresh": anchors.foreground_iou, "bg_iou_thresh": anchors.background_iou}
    return RetinaNet(pyramid, classes, criterion, anchor_sizes=anchors.anchor_sizes, head_norm=anchors.head_norm, **ious, **kept)


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Detection:
    scenes, fixed = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model).fixed_size
    data = load_detection_data(scenes, fixed, model_norm(config.model, saved), device, config.seed)
    task = Detection(config, data, size_of(scenes, fixed), device)
    task.notes = enlarged(scenes, fixed, data.train.file.sizes)
    return task
