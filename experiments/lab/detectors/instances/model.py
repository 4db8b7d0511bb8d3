"""A YOLO and a DETR that also predict a mask of each object: the product of its coefficients and the image's prototypes.

Sources: Bolya et al., YOLACT, 2019 (arXiv 1904.02689); Li et al., Mask DINO, 2023 (arXiv 2206.02777), whose pixel embedding has the part of
the prototypes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, batched_nms, clip_boxes_to_image

from lab.data.rle import encoded
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.detr import Detr
from lab.detectors.detection.models.yolo import STRIDES, Branch, TaskAlignedHead, Yolo, both
from lab.detectors.detection.types import MASK_STRIDE, DetectionBatch, DetectorOutput, Matched
from lab.detectors.instances.loss import inside, point_loss, prototype_loss

PIXELS = 2**25
"""Of masks that are resized at once."""


def prototypes_of(channels: int, prototypes: int) -> nn.Sequential:
    """Return what makes prototypes (N, P, H / MASK_STRIDE, W / MASK_STRIDE) of the finest level (N, channels, H / 8, W / 8)."""
    return nn.Sequential(
        Conv2dNormActivation(channels, channels, 3, activation_layer=nn.SiLU),
        nn.ConvTranspose2d(channels, channels, STRIDES[0] // MASK_STRIDE, STRIDES[0] // MASK_STRIDE),
        Conv2dNormActivation(channels, channels, 3, activation_layer=nn.SiLU),
        nn.Conv2d(channels, prototypes, 1),
    )


def with_logits(found: list[dict[str, Tensor]], output: DetectorOutput) -> list[dict[str, Tensor]]:
    """Add to each image's detections, with the `index` of their anchors, `masks`: logits (D, h, w) of the padded image."""
    parts = zip(found, cast(Tensor, output.coefficients).float(), cast(Tensor, output.prototypes).float(), strict=True)
    return [each | {"masks": torch.einsum("dp,phw->dhw", own[each["index"]], maps)} for each, own, maps in parts]


class MaskHead(TaskAlignedHead):
    """A head with a branch for the coefficients of each anchor's mask."""

    def __init__(self, channels: int, classes: int, convolutions: int, bins: int, prototypes: int) -> None:
        super().__init__(channels, classes, convolutions, bins)
        self.mask_branch = Branch(channels, convolutions, len(STRIDES))
        self.coefficients = nn.Conv2d(channels, prototypes, 3, padding=1)

    def forward(self, levels: Sequence[Tensor]) -> DetectorOutput:
        """Return the outputs of levels (N, channels, H, W), the finest first."""
        rows = [self.coefficients(self.mask_branch(level, number)).flatten(2).transpose(1, 2) for number, level in enumerate(levels)]
        return super().forward(levels)._replace(coefficients=torch.cat(rows, 1))


class YoloMasks(Yolo):
    """A YOLO with masks.

    Args:
        backbone, classes, criterion: as Yolo's.
        prototypes: how many masks of the whole image there are to add up.
        options: more arguments of Yolo.
    """

    def __init__(self, backbone: nn.Module, classes: int, criterion: DetectionLoss, *, prototypes: int = 32, **options: Any) -> None:
        super().__init__(backbone, classes, criterion, head=partial(MaskHead, prototypes=prototypes), **options)
        self.prototypes = prototypes_of(cast(int, backbone.out_channels), prototypes)

    def outputs(self, levels: list[Tensor]) -> DetectorOutput:
        return super().outputs(levels)._replace(prototypes=self.prototypes(levels[0]))

    def mask_loss(self, output: DetectorOutput, matched: Matched, batch: DetectionBatch) -> Tensor:
        """Return the sum of the masks' losses."""
        return prototype_loss(both(output), matched, cast(Tensor, batch.masks), batch.boxes, plain=self.criterion.plain)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Return boxes, scores and labels as torchvision's post-processing does, with the logits of their masks.

        Returns:
            For each image also: index (D,) of the anchors, and masks (D, H / MASK_STRIDE, W / MASK_STRIDE), logits of the padded image.
        """
        if not self.suppresses:
            return with_logits(super().detections(output, sizes, padded), output)
        levels = self.anchors(*padded, output.logits.device)
        parts = zip(output.logits.float().sigmoid(), output.regression.float(), sizes.tolist(), strict=True)
        found = [self._kept(scores, regression, levels, size) for scores, regression, size in parts]
        return with_logits([dict(zip(("boxes", "scores", "labels", "index"), each, strict=True)) for each in found], output)

    def _kept(self, scores: Tensor, regression: Tensor, levels: list[Tensor], size: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return boxes (D, 4), scores (D,), labels (D,) and anchors' indices (D,) of an image's detections, the highest-scoring first."""
        candidates = []
        start = 0
        for level in levels:
            flat = scores[start : start + len(level)].flatten()
            sure = (flat > self.score_thresh).nonzero()[:, 0]
            best, order = flat[sure].topk(min(len(sure), self.topk_candidates))
            candidates.append((best, sure[order] + start * scores.shape[1]))
            start += len(level)
        best, place = (torch.cat(each) for each in zip(*candidates, strict=True))
        index, labels = place // scores.shape[1], place % scores.shape[1]
        boxes = self.coder.decode(regression[index], torch.cat(levels)[index])
        boxes = clip_boxes_to_image(boxes, (size[0], size[1]))
        kept = batched_nms(boxes, best, labels, self.nms_thresh)[: self.detections_per_img]
        return boxes[kept], best[kept], labels[kept], index[kept]


class DetrMasks(Detr):
    """A DETR with masks: a query's embedding, one perceptron for all layers, times the embedding of each pixel.

    Args:
        backbone, classes, criterion: as Detr's.
        prototypes: the size of an embedding.
        points: of a mask, at which its loss is computed.
        options: more arguments of Detr.
    """

    def __init__(
        self, backbone: nn.Module, classes: int, criterion: DetectionLoss, *, prototypes: int = 32, points: int = 1024, **options: Any
    ) -> None:
        super().__init__(backbone, classes, criterion, **options)
        channels = cast(int, backbone.out_channels)
        self.embedding = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, prototypes))
        self.prototypes, self.points = prototypes_of(channels, prototypes), points

    def coefficients(self, queries: Tensor) -> Tensor:
        return cast(Tensor, self.embedding(queries))

    def outputs(self, levels: list[Tensor], boxes: Tensor | None = None, labels: Tensor | None = None) -> DetectorOutput:
        return super().outputs(levels, boxes, labels)._replace(prototypes=self.prototypes(levels[0]))

    def mask_loss(self, output: DetectorOutput, matched: Matched, batch: DetectionBatch) -> Tensor:
        """Return the sum of the masks' losses; where the model is evaluated its points are the same each time."""
        masks = cast(Tensor, batch.masks)
        generator = None if self.training else torch.Generator(masks.device).manual_seed(0)
        return point_loss(output, matched, masks, points=self.points, plain=self.criterion.plain, generator=generator)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Return the best pairs of query and class of each image, with `index` and `masks` as YoloMasks.detections."""
        return with_logits(super().detections(output, sizes, padded), output)


@torch.no_grad()
def encoded_in_file(masks: Tensor, boxes: Tensor, size: tuple[int, int], original: tuple[int, int]) -> list[bytes]:
    """Return masks of an image's file as lab.data.rle encodes them: the pixels of positive logits inside the boxes.

    Args:
        masks: (D, h, w) logits of the padded image, a number for MASK_STRIDE pixels a side.
        boxes: (D, 4) xyxy in pixels of the file.
        size: height and width of the image in the padding.
        original: height and width of the file.
    """
    found: list[bytes] = []
    many = max(1, PIXELS // (original[0] * original[1] + MASK_STRIDE**2 * masks.shape[1] * masks.shape[2]))
    for part, box in zip(masks.split(many), boxes.split(many), strict=True) if len(masks) else ():
        large = F.interpolate(part[None], scale_factor=MASK_STRIDE, mode="bilinear")[:, :, : size[0], : size[1]]
        large = large if size == original else F.interpolate(large, original, mode="bilinear")
        found += encoded(((large[0] > 0) & inside(box, large)).cpu().numpy())
    return found
