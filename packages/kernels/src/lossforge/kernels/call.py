"""The checked call of a loss, one record a template: from the public function through autograd and the operators to the launch.

Needs torch alone. The operators' schemas are generated from the fields: first the formula's name, then the tensors, of which `normalizer`
is the last, then the rest, whose defaults change nothing. `shapes` gives shape and dtype of the results and of what forward keeps, or
a tensor that they are like; None where there is none. Logits are a tensor, or a Head that would give them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

Shape = tuple[Sequence[int], torch.dtype] | Tensor | None
FLOAT = torch.float32
LEAST = 2.0**-126
"""The smallest normal number of float32."""
ROW_MEAN = "mean of rows"
"""The reduction of element-wise losses that sums over the classes and takes the mean of the rows not ignored."""


NONE: list[float] = []
NO_OUTPUTS = [False] * 7


class Formulas(NamedTuple):
    """A formula as the kernels inline it: device functions.

    formula: what a template takes; of divergences its terms. special: a quicker one for the hyper-parameters of which `applies` is true.
    binary: both for targets of 0 and 1, where fewer instructions do (elementwise/kernel.py says how). heavy: so much arithmetic that
    registers limit the programs under way. sparse: of one for targets of 0 and 1, that where they are 0 value and gradient are, whatever x
    is, so that it is not read for a tile of them. sums: of a divergence whose value the first sweep finds, from it to
    (Σ ∂f/∂ln p, Σ ∂f/∂ln q). terms, slopes: of vectors, what is summed and its derivatives (vectors/kernel.py); `special` has all three.
    """

    formula: Callable[..., Any]
    special: Callable[..., Any] | tuple[Callable[..., Any], ...] | None = None
    applies: Callable[..., Any] | None = None
    binary: "Formulas | None" = None
    heavy: bool = False
    sparse: bool = False
    sums: Callable[..., Any] | None = None
    terms: Callable[..., Any] | None = None
    slopes: Callable[..., Any] | None = None


class Head(NamedTuple):
    """Logits (N, C) that a linear layer gives: input (N, H) · weight (C, H)ᵀ + bias (C,). They are computed by chunks and never kept.

    chunk: rows at a time, 0 for as many as memory allows. accumulate: the dtype of the sum that is the weight's gradient, 1 for float32,
    0 for the weight's own, -1 for float32 where memory allows. wide: whether the logits of a chunk of half precision are kept in float32.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    chunk: int = 0
    accumulate: int = -1
    wide: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.input.shape[0], self.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> torch.dtype:
        return self.input.dtype

    @property
    def device(self) -> torch.device:
        return self.input.device

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in self[:3] if t is not None]

    def is_floating_point(self) -> bool:
        return True

    def numel(self) -> int:
        return self.input.shape[0] * self.weight.shape[0]

    def with_input(self, input: Tensor) -> "Head":
        """Return the layer with another input, without `_replace`: torch.compile cannot carry what that makes over a graph break."""
        return Head(input, self.weight, self.bias, self.chunk, self.accumulate, self.wide)

    def of_rows(self, start: int, end: int) -> "Head":
        return self.with_input(self.input[start:end])

    def of_classes(self, start: int, end: int) -> "Head":
        return Head(self.input, self.weight[start:end], None if self.bias is None else self.bias[start:end])


Logits = Tensor | Head
L = TypeVar("L", bound=Logits, default=Tensor)
T = TypeVar("T", bound=Logits, default=Tensor)


class ElementwiseCall(NamedTuple, Generic[L]):
    """A loss of x of any shape in which every element stands alone.

    A class-index target has the shape of x without `dim`, as has `lam`, which without target_b is each row's score. Without a target it
    is 1 on the diagonal of a matrix, `offset` columns to the right. weight, group and parameter (in the place of the last
    hyper-parameter) broadcast to x.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor. The divisor is `normalizer` where given, else
    with reduction "mean" the number of elements not ignored, with ROW_MEAN that of rows.
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
        value: Shape = ((), FLOAT) if self.reduction != "none" else (self.x.shape, self.x.dtype) if isinstance(self.x, Head) else self.x
        return value, ((), FLOAT) if self.counted else None


class RowwiseCall(NamedTuple, Generic[L]):
    """A loss of rows of logits x (N, C, d…) under a softmax, with class indices (N, d…) or probabilities (N, C, d…).

    The logits are scaled, soft-capped and shifted: cap · tanh(logit_scale · x / cap) + tau · bias, bias (C,). With class indices, every
    class adds spread · p^focus (-ln p) to a row, times the weights of the row's targets. With an angle or a margin the logits are cosines,
    and the target's, cos θ, becomes cos(θ + angle) - margin before all that: rowwise/margin.py.
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
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    tau: float = 1.0
    spread: float = 0.0
    focus: float = 0.0
    angle: float = 0.0
    margin: float = 0.0
    z_loss: float = 0.0
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False
    mean_of_rows: bool = False
    outputs: list[bool] = NO_OUTPUTS  # z_loss, lse, entropy, correct, argmax, log_p2, mean_logit

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
            ((3, _rows(self.x)), FLOAT) if keep else None,
        )


class DivergenceCall(NamedTuple, Generic[L, T]):
    """A loss between the softmax of logits x (N, C, d…) and that of a teacher's, target, of the same shape, both softened by temperature.

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
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return _of_teacher(self, keep)


class TopKCall(NamedTuple, Generic[L]):
    """KL from a teacher known by its K likeliest classes: target, their log-probabilities (N, K, d…), and indices of the same shape.

    Others as in DivergenceCall.
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
    def counted(self) -> bool:
        return self.normalizer is None and self.reduction == "mean" and not (self.labels is None and self.weight is None)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return _of_teacher(self, keep)


def _of_teacher(call: DivergenceCall[Any, Any] | TopKCall[Any], keep: bool) -> tuple[Shape, ...]:
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


class BoxesCall(NamedTuple):
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


class PointwiseCall(NamedTuple):
    """A loss of two or three tensors of one shape, element by element, with a gradient for each. weight broadcasts to them.

    The value is Σ (or, with reduction "none", each) loss · weight · loss_scale / divisor, where the divisor is `normalizer`, else with
    reduction "mean" the number of elements.
    """

    loss: str
    x: Tensor
    y: Tensor
    z: Tensor | None = None
    weight: Tensor | None = None
    normalizer: Tensor | None = None
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return (self.x if self.reduction == "none" else ((), FLOAT),)


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
    hyper: list[float] = NONE
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((self.x.shape[:-1] if self.reduction == "none" else (), FLOAT),)


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


class RouterCall(NamedTuple):
    """A loss of a router's logits x (T, E), of which each token takes the top_k largest. mask (T,): what each token counts.

    The value is balance · E Σ f P + z_loss · mean lse²: see router/kernel.py.
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


class MultilabelCall(NamedTuple):
    """A loss of rows of logits x (N, C) whose positive classes are those with a target (N, C) above ½: see multilabel/kernel.py.

    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of rows, where `paired` that of rows with a positive, at least 1. With `paired` the same of the columns,
    taken as rows, is added.
    """

    loss: str
    x: Tensor
    target: Tensor
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


class LovaszCall(NamedTuple):
    """A loss of the regions of logits x (N, C, P) with class indices (N, P), by their sorted errors: see lovasz/kernel.py.

    A region is a class of the batch, or with per_image of each image. included (C,): how often each class counts; else each counts once,
    with `present` only where it has pixels.
    The value is Σ (or, with reduction "none", each) loss · loss_scale / divisor. The divisor is `normalizer` where given, else with
    reduction "mean" the number of classes that count, at least 1, with per_image of each image, times the images.
    """

    loss: str
    x: Tensor
    target: Tensor
    included: Tensor | None = None
    normalizer: Tensor | None = None
    softmax: bool = True
    present: bool = True
    per_image: bool = False
    ignore_index: int = -100
    loss_scale: float = 1.0
    reduction: str = "sum"
    empty_is_zero: bool = False

    @property
    def first(self) -> int:
        """The class index of channel 0: without a softmax the one channel is class 1, and 0 is background."""
        return int(not self.softmax)

    @property
    def region(self) -> tuple[int, int]:
        """The number of regions, and of pixels of each."""
        images, classes, pixels = self.x.shape
        return (images * classes, pixels) if self.per_image else (classes, images * pixels)

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        images, classes, _ = self.x.shape
        each = (*[images] * self.per_image, *[classes] * self.softmax) if self.reduction == "none" else ()
        return (each, FLOAT), (self.region, FLOAT) if keep else None, ((self.region[0],), FLOAT) if keep else None


class ViewsCall(NamedTuple):
    """A loss between the `splits` views of each sample, logits x (splits · N, C): see views/kernel.py.

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


def _rows(x: Logits) -> int:
    return x.numel() // x.shape[1]


def scale_of(call: Any, count: int) -> float:
    """Return the factor of a call's loss, over `count` where the mean divides by it: by no normalizer, and by nothing that is counted."""
    known = call.reduction == "mean" and call.normalizer is None and not getattr(call, "counted", False)
    scale = float(call.loss_scale / count if known else call.loss_scale)
    return 0.0 if abs(scale) < LEAST else scale  # Triton would take a subnormal number as float64


def end_of_tensors(call: Any) -> int:
    """Return where a call's tensors end: the normalizer is the last."""
    return call._fields.index("normalizer") + 1


Call = (
    ElementwiseCall[Any]
    | RowwiseCall[Any]
    | DivergenceCall[Any, Any]
    | TopKCall[Any]
    | OverlapCall
    | BoxesCall
    | PointwiseCall
    | VectorsCall
    | MarginsCall
    | DistributionCall
    | ContrastiveCall
    | SimilarityCall
    | RouterCall
    | ViewsCall
    | MultilabelCall
    | LovaszCall
)
