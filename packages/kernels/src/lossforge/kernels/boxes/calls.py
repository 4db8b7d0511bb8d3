"""The records of checked calls of losses of pairs of boxes, one a template. They need torch alone."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class BoxesCall(NamedTuple):
    """A loss of pairs of boxes (..., 4), with weights that broadcast to (...). centered: boxes are (cx, cy, w, h), else corners.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with
    reduction "mean" the number of pairs.
    """

    loss: str
    boxes1: Tensor
    boxes2: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    centered: bool = False
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.boxes1.shape[:-1] if self.reduction == "none" else (), FLOAT),)


WIDTH = 5
"""Numbers of a box."""


class RotatedCall(NamedTuple):
    """A loss of pairs of rotated boxes (..., 5), with weights that broadcast to (...).

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with
    reduction "mean" the number of pairs.
    """

    loss: str
    boxes1: Tensor
    boxes2: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.boxes1.shape[:-1] if self.reduction == "none" else (), FLOAT),)
