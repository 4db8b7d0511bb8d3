"""The checked call of the topk template."""

from typing import Any, Generic, NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, L, Shape, rows_of
from lossforge.kernels.divergence.call import LOG2E

MOST = 1.05
"""A larger Σ exp(target) of a row is not of probabilities: its loss is nan. Rounded to bfloat16, those of 150,000 classes reach 1.03."""


class TopKCall(NamedTuple, Generic[L]):
    """KL from a teacher's top-K logits: target, their log-probabilities (N, K, d…), and indices of the same shape.

    The logits are scaled and soft-capped, cap · tanh(logit_scale · x / cap), then softened by temperature. renormalize: the K's
    probabilities are softened and normalized among themselves. tail: all other classes count as one more.
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
    logit_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def of_formula(self) -> dict[str, Any]:
        """As of DivergenceCall: a scale without a cap multiplies differences of logits. The teacher's `ratio` is of renormalized ones."""
        factor = 1.0 if self.softcap is not None else self.logit_scale
        inverse = factor / self.temperature
        return {
            "inverse": inverse,
            "rate": inverse * LOG2E,
            "ratio": None if factor == 1.0 else 1.0 / factor,
            "scale_x": None if self.logit_scale in (1.0, factor) else self.logit_scale,
            "cap_x": self.softcap,
        }

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows = (self.x.shape[0], *self.x.shape[2:]) if self.reduction == "none" else ()
        return (rows, FLOAT), ((), FLOAT) if self.counted else None, ((2, rows_of(self.x)), FLOAT) if keep else None
