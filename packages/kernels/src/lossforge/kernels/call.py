"""The checked call of a loss, one record a template: from the public function through autograd and the operators to the launch.

Needs torch alone. The operators' schemas are generated from the fields: first the formula's name, then the tensors, of which `normalizer`
is the last, then the rest, whose defaults change nothing. `shapes` gives shape and dtype of the results and of what forward keeps, or
a tensor that they are like; None where there is none. KINDS names these, and says what else a template has to say of itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shape = tuple[Sequence[int], torch.dtype] | Tensor | None
FLOAT = torch.float32
ROW_MEAN = "mean of rows"
"""The reduction of element-wise losses that sums over the classes and takes the mean of the rows not ignored."""


NONE: list[float] = []
NO_OUTPUTS = [False] * 4


class Formulas(NamedTuple):
    """A formula as the kernels inline it: device functions.

    formula: what a template takes; of divergences its terms. special: a quicker one for the hyper-parameters of which `applies` is true.
    binary: both for targets of 0 and 1, where fewer instructions do (element/kernel.py says how). heavy: so much arithmetic that
    registers limit the programs under way. sparse: of one for targets of 0 and 1, that where they are 0 value and gradient are, whatever x
    is, so that it is not read for a tile of them. sums: of a divergence whose value the first sweep finds, from it to
    (Σ ∂f/∂ln p, Σ ∂f/∂ln q).
    """

    formula: Callable[..., Any]
    special: Callable[..., Any] | None = None
    applies: Callable[..., Any] | None = None
    binary: "Formulas | None" = None
    heavy: bool = False
    sparse: bool = False
    sums: Callable[..., Any] | None = None


class ElementCall(NamedTuple):
    """A loss of x of any shape in which every element stands alone.

    A class-index target has the shape of x without `dim`, as has `lam`, which without target_b is each row's score. Without a target it
    is 1 on the diagonal of a matrix, `offset` columns to the right. weight, group and parameter (in the place of the last
    hyper-parameter) broadcast to x.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the number of elements not ignored, with ROW_MEAN that of rows.
    """

    loss: str
    x: Tensor
    target: Tensor | None
    target_b: Tensor | None = None
    lam: Tensor | None = None
    weight: Tensor | None = None
    group: Tensor | None = None
    group_weight: Tensor | None = None
    parameter: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    dim: int = -1
    ignore_index: int = -100
    offset: int = 0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def by_class(self) -> bool:
        return self.target is not None and not self.target.is_floating_point()

    @property
    def mean(self) -> bool:
        return self.reduction in ("mean", ROW_MEAN)

    @property
    def counted(self) -> bool:
        """Whether a mean divides by what is counted on the device: the elements not ignored."""
        return self.normalizer is None and self.mean and self.by_class

    @property
    def factor(self) -> float:
        """What the sum over the elements is multiplied by before it is divided by their number."""
        return self.loss_scale * self.x.shape[self.dim] if self.reduction == ROW_MEAN and self.x.ndim else self.loss_scale

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        value: Shape = self.x if self.reduction == "none" else ((), FLOAT)
        return value, ((), FLOAT) if self.counted else None


class RowCall(NamedTuple):
    """A loss of rows of logits x (N, C, d…) under a softmax, with class indices (N, d…) or probabilities (N, C, d…).

    The logits are scaled, soft-capped and shifted: cap · tanh(logit_scale · x / cap) + tau · bias, bias (C,). With class indices, every
    class adds spread · p^focus (-ln p) to a row, times the weights of the row's targets.
    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the class weights of the rows not ignored, or with mean_of_rows their number; with probabilities, the number of rows.
    """

    loss: str
    x: Tensor
    target: Tensor
    target_b: Tensor | None = None
    lam: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    tau: float = 1.0
    spread: float = 0.0
    focus: float = 0.0
    z_loss: float = 0.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False
    mean_of_rows: bool = False
    outputs: list[bool] = NO_OUTPUTS  # z_loss, lse, entropy, correct

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not self.target.is_floating_point()

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        z_loss, lse, entropy, correct = self.outputs
        rows = (self.x.shape[0], *self.x.shape[2:])
        loss: Shape = (rows if self.reduction == "none" else (), FLOAT)
        row: Shape = (rows, FLOAT)
        return (
            loss,
            loss if z_loss else None,
            row if lse else None,
            row if entropy else None,
            (rows, torch.bool) if correct else None,
            ((), FLOAT) if self.counted else None,
            ((3, _rows(self.x)), FLOAT) if keep else None,
        )


class DivergenceCall(NamedTuple):
    """A loss between the softmax of logits x (N, C, d…) and that of a teacher's, target, of the same shape, both softened by temperature.

    labels, of which ignore_index leaves a row out, and weight, of which 0 does: (N, d…). swap: the logits play the part of the formula's
    q, the teacher that of p.
    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the weights of the rows not left out.
    """

    loss: str
    x: Tensor
    target: Tensor
    labels: Tensor | None = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    swap: bool = False
    temperature: float = 1.0
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return _of_teacher(self, keep)


class TopKCall(NamedTuple):
    """KL from a teacher known by its K likeliest classes: target, their log-probabilities (N, K, d…), and indices of the same shape.

    Others as in DivergenceCall.
    """

    loss: str
    x: Tensor
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
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return _of_teacher(self, keep)


def _of_teacher(call: DivergenceCall | TopKCall, keep: bool) -> tuple[Shape, ...]:
    rows = (call.x.shape[0], *call.x.shape[2:]) if call.reduction == "none" else ()
    stats = 5 if isinstance(call, DivergenceCall) else 2
    return (rows, FLOAT), ((), FLOAT) if call.counted else None, ((stats, _rows(call.x)), FLOAT) if keep else None


class OverlapCall(NamedTuple):
    """A loss of how much regions overlap: logits x (N, C, d…), class indices (N, d…) or targets (N, C, d…).

    The value is Σ (or, with reduction "none", each) weight · loss · loss_scale / divisor over images and classes, or classes where
    `batch`. The divisor is `normalizer` where given, else with reduction "mean" their number. lambda_ce: None without cross entropy.
    """

    loss: str
    x: Tensor
    target: Tensor
    weight: Tensor | None = None
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

    @property
    def first(self) -> int:
        """The class index of channel 0: one channel that is not a softmax is class 1, and 0 is background."""
        return int(self.x.shape[1] == 1 and self.activation != "softmax")

    @property
    def skip(self) -> int:
        return int(not self.include_background)

    @property
    def regions(self) -> tuple[int, int]:
        return 1 if self.batch else self.x.shape[0], self.x.shape[1] - self.skip

    @property
    def counted(self) -> bool:
        """Whether the cross entropy's mean divides by what is counted on the device."""
        return self.lambda_ce is not None and self.reduction == "mean" and not self.target.is_floating_point()

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        regions, classes = self.regions
        each = (classes,) if self.batch else (regions, classes)
        kept = (2 * regions + int(self.lambda_ce is not None)) * self.x.shape[1]
        return (each if self.reduction == "none" else (), FLOAT), ((kept,), FLOAT)


class BoxCall(NamedTuple):
    """A loss of pairs of boxes (..., 4), with weights that broadcast to (...). centered: boxes are (cx, cy, w, h), else corners.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with
    reduction "mean" the number of pairs.
    """

    loss: str
    boxes1: Tensor
    boxes2: Tensor
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    centered: bool = False
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.boxes1.shape[:-1] if self.reduction == "none" else (), FLOAT),)


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


class PairsCall(NamedTuple):
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
        return ((rows,) if self.reduction == "none" else (), FLOAT), ((rows,), FLOAT), ((columns,), FLOAT)


class Kind(NamedTuple):
    """What the calls of a template have in common.

    folder: where lossforge.kernels has the template, whose launch.py has `forward` and `backward`. operator: torch.ops.lossforge.<name>.
    results: what a call returns; gradients arrive at the first `arriving` of them. kept: what forward keeps for backward, which also
    takes the results `saved`. differentiable: the tensors that the kernels differentiate; a gradient has the strides of its tensor.
    """

    folder: str
    operator: str
    results: tuple[str, ...] = ("loss",)
    kept: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ("x",)
    arriving: int = 1
    saved: tuple[str, ...] = ()


KINDS: dict[type, Kind] = {
    ElementCall: Kind("element", "elementwise", kept=("divisor",)),
    RowCall: Kind(
        "row", "rowwise", ("loss", "z_loss", "lse", "entropy", "correct"), kept=("divisor", "stats"), arriving=4, saved=("entropy",)
    ),
    DivergenceCall: Kind("divergence", "divergence", kept=("divisor", "stats")),
    TopKCall: Kind("divergence", "topk", kept=("divisor", "stats")),
    OverlapCall: Kind("overlap", "overlap", kept=("coefficients",)),
    BoxCall: Kind("box", "boxes", differentiable=("boxes1", "boxes2")),
    DistributionCall: Kind("distribution", "distribution"),
    PairsCall: Kind("pairs", "contrastive", kept=("row_lse", "column_lse")),
}


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def end_of_tensors(call: Any) -> int:
    """Return where a call's tensors end: the normalizer is the last."""
    return call._fields.index("normalizer") + 1
