"""What the records of checked calls share. A template's record lies in its room: `elements/calls.py`.

A record goes from the public function through autograd and the operators to the launch. It needs torch alone. The operators' schemas are
generated from its fields: first the formula's name, then the tensors, of which `normalizer` is the last, then the rest, whose defaults
change nothing. Logits are a tensor, or a Head that would give them.

A named tuple's methods may be traced by torch.compile; its properties not before torch 2.10.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

from lossforge.kernels.plans import narrowed

Shape = tuple[Sequence[int], torch.dtype] | Tensor | None
FLOAT = torch.float32
LEAST = 2.0**-126
"""The smallest normal number of float32."""
ROW_MEAN = "mean of rows"
"""The reduction of element-wise losses that sums over the classes and takes the mean of the rows not ignored."""


NONE: list[float] = []
NO_OUTPUTS = [False] * 7
NEVER_ROUNDED, FROM_WEIGHT, FLOAT32 = -1, 0, 1


class Formulas(NamedTuple):
    """A formula as the kernels inline it: device functions.

    formula: what a template takes; of divergences its terms. special: a quicker one for the hyper-parameters of which `applies` is true.
    binary: both for targets of 0 and 1, where fewer instructions do (elements/elementwise says how). heavy: so much arithmetic that
    registers limit the programs under way. averaged: of a divergence that is a mean under q, (ln q, ln p) → the term of a class.
    terms, slopes: of vectors, what is summed and its derivatives (features/vectors.py); `special` has all three.
    blend: of a divergence whose row is a function of that mean and of the sum of the terms (formulas/softmax.py).
    """

    formula: Callable[..., Any]
    special: Callable[..., Any] | tuple[Callable[..., Any], ...] | None = None
    applies: Callable[..., Any] | None = None
    binary: "Formulas | None" = None
    heavy: bool = False
    averaged: Callable[..., Any] | None = None
    terms: Callable[..., Any] | None = None
    slopes: Callable[..., Any] | None = None
    blend: Callable[..., Any] | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Head:
    """Logits (N, C) that a linear layer gives: input (N, H) · weight (C, H)ᵀ + bias (C,). They are computed by chunks and never kept.

    chunk: rows at a time, 0 for as many as memory allows. accumulate: the dtype of the sum that is the weight's gradient, 1 for float32,
    0 for the weight's own, -1 for float32 where memory allows. logits: how those of half precision are kept: FLOAT32, by chunks in float32;
    FROM_WEIGHT, in the weight's dtype; NEVER_ROUNDED, as takes the least time of all ways that do not round them.

    It is not a named tuple, because torch.compile does not trace properties of these before torch 2.10.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    chunk: int = 0
    accumulate: int = -1
    logits: int = NEVER_ROUNDED

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
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.input, self.weight, self.bias

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in self.parts if t is not None]

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.chunk, self.accumulate, self.logits

    def is_floating_point(self) -> bool:
        return True

    def numel(self) -> int:
        return self.input.shape[0] * self.weight.shape[0]

    def with_input(self, input: Tensor) -> "Head":
        return Head(input, self.weight, self.bias, *self.numbers)

    def of_rows(self, start: int, end: int) -> "Head":
        return self.with_input(narrowed(self.input, 0, start, end))

    def of_classes(self, start: int, end: int) -> "Head":
        return Head(self.input, narrowed(self.weight, 0, start, end), None if self.bias is None else narrowed(self.bias, 0, start, end))


Logits = Tensor | Head
L = TypeVar("L", bound=Logits, default=Tensor)
T = TypeVar("T", bound=Logits, default=Tensor)


def rows_of(x: Logits) -> int:
    """Return the number of rows of logits (N, C, d…)."""
    return x.numel() // x.shape[1]


class Call(Protocol):
    """The record of a checked call: a named tuple."""

    @property
    def loss(self) -> str:
        """The formula's name."""

    @property
    def reduction(self) -> str: ...

    def __getitem__(self, fields: slice, /) -> tuple[Any, ...]: ...

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        """Return shape and dtype of the results and of what forward keeps, or a tensor that they are like; None where there is none.

        keep: what only backward needs is wanted.
        """


def scale_of(call: Any, count: int) -> float:
    """Return the factor of a call's loss, over `count` where the mean divides by it: by no normalizer, and by nothing that is counted."""
    known = call.reduction == "mean" and call.normalizer is None and not getattr(call, "counted", False)
    scale = float(call.loss_scale / count if known else call.loss_scale)
    return 0.0 if abs(scale) < LEAST else scale  # Triton would take a subnormal number as float64


def end_of_tensors(call: Any) -> int:
    """Return where a call's tensors end: the normalizer is the last."""
    return call._fields.index("normalizer") + 1
