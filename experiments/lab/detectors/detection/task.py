"""The detection task: RetinaNet, FCOS, YOLO and DETR with any loss that takes class indices."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from lab.base.drawing import colour_of, with_boxes
from lab.base.errors import UserError
from lab.base.fonts import letters_of
from lab.config.loss_schema import CustomConfig
from lab.config.schema import BoxLossConfig, LossConfig, TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection import CustomBoxConfig, DetectorConfig, DetrConfig, FcosConfig, RetinaNetConfig, YoloConfig
from lab.detectors.detection.data import DetectionData, FileLoader, load_detection_data, size_of
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.metrics import DetectionCounts, DetectionResult, confusion_of
from lab.detectors.detection.models.backbone import backbone
from lab.detectors.detection.models.dense import FCOS, Detector, RetinaNet
from lab.detectors.detection.models.detr import Detr
from lab.detectors.detection.models.yolo import Yolo
from lab.detectors.detection.plots import detections_picture, precision_recall_picture
from lab.detectors.detection.types import DetectionBatch, DetectorOutput, Matched
from lab.detectors.schema import DetectionDataConfig, DigitScenesConfig
from lab.tasks.losses import custom_loss
from lab.tasks.models import model_norm
from lab.tasks.plots import matrix_picture
from lab.tasks.task import BaseTask, table_of
from lossforge.losses.registry import LOSSES, Loss

OF_DETR = ("queries", "layers", "encoder_layers", "heads", "cost", "denoising", "label_noise", "box_noise")
SURE = 0.3  # lowest score of a detection in pictures


class Detection(BaseTask):
    monitor = "map"
    score_names: tuple[str, ...] = ("positives",)
    line = "held-out mAP {map:.4f} · mAP50 {map50:.4f} · mAP75 {map75:.4f} · loss {loss:.4f}"
    table: Mapping[str, str] = {f"held-out {name}": f"{{{name.lower()}:.4f}}" for name in ("mAP", "mAP50", "mAP75")}
    data: DetectionData
    own_loss: str | None = None  # of boxes, where the task has one; None: the detector's

    def __init__(self, config: TrainConfig, data: DetectionData, image_size: tuple[int, int], device: torch.device) -> None:
        """Make the detector; image_size: height and width of a batch, for backbones of fixed size."""
        super().__init__(config, data, device)
        model = cast(DetectorConfig, config.model)
        self.detector = self.detector_of(config, len(data.classes), image_size)
        for item in () if self.detector.suppresses else fields(model):
            if item.name in ("nms_threshold", "candidates") and (value := getattr(model, item.name)) != item.default:
                self.notes = [*self.notes, f"model.{item.name}={value}: has no effect on a detector that suppresses no boxes"]
        if cast(DetectionDataConfig, config.data).rect and (only := self.detector.backbone.only_size):
            raise UserError(f"data.rect=true: model.name={model.name} takes only images of {only[0]}×{only[1]}. Take data.rect=false.")

    @classmethod
    def detector_of(cls, config: TrainConfig, classes: int, image_size: tuple[int, int]) -> Any:
        """Return the detector of these settings."""
        model = cast(DetectorConfig, config.model)
        return build_detector(model, criterion(config.loss, config.box_loss, model, cls.own_loss), classes, image_size, **cls.kinds(config))

    @staticmethod
    def kinds(config: TrainConfig) -> dict[str, Any]:
        """Return what makes a `yolo` and a `detr`, where the task has its own."""
        return {}

    def outlines(self, batch: DetectionBatch) -> Tensor:
        """Return the boxes of a batch to draw (N, K, 4), or their corners (N, K, 8)."""
        return batch.boxes

    def model(self) -> nn.Module:
        return self.detector

    def prepare(self, batch: DetectionBatch, *, training: bool) -> DetectionBatch:
        """Add the anchors' targets, where they do not follow from what is predicted."""
        batch.matched = None if self.detector.matches_output else self.detector.match(batch)
        return batch

    def other_inputs(self, batch: DetectionBatch) -> tuple[Tensor, ...]:
        """Return the batch's boxes and labels, if the detector makes denoising queries of them."""
        return (batch.boxes, batch.labels) if self.detector.takes_targets else ()

    def first_batch(self, batch: DetectionBatch) -> list[tuple[Image.Image, str]]:
        """Return images with their boxes, with the padding that the model sees; the file's name is the title."""
        found, files = [], self.data.train.file.files
        boxes, labels, index = self.outlines(batch).cpu(), batch.labels.cpu(), batch.index.tolist()
        for number, image in enumerate(self.seen(batch)):
            there = labels[number] >= 0
            known = labels[number][there].tolist()
            names, colours = [self.data.classes[label] for label in known], [colour_of(label) for label in known]
            found.append((with_boxes(image, boxes[number][there].tolist(), names, colours), Path(files[index[number]]).name))
        return found

    def normalizer(self, batch: DetectionBatch) -> Tensor:
        """Return the number of positives; of boxes, where only a prediction has positives."""
        return (batch.labels >= 0).sum(dtype=torch.float32) if batch.matched is None else batch.matched.positives

    def loss(self, output: DetectorOutput, batch: DetectionBatch, normalizer: Tensor) -> Tensor:
        """Return the sum of the batch's losses."""
        matched = self.detector.match(batch, output) if batch.matched is None else batch.matched
        return torch.stack(list(self.losses(output, batch, matched, normalizer.clamp(min=1)).values())).sum()

    def losses(self, output: DetectorOutput, batch: DetectionBatch, matched: Matched, normalizer: Tensor) -> dict[str, Tensor]:
        """Return the parts of the batch's loss, each divided by `normalizer`."""
        return self.detector.loss(output, matched, normalizer)

    def scores(self, output: DetectorOutput, batch: DetectionBatch) -> Tensor:
        return self.normalizer(batch)[None]

    def counts(self, loader: FileLoader) -> DetectionCounts:
        return DetectionCounts(self.data.classes, self.data.category_ids, self.device, loader.file)

    def count(self, counts: DetectionCounts, output: DetectorOutput, batch: DetectionBatch) -> None:
        counts.add_loss(*self.whole_loss(output, batch))
        height, width = batch.images.shape[-2:]
        counts.add(self.detector.detections(output, batch.sizes, (height, width)), batch)

    def per_class(self, result: DetectionResult) -> list[dict[str, Any]]:
        nothing = [float("nan")]
        average = [result.per_class[name] for name in self.data.classes]
        at_half = [sum(curve) / len(curve) for curve in (result.precision.get(name, nothing) for name in self.data.classes)]
        return table_of(self.data.classes, {"boxes": result.truth.counts(), "ap": torch.tensor(average), "ap50": torch.tensor(at_half)})

    def pictures(self, result: DetectionResult, folder: Path) -> list[Path]:
        """Draw the pictures, and write all detections as COCO results."""
        found, curves, results = folder / "detections.png", folder / "precision_recall.png", folder / "detections.json"
        confusion = [] if result.truth.corners is not None else [folder / "confusion_matrix.png"]  # it compares upright boxes
        detections_picture(result, result.truth, self.data.classes, found, images=self.settings.pictures)
        with letters_of(self.data.classes):
            precision_recall_picture(result, curves)
            for path in confusion:
                counts = confusion_of(result, result.truth, SURE).tolist()
                matrix_picture(counts, [*self.data.classes, "nothing"], f"boxes at IoU 0.5, detections from score {SURE:g}", path)
        result.export_coco(results)
        return [found, curves, *confusion, results]


def criterion(loss: LossConfig, box: BoxLossConfig, model: DetectorConfig, own: str | None = None) -> DetectionLoss:
    """Return the loss of the settings; `auto` compares boxes by `own`, a loss of the registry, or as in the detector's paper.

    Raises:
        UserError: a setting has no effect here, or a custom loss cannot be found or is of another kind.
    """
    usual = LOSSES[own] if own else {"retinanet": "l1", "yolo": "ciou"}.get(model.detector, "giou")
    classes: str | Loss = loss.name
    boxes: str | Loss = usual if box.name == "auto" else box.name
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


def build_detector(
    config: DetectorConfig,
    criterion: DetectionLoss,
    classes: int,
    image_size: tuple[int, int],
    *,
    yolo: Callable[..., Yolo] = Yolo,
    detr: Callable[..., Detr] = Detr,
) -> Detector:
    """Return the detector of these settings; yolo, detr: make one.

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
        alignment["one_to_one"] = config.one_to_one
        return yolo(pyramid, classes, criterion, convolutions=config.convolutions, bins=config.bins, **alignment, **kept)
    if isinstance(config, DetrConfig):
        own = {name: getattr(config, name) for name in OF_DETR}
        return detr(pyramid, classes, criterion, score_thresh=config.score_threshold, detections_per_img=config.detections, **own)
    anchors = cast(RetinaNetConfig, config)
    ious = {"fg_iou_thresh": anchors.foreground_iou, "bg_iou_thresh": anchors.background_iou}
    return RetinaNet(pyramid, classes, criterion, anchor_sizes=anchors.anchor_sizes, head_norm=anchors.head_norm, **ious, **kept)


def build(
    config: TrainConfig, device: torch.device, saved: Norm | None, task: type[Detection] = Detection, *, shapes: str = ""
) -> Detection:
    """Open the data and return a task; shapes: as in lab.detectors.annotations.coco_file.read_coco.

    Raises:
        UserError: the data has other shapes, or is faulty.
    """
    scenes, fixed = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model).fixed_size
    if shapes and isinstance(scenes, DigitScenesConfig) and (scenes.turn > 0) != (shapes == "corners"):
        wanted = "above 0, as data=turned_scenes has it" if shapes == "corners" else "0"
        raise UserError(f"data.turn={scenes.turn:g}: drawn scenes have corners where it is above 0, and else masks. Take {wanted}.")
    data = load_detection_data(scenes, fixed, model_norm(config.model, saved), device, config.seed, shapes=shapes)
    return task(config, data, size_of(scenes, fixed), device)
