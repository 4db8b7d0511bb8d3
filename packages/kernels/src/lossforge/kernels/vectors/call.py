"""The checked call of the vectors template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class VectorsCall(NamedTuple):
    """A loss of rows of two or three vectors (..., D), with a gradient for each. label and weight: (...) or what broadcasts to it.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with
    reduction "mean" the number of rows.
    """

    loss: str
    x: Tensor
    y: Tensor
    z: Tensor | None = None
    label: Tensor | None = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.x.shape[:-1] if self.reduction == "none" else (), FLOAT),)
