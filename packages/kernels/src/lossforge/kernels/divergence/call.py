"""The checked call of the divergence template."""

import math
from typing import Any, Generic, NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NONE, L, Shape, T, rows_of

LOG2E = math.log2(math.e)
NO_OUTPUTS = [False]
ELSEWHERE = -1
"""The label of a class that a call does not have, where it has some of all classes."""


class DivergenceCall(NamedTuple, Generic[L, T]):
    """A loss between the softmax of logits x (N, C, d…) and that of a teacher's, target, of the same shape, both softened by temperature.

    Before, center (C,) is subtracted from the teacher's logits where there is one. Then the logits are scaled and soft-capped:
    cap · tanh(logit_scale · x / cap), and the teacher's likewise by their own two numbers.
    labels, of which ignore_index leaves a row out, and weight, of which 0 does: (N, d…). swap: the logits play the part of the formula's
    q, the teacher that of p.
    The loss "cosine" is of the logits themselves, without softmaxes.
    With hard_weight a row's loss is soft_weight · divergence + hard_weight · -ln softmax(x) of the class that its label names, where the
    logits are not softened. outputs: whether the entropy of each row's softened softmax is wanted. With some_classes x and target have
    some of all classes, and the label ELSEWHERE names one of the others.
    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the weights of the rows not left out.
    """

    loss: str
    x: L
    target: T
    labels: Tensor | None = None
    weight: Tensor | None = None
    center: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    swap: bool = False
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    target_scale: float = 1.0
    target_softcap: float | None = None
    soft_weight: float = 1.0
    hard_weight: float | None = None
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False
    some_classes: bool = False
    outputs: list[bool] = NO_OUTPUTS

    @property
    def factors(self) -> tuple[float, float]:
        """The scales of the logits and of the teacher's that multiply differences of these, which a common offset costs no digits.

        1 where a cap follows the scale, and for a cosine, which takes no differences.
        """
        scales = (self.logit_scale, self.softcap), (self.target_scale, self.target_softcap)
        of_logits, of_teacher = (1.0 if cap is not None or self.loss == "cosine" else scale for scale, cap in scales)
        return of_logits, of_teacher

    @property
    def inverses(self) -> tuple[float, float]:
        """By what differences of the logits as they are read are multiplied, and those of the teacher's."""
        of_logits, of_teacher = self.factors
        return of_logits / self.temperature, of_teacher / self.temperature

    @property
    def of_formula(self) -> dict[str, Any]:
        """How logits of student and teacher are centred, scaled and capped, None for not at all; with hard labels the factors of both
        parts."""
        (of_logits, of_teacher), (factor, of_target) = self.inverses, self.factors
        found: dict[str, Any] = {
            "inverse": of_logits,
            "rate": of_logits * LOG2E,
            "ratio": None if of_target == factor else of_teacher / of_logits,
            "scale_x": None if self.logit_scale in (1.0, factor) else self.logit_scale,
            "cap_x": self.softcap,
            "scale_t": None if self.target_scale in (1.0, of_target) else self.target_scale,
            "cap_t": self.target_softcap,
            "center": self.center,
        }
        if self.hard_weight is None:
            return found
        found |= {"soft": self.soft_weight, "hard": self.hard_weight, "factor": None if factor == 1.0 else factor}
        return found | {
            "unsoftened": None if self.temperature == 1.0 else LOG2E * factor,
            "elsewhere": ELSEWHERE if self.some_classes else None,
        }

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows = (self.x.shape[0], *self.x.shape[2:])
        loss, entropy = (rows, FLOAT) if self.reduction == "none" else ((), FLOAT), (rows, FLOAT) if self.outputs[0] else None
        stats = (5 if self.hard_weight is None else 6, rows_of(self.x))
        return loss, entropy, ((), FLOAT) if self.counted else None, (stats, FLOAT) if keep else None
