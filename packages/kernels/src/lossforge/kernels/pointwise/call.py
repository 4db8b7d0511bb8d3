"""The checked call of the pointwise template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class PointwiseCall(NamedTuple):
    """A loss of two or three tensors of one shape, element by element, with a gradient for each. weight broadcasts to them.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with
    reduction "mean" the number of elements.
    """

    loss: str
    x: Tensor
    y: Tensor
    z: Tensor | None = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return (self.x if self.reduction == "none" else ((), FLOAT),)
