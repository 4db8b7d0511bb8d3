"""The checked call of the rowwise template."""

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import FLOAT, NO_OUTPUTS, NONE, L, Shape, rows_of


class RowwiseCall(NamedTuple, Generic[L]):
    """A loss of rows of logits x (N, C, d…) under a softmax, with class indices (N, d…) or probabilities (N, C, d…).

    The logits are scaled, soft-capped and shifted: cap · tanh(logit_scale · x / cap) + tau · bias, bias (C,). With class indices, every
    class adds spread · p^focus (-ln p) to a row, times the weights of the row's targets. With an angle or a margin the logits are cosines,
    and the target's, cos θ, becomes cos(θ + angle) - margin before all that: rowwise/margin.py; margins (C,) adds the class's own. A
    parameter (C,) is a hyper-parameter of each class, the formula's last. With a power k the formula takes Σ p^k beside z. With
    target_b, lam is the share of target; without, it is a factor of each row, which no divisor holds. A row of factor 0 is left out as an
    ignored one. With entropy_weight the factor is min(1, entropy_weight · H), H the row's entropy, which is among the outputs then; it has
    no gradient.
    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the class weights of the rows not ignored, or with mean_of_rows their number; with probabilities, the number of rows.
    """

    loss: str
    x: L
    target: Tensor
    target_b: Tensor | None = None
    lam: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    margins: Tensor | None = None
    parameter: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    tau: float = 1.0
    spread: float = 0.0
    focus: float = 0.0
    power: float = 0.0
    angle: float = 0.0
    margin: float = 0.0
    entropy_weight: float = 0.0
    z_loss: float = 0.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False
    mean_of_rows: bool = False
    outputs: list[bool] = NO_OUTPUTS  # z_loss, lse, entropy, correct, argmax, log_p2, mean_logit

    @property
    def moves_target(self) -> bool:
        """Return whether the target's logit has a margin."""
        return bool(self.angle or self.margin) or self.margins is not None

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not self.target.is_floating_point()

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        z_loss, lse, entropy, correct, argmax, log_p2, mean_logit = self.outputs
        rows = (self.x.shape[0], *self.x.shape[2:])
        loss: Shape = (rows if self.reduction == "none" else (), FLOAT)
        row: Shape = (rows, FLOAT)
        return (
            loss,
            loss if z_loss else None,
            row if lse else None,
            row if entropy else None,
            (rows, torch.bool) if correct else None,
            (rows, torch.int64) if argmax else None,
            row if log_p2 else None,
            row if mean_logit else None,
            ((), FLOAT) if self.counted else None,
            ((5 if self.power else 3, rows_of(self.x)), FLOAT) if keep else None,
        )
