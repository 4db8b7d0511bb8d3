"""Losses of rows of classes under a softmax."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "ce",
        "rowwise",
        "cross_entropy",
        functional.cross_entropy,
        modules.CrossEntropyLoss,
        hyper={"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "scale": 1.0},
        options=({"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 5.0, "scale": 0.7}),
        judge="torch.nn.functional:cross_entropy",
    ),
)
