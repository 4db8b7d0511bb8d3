"""Matrices of IoU, GIoU, DIoU and CIoU: values and gradients as torchvision has them, layouts, edges, operators."""

import pytest
import torch
import torchvision.ops
from torch import Tensor

from lossforge import losses as L
from lossforge.kernels import launch_counts
from lossforge.losses.detection.pairwise import box_terms, overlap_of_pairs, pairwise_reference
from lossforge.losses.templates.boxes import SPECIAL_PAIRS
from lossforge.losses.testing import error

FUNCTIONS = (L.box_iou, L.generalized_box_iou, L.distance_box_iou, L.complete_box_iou)
EACH = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def random(n: int, device: str, dtype: torch.dtype = torch.float64, *outer: int) -> Tensor:
    low, sides = torch.rand(*outer, n, 2, device=device) * 100, torch.rand(*outer, n, 2, device=device) * 60 + 1
    return torch.cat([low, low + sides], -1).to(dtype)


def theirs(function, boxes1: Tensor, boxes2: Tensor) -> Tensor:
    return getattr(torchvision.ops, function.__name__)(boxes1, boxes2)


def results(function, boxes1: Tensor, boxes2: Tensor, upstream: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    boxes1, boxes2 = (b.detach().clone(memory_format=torch.preserve_format).requires_grad_() for b in (boxes1, boxes2))
    value = function(boxes1, boxes2, **options)
    return value.detach(), *torch.autograd.grad(value, (boxes1, boxes2), upstream.to(value.dtype))


@EACH
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (17, 129), (33, 300)])
def test_values_and_gradients_as_torchvision_has_them(function, n, m, device):
    """In float64 by the reference, in float32 by the kernel; torchvision adds 1e-7 to some denominators, areas of at least 1."""
    boxes1, boxes2 = random(n, device), random(m, device)
    upstream = torch.randn(n, m, device=device, dtype=torch.float64)
    exact = results(lambda a, b: theirs(function, a, b), boxes1, boxes2, upstream)
    for got, wanted in zip(results(function, boxes1, boxes2, upstream), exact, strict=True):
        assert error(got, wanted) < 1e-6
    before = launch_counts().get("pairwise_kernel", 0)
    boxes1, boxes2 = boxes1.float(), boxes2.float()
    exact = results(function, boxes1.double(), boxes2.double(), upstream)
    ours = results(function, boxes1, boxes2, upstream)
    assert launch_counts()["pairwise_kernel"] == before + 1
    for got, wanted in zip(ours, exact, strict=True):
        assert got.dtype == torch.float32
        assert error(got, wanted) < 3e-6
    for got, again in zip(ours, results(function, boxes1, boxes2, upstream), strict=True):
        assert torch.equal(got, again)


def test_small_overlaps_keep_their_digits(device):
    """Of an IoU of 1e-6, which 1 minus the loss would round to 3 digits."""
    one, other = torch.tensor([[0.0, 0, 1, 1]], device=device), torch.tensor([[1 - 2.0**-20, 0, 2, 1]], device=device)
    exact = 2.0**-20 / (2 + 2.0**-20 - 2.0**-20)
    torch.testing.assert_close(L.box_iou(one, other).item(), exact, rtol=1e-6, atol=0)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts(function, dtype, device):
    """Transposed, sliced and expanded boxes, other dtypes beside each other, leading dimensions that broadcast, both formats."""
    plain1, plain2 = random(9, device, dtype), random(21, device, dtype)
    wide1, wide2 = plain1.double(), plain2.double()
    upstream = torch.randn(9, 21, device=device, dtype=torch.float64)
    exact = results(function, wide1, wide2, upstream)
    bound = 3e-6 if dtype == torch.float32 else 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    beside = torch.cat([plain1, plain1], 1)[:, :4]
    layouts = [(plain1.t().contiguous().t(), plain2), (beside, plain2.repeat_interleave(2, 0)[::2]), (plain1, plain2.float())]
    for boxes1, boxes2 in layouts:
        for got, wanted, like in zip(results(function, boxes1, boxes2, upstream), exact, (torch.empty(0), boxes1, boxes2), strict=True):
            assert got.dtype == like.dtype
            assert error(got, wanted) < (3e-6 if got.dtype == torch.float32 else bound)
    several = random(9, device, dtype, 2, 3)
    value = function(several, plain2)
    assert value.shape == (2, 3, 9, 21)
    for i in range(2):
        for j in range(3):
            assert torch.equal(value[i, j], function(several[i, j], plain2))
    centered = [torch.cat([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], 1) for b in (wide1.float(), wide2.float())]
    for got, wanted in zip(
        results(function, *centered, upstream, fmt="cxcywh"),
        results(function, centered[0].double(), centered[1].double(), upstream, fmt="cxcywh"),
        strict=True,
    ):
        assert error(got, wanted) < 3e-6
    assert error(function(*centered, fmt="cxcywh"), exact[0]) < 1e-5


@EACH
def test_special_pairs(function, device):
    """Boxes without area are finite, as the reference has them; equal ones with area have exactly 1; flipped ones are empty."""
    boxes1, boxes2 = (torch.tensor(b, device=device, dtype=torch.float32) for b in zip(*SPECIAL_PAIRS.values(), strict=True))
    upstream = torch.rand(len(boxes1), len(boxes2), device=device) + 0.5
    exact = results(function, boxes1.double(), boxes2.double(), upstream)
    for got, wanted in zip(results(function, boxes1, boxes2, upstream), exact, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    boxes = random(40, device, torch.float32)
    assert (function(boxes, boxes).diagonal() == 1).all()
    assert function(boxes * 1e6, boxes * 1e6).isfinite().all()
    flipped = torch.cat([boxes[:2, [2, 1, 0, 3]], boxes[2:3, [2, 3, 0, 1]]])
    for one, other in ((flipped, boxes), (boxes, flipped), (flipped, flipped)):
        value, *gradients = results(function, one, other, torch.ones(len(one), len(other), device=device))
        assert (value <= 0).all()
        assert function is not L.box_iou or (value == 0).all()
        exact = results(function, one.double(), other.double(), torch.ones_like(value, dtype=torch.float64))
        for got, wanted in zip((value, *gradients), exact, strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
        of_flipped, turned = (gradients[0], one) if one is flipped else (gradients[1], other)
        assert (of_flipped[:, :2] < of_flipped[:, 2:])[turned[:, 2:] < turned[:, :2]].all()  # so a step up turns it back
    low = torch.minimum(flipped[:, None, :2], boxes[:, :2]).minimum(flipped[:, None, 2:])
    high = torch.maximum(flipped[:, None, 2:], boxes[:, 2:]).maximum(flipped[:, None, :2])
    hull, area = (high - low).prod(2), (boxes[:, 2:] - boxes[:, :2]).prod(1)
    torch.testing.assert_close(L.generalized_box_iou(flipped, boxes), (area - hull) / hull, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["iou", "giou", "diou", "ciou"])
def test_listed_pairs_as_in_the_matrix(name):
    """Wherever the matrix is above 0, to the last digits; elsewhere at most 0, also for flipped, empty and equal boxes."""
    special = [torch.tensor(b, dtype=torch.float32) for b in zip(*SPECIAL_PAIRS.values(), strict=True)]
    boxes1, boxes2 = (torch.cat([random(30, "cpu", torch.float32), each, each[:, [2, 1, 0, 3]]]) for each in special)
    exact = pairwise_reference(boxes1, boxes2, name, 1e-7, False)
    first, second = torch.ones_like(exact).nonzero().unbind(1)
    found = overlap_of_pairs(box_terms(boxes1), box_terms(boxes2), first, second, name, 1e-7).view_as(exact)
    torch.testing.assert_close(found.clamp(min=0), exact.clamp(min=0), rtol=1e-6, atol=1e-7)
    assert (exact > 0.01).sum() > 50
    assert torch.equal(found > 1e-6, exact > 1e-6)


@EACH
def test_empty_sets(function, device):
    boxes = random(3, device, torch.float32)
    for boxes1, boxes2, shape in ((boxes[:0], boxes, (0, 3)), (boxes, boxes[:0], (3, 0)), (boxes[None][:0], boxes, (0, 3, 3))):
        value = function(boxes1.clone().requires_grad_(), boxes2)
        assert value.shape == shape
        value.sum().backward()


@EACH
def test_gradients_twice_and_of_one_set(function, device):
    """One set's gradient has the bits that both have; a gradient of a gradient is the reference's."""
    boxes1, boxes2 = random(5, device, torch.float32), random(6, device, torch.float32)
    upstream = torch.randn(5, 6, device=device)
    _, g1, g2 = results(function, boxes1, boxes2, upstream)
    leaf = boxes1.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(function(leaf, boxes2), leaf, upstream)[0], g1)
    leaf = boxes2.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(function(boxes1, leaf), leaf, upstream)[0], g2)
    second = []
    for dtype in (torch.float32, torch.float64):
        leaves = [b.to(dtype).requires_grad_() for b in (boxes1, boxes2)]
        gradients = torch.autograd.grad(function(*leaves), leaves, upstream.to(dtype), create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))
    for got, wanted in zip(*second, strict=True):
        assert error(got, wanted) < 1e-4


def rotated(device: str, *shape: int) -> Tensor:
    numbers = torch.rand(*shape, 5, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64)
    return (numbers * torch.tensor([40.0, 40, 30, 20, 3], dtype=torch.float64) + 1).to(device)


@pytest.mark.parametrize("function", [L.rotated_box_iou, L.probabilistic_box_iou], ids=lambda f: f.__name__)
def test_matrices_of_rotated_boxes(function, device):
    """Of broadcast sets, pair by pair; gradients are sums over the other set."""
    boxes1, boxes2, loss = (
        rotated(device, 2, 1, 7),
        rotated(device, 3, 5),
        {L.rotated_box_iou: L.rotated_iou_loss}.get(function, L.probiou_loss),
    )
    upstream = torch.rand(2, 3, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    wanted = []
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        leaves = [b.to(dtype).requires_grad_() for b in (boxes1, boxes2)]
        found = function(*leaves)
        gradients = torch.autograd.grad(found, leaves, upstream.to(found.dtype))
        pairs = torch.broadcast_tensors(leaves[0][..., :, None, :], leaves[1][..., None, :, :])
        single = 1 - loss(*(each.reshape(-1, 5) for each in pairs)).view(2, 3, 7, 5)
        wanted = wanted or [single.detach(), *torch.autograd.grad(single, leaves, upstream)]
        for got, exact in zip((found.detach(), *gradients), wanted, strict=True):
            assert error(got, exact) < bound
    assert found.shape == (2, 3, 7, 5)
    with pytest.raises(ValueError, match=r"boxes2 must have shape \(..., boxes, 5\), got \(3, 4\)"):
        function(boxes1, torch.rand(3, 4, device=device))
    with pytest.raises(ValueError, match="boxes2 must broadcast with the leading dimensions"):
        function(boxes1[:, 0], boxes2)
