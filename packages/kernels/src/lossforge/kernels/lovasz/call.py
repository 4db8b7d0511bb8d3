"""The checked call of the lovasz template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, Shape


class LovaszCall(NamedTuple):
    """A loss of the regions of logits x (N, C, P) with class indices (N, P), by their sorted errors: see lovasz/kernel.py.

    A region is a class of the batch, or with per_image of each image. included (C,): how often each class counts; else each counts once,
    with `present` only where it has pixels.
    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of classes that count, at least 1, with per_image of each image, times the images.
    """

    loss: str
    x: Tensor
    target: Tensor
    included: Tensor | None = None
    normalizer: Tensor | None = None
    softmax: bool = True
    present: bool = True
    per_image: bool = False
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def first(self) -> int:
        """The class index of channel 0: without a softmax the one channel is class 1, and 0 is background."""
        return int(not self.softmax)

    @property
    def region(self) -> tuple[int, int]:
        """The number of regions, and of pixels of each."""
        images, classes, pixels = self.x.shape
        return (images * classes, pixels) if self.per_image else (classes, images * pixels)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        images, classes, _ = self.x.shape
        each = (*[images] * self.per_image, *[classes] * self.softmax) if self.reduction == "none" else ()
        return (each, FLOAT), (self.region, FLOAT) if keep else None, ((self.region[0],), FLOAT) if keep else None
