"""Modules hold options and class-wise tensors; they compute what their functions do."""

import copy
import inspect

import numpy as np
import pytest
import timm.loss
import torch

import lossforge.losses
from lossforge import losses as L
from lossforge.losses.detection import anchors, assignment, criterion, enclosing, hungarian, matching, pairwise, seesaw
from lossforge.losses.engine.parallel import grad_cache
from lossforge.losses.segmentation import depth, distance, points, prototypes, regions
from lossforge.losses.segmentation import modules as of_masks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BoundaryLoss", {"reduction": "sum", "include_background": False, "spacing": (1.0, 2.0)}),
        ("GeneralizedDiceLoss", {"weighting": "simple", "batch": True, "smooth_dr": 1e-3}),
        ("HausdorffLoss", {"alpha": 1.0, "activation": "sigmoid"}),
        ("MCCLoss", {"reduction": "none", "ignore_index": 1}),
        ("SILogLoss", {"lambd": 0.8, "per_image": True, "eps": 1e-3}),
    ],
)
def test_modules_of_masks_compute_their_functions(name, options, device):
    """Each takes the options of its function, in the same order and with the same defaults."""
    kind = getattr(of_masks, name)
    _, _, *taken = inspect.signature(kind.function).parameters.values()
    assert [*inspect.signature(kind).parameters.values()] == [p for p in taken if p.name != "mask"]  # which belongs to a call
    x, target = torch.rand(2, 3, 6, 5, device=device), torch.randint(3, (2, 6, 5), device=device)
    if name == "SILogLoss":
        x, target = x[:, 0] + 0.1, torch.rand(2, 6, 5, device=device)
    for given in (options, {}):
        module = kind(**given).to(device)
        assert torch.equal(module(x, target), kind.function(x, target, **given))
        assert module.changed == given
    with pytest.raises(TypeError, match="smoth"):
        kind(smoth=1.0)


def test_every_public_name_is_exported():
    ours = {"CustomLoss", "FormulaError", "backend", "boxes", "check", "elementwise", "plain_torch", "rowwise"}
    detection = (pairwise, anchors, assignment, criterion, enclosing, hungarian, matching, seesaw)
    others = (L.preference, depth, distance, points, prototypes, regions, of_masks, grad_cache)
    by_hand = {name for module in (*detection, *others) for name in module.__all__}
    assert set(lossforge.losses.__all__) == {*L.functional.__all__, *L.modules.__all__, *by_hand, *ours}
    assert lossforge.losses.__all__ == sorted(lossforge.losses.__all__)


def test_a_module_hands_on_what_differs_from_the_defaults():
    criterion = L.CrossEntropyLoss()
    assert criterion.changed == {}
    criterion.label_smoothing, criterion.reduction, criterion.softcap = 0.1, "sum", 2
    assert criterion.changed == {"label_smoothing": 0.1, "reduction": "sum", "softcap": 2}
    criterion.label_smoothing = torch.tensor(0.1)  # a buffer
    assert criterion.changed == {"reduction": "sum", "softcap": 2}
    assert copy.deepcopy(criterion).changed == criterion.changed
    criterion.reduction, criterion.softcap, criterion.label_smoothing = "mean", None, 0.0
    assert criterion.changed == {}
    assert criterion.ignore_index == -100


def test_a_shallow_copy_has_options_of_its_own():
    first = L.SigmoidFocalLoss(gamma=3.0)
    second = copy.copy(first)
    second.gamma = 5.0
    x, target = torch.randn(8, 5), torch.rand(8, 5)
    for module in (first, second):
        assert torch.equal(
            module(x, target), lossforge.losses.sigmoid_focal_loss(x, target, gamma=module.gamma, reduction=module.reduction)
        )


def test_counts_are_kept_whole_and_taken_as_timm_takes_them():
    """A module's half() made infinities of counts above 65,504."""
    x, target, counts = torch.randn(6, 5), torch.randint(2, (6, 5)).float(), [500_000, 300_000, 90_000, 10, 1]
    ours = L.DistributionBalancedLoss(counts, 1_000_000)
    expected = timm.loss.DistributionBalancedLoss(counts, 1_000_000)(x, target)
    for given in (counts, np.array(counts), torch.tensor(counts).float()):
        module = L.DistributionBalancedLoss(given, 1_000_000).half()
        torch.testing.assert_close(module(x, target), expected)
    assert torch.equal(ours.half().class_counts, torch.tensor(counts))
    torch.testing.assert_close(
        L.DistributionBalancedLoss([5.5, 2.0, 7.0, 1.0, 3.0], 19)(x, target),
        timm.loss.DistributionBalancedLoss([5.5, 2.0, 7.0, 1.0, 3.0], 19)(x, target),
    )
    endless = L.DistributionBalancedLoss([float("inf"), 3.0, 4.0, 5.0, 6.0], 19)
    torch.testing.assert_close(endless(x, target), L.DistributionBalancedLoss([18, 3, 4, 5, 6], 19)(x, target))
    with pytest.raises(TypeError, match="class_counts must be a tensor, or a list of numbers, got 'many'"):
        L.DistributionBalancedLoss("many", 19)  # type: ignore[arg-type]
