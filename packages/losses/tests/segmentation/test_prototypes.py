"""Masks of coefficients and prototypes: equal to ultralytics' loss, gradients, maps of labels, pairs that do not exist, operators."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from loss_calls import Operators
from torch import Tensor

from lossforge.losses import backend, plain_torch, prototype_mask_loss
from lossforge.losses.testing import error

COUNTS = [3, 0, 17]


def theirs(coefficients: Tensor, prototypes: Tensor, target: Tensor, boxes: Tensor) -> Tensor:
    """ultralytics' single_mask_loss of each mask: all pixels, cropped afterwards; target (N, H, W)."""
    height, width = prototypes.shape[2:]
    maps = prototypes.repeat_interleave(torch.tensor(COUNTS, device=prototypes.device), 0)
    x = torch.einsum("nk,nkhw->nhw", coefficients, maps)
    loss = F.binary_cross_entropy_with_logits(x, target.to(x.dtype), reduction="none")
    x1, y1, x2, y2 = boxes.to(x.dtype)[..., None, None].unbind(1)
    r, c = torch.arange(width, device=x.device), torch.arange(height, device=x.device)[:, None]
    cropped = loss * ((r >= x1) * (r < x2) * (c >= y1) * (c < y2))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (height * width)
    return cropped.mean((1, 2)) / area


def problem(device: str, count: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = sum(COUNTS)
    coefficients = torch.randn(n, count, dtype=torch.float64, device=device)
    prototypes = torch.randn(3, count, 19, 37, dtype=torch.float64, device=device)
    low = torch.rand(n, 2, device=device) * torch.tensor([30.0, 14.0], device=device) - 1
    boxes = torch.cat([low, low + 0.5 + 9 * torch.rand(n, 2, device=device)], 1)
    boxes[1] = torch.tensor([0.0, 0.0, 37.0, 19.0])
    return coefficients, prototypes, torch.rand(n, 19, 37, device=device) > 0.5, boxes


def gradients(function, coefficients, prototypes, *args, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (coefficients, prototypes)]
    values = function(*leaves, *args, **options)
    (values * torch.linspace(-1, 2, len(values), device=values.device, dtype=values.dtype)).sum().backward()
    return [values.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("count", [5, 32])
def test_as_ultralytics(count, device):
    coefficients, prototypes, target, boxes = problem(device, count)
    wanted = gradients(theirs, coefficients, prototypes, target, boxes)
    for dtype, bound in ((torch.float64, 1e-6), (torch.float32, 3e-6)):
        given = [coefficients.to(dtype), prototypes.to(dtype)]
        found = gradients(prototype_mask_loss, *given, target, boxes, COUNTS, "none")
        again = gradients(prototype_mask_loss, *given, target, boxes, COUNTS, "none")
        for got, same, right in zip(found, again, wanted, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, same)
            assert error(got, right) < bound


def test_their_own_function(device):
    loss = pytest.importorskip("ultralytics.utils.loss")
    coefficients, prototypes, target, boxes = problem(device)
    first = slice(0, 3)
    boxes = boxes.round().clamp(min=0)  # their crop rounds the boxes of few masks on the CPU
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (19 * 37)
    parts = target[first].double(), coefficients[first], prototypes[0], boxes[first], area[first]
    wanted = loss.v8SegmentationLoss.single_mask_loss(*parts)
    each = prototype_mask_loss(coefficients, prototypes, target, boxes, COUNTS, "none")
    assert error(each[first].sum(), wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_layouts_and_maps_of_labels(dtype, device):
    coefficients, prototypes, _, boxes = problem(device)
    coefficients, prototypes = coefficients.to(dtype), prototypes.to(dtype)
    maps = torch.randint(0, 4, (3, 19, 37), device=device)
    label = torch.arange(sum(COUNTS), device=device) % 4
    image = torch.tensor([0] * 3 + [2] * 17, device=device)
    wanted = gradients(theirs, coefficients.double(), prototypes.double(), maps[image] == label[:, None, None], boxes)
    for given in (prototypes, prototypes.to(memory_format=torch.channels_last), prototypes.repeat_interleave(2, 3)[..., ::2]):
        for options in ({}, {"target_index": image.int()}):
            counts = torch.tensor(COUNTS, device=device)
            of = maps.byte().mT.contiguous().mT
            found = gradients(prototype_mask_loss, coefficients, given, of, boxes, counts, "none", label=label, **options)
            assert error(found[0], wanted[0]) < 1e-5
            assert found[1].dtype == found[2].dtype == dtype
            assert error(found[1], wanted[1]) < 2.0**-7
            assert error(found[2], wanted[2]) < 2.0**-7


def test_reductions_and_boxes_without_area(device):
    coefficients, prototypes, target, boxes = problem(device)
    boxes[0, 2:] = boxes[0, :2]
    given = coefficients.float(), prototypes.float(), target, boxes, COUNTS
    each = prototype_mask_loss(*given, "none")
    assert each[0] == 0
    torch.testing.assert_close(prototype_mask_loss(*given), each.mean())
    torch.testing.assert_close(prototype_mask_loss(*given, normalizer=7), each.sum() / 7)
    assert prototype_mask_loss(given[0][:0], given[1], target[:0], boxes[:0], [0, 0, 0], "sum") == 0


def test_losses_of_masks_may_be_changed_in_place(device):
    coefficients, prototypes, target, boxes = problem(device)
    given = coefficients.float(), prototypes.float(), target, boxes, COUNTS
    wanted = gradients(prototype_mask_loss, *given, reduction="none")[1]
    found = gradients(lambda *args: prototype_mask_loss(*args, reduction="none").mul_(3.0), *given)[1]
    torch.testing.assert_close(found, 3 * wanted)


def test_what_does_not_exist_is_nan(device):
    coefficients, prototypes, target, boxes = problem(device)
    boxes = torch.tensor([3.0, 2.0, 9.0, 8.0], device=device).expand(20, 4)
    index = torch.arange(sum(COUNTS), device=device)
    index[2], index[4] = 99, -2
    counts = torch.tensor([3, 0, 15], device=device)
    for dtype in (torch.float64, torch.float32):
        values, g, _ = gradients(
            prototype_mask_loss, coefficients.to(dtype), prototypes.to(dtype), target, boxes, counts, "none", target_index=index
        )
        assert values.isnan().nonzero().flatten().tolist() == [2, 4, 18, 19]
        assert g[3].isfinite().all()


def test_anchors_without_a_target_add_nothing(device):
    """All anchors with a target_index give what the chosen ones give alone, bit for bit, whatever the others hold."""
    coefficients, prototypes, target, boxes = problem(device)
    n, chosen = len(boxes), torch.arange(0, 20, 3, device=device)
    index = torch.full((n,), -1, device=device).index_copy(0, chosen, chosen)
    counts = [1, 0, 6]  # of the chosen: anchor 0, and 3 to 18
    for dtype in (torch.float32, torch.float64):
        given = coefficients.to(dtype), prototypes.to(dtype)
        alone = gradients(prototype_mask_loss, given[0][chosen], given[1], target[chosen], boxes[chosen], counts, "none")
        noisy = given[0].masked_fill(index[:, None] < 0, torch.nan)
        values, of_anchors, of_prototypes = all_anchors(noisy, given[1], target, boxes, index, chosen)
        assert torch.equal(values[chosen], alone[0])
        assert torch.equal(of_anchors[chosen], alone[1])
        assert torch.equal(of_prototypes, alone[2]) if dtype == torch.float32 else error(of_prototypes, alone[2]) < 1e-12
        assert not values[index < 0].any()
        assert not of_anchors[index < 0].any()
        mean = prototype_mask_loss(noisy, given[1], target, boxes, COUNTS, target_index=index)
        torch.testing.assert_close(mean, alone[0].mean())
        nothing = prototype_mask_loss(noisy, given[1], target[:0], boxes, COUNTS, "sum", target_index=index.clamp(max=-1))
        assert nothing == 0  # in a batch without objects
        leaves = [t.clone().requires_grad_() for t in (noisy, given[1])]
        nothing = prototype_mask_loss(*leaves, target[:0], boxes, COUNTS, target_index=index.clamp(max=-1))
        assert nothing.isnan()  # a mean of nothing, as where all targets are ignored
        assert not any(g.any() for g in torch.autograd.grad(nothing, leaves))


def all_anchors(coefficients, prototypes, target, boxes, index, chosen):
    """Return values and gradients of all anchors, where those that are chosen have the upstream gradients of `gradients`."""
    leaves = [t.detach().clone().requires_grad_() for t in (coefficients, prototypes)]
    values = prototype_mask_loss(*leaves, target, boxes, COUNTS, "none", target_index=index)
    up = torch.linspace(-1, 2, len(chosen), device=values.device, dtype=values.dtype)
    (values[chosen] * up).sum().backward()
    return [values.detach(), *(leaf.grad for leaf in leaves)]


def test_counts_beyond_the_masks_and_boxes_of_nan(device):
    coefficients, prototypes, target, boxes = problem(device)
    boxes[3, 2] = torch.nan
    for dtype in (torch.float64, torch.float32):
        given = coefficients.to(dtype), prototypes.to(dtype), target, boxes
        wanted = gradients(prototype_mask_loss, *given, COUNTS, "none")
        assert wanted[0].isnan().nonzero().flatten().tolist() == [3]
        assert not wanted[1][3].any()  # such a box holds no pixel
        assert wanted[2].isfinite().all()
        found = gradients(prototype_mask_loss, *given, torch.tensor([3, 0, 400], device=device), "none")
        for got, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)


def test_a_box_without_area_has_gradient_0_whatever_its_coefficients_are(device):
    coefficients, prototypes, target, boxes = problem(device)
    boxes[4, 2:] = boxes[4, :2] - torch.tensor([2.0, -3.0], device=device)
    for dtype in (torch.float64, torch.float32):
        wanted = gradients(prototype_mask_loss, coefficients.to(dtype), prototypes.to(dtype), target, boxes, COUNTS, "none")
        assert wanted[0][4] == 0
        noisy = coefficients.to(dtype).index_fill(0, torch.tensor(4, device=device), torch.nan)
        found = gradients(prototype_mask_loss, noisy, prototypes.to(dtype), target, boxes, COUNTS, "none")
        assert all(torch.equal(got, right) for got, right in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_wait_for_the_number_of_masks():
    coefficients, prototypes, target, boxes = problem("cuda")
    leaves = [coefficients.float().requires_grad_(), prototypes.float().requires_grad_()]
    index, counts = torch.arange(20, device="cuda") - 1, torch.tensor(COUNTS, device="cuda")
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prototype_mask_loss(*leaves, target, boxes, counts, target_index=index).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_gradients_twice_and_operator(device):
    coefficients, prototypes, target, boxes = problem(device)
    leaves = [coefficients.float().requires_grad_(), prototypes.float().requires_grad_()]
    with Operators() as operators:
        value = prototype_mask_loss(*leaves, target, boxes, COUNTS)
    if backend(leaves[0]) != "torch":
        assert operators.names == ["prototype_mask"]
        torch.library.opcheck(torch.ops.lossforge.prototype_mask.default, operators.seen[0][1])
    wide = [coefficients.requires_grad_(), prototypes.requires_grad_()]
    exact = theirs(*wide, target, boxes).mean()
    for of, total, bound in ((leaves, value, 1e-4), (wide, exact, 0.0)):
        first = torch.autograd.grad(total, of, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), of)
        if bound:
            found = second
    for got, right in zip(found, second, strict=True):
        assert error(got, right) < 1e-4
    index = torch.arange(20, device=device).masked_fill(torch.arange(20, device=device) % 3 > 0, -1)
    compact = prototype_mask_loss(*leaves, target, boxes, COUNTS, target_index=index)
    (alone,) = torch.autograd.grad(prototype_mask_loss(leaves[0].detach(), leaves[1], target, boxes, COUNTS), leaves[1])
    assert error(alone, torch.autograd.grad(theirs(*wide, target, boxes).mean(), wide[1])[0]) < 1e-5
    torch._dynamo.reset()  # which counts the compiled functions of all tests before
    compiled = torch.compile(prototype_mask_loss, fullgraph=True, backend="aot_eager")
    counts = torch.tensor(COUNTS, device=device)
    torch.testing.assert_close(compiled(*leaves, target, boxes, counts), value)
    for plain in (nullcontext, plain_torch):
        with plain():
            torch.testing.assert_close(compiled(*leaves, target, boxes, counts, target_index=index), compact)
    slope = torch.func.grad(lambda c: prototype_mask_loss(c, leaves[1], target, boxes, COUNTS, target_index=index))(leaves[0])
    assert error(slope, torch.autograd.grad(compact, leaves[0])[0]) < 1e-5
    with torch.autocast(torch.device(device).type, torch.bfloat16), plain_torch():
        torch.testing.assert_close(prototype_mask_loss(*leaves, target, boxes, COUNTS), value)


def test_mistakes(device):
    coefficients, prototypes, target, boxes = problem(device)
    right = (coefficients, prototypes, target, boxes, COUNTS)
    for place, wrong, kind, message in (
        (0, coefficients[:, :3], ValueError, r"coefficients must have shape \(N, 5\), one a prototype, got \(20, 3\)"),
        (1, prototypes[0], ValueError, r"prototypes must have shape \(B, K, H, W\)"),
        (2, target[:, :3], ValueError, r"target must have shape \(T, 19, 37\)"),
        (2, target[:3], ValueError, "target must hold one mask each, or one map an image"),
        (3, boxes[:3], ValueError, r"boxes must have shape \(20, 4\)"),
        (4, [1, 2, 3], ValueError, "counts must hold 3 numbers of at least 0 with the sum 20"),
    ):
        with pytest.raises(kind, match=message):
            prototype_mask_loss(*right[:place], wrong, *right[place + 1 :])
    with pytest.raises(ValueError, match='normalizer needs a scalar result: reduction "mean" or "sum", got "none"'):
        prototype_mask_loss(*right, "none", normalizer=3)
    with pytest.raises(TypeError, match=r"target must hold real numbers, got torch\.complex64"):
        prototype_mask_loss(*right[:2], target.cfloat(), *right[3:])
    with pytest.raises(TypeError, match="target must hold integers where label is given"):
        prototype_mask_loss(*right[:2], target.float()[:3], *right[3:], label=torch.zeros(20, dtype=torch.int64, device=device))
