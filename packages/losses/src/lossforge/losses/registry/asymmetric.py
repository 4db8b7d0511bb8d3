"""Asymmetric loss of one class against the others under a softmax."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "asymmetric_single_label",
        "rowwise",
        "asymmetric_single_label",
        functional.asymmetric_loss_single_label,
        modules.AsymmetricLossSingleLabel,
        hyper={"gamma_pos": 1.0, "gamma_neg": 4.0, "eps": 0.1},
        options=(
            {"eps": 0.0},
            {"gamma_pos": 0.0, "gamma_neg": 0.0, "eps": 0.3},
            {"gamma_pos": 0.5, "gamma_neg": 1.5, "eps": 0.2},
            {"gamma_pos": 2.0, "gamma_neg": 0.3, "eps": 1.0},
        ),
        without=("probabilities", "label_smoothing"),
        judge="lossforge.losses.judges.asymmetric:asymmetric_single_label",
        paper="arXiv 2009.14119",
    ),
)
