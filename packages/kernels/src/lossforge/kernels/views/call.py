"""The checked call of the views template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, Shape


class ViewsCall(NamedTuple):
    """A loss between the `splits` views of each sample, logits x (splits · N, C): see views/kernel.py.

    The value is Σ loss · loss_scale / N.
    """

    loss: str
    x: Tensor
    normalizer: Tensor | None = None
    splits: int = 2
    loss_scale: float = 1.0
    reduction: str = "mean"

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((), FLOAT), ((3, self.splits, self.x.shape[0] // self.splits), FLOAT)
