"""The checked call of the distribution template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class DistributionCall(NamedTuple):
    """A loss of distributions over bins, under a softmax of logits x (..., bins), at a target (...) that lies between two bins.

    Each of these two counts by how near it is. weight broadcasts to target. The value is Σ (or, with reduction "none", each)
    loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with reduction "mean" the number of targets.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.x.shape[:-1] if self.reduction == "none" else (), FLOAT),)
