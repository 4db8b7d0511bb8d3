"""Classification losses of dense detectors, whose targets say how good a box is."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "quality_focal",
        "elementwise",
        "quality_focal",
        functional.quality_focal_loss,
        modules.QualityFocalLoss,
        hyper={"beta": 2.0},
        options=({"beta": 0.5}, {"beta": 0.0}, {"beta": 1.0}, {"beta": 3.5}),
        paper="arXiv 2006.04388",
    ),
    Loss(
        "varifocal",
        "elementwise",
        "varifocal",
        functional.varifocal_loss,
        modules.VarifocalLoss,
        hyper={"alpha": 0.75, "gamma": 2.0, "iou_weighted": True},
        options=({"iou_weighted": False}, {"gamma": 0.5}, {"gamma": 0.0, "alpha": 0.3}, {"gamma": 3.5}),
        paper="arXiv 2008.13367",
    ),
)
