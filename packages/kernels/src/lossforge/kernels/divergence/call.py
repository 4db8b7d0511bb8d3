"""The checked call of the divergence template."""

from typing import Generic, NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, L, Shape, T, rows_of


class DivergenceCall(NamedTuple, Generic[L, T]):
    """A loss between the softmax of logits x (N, C, d…) and that of a teacher's, target, of the same shape, both softened by temperature.

    Before, the logits are scaled and soft-capped: cap · tanh(logit_scale · x / cap), and the teacher's likewise by their own two numbers.
    labels, of which ignore_index leaves a row out, and weight, of which 0 does: (N, d…). swap: the logits play the part of the formula's
    q, the teacher that of p.
    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the weights of the rows not left out.
    """

    loss: str
    x: L
    target: T
    labels: Tensor | None = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    swap: bool = False
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    target_scale: float = 1.0
    target_softcap: float | None = None
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def caps(self) -> tuple[float | None, ...]:
        """Scale and cap of the logits of student and teacher; None for none."""
        scales = [None if scale == 1.0 else scale for scale in (self.logit_scale, self.target_scale)]
        return scales[0], self.softcap, scales[1], self.target_softcap

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows = (self.x.shape[0], *self.x.shape[2:]) if self.reduction == "none" else ()
        return (rows, FLOAT), ((), FLOAT) if self.counted else None, ((5, rows_of(self.x)), FLOAT) if keep else None
