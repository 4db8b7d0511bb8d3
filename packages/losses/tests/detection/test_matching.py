"""The cost of matching as Deformable DETR has it, and the Hungarian method over a batch; ragged targets, edges, operators."""

import itertools

import pytest
import scipy.optimize
import torch
import torchvision.ops
from loss_calls import Operators
from torch import Tensor

from lossforge.kernels import launch_counts
from lossforge.losses import backend, hungarian_match, matching_cost, plain_torch
from lossforge.losses.testing import error

NAN, INF = float("nan"), float("inf")
COUNTS = [3, 0, 40, 1]


def problem(device: str, queries: int = 21, classes: int = 7, counts=COUNTS, dtype=torch.float64) -> tuple[Tensor, ...]:
    """Logits, boxes, labels and boxes of the targets; boxes (cx, cy, w, h) as fractions of the image."""
    images, total = len(counts), sum(counts)
    logits = torch.randn(images, queries, classes, device=device, dtype=torch.float64) * 3
    boxes, targets = (0.2 + 0.6 * torch.rand(*n, 4, device=device, dtype=torch.float64) for n in ((images, queries), (total,)))
    return logits.to(dtype), boxes.to(dtype), torch.randint(0, classes, (total,), device=device), targets.to(dtype)


def theirs(logits, boxes, labels, targets, counts, cost_class=2.0, cost_bbox=5.0, cost_giou=2.0, alpha=0.25, gamma=2.0, format="cxcywh"):
    """Deformable DETR's matcher, an image at a time."""
    found, start = [], 0
    for b, n in enumerate(counts):
        p = logits[b].sigmoid()[:, labels[start : start + n]]
        wanted = targets[start : start + n]
        positive = alpha * (1 - p) ** gamma * -(p + 1e-12).log()
        negative = (1 - alpha) * p**gamma * -(1 - p + 1e-12).log()
        corners = [torchvision.ops.box_convert(t, format, "xyxy") for t in (boxes[b], wanted)]
        distance = torch.cdist(boxes[b], wanted, p=1)
        overlap = torchvision.ops.generalized_box_iou(*corners)
        found.append(cost_class * (positive - negative) + cost_bbox * distance - cost_giou * overlap)
        start += n
    return torch.cat(found, 1)


@pytest.mark.parametrize("options", [{}, {"cost_class": 1.0, "cost_bbox": 0.0, "cost_giou": 3.0, "alpha": 0.6, "gamma": 0.5}])
@pytest.mark.parametrize("queries", [21, 1, 64])
def test_as_deformable_detr(queries, options, device):
    given = problem(device, queries)
    exact = theirs(*given, COUNTS, **options)
    assert error(matching_cost(*given, COUNTS, **options), exact) < 1e-9
    narrow = [t.float() if t.is_floating_point() else t for t in given]
    before = sum(launch_counts().values())
    found = matching_cost(*narrow, COUNTS, **options)
    assert backend(narrow[0]) == "torch" or sum(launch_counts().values()) == before + 1
    assert found.dtype == torch.float32
    assert error(found, exact) < 3e-6
    assert torch.equal(found, matching_cost(*narrow, torch.tensor(COUNTS, device=device), **options))


def test_corners_as_format(device):
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    boxes, targets = (torchvision.ops.box_convert(b, "cxcywh", "xyxy") for b in (boxes, targets))
    exact = theirs(logits.double(), boxes.double(), labels, targets.double(), COUNTS, format="xyxy")
    assert error(matching_cost(logits, boxes, labels, targets, COUNTS, format="xyxy"), exact) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts(dtype, device):
    """Classes first in memory, transposed boxes, every other label, targets of float32 beside half predictions."""
    logits, boxes, labels, targets = problem(device, dtype=dtype)
    exact = theirs(logits.double(), boxes.double(), labels, targets.float().double(), COUNTS)
    strided = (
        logits.mT.contiguous().mT,
        boxes.mT.contiguous().mT,
        labels.int().repeat_interleave(2)[::2],
        targets.float().t().contiguous().t(),
    )
    assert error(matching_cost(*strided, COUNTS), exact) < 3e-6


def test_saturated_logits_and_many_images(device):
    counts = [1] * 33
    logits, boxes, labels, targets = problem(device, 3, 2, counts, torch.float32)
    logits[:] = torch.tensor([-6e4, 6e4], device=device)
    found = matching_cost(logits, boxes, labels, targets, counts, cost_bbox=0.0, cost_giou=0.0)
    exact = torch.where(labels == 0, 2 * 0.25 * 6e4, -2 * 0.75 * 6e4).expand(3, -1)
    torch.testing.assert_close(found, exact.float())
    logits[4, 1, 0], logits[5, 1, 1] = NAN, INF
    found = matching_cost(logits, boxes, torch.zeros_like(labels), targets, counts)
    assert found[1, 4].isnan()
    assert found.isnan().sum() == 1
    assert len(hungarian_match(found, counts)) == 33


@pytest.mark.parametrize("queries", [21, 2])
def test_hungarian_method_finds_the_least_cost(queries, device):
    """Of each image what scipy finds of its costs alone; of the small ones no other matching costs less."""
    given = problem(device, queries, dtype=torch.float32)
    cost = matching_cost(*given, COUNTS)
    matches = hungarian_match(cost, COUNTS)
    assert len(matches) == 4
    for part, (chosen, targets), n in zip(cost.cpu().split(COUNTS, 1), matches, COUNTS, strict=True):
        assert chosen.dtype == targets.dtype == torch.int64
        assert len(chosen) == len(targets) == min(queries, n)
        rows, columns = scipy.optimize.linear_sum_assignment(part)
        assert chosen.tolist() == rows.tolist()
        assert targets.tolist() == columns.tolist()
        if queries >= n and n <= 3:
            least = min(sum(part[q, t] for t, q in enumerate(each)) for each in itertools.permutations(range(queries), n))
            torch.testing.assert_close(part[chosen, targets].sum(), torch.as_tensor(least, dtype=torch.float32))
    assert all(
        torch.equal(a, b)
        for pair in zip(matches, hungarian_match(cost, torch.tensor(COUNTS)), strict=True)
        for a, b in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e13, 1e30])
def test_one_box_without_costs_spoils_no_other_match(scale):
    """Its queries' costs once took the place of digits of the others'."""
    for seed in range(40):
        cost = scale * torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        kept = cost[:, [0, 2, 3]]
        cost[:, 1] = (NAN, INF, -INF)[seed % 3]
        ((queries, boxes),) = hungarian_match(cost, [4])
        best = kept[scipy.optimize.linear_sum_assignment(kept.numpy())].sum()
        assert cost[queries, boxes][boxes != 1].sum() == pytest.approx(best.item(), rel=1e-12)
    square = torch.tensor([[1.0, NAN], [NAN, 1.0]]) * scale
    ((queries, boxes),) = hungarian_match(square, [2])
    assert boxes.tolist() == [0, 1]


def test_costs_that_are_nan_are_the_last_choice(device):
    cost = torch.tensor([[NAN, 1.0, 2.0], [3.0, INF, NAN], [5.0, 4.0, 9.0], [NAN, NAN, NAN]], device=device)
    [(queries, targets)] = hungarian_match(cost, [3])
    assert list(zip(queries.tolist(), targets.tolist(), strict=True)) == [(0, 2), (1, 0), (2, 1)]
    [(queries, _)] = hungarian_match(torch.full((4, 2), NAN, device=device), [2])
    assert len(queries) == 2


def test_no_targets(device):
    logits, boxes, labels, targets = problem(device, counts=[0, 0], dtype=torch.float32)
    cost = matching_cost(logits, boxes, labels, targets, [0, 0])
    assert cost.shape == (21, 0)
    assert [len(q) for q, _ in hungarian_match(cost, [0, 0])] == [0, 0]


def test_operator(device):
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    given = logits.requires_grad_(), boxes.requires_grad_(), labels, targets
    with Operators() as operators:
        found = matching_cost(*given, COUNTS)
    assert not found.requires_grad
    if backend(logits) != "torch":
        assert operators.names == ["matching_cost"]
        (_, arguments), *_ = operators.seen
        torch.library.opcheck(torch.ops.lossforge.matching_cost.default, arguments)
        wrong = labels.clone()
        wrong[2], wrong[5] = 7, -1  # as on CUDA, where nothing checks them
        nan = torch.ops.lossforge.matching_cost(*given[:2], wrong, targets, *arguments[4:]).isnan()
        assert nan.all(0).nonzero().flatten().tolist() == [2, 5]
        assert nan.sum() == 2 * 21
        few = torch.ops.lossforge.matching_cost(*given, torch.tensor([3, 0, 10, 1], device=device), *arguments[5:])
        assert few.isnan().all(0).sum() == 30
    with plain_torch():
        torch.testing.assert_close(matching_cost(*given, COUNTS), found, rtol=1e-5, atol=1e-6)
    compiled = torch.compile(matching_cost, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*given, torch.tensor(COUNTS, device=device)), found)


def test_mistakes(device):
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    good = {"logits": logits, "boxes": boxes, "labels": labels, "target_boxes": targets, "counts": COUNTS}
    for changed, kind, message in (
        ({"logits": logits[0]}, ValueError, r"logits must have shape \(B, Q, C\), got \(21, 7\)"),
        ({"boxes": boxes[:, :5]}, ValueError, r"boxes must have shape \(4, 21, 4\), got \(4, 5, 4\)"),
        ({"labels": labels[:5]}, ValueError, r"labels must have shape \(44,\), got \(5,\)"),
        ({"labels": labels.float()}, TypeError, "labels must be of an integer dtype, got torch.float32: did you mean labels.long"),
        ({"target_boxes": targets[0]}, ValueError, r"target_boxes must have shape \(T, 4\), got \(4,\)"),
        ({"counts": [3, 1]}, ValueError, r"counts must hold 4 numbers of at least 0 with the sum 44, got \[3, 1\]"),
        ({"counts": [45, -1, 0, 0]}, ValueError, r"counts must hold 4 numbers of at least 0 with the sum 44, got"),
        ({"counts": torch.tensor([44], device=device)}, ValueError, r"counts must have shape \(4,\), got \(1,\)"),
        ({"alpha": 2}, ValueError, "alpha must be finite and at least 0 and at most 1, got 2"),
        ({"gamma": -1}, ValueError, "gamma must be finite and at least 0, got -1"),
        ({"format": "xywh"}, ValueError, "format must be one of 'xyxy', 'cxcywh', got 'xywh'"),
        ({"cost_box": 1}, TypeError, "unexpected keyword argument 'cost_box'; did you mean 'cost_bbox'"),
    ):
        with pytest.raises(kind, match=message):
            matching_cost(**{**good, **changed})
    if device == "cpu":
        with pytest.raises(IndexError, match=r"labels must hold 0 to 6, got 7 at row 0"):
            matching_cost(logits, boxes, torch.full_like(labels, 7), targets, COUNTS)
    with pytest.raises(ValueError, match=r"counts must hold numbers of at least 0 with the sum 3, got \[2\]"):
        hungarian_match(torch.zeros(4, 3), [2])
    with pytest.raises(ValueError, match=r"cost must have shape \(Q, T\), got \(4,\)"):
        hungarian_match(torch.zeros(4), [2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_costs_do_not_wait_for_the_device(device):
    given = problem(device, 300, 80, [20] * 16, torch.float32)
    exact = theirs(*[t.double() if t.is_floating_point() else t for t in given], [20] * 16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = matching_cost(*given, [20] * 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert error(found, exact) < 3e-6
