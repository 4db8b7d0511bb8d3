"""The criterion of DETR and its successors: matching and losses of all layers, groups of queries and denoising queries at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lossforge.losses.base import checks
from lossforge.losses.detection.counts import counts_on_device
from lossforge.losses.detection.hungarian import hungarian_assign
from lossforge.losses.detection.matching import matching_cost
from lossforge.losses.functional import (
    box_iou_loss,
    box_l1_loss,
    cross_entropy,
    generalized_box_iou_loss,
    ia_bce_loss,
    mal_loss,
    sigmoid_focal_loss,
    varifocal_loss,
)

__all__ = ["DenoisingQueries", "DetrCriterion", "QueryTargets"]

OF_CLASSES: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = {
    "focal": (sigmoid_focal_loss, {}),
    "varifocal": (varifocal_loss, {"hold_weight": True, "positive_at_zero": True}),
    "mal": (mal_loss, {}),
    "ia_bce": (ia_bce_loss, {}),
    "cross_entropy": (cross_entropy, {}),
}
SCORED = ("varifocal", "mal", "ia_bce")
"""Losses whose target of a matched query is the IoU of its box."""


class DenoisingQueries(NamedTuple):
    """Predictions of queries that are made from boxes with noise, whose boxes are known (DN-DETR, DINO, RT-DETR).

    Attributes:
        logits: (L, B, D, C), of at most as many layers as the other queries have, the last of them.
        boxes: (L, B, D, 4), predicted.
        box: (B, D), of any integer dtype: the box of each query, its place among all T; -1 for background and padding. On CPU a place that
            does not exist raises. On CUDA the loss of that query and its gradient are nan.
        groups: how often each box occurs, by which its losses are divided.
    """

    logits: Tensor
    boxes: Tensor
    box: Tensor
    groups: int


class QueryTargets(NamedTuple):
    """Targets of all queries of all layers, R = L B Q rows, after which those of denoising queries follow, L' B D more.

    Attributes:
        labels: (R,), int64: the class of each query's box. Without one -1, or the last class with class_loss="cross_entropy".
        boxes: (R, 4), the box, zeros without one.
        matched: (R,), bool: whether a query has a box.
        weight: (R,), float32 (float64 for float64): the factor of each row's losses; None for 1.
        box: (R,), int64: the box itself, counted over the boxes of all layers. Its remainder by the number of boxes is its place in
            `labels` and `target_boxes`. -1 without one.
    """

    labels: Tensor
    boxes: Tensor
    matched: Tensor
    weight: Tensor | None
    box: Tensor


class DetrCriterion(nn.Module):
    """Matching and losses of DETR and its successors, for all layers, groups and denoising queries with one launch of each.

    The criterion of DETR (Carion et al. 2020, arXiv 2005.12872), Deformable DETR, DINO, RT-DETR, DEIM and LW-DETR: `matching_cost` and
    `hungarian_assign` give each box one query of every layer and group; then

    L = c₁ L_class + c₂ Σ |b - b̂| + c₃ Σ (1 - GIoU), summed over the layers.

    Sums are over the matched queries, and of L_class over all queries. Each is divided by the number of boxes times that of groups, at
    least by 1. Cross entropy is, as in DETR, the mean over the queries of a layer, whose divisor counts a query without a box by
    `background_weight`.

    DETR has class_loss="cross_entropy" and cost_class=1; Deformable DETR and DINO have "focal", RT-DETR "varifocal", DEIM "mal", LW-DETR
    "ia_bce" with num_groups. D-FINE's losses of the boxes' sides stand beside it: `distribution_focal_loss`.

    On an NVIDIA GPU the host does not wait, in float32 and below. A float64 call matches by scipy on the host.

    Args:
        class_loss: "focal", "varifocal" with the weight held, "mal", "ia_bce" or "cross_entropy". The matching takes the focal cost of the
            class, with "cross_entropy" the softmax's.
        class_coef: c₁, the weight of the classes' loss; 0 leaves it out.
        bbox_coef: c₂, the weight of the distance; 0 leaves it out.
        giou_coef: c₃, the weight of the overlap; 0 leaves it out.
        cost_class: the weight of the class in the matching, as in matching_cost.
        cost_bbox: the weight of the distance in the matching.
        cost_giou: the weight of the overlap in the matching.
        cost_alpha: α of the matching's focal cost.
        cost_gamma: γ of the matching's focal cost.
        alpha: α of the classes' loss; None for that loss's default.
        gamma: γ of the classes' loss; None for that loss's default.
        background_weight: of "cross_entropy": the weight of a query without a box, DETR's eos_coef.
        num_groups: into how many groups of equal size the queries are cut in training (Group-DETR, arXiv 2207.13085). In evaluation mode
            they are one group.
        layer_weights: a factor of each layer's losses, a buffer in torch's default dtype; None for 1.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import DetrCriterion
        >>> criterion = DetrCriterion("varifocal")
        >>> logits, boxes = torch.randn(6, 2, 100, 7, requires_grad=True), torch.rand(6, 2, 100, 4, requires_grad=True)
        >>> losses = criterion(logits, boxes, torch.tensor([0, 4, 6, 2]), torch.rand(4, 4), [3, 1])
        >>> sum(losses.values()).backward()
        >>> sorted(losses)
        ['loss_bbox', 'loss_class', 'loss_giou']
    """

    layer_weights: Tensor | None

    def __init__(
        self,
        class_loss: Literal["focal", "varifocal", "mal", "ia_bce", "cross_entropy"] = "focal",
        *,
        class_coef: float = 1.0,
        bbox_coef: float = 5.0,
        giou_coef: float = 2.0,
        cost_class: float = 2.0,
        cost_bbox: float = 5.0,
        cost_giou: float = 2.0,
        cost_alpha: float = 0.25,
        cost_gamma: float = 2.0,
        alpha: float | None = None,
        gamma: float | None = None,
        background_weight: float = 0.1,
        num_groups: int = 1,
        layer_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("class_loss", class_loss, tuple(OF_CLASSES))
        if class_loss == "cross_entropy" and (alpha is not None or gamma is not None):
            raise ValueError("alpha and gamma belong to the other losses, got one with class_loss='cross_entropy'")
        num_groups = checks.whole_number("num_groups", num_groups)
        if num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {num_groups}")
        self.class_loss, self.num_groups = class_loss, num_groups
        self.class_coef, self.bbox_coef, self.giou_coef = (
            checks.number(name, value, 0.0)
            for name, value in (("class_coef", class_coef), ("bbox_coef", bbox_coef), ("giou_coef", giou_coef))
        )
        self.cost_class, self.cost_bbox, self.cost_giou = (
            checks.number(name, value) for name, value in (("cost_class", cost_class), ("cost_bbox", cost_bbox), ("cost_giou", cost_giou))
        )
        self.cost_alpha, self.cost_gamma = checks.number("cost_alpha", cost_alpha, 0.0, 1.0), checks.number("cost_gamma", cost_gamma, 0.0)
        self.alpha, self.gamma = alpha, gamma
        self.background_weight = checks.number("background_weight", background_weight, 0.0, exclusive=True)
        if layer_weights is not None:
            layer_weights = [checks.number("layer_weights", w, 0.0) for w in checks.several("layer_weights", layer_weights)]
        self.register_buffer("layer_weights", None if layer_weights is None else torch.tensor(layer_weights))

    def forward(
        self,
        logits: Tensor,
        boxes: Tensor,
        labels: Tensor,
        target_boxes: Tensor,
        counts: Sequence[int] | Tensor,
        *,
        denoising: DenoisingQueries | None = None,
        normalizer: float | Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses, whose sum is to be differentiated.

        Args:
            logits: (L, B, Q, C) of L layers, or (B, Q, C), before the sigmoid or softmax. The last class of "cross_entropy" is background.
            boxes: (L, B, Q, 4) or (B, Q, 4), predicted, (centre, width, height) as fractions of the image.
            labels: (T,), the classes of all images' boxes one after the other.
            target_boxes: (T, 4), the boxes.
            counts: how many boxes each image has: B numbers, or a tensor (B,) on the device. Its sum, which is not checked, may be below T:
                the boxes after it are padding, so that shapes can be the same in every step.
            denoising: predictions of denoising queries; None for none. "cross_entropy" takes none.
            normalizer: number or 0-d tensor in place of the number of boxes: with several processes the mean of theirs.

        Returns:
            "loss_class", "loss_bbox" and "loss_giou", 0-d, in float32 (float64 for float64), with their coefficients.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
            IndexError: on CPU, a class or a place in denoising.box does not exist.
        """
        logits, boxes = _with_layers(logits, boxes)
        found = self.match(logits, boxes, labels, target_boxes, counts, denoising=denoising)
        every_logits, every_box = logits.flatten(0, 2), boxes.flatten(0, 2)
        if denoising is not None:
            every_logits = torch.cat([every_logits, denoising.logits.flatten(0, 2)])
            every_box = torch.cat([every_box, denoising.boxes.flatten(0, 2)])
        if normalizer is None:
            normalizer = counts.sum() if isinstance(counts, Tensor) else len(labels)
        divisor = _at_least_one(normalizer, self._groups(), _wide(logits))
        losses = {}
        if self.class_coef:
            losses["loss_class"] = self._of_classes(every_logits, every_box, found, len(logits), divisor)
        weight = found.matched.to(target_boxes.dtype) if found.weight is None else found.matched * found.weight
        shared: dict[str, Any] = {"reduction": "sum", "weight": weight}
        if self.bbox_coef:
            losses["loss_bbox"] = box_l1_loss(every_box, found.boxes, normalizer=divisor / self.bbox_coef, **shared)
        if self.giou_coef:
            giou: Tensor = generalized_box_iou_loss(every_box, found.boxes, normalizer=divisor / self.giou_coef, format="cxcywh", **shared)
            losses["loss_giou"] = giou
        return losses

    @torch.no_grad()
    def match(
        self,
        logits: Tensor,
        boxes: Tensor,
        labels: Tensor,
        target_boxes: Tensor,
        counts: Sequence[int] | Tensor,
        *,
        denoising: DenoisingQueries | None = None,
    ) -> QueryTargets:
        """Return the targets of all queries, for losses of your own beside or in place of `forward`'s.

        Args:
            logits: as in forward.
            boxes: as in forward.
            labels: as in forward.
            target_boxes: as in forward.
            counts: as in forward.
            denoising: as in forward.

        Returns:
            a QueryTargets of the rows of logits.flatten(0, 2) with layers, then of denoising.logits.

        Raises:
            TypeError, ValueError, IndexError: as in forward.

        Examples:
            >>> import torch
            >>> from lossforge.losses import DetrCriterion, sigmoid_focal_loss
            >>> logits, boxes = torch.randn(6, 2, 100, 7), torch.rand(6, 2, 100, 4)
            >>> found = DetrCriterion().match(logits, boxes, torch.tensor([0, 4, 6, 2]), torch.rand(4, 4), [3, 1])
            >>> loss = sigmoid_focal_loss(logits.flatten(0, 2), found.labels, reduction="sum", normalizer=4)
        """
        logits, boxes = _with_layers(logits, boxes)
        layers, images, queries, classes = logits.shape
        groups = self._groups()
        checks.fits("logits", logits, queries % groups == 0, "have queries in num_groups={} groups of equal size", groups)
        checks.integer("labels", labels)
        checks.fits("labels", labels, labels.ndim == 1, "have shape (T,)")
        checks.floating_beside("target_boxes", target_boxes, logits, "logits")
        checks.fits("target_boxes", target_boxes, target_boxes.shape == (len(labels), 4), "have shape {}", (len(labels), 4))
        of_image = counts_on_device(counts, images, len(labels), logits, "logits")
        if isinstance(counts, Tensor):  # boxes after their sum are padding, so that the next layer's begin there
            place = torch.arange(layers * len(labels), device=labels.device) % of_image.sum().clamp(1, max(len(labels), 1))
            every_label, every_box = labels[place], target_boxes[place]
        else:
            every_label, every_box = labels.repeat(layers), target_boxes.repeat(layers, 1)
        of_image = of_image.repeat(layers)
        softmax = self.class_loss == "cross_entropy"
        cost = matching_cost(
            logits.flatten(0, 1),
            boxes.flatten(0, 1),
            every_label,
            every_box,
            of_image,
            class_cost="softmax" if softmax else "focal",
            cost_class=self.cost_class,
            cost_bbox=self.cost_bbox,
            cost_giou=self.cost_giou,
            alpha=self.cost_alpha,
            gamma=self.cost_gamma,
        )
        box = hungarian_assign(cost.reshape(groups, queries // groups, *cost.shape[1:]), of_image).flatten()
        weight = self._weights(layers, layers, images * queries, _wide(logits))
        if denoising is not None:
            box, weight = self._joined(box, weight, denoising, logits, len(labels))
        # the last place, which -1 names, stands for no box
        label = F.pad(every_label.long(), (0, 1), value=classes - 1 if softmax else -1)[box]
        return QueryTargets(label, F.pad(every_box, (0, 0, 0, 1))[box], box >= 0, weight, box)

    def _groups(self) -> int:
        return self.num_groups if self.training else 1

    def _weights(self, layers: int, last: int, rows: int, dtype: torch.dtype) -> Tensor | None:
        """Return the factor of each row (last · rows,) of the last layers, or None for 1."""
        if self.layer_weights is None:
            return None
        checks.fits("layer_weights", self.layer_weights, len(self.layer_weights) == layers, "have one number for each of {} layers", layers)
        return self.layer_weights[layers - last :].to(dtype).repeat_interleave(rows)

    def _joined(
        self, queries: Tensor, weight: Tensor | None, denoising: DenoisingQueries, logits: Tensor, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return boxes and factors of queries (R,), then those of denoising queries, whose divisor is another. total: of boxes."""
        if self.class_loss == "cross_entropy":
            raise ValueError("denoising goes with the losses of a sigmoid, got class_loss='cross_entropy'")
        x, boxes, box, times = denoising
        layers, images, _, classes = logits.shape
        for name, t in (("denoising.logits", x), ("denoising.boxes", boxes)):
            checks.floating_beside(name, t, logits, "logits")
        shape = (*x.shape[:1], images, *x.shape[2:3], classes)
        checks.fits(
            "denoising.logits", x, x.shape == shape and len(x) <= layers, "have shape (at most {}, {}, D, {})", layers, images, classes
        )
        checks.fits("denoising.boxes", boxes, boxes.shape == (*shape[:3], 4), "have shape {}", (*shape[:3], 4))
        checks.integer("denoising.box", box)
        checks.beside("denoising.box", box, logits, "logits")
        checks.fits("denoising.box", box, box.shape == shape[1:3], "have shape {}", shape[1:3])
        if checks.known(box) and box.device.type == "cpu":
            checks.in_range("denoising.box", box, -1, total, None)
        box = box.long()
        exists, dtype = (box >= -1) & (box < total), _wide(logits)
        box, factor = torch.where(exists, box, -1), torch.where(exists, 1.0, torch.nan).to(dtype)
        times = checks.whole_number("denoising.groups", times)
        if times < 1:
            raise ValueError(f"denoising.groups must be at least 1, got {times}")
        weight, own = (
            logits.new_ones(n, dtype=dtype) if w is None else w
            for n, w in ((len(queries), weight), (box.numel() * len(x), self._weights(layers, len(x), box.numel(), dtype)))
        )
        own = own * factor.flatten().repeat(len(x)) * (self._groups() / times)
        return torch.cat([queries, box.flatten().repeat(len(x))]), torch.cat([weight, own])

    def _of_classes(self, logits: Tensor, boxes: Tensor, found: QueryTargets, layers: int, divisor: float | Tensor) -> Tensor:
        """Return the classes' loss of all rows (R, C)."""
        loss, options = OF_CLASSES[self.class_loss]
        if self.class_loss == "cross_entropy":
            weight = torch.full_like(logits[:, 0], self.background_weight, dtype=_wide(logits)).masked_fill_(found.matched, 1.0)
            # all layers have as many queries with a box; without queries the loss is 0
            mean = weight.sum() / (layers * self.class_coef) if len(weight) else 1.0
            return loss(logits, found.labels, token_weight=weight if found.weight is None else weight * found.weight, normalizer=mean)
        given: dict[str, Any] = {"alpha": self.alpha, "gamma": self.gamma}
        given = {name: value for name, value in given.items() if value is not None} | dict(options)
        if self.class_loss in SCORED:
            given["score"] = 1 - box_iou_loss(boxes.detach(), found.boxes, format="cxcywh")
        if found.weight is not None:
            given["weight"] = found.weight.unsqueeze(1)
        return loss(logits, found.labels, reduction="sum", normalizer=divisor / self.class_coef, **given)

    def extra_repr(self) -> str:
        return f"{self.class_loss!r}, num_groups={self.num_groups}"


def _with_layers(logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions (L, B, Q, …), of one layer where they are of none."""
    checks.whole("logits", logits)
    checks.floating_beside("boxes", boxes, logits, "logits")
    checks.fits("logits", logits, logits.ndim in (3, 4), "have shape (L, B, Q, C) or (B, Q, C)")
    checks.fits("boxes", boxes, boxes.shape == (*logits.shape[:-1], 4), "have shape {}", (*logits.shape[:-1], 4))
    return (logits, boxes) if logits.ndim == 4 else (logits.unsqueeze(0), boxes.unsqueeze(0))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _at_least_one(normalizer: float | Tensor, groups: int, dtype: torch.dtype) -> float | Tensor:
    if isinstance(normalizer, Tensor):
        return (normalizer.to(dtype) * groups).clamp(min=1)
    return max(checks.number("normalizer", normalizer) * groups, 1.0)
