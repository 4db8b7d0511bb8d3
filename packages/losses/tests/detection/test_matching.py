"""The costs of matching as DETR, Deformable DETR and Mask2Former have them; ragged targets."""

import pytest
import torch
import torchvision.ops
from loss_calls import Operators
from torch import Tensor

from lossforge.kernels import launch_counts
from lossforge.losses import backend, mask_matching_cost, matching_cost, plain_torch
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
    """The costs of Deformable DETR's matcher, an image at a time; of DETR's where alpha is None."""
    found, start = [], 0
    for b, n in enumerate(counts):
        own, wanted = labels[start : start + n], targets[start : start + n]
        if alpha is None:
            positive, negative = -logits[b].softmax(1)[:, own], 0.0
        else:
            p = logits[b].sigmoid()[:, own]
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_softmax_of_detr(dtype, device):
    """Also of saturated logits; and of classes alone."""
    given = problem(device, dtype=dtype)
    given[0][0, :3] = torch.tensor([[6e4] * 7, [-6e4] * 7, [-6e4, 0, 6e4, 0, 0, 0, 0]], device=device)
    wide = [t.double() if t.is_floating_point() else t for t in given]
    weights = {"cost_class": 1.5, "cost_bbox": 4.0, "cost_giou": 3.0}
    found = matching_cost(*given, COUNTS, class_cost="softmax", **weights)
    assert error(found, theirs(*wide, COUNTS, alpha=None, **weights)) < (1e-9 if dtype == torch.float64 else 3e-6)
    assert torch.equal(found, matching_cost(*given, torch.tensor(COUNTS, device=device), class_cost="softmax", **weights))
    alone = theirs(*wide, COUNTS, alpha=None, cost_class=1.5, cost_bbox=0.0, cost_giou=0.0)
    found = matching_cost(given[0], None, given[2], None, COUNTS, class_cost="softmax", cost_class=1.5)
    assert error(found, alone) < (1e-9 if dtype == torch.float64 else 3e-6)
    given[0][1, 4, 0] = NAN
    bad = matching_cost(given[0], None, torch.zeros_like(given[2]), None, [3, 40, 1, 0], class_cost="softmax").isnan()
    assert bad.nonzero().tolist() == [[4, t] for t in range(3, 43)]


@pytest.mark.parametrize("mask_cost", ["bce", "focal"])
@pytest.mark.parametrize("size", [(37,), (5, 8)])
def test_masks_as_transformers(mask_cost, size, device):
    """Of Mask2Former and MaskFormer, an image at a time; one without masks."""
    of_mask2former = pytest.importorskip("transformers.models.mask2former.modeling_mask2former")
    of_maskformer = pytest.importorskip("transformers.models.maskformer.modeling_maskformer")
    pairs = of_mask2former.pair_wise_sigmoid_cross_entropy_loss if mask_cost == "bce" else of_maskformer.pair_wise_sigmoid_focal_loss
    counts = [3, 0, 4]
    make = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 6, *size, generator=make, dtype=torch.float64) * 4).to(device)
    masks = (torch.rand(7, *size, generator=make, dtype=torch.float64) > 0.6).to(device)
    expected = []
    for x, y in zip(logits.flatten(2), masks.flatten(1).double().split(counts), strict=True):
        expected.append(1.5 * pairs(x, y) + 0.7 * of_mask2former.pair_wise_dice_loss(x, y))
    options = {"mask_cost": mask_cost, "cost_mask": 1.5, "cost_dice": 0.7}
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        found = mask_matching_cost(logits.to(dtype).requires_grad_(), masks, counts, **options)
        assert error(found, torch.cat(expected, 1)) < limit
        assert found.dtype == dtype
        assert not found.requires_grad
    half = mask_matching_cost(logits.half(), masks.to(torch.uint8), torch.tensor(counts, device=device), **options)
    assert error(half, mask_matching_cost(logits.half().double(), masks, counts, **options)) < 1e-6
    soft = torch.rand(7, *size, generator=make).to(device)
    alpha = {"alpha": 0.4, "gamma": 1.0} if mask_cost == "focal" else {}
    x, y = logits[0].flatten(1), soft.flatten(1)[:3].double()
    found = mask_matching_cost(logits, soft, counts, cost_dice=0.0, mask_cost=mask_cost, **alpha)
    torch.testing.assert_close(found[:, :3], pairs(x, y, **alpha), rtol=1e-9, atol=1e-12)


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


def test_no_targets(device):
    logits, boxes, labels, targets = problem(device, counts=[0, 0], dtype=torch.float32)
    cost = matching_cost(logits, boxes, labels, targets, [0, 0])
    assert cost.shape == (21, 0)


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
        ({"target_boxes": targets[0]}, ValueError, r"target_boxes must have shape \(T, 4\), got \(4,\)"),
        ({"counts": [3, 1]}, ValueError, r"counts must hold 4 numbers of at least 0 with the sum 44, got \[3, 1\]"),
        ({"counts": [45, -1, 0, 0]}, ValueError, r"counts must hold 4 numbers of at least 0 with the sum 44, got"),
        ({"counts": torch.tensor([44], device=device)}, ValueError, r"counts must have shape \(4,\), got \(1,\)"),
        ({"boxes": None}, TypeError, "boxes and target_boxes go together, got only target_boxes"),
        ({"target_boxes": None}, TypeError, "boxes and target_boxes go together, got only boxes"),
    ):
        with pytest.raises(kind, match=message):
            matching_cost(**{**good, **changed})
    if device == "cpu":
        with pytest.raises(IndexError, match=r"labels must hold 0 to 6, got 7 at row 0"):
            matching_cost(logits, boxes, torch.full_like(labels, 7), targets, COUNTS)


def test_mistakes_of_masks(device):
    good = {"mask_logits": torch.randn(2, 5, 4, 6, device=device), "target_masks": torch.rand(3, 4, 6, device=device), "counts": [1, 2]}
    for changed, kind, message in (
        (
            {"mask_logits": good["mask_logits"][0, 0]},
            ValueError,
            r"mask_logits must have shape \(B, Q, P\) or \(B, Q, H, W\), got \(4, 6\)",
        ),
        ({"target_masks": good["target_masks"].flatten(1)}, ValueError, r"target_masks must have shape \(T, 4, 6\), got \(3, 24\)"),
        ({"counts": [1, 1]}, ValueError, r"counts must hold 2 numbers of at least 0 with the sum 3, got \[1, 1\]"),
    ):
        with pytest.raises(kind, match=message):
            mask_matching_cost(**{**good, **changed})


def test_autocast_rounds_no_cost_of_masks(device):
    given = torch.randn(2, 5, 200, device=device), torch.rand(4, 200, device=device), [3, 1]
    exact = mask_matching_cost(*given)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert torch.equal(mask_matching_cost(*given), exact)


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
