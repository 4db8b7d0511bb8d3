"""The pairwise sigmoid loss of image and text embeddings."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "siglip",
        "elementwise",
        "bce_with_logits",
        functional.siglip_loss,
        modules.SigLIPLoss,
        paper="arXiv 2303.15343",
    ),
)
