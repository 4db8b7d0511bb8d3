"""The detection task: RetinaNet, FCOS, YOLO and DETR with any loss that takes class indices."""

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
from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.data import DetectionData, FileLoader, enlarged, load_detection_data, size_of
from lab.tasks.detection.loss import DetectionLoss
from lab.tasks.detection.metrics import DetectionCounts, DetectionResult
from lab.tasks.detection.models.backbone import backbone
from lab.tasks.detection.models.dense import FCOS, Detector, RetinaNet
from lab.tasks.detection.models.detr import Detr
from lab.tasks.detection.models.yolo import Yolo
from lab.tasks.detection.plots import detections_picture, precision_recall_picture
from lab.tasks.detection.spec import CustomBoxConfig, DetectionConfig, DetectorConfig, DetrConfig, FcosConfig, RetinaNetConfig, YoloConfig
from lab.tasks.detection.types import DetectorOutput
from lab.tasks.fonts import letters_of
from lab.tasks.losses import custom_loss
from lab.tasks.models import model_norm
from lab.tasks.task import Task, table_of
from lossforge.losses.registry import LOSSES, Loss

FIGURES = ("map", "map50", "map75")


class Counts:
    """Counts of an evaluation: detections and loss."""

    def __init__(self, data: DetectionData, device: torch.device, truth: CocoFile) -> None:
        self.detections = DetectionCounts(data.classes, data.category_ids, device, truth)
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, positives

    def result(self) -> DetectionResult:
        result = self.detections.result()
        total, positives = distributed.total(self.loss).tolist()
        result.values["loss"] = total / positives if positives else float("nan")
        return result


class Detection(Task):
    monitor = "map"
    score_names: tuple[str, ...] = ("positives",)
    data: DetectionData

    def __init__(self, config: TrainConfig, data: DetectionData, image_size: tuple[int, int], device: torch.device) -> None:
        """Make the detector; image_size: height and width of a batch, for backbones of fixed size."""
        self.data, self.device = data, device
        self.settings = cast(DetectionConfig, config.task)
        model = cast(DetectorConfig, config.model)
        self.detector = build_detector(model, criterion(config.loss, config.box_loss, model), len(data.classes), image_size)

    def model(self) -> nn.Module:
        return self.detector

    def prepare(self, batch: DetectionBatch, *, training: bool) -> DetectionBatch:
        """Add the anchors' targets, where they do not follow from what is predicted."""
        batch.matched = None if self.detector.matches_output else self.detector.match(batch)
        return batch

    def normalizer(self, batch: DetectionBatch) -> Tensor:
        """Return the number of positives; of boxes, where only a prediction has positives."""
        return (batch.labels >= 0).sum(dtype=torch.float32) if batch.matched is None else batch.matched.positives

    def loss(self, output: DetectorOutput, batch: DetectionBatch, normalizer: Tensor) -> Tensor:
        """Return the sum of the batch's losses."""
        matched = self.detector.match(batch, output) if batch.matched is None else batch.matched
        return torch.stack(list(self.detector.loss(output, matched, normalizer.clamp(min=1)).values())).sum()

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
        """Draw the pictures, and write all detections as COCO results."""
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


def criterion(loss: LossConfig, box: BoxLossConfig, model: DetectorConfig) -> DetectionLoss:
    """Return the loss of the settings; `auto` compares boxes as in the detector's paper.

    Raises:
        UserError: a setting has no effect here, or a custom loss cannot be found or is of another kind.
    """
    own = {"retinanet": "l1", "yolo": "ciou"}.get(model.detector, "giou")
    classes: str | Loss = loss.name
    boxes: str | Loss = own if box.name == "auto" else box.name
    box_hyper = {item.name: getattr(box, item.name) for item in fields(box) if item.name not in ("name", "weight")}
    if isinstance(loss, CustomConfig):
        classes, hyper = _own("loss", loss, "elementwise"), loss.hyper
    else:
        hyper = _hyper("loss", loss, LOSSES[loss.name].hyper)
    if isinstance(box, CustomBoxConfig):
        boxes, box_hyper = _own("box_loss", box, "boxes"), box.hyper
    weights = {"box_weight": box.weight}
    if isinstance(model, YoloConfig):
        weights = {"box_weight": box.weight * model.box_factor, "side_weight": model.side_factor}
    if isinstance(model, DetrConfig):
        weights = {"box_weight": box.weight * model.box_factor, "l1_weight": model.l1_factor}
    return DetectionLoss(classes, boxes, hyper=hyper, box_hyper=box_hyper, implementation=loss.implementation, **weights)


WANTED = {
    "elementwise": "a detector asks of each class whether it is there, so that only losses of elements fit (lossforge.losses.elementwise)",
    "boxes": "only losses of pairs of boxes fit (lossforge.losses.boxes)",
}


def _own(group: str, config: CustomConfig | CustomBoxConfig, template: str) -> Loss:
    """Return the loss that the settings of `group` name; it must have this template."""
    found = cast(Loss, custom_loss(group, config.target, config.hyper))
    if found.template.name != template:
        kinds = {"rowwise": "of rows under a softmax", "elementwise": "of elements", "boxes": "of pairs of boxes"}
        kind = kinds.get(found.template.name, "without kernels")
        raise UserError(f"{group}.target={config.target}: is a loss {kind}; {WANTED[template]}.")
    return found


def _hyper(group: str, config: LossConfig, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters among a loss's settings; raise UserError if another setting is changed, which would have no effect."""
    for item in fields(config):
        if item.name not in (*hyper, "name", "implementation", "prior_bias") and getattr(config, item.name) != item.default:
            raise UserError(
                f"{group}.{item.name}={getattr(config, item.name)}: task=detection does not use it; leave it at {item.default}."
            )
    return {item.name: getattr(config, item.name) for item in fields(config) if item.name in hyper}


def build_detector(config: DetectorConfig, criterion: DetectionLoss, classes: int, image_size: tuple[int, int]) -> Detector:
    """Return the detector of these settings.

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
        aggregated=isinstance(config, (YoloConfig, DetrConfig)),
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
    if isinstance(config, YoloConfig):
        alignment: dict[str, Any] = {"candidates": config.assigned, "alpha": config.alpha, "beta": config.beta}
        return Yolo(pyramid, classes, criterion, convolutions=config.convolutions, bins=config.bins, **alignment, **kept)
    if isinstance(config, DetrConfig):
        own = {name: getattr(config, name) for name in ("queries", "layers", "encoder_layers", "heads", "cost")}
        return Detr(pyramid, classes, criterion, score_thresh=config.score_threshold, detections_per_img=config.detections, **own)
    anchors = cast(RetinaNetConfig, config)
    ious = {"fg_iou_thresh": anchors.foreground_iou, "bg_iou_thresh": anchors.background_iou}
    return RetinaNet(pyramid, classes, criterion, anchor_sizes=anchors.anchor_sizes, head_norm=anchors.head_norm, **ious, **kept)


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Detection:
    scenes, fixed = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model).fixed_size
    data = load_detection_data(scenes, fixed, model_norm(config.model, saved), device, config.seed)
    task = Detection(config, data, size_of(scenes, fixed), device)
    task.notes = enlarged(scenes, fixed, data.train.file.sizes)
    return task
