"""Every loss by name. Tests, benchmarks and configs follow from this table."""

from lossforge.losses.registry import (
    asymmetric,
    binary,
    box,
    classification,
    detection,
    divergence,
    likelihood,
    overlap,
    regression,
    siglip,
    softmax,
)
from lossforge.losses.registry.common import Loss

FAMILIES = (regression, binary, likelihood, detection, siglip, softmax, classification, asymmetric, box, overlap, divergence)
LOSSES: dict[str, Loss] = {loss.name: loss for family in FAMILIES for loss in family.LOSSES}

__all__ = ["LOSSES", "Loss"]
