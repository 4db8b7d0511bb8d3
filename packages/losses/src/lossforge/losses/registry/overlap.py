"""Losses of the overlap of predicted and true regions."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

SMOOTH: dict[str, float | None] = {"smooth_nr": 1e-5, "smooth_dr": 1e-5}

LOSSES = (
    Loss(
        "dice",
        "overlap",
        "dice",
        functional.dice_loss,
        modules.DiceLoss,
        hyper=SMOOTH,
        options=({"smooth_nr": 0.0, "smooth_dr": 1e-6}, {"smooth_nr": 1.0, "smooth_dr": 1.0}, {"squared_pred": True}),
        paper="arXiv 1606.04797",
    ),
    Loss(
        "jaccard",
        "overlap",
        "jaccard",
        functional.jaccard_loss,
        modules.JaccardLoss,
        hyper=SMOOTH,
        options=({"smooth_nr": 1.0, "smooth_dr": 2.0}, {"squared_pred": True}),
    ),
    Loss(
        "tversky",
        "overlap",
        "tversky",
        functional.tversky_loss,
        modules.TverskyLoss,
        hyper={"alpha": 0.5, "beta": 0.5, **SMOOTH},
        options=({"alpha": 0.3, "beta": 0.7}, {"alpha": 1.0, "beta": 1.0}, {"alpha": 0.0, "beta": 2.0, "smooth_dr": 1.0}),
        paper="arXiv 1706.05721",
    ),
    Loss(
        "focal_tversky",
        "overlap",
        "focal_tversky",
        functional.focal_tversky_loss,
        modules.FocalTverskyLoss,
        hyper={"alpha": 0.3, "beta": 0.7, "gamma": 0.75, **SMOOTH},
        options=({"gamma": 1.0}, {"gamma": 2.0, "alpha": 0.5, "beta": 0.5}),
        paper="arXiv 1810.07842",
    ),
    Loss(
        "dice_ce",
        "overlap",
        "dice",
        functional.dice_ce_loss,
        modules.DiceCELoss,
        hyper={"lambda_dice": 1.0, "lambda_ce": 1.0, **SMOOTH},
        options=({"lambda_dice": 0.5, "lambda_ce": 2.0}, {"lambda_dice": 0.0}, {"lambda_ce": 0.0}, {"squared_pred": True}),
        reductions=("mean", "sum"),
    ),
)
