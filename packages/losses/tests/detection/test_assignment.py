"""Task-aligned assignment against ultralytics' and mmdetection's rules, anchor by anchor; ties, edges, layouts, operators."""

import pytest
import torch
import torchvision.ops
from loss_calls import Operators
from torch import Tensor

from lossforge.kernels import launch_counts
from lossforge.losses import backend, plain_torch, task_aligned_assign
from lossforge.losses.testing import error

IOUS = {"iou": torchvision.ops.box_iou, "giou": torchvision.ops.generalized_box_iou, "ciou": torchvision.ops.complete_box_iou}
STYLES = pytest.mark.parametrize("style", ["yolo", "tood"])
NAN = float("nan")


def points(device: str) -> Tensor:
    """The centres of the cells of an image of 64 pixels, at strides of 8 and 16: 80 anchors."""
    found = []
    for stride in (8, 16):
        at = torch.arange(stride / 2, 64, stride, device=device)
        y, x = torch.meshgrid(at, at, indexing="ij")
        found.append(torch.stack([x, y], -1).view(-1, 2))
    return torch.cat(found)


def problem(device: str, seed: int = 0, boxes: int = 6, classes: int = 5) -> tuple[Tensor, ...]:
    """Two images of which every fifth box is padding: scores, predicted boxes, anchors, labels, boxes, mask, in float32."""
    make = torch.Generator().manual_seed(seed)
    anchors = points("cpu")
    low, sides = (torch.rand(2, boxes, 2, generator=make) for _ in range(2))
    targets = torch.cat([low * 40, low * 40 + sides * 28 + 4], -1)
    far = torch.rand(2, len(anchors), 4, generator=make) * 16 + 2
    predicted = torch.cat([anchors - far[..., :2], anchors + far[..., 2:]], -1)
    labels = torch.randint(0, classes, (2, boxes), generator=make)
    mask = torch.arange(boxes).expand(2, -1) % 5 != 4
    scores = torch.rand(2, len(anchors), classes, generator=make)
    return tuple(t.to(device) for t in (scores, predicted, anchors, labels, targets, mask))


def one_image(
    scores, predicted, anchors, labels, targets, mask, topk, alpha, beta, style, iou, margin=1e-9, eps=1e-9, min_side=0.0, topk2=None
):
    """Index and quality of each anchor, in float64: ultralytics' rules as "yolo", mmdetection's as "tood"."""
    real = [g for g in range(len(targets)) if mask[g]]
    u = IOUS[iou](targets.double(), predicted.double()).clamp(min=0).tolist()
    s = scores.double().tolist()
    classes, at, corners = labels.flatten().tolist(), anchors.tolist(), targets.tolist()
    t = [[s[a][classes[g]] ** alpha * u[g][a] ** beta for a in range(len(at))] for g in range(len(corners))]

    def inside(g, a):
        half = [max(corners[g][i + 2] - corners[g][i], min_side) / 2 for i in (0, 1)]
        return min(half[i] - abs(at[a][i] - (corners[g][i] + corners[g][i + 2]) / 2) for i in (0, 1)) > margin

    chosen_by = [[] for _ in anchors]
    for g in real:
        candidates = [a for a in range(len(anchors)) if style == "tood" or inside(g, a)]
        for a in sorted(candidates, key=lambda a: (-t[g][a], a))[:topk]:
            if t[g][a] > 0 and inside(g, a):
                chosen_by[a].append(g)
    index = []
    for a, owners in enumerate(chosen_by):
        if style == "yolo" and len(owners) > 1:
            owners = [g for g in real if inside(g, a)]
        index.append(max(owners, key=lambda g: (u[g][a], -g)) if owners else -1)
    quality = torch.zeros(len(anchors), dtype=torch.float64)
    for g in real:
        mine = sorted((a for a in range(len(anchors)) if index[a] == g), key=lambda a: (-t[g][a], a))
        for a in mine[topk2:] if topk2 else ():
            index[a] = -1
        mine = mine[:topk2]
        for a in mine:
            quality[a] = t[g][a] * max(u[g][b] for b in mine) / (max(t[g][b] for b in mine) + eps)
    return torch.tensor(index), quality


def check(given: tuple[Tensor, ...], found, **options) -> int:
    """Assert that an assignment of a problem is that of `one_image`; return how many anchors have a box."""
    scores, predicted, anchors, labels, targets, mask = given
    options = {"topk": 10, "alpha": 0.5, "beta": 6.0, "style": "yolo", "iou": "ciou"} | options
    for b in range(len(scores)):
        index, quality = one_image(scores[b], predicted[b], anchors, labels[b], targets[b], mask[b], **options)
        index, has = index.to(scores.device), index.to(scores.device) >= 0
        assert torch.equal(found.box_index[b], index)
        assert torch.equal(found.foreground[b], has)
        assert torch.equal(found.labels[b], torch.where(has, labels[b].flatten()[index], -1))
        assert torch.equal(found.boxes[b], torch.where(has[:, None], targets[b][index], 0.0))
        assert error(found.quality[b].cpu(), quality) < 3e-5  # u⁶ multiplies an error of u by six
        if found.scores is not None:
            one_hot = (found.labels[b][:, None] == torch.arange(scores.shape[2], device=scores.device)) * found.quality[b][:, None]
            assert torch.equal(found.scores[b], one_hot.to(scores.dtype))
    return int(found.foreground.sum())


@STYLES
@pytest.mark.parametrize("iou", ["iou", "ciou", "giou"])
@pytest.mark.parametrize(("topk", "alpha", "beta"), [(10, 0.5, 6.0), (13, 1.0, 6.0), (1, 2.0, 1.5), (3, 0.5, 6.0)])
def test_as_ultralytics_and_mmdetection(style, iou, topk, alpha, beta, device):
    """By the kernels in three launches, and in float64 by the reference."""
    given = problem(device, seed=topk)
    options = {"topk": topk, "alpha": alpha, "beta": beta, "style": style, "iou": iou}
    before = sum(launch_counts().values())
    assigned = check(given, task_aligned_assign(*given, **options), **options)
    assert backend(given[0]) == "torch" or sum(launch_counts().values()) == before + 3
    assert assigned >= 5
    wide = tuple(t.double() if t.is_floating_point() else t for t in given)
    assert check(wide, task_aligned_assign(*wide, **options), **options) == assigned


@STYLES
@pytest.mark.parametrize(("topk", "topk2"), [(7, 1), (5, 2), (3, 13)])
def test_a_box_keeps_some_of_its_anchors(style, topk, topk2, device):
    """The best of those that it got, by a fourth launch; targets are scaled by the largest overlap of those that are kept."""
    given = problem(device, seed=topk)
    options = {"topk": topk, "topk2": topk2, "style": style}
    before = sum(launch_counts().values())
    found = task_aligned_assign(*given, **options)
    assert backend(given[0]) == "torch" or sum(launch_counts().values()) == before + 4
    assigned = check(given, found, **options)
    dropped = int(task_aligned_assign(*given, topk=topk, style=style).foreground.sum()) - assigned
    assert dropped == 0 if topk2 == 13 else dropped > 5
    assert found.box_index[0].unique(return_counts=True)[1][1:].max() <= topk2
    wide = tuple(t.double() if t.is_floating_point() else t for t in given)
    assert check(wide, task_aligned_assign(*wide, **options), **options) == assigned
    as_all = task_aligned_assign(*given, topk=topk, topk2=topk, style=style)
    assert torch.equal(as_all.box_index, task_aligned_assign(*given, topk=topk, style=style).box_index)


@pytest.mark.parametrize("min_side", [0.0, 16.0])
def test_rotated_boxes_as_ultralytics(min_side, device):
    """By ProbIoU, of anchors within the turned rectangle; in float32 by the kernels, and in float64."""
    tal = pytest.importorskip("ultralytics.utils.tal")
    make, anchors = torch.Generator().manual_seed(0), points("cpu")

    def rotated(middles: Tensor, least: float, most: float) -> Tensor:
        sides, angle = (torch.rand(*middles.shape[:2], n, generator=make) for n in (2, 1))
        return torch.cat([middles, sides * (most - least) + least, 3 * angle], -1).to(device)

    targets = rotated(torch.rand(2, 6, 2, generator=make) * 56 + 4, 4, 40)
    predicted = rotated(anchors + 3 * torch.randn(2, len(anchors), 2, generator=make), 4, 34)
    scores, _, anchors, labels, _, mask = problem(device)
    assigner = tal.RotatedTaskAlignedAssigner(topk=10, num_classes=5, alpha=0.5, beta=6.0)
    assigner.stride_val = min_side
    _, _, score, foreground, index = assigner(scores, predicted, anchors, labels.unsqueeze(2), targets, mask.unsqueeze(2).float())
    assert foreground.sum() > 30
    for dtype in (torch.float32, torch.float64):
        given = (t.to(dtype) if t.is_floating_point() else t for t in (scores, predicted, anchors, labels, targets, mask))
        found = task_aligned_assign(*given, iou="probiou", min_side=min_side)
        assert torch.equal(found.foreground, foreground)
        assert torch.equal(found.box_index, torch.where(foreground, index, -1))
        assert error(found.scores, score) < 1e-5
        boxes = targets.gather(1, index.unsqueeze(2).expand(-1, -1, 5))
        assert torch.equal(found.boxes, torch.where(foreground.unsqueeze(2), boxes, 0.0).to(dtype))
    tood = [
        task_aligned_assign(scores.to(t), predicted.to(t), anchors.to(t), labels, targets.to(t), mask, iou="probiou", style="tood", topk=9)
        for t in (torch.float32, torch.float64)
    ]
    assert torch.equal(tood[0].box_index, tood[1].box_index)
    assert 10 < tood[0].foreground.sum() < foreground.sum()
    with pytest.raises(ValueError, match=r"boxes must have shape \(2, 80, 5\), got \(2, 80, 4\)"):
        task_aligned_assign(scores, predicted[..., :4], anchors, labels, targets, mask, iou="probiou")


@STYLES
def test_anchors_of_small_boxes(style, device):
    """Sides below min_side reach as far from their centre as min_side does; overlaps are those of the boxes as they are."""
    scores, predicted, anchors, labels, targets, mask = problem(device, seed=7)
    low, sides = targets[..., :2], torch.rand(2, 6, 2, generator=torch.Generator().manual_seed(1)).to(device) * 20
    given = scores, predicted, anchors, labels, torch.cat([low, low + sides + 0.5], -1), mask
    options = {"style": style, "topk": 4}
    few = check(given, task_aligned_assign(*given, **options), **options)
    for least in (9.0, 16.0):
        found = task_aligned_assign(*given, min_side=least, **options)
        assert check(given, found, min_side=least, **options) > few
    wide = tuple(t.double() if t.is_floating_point() else t for t in given)
    check(wide, task_aligned_assign(*wide, min_side=16.0, **options), min_side=16.0, **options)


def test_the_styles_differ(device):
    """Both rules matter in the problem above: anchors outside that take a place, and boxes that win an anchor without having chosen it."""
    given = problem(device, seed=3)
    yolo, tood = (task_aligned_assign(*given, topk=3, style=style) for style in ("yolo", "tood"))
    assert not torch.equal(yolo.box_index, tood.box_index)
    assert yolo.foreground.sum() > tood.foreground.sum()


def test_more_boxes_than_a_tile_and_more_anchors(device):
    given = problem(device, seed=5, boxes=3, classes=70)
    scores, predicted, anchors, labels, targets, mask = given
    several = [t.repeat(1, 14, *[1] * (t.ndim - 2)) for t in (scores, predicted)]
    shifted = anchors.repeat(14, 1) + 0.01 * torch.arange(14, device=device).repeat_interleave(80)[:, None]  # 1120 anchors, no ties
    given = (several[0] * torch.linspace(0.5, 1, 1120, device=device)[:, None], several[1], shifted, labels, targets, mask)
    check(given, task_aligned_assign(*given))


def by_matrices(scores, predicted, anchors, labels, targets, mask, topk, iou, tood, alpha=0.5, beta=6.0, eps=1e-9, margin=1e-9):
    """Index and quality of each anchor, by matrices (B, G, A) and a stable sort of all pairs."""
    several, exists = targets.shape[1], (mask != 0).unsqueeze(2)
    s = scores.mT.gather(1, labels.unsqueeze(2).expand(-1, -1, len(anchors)))
    low, high = targets[..., None, :2], targets[..., None, 2:]
    inside = torch.minimum(anchors - low, high - anchors).amin(3) > margin
    u = torch.stack([IOUS[iou](t, p) for t, p in zip(targets, predicted, strict=True)]).clamp(min=0)
    t = torch.where((s > 0) & (u > 0) & exists, s**alpha * u**beta, 0.0)
    best, order = torch.sort(t if tood else torch.where(inside, t, 0.0), dim=2, descending=True, stable=True)
    chose = torch.zeros_like(inside).scatter(2, order[..., :topk], best[..., :topk] > 0) & inside
    claims = torch.where(chose.sum(1, keepdim=True) > 1, chose if tood else inside & exists, chose)
    index, has = torch.where(claims, u, -1.0).argmax(1), chose.any(1)
    mine = has.unsqueeze(1) & (index.unsqueeze(1) == torch.arange(several).view(1, -1, 1))
    t, u = torch.where(mine, t, 0.0), torch.where(mine, u, 0.0)
    return torch.where(has, index, -1), (t * u.amax(2, keepdim=True) / (t.amax(2, keepdim=True) + eps)).sum(1)


@STYLES
@pytest.mark.parametrize("iou", ["iou", "giou"])
@pytest.mark.parametrize("at_once", [1, 300, 1 << 18])
def test_plain_torch_chooses_as_a_stable_sort(style, iou, at_once, monkeypatch):
    """On random batches full of ties: scores of three values, predictions and boxes that repeat; however many pairs are taken at once."""
    monkeypatch.setattr("lossforge.losses.detection.assignment.AT_ONCE", at_once)
    for seed in range(6):
        scores, predicted, anchors, labels, targets, mask = (
            t.double() if t.is_floating_point() else t for t in problem("cpu", seed, boxes=12, classes=2)
        )
        scores, predicted = (scores * 3).floor() / 2, (predicted / 16).round() * 16
        targets = torch.cat([targets[:, :8].round(), targets[:, :4].round()], 1)
        for topk in (1, 3, 13):
            found = task_aligned_assign(scores, predicted, anchors, labels, targets, mask, topk=topk, iou=iou, style=style)
            index, quality = by_matrices(scores, predicted, anchors, labels, targets, mask, topk, iou, style == "tood")
            assert torch.equal(found.box_index, index)
            torch.testing.assert_close(found.quality, quality, rtol=1e-9, atol=1e-12)
            assert (index >= 0).sum() > 5


@pytest.mark.parametrize("turned", [False, True])
@STYLES
def test_an_anchor_on_a_side_of_a_box_is_outside(style, turned, device):
    anchors = torch.tensor([[4.0, 8.0], [8.0, 4.0], [12.0, 8.0], [8.0, 12.0], [8.0, 8.0]], device=device)
    box = [8.0, 8, 8, 8, 0] if turned else [4.0, 4, 12, 12]
    targets = torch.tensor([[box]], device=device)
    predicted = targets.expand(1, 5, len(box))
    given = torch.full((1, 5, 2), 0.5, device=device), predicted, anchors, torch.ones(1, 1, 1, dtype=torch.int64, device=device), targets
    for function in (task_aligned_assign, plain_torch()(task_aligned_assign)):
        found = function(*given, torch.ones(1, 1, 1, device=device), topk=5, style=style, iou="probiou" if turned else "iou")
        assert found.box_index.tolist() == [[-1, -1, -1, -1, 0]]


@STYLES
def test_ties_go_to_the_first(style, device):
    """Anchors that predict the same: the first k; boxes that are the same: the first."""
    scores, _, anchors, labels, targets, mask = problem(device)
    targets = torch.tensor([0.0, 0, 64, 64], device=device).expand(2, 6, 4)
    given = torch.full_like(scores, 0.5), targets[:, :1].expand(2, 80, 4), anchors, torch.zeros_like(labels), targets, mask
    for function_is in ("kernel", "reference"):
        if function_is == "kernel":
            found = task_aligned_assign(*given, topk=7, style=style)
        else:
            with plain_torch():
                found = task_aligned_assign(*given, topk=7, style=style)
        assert found.box_index[0].tolist() == [0] * 7 + [-1] * 73
        torch.testing.assert_close(found.quality[0, :7], torch.ones(7, device=device))


@STYLES
def test_more_than_are_inside(style, device):
    """A box that holds three anchors, one that holds none, and topk of 64 of 80."""
    given = list(problem(device))
    given[4][:, 0] = torch.tensor([0.0, 0, 24, 8], device=device)
    given[4][:, 1] = torch.tensor([1.0, 1, 3, 3], device=device)
    for topk in (4, 64):
        found = task_aligned_assign(*given, topk=topk, style=style)
        check(tuple(given), found, topk=topk, style=style)
        assert not (found.box_index == 1).any()
        assert (found.box_index == 0).sum() <= 6


@STYLES
def test_images_without_boxes(style, device):
    """By their mask, one of two; all; and no places for boxes at all: background, and no nan."""
    given = list(problem(device))
    given[5][1] = False
    found = task_aligned_assign(*given, style=style)
    check(tuple(given), found, style=style)
    for boxes in (6, 0):
        labels, targets, mask = (t[:, :boxes] for t in given[3:])
        found = task_aligned_assign(*given[:3], labels, targets, torch.zeros_like(mask), style=style)
        assert (found.labels == -1).all()
        assert (found.box_index == -1).all()
        for t in (found.foreground, found.boxes, found.scores, found.quality):
            assert not t.any()
        assert found.scores.shape == given[0].shape
    empty = task_aligned_assign(given[0][:, :0], given[1][:, :0], given[2][:0], *given[3:])
    assert empty.boxes.shape == (2, 0, 4)


@STYLES
def test_predictions_that_are_nan_or_infinite_are_not_assigned(style, device):
    given = list(problem(device))
    plain = task_aligned_assign(*given, style=style)
    bad = plain.foreground[0].nonzero()[:3, 0]
    given[0][0, bad[0]] = NAN
    given[1][0, bad[1]] = NAN
    given[1][0, bad[2], 0] = float("inf")
    found = task_aligned_assign(*given, style=style)
    assert not found.foreground[0, bad].any()
    for t in (found.boxes, found.scores, found.quality):
        assert t.isfinite().all()
    assert torch.equal(found.box_index[1], plain.box_index[1])
    with plain_torch():
        assert torch.equal(task_aligned_assign(*given, style=style).box_index, found.box_index)


@STYLES
def test_layouts_dtypes_and_logits(style, device):
    """Classes first in memory, as YOLO's head has them, labels and masks (B, G, 1), half dtypes, logits: what the plain call gives."""
    scores, predicted, anchors, labels, targets, mask = problem(device)
    plain = task_aligned_assign(scores, predicted, anchors, labels, targets, mask, style=style)
    fields = predicted.mT.contiguous().mT, anchors.t().contiguous().t(), labels[..., None].int(), targets.mT.contiguous().mT
    given = scores.mT.contiguous().mT, *fields, mask[..., None].float()
    for got, wanted in zip(task_aligned_assign(*given, style=style), plain, strict=True):
        assert torch.equal(got, wanted)
    found = task_aligned_assign(scores.logit(), *given[1:], style=style, from_logits=True, dense=False)
    assert found.scores is None
    assert torch.equal(found.box_index, plain.box_index)
    assert error(found.quality, plain.quality) < 1e-5
    for dtype in (torch.bfloat16, torch.float16):
        half = scores.to(dtype), predicted.to(dtype), anchors, labels, targets, mask
        found = task_aligned_assign(*half, style=style)
        assert found.scores.dtype == dtype
        wide = half[0].float(), half[1].float(), *half[2:]
        exact = task_aligned_assign(*wide, style=style)
        assert torch.equal(found.box_index, exact.box_index)
        assert torch.equal(found.quality, exact.quality)
    everything = task_aligned_assign(scores, predicted, anchors, labels, targets, style=style)
    full = torch.ones_like(mask)
    check((scores, predicted, anchors, labels, targets, full), everything, style=style)


def test_repeated_and_without_gradient(device):
    given = problem(device)
    leaves = given[0].requires_grad_(), given[1].requires_grad_(), *given[2:]
    first, second = (task_aligned_assign(*leaves) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad


def test_operator(device):
    given = problem(device)
    with Operators() as operators:
        found = task_aligned_assign(*given)
    if backend(given[0]) != "torch":
        assert operators.names == ["task_aligned_assign"]
        (_, arguments), *_ = operators.seen
        torch.library.opcheck(torch.ops.lossforge.task_aligned_assign.default, arguments)
        wrong = given[3].clone()
        wrong[0, 0] = 99  # as a class on CUDA that nothing checked: its box is left out, and nothing else changes
        left = torch.ops.lossforge.task_aligned_assign(*given[:3], wrong, *arguments[4:])
        mask = given[5].clone()
        mask[0, 0] = False
        assert torch.equal(left[5], task_aligned_assign(*given[:5], mask).box_index)
    compiled = torch.compile(task_aligned_assign, fullgraph=True, dynamic=True, backend="aot_eager")
    for got, wanted in zip(compiled(*given), found, strict=True):
        assert torch.equal(got, wanted)


def test_mistakes(device):
    scores, predicted, anchors, labels, targets, mask = problem(device)
    good = {"scores": scores, "boxes": predicted, "anchors": anchors, "labels": labels, "target_boxes": targets, "mask": mask}
    for changed, kind, message in (
        ({"scores": scores[0]}, ValueError, r"scores must have shape \(B, A, C\), got \(80, 5\)"),
        ({"boxes": predicted[:, :3]}, ValueError, r"boxes must have shape \(2, 80, 4\), got \(2, 3, 4\)"),
        ({"anchors": anchors[:3]}, ValueError, r"anchors must have shape \(80, 2\), got \(3, 2\)"),
        ({"labels": labels[:, :2]}, ValueError, r"labels must have shape \(2, 6\) or \(2, 6, 1\), got \(2, 2\)"),
        ({"target_boxes": targets[0]}, ValueError, r"target_boxes must have shape \(2, G, 4\), got \(6, 4\)"),
        ({"mask": mask[:1]}, ValueError, r"mask must have shape \(2, 6\) or \(2, 6, 1\), got \(1, 6\)"),
        ({"topk": 0}, ValueError, "topk must be 1 to 64, got 0"),
        ({"topk": 65}, ValueError, "topk must be 1 to 64, got 65"),
        ({"topk2": 0}, ValueError, "topk2 must be 1 to 64, got 0"),
    ):
        with pytest.raises(kind, match=message):
            task_aligned_assign(**{**good, **changed})
    if device == "cpu":
        wrong = labels.clone()
        wrong[1, 3] = 5
        with pytest.raises(IndexError, match=r"labels must hold 0 to 4, got 5 at row \(1, 3\)"):
            task_aligned_assign(**{**good, "labels": wrong})
        wrong[1, 3], wrong[1, 4] = 0, -1  # of padding
        task_aligned_assign(**{**good, "labels": wrong})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_and_no_wait_for_the_device(device):
    """16 images with 300 boxes each and 8,400 anchors: 0.2 GB beside the arguments, without a synchronisation."""
    low = torch.rand(16, 300, 2, device=device) * 500
    targets = torch.cat([low, low + 10 + 130 * torch.rand_like(low)], 2)
    anchors = torch.rand(8400, 2, device=device) * 640
    predicted = torch.cat([anchors - 30, anchors + 30], 1) + 20 * torch.randn(16, 8400, 4, device=device)
    scores, labels = torch.rand(16, 8400, 80, device=device), torch.randint(0, 80, (16, 300), device=device)
    task_aligned_assign(scores, predicted, anchors, labels, targets)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = task_aligned_assign(scores, predicted, anchors, labels, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 0.2e9
    assert found.foreground.sum() > 10_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_crowd():
    """Blocks of many pictures at once, whose threads run far apart, and alignments so small that a second scaling would be seen."""
    scores, _, anchors, labels, targets, mask = problem("cuda", seed=9, boxes=300)
    anchors = anchors.repeat(100, 1) + 0.004 * torch.arange(100, device="cuda").repeat_interleave(80)[:, None]
    draw = torch.Generator("cuda").manual_seed(9)
    near = torch.cat([anchors - 6, anchors + 6], -1) + torch.randn(16, 8000, 4, generator=draw, device="cuda") * 3
    several = [t.repeat(8, *[1] * (t.ndim - 1)) for t in (labels, targets, mask)]
    given = scores.repeat(8, 100, 1), near, anchors, *several
    with plain_torch():
        expected = task_aligned_assign(*given, topk=10)
    for _ in range(5):
        found = task_aligned_assign(*given, topk=10)
        assert torch.equal(found.box_index, expected.box_index)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
