"""The records of checked calls of losses of rows of classes, one a template. They need torch alone."""

import math
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import FLOAT, NO_OUTPUTS, NONE, L, Shape, T, rows_of


class RowwiseCall(NamedTuple, Generic[L]):
    """A loss of rows of logits x (N, C, d…) under a softmax, with class indices (N, d…) or probabilities (N, C, d…).

    The logits are scaled, soft-capped and shifted: cap · tanh(logit_scale · x / cap) + tau · bias, bias (C,). With row_scale (N, d…) they
    are multiplied by it before the bias. With class indices, every class adds spread · p^focus (-ln p) to a row, times the weights of the
    row's targets. With an angle or a margin the logits are cosines, and the target's, cos θ, becomes cos(θ + angle) - margin before all
    that: rowwise/additions.py; margins (C,) adds the class's own. A
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
    row_scale: Tensor | None = None
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


LOG2E = math.log2(math.e)
ELSEWHERE = -1
"""The label of a class that a call does not have, where it has some of all classes."""


BLENDED = frozenset(("draft_kl", "draft_ce", "draft_tv", "draft_log_tv", "draft_lk"))
"""The divergences whose rows are functions of two sums over the classes."""


class DivergenceCall(NamedTuple, Generic[L, T]):
    """A loss between the softmax of logits x (N, C, d…) and that of a teacher's, target, of the same shape, both softened by temperature.

    Before, center (C,) is subtracted from the teacher's logits where there is one. Then the logits are scaled and soft-capped:
    cap · tanh(logit_scale · x / cap), and the teacher's likewise by their own two numbers.
    labels, of which ignore_index leaves a row out, and weight, of which 0 does: (N, d…). swap: the logits play the part of the formula's
    q, the teacher that of p.
    The loss "cosine" is of the logits themselves, without softmaxes.
    With hard_weight a row's loss is soft_weight · divergence + hard_weight · -ln softmax(x) of the class that its label names, where the
    logits are not softened. outputs: whether the entropy of each row's softened softmax is wanted, and the acceptance Σ min(p, q) of
    losses that are BLENDED. Of these target_lse (N, d…) is the log-sum of the teacher's softened logits over all its classes, where x and
    target have some of them. With some_classes x and target have some of all classes, and the label ELSEWHERE names one of the others.
    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the weights of the rows not left out.
    """

    loss: str
    x: L
    target: T
    labels: Tensor | None = None
    weight: Tensor | None = None
    center: Tensor | None = None
    target_lse: Tensor | None = None
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
    outputs: list[bool] = NO_OUTPUTS[:2]  # entropy, acceptance

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
        loss = (rows, FLOAT) if self.reduction == "none" else ((), FLOAT)
        entropy, acceptance = ((rows, FLOAT) if asked else None for asked in self.outputs)
        stats = (5 + (self.hard_weight is not None) + 2 * (self.loss in BLENDED), rows_of(self.x))
        return loss, entropy, acceptance, ((), FLOAT) if self.counted else None, (stats, FLOAT) if keep else None


MOST_MORE = 0.05
"""By which the log-sum of a teacher's logits over some classes may exceed that over all, as rounding; else the row is nan."""
MOST = 1.05
"""A larger Σ exp(target) of a row is not of probabilities: its loss is nan. Rounded to bfloat16, those of 150,000 classes reach 1.03."""


class TopKCall(NamedTuple, Generic[L]):
    """KL from a teacher's top-K logits: target, their log-probabilities (N, K, d…), and indices of the same shape.

    reverse: the share of KL(student ‖ teacher), beside that of KL(teacher ‖ student). An entry of -inf, or of index -1, is absent.

    The logits are scaled and soft-capped, cap · tanh(logit_scale · x / cap), then softened by temperature. renormalize: the K's
    probabilities are softened and normalized among themselves. tail: all other classes count as one more.
    labels, of which ignore_index leaves a row out, and weight, of which 0 does: (N, d…). hard_weight, outputs: as of DivergenceCall.
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
    reverse: float = 0.0
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    soft_weight: float = 1.0
    hard_weight: float | None = None
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False
    outputs: list[bool] = NO_OUTPUTS[:1]  # entropy

    @property
    def of_formula(self) -> dict[str, Any]:
        """As of DivergenceCall: a scale without a cap multiplies differences of logits. The teacher's `ratio` is of renormalized ones."""
        factor = 1.0 if self.softcap is not None else self.logit_scale
        inverse = factor / self.temperature
        found: dict[str, Any] = {
            "inverse": inverse,
            "rate": inverse * LOG2E,
            "ratio": None if factor == 1.0 else 1.0 / factor,
            "scale_x": None if self.logit_scale in (1.0, factor) else self.logit_scale,
            "cap_x": self.softcap,
            "reverse": self.reverse or None,
        }
        if self.hard_weight is None:
            return found
        found |= {"soft": self.soft_weight, "hard": self.hard_weight, "factor": None if factor == 1.0 else factor}
        return found | {"unsoftened": None if self.temperature == 1.0 else LOG2E * factor}

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows = (self.x.shape[0], *self.x.shape[2:])
        loss, entropy = (rows, FLOAT) if self.reduction == "none" else ((), FLOAT), (rows, FLOAT) if self.outputs[0] else None
        stats = (2 if self.hard_weight is None else 3, rows_of(self.x))
        return loss, entropy, ((), FLOAT) if self.counted else None, (stats, FLOAT) if keep else None


class MarginsCall(NamedTuple):
    """A loss of the differences between logits x (N, C) of a row's targets and of its other classes, divided by C.

    target: class indices (N,), or lists (N, K) that end before their first -1. weight: of each target's class, (C,).
    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor, where the divisor is `normalizer`, else with reduction
    "mean" the number of rows.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.x.shape[:1] if self.reduction == "none" else (), FLOAT),)


class MultilabelCall(NamedTuple):
    """A loss of rows of logits x (N, C) whose positive classes are those with a target (N, C) above ½: see multilabel.py.

    mask broadcasts to x: which classes count, bool, or factors of their exponentials. A class that does not count is not positive.

    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of rows, where `paired` that of rows with a positive, at least 1. With `paired` the same of the columns,
    taken as rows, is added.
    """

    loss: str
    x: Tensor
    target: Tensor
    mask: Tensor | None = None
    normalizer: Tensor | None = None
    tp: float = 1.0
    tn: float = 1.0
    paired: bool = False
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def counted(self) -> bool:
        return self.paired and self.reduction == "mean" and self.normalizer is None

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        rows, columns = self.x.shape
        value: Shape = ((rows,) if self.reduction == "none" else (), FLOAT)
        divisor: Shape = ((), FLOAT) if self.counted else None
        return value, divisor, ((4, rows), FLOAT), divisor, ((4, columns), FLOAT) if self.paired else None


class DistributionCall(NamedTuple):
    """A loss of distributions over bins, under a softmax of logits x (..., bins), at a target (...) that lies between two bins.

    Each of these two counts by how near it is. weight broadcasts to target. The value is Σ (or, with reduction "none", each)
    loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with reduction "mean" the number of targets.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.x.shape[:-1] if self.reduction == "none" else (), FLOAT),)


class RouterCall(NamedTuple):
    """A loss of a router's logits x (T, E), of which each token takes the top_k largest. mask (T,): what each token counts.

    The value is balance · E Σ f P + z_loss · mean lse²: see router.py.
    """

    loss: str
    x: Tensor
    mask: Tensor | None = None
    normalizer: Tensor | None = None
    top_k: int = 1
    balance: float = 1.0
    z_loss: float = 0.0
    reduction: str = "mean"
    empty_is_zero: bool = False
    outputs: list[bool] = NO_OUTPUTS[:1]  # z_loss

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((), FLOAT), ((), FLOAT) if self.outputs[0] else None, ((self.x.shape[1] + 1,), FLOAT)


class ViewsCall(NamedTuple):
    """A loss between the `splits` views of each sample, logits x (splits · N, C): see views.py.

    The value is Σ loss · loss_scale / N.
    """

    loss: str
    x: Tensor
    normalizer: Tensor | None = None
    splits: int = 2
    loss_scale: float = 1.0
    reduction: str = "mean"

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((), FLOAT), ((3, self.splits, self.x.shape[0] // self.splits), FLOAT)
