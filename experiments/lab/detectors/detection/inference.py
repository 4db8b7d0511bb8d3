"""Predictions and exports of detectors."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.ops import nms
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection import DetectorConfig
from lab.detectors.detection.augment import Prepare
from lab.detectors.detection.boxes import best_of, rows_at
from lab.detectors.detection.data import Collate, Sample, size_of
from lab.detectors.detection.models.dense import DIVISOR, Detector
from lab.detectors.detection.models.detr import Detr
from lab.detectors.detection.task import Detection
from lab.detectors.detection.types import DetectionBatch, DetectorOutput
from lab.detectors.schema import DetectionDataConfig
from lab.run.export import Exportable, Images
from lab.run.predict import Asked, Prediction, Predictor


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the detector, and a function from an image to its boxes."""

    def in_file(found: dict[str, Tensor], batch: DetectionBatch, _image: Image.Image) -> tuple[Tensor, dict[str, Any]]:
        return found["boxes"] * (batch.originals / batch.sizes).flip(1).repeat(1, 2), {}

    return predictor(config, classes, asked, Detection, in_file)


InFile = Callable[[dict[str, Tensor], DetectionBatch, Image.Image], tuple[Tensor, dict[str, Any]]]
"""Returns the boxes of a batch's only image, or their corners, in pixels of its file, and more fields of a Prediction."""


def predictor(config: TrainConfig, classes: list[str], asked: Asked, task: type[Detection], in_file: InFile) -> tuple[nn.Module, Predictor]:
    """Return a task's detector, and a function from an image to what it finds."""
    scenes, architecture = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model)
    model = task.detector_of(config, len(classes), size_of(scenes, architecture.fixed_size))
    model.score_thresh = min(architecture.score_threshold, asked.score)
    batch_of = batches(scenes, architecture.fixed_size, asked.norm)

    def predicted(image: Image.Image) -> Prediction:
        batch = batch_of(image).to(asked.device)
        (found,) = model.detections(model(batch.images), batch.sizes, (batch.images.shape[-2], batch.images.shape[-1]))
        sure = found["scores"] >= asked.score
        found = {name: value[sure] for name, value in found.items()}
        labels, (boxes, more) = found["labels"].tolist(), in_file(found, batch, image)
        return Prediction([classes[label] for label in labels], found["scores"].tolist(), boxes.tolist(), numbers=labels, **more)

    return model, predicted


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the detector, from images to boxes, to export."""
    return exportable(config, classes, norm, Detection, boxes_of, "detections: x1, y1, x2, y2 in pixels, score, class")


def exportable(
    config: TrainConfig, classes: list[str], norm: Norm, task: type[Detection], module: Callable[[Any, Norm], nn.Module], said: str
) -> Exportable:
    """Return what is exported of a task's detector.

    Args:
        config, classes, norm: as of TaskSpec.export.
        task: whose detector it is.
        module: makes what is exported of the detector and its normalisation.
        said: the meaning of a row of the module's output, in words.
    """
    data, fixed_size = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model).fixed_size
    size = size_of(data, fixed_size)
    model = task.detector_of(config, len(classes), size)
    return Exportable(
        module(model, norm),
        model,
        [len(norm.mean), *size],
        said,
        multiple=0 if (fixed_size and not data.rect) or model.backbone.only_size else DIVISOR,
        prepare=prepared_as(data, fixed_size, norm),
    )


def prepared_as(config: DetectionDataConfig, fixed_size: list[int] | None, norm: Norm) -> dict[str, Any]:
    """Return how `batches` prepares an image, for the metadata of an exported model."""
    resize: dict[str, Any] = {"rule": "none"}
    if fixed_size:
        resize = {"rule": "fit within, keep proportions", "height": fixed_size[0], "width": fixed_size[1]}
    elif config.edge or config.longest:
        resize = {"rule": "shorter side, at most longest, keep proportions", "shortest": config.edge, "longest": config.longest}
    to = {"height": fixed_size[0], "width": fixed_size[1]} if fixed_size and not config.rect else {"multiple": config.divisor}
    pad = {"side": "right and bottom", **to, "fill": [round(value * 255) for value in norm.mean]}
    return {"resize": resize, "interpolation": "bilinear", "antialias": True, "crop": None, "pad": pad}


def batches(config: DetectionDataConfig, fixed_size: list[int] | None, norm: Norm) -> Callable[[Image.Image], DetectionBatch]:
    """Return a function from an image to a normalised batch of one."""
    fill = [round(value * 255) for value in norm.mean]
    prepare = Prepare(config, fixed_size, fill, train=False)
    collate = Collate(None if config.rect else fixed_size, config.divisor, fill, None)

    def batch_of(image: Image.Image) -> DetectionBatch:
        pixels, boxes, labels, *_ = prepare(tv_tensors.Image(pil_to_tensor(image)), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        batch = collate([Sample(pixels, boxes, labels, (image.height, image.width), 0, 0)])
        batch.images = normalize(batch.images.float() / 255, norm.mean, norm.std)
        return batch

    return batch_of


class Found(Images):
    """Map images (N, 3, H, W) of uint8 to detections, by `found`."""

    def forward(self, images: Tensor) -> Tensor:
        return self.found(cast(Any, self.model)(self.normalised(images)), images)[0]

    def found(self, output: DetectorOutput, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return detections (N, D, 6) and the indices of their anchors or queries (N, D), which mean nothing where a row is 0."""
        raise NotImplementedError


class Cells(Found):
    """Images of any size, with the anchors of a detector's levels."""

    def __init__(self, model: Any, norm: Norm) -> None:
        super().__init__(model, norm)
        self.strides = model.strides
        side = 2 * max(self.strides)
        for number, (stride, level) in enumerate(zip(self.strides, model.anchors(side, side, torch.device("cpu")), strict=True)):
            self.register_buffer(f"anchors{number}", level[: len(level) // (side // stride) ** 2].clone())  # those of the first cell

    def anchors(self, images: Tensor) -> list[Tensor]:
        """Return the anchors (A, 4) of each level."""
        return [self._anchors(images, number) for number in range(len(self.strides))]

    def _anchors(self, images: Tensor, number: int) -> Tensor:
        """Return the anchors (A, 4) of a level as the detector's, of any image size and on any device."""
        first, stride = cast(Tensor, getattr(self, f"anchors{number}")), self.strides[number]
        rows, columns = images[0, 0, ::stride, 0], images[0, 0, 0, ::stride]
        top, left = (
            (torch.ones_like(cells, dtype=torch.float32).cumsum(0) - 1) * (side // cells.shape[0])
            for cells, side in ((rows, images.shape[-2]), (columns, images.shape[-1]))
        )
        shape = (rows.shape[0], columns.shape[0])
        corner = torch.stack([left[None, :].expand(shape), top[:, None].expand(shape)] * 2, dim=-1)
        return (corner[:, :, None] + first).flatten(0, 2)

    def candidates(self, score: Tensor, regression: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the K best pairs of box and class: score, class, boxes (N, K, 4 or 5), anchor; the score is -1 where there are fewer."""
        model = cast(Any, self.model)
        classes, count = score.shape[-1], model.topk_candidates
        lacking = (0, 0, 0, -(-count // classes))  # K does not depend on the image's size then
        best, index = F.pad(score, lacking, value=-1.0).flatten(1).topk(count)
        place = index // classes
        deltas = rows_at(F.pad(regression, lacking), place)
        boxes = model.coder.decode(deltas.flatten(0, 1), F.pad(anchors, lacking)[place].flatten(0, 1)).view_as(deltas)
        return best, index % classes, boxes, place


class Scenes(Cells):
    """Map images (N, 3, H, W) of uint8 to detections (N, D, 6): corners in pixels, score, class; rows without a detection are 0.

    This is torchvision's post-processing for a batch of any size; boxes are suppressed only within an image and class.
    """

    def __init__(self, model: Any, norm: Norm) -> None:
        super().__init__(model, norm)
        self.elsewhere: Tensor
        # two boxes outside of all images: torchvision tells torch.export that its nms keeps two boxes or more
        self.register_buffer("elsewhere", torch.tensor([[-2.0] * 2 + [-1.0] * 2, [-4.0] * 2 + [-3.0] * 2], dtype=torch.float64))

    def found(self, output: DetectorOutput, images: Tensor) -> tuple[Tensor, Tensor]:
        model = cast(Any, self.model)
        score = output.logits.float().sigmoid()
        if output.centerness is not None:
            score = (score * output.centerness.float().sigmoid()[..., None]).sqrt()
        anchors = self.anchors(images)
        counts = [level.shape[0] for level in anchors]
        levels = zip(score.split(counts, -2), output.regression.float().split(counts, -2), anchors, strict=True)
        parts = [self.candidates(*level) for level in levels]
        index = torch.cat([part[3] + sum(counts[:number]) for number, part in enumerate(parts)], dim=1)
        score, label, boxes, _ = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        boxes = inside(boxes, images)
        image = torch.ones_like(label[:, :1]).cumsum(0)  # a range on the device that the file is loaded to
        # separates the boxes of different images and classes, each along one axis, so that ONNX's float32 holds the sum
        spacing = torch.sym_max(images.shape[-2], images.shape[-1]) + 1
        offset = torch.stack([label, image.expand_as(label)] * 2, dim=-1).double() * spacing
        spread = torch.cat([(boxes.double() + offset).flatten(0, 1), self.elsewhere])
        scores = torch.cat([score.flatten().double(), torch.ones_like(self.elsewhere[:, 0])])
        sure = (scores > model.score_thresh).nonzero()[:, 0]
        kept = sure[nms(spread[sure], scores[sure], model.nms_thresh)]
        score = score * torch.zeros_like(scores).index_fill(0, kept, 1.0)[:-2].view_as(score).float()
        best, place = score.topk(min(model.detections_per_img, len(counts) * model.topk_candidates))
        found = torch.cat([boxes, score[..., None], label[..., None].float()], dim=-1)
        return rows_at(found, place) * (best > 0)[..., None], index.gather(1, place)


def inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Return boxes (N, K, 4) clipped to the images."""
    height, width = images.shape[-2:]
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack([x1.clamp(0, width), y1.clamp(0, height), x2.clamp(0, width), y2.clamp(0, height)], dim=-1)


def best_rows(model: Any, output: DetectorOutput, boxes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the best pairs of box and class (N, rows, 6 or 7) as `Found.found` does, none of them suppressed. boxes: (N, A, 4 or 5)."""
    best, label, index = best_of(output, model.detections_per_img)
    found = torch.cat([rows_at(boxes, index), best[..., None], label[..., None].float()], dim=-1)
    found = found * (best > model.score_thresh)[..., None]
    return F.pad(found, (0, 0, 0, rows))[:, :rows], F.pad(index, (0, rows))[:, :rows]  # a small image has fewer predictions


class OneToOne(Cells):
    """The same as Scenes, of a YOLO whose predictions match boxes one to one."""

    def found(self, output: DetectorOutput, images: Tensor) -> tuple[Tensor, Tensor]:
        model = cast(Any, self.model)
        boxes = model.coder.decode(output.regression.float(), torch.cat(self.anchors(images)))
        return best_rows(model, output, inside(boxes, images), model.detections_per_img)


class Queries(Found):
    """The same as Scenes, of a DETR."""

    def found(self, output: DetectorOutput, images: Tensor) -> tuple[Tensor, Tensor]:
        model, regression = cast(Any, self.model), output.regression.float()
        zero = torch.zeros_like(regression[0, 0, 0])
        image = torch.stack([zero, zero, zero + images.shape[-1], zero + images.shape[-2]])[None]
        rows = min(model.detections_per_img, model.queries * output.logits.shape[-1])
        return best_rows(model, output, inside(model.coder.decode(regression, image), images), rows)


def boxes_of(model: Detector, norm: Norm) -> Found:
    """Return the module that an exported detector's boxes come from."""
    kind = Queries if isinstance(model, Detr) else Scenes if model.suppresses else OneToOne
    return kind(model, norm)
