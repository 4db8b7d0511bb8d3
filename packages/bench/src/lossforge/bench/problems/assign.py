"""`python -m lossforge.bench.problems.assign [FILE]`: assigning boxes to anchors and queries, beside plain torch and torchvision.

Each contender's result is compared with plain torch's before it is timed: `agrees` is the share of anchors with the same box, or for
matrices the relative error. FILE gets the rows as JSON. Without a GPU the problems are small, and times are those of the host.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import RECORDS
from lossforge.bench.problems import Found, Problem, main, relative
from lossforge.losses import (
    atss_assign,
    box_iou,
    generalized_box_iou,
    hungarian_assign,
    hungarian_match,
    mask_matching_cost,
    matching_cost,
    max_iou_assign,
    rotated_box_iou,
    rtmdet_assign,
    simota_assign,
    task_aligned_assign,
)

STRIDES = (8, 16, 32)


def corners(images: int, boxes: int, side: float, device: torch.device) -> Tensor:
    """Return random boxes (images, boxes, 4) of 10 to 140 pixels in images of `side` pixels."""
    low = torch.rand(images, boxes, 2, device=device) * (side - 140)
    return torch.cat([low, low + 10 + 130 * torch.rand(images, boxes, 2, device=device)], 2)


def pyramid(side: int, device: torch.device) -> Tensor:
    """Return the centres of YOLO's cells at strides of 8, 16 and 32: 8,400 for 640 pixels."""
    found = []
    for stride in STRIDES:
        at = torch.arange(stride / 2, side, stride, device=device)
        y, x = torch.meshgrid(at, at, indexing="ij")
        found.append(torch.stack([x, y], -1).view(-1, 2))
    return torch.cat(found)


def plain_ciou(b1: Tensor, b2: Tensor, eps: float = 1e-7) -> Tensor:
    """Return the complete IoU of boxes that broadcast."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = b1.unbind(-1), b2.unbind(-1)
    w1, h1, w2, h2 = x2 - x1, y2 - y1 + eps, u2 - u1, v2 - v1 + eps
    shared = (torch.minimum(x2, u2) - torch.maximum(x1, u1)).clamp(min=0) * (torch.minimum(y2, v2) - torch.maximum(y1, v1)).clamp(min=0)
    iou = shared / (w1 * h1 + w2 * h2 - shared + eps)
    hull = (torch.maximum(x2, u2) - torch.minimum(x1, u1)) ** 2 + (torch.maximum(y2, v2) - torch.minimum(y1, v1)) ** 2 + eps
    distance = ((u1 + u2 - x1 - x2) ** 2 + (v1 + v2 - y1 - y2) ** 2) / 4
    v = 4 / torch.pi**2 * (torch.atan(w2 / h2) - torch.atan(w1 / h1)) ** 2
    return iou - distance / hull - v * v / (v - iou + 1 + eps)


def plain_assign(
    scores: Tensor, boxes: Tensor, anchors: Tensor, labels: Tensor, targets: Tensor, mask: Tensor, topk: int = 10, topk2: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return index and scores, by matrices of boxes × anchors as ultralytics' rules read."""
    classes, several = scores.shape[2], targets.shape[1]
    low, high = anchors - targets[:, :, None, :2], targets[:, :, None, 2:] - anchors
    inside = (torch.cat([low, high], -1).amin(-1) > 1e-9) & mask.unsqueeze(2)
    s = scores.mT.gather(1, labels.unsqueeze(2).expand(-1, -1, len(anchors)))
    u = torch.where(inside, plain_ciou(targets.unsqueeze(2), boxes.unsqueeze(1)).clamp(min=0), 0.0)
    t = torch.where(inside, s**0.5 * u**6, 0.0)
    best, order = t.topk(topk, -1)
    chose = torch.zeros_like(inside).scatter(2, order, best > 0)
    winner = F.one_hot(u.argmax(1), several).mT.bool()
    chose = torch.where(chose.sum(1, keepdim=True) > 1, winner, chose)
    if topk2 is not None:
        best, order = (t * chose).topk(topk2, -1)
        chose = torch.zeros_like(inside).scatter(2, order, best > 0)
    t, u = t * chose, u * chose
    quality = (t * u.amax(2, keepdim=True) / (t.amax(2, keepdim=True) + 1e-9)).amax(1)
    foreground, index = chose.any(1), chose.to(torch.int8).argmax(1)
    one_hot = F.one_hot(labels.gather(1, index), classes) * foreground.unsqueeze(2)
    return torch.where(foreground, index, -1), one_hot * quality.unsqueeze(2)


def match_by_torchvision(boxes: Tensor, targets: Tensor) -> list[Tensor]:
    """Match each image's anchors as torchvision's RetinaNet does: by the largest IoU, and two thresholds. Other rules than ours."""
    from torchvision.models.detection._utils import Matcher
    from torchvision.ops import box_iou as theirs

    matcher = Matcher(0.5, 0.4, allow_low_quality_matches=True)
    return [matcher(theirs(wanted, own)) for own, wanted in zip(boxes, targets, strict=True)]


def of_anchors(images: int, boxes: int, side: int, choice: dict[str, Any], device: torch.device) -> Problem:
    """Return an assignment; choice: topk and topk2, where they are not the defaults."""
    anchors, targets = pyramid(side, device), corners(images, boxes, side, device)
    half = 5 + 70 * torch.rand(images, len(anchors), 4, device=device)
    predicted = torch.cat([anchors - half[..., :2], anchors + half[..., 2:]], -1)
    scores, labels = torch.rand(images, len(anchors), 80, device=device), torch.randint(0, 80, (images, boxes), device=device)
    given = scores, predicted, anchors, labels, targets, torch.ones(images, boxes, dtype=torch.bool, device=device)
    compiled = torch.compile(plain_assign)
    contenders: dict[str, Found] = {
        "torch": lambda: plain_assign(*given, **choice)[0],
        "lossforge": lambda: task_aligned_assign(*given, **choice).box_index,
        "lossforge, dense=False": lambda: task_aligned_assign(*given, **choice, dense=False).box_index,
        "torch.compile": lambda: compiled(*given, **choice)[0],
        "torchvision's Matcher": lambda: match_by_torchvision(predicted, targets),
    }
    chosen = "".join(f" {name}={number}" for name, number in choice.items())
    return Problem(f"task_aligned_assign {images}x{boxes}x{len(anchors)}{chosen}", contenders, equal)


def equal(a: Tensor, b: Tensor) -> float:
    """Return the share of equal entries."""
    return (a == b).double().mean().item()


def of_prior_boxes(images: int, boxes: int, side: int, device: torch.device) -> Iterator[Problem]:
    """Yield the assignments that read no predictions: by the largest IoU, and by a threshold of each box."""
    from torchvision.models.detection._utils import Matcher
    from torchvision.ops import box_iou as theirs

    points = pyramid(side, device)
    levels = [(side // stride) ** 2 for stride in STRIDES]
    half = 2.0 * torch.cat([torch.full((n, 1), float(s), device=device) for n, s in zip(levels, STRIDES, strict=True)])
    anchors, targets = torch.cat([points - half, points + half], 1), corners(images, boxes, side, device)
    labels, matcher = torch.zeros(images, boxes, dtype=torch.long, device=device), Matcher(0.5, 0.4, allow_low_quality_matches=True)
    yield Problem(
        f"max_iou_assign {images}x{boxes}x{len(anchors)}",
        {
            "torchvision": lambda: torch.stack([matcher(theirs(wanted, anchors)) for wanted in targets]),
            "lossforge": lambda: max_iou_assign(anchors, labels, targets).box_index,
        },
        equal,
    )
    yield Problem(
        f"atss_assign {images}x{boxes}x{len(anchors)}",
        {
            "torch": lambda: torch.stack([plain_atss(anchors, levels, wanted) for wanted in targets]),
            "lossforge": lambda: atss_assign(anchors, levels, labels, targets).box_index,
        },
        equal,
    )


def plain_atss(anchors: Tensor, levels: list[int], targets: Tensor) -> Tensor:
    """Return the index of each anchor of one image, by matrices of boxes × anchors, as mmdetection's ATSSAssigner."""
    from torchvision.ops import box_iou as theirs

    u, middle, wanted = theirs(targets, anchors), anchors.view(-1, 2, 2).mean(1), targets.view(-1, 2, 2).mean(1)
    squares, first, near = (wanted[:, None] - middle).square().sum(2), 0, []
    for size in levels:
        near.append(first + squares[:, first : first + size].topk(min(9, size), largest=False).indices)
        first += size
    candidates = torch.cat(near, 1)
    of_candidates = u.gather(1, candidates)
    threshold = of_candidates.mean(1) + of_candidates.std(1)
    sides = torch.cat([middle - targets[:, None, :2], targets[:, None, 2:] - middle], 2)
    chosen = torch.zeros_like(u, dtype=torch.bool).scatter(1, candidates, True) & (u >= threshold[:, None]) & (sides.amin(2) > 0.01)
    best, index = torch.where(chosen, u, -1.0).max(0)
    return torch.where(best >= 0, index, -1)


def of_predictions(images: int, boxes: int, side: int, soft: bool, device: torch.device) -> Problem:
    """Return an assignment by costs of predictions; soft: RTMDet's, of logits, else SimOTA's, of probabilities."""
    points = pyramid(side, device)
    strides = torch.cat([torch.full(((side // s) ** 2,), float(s), device=device) for s in STRIDES])
    targets, labels = corners(images, boxes, side, device), torch.randint(0, 80, (images, boxes), device=device)
    reach = strides[:, None] * (0.5 + 4 * torch.rand(images, len(points), 4, device=device))
    predicted = torch.cat([points - reach[..., :2], points + reach[..., 2:]], -1)
    scores = torch.randn(images, len(points), 80, device=device)
    scores = scores if soft else scores.sigmoid()
    ours, cost = (rtmdet_assign, rtmdet_cost) if soft else (simota_assign, simota_cost)

    def an_image_at_a_time() -> Tensor:
        given = zip(scores, predicted, labels, targets, strict=True)
        return torch.stack([plain_dynamic(*cost(s, b, points, strides, label, t)) for s, b, label, t in given])

    calls: dict[str, Found] = {
        "torch": an_image_at_a_time,
        "lossforge": lambda: ours(scores, predicted, points, strides, labels, targets).box_index,
    }
    return Problem(f"{ours.__name__} {images}x{boxes}x{len(points)}", calls, equal)


Costs = tuple[Tensor, Tensor, int]
"""Costs and IoU (boxes, anchors) of one image, infinite and 0 where an anchor takes no part, and the most anchors of a box."""


def simota_cost(scores: Tensor, boxes: Tensor, points: Tensor, strides: Tensor, labels: Tensor, targets: Tensor) -> Costs:
    """Return YOLOX's costs, as mmdetection's SimOTAAssigner."""
    from torchvision.ops import box_iou as theirs

    inside = (torch.cat([points - targets[:, None, :2], targets[:, None, 2:] - points], 2) > 0).all(2)
    middle = targets.view(-1, 2, 2).mean(1)[:, None]
    near = ((points - middle).abs() < 2.5 * strides[:, None]).all(2)
    u = theirs(targets, boxes)
    wanted = F.one_hot(labels, scores.shape[1]).to(scores.dtype)[:, None].expand(-1, len(points), -1)
    entropy = F.binary_cross_entropy(scores.expand_as(wanted), wanted, reduction="none").sum(2)
    cost = entropy - 3 * (u + 1e-8).log() + 1e5 * ~(inside & near)
    takes_part = (inside | near).any(0)
    return cost.masked_fill(~takes_part, torch.inf), u.masked_fill(~takes_part, 0.0), 10


def rtmdet_cost(scores: Tensor, boxes: Tensor, points: Tensor, strides: Tensor, labels: Tensor, targets: Tensor) -> Costs:
    """Return RTMDet's costs, as mmdetection's DynamicSoftLabelAssigner."""
    from torchvision.ops import box_iou as theirs

    inside = (torch.cat([points - targets[:, None, :2], targets[:, None, 2:] - points], 2) > 0).all(2)
    u = theirs(targets, boxes)
    wanted = F.one_hot(labels, scores.shape[1])[:, None] * u.unsqueeze(2)
    logits = scores.expand_as(wanted)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * (wanted - logits.sigmoid()).square()
    distance = (points - targets.view(-1, 2, 2).mean(1)[:, None]).square().sum(2).sqrt() / strides
    cost = entropy.sum(2) - 3 * (u + 1e-7).log() + 10 ** (distance - 3)
    takes_part = inside.any(0)
    return cost.masked_fill(~takes_part, torch.inf), u.masked_fill(~takes_part, 0.0), 13


def plain_dynamic(cost: Tensor, u: Tensor, topk: int) -> Tensor:
    """Return the index of each anchor of one image: a box takes the cheapest anchors, as many as its largest IoU sum to."""
    take = u.topk(topk, 1).values.sum(1).int().clamp(min=1)
    chosen = torch.zeros_like(cost, dtype=torch.bool)
    for box, count in enumerate(take.tolist()):
        chosen[box, cost[box].topk(count, largest=False).indices] = True
    chosen &= cost < torch.inf
    cheapest = F.one_hot(cost.argmin(0), len(cost)).mT.bool()
    chosen = torch.where(chosen.sum(0) > 1, cheapest, chosen)
    return torch.where(chosen.any(0), chosen.to(torch.int8).argmax(0), -1)


def plain_cost(logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: list[int], softmax: bool = False) -> Tensor:
    """Return the costs of each image alone, by the formulas of Deformable DETR; softmax: by DETR's, of the same weights."""
    from torchvision.ops import box_convert
    from torchvision.ops import generalized_box_iou as theirs

    found = []
    for x, own, label, wanted in zip(logits, boxes, labels.split(counts), targets.split(counts), strict=True):
        p = x.softmax(1)[:, label] if softmax else x.sigmoid()[:, label]
        cost = -p if softmax else 0.25 * (1 - p) ** 2 * -(p + 1e-8).log() - 0.75 * p**2 * -(1 - p + 1e-8).log()
        overlap = theirs(box_convert(own, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))
        found.append(2 * cost + 5 * torch.cdist(own, wanted, p=1) - 2 * overlap)
    return torch.cat(found, 1)


def of_queries(images: int, queries: int, boxes: int, matched: bool, device: torch.device) -> Problem:
    """Return the costs of queries; matched: with the copy to the host and the Hungarian method, in plain torch an image at a time."""
    from scipy.optimize import linear_sum_assignment

    counts = [boxes + (i % 5) - 2 for i in range(images)]
    logits, total = torch.randn(images, queries, 80, device=device), sum(counts)
    own, targets = (0.2 + 0.6 * torch.rand(*n, 4, device=device) for n in ((images, queries), (total,)))
    given = logits, own, torch.randint(0, 80, (total,), device=device), targets
    if not matched:
        calls: dict[str, Found] = {"torch": lambda: plain_cost(*given, counts), "lossforge": lambda: matching_cost(*given, counts)}
        return Problem(f"matching_cost {images}x{queries}x{boxes}", calls, relative)

    def an_image_at_a_time() -> list[Any]:
        parts = plain_cost(*given, counts).split(counts, 1)
        return [torch.as_tensor(linear_sum_assignment(part.cpu())[0]) for part in parts]

    calls = {
        "torch": lambda: torch.cat(an_image_at_a_time()),
        "lossforge": lambda: torch.cat([q for q, _ in hungarian_match(matching_cost(*given, counts), counts)]),
        "lossforge, on the device": lambda: hungarian_assign(matching_cost(*given, counts), counts),
    }

    def agree(a: Tensor, b: Tensor) -> float:
        b = (b >= 0).nonzero()[:, 1].cpu() if b.ndim == 2 else b
        return (a == b).float().mean().item()

    return Problem(f"hungarian_match {images}x{queries}x{boxes}", calls, agree)


def of_softmax(images: int, queries: int, boxes: int, device: torch.device) -> Problem:
    """Return DETR's costs."""
    counts = [boxes] * images
    own, targets = (0.2 + 0.6 * torch.rand(*n, 4, device=device) for n in ((images, queries), (images * boxes,)))
    given = torch.randn(images, queries, 92, device=device), own, torch.randint(0, 91, (images * boxes,), device=device), targets
    calls: dict[str, Found] = {
        "torch": lambda: plain_cost(*given, counts, softmax=True),
        "lossforge": lambda: matching_cost(*given, counts, class_cost="softmax"),
    }
    return Problem(f"matching_cost softmax {images}x{queries}x{boxes}", calls, relative)


def plain_mask_cost(logits: Tensor, masks: Tensor, counts: list[int]) -> Tensor:
    """Return the costs of each image alone, by the formulas of Mask2Former."""
    found = []
    for x, y in zip(logits, masks.split(counts), strict=True):
        entropy = (F.softplus(-x) / x.shape[1]) @ y.T + (F.softplus(x) / x.shape[1]) @ (1 - y).T
        p = x.sigmoid()
        found.append(entropy + 1 - (2 * (p @ y.T) + 1) / (p.sum(1)[:, None] + y.sum(1) + 1))
    return torch.cat(found, 1)


def of_masks(images: int, queries: int, masks: int, points: int, device: torch.device) -> Problem:
    logits, counts = 3 * torch.randn(images, queries, points, device=device), [masks] * images
    targets = (torch.rand(images * masks, points, device=device) > 0.7).float()
    calls: dict[str, Found] = {
        "torch": lambda: plain_mask_cost(logits, targets, counts),
        "lossforge": lambda: mask_matching_cost(logits, targets, counts),
    }
    return Problem(f"mask_matching_cost {images}x{queries}x{masks}x{points}", calls, relative)


def of_pairs(n: int, m: int, ours: Callable[..., Tensor], device: torch.device) -> Problem:
    import torchvision.ops

    boxes1, boxes2 = corners(1, n, 640, device)[0], corners(1, m, 640, device)[0]
    theirs = getattr(torchvision.ops, ours.__name__)
    compiled = torch.compile(theirs)
    calls: dict[str, Found] = {
        "torch": lambda: theirs(boxes1, boxes2),
        "lossforge": lambda: ours(boxes1, boxes2),
        "torch.compile": lambda: compiled(boxes1, boxes2),
    }
    return Problem(f"{ours.__name__} {n}x{m}", calls, relative)


def of_rotated_pairs(n: int, m: int, device: torch.device) -> Problem:
    """Return the matrix of exact IoUs of rotated boxes."""

    def boxes(several: int) -> Tensor:
        return torch.rand(several, 5, device=device) * torch.tensor([200.0, 200.0, 60.0, 60.0, 3.1], device=device) + 5

    boxes1, boxes2, one_by_one = boxes(n), boxes(m), RECORDS["rotated_iou"].plain

    def plain(a: Tensor, b: Tensor) -> Tensor:
        pairs = a.repeat_interleave(len(b), 0), b.repeat(len(a), 1)
        return 1 - one_by_one(*pairs, reduction="none").view(len(a), len(b))

    calls: dict[str, Found] = {"torch": lambda: plain(boxes1, boxes2), "lossforge": lambda: rotated_box_iou(boxes1, boxes2)}
    return Problem(f"rotated_box_iou {n}x{m}", calls, relative)


def problems(device: torch.device) -> Iterator[Callable[[], Problem]]:
    """Yield what makes each problem."""
    small = device.type != "cuda"
    side, images, layers = (64, 2, 2) if small else (640, 16, 6)
    for boxes in (4, 6) if small else (20, 300):
        yield partial(of_anchors, images, boxes, side, {}, device)
    yield partial(of_anchors, images, boxes, side, {"topk": 7, "topk2": 1}, device)
    for each in of_prior_boxes(images, 4 if small else 20, side, device):
        yield partial(lambda problem: problem, each)
    for soft in (False, True):
        yield partial(of_predictions, images, 4 if small else 20, side, soft, device)
    yield partial(of_rotated_pairs, *((12, 5) if small else (2000, 300)), device)
    for stacked in (images, images * layers):
        for matched in (False, True):
            yield partial(of_queries, stacked, *((30, 4) if small else (900, 20)), matched, device)
    yield partial(of_softmax, images, *((30, 4) if small else (100, 20)), device)
    yield partial(of_masks, images, *((30, 4, 60) if small else (100, 20, 12544)), device)
    for ours in (box_iou, generalized_box_iou):
        yield partial(of_pairs, *((50, 7) if small else (8400, 300)), ours, device)
        yield partial(of_pairs, *((60, 50) if small else (8400, 8400)), ours, device)


if __name__ == "__main__":
    main(sys.argv[1:], problems)
