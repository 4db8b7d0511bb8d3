"""The losses of instances' masks: of prototypes within boxes, and at sampled points."""

from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from lab.detectors.detection.types import MASK_STRIDE, DetectorOutput, Matched
from lossforge.losses import plain_torch, point_mask_loss, prototype_mask_loss, sample_uncertain_points


def prototype_loss(output: DetectorOutput, matched: Matched, masks: Tensor, boxes: Tensor, *, plain: bool) -> Tensor:
    """Return the sum over positive anchors of their masks' mean binary cross entropy in the box, weighted as the boxes' loss, ().

    L = Σ_a score_a/|box_a| Σ_{cells in box_a} BCE(c_a · prototypes, mask of box_a), with |box_a| in cells, at least 1.

    Source: Bolya et al., YOLACT, 2019 (arXiv 1904.02689); YOLOv8 divides by the box's area in the same way.

    Args:
        output: with coefficients c and prototypes; of two heads the images follow twice.
        matched: with the anchors' scores and boxes' indices.
        masks: (N, K, H, W) uint8, how much of each cell is covered, 0 to 255.
        boxes: (N, K, 4) xyxy in pixels.
        plain: compute in plain torch, for comparison.
    """
    coefficients, prototypes = cast(Tensor, output.coefficients), cast(Tensor, output.prototypes)
    box_index, scores = cast(Tensor, matched.box_index), cast(Tensor, matched.scores)
    images, many = boxes.shape[:2]
    if not many:
        return 0.0 * (coefficients.float().sum() + prototypes.float().sum())
    first = many * torch.arange(len(box_index), device=boxes.device).remainder(images)[:, None]
    which = torch.where(box_index < 0, -1, box_index + first).flatten()
    cells = boxes.flatten(0, 1)[which.clamp(min=0)].float() / MASK_STRIDE
    area = (cells[:, 2:] - cells[:, :2]).prod(1)
    with plain_torch() if plain else nullcontext():
        values = prototype_mask_loss(
            coefficients.flatten(0, 1),
            prototypes,
            masks.flatten(0, 1).float() / 255,
            cells - 0.5,  # a cell counts where its centre is in the box
            [box_index.shape[1]] * len(box_index),
            "none",
            target_index=which,
        )
    return (values * scores.flatten() * area / area.clamp(min=1)).sum()


def point_loss(
    output: DetectorOutput, matched: Matched, masks: Tensor, *, points: int, plain: bool, generator: torch.Generator | None
) -> Tensor:
    """Return the sum of binary cross entropy and Dice loss of the masks of matched queries of all layers, at sampled points, ().

    Sources: Kirillov et al., PointRend, 2020 (arXiv 1912.08193), for the points; Cheng et al., Mask2Former, 2022 (arXiv 2112.01527), for
    the losses; Li et al., Mask DINO, 2023 (arXiv 2206.02777), for masks of queries that have boxes, too.

    Args:
        output: with coefficients and prototypes.
        matched: with the boxes' indices of the queries of all layers, of which those of denoising queries come last.
        masks: (N, K, H, W) uint8, how much of each cell is covered, 0 to 255.
        points: how many points of each mask are sampled.
        plain: compute in plain torch, for comparison.
        generator: of the points.
    """
    coefficients, prototypes = cast(Tensor, output.coefficients), cast(Tensor, output.prototypes)
    if output.earlier_coefficients is not None:
        coefficients = torch.cat([output.earlier_coefficients, coefficients])
    (images, many), (rows, queries) = masks.shape[:2], coefficients.shape[:2]
    total = 0.0 * coefficients.float().sum() + 0.0 * prototypes.float().sum()  # where there is no box
    if not many:
        return total
    index = cast(Tensor, matched.box_index)[: rows * queries].view(rows, queries)
    # the query of each box: those without a box write into a column that is cut off
    query = index.new_full((rows, many + 1), -1)
    query = query.scatter(1, torch.where(index < 0, many, index), torch.arange(queries, device=index.device).expand_as(index))[:, :many]
    chosen = coefficients.gather(1, query.clamp(min=0)[..., None].expand(-1, -1, coefficients.shape[2]))
    target = masks.flatten(0, 1).float() / 255
    for own, found in zip(chosen.float().split(images), (query >= 0).split(images), strict=True):  # layer by layer
        logits = torch.einsum("nkp,nphw->nkhw", own, prototypes.float()).flatten(0, 1)
        with plain_torch() if plain else nullcontext():
            at = sample_uncertain_points(logits, points, generator=generator)
            for values in point_mask_loss(logits, target, at, "none"):
                total = total + torch.where(found.flatten(), values, 0.0).sum()
    return total


def inside(boxes: Tensor, masks: Tensor) -> Tensor:
    """Return whether the centre of each cell of masks (..., H, W) is in each box: (..., H, W) bool of boxes (..., 4) xyxy in cells."""
    x1, y1, x2, y2 = boxes[..., None, None].unbind(-3)
    y, x = (torch.arange(side, device=boxes.device) + 0.5 for side in masks.shape[-2:])
    y = y[:, None]
    return (x >= x1) & (x < x2) & (y >= y1) & (y < y2)
