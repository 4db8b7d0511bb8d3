"""A small DETR: attention over a backbone's levels, queries selected among their cells, boxes refined by each decoder layer."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from lab.detectors.detection.boxes import clipped, least, rows_at, unsuppressed
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.dense import Detector
from lab.detectors.detection.models.matching import with_a_row
from lab.detectors.detection.models.yolo import PRIOR, cells_of
from lab.detectors.detection.types import DetectionBatch, DetectorOutput, Matched, rows_of
from lossforge.losses import DenoisingQueries, DetrCriterion, plain_torch


class Denoising(nn.Module):
    """Make queries of an image's boxes with noise: of each group one query a box that must find it, and one that must find nothing.

    A corner moves by up to half of `box_noise` times the box's side; of the second query, whose noise is larger, by half of that to all
    of it. Queries of images with fewer boxes than others are padding, and must find nothing.

    Sources: Li et al., DN-DETR, 2022 (arXiv 2203.01305); Zhang et al., DINO, 2022 (arXiv 2203.03605), for the second query.

    Args:
        classes: the number of classes.
        channels: of a query.
        queries: how many an image has; at least one group is made.
        label_noise: share of the queries that are made of a class at random.
        box_noise: how far a corner moves, in sides of its box.
    """

    def __init__(self, classes: int, channels: int, queries: int, label_noise: float, box_noise: float) -> None:
        super().__init__()
        self.queries, self.label_noise, self.box_noise = queries, label_noise, box_noise
        self.content = nn.Embedding(classes + 1, channels)  # the last is padding's

    def groups(self, boxes: int) -> int:
        """Return the number of groups, where an image has so many rows of boxes."""
        return max(1, self.queries // (2 * boxes))

    def forward(self, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (N, D, channels) and their boxes (N, D, 4), D = groups · 2 K.

        Args:
            boxes: (N, K, 4), centre and sides in shares of the image.
            labels: (N, K), -1 in rows without a box.
        """
        groups = self.groups(labels.shape[1])
        padding = self.content.num_embeddings - 1
        label = torch.where(labels < 0, padding, labels).repeat(1, 2 * groups)
        other = torch.rand(label.shape, device=label.device) < self.label_noise
        at_random = torch.randint_like(label, max(padding, 1))
        label = torch.where(other & (label < padding), at_random, label)
        near, far = (torch.rand(len(boxes), groups, *boxes.shape[1:], device=boxes.device) for _ in range(2))
        share = torch.stack([near, 1 + far], 2)  # (N, groups, 2, K, 4)
        sign = torch.randint_like(share, 2) * 2 - 1
        corners, sides = box_convert(boxes, "cxcywh", "xyxy"), boxes[..., 2:].repeat(1, 1, 2)
        moved = corners[:, None, None] + sign * share * (0.5 * self.box_noise) * sides[:, None, None]
        noisy = box_convert(moved.clamp(0, 1), "xyxy", "cxcywh").flatten(1, 3)
        return self.content(label), noisy

    def places(self, place: Tensor) -> Tensor:
        """Return the box that each query must find (N, D), from the boxes' places (N, K); -1 for nothing."""
        return torch.cat([place, torch.full_like(place, -1)], 1).repeat(1, self.groups(place.shape[1]))

    def hidden(self, boxes: int, queries: int, device: torch.device) -> Tensor:
        """Return which of the D + `queries` queries (rows) must not see which (columns): no group is seen by others or by what follows."""
        groups = self.groups(boxes)
        group = torch.arange(2 * boxes * groups + queries, device=device).div(2 * boxes, rounding_mode="floor").clamp(max=groups)
        return (group != group[:, None]) & (group < groups)


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

    def forward(self, queries: Tensor, place: Tensor, cells: Tensor, places: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return queries (N, Q, channels).

        Args:
            queries: (N, Q, channels).
            place: of the queries' boxes, (N, Q, channels).
            cells: (N, T, channels).
            places: of the cells, (T, channels).
            hidden: (Q, Q) bool, which queries (rows) do not see which.
        """
        first, second, third = self.norms
        at = queries + place
        queries = first(queries + self.own(at, at, queries, need_weights=False, attn_mask=hidden)[0])
        queries = second(queries + self.across(queries + place, cells + places, cells, need_weights=False)[0])
        return cast(Tensor, third(queries + self.mix(queries)))


class Detr(Detector):
    """A detector whose queries match the boxes one to one, so that nothing is suppressed.

    Sources: Carion et al., DETR, 2020 (arXiv 2005.12872); Zhu et al., Deformable DETR, 2021 (arXiv 2010.04159), for the selected queries
    and the refined boxes; Zhao et al., RT-DETR, 2024 (arXiv 2304.08069), for attention on the coarsest level alone. Those of denoising
    are in denoising.py.

    Args:
        backbone: returns a dict of the levels of strides 8, 16 and 32, with `out_channels` each.
        classes: the number of classes.
        criterion: the loss.
        queries: how many boxes an image can have.
        layers, encoder_layers: of the decoder, and of the encoder on the coarsest level.
        heads: of the attention.
        cost: weights of class, L1 and GIoU in the cost of a pair, in this order.
        denoising: how many queries of an image are made of its boxes with noise, in training; 0 for none.
        label_noise, box_noise: see Denoising.
        score_thresh, detections_per_img: lowest score of a detection, and how many are kept.
    """

    strides = STRIDES
    matches_output = True
    suppresses = False
    only_in_training = ("denoising",)

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
        denoising: int = 0,
        label_noise: float = 0.25,
        box_noise: float = 1.0,
        score_thresh: float = 0.05,
        detections_per_img: int = 100,
    ) -> None:
        super().__init__()
        channels = cast(int, backbone.out_channels)
        self.backbone, self.criterion, self.coder = backbone, criterion, ImageCoder()
        self.queries = queries
        of_class, of_distance, of_overlap = cost
        self.matcher = DetrCriterion(cost_class=of_class, cost_bbox=of_distance, cost_giou=of_overlap)
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
        self.denoising = Denoising(classes, channels, denoising, label_noise, box_noise) if denoising else None
        self.takes_targets = bool(denoising)

    def get_classifier(self) -> nn.Module:
        return self.cls_logits if self.denoising is None else nn.ModuleList([self.cls_logits, self.denoising.content])

    def outputs(self, levels: list[Tensor], boxes: Tensor | None = None, labels: Tensor | None = None) -> DetectorOutput:
        """Return the last layer's outputs, and in training those of all before, the selected queries' first, and of denoising queries.

        Args:
            levels: the finest first.
            boxes: (N, K, 4) the batch's, in pixels, of which denoising queries are made.
            labels: (N, K), -1 in rows without a box.
        """
        height, width = (side * STRIDES[0] for side in levels[0].shape[-2:])
        *finer, coarsest = levels
        image, anchors = self.anchors_of(height, width, coarsest.device)
        count = coarsest.shape[-2] * coarsest.shape[-1]
        kind = levels[0].dtype  # the weights', also where a model is exported in half precision
        places = self.place(anchors.to(kind))  # (T, channels)
        seen = self.encoder(coarsest.flatten(2).mT + places[-count:])
        cells = self.enter(torch.cat([*[level.flatten(2).mT for level in finer], seen], 1))
        logits = self.cls_logits[0](cells)
        chosen = logits.detach().amax(-1).topk(least(self.queries, cells.shape[1]), 1).indices
        queries = rows_at(cells, chosen)
        at = self.box_deltas[0](queries).float() + rows_at(anchors.logit(NEAREST).expand(cells.shape[0], -1, -1), chosen)
        found, noisy, hidden = [DetectorOutput(rows_at(logits, chosen), at.sigmoid(), coefficients=self.coefficients(queries))], 0, None
        queries = queries.detach()
        if self.training and self.denoising is not None and boxes is not None and labels is not None:
            boxes, labels = with_a_row(boxes.float(), labels)
            content, noise = self.denoising(self.coder.encode(image, boxes), labels)
            hidden = self.denoising.hidden(labels.shape[1], queries.shape[1], queries.device)
            noisy, queries, at = content.shape[1], torch.cat([content, queries], 1), torch.cat([noise.logit(NEAREST), at], 1)
        of_noise = []
        for layer, classifier, deltas in zip(self.decoder, self.cls_logits[1:], self.box_deltas[1:], strict=True):
            at = at.detach()
            queries = layer(queries, self.place(at.sigmoid().to(kind)), cells, places, hidden)
            at = deltas(queries).float() + at
            logits, regression = classifier(queries), at.sigmoid()
            own = self.coefficients(queries[:, noisy:])
            found.append(DetectorOutput(logits[:, noisy:], regression[:, noisy:], coefficients=own))
            of_noise.append((logits[:, :noisy], regression[:, :noisy]))
        last = found.pop()
        if not self.training:
            return last
        logits, regression = (torch.cat(each) for each in list(zip(*found, strict=True))[:2])
        rows = [each.coefficients for each in found if each.coefficients is not None]
        last = last._replace(earlier_logits=logits, earlier_regression=regression, earlier_coefficients=torch.cat(rows) if rows else None)
        if not noisy:
            return last
        logits, regression = (torch.cat(each) for each in zip(*of_noise, strict=True))
        return last._replace(noisy_logits=logits, noisy_regression=regression)

    def coefficients(self, queries: Tensor) -> Tensor | None:
        """Return the coefficients (N, Q, P) of the masks of queries (N, Q, channels); None: there are no masks."""
        return None

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
        """Return the targets of `rows_of(output)`, without waiting for the device."""
        assert output is not None
        height, width = batch.images.shape[-2:]
        (image,) = self.anchors(height, width, batch.boxes.device)
        boxes, labels = with_a_row(batch.boxes.float(), batch.labels)
        exists = labels >= 0
        # all images' boxes one after the other; the rows without a box are last
        order = (~exists).flatten().sort(stable=True).indices
        label, box = labels.flatten()[order].clamp(min=0), boxes.flatten(0, 1)[order]
        denoising = None
        if self.denoising is not None and output.noisy_logits is not None and output.noisy_regression is not None:
            place = torch.where(exists, exists.flatten().cumsum(0).view_as(labels) - 1, -1)
            noisy = [of_layers(part, len(labels)) for part in (output.noisy_logits, output.noisy_regression)]
            groups = self.denoising.groups(labels.shape[1])
            denoising = DenoisingQueries(noisy[0], noisy[1], self.denoising.places(place), groups)
        logits, regression = (
            of_layers(last if earlier is None else torch.cat([earlier, last]), len(labels))
            for earlier, last in ((output.earlier_logits, output.logits), (output.earlier_regression, output.regression))
        )
        with plain_torch() if self.criterion.plain else nullcontext():
            found = self.matcher.match(logits, regression, label, self.coder.encode(image, box), exists.sum(1), denoising=denoising)
        target = torch.where(found.matched[:, None], self.coder.decode(found.boxes, image), image)
        # the box's place in its image, of queries without a box -1
        index = torch.where(found.matched, order[found.box % exists.sum().clamp(min=1)] % labels.shape[1], -1)
        positives = found.matched.sum(dtype=torch.float32)
        return Matched(found.labels, target, found.matched, positives, image, box_index=index, weight=found.weight)

    def loss(self, output: DetectorOutput, matched: Matched, normalizer: Tensor) -> dict[str, Tensor]:
        """Return sums over the batch, all layers and denoising queries, divided by `normalizer`."""
        return self.criterion(rows_of(output), matched, self.coder, normalizer)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Return the best pairs of query and class of each image; see Detector.detections."""
        (image,) = self.anchors(*padded, output.logits.device)
        boxes = clipped(self.coder.decode(output.regression, image), sizes)
        return unsuppressed(output, boxes, self.detections_per_img, self.score_thresh)


def of_layers(outputs: Tensor, images: int) -> Tensor:
    """Return (layers, N, Q, …) of (layers · N, Q, …), N the number of images."""
    return outputs.unflatten(0, (-1, images))


def _perceptron(channels: int) -> nn.Module:
    """Return what corrects a box; at the start by nothing."""
    last = nn.Linear(channels, 4)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels), nn.ReLU(), last)
