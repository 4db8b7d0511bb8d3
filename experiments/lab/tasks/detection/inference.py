"""Predictions and exports of detectors."""

from collections.abc import Callable
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.ops import nms
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

from lab.config.detection_schema import DetectionDataConfig
from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.runs.export import Exportable, Images
from lab.runs.predict import Asked, Prediction, Predictor
from lab.tasks.detection.augment import Prepare
from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.data import Collate, Sample, size_of
from lab.tasks.detection.models.dense import Detector
from lab.tasks.detection.models.detr import Detr, best_of
from lab.tasks.detection.spec import DetectorConfig
from lab.tasks.detection.task import build_detector, criterion


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the detector, and a function from an image to its boxes."""
    scenes, architecture = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model)
    fixed = architecture.fixed_size
    model = _detector(config, classes, size_of(scenes, fixed))
    cast(Any, model).score_thresh = min(architecture.score_threshold, asked.score)
    batch_of = batches(scenes, fixed, asked.norm)

    def predicted(image: Image.Image) -> Prediction:
        batch = batch_of(image).to(asked.device)
        (found,) = model.detections(model(batch.images), batch.sizes, (batch.images.shape[-2], batch.images.shape[-1]))
        sure = found["scores"] >= asked.score
        ratio = (batch.originals / batch.sizes).flip(1).repeat(1, 2)
        names = [classes[label] for label in found["labels"][sure].tolist()]
        return Prediction(names, found["scores"][sure].tolist(), (found["boxes"] * ratio)[sure].tolist())

    return model, predicted


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the detector, from images to boxes, to export."""
    size = size_of(cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model).fixed_size)
    model = _detector(config, classes, size)
    exported = Queries if isinstance(model, Detr) else Scenes
    return Exportable(exported(model, norm, size), model, [len(norm.mean), *size], "detections: x1, y1, x2, y2 in pixels, score, class")


def _detector(config: TrainConfig, classes: list[str], size: tuple[int, int]) -> Detector:
    architecture = cast(DetectorConfig, config.model)
    return build_detector(architecture, criterion(config.loss, config.box_loss, architecture), len(classes), size)


def batches(config: DetectionDataConfig, fixed_size: list[int] | None, norm: Norm) -> Callable[[Image.Image], DetectionBatch]:
    """Return a function from an image to a normalised batch of one."""
    fill = [round(value * 255) for value in norm.mean]
    prepare, collate = Prepare(config, fixed_size, fill, train=False), Collate(fixed_size, config.divisor, fill, None)

    def batch_of(image: Image.Image) -> DetectionBatch:
        pixels, boxes, labels = prepare(tv_tensors.Image(pil_to_tensor(image)), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        batch = collate([Sample(pixels, boxes, labels, (image.height, image.width), 0, 0)])
        batch.images = normalize(batch.images.float() / 255, norm.mean, norm.std)
        return batch

    return batch_of


class Scenes(Images):
    """Map images (N, 3, H, W) of uint8 to detections (N, D, 6): corners in pixels, score, class; rows without a detection are 0.

    This is torchvision's post-processing for a batch of any size; boxes are suppressed only within an image and class.
    """

    def __init__(self, model: Any, norm: Norm, size: tuple[int, int]) -> None:
        super().__init__(model, norm)
        self.size = size
        levels = model.anchors(*size, torch.device("cpu"))
        self.counts = [len(level) for level in levels]
        self.anchors: Tensor
        self.corner: Tensor
        self.elsewhere: Tensor
        self.register_buffer("anchors", torch.cat(levels))
        self.register_buffer("corner", torch.tensor([size[1], size[0]] * 2, dtype=torch.float32))
        # two boxes outside of all images: torchvision tells torch.export that its nms keeps two boxes or more
        self.register_buffer("elsewhere", torch.tensor([[-2.0] * 2 + [-1.0] * 2, [-4.0] * 2 + [-3.0] * 2], dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        model = cast(Any, self.model)
        output = model(self.normalised(images))
        score = output.logits.float().sigmoid()
        if output.centerness is not None:
            score = (score * output.centerness.float().sigmoid()[..., None]).sqrt()
        levels = zip(*(each.split(self.counts, -2) for each in (score, output.regression, self.anchors)), strict=True)
        parts = [self._candidates(*level) for level in levels]
        score, label, boxes = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        image = torch.ones_like(label[:, :1]).cumsum(0)  # a range on the device that the file is loaded to
        # separates the boxes of different images and classes, each along one axis, so that ONNX's float32 holds the sum
        offset = torch.stack([label, image.expand_as(label)] * 2, dim=-1).double() * (max(self.size) + 1)
        spread = torch.cat([(boxes.double() + offset).flatten(0, 1), self.elsewhere])
        scores = torch.cat([score.flatten().double(), torch.ones_like(self.elsewhere[:, 0])])
        sure = (scores > model.score_thresh).nonzero()[:, 0]
        kept = sure[nms(spread[sure], scores[sure], model.nms_thresh)]
        score = score * torch.zeros_like(scores).index_fill(0, kept, 1.0)[:-2].view_as(score).float()
        best, place = score.topk(min(model.detections_per_img, score.shape[1]))
        found = torch.cat([boxes, score[..., None], label[..., None].float()], dim=-1)
        return found.gather(1, place[..., None].expand(-1, -1, 6)) * (best > 0)[..., None]

    def _candidates(self, score: Tensor, regression: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best candidates of a level: score (N, K), class (N, K), boxes (N, K, 4)."""
        model = cast(Any, self.model)
        classes = score.shape[-1]
        best, index = score.flatten(1).topk(min(model.topk_candidates, score.shape[1] * classes))
        place = index // classes
        deltas = regression.float().gather(1, place[..., None].expand(-1, -1, 4))
        boxes = model.coder.decode(deltas.flatten(0, 1), anchors[place].flatten(0, 1)).view_as(deltas)
        return best, index % classes, boxes.clamp(min=0).minimum(self.corner)


class Queries(Images):
    """The same of a DETR: its best pairs of query and class, of which none is suppressed."""

    def __init__(self, model: Any, norm: Norm, size: tuple[int, int]) -> None:
        super().__init__(model, norm)
        (image,) = model.anchors(*size, torch.device("cpu"))
        self.image: Tensor
        self.register_buffer("image", image)

    def forward(self, images: Tensor) -> Tensor:
        model = cast(Any, self.model)
        output = model(self.normalised(images))
        best, label, boxes = best_of(output, model.coder.decode(output.regression, self.image), model.detections_per_img)
        boxes = boxes.clamp(min=0).minimum(self.image[:, 2:].repeat(1, 2))
        found = torch.cat([boxes, best[..., None], label[..., None].float()], dim=-1)
        return found * (best > model.score_thresh)[..., None]
