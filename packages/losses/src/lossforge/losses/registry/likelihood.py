"""Losses of log-probabilities."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "nll",
        "nll",
        "nll",
        functional.nll_loss,
        modules.NLLLoss,
        without=("probabilities", "label_smoothing"),
        domain="log-probabilities",
        judge="torch.nn.functional:nll_loss",
    ),
    Loss(
        "kl_div",
        "elementwise",
        "kl_div",
        functional.kl_div,
        modules.KLDivLoss,
        hyper={"log_target": False},
        options=({"log_target": True},),
        domain="log-probabilities",
        judge="torch.nn.functional:kl_div",
    ),
)
