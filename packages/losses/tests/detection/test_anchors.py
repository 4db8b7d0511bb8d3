"""Assignment by IoU against torchvision's Matcher; ATSS, SimOTA and RTMDet against their rules, anchor by anchor in float64."""

import math

import pytest
import torch
import torchvision.ops
from torch import Tensor
from torchvision.models.detection._utils import Matcher

from lossforge.losses import atss_assign, max_iou_assign, rtmdet_assign, simota_assign
from lossforge.losses.testing import error

FEW_AT_ONCE = pytest.mark.parametrize("at_once", [1 << 22, 300], ids=["all boxes at once", "few boxes at once"])
LEVELS = [64, 16]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def points() -> tuple[Tensor, Tensor]:
    """The centres of the cells of an image of 64 pixels, at strides of 8 and 16, and the strides."""
    found = []
    for stride in (8.0, 16.0):
        at = torch.arange(stride / 2, 64, stride)
        y, x = torch.meshgrid(at, at, indexing="ij")
        found.append(torch.stack([x, y], -1).view(-1, 2))
    return torch.cat(found), torch.cat([torch.full((n,), s) for n, s in zip(LEVELS, (8.0, 16.0), strict=True)])


def boxes(seed: int, several: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, boxes and mask of two images, of which every fifth box is padding."""
    make = torch.Generator().manual_seed(seed)
    low, sides = (torch.rand(2, several, 2, generator=make) for _ in range(2))
    labels = torch.randint(0, 5, (2, several), generator=make)
    return labels, torch.cat([low * 36, low * 36 + sides * 24 + 4], -1), torch.arange(several).expand(2, -1) % 5 != 4


def anchors_of(seed: int) -> Tensor:
    middle, stride = points()
    half = stride[:, None] * (1 + 0.3 * torch.rand(len(middle), 2, generator=torch.Generator().manual_seed(seed)))
    return torch.cat([middle - half, middle + half], 1)


def predictions(seed: int) -> tuple[Tensor, Tensor]:
    """Logits, and boxes near the anchors."""
    make, (middle, stride) = torch.Generator().manual_seed(seed), points()
    far = stride[:, None] * (0.3 + torch.rand(2, 80, 4, generator=make))
    return torch.randn(2, 80, 5, generator=make), torch.cat([middle - far[..., :2], middle + far[..., 2:]], -1)


def checked(found, index: list[Tensor], quality: list[Tensor], labels: Tensor, targets: Tensor) -> None:
    for b, wanted in enumerate(index):
        wanted = wanted.to(labels.device)
        assert torch.equal(found.box_index[b], wanted)
        assert torch.equal(found.foreground[b], wanted >= 0)
        background = torch.where(wanted == -2, -100, -1)
        assert torch.equal(found.labels[b], torch.where(wanted >= 0, labels[b][wanted.clamp(min=0)], background))
        assert torch.equal(found.boxes[b], torch.where(wanted[:, None] >= 0, targets[b][wanted.clamp(min=0)], 0.0))
        assert error(found.quality[b].cpu(), torch.where(index[b] >= 0, quality[b], 0.0)) < 1e-6
    assert found.scores is None


def on(device: str, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in tensors]


@FEW_AT_ONCE
@BOTH
@pytest.mark.parametrize("low_quality", [True, False])
def test_max_iou_is_torchvisions_matcher(low_quality, dtype, at_once, device, monkeypatch):
    monkeypatch.setattr("lossforge.losses.detection.anchors.AT_ONCE", at_once)
    labels, targets, mask = boxes(0)
    anchors = anchors_of(1)
    anchors[10], anchors[11] = targets[0, 0] + 1, targets[0, 0] + 1  # the best of a box, twice
    index, quality = [], []
    for b in range(2):
        real = mask[b].nonzero().flatten()
        u = torchvision.ops.box_iou(targets[b][real].double(), anchors.double())
        matched = Matcher(0.5, 0.3, allow_low_quality_matches=low_quality)(u)
        index.append(torch.where(matched >= 0, real[matched.clamp(min=0)], matched))
        quality.append(u.amax(0))
    assert {-1, -2} < set(torch.cat(index).tolist())
    given = on(device, dtype, anchors, labels, targets, mask)
    options = {"positive": 0.5, "negative": 0.3, "low_quality": low_quality}
    checked(max_iou_assign(*given, **options), index, quality, *given[1:3])
    each = max_iou_assign(given[0].expand(2, -1, -1), given[1].unsqueeze(2), given[2], given[3].unsqueeze(2).int(), **options)
    checked(each, index, quality, *given[1:3])


@BOTH
def test_max_iou_as_mmdetection(dtype, device):
    """The best anchors of a box go to it, the last box of several, where they overlap it by `least` or more."""
    labels, targets, mask = boxes(2)
    anchors, least = anchors_of(3), 0.25
    index, quality = [], []
    for b in range(2):
        u = torchvision.ops.box_iou(targets[b].double(), anchors.double())
        most, best = torch.where(mask[b][:, None], u, -1.0).max(0)
        found = torch.where(most < 0.5, torch.where(most < 0.3, -1, -2), best)
        for g in range(len(targets[b])):
            if mask[b, g] and u[g].max() >= least:
                found[u[g] == u[g].max()] = g
        index.append(found)
        quality.append(u.gather(0, found.clamp(min=0)[None])[0])
    given = on(device, dtype, anchors, labels, targets, mask)
    found = max_iou_assign(*given, positive=0.5, negative=0.3, least=least, style="mmdetection")
    checked(found, index, quality, *given[1:3])
    far = given[2].clone()
    far[0, 0] += 1000  # overlaps nothing
    assert (max_iou_assign(given[0], given[1], far, given[3]).box_index[0] != 0).all()


@FEW_AT_ONCE
@BOTH
def test_atss(dtype, at_once, device, monkeypatch):
    monkeypatch.setattr("lossforge.losses.detection.anchors.AT_ONCE", at_once)
    labels, targets, mask = boxes(4)
    anchors = anchors_of(5)
    middle = (anchors[:, :2] + anchors[:, 2:]).double() / 2
    index, quality = [], []
    for b in range(2):
        found, most = torch.full((80,), -1), torch.zeros(80, dtype=torch.float64)
        for g in mask[b].nonzero().flatten().tolist():
            box = targets[b, g].double()
            u = torchvision.ops.box_iou(box[None], anchors.double())[0]
            distance = (middle - (box[:2] + box[2:]) / 2).norm(dim=1)
            near = [*distance[:64].argsort()[:9].tolist(), *(64 + distance[64:].argsort()[:9]).tolist()]
            threshold = u[near].mean() + u[near].std()
            for a in near:
                sides = torch.cat([middle[a] - box[:2], box[2:] - middle[a]])
                if u[a] >= threshold and sides.min() > 0.01 and u[a] > most[a]:
                    found[a], most[a] = g, u[a]
        index.append(found)
        quality.append(most)
    assert (torch.cat(index) >= 0).sum() > 15
    given = on(device, dtype, anchors, labels, targets, mask)
    checked(atss_assign(given[0], LEVELS, *given[1:]), index, quality, *given[1:3])


def simota_cost(scores: Tensor, u: Tensor, label: int, inside: Tensor, near: Tensor, distance: Tensor) -> Tensor:
    target = torch.zeros_like(scores)
    target[:, label] = 1
    entropy = torch.nn.functional.binary_cross_entropy(scores, target, reduction="none").sum(1)
    return entropy - 3 * (u + 1e-8).log() + 1e5 * ~(inside & near)


def rtmdet_cost(scores: Tensor, u: Tensor, label: int, inside: Tensor, near: Tensor, distance: Tensor) -> Tensor:
    target = torch.zeros_like(scores)
    target[:, label] = u
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(scores, target, reduction="none")
    entropy = (entropy * (target - scores.sigmoid()).square()).sum(1)
    return entropy - 3 * (u + 1e-7).log() + 10 ** (distance - 3)


@FEW_AT_ONCE
@BOTH
@pytest.mark.parametrize(("assign", "topk"), [(simota_assign, 10), (rtmdet_assign, 13)], ids=["simota", "rtmdet"])
def test_dynamic_assignment(assign, topk, dtype, at_once, device, monkeypatch):
    """SimOTA as YOLOX, and RTMDet's assigner as mmdetection has it."""
    monkeypatch.setattr("lossforge.losses.detection.anchors.AT_ONCE", at_once)
    labels, targets, mask = boxes(6)
    (middle, stride), (logits, predicted) = points(), predictions(7)
    scores = logits.sigmoid() if assign is simota_assign else logits
    index, quality, contested = [], [], 0
    for b in range(2):
        real = mask[b].nonzero().flatten().tolist()
        costs, wanted, allowed = {}, {}, torch.zeros(80, dtype=torch.bool)
        places = {}
        for g in real:
            box = targets[b, g].double()
            sides = torch.cat([middle - box[:2], box[2:] - middle], 1)
            offset = (middle - (box[:2] + box[2:]) / 2).double()
            places[g] = sides.amin(1) > 0, offset.abs().amax(1) < 2.5 * stride, offset.norm(dim=1) / stride
            allowed |= (places[g][0] | places[g][1]) if assign is simota_assign else places[g][0]
        u = torchvision.ops.box_iou(targets[b].double(), predicted[b].double()) * allowed
        for g in real:
            cost = (simota_cost if assign is simota_assign else rtmdet_cost)(scores[b].double(), u[g], labels[b, g], *places[g])
            costs[g] = torch.where(allowed, cost, math.inf)
            k = max(1, int(u[g].topk(topk).values.sum()))
            wanted[g] = costs[g].argsort()[:k].tolist()
        found = torch.full((80,), -1)
        for a in range(80):
            takers = [g for g in real if a in wanted[g]]
            contested += len(takers) > 1
            if takers:
                found[a] = takers[0] if len(takers) == 1 else min(real, key=lambda g: costs[g][a].item())
        index.append(found)
        quality.append(u.gather(0, found.clamp(min=0)[None])[0])
    assert contested >= 1
    given = on(device, dtype, scores, predicted, middle, stride, labels, targets, mask)
    checked(assign(*given), index, quality, given[4], given[5])


@pytest.mark.parametrize("assign", [simota_assign, rtmdet_assign])
def test_a_prediction_that_is_nan_takes_no_part(assign, device):
    """The other anchors are assigned as without it."""
    labels, targets, mask = boxes(6)
    (middle, stride), (logits, predicted) = points(), predictions(7)
    given = on(device, torch.float32, logits.sigmoid(), predicted, middle, stride, labels, targets, mask)
    lost = assign(*given).foreground[0].nonzero()[0].item()
    outside = given[2].clone()
    outside[lost] = -1000
    expected = assign(*given[:2], outside, *given[3:])
    assert expected.foreground.sum() > 5
    for of_boxes in (True, False):
        broken = [t.clone() for t in given[:2]]
        broken[of_boxes][:, lost] = math.nan
        found = assign(*broken, *given[2:])
        assert torch.equal(found.box_index, expected.box_index)
        torch.testing.assert_close(found.quality, expected.quality)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_box_that_is_not_finite_counts_as_padding(value, device):
    labels, targets, mask = boxes(6)
    given = on(device, torch.float32, anchors_of(0), *points(), *predictions(7), labels, targets, mask)
    broken, without = given[6].clone(), given[7].clone()
    broken[0, 1], without[0, 1] = value, False
    for found, expected in zip(every(*given[:6], broken, given[7]), every(*given[:6], given[6], without), strict=True):
        assert torch.equal(found.box_index, expected.box_index)
        assert torch.equal(found.boxes, expected.boxes)
        assert found.foreground[0].any()


ON_EDGES = [[4.0, 8.0], [8.0, 4.0], [12.0, 8.0], [8.0, 12.0], [8.0, 8.0]]
"""On the four sides of the box from 4 to 12, and at its centre."""


def test_an_anchor_on_a_side_of_a_box_is_outside(device):
    targets, labels = torch.tensor([[[4.0, 4, 12, 12]]], device=device), torch.tensor([[1]], device=device)
    anchors, strides = torch.tensor(ON_EDGES, device=device), torch.full((5,), 8.0, device=device)
    given = torch.full((1, 5, 3), 0.5, device=device), targets.expand(1, 5, 4), anchors, strides, labels, targets
    assert rtmdet_assign(*given).box_index.tolist() == [[-1, -1, -1, -1, 0]]
    assert simota_assign(*given, radius=0.0).box_index.tolist() == [[-1, -1, -1, -1, 0]]
    far = torch.tensor([[8.0, 24.0], [8.0, 23.9]], device=device)  # two strides from the centre, and less
    given = given[0][:, :2], targets.expand(1, 2, 4), far, strides[:2], labels, targets
    assert simota_assign(*given, radius=2.0).box_index.tolist() == [[-1, 0]]


def test_the_center_of_an_anchor_lies_further_than_the_margin_inside(device):
    """ATSS, of one anchor a level, which is its own threshold."""
    targets, labels = torch.tensor([[[4.0, 4, 12, 12]]], device=device), torch.tensor([[1]], device=device)
    for x, y in ON_EDGES:
        for margin, distance in ((0.0, 0.0), (1.0, 1.0)):
            step = [distance if v == 4 else -distance if v == 12 else 0.0 for v in (x, y)]
            center = torch.tensor([x + step[0], y + step[1]], device=device)
            anchor = torch.cat([center - 4, center + 4])[None]
            found = atss_assign(anchor, [1], labels, targets, margin=margin).foreground.item()
            assert found == ((x, y) == (8.0, 8.0)), (x, y, margin)
            assert atss_assign(anchor, [1], labels, targets, margin=max(margin - 0.5, 0.0)).foreground.item() == (found or margin > 0)


def test_iou_of_anchors_in_float16(device):
    """Their areas are beyond float16."""
    anchors = torch.tensor([[0, 0, 400, 400], [500, 500, 1000, 1000.0]], device=device)
    targets, labels = torch.tensor([[[0, 0, 400, 300.0]]], device=device), torch.tensor([[1]], device=device)
    for style in ("torchvision", "mmdetection"):
        assert max_iou_assign(anchors.half(), labels, targets.half(), style=style).quality.tolist() == [[0.75, 0.0]]


def test_rtmdet_takes_an_anchor_at_any_cost(device):
    """The only anchor of a wide box is 20 strides, or 60, from its centre: 10^17, and more than float32 holds."""
    for strides in (20, 60):
        targets = torch.tensor([[[0, 0, 1000, 10.0]]], device=device)
        anchors = torch.tensor([[500.0 - 8 * strides, 5], [2000, 5]], device=device)
        given = torch.zeros(1, 2, 3, device=device), targets.expand(1, 2, 4), anchors, torch.full((2,), 8.0, device=device)
        assert rtmdet_assign(*given, torch.tensor([[1]], device=device), targets).box_index.tolist() == [[0, -1]]


def test_no_boxes_and_no_anchors(device):
    labels, targets = torch.zeros(2, 0, dtype=torch.int64, device=device), torch.zeros(2, 0, 4, device=device)
    (middle, stride), (logits, predicted) = (on(device, torch.float32, *ts) for ts in (points(), predictions(0)))
    anchors = anchors_of(0).to(device)
    for found in (
        max_iou_assign(anchors, labels, targets),
        atss_assign(anchors, LEVELS, labels, targets),
        simota_assign(logits.sigmoid(), predicted, middle, stride, labels, targets),
        rtmdet_assign(logits, predicted, middle, stride, labels, targets),
    ):
        assert (found.labels == -1).all()
        assert found.box_index.shape == (2, 80)
        assert not found.boxes.any()
    some = torch.zeros(2, 3, dtype=torch.int64, device=device), torch.rand(2, 3, 4, device=device)
    assert atss_assign(anchors[:0], [], *some).labels.shape == (2, 0)
    assert max_iou_assign(anchors[:0], *some).labels.shape == (2, 0)
    assert rtmdet_assign(logits[:, :0], predicted[:, :0], middle[:0], stride[:0], *some).labels.shape == (2, 0)


def every(anchors, middle, stride, logits, predicted, labels, targets, mask):
    levels = [len(anchors) * 4 // 5, len(anchors) - len(anchors) * 4 // 5]
    return (
        max_iou_assign(anchors, labels, targets, mask),
        atss_assign(anchors, levels, labels, targets, mask),
        simota_assign(logits.sigmoid(), predicted, middle, stride, labels, targets, mask),
        rtmdet_assign(logits, predicted, middle, stride, labels, targets, mask),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_and_no_wait_for_the_device(device):
    """16 images with 300 boxes and 8,400 anchors, a matrix of 161 MB that a cost takes 15 times: at most 1 GB, and no synchronisation."""
    low = torch.rand(16, 300, 2, device=device) * 500
    targets, labels = torch.cat([low, low + 10 + 130 * torch.rand_like(low)], 2), torch.randint(0, 80, (16, 300), device=device)
    middle, stride = torch.rand(8400, 2, device=device) * 640, torch.full((8400,), 8.0, device=device)
    anchors = torch.cat([middle - 30, middle + 30], 1)
    given = anchors, middle, stride, torch.randn(16, 8400, 80, device=device), anchors + 20 * torch.randn(16, 8400, 4, device=device)
    every(*given, labels, targets, None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = every(*given, labels, targets, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1e9
    assert all(each.foreground.sum() > 1000 for each in found)


BOXES = dict(zip(("labels", "target_boxes", "mask"), boxes(0), strict=True))
OF_IOU = (max_iou_assign, {"anchors": anchors_of(0), **BOXES})
OF_LEVELS = (atss_assign, {"anchors": anchors_of(0), "levels": LEVELS, **BOXES})
OF_COSTS = dict(zip(("scores", "boxes", "anchors", "strides"), (*predictions(0), *points()), strict=True)) | BOXES


@pytest.mark.parametrize(
    ("kind", "message", "call", "wrong"),
    [
        (ValueError, r"anchors must have shape \(A, 4\) or \(2, A, 4\), got \(3, 80, 4\)", OF_IOU, {"anchors": torch.rand(3, 80, 4)}),
        (ValueError, "negative must be at most positive, 0.5, got 0.6", OF_IOU, {"negative": 0.6}),
        (ValueError, r"labels must have shape \(2, 7\) or \(2, 7, 1\), got \(2, 6\)", OF_IOU, {"labels": torch.zeros(2, 6).long()}),
        (ValueError, r"target_boxes must have shape \(B, G, 4\), got \(7, 4\)", OF_IOU, {"target_boxes": torch.rand(7, 4)}),
        (IndexError, r"labels must be at least 0, got -1 at row \(0, 0\)", OF_IOU, {"labels": torch.full((2, 7), -1)}),
        (ValueError, r"anchors must have shape \(A, 4\) or \(2, A, 4\), got \(4,\)", OF_IOU, {"anchors": torch.rand(4)}),
        (TypeError, "levels must be a sequence of numbers, got int", OF_LEVELS, {"levels": 2}),
        (TypeError, "levels must be a sequence of numbers, got NoneType", OF_LEVELS, {"levels": None}),
        (ValueError, r"levels must be at least 1 and sum to the number of anchors, 80, got \[64, 15\]", OF_LEVELS, {"levels": [64, 15]}),
        (ValueError, "topk must be at least 1, got 0", OF_LEVELS, {"topk": 0}),
        (ValueError, "topk must be at least 1, got 0", (rtmdet_assign, OF_COSTS), {"topk": 0}),
        (ValueError, r"strides must have shape \(80,\), got \(79,\)", (simota_assign, OF_COSTS), {"strides": torch.rand(79)}),
        (IndexError, "labels", (simota_assign, OF_COSTS), {"labels": torch.full((2, 7), 5)}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)
def test_mistakes(kind, message, call, wrong):
    function, given = call
    with pytest.raises(kind, match=message):
        function(**{**given, **wrong})
