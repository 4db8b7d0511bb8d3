"""Calls that differentiate both boxes, or one of them. What holds of every kept call is in test_run.py."""

import pytest
import torch
from loss_calls import Operators
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lossforge.losses import backend, generalized_box_iou_loss, plain_torch
from lossforge.losses.testing import error


def loss(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    return generalized_box_iou_loss(boxes1, boxes2, "mean")


def random(device: str) -> Tensor:
    low, sides = torch.rand(6, 2, device=device), torch.rand(6, 2, device=device) + 0.1
    return torch.cat([low, low + sides], 1)


@pytest.fixture
def pair(device) -> tuple[Tensor, Tensor]:
    """Boxes for which calls are kept, with gradient and without."""
    boxes1, boxes2 = random(device).requires_grad_(), random(device)
    for _ in range(2):
        loss(boxes1, boxes2).backward()
        loss(boxes1.detach(), boxes2)
    boxes1.grad = None
    return boxes1, boxes2


def expected(boxes1: Tensor, boxes2: Tensor, upstream: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    wide = [b.detach().double().requires_grad_() for b in (boxes1, boxes2)]
    with plain_torch():
        value = loss(*wide)
    return value.detach(), *torch.autograd.grad(value * upstream, wide)


def test_a_call_is_kept_by_what_it_differentiates(pair, paths, device):
    """Both boxes, the second alone."""
    for first, second in ((True, True), (False, True), (True, True)):
        boxes1, boxes2 = random(device).requires_grad_(first), random(device).requires_grad_(second)
        exact = expected(boxes1, boxes2)
        loss(boxes1, boxes2).backward()
        assert error(boxes2.grad, exact[2]) < 3e-6
        if first:
            assert error(boxes1.grad, exact[1]) < 3e-6
    assert paths == ["direct", "direct", "kept"]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_operator_differentiates_both(pair, mode):
    """As the dispatcher runs it: each gradient that is asked for, and no other."""
    for wanted in ((True, True), (True, False), (False, True)):
        leaves = [b.detach().clone().requires_grad_(w) for b, w in zip(pair, wanted, strict=True)]
        with Operators() as operators:
            value = generalized_box_iou_loss(*leaves, "mean", gradient=mode)
            value.backward(torch.full_like(value, 3.0), retain_graph=True)
        assert operators.names == ["boxes", "boxes_backward"][: 1 if mode == "forward" else 2]
        for leaf, exact in zip(leaves, expected(*pair, 3.0)[1:], strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.grad is not None:
                assert error(leaf.grad, exact) < 3e-6
        value.backward()
        for leaf, exact in zip(leaves, expected(*pair, 4.0)[1:], strict=True):
            if leaf.grad is not None:
                assert error(leaf.grad, exact) < 3e-6


@pytest.mark.parametrize("wanted", [(True, True), (False, True)])
def test_opcheck(pair, wanted):
    leaves = [b.detach().clone().requires_grad_(w) for b, w in zip(pair, wanted, strict=True)]
    args = [None, "ciou", *leaves, torch.rand(6, device=leaves[0].device), None, [1e-7], 1.0, True]
    operators = torch.ops.lossforge
    for reduction, in_forward in (("mean", True), ("none", False)):
        each = [w and in_forward for w in wanted]
        result = torch.library.opcheck(operators.boxes.default, (*args, reduction, True, *each, True))
        assert set(result.values()) == {"SUCCESS"}, result
    upstream = torch.rand(6, device=leaves[0].device)
    tests = ("test_schema", "test_faketensor")  # it is not differentiable, which autograd's checks count as a failure
    result = torch.library.opcheck(operators.boxes_backward.default, (*args, "none", True, upstream, *wanted), test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}, result


def test_transforms_and_tracers(pair, paths):
    boxes1, boxes2 = (b.detach() for b in pair)
    exact, gradient, gradient2 = expected(boxes1, boxes2)
    for g, wanted in zip(torch.func.grad(loss, (0, 1))(boxes1, boxes2), (gradient, gradient2), strict=True):
        assert error(g, wanted) < 3e-6
    assert error(torch.func.vmap(loss, in_dims=(0, None))(torch.stack([boxes1, boxes1 + 1]), boxes2)[0], exact) < 3e-6
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(boxes2, boxes1)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(boxes1, dual)).tangent
    assert error(tangent, (gradient2 * boxes1).sum()) < 1e-5
    if backend(boxes1) != "torch":
        assert "lossforge.boxes" in make_fx(lambda a, b: loss(a, b))(boxes1, boxes2).code
    assert not paths


def test_many_upstreams_at_once(pair):
    boxes1, boxes2 = pair[0], pair[1].detach().requires_grad_()
    _, *gradients = expected(boxes1, boxes2)
    upstreams = torch.tensor([1.0, -2.0, 0.5], device=boxes1.device)
    found = torch.autograd.grad(loss(boxes1, boxes2), (boxes1, boxes2), upstreams, is_grads_batched=True)
    for g, exact in zip(found, gradients, strict=True):
        assert error(g, upstreams.double().view(3, 1, 1) * exact) < 3e-6


def test_compiled_gradients_of_both(pair):
    torch._dynamo.reset()
    leaves = [b.detach().clone().requires_grad_() for b in pair]
    compiled = torch.compile(lambda a, b: loss(a * 2, b * 2) * 3, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*leaves).backward()
    for leaf, exact in zip(leaves, expected(*(2 * b.detach() for b in pair), 3.0)[1:], strict=True):
        assert error(leaf.grad, 2 * exact) < 3e-6


def test_double_backward_where_one_box_is_computed_from_the_other(device):
    """Each gradient is of its own place alone: not once more through the computation that leads from one to the other."""
    found = []
    for dtype in (torch.float32, torch.float64):  # the latter by the reference, as autograd differentiates it
        x = torch.tensor([[0.0, 0.0, 2.0, 3.0], [1.0, 2.0, 5.0, 4.0]], dtype=dtype, device=device).requires_grad_()
        (g,) = torch.autograd.grad(loss(x, x * 1.25), x, create_graph=True)
        found.append((g, *torch.autograd.grad(g.square().sum(), x)))
    assert all(error(ours, theirs) < 1e-5 for ours, theirs in zip(*found, strict=True))
