"""MONAI's Dice loss, and those that contain it, patched, against MONAI's own: value and gradient."""

import compared
import pytest
import torch

from lossforge.integrations import monai as ours

WEIGHT = torch.tensor([1.0, 0.5, 2.0, 1.5])
INDICES = {"softmax": True, "to_onehot_y": True}


def compare(name, options, kind="indices", exact=False):
    draw = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 4, 6, 5, generator=draw), torch.randint(3, (2, 1, 6, 5), generator=draw)
    targets = {
        "indices": target,
        "partial": target.masked_fill(torch.rand(2, 1, 6, 5, generator=draw) < 0.2, 255),
        "masks": torch.rand(2, 4, 6, 5, generator=draw).round(),
        "soft": torch.rand(2, 4, 6, 5, generator=draw),
    }
    losses = pytest.importorskip("monai.losses")  # not above: each process that collects this file would import it, in 4.5 s
    module = getattr(losses, name)(**options)
    compared.compare(ours.patch, lambda: module(logits, targets[kind]), [logits.requires_grad_()], exact)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("DiceLoss", {**INDICES, "weight": WEIGHT, "batch": True}, "indices"),
        ("DiceLoss", {**INDICES, "weight": WEIGHT[1:], "include_background": False}, "indices"),
        ("DiceLoss", {**INDICES, "weight": 2.0}, "indices"),
        ("DiceLoss", {"sigmoid": True, "squared_pred": True, "smooth_nr": 0.5, "smooth_dr": 0.7}, "soft"),
        ("DiceLoss", {"sigmoid": True, "jaccard": True, "smooth_nr": 0.5, "smooth_dr": 0.7}, "masks"),
        ("DiceLoss", {**INDICES, "ignore_index": 255}, "partial"),
        ("DiceCELoss", {**INDICES, "lambda_ce": 2.0}, "indices"),
        ("DiceFocalLoss", {**INDICES}, "indices"),
        ("DiceLoss", {"softmax": True, "weight": WEIGHT}, "masks"),
        ("DiceCELoss", {"softmax": True}, "soft"),
    ],
    ids=str,
)
def test_options_and_losses_that_contain_it(name, options, kind):
    compare(name, options, kind)


def named(value):
    """Return a case's name, without the address of a function in it: every process of pytest-xdist finds the same."""
    return value if isinstance(value, str) else ",".join(value) or "none"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"sigmoid": True, "soft_label": True}, "soft"),
        ({"other_act": torch.tanh}, "masks"),
        ({}, "masks"),
        ({"sigmoid": True, "include_background": False}, "masks"),
        ({**INDICES, "ignore_index": 1}, "indices"),
    ],
    ids=named,
)
def test_what_ours_lacks_is_left_to_monai(options, kind):
    compare("DiceLoss", options, kind, exact=True)
