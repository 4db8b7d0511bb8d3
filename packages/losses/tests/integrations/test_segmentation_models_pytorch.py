"""segmentation_models_pytorch's losses, patched, against its own: value and gradient."""

import compared
import pytest
import torch

smp = pytest.importorskip("segmentation_models_pytorch.losses")

from lossforge.integrations import segmentation_models_pytorch as ours  # noqa: E402

WEIGHTS = [1.0, 0.5, 2.0, 1.5]


def inputs(kind):
    """Return logits (2, C, 6, 5) and targets of a kind; no pixel is of class 3."""
    draw = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 4, 6, 5, generator=draw), torch.randint(3, (2, 6, 5), generator=draw)
    targets = {
        "classes": target,
        "partial": target.masked_fill(torch.rand(2, 6, 5, generator=draw) < 0.2, 255),
        "masks": torch.rand(2, 4, 6, 5, generator=draw).round().long(),
        "mask": target[:, None].clamp(max=1),
        "soft": torch.rand(2, 4, 6, 5, generator=draw),
    }
    targets["ignored"] = targets["soft"].round().masked_fill(torch.rand(2, 4, 6, 5, generator=draw) < 0.2, -100)
    return (logits[:, :1] if kind == "mask" else logits).requires_grad_(), targets[kind]


def compare(module, kind, exact=False):
    logits, target = inputs(kind)
    compared.compare(ours.patch, lambda: module(logits, target), [logits], exact)


REGIONS = [
    ("multiclass", {}, "classes"),
    ("multiclass", {"smooth": 1.0, "class_weights": WEIGHTS}, "classes"),
    ("multiclass", {"ignore_index": 255}, "partial"),
    ("multilabel", {"smooth": 1.0}, "masks"),
    ("binary", {}, "mask"),
]


@pytest.mark.parametrize(("mode", "options", "kind"), REGIONS, ids=str)
@pytest.mark.parametrize("name", ["DiceLoss", "JaccardLoss", "TverskyLoss"])
def test_losses_of_regions(name, mode, options, kind):
    more = {"alpha": 0.3, "beta": 0.7, "gamma": 2.0} if name == "TverskyLoss" else {}
    compare(getattr(smp, name)(mode, **options, **more), kind)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("FocalLoss", {"mode": "multiclass", "alpha": 0.3}, "classes"),
        ("FocalLoss", {"mode": "multiclass", "ignore_index": 255}, "partial"),
        ("FocalLoss", {"mode": "multilabel", "gamma": 1.0}, "masks"),
        ("FocalLoss", {"mode": "binary", "alpha": 0.3}, "mask"),
        ("LovaszLoss", {"mode": "multiclass"}, "classes"),
        ("LovaszLoss", {"mode": "multiclass", "per_image": True, "ignore_index": 255}, "partial"),
        ("LovaszLoss", {"mode": "multilabel"}, "masks"),
        ("LovaszLoss", {"mode": "binary", "per_image": True}, "mask"),
        ("SoftCrossEntropyLoss", {"smooth_factor": 0.1}, "classes"),
        ("SoftCrossEntropyLoss", {"smooth_factor": 0.1, "ignore_index": 255}, "partial"),
        ("SoftCrossEntropyLoss", {"smooth_factor": 0.0, "reduction": "sum"}, "classes"),
        ("SoftBCEWithLogitsLoss", {"smooth_factor": 0.1, "ignore_index": None}, "soft"),
        ("SoftBCEWithLogitsLoss", {}, "ignored"),
        ("SoftBCEWithLogitsLoss", {"reduction": "sum", "pos_weight": torch.tensor(2.0)}, "soft"),
    ],
    ids=str,
)
def test_other_losses(name, options, kind):
    compare(getattr(smp, name)(**options), kind)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("DiceLoss", {"mode": "multilabel"}, "soft"),
        ("DiceLoss", {"mode": "multiclass", "classes": [0, 2]}, "classes"),
        ("TverskyLoss", {"mode": "multiclass", "log_loss": True}, "classes"),
        ("JaccardLoss", {"mode": "binary", "ignore_index": 255}, "mask"),
        ("FocalLoss", {"mode": "multiclass", "normalized": True}, "classes"),
        ("LovaszLoss", {"mode": "multilabel", "ignore_index": 255}, "masks"),
    ],
    ids=str,
)
def test_what_ours_lacks_is_left_to_the_library(name, options, kind):
    compare(getattr(smp, name)(**options), kind, exact=True)
