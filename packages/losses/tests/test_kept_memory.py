"""A call keeps none of its tensors once its loss is gone, however often it repeats."""

import weakref

import pytest
import torch

from lossforge import losses as L


@pytest.mark.parametrize("options", [{}, {"gradient": "backward"}, {"reduction": "none"}, {"outputs": ("lse",)}], ids=str)
def test_no_call_keeps_its_tensors(options, device):
    """Neither the first, which is remembered, nor one whose layout needs copies, nor one that is never kept."""
    weight = torch.ones((), device=device, requires_grad=True)
    table, pixels = torch.randn(12, 7, device=device), torch.randn(2, 3, 4, 8, device=device)
    indices = torch.zeros(12, dtype=torch.long, device=device)
    classes = torch.zeros(2, 2, 7, dtype=torch.long, device=device)
    for _ in range(3):
        gone = []
        for logits, target in ((table * weight, indices), ((pixels * weight)[:, :, ::2, :7], classes)):
            result = L.cross_entropy(logits, target, **options)
            loss = result if isinstance(result, torch.Tensor) else result.loss
            loss.sum().backward()
            gone.append(weakref.ref(logits))
            del logits, result, loss
        assert [logits() for logits in gone] == [None, None]


def test_no_call_of_other_templates_keeps_its_tensors(device):
    """Among them layouts that need copies, where a kept call plans no launch."""
    weight = torch.ones((), device=device, requires_grad=True)
    pixels = torch.randn(2, 3, 4, 6, 8, device=device)
    teacher = torch.randn(2, 3, 2, 6, 4, device=device)
    labels = torch.zeros(2, 2, 6, 4, dtype=torch.long, device=device)
    boxes = torch.rand(2, 3, 4, 4, 8, device=device)
    calls = (
        (pixels, (..., slice(0, 8, 2)), lambda x: L.dice_loss(x[:, :, ::2], labels)),
        (pixels, (..., slice(0, 8, 2)), lambda x: L.kl_div_with_logits(x[:, :, ::2], teacher)),
        (boxes, (..., slice(0, 8, 2)), lambda b: L.generalized_box_iou_loss(b[:, :, ::2], b[:, :, 1::2].detach(), "mean")),
        (torch.randn(5, 5, device=device), ..., L.clip_loss),
        (torch.randn(5, 5, device=device), ..., lambda x: L.clip_loss_from_features(x, x.detach().flip(0))),
        (torch.randn(24, 7, device=device), ..., lambda x: L.selective_log_softmax(x, labels.flatten()[:24]).sum()),
    )
    for _ in range(3):
        gone = []
        for table, part, loss in calls:
            logits = (table * weight)[part]
            loss(logits).backward()
            gone.append(weakref.ref(logits))
            del logits
        assert [logits() for logits in gone] == [None] * len(calls)


def test_in_place_a_gradient_of_forward_is_all_that_is_kept(device):
    """What the mode needs no more: nothing of the targets and weights."""
    leaf, weight = torch.randn(6, 7, device=device, requires_grad=True), torch.rand(7, device=device)
    target = torch.randn(6, 7, device=device).softmax(1)
    for _ in range(2):
        given = target.clone(), weight.clone()
        loss = L.cross_entropy(leaf * 1.0, given[0], given[1], inplace=True, gradient="forward")
        gone = [weakref.ref(t) for t in given]
        del given
        assert [t() for t in gone] == [None, None]
        loss.backward()
