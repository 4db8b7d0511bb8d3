"""The checked call of the similarity template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, Shape


class SimilarityCall(NamedTuple):
    """A loss of all pairs of rows of a (N, D) and b (M, D), with similarities logit_scale · scale · a bᵀ + logit_bias + bias.

    loss: "softmax" over each row, "both_sides", over each column too, or "sigmoid" of each pair. Row i and column i + offset belong
    together, with labels (N,) and (M,) those whose labels are equal. scale, bias: 0-d. skip: columns that a row leaves out, see
    similarity/kernel.py; pairs: how many columns OTHERS speaks of.

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
    normalizer: Tensor | None = None
    logit_scale: float = 1.0
    logit_bias: float = 0.0
    offset: int = 0
    skip: int = 0
    pairs: int = 0
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows, columns = self.a.shape[0], self.b.shape[0]
        softmax = self.loss != "sigmoid"
        return (
            ((rows,) if self.reduction == "none" else (), FLOAT),
            ((2, rows), FLOAT) if softmax else None,
            ((rows,), FLOAT) if softmax and self.row_labels is not None else None,
            ((2, columns), FLOAT) if self.loss == "both_sides" else None,
        )
