"""Losses of rows of classes under a softmax for imbalanced, hard or noisily labelled data."""

import torch

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

JUDGES = "lossforge.losses.judges.classification"
LOSSES = (
    Loss(
        "softmax_focal",
        "rowwise",
        "softmax_focal",
        functional.softmax_focal_loss,
        modules.SoftmaxFocalLoss,
        hyper={"alpha": None, "gamma": 2.0},
        options=({"gamma": 0.5, "alpha": 0.25}, {"gamma": 0.0}, {"gamma": 3.5, "alpha": torch.linspace(0.1, 2, 10)}),
        without=("probabilities", "label_smoothing"),
        judge=f"{JUDGES}:softmax_focal",
        paper="arXiv 1708.02002",
    ),
    Loss(
        "poly_ce",
        "rowwise",
        "poly_ce",
        functional.poly_cross_entropy,
        modules.PolyCrossEntropyLoss,
        hyper={"epsilon": 2.0, "label_smoothing": 0.0},
        options=({"epsilon": -0.5}, {"epsilon": 1.0, "label_smoothing": 0.1}),
        without=("probabilities", "label_smoothing with weight"),
        judge=f"{JUDGES}:poly_ce",
        paper="arXiv 2204.12511",
    ),
    Loss(
        "generalized_ce",
        "rowwise",
        "generalized_ce",
        functional.generalized_cross_entropy,
        modules.GeneralizedCrossEntropyLoss,
        hyper={"q": 0.7},
        options=({"q": 1.0}, {"q": 1e-3}, {"q": 0.0}),
        without=("probabilities", "label_smoothing"),
        judge=f"{JUDGES}:generalized_ce",
        paper="arXiv 1805.07836",
    ),
    Loss(
        "logit_adjusted_ce",
        "rowwise",
        "cross_entropy",
        functional.logit_adjusted_cross_entropy,
        modules.LogitAdjustedCrossEntropyLoss,
        hyper={"tau": 1.0, "label_smoothing": 0.0},
        options=(
            {"log_prior": torch.linspace(-4, -1, 10)},
            {"log_prior": torch.linspace(-4, -1, 10).square(), "tau": -0.7, "label_smoothing": 0.1},
            {"log_prior": torch.linspace(-4, -1, 10), "scale": 0.5},
        ),
        judge=f"{JUDGES}:logit_adjusted_ce",
        paper="arXiv 2007.07314",
    ),
)
