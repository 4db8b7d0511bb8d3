"""Losses of a difference x - y."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss("mae", "elementwise", "l1", functional.l1_loss, modules.L1Loss, judge="torch.nn.functional:l1_loss"),
    Loss("mse", "elementwise", "mse", functional.mse_loss, modules.MSELoss, judge="torch.nn.functional:mse_loss"),
    Loss(
        "huber",
        "elementwise",
        "huber",
        functional.huber_loss,
        modules.HuberLoss,
        hyper={"delta": 1.0},
        options=({"delta": 0.3}, {"delta": 5.0}),
        judge="torch.nn.functional:huber_loss",
    ),
    Loss(
        "smooth_l1",
        "elementwise",
        "smooth_l1",
        functional.smooth_l1_loss,
        modules.SmoothL1Loss,
        hyper={"beta": 1.0},
        options=({"beta": 0.3}, {"beta": 5.0}),
        judge="torch.nn.functional:smooth_l1_loss",
    ),
)
