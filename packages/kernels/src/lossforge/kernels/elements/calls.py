"""The records of checked calls of losses in which every element stands alone, one a template. They need torch alone."""

from typing import Generic, NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, ROW_MEAN, Head, L, Shape


class ElementwiseCall(NamedTuple, Generic[L]):
    """A loss of x of any shape in which every element stands alone.

    A class-index target has the shape of x without `dim`, as has `lam`, which without target_b is each row's score. Without a target it
    is 1 on the diagonal of a matrix, `offset` columns to the right. weight, group, parameter (in the place of the last
    hyper-parameter) and mask (bool, or weights) broadcast to x.

    The value is Σ (or, with reduction "none", each) loss · weight · mask · loss_scale / divisor; 0 where the mask is, for any x. The
    divisor is `normalizer` where given, else with reduction "mean" the number of elements not ignored, or with a mask its sum over them;
    with ROW_MEAN the number of rows.
    """

    loss: str
    x: L
    target: Tensor | None
    target_b: Tensor | None = None
    lam: Tensor | None = None
    weight: Tensor | None = None
    group: Tensor | None = None
    group_weight: Tensor | None = None
    parameter: Tensor | None = None
    mask: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    dim: int = -1
    ignore_index: int = -100
    offset: int = 0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def by_class(self) -> bool:
        return self.target is not None and not self.target.is_floating_point()

    def mean(self) -> bool:
        return self.reduction in ("mean", ROW_MEAN)

    @property
    def counted(self) -> bool:
        """Whether a mean divides by what is counted on the device: the elements not ignored, or the mask."""
        return self.normalizer is None and self.mean() and (self.by_class() or self.mask is not None)

    def factor(self) -> float:
        """Return what the sum over the elements is multiplied by before it is divided by their number."""
        return self.loss_scale * self.x.shape[self.dim] if self.reduction == ROW_MEAN and self.x.ndim else self.loss_scale

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        value: Shape = ((), FLOAT) if self.reduction != "none" else (self.x.shape, self.x.dtype) if isinstance(self.x, Head) else self.x
        return value, ((), FLOAT) if self.counted else None


class PointwiseCall(NamedTuple):
    """A loss of two or three tensors of one shape, element by element, with a gradient for each. weight and mask broadcast to them.

    The value is Σ (or, with reduction "none", each) loss · weight · mask · loss_scale / divisor; 0 where the mask is, for any tensors. The
    divisor is `normalizer`, else with reduction "mean" the number of elements, or with a mask its sum.
    """

    loss: str
    x: Tensor
    y: Tensor
    z: Tensor | None = None
    weight: Tensor | None = None
    mask: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def counted(self) -> bool:
        """Whether a mean divides by the mask's sum."""
        return self.normalizer is None and self.reduction == "mean" and self.mask is not None

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return self.x if self.reduction == "none" else ((), FLOAT), ((), FLOAT) if self.counted else None
