"""The checked call of the contrastive template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, Shape


class ContrastiveCall(NamedTuple):
    """A loss over similarities x (N, M), of which row i and column i + offset belong together.

    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of pairs, N.
    """

    loss: str
    x: Tensor
    normalizer: Tensor | None = None
    offset: int = 0
    logit_scale: float = 1.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows, columns = self.x.shape
        return ((rows,) if self.reduction == "none" else (), FLOAT), ((2, rows), FLOAT), ((2, columns), FLOAT)
