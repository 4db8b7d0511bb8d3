"""Mistakes in calls of overlap losses stop before any launch, with an error that names the argument, what came and what is accepted."""

import pytest
import torch

from lossforge.kernels import launch_counts
from lossforge.losses import TverskyLoss, dice_ce_loss, dice_loss, focal_tversky_loss


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (TypeError, "input must be of a floating dtype, got torch.int64", {"input": torch.zeros(2, 3, 4, dtype=torch.long)}),
        (ValueError, r"input must have shape \(N, C, d…\), got \(3,\)", {"input": torch.zeros(3)}),
        (TypeError, "target must be a tensor, got int", {"target": 1}),
        (TypeError, "target must be of an integer dtype, got torch.bool", {"target": torch.zeros(2, 4, dtype=torch.bool)}),
        (ValueError, r"target must have the shape of input, \(2, 3, 4\), where it is dense, got \(2, 4\)", {"target": torch.zeros(2, 4)}),
        (ValueError, r"target must have shape \(2, 4\), got \(2, 5\)", {"target": torch.zeros(2, 5, dtype=torch.long)}),
        (ValueError, r"weight must hold one weight a class, shape \(3,\), got \(2,\)", {"weight": torch.ones(2)}),
        (TypeError, "weight must be of a floating dtype, got torch.int64", {"weight": torch.ones(3, dtype=torch.long)}),
        (ValueError, "reduction must be one of 'none', 'mean', 'sum', got 'avg'", {"reduction": "avg"}),
        (ValueError, "activation must be one of 'softmax', 'sigmoid', None, got 'relu'", {"activation": "relu"}),
        (ValueError, "smooth_nr must be finite and at least 0, got -1", {"smooth_nr": -1}),
        (TypeError, "smooth_dr must be a number, got str", {"smooth_dr": "1"}),
        (TypeError, "batch must be True or False, got int", {"batch": 1}),
        (TypeError, "include_background must be True or False, got NoneType", {"include_background": None}),
        (TypeError, "ignore_index must be a whole number, got NoneType", {"ignore_index": None}),
        (ValueError, "gradient=\"forward\" needs a scalar result", {"gradient": "forward", "reduction": "none"}),
        (TypeError, "'target_b'; did you mean 'target'. It takes input, target, include_background", {"target_b": torch.zeros(2, 4)}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_mistakes(kind, message, options):
    arguments = {"input": torch.rand(2, 3, 4), "target": torch.zeros(2, 4, dtype=torch.long), **options}
    before = launch_counts()
    with pytest.raises(kind, match=message):
        dice_loss(**arguments)
    assert launch_counts() == before


def test_mistakes_of_one_loss():
    x, target = torch.rand(2, 3, 4), torch.zeros(2, 4, dtype=torch.long)
    for name in ("alpha", "beta", "gamma"):
        with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got -0.5"):
            focal_tversky_loss(x, target, **{name: -0.5})
    with pytest.raises(ValueError, match='activation must be "softmax" or "sigmoid" where a cross entropy needs logits, got None'):
        dice_ce_loss(x, target, activation=None)
    with pytest.raises(ValueError, match='reduction must be "mean" or "sum" where two losses are added, got "none"'):
        dice_ce_loss(x, target, reduction="none")
    with pytest.raises(ValueError, match="lambda_ce must be finite and at least 0, got -1"):
        dice_ce_loss(x, target, lambda_ce=-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalizer'"):
        dice_ce_loss(x, target, normalizer=2.0)
    with pytest.raises(ValueError, match="include_background=False needs more than one class"):
        dice_loss(x[:, :1], target, include_background=False, activation="sigmoid")
    with pytest.raises(TypeError, match=r"TverskyLoss\(\) got an unexpected keyword argument 'squared_pred'"):
        TverskyLoss(squared_pred=True)
    with pytest.raises(ValueError, match="inplace=True needs logits that are an intermediate result"):
        dice_loss(x.requires_grad_(), target, inplace=True)
