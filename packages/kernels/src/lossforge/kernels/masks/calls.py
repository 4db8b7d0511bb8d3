"""The records of checked calls of losses of regions of pixels, one a template. They need torch alone."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, Shape


class OverlapCall(NamedTuple):
    """A loss of how much regions overlap: logits x (N, C, d…), class indices (N, d…) or targets (N, C, d…).

    mask: in the shape of x, uint8 or floating: how much each element counts in the sums over pixels, the same for all classes of a pixel
    under a softmax. With class indices those of mask 0 are ignored, too.

    The value is Σ (or, with reduction "none", each) weight · loss · loss_scale / divisor over images and classes, or classes where
    `batch`. The divisor is `normalizer` where given, else with reduction "mean" their number. lambda_ce: None without cross entropy.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None = None
    mask: Tensor | None = None
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

    def first(self) -> int:
        """Return the class index of channel 0: one channel that is not a softmax is class 1, and 0 is background."""
        return int(self.x.shape[1] == 1 and self.activation != "softmax")

    def skip(self) -> int:
        return int(not self.include_background)

    @property
    def regions(self) -> tuple[int, int]:
        return 1 if self.batch else self.x.shape[0], self.x.shape[1] - self.skip()

    @property
    def confusion(self) -> bool:
        """Whether the four sums of a confusion matrix are wanted, and no loss."""
        return self.loss == "region_sums"

    @property
    def counted(self) -> bool:
        """Whether the cross entropy's mean divides by what is counted on the device."""
        by_class = not self.target.is_floating_point()
        return self.lambda_ce is not None and self.reduction == "mean" and (by_class or self.mask is not None)

    @property
    def by_elements(self) -> bool:
        """Whether that is the elements, not the class weights of the pixels."""
        return self.counted and (self.activation == "sigmoid" or self.target.is_floating_point())

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        regions, classes = self.regions
        each = (classes,) if self.batch else (regions, classes)
        kept = (4 * regions if self.confusion else 2 * regions + int(self.lambda_ce is not None)) * self.x.shape[1]
        return (each if self.reduction == "none" else (), FLOAT), ((kept,), FLOAT)


class LovaszCall(NamedTuple):
    """A loss of the regions of logits x (N, C, P) with class indices (N, P), by their sorted errors: see lovasz.py.

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

    def first(self) -> int:
        """Return the class index of channel 0: without a softmax the one channel is class 1, and 0 is background."""
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
