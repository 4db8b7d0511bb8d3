"""Operators, graphs and derivatives of detection's and segmentation's functions: what test_operators.py has for the registry."""

import pytest
import torch
from loss_calls import Operators
from test_refused import CALLS, parameters
from torch.utils._pytree import tree_leaves

from lossforge import losses
from lossforge.losses import backend, plain_torch
from lossforge.losses.testing import error

ASSIGNMENTS = ("task_aligned_assign", "max_iou_assign", "atss_assign", "simota_assign", "rtmdet_assign", "hungarian_assign")
COSTS = ("matching_cost", "mask_matching_cost", "distance_transform", "signed_distance_map")
OVERLAPS = ("box_iou", "generalized_box_iou", "distance_box_iou", "complete_box_iou", "rotated_box_iou", "probabilistic_box_iou")
REGIONS = ("generalized_dice_loss", "mcc_loss", "boundary_loss", "hausdorff_loss", "silog_loss", "point_mask_loss", "prototype_mask_loss")
DIFFERENTIABLE = (*OVERLAPS, *REGIONS, "seesaw_loss")
OPERATORS = {
    **{name: name for name in ("task_aligned_assign", "hungarian_assign", "matching_cost")},
    **dict.fromkeys(("max_iou_assign", "simota_assign", "rtmdet_assign", *OVERLAPS[:4]), "pairwise"),
    **dict.fromkeys(("rotated_box_iou", "probabilistic_box_iou"), "rotated"),
    **dict.fromkeys(("generalized_dice_loss", "mcc_loss"), "region_sums"),
    **dict.fromkeys(("distance_transform", "signed_distance_map", "boundary_loss", "hausdorff_loss"), "distance_transform"),
    "prototype_mask_loss": "prototype_mask",
    "seesaw_loss": "seesaw",
}
"""The first operator of a call."""


def given(name, device, dtype=torch.float32):
    """Return a call's arguments, of which the first floating one requires grad where the function has a gradient."""
    tensors = [t.to(device) if isinstance(t, torch.Tensor) else t for t in CALLS[name]]
    tensors = [t.to(dtype, copy=True) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]
    if name in DIFFERENTIABLE:
        tensors[0].requires_grad_()
    return tensors


def leaves(found):
    return [t for t in tree_leaves(found) if t is not None]


def total(found):
    """Return a number that every result has a part in."""
    return sum(((i + 1.5) * t * torch.linspace(0.5, 2.0, t.numel()).view(t.shape).to(t)).sum() for i, t in enumerate(leaves(found)))


def graded(name, call, tensors):
    """Return results, gradients, and the gradients of the sum of the gradients' squares."""
    found = call(*tensors)
    if name not in DIFFERENTIABLE:
        assert not any(t.requires_grad for t in leaves(found))
        return leaves(found)
    first = torch.autograd.grad(total(found), tensors[0], create_graph=True)[0]
    return [*leaves(found), first, torch.autograd.grad(first.square().sum(), tensors[0])[0]]


EACH = pytest.mark.parametrize("name", [*ASSIGNMENTS, *COSTS, *DIFFERENTIABLE])


@EACH
def test_operators(name, device):
    """Each passes opcheck, and none runs under plain_torch, which gives the same in float64: values, and gradients twice over."""
    tensors, function = given(name, device), getattr(losses, name)
    with Operators() as operators:
        found = function(*tensors)
        if name in DIFFERENTIABLE:
            total(found).backward()
    if backend(tensors[0]) != "torch":
        assert operators.names[:1] == [OPERATORS[name]] if name in OPERATORS else not operators.names
        for operator, arguments in operators.seen[:1]:
            torch.library.opcheck(getattr(torch.ops.lossforge, operator).default, arguments)
    with plain_torch(), Operators() as operators:
        exact = graded(name, function, given(name, device, torch.float64))
    assert not operators.names
    for got, right in zip(graded(name, function, given(name, device)), exact, strict=True):
        assert torch.equal(got, right) if not got.is_floating_point() else error(got, right) < 1e-4


@pytest.mark.parametrize(
    "name", [*ASSIGNMENTS, "matching_cost", *COSTS[2:], *DIFFERENTIABLE]
)  # mask_matching_cost reads its counts on the host
def test_compiled_in_one_graph(name, device):
    torch._dynamo.reset()
    function, names = getattr(losses, name), parameters(name)
    others = {each: v for each, v in zip(names, CALLS[name], strict=False) if not isinstance(v, torch.Tensor)}
    backend = "aot_eager" if name in DIFFERENTIABLE else "eager"

    def call(**tensors):
        return function(**tensors, **others)

    results = []
    for way in (torch.compile(call, fullgraph=True, dynamic=name != "atss_assign" or None, backend=backend), call):
        tensors = {each: t for each, t in zip(names, given(name, device), strict=False) if each not in others}
        found = way(**tensors)
        gradients = torch.autograd.grad(total(found), next(iter(tensors.values()))) if name in DIFFERENTIABLE else ()
        results.append([*leaves(found), *gradients])
    torch.testing.assert_close(*results)
