"""The checked call of the overlap template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class OverlapCall(NamedTuple):
    """A loss of how much regions overlap: logits x (N, C, d…), class indices (N, d…) or targets (N, C, d…).

    The value is Σ (or, with reduction "none", each) weight · loss · loss_scale / divisor over images and classes, or classes where
    `batch`. The divisor is `normalizer` where given, else with reduction "mean" their number. lambda_ce: None without cross entropy.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    activation: str | None = "softmax"
    ignore_index: int = -100
    include_background: bool = True
    squared_pred: bool = False
    batch: bool = False
    present_only: bool = False
    loss_scale: float = 1.0
    lambda_ce: float | None = None
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def first(self) -> int:
        """The class index of channel 0: one channel that is not a softmax is class 1, and 0 is background."""
        return int(self.x.shape[1] == 1 and self.activation != "softmax")

    @property
    def skip(self) -> int:
        return int(not self.include_background)

    @property
    def regions(self) -> tuple[int, int]:
        return 1 if self.batch else self.x.shape[0], self.x.shape[1] - self.skip

    @property
    def confusion(self) -> bool:
        """Whether the four sums of a confusion matrix are wanted, and no loss."""
        return self.loss == "region_sums"

    @property
    def counted(self) -> bool:
        """Whether the cross entropy's mean divides by what is counted on the device."""
        return self.lambda_ce is not None and self.reduction == "mean" and not self.target.is_floating_point()

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        regions, classes = self.regions
        each = (classes,) if self.batch else (regions, classes)
        kept = (4 * regions if self.confusion else 2 * regions + int(self.lambda_ce is not None)) * self.x.shape[1]
        return (each if self.reduction == "none" else (), FLOAT), ((kept,), FLOAT)
