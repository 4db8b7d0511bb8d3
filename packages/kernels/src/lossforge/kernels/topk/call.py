"""The checked call of the topk template."""

from typing import Any, Generic, NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, L, Shape, rows_of


class TopKCall(NamedTuple, Generic[L]):
    """KL from a teacher's top-K logits: target, their log-probabilities (N, K, d…), and indices of the same shape.

    renormalize: the K's probabilities are softened and normalized among themselves. tail: all other classes count as one more.
    labels, of which ignore_index leaves a row out, and weight, of which 0 does: (N, d…).
    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the weights of the rows not left out.
    """

    loss: str
    x: L
    target: Tensor
    indices: Tensor
    labels: Tensor | None = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    renormalize: bool = False
    tail: bool = False
    temperature: float = 1.0
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def of_formula(self) -> dict[str, Any]:
        return {}

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows = (self.x.shape[0], *self.x.shape[2:]) if self.reduction == "none" else ()
        return (rows, FLOAT), ((), FLOAT) if self.counted else None, ((2, rows_of(self.x)), FLOAT) if keep else None
