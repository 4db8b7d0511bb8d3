"""The checked call of the multilabel template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, Shape


class MultilabelCall(NamedTuple):
    """A loss of rows of logits x (N, C) whose positive classes are those with a target (N, C) above ½: see multilabel/kernel.py.

    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of rows, where `paired` that of rows with a positive, at least 1. With `paired` the same of the columns,
    taken as rows, is added.
    """

    loss: str
    x: Tensor
    target: Tensor
    normalizer: Tensor | None = None
    tp: float = 1.0
    tn: float = 1.0
    paired: bool = False
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def counted(self) -> bool:
        return self.paired and self.reduction == "mean" and self.normalizer is None

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows, columns = self.x.shape
        value: Shape = ((rows,) if self.reduction == "none" else (), FLOAT)
        divisor: Shape = ((), FLOAT) if self.counted else None
        return value, divisor, ((4, rows), FLOAT), divisor, ((4, columns), FLOAT) if self.paired else None
