"""RetinaNet and FCOS from torchvision, with matching and loss for batches on the device.

Parameters have torchvision's names, so that its heads' weights load. Classes count from 0, and the background is not a class.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead

from lab.base.errors import UserError
from lab.detectors.detection.boxes import DeltaCoder
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.matching import Match, by_centre, by_overlap, in_parts, matched, with_a_row
from lab.detectors.detection.types import Coder, DetectionBatch, DetectorOutput, Matched

STRIDES = (8, 16, 32, 64, 128)
DIVISOR = 32  # the sides of a batch's images are multiples of this, so that they determine each level's size
ANCHOR_SIZES = (32, 64, 128, 256, 512)


class Detector(nn.Module):
    """What dense detectors share; torchvision's post-processing belongs to a subclass.

    strides: of the levels. matches_output: whether the targets follow from what is predicted. takes_targets: whether forward takes the
    batch's boxes and labels after the images, in training. suppresses: whether the lower-scoring of two boxes that overlap is removed.
    """

    coder: Coder
    criterion: DetectionLoss
    anchor_generator: Any
    backbone: Any
    head: Any
    match_boxes: Callable[[Tensor, Tensor, list[Tensor]], Match]  # (boxes (N, K, 4), which rows are boxes (N, K), levels)
    postprocess_detections: Any
    strides: tuple[int, ...] = STRIDES
    matches_output = False
    takes_targets = False
    suppresses = True

    def forward(self, images: Tensor, *targets: Tensor) -> DetectorOutput:
        """Return the head's raw outputs for images (N, 3, H, W). targets: boxes (N, K, 4) and labels (N, K), see takes_targets."""
        height, width = images.shape[-2:]
        if height % DIVISOR or width % DIVISOR:
            raise UserError(f"a batch of {height}×{width} pixels: detectors take images padded to multiples of {DIVISOR}.")
        return self.outputs(list(self.backbone(images).values()), *targets)

    def outputs(self, levels: list[Tensor]) -> DetectorOutput:
        """Return the head's raw outputs for the levels, the finest first."""
        found = self.head(levels)
        centerness = found.get("bbox_ctrness")
        return DetectorOutput(found["cls_logits"], found["bbox_regression"], None if centerness is None else centerness.squeeze(2))

    def get_classifier(self) -> nn.Module:
        """Return the layer whose size depends on the number of classes."""
        return cast(nn.Module, self.head.classification_head.cls_logits)

    def anchors(self, height: int, width: int, device: torch.device) -> list[Tensor]:
        """Return anchors (Aₗ, 4) of each level, float32 for any features; only the first call on a device copies from the host."""
        # written so, because ONNX divides negative numbers otherwise than Python
        grids = [((height + stride - 1) // stride, (width + stride - 1) // stride) for stride in self.strides]
        self.anchor_generator.set_cell_anchors(torch.float32, device)
        # torchvision's strides: if a side is not a multiple of 128, P6 and P7 have smaller ones than 64 and 128
        return cast(
            list[Tensor], self.anchor_generator.grid_anchors(grids, [(height // rows, width // columns) for rows, columns in grids])
        )

    @torch.no_grad()
    def match(self, batch: DetectionBatch, output: DetectorOutput | None = None) -> Matched:
        """Return the targets of the anchors; images may have no boxes. output: needed where `matches_output`."""
        height, width = batch.images.shape[-2:]
        levels = self.anchors(height, width, batch.boxes.device)
        boxes, labels = with_a_row(batch.boxes.float(), batch.labels)
        anchors = torch.cat(levels)
        match = in_parts(lambda boxes, there: self.match_boxes(boxes, there, levels), boxes, labels >= 0, len(anchors))
        return matched(match, boxes, labels, anchors)

    def loss(self, output: DetectorOutput, matched: Matched, normalizer: Tensor) -> dict[str, Tensor]:
        """Return sums over the batch, divided by `normalizer`: a 0-d tensor, the positives of all ranks' batches, at least 1."""
        return self.criterion(output, matched, self.coder, normalizer)

    @torch.no_grad()
    def detections(self, output: DetectorOutput, sizes: Tensor, padded: tuple[int, int]) -> list[dict[str, Tensor]]:
        """Apply torchvision's post-processing: threshold, best candidates of each level, non-maximum suppression by class.

        Args:
            output: the result of `forward`.
            sizes: (N, 2) height and width of each image inside its padding, to which boxes are clipped.
            padded: height and width of the batch's images.

        Returns:
            For each image: boxes (D, 4) xyxy in pixels of the batch's image, scores (D,) falling, labels (D,) from 0.
        """
        levels = self.anchors(*padded, output.logits.device)
        counts = [len(level) for level in levels]
        heads = {"cls_logits": output.logits, "bbox_regression": output.regression}
        if output.centerness is not None:
            heads["bbox_ctrness"] = output.centerness.unsqueeze(2)
        split = {name: list(value.float().split(counts, dim=1)) for name, value in heads.items()}
        shapes = [(height, width) for height, width in sizes.tolist()]
        return cast(list[dict[str, Tensor]], self.postprocess_detections(split, [levels] * len(shapes), shapes))


class RetinaNet(Detector, detection.RetinaNet):
    """Lin et al., Focal Loss for Dense Object Detection, 2017 (arXiv 1708.02002).

    Args:
        backbone: returns a dict of the levels of strides 8 to 128, with `out_channels` each.
        classes: the number of classes, without the background.
        criterion: the loss.
        anchor_sizes: the side of each level's smallest anchor.
        head_norm: whether the head has group norms, as torchvision's second version; the channels are then 64, 96 and so on.
        options: torchvision's, such as score_thresh, nms_thresh, detections_per_img, topk_candidates, fg_iou_thresh, bg_iou_thresh.
    """

    def __init__(
        self,
        backbone: nn.Module,
        classes: int,
        criterion: DetectionLoss,
        *,
        anchor_sizes: Sequence[int] = ANCHOR_SIZES,
        head_norm: bool = False,
        **options: Any,
    ) -> None:
        sizes = tuple((size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in anchor_sizes)
        generator = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
        channels = cast(int, backbone.out_channels)
        if head_norm:
            check_groups(channels)
        norm = partial(nn.GroupNorm, 32) if head_norm else None
        head = RetinaNetHead(channels, generator.num_anchors_per_location()[0], classes, norm_layer=norm)
        detection.RetinaNet.__init__(self, backbone, classes, anchor_generator=generator, head=head, **options)
        self.coder, self.criterion = DeltaCoder(), criterion

    def match_boxes(self, boxes: Tensor, there: Tensor, levels: list[Tensor]) -> Match:
        matcher = cast(Matcher, self.proposal_matcher)
        return by_overlap(boxes, there, torch.cat(levels), matcher.high_threshold, matcher.low_threshold)


class FCOS(Detector, detection.FCOS):
    """Tian et al., FCOS: A Simple and Strong Anchor-Free Object Detector, 2020 (arXiv 2006.09214).

    Args:
        backbone: returns a dict of the levels of strides 8 to 128, with `out_channels` each: 64, 96 and so on, for the head's group norms.
        classes: the number of classes, without the background.
        criterion: the loss.
        convolutions: the number in each branch of the head before its output.
        score_thresh: 0.05; torchvision's 0.2 lowers mean average precision.
        options: torchvision's, such as nms_thresh, detections_per_img, topk_candidates, center_sampling_radius.
    """

    def __init__(
        self,
        backbone: nn.Module,
        classes: int,
        criterion: DetectionLoss,
        *,
        convolutions: int = 4,
        score_thresh: float = 0.05,
        **options: Any,
    ) -> None:
        channels = cast(int, backbone.out_channels)
        check_groups(channels)
        head = FCOSHead(channels, 1, classes, convolutions)
        detection.FCOS.__init__(self, backbone, classes, head=head, score_thresh=score_thresh, **options)
        self.coder, self.criterion = cast(Coder, self.box_coder), criterion

    def match_boxes(self, boxes: Tensor, there: Tensor, levels: list[Tensor]) -> Match:
        return by_centre(boxes, there, levels, cast(float, self.center_sampling_radius))


def check_groups(channels: int) -> None:
    if channels % 32 or channels == 32:  # with 32 channels, a group has only one number where a level is a single pixel
        raise UserError(
            f"model.channels={channels}: 64, 96 and so on are expected, for the head's norms of 32 groups of two channels or more."
        )
