"""The checked call of the margins template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class MarginsCall(NamedTuple):
    """A loss of the differences between logits x (N, C) of a row's targets and of its other classes, divided by C.

    target: class indices (N,), or lists (N, K) that end before their first -1. weight: of each target's class, (C,).
    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor, where the divisor is `normalizer`, else with reduction
    "mean" the number of rows.
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
        return ((self.x.shape[:1] if self.reduction == "none" else (), FLOAT),)
