"""Modules hold options and class-wise tensors; they compute what their functions do."""

import copy

import pytest
import torch

import lossforge.losses
from lossforge.losses import (
    AsymmetricLossMultiLabel,
    BCEWithLogitsLoss,
    BinaryCrossEntropy,
    CrossEntropyLoss,
    PolyBinaryCrossEntropy,
    PreferenceBCEWithLogitsLoss,
    SigmoidFocalLoss,
    functional,
    modules,
    preference,
    seesaw,
)
from lossforge.losses.detection import assignment, matching, pairwise
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import plain_sample, samples


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_module_computes_its_function(loss, device, all_cases):
    plain = plain_sample(loss, device).name
    for sample in samples(loss, device):
        if sample.x.numel() > 300:
            continue
        build = {k: v for k, v in sample.kwargs.items() if k in (*loss.hyper, "dim", "format")}
        if not (all_cases or build or sample.name == plain):
            continue
        call = {k: v for k, v in sample.kwargs.items() if k not in build}
        module = loss.module(reduction="sum", **build).to(device)
        assert torch.equal(
            module(sample.x, sample.target, **call), loss.function(sample.x, sample.target, reduction="sum", **sample.kwargs)
        )


def test_class_wise_tensors_are_buffers():
    for module, names in (
        (CrossEntropyLoss(torch.rand(4)), ["weight"]),
        (BCEWithLogitsLoss(torch.rand(4), pos_weight=torch.rand(4)), ["weight", "pos_weight"]),
        (SigmoidFocalLoss(alpha=torch.rand(4)), ["alpha"]),
        (PreferenceBCEWithLogitsLoss(torch.rand(2)), ["group_weight"]),
        (AsymmetricLossMultiLabel(weight=torch.rand(4), pos_weight=torch.rand(4)), ["weight", "pos_weight"]),
        (PolyBinaryCrossEntropy(alpha=torch.rand(4)), ["alpha"]),
        (BinaryCrossEntropy(weight=torch.rand(4), pos_weight=torch.rand(4)), ["weight", "pos_weight"]),
    ):
        assert list(module.state_dict()) == names
        assert all(b.dtype == torch.float64 for b in module.double().buffers())


def test_every_public_name_is_exported():
    ours = {"CustomLoss", "FormulaError", "backend", "boxes", "check", "elementwise", "plain_torch", "rowwise"}
    by_hand = {name for module in (preference, pairwise, assignment, matching, seesaw) for name in module.__all__}
    assert set(lossforge.losses.__all__) == {*functional.__all__, *modules.__all__, *by_hand, *ours}
    assert lossforge.losses.__all__ == sorted(lossforge.losses.__all__)


def test_a_module_hands_on_what_differs_from_the_defaults():
    criterion = CrossEntropyLoss()
    assert criterion.changed == {}
    criterion.label_smoothing, criterion.reduction, criterion.softcap = 0.1, "sum", 2
    assert criterion.changed == {"label_smoothing": 0.1, "reduction": "sum", "softcap": 2}
    criterion.label_smoothing = torch.tensor(0.1)  # a buffer
    assert criterion.changed == {"reduction": "sum", "softcap": 2}
    assert copy.deepcopy(criterion).changed == criterion.changed
    criterion.reduction, criterion.softcap, criterion.label_smoothing = "mean", None, 0.0
    assert criterion.changed == {}
    assert criterion.ignore_index == -100
