"""Every loss by name. Tests, benchmarks and configs follow from this table."""

from lossforge.losses.registry import binary, divergence, regression, softmax
from lossforge.losses.registry.common import Loss

LOSSES: dict[str, Loss] = {loss.name: loss for family in (regression, binary, softmax, divergence) for loss in family.LOSSES}

__all__ = ["LOSSES", "Loss"]
