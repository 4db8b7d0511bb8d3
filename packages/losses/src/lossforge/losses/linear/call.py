"""Calls of a loss on logits that a linear layer would give, and that are never kept: one record a template, made from its own.

Such a record has the tensors of the layer in place of the logits; its other fields are those of the template's record, which each chunk
of rows gets. So the one autograd.Function and the operators compute and differentiate it as they do any other call.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import KINDS, DivergenceCall, ElementCall, RowCall, Shape, TopKCall, end_of_tensors
from lossforge.losses.state import KERNEL_DTYPES, backend


class Head(NamedTuple):
    """A linear layer and its input: logits are input (N, H) · weight (C, H)ᵀ + bias (C,)."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """A tensor of the logits' shape, dtype and device, without memory of its own."""
        return self.input.new_empty(()).expand(self.input.shape[0], self.weight.shape[0])

    def with_input(self, input: Tensor) -> "Head":
        """Return the layer with another input, without `_replace`: torch.compile cannot carry what that makes over a graph break."""
        return Head(input, self.weight, self.bias)

    def of_rows(self, start: int, end: int) -> "Head":
        return self.with_input(self.input[start:end])

    def of_classes(self, start: int, end: int) -> "Head":
        return Head(self.input, self.weight[start:end], None if self.bias is None else self.bias[start:end])

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in self if t is not None]


class Settings(NamedTuple):
    """How a fused call is computed. chunk: rows at a time, 0 for as many as memory lets. accumulate: of the weight's gradient, 1 in
    float32, 0 in its own dtype, -1 in float32 where memory lets."""

    chunk: int = 0
    accumulate: int = -1


ROWS = ("target", "target_b", "lam", "indices", "labels")
"""Fields with an entry a row, in dimension 0."""
EACH = ("weight", "group", "parameter")
"""Fields of an element-wise call that broadcast to the logits."""
TEACHER = ("teacher", "teacher_weight", "teacher_bias")


class Fused:
    """What the records of fused calls share. record: the template's own."""

    record: Any
    head: Tensor

    @property
    def layer(self) -> Head:
        return Head(self.input, self.head, self.head_bias)  # type: ignore[attr-defined]

    @property
    def teacher_layer(self) -> Head | None:
        found: list[Any] = [getattr(self, name, None) for name in TEACHER]
        return None if found[0] is None else Head(*found)

    def on(self, x: Tensor, target: Tensor | None = None) -> Any:
        """Return the template's call on logits, and on a teacher's where that has a layer of its own."""
        given = {name: getattr(self, name) for name in self.record._fields if name != "x"}
        if target is not None:
            given["target"] = target
        return self.record(**given, x=x)

    @property
    def whole(self) -> Any:
        """The template's call on logits without memory."""
        teacher = self.teacher_layer
        return self.on(self.layer.logits, None if teacher is None else teacher.logits)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of the logits and, of a divergence, of the teacher's."""
        teacher = getattr(self, "teacher", None)
        other = self.target if teacher is None else teacher  # type: ignore[attr-defined]
        logits: Tensor = self.input  # type: ignore[attr-defined]
        return {logits.dtype, other.dtype} if self.record in (DivergenceCall, TopKCall) else {logits.dtype}

    @property
    def by_kernel(self) -> bool:
        """Whether the loss's kernel goes over the logits, not its plain-torch reference."""
        return self.dtypes.issubset(KERNEL_DTYPES) and backend(self.input) != "torch"  # type: ignore[attr-defined]

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        kind, shapes = KINDS[self.record], self.whole.shapes(keep)
        if torch.float64 in self.dtypes:
            shapes = tuple([(s[0], torch.float64) if isinstance(s, tuple) and s[1] == torch.float32 else s for s in shapes])
        named = dict(zip((*kind.results, *kind.kept), shapes, strict=True))
        own, by_kernel = KINDS[type(self)], self.by_kernel
        return *[named[name] for name in own.results], *[named[name] if by_kernel else None for name in own.kept]


def of_rows(call: Any, start: int, end: int, x: Tensor, target: Tensor | None) -> Any:
    """Return the template's call of the rows from start to end, on their logits. target: a teacher's, where that has a layer."""
    rows = call.x.shape[0]
    given: dict[str, Any] = {"x": x}
    for name in ROWS:
        t = getattr(call, name, None)
        if t is not None:
            given[name] = t[start:end]
    if isinstance(call, (DivergenceCall, TopKCall)):
        given["weight"] = None if call.weight is None else call.weight[start:end]
    elif isinstance(call, ElementCall):
        for name in EACH:
            t = getattr(call, name)
            if t is not None and t.ndim == 2 and t.shape[0] == rows:
                given[name] = t[start:end]
        if call.target is None:
            given["offset"] = call.offset + start
    if target is not None:
        given["target"] = target
    return call._replace(**given)


def of_classes(call: Any, start: int, end: int, x: Tensor, target: Tensor | None) -> Any:
    """The same of the classes from start to end, of a loss of rows or a divergence. Class indices and weights count all classes."""
    given: dict[str, Any] = {"x": x}
    if target is not None:
        given["target"] = target
    elif call.target.ndim == 2:
        given["target"] = call.target[:, start:end]
    if isinstance(call, RowCall) and call.bias is not None:
        given["bias"] = call.bias[start:end]
    return call._replace(**given)


def _fused(record: Any) -> Any:
    """Make the record of a template's fused calls, and say what these have in common."""
    end, types, kind = end_of_tensors(record), record.__annotations__, KINDS[record]
    names = record._fields
    own = {"input": Tensor, "head": Tensor, "head_bias": Tensor | None}
    if record is DivergenceCall:
        own |= dict.fromkeys(TEACHER, Tensor | None)
    tensors = {name: types[name] for name in names[1:end] if name != "x"}
    if record is DivergenceCall:
        tensors["target"] = Tensor | None
    fields = {"loss": str, **own, **tensors, "chunk": int, "accumulate": int, **{name: types[name] for name in names[end:]}}
    base = NamedTuple(f"Linear{record.__name__}", [*fields.items()])  # type: ignore[misc]  # made from another
    made = type(base.__name__, (Fused, base), {"record": record, "__annotations__": fields, "__doc__": f"{record.__name__}, fused."})
    KINDS[made] = kind._replace(
        folder="",
        operator=f"linear_{kind.operator}",
        kept=tuple(name for name in kind.kept if name != "divisor"),
        differentiable=("input", "head", "head_bias"),
    )
    return made


FUSED: dict[type, Any] = {record: _fused(record) for record in (ElementCall, RowCall, DivergenceCall, TopKCall)}
"""The record of fused calls by the template's."""


def fused(call: Any, head: Head, teacher: Head | None, settings: Settings) -> Any:
    """Return the fused call of a checked call on `head.logits`, and of a divergence perhaps on those of a teacher.

    Raises:
        TypeError: the template needs all logits at once.
    """
    if type(call) not in FUSED:
        raise TypeError(f"only losses of rows or elements and divergences can be fused with a linear layer, got {call.loss}")
    given = call._asdict()
    del given["x"]
    if teacher is not None:
        given.update(zip(TEACHER, teacher, strict=True), target=None)
    elif isinstance(call, DivergenceCall):
        given.update(dict.fromkeys(TEACHER))
    return FUSED[type(call)](**given, input=head.input, head=head.weight, head_bias=head.bias, **settings._asdict())
