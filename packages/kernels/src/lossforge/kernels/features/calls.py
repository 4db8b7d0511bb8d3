"""The records of checked calls of losses of features and their similarities, one a template. They need torch alone."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, Shape
from lossforge.kernels.call import NONE as NO_NUMBERS

NONE, OWN, OTHERS, SAME = range(4)
"""Columns that a row leaves out: none; its own, where features are compared with themselves; of the first `pairs` all but its own; all but
its own that have its label."""


class SimilarityCall(NamedTuple):
    """A loss of all pairs of rows of a (N, D) and b (M, D), with similarities logit_scale · scale · a bᵀ + logit_bias + bias.

    loss: "softmax" over each row, "both_sides", over each column too, or "sigmoid" of each pair. Row i and column i + offset belong
    together, with labels (N,) and (M,) those whose labels are equal, unless skip is SAME. scale, bias: 0-d. skip: columns that a row
    leaves out, see similarity/kernel.py; pairs: how many columns OTHERS speaks of.

    loss "apart" and "circle": two sums a row, as similarity/pair_sums.py has them, with `hyper` its numbers α, β, near, far, wₚ, wₙ and
    last; negative_weight: 0-d, a factor of wₙ. mined: whether pairs that are easy beside the others of their row are left out. These
    have labels, and neither scale nor bias.

    row_guide (N, G), column_guide (M, G), threshold (N,): a row also leaves out the columns but its own whose product with it, of the
    guides, exceeds its threshold. decoupled: what belongs to a row is not in its softmax. hardness: in the value, not in the gradient,
    what multiplies the similarities of all but the own pair is larger by so much.

    The value is Σ (or, with reduction "none", each) loss of a row · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the number of rows.
    """

    loss: str
    a: Tensor
    b: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    row_labels: Tensor | None = None
    column_labels: Tensor | None = None
    row_guide: Tensor | None = None
    column_guide: Tensor | None = None
    threshold: Tensor | None = None
    negative_weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NO_NUMBERS
    mined: bool = False
    logit_scale: float = 1.0
    logit_bias: float = 0.0
    offset: int = 0
    skip: int = 0
    pairs: int = 0
    decoupled: bool = False
    hardness: float = 0.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def labelled(self) -> bool:
        """Whether labels say what belongs together."""
        return self.row_labels is not None and self.skip != SAME

    @property
    def in_pairs(self) -> bool:
        """Whether a row has a sum over its positives and one over its negatives."""
        return self.loss in ("apart", "circle")

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows, columns = self.a.shape[0], self.b.shape[0]
        softmax = self.loss != "sigmoid"
        return (
            ((rows,) if self.reduction == "none" else (), FLOAT),
            ((4 if self.in_pairs else 2, rows), FLOAT) if softmax else None,
            (((2, rows) if self.in_pairs else (rows,)), FLOAT) if (self.mined if self.in_pairs else softmax and self.labelled) else None,
            ((2, columns), FLOAT) if self.loss == "both_sides" else None,
        )


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
    hyper: list[float] = NO_NUMBERS
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.x.shape[:-1] if self.reduction == "none" else (), FLOAT),)
