"""A small DETR: attention over a backbone's levels, queries selected among their cells, boxes refined by each decoder layer."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from lab.tasks.detection.batch import DetectionBatch
from lab.tasks.detection.loss import DetectionLoss
from lab.tasks.detection.models.dense import Detector
from lab.tasks.detection.models.matching import with_a_row
from lab.tasks.detection.models.yolo import PRIOR, cells_of
from lab.tasks.detection.types import BACKGROUND, DetectorOutput, Matched
from lossforge.losses import hungarian_assign, matching_cost, plain_torch

STRIDES = (8, 16, 32)
NEAREST = 1e-3
"""How near to 0 and 1 a coordinate may lie whose logit is taken."""


class ImageCoder:
    """Boxes as centre and sides in shares of the image, which is the anchor of all."""

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor:
        """Return (..., 4) from the image (1, 4) and boxes (..., 4) in pixels."""
        return box_convert(boxes, "xyxy", "cxcywh") / _size(anchors)

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        """Return boxes (..., 4) in pixels."""
        return box_convert(deltas * _size(anchors), "cxcywh", "xyxy")


def _size(image: Tensor) -> Tensor:
    """Return width and height, twice."""
    return torch.cat([image[..., 2:], image[..., 2:]], -1)


class Decoder(nn.Module):
    """A decoder layer: queries attend to each other, then to the image's cells."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.own, self.across = (nn.MultiheadAttention(channels, heads, batch_first=True) for _ in range(2))
        self.mix = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))

    def forward(self, queries: Tensor, place: Tensor, cells: Tensor, places: Tensor) -> Tensor:
        """Return queries (N, Q, channels). place: of the queries' boxes; places: of the cells (N, T, channels)."""
        first, second, third = self.norms
        at = queries + place
        queries = first(queries + self.own(at, at, queries, need_weights=False)[0])
        queries = second(queries + self.across(queries + place, cells + places, cells, need_weights=False)[0])
        return cast(Tensor, third(queries + self.mix(queries)))


class Detr(Detector):
    """A detector whose queries match the boxes one to one, so that nothing is suppressed.

    Sources: Carion et al., DETR, 2020 (arXiv 2005.12872); Zhu et al., Deformable DETR, 2021 (arXiv 2010.04159), for the selected queries
    and the refined boxes; Zhao et al., RT-DETR, 2024 (arXiv 2304.08069), for attention on the coarsest level alone.

    Args:
        backbone: returns a dict of the levels of strides 8, 16 and 32, with `out_channels` each.
        classes: the number of classes.
        criterion: the loss.
        queries: how many boxes an image can have.
        layers, encoder_layers: of the decoder, and of the encoder on the coarsest level.
        heads: of the attention.
        cost: weights of class, L1 and GIoU in the cost of a pair, in this order.
        score_thresh, detections_per_img: lowest score of a detection, and how many are kept.
    """

    strides = STRIDES
    matches_output = True

    def __init__(
        self,
        backbone: nn.Module,
        classes: int,
        criterion: DetectionLoss,
        *,
        queries: int = 100,
        layers: int = 3,
        encoder_layers: int = 1,
        heads: int = 8,
        cost: Sequence[float] = (2.0, 5.0, 2.0),
        score_thresh: float = 0.05,
        detections_per_img: int = 100,
    ) -> None:
        super().__init__()
        channels = cast(int, backbone.out_channels)
        self.backbone, self.criterion, self.coder = backbone, criterion, ImageCoder()
        self.queries, self.cost = queries, tuple(cost)
        self.score_thresh, self.detections_per_img = score_thresh, detections_per_img
        layer = nn.TransformerEncoderLayer(channels, heads, 4 * channels, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, encoder_layers, enable_nested_tensor=False)
        self.place = nn.Sequential(nn.Linear(4, 2 * channels), nn.ReLU(), nn.Linear(2 * channels, channels))
        self.enter = nn.Sequential(nn.Linear(channels, channels), nn.LayerNorm(channels))
        self.decoder = nn.ModuleList(Decoder(channels, heads) for _ in range(layers))
        self.cls_logits = nn.ModuleList(nn.Linear(channels, classes) for _ in range(layers + 1))
        self.box_deltas = nn.ModuleList(_perceptron(channels) for _ in range(layers + 1))
        for classifier in self.cls_logits:
            nn.init.constant_(cast(nn.Linear, classifier).bias, -math.log(1 / PRIOR - 1))

    def get_classifier(self) -> nn.Module:
        return self.cls_logits

    def outputs(self, levels: list[Tensor]) -> DetectorOutput:
        """Return the last layer's outputs, and in training those of all before, the selected queries' first."""
        height, width = (side * STRIDES[0] for side in levels[0].shape[-2:])
        *finer, coarsest = levels
        _, anchors = self.anchors_of(height, width, coarsest.device)
        count = coarsest.shape[-2] * coarsest.shape[-1]
        kind = levels[0].dtype  # the weights', also where a model is exported in half precision
        places = self.place(anchors.to(kind))  # (T, channels)
        seen = self.encoder(coarsest.flatten(2).mT + places[-count:])
        cells = self.enter(torch.cat([*[level.flatten(2).mT for level in finer], seen], 1))
        logits = self.cls_logits[0](cells)
        chosen = logits.detach().amax(-1).topk(least(self.queries, cells.shape[1]), 1).indices[..., None]

        def of_chosen(t: Tensor) -> Tensor:
            return t.gather(1, chosen.expand(-1, -1, t.shape[-1]))

        queries = of_chosen(cells)
        boxes = self.box_deltas[0](queries).float() + of_chosen(anchors.logit(NEAREST).expand(cells.shape[0], -1, -1))
        found = [DetectorOutput(of_chosen(logits), boxes.sigmoid())]
        queries = queries.detach()
        for layer, classifier, deltas in zip(self.decoder, self.cls_logits[1:], self.box_deltas[1:], strict=True):
            at = boxes.detach()
            queries = layer(queries, self.place(at.sigmoid().to(kind)), cells, places)
            boxes = deltas(queries).float() + at
            found.append(DetectorOutput(classifier(queries), boxes.sigmoid()))
        last = found.pop()
        if not self.training:
            return last
        logits, regression = (torch.cat(each) for each in list(zip(*found, strict=True))[:2])
        return last._replace(earlier_logits=logits, earlier_regression=regression)

    def anchors_of(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the image (1, 4) in pixels, and the cells (T, 4) of all levels as centre and sides in shares of it."""
        image = torch.zeros(1, 4, device=device)
        image[:, 2], image[:, 3] = width, height  # no copy from the host, which would wait
        cells = torch.cat([cells_of(height, width, stride, device) for stride in STRIDES])
        return image, self.coder.encode(image, cells)

    def anchors(self, height: int, width: int, device: torch.device) -> list[Tensor]:
        """Return the image (1, 4), the anchor of all queries."""
        return [self.anchors_of(height, width, device)[0]]

    @torch.no_grad()
    def match(self, batch: DetectionBatch, output: DetectorOutput | None = None) -> Matched:
        """Return the targets of all layers' queries, (layers · N, Q), without waiting for the device."""
        assert output is not None
        height, width = batch.images.shape[-2:]
        (image,) = self.anchors(height, width, batch.boxes.device)
        every = joined(output)
        layers = len(every.logits) // len(batch.boxes)
        boxes, labels = (t.repeat(layers, *[1] * (t.ndim - 1)) for t in with_a_row(batch.boxes.float(), batch.labels))
        rows, (of_class, of_distance, of_overlap) = labels.new_full(labels.shape[:1], labels.shape[1]), self.cost
        with plain_torch() if self.criterion.plain else nullcontext():
            cost = matching_cost(
                every.logits,
                every.regression,
                labels.clamp(min=0).flatten(),
                self.coder.encode(image, boxes).flatten(0, 1),
                rows,
                cost_class=of_class,
                cost_bbox=of_distance,
                cost_giou=of_overlap,
            )
            # a row without a box costs the same everywhere
            place = hungarian_assign(cost.masked_fill(labels.flatten() < 0, math.nan), rows)
        index = place.clamp(min=0)
        label = torch.where(place >= 0, labels.flatten()[index], BACKGROUND)
        positive = label >= 0
        found = torch.where(positive[..., None], boxes.flatten(0, 1)[index], image)
        return Matched(label, found, positive, positive.sum(dtype=torch.float32), image)

    def loss(self, output: DetectorOutput, matched: Matched, normalizer: Tensor) -> dict[str, Tensor]:
        """Return sums over the batch and all layers, divided by `normalizer`."""
        return self.criterion(joined(output), matched, self.coder, normalizer)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Return the best pairs of query and class of each image; see Detector.detections."""
        (image,) = self.anchors(*padded, output.logits.device)
        best, labels, boxes = best_of(output, self.coder.decode(output.regression, image), self.detections_per_img)
        limits = sizes.to(boxes).flip(1).repeat(1, 2)[:, None]
        boxes = boxes.clamp(min=0).minimum(limits)
        kept = best > self.score_thresh
        return [
            {"boxes": of[sure], "scores": score[sure], "labels": label[sure]}
            for of, score, label, sure in zip(boxes, best, labels, kept, strict=True)
        ]


def joined(output: DetectorOutput) -> DetectorOutput:
    """Return the outputs of all layers as one batch, (layers · N, Q)."""
    if output.earlier_logits is None or output.earlier_regression is None:
        return output
    return DetectorOutput(torch.cat([output.earlier_logits, output.logits]), torch.cat([output.earlier_regression, output.regression]))


def least(first: int, second: int) -> int:
    """Return the smaller number, as a symbol in torch.export, which would bind the image's size by a comparison."""
    return torch.sym_min(first, second) if torch.compiler.is_exporting() else min(first, second)


def best_of(output: DetectorOutput, boxes: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best scores (N, D), their classes (N, D), and the boxes of their queries (N, D, 4)."""
    scores, classes = output.logits.float().sigmoid(), output.logits.shape[-1]
    best, place = scores.flatten(1).topk(least(count, scores.shape[1] * classes))
    return best, place % classes, boxes.gather(1, (place // classes)[..., None].expand(-1, -1, 4))


def _perceptron(channels: int) -> nn.Module:
    """Return what corrects a box; at the start by nothing."""
    last = nn.Linear(channels, 4)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels), nn.ReLU(), last)
