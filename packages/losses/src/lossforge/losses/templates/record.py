"""What a template is: all that the rest of the package, its tests and tools need to know of one, in a record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

from lossforge import kernels
from lossforge.kernels.call import Call, DivergenceCall, Head, Shape, TopKCall, end_of_tensors
from lossforge.losses.state import KERNEL_DTYPES, backend
from lossforge.losses.templates.docs import TemplateDocs
from lossforge.losses.templates.samples import Make, Sample, large_indices

C = TypeVar("C", bound=Call)
Several = tuple[Tensor | None, ...]
Results = Tensor | tuple[Tensor | None, ...]


def no_samples(make: Make) -> Iterator[Sample]:
    """Yield nothing: the template has no loss in the registry."""
    yield from ()


@dataclass(frozen=True, eq=False)
class Template(Generic[C]):
    """A way to read memory that losses share.

    Attributes:
        name: of its operator, torch.ops.lossforge.<name>, and of its folder of lossforge.kernels, whose launch.py has `forward` and
            `backward`.
        call: the record of a call.
        reference: from a call to its results, in plain torch: for any device and floating dtype, as often differentiable as needed.
        docs: what its losses say of their arguments, and what their modules keep.
        samples: calls that together touch every target, weight, option and layout.
        large: the usual call of rows and classes, for benchmarks.
        results: what a call returns, None for what was not asked for.
        graded: how many of the first results may be differentiated.
        kept: what forward keeps for backward.
        saved: results that backward takes too.
        differentiable: the first tensors of a call, which the kernels differentiate. A gradient has the strides of its tensor.
        fusable: whether a linear layer may give its logits, by chunks of rows.
        by_rows: whether each row or element is a loss with a target that may be a class index, with the options that follow from that.
        ignored: the class index of a row that does not count, where the loss has no option for it.
        without: what its losses lack unless they say otherwise; see registry.Loss.
        variables: what a formula takes before its hyper-parameters.
        slopes: by how many of these, from the first on, it is differentiated.
    """

    name: str
    call: type[C]
    reference: Callable[[C], Results] = field(kw_only=True)
    docs: TemplateDocs = field(kw_only=True)
    samples: Callable[[Make], Iterator[Sample]] = no_samples
    large: Callable[[Make, int, int], Sample] = large_indices
    results: tuple[str, ...] = ("loss",)
    graded: int = 1
    kept: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ("x",)
    fusable: bool = False
    by_rows: bool = False
    ignored: int = -100
    without: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    slopes: int = 1

    @property
    def launches(self) -> Any:
        """What launches its kernels: `forward` and `backward`."""
        return kernels.of_folder(self.name)

    def fields(self) -> dict[str, Any]:
        """Return the types of a call's tensors and numbers, by name."""
        types = self.call.__annotations__
        return {name: Tensor if isinstance(t, TypeVar) else t for name, t in types.items() if name != "loss"}

    @property
    def end(self) -> int:
        """How many tensors a call has."""
        return end_of_tensors(self.call) - 1

    def flat(self, call: C) -> tuple[Several, tuple[Any, ...]]:
        """Return a call's tensors and its numbers."""
        values: tuple[Any, ...] = call[1:]
        return values[: self.end], values[self.end :]

    def of(self, formula: str, tensors: Several, numbers: Sequence[Any]) -> C:
        """Return the call of these tensors and numbers."""
        make: Callable[..., C] = self.call
        return make(formula, *tensors, *numbers)

    def shapes(self, call: C, keep: bool) -> tuple[Shape, ...]:
        """Return shape and dtype of the results and of what forward keeps, None where there is none."""
        return call.shapes(keep)


TEACHER = ("teacher", "teacher_weight", "teacher_bias")


@dataclass(frozen=True, eq=False)
class FusedTemplate(Template[C]):
    """A template whose logits a linear layer gives, and perhaps a teacher's: the layers' tensors take the place of the logits.

    Attributes:
        unfused: the template of the same loss on logits.
        engine: what computes it: `forward` and `backward`.
    """

    unfused: Template[C] = field(kw_only=True)
    engine: Any = field(kw_only=True)

    @staticmethod
    def of_template(template: Template[C], engine: Any) -> "FusedTemplate[C]":
        same = {each.name: getattr(template, each.name) for each in fields(template)}
        own = {
            "name": f"linear_{template.name}",
            "kept": tuple([name for name in template.kept if name != "divisor"]),
            "differentiable": ("input", "head", "head_bias"),
        }
        return FusedTemplate(**{**same, **own}, unfused=template, engine=engine)

    @property
    def launches(self) -> Any:
        return self.engine

    @property
    def layers(self) -> dict[str, Any]:
        """The layers' tensors."""
        own = {"input": Tensor, "head": Tensor, "head_bias": Tensor | None}
        return own | (dict.fromkeys(TEACHER, Tensor | None) if self.call is DivergenceCall else {})

    def fields(self) -> dict[str, Any]:
        types = super().fields()
        names, end = list(types), end_of_tensors(self.call) - 1
        tensors = {name: types[name] for name in names[1:end]}
        if self.call is DivergenceCall:
            tensors["target"] = Tensor | None
        return {**self.layers, **tensors, "chunk": int, "accumulate": int, "wide": bool, **{name: types[name] for name in names[end:]}}

    @property
    def end(self) -> int:
        return end_of_tensors(self.call) - 2 + len(self.layers)

    def flat(self, call: C) -> tuple[Several, tuple[Any, ...]]:
        values: tuple[Any, ...] = call[1:]
        end = end_of_tensors(call) - 1
        head, numbers = values[0], values[end:]
        others = list(values[1:end])
        tensors: list[Tensor | None] = [*head[:3]]
        if isinstance(call, DivergenceCall):
            teacher = others[0]
            tensors += teacher[:3] if isinstance(teacher, Head) else [None] * 3
            others[0] = None if isinstance(teacher, Head) else teacher
        return (*tensors, *others), (head.chunk, head.accumulate, head.wide, *numbers)

    def of(self, formula: str, tensors: Several, numbers: Sequence[Any]) -> C:
        (input, weight, bias), (chunk, accumulate, wide, *rest) = tensors[:3], numbers
        others: list[Any] = [*tensors[3:]]
        assert input is not None
        assert weight is not None
        if self.call is DivergenceCall:
            teacher, teacher_weight, teacher_bias = others[:3]
            others = others[3:]
            if teacher is not None and teacher_weight is not None:
                others[0] = Head(teacher, teacher_weight, teacher_bias)
        make: Callable[..., C] = self.call
        return make(formula, Head(input, weight, bias, chunk, accumulate, wide), *others, *rest)

    def shapes(self, call: C, keep: bool) -> tuple[Shape, ...]:
        known = self.unfused
        shapes = known.shapes(call, keep)
        if torch.float64 in dtypes(call):
            shapes = tuple([(s[0], torch.float64) if isinstance(s, tuple) and s[1] == torch.float32 else s for s in shapes])
        named = dict(zip((*known.results, *known.kept), shapes, strict=True))
        by_kernel = computed_by_kernel(call)
        return *[named[name] for name in self.results], *[named[name] if by_kernel else None for name in self.kept]


def dtypes(call: Any) -> set[torch.dtype]:
    """Return the dtype of the logits and, of a divergence, of the teacher's."""
    return {call.x.dtype, call.target.dtype} if isinstance(call, (DivergenceCall, TopKCall)) else {call.x.dtype}


def computed_by_kernel(call: Any) -> bool:
    """Return whether the loss's kernel goes over the logits of a fused call, not its plain-torch reference."""
    return dtypes(call).issubset(KERNEL_DTYPES) and backend(call.x.input) != "torch"


def first(results: Sequence[Tensor | None]) -> Tensor:
    """Return the loss alone."""
    loss = results[0]
    assert loss is not None
    return loss


def of_one_row(results: Sequence[Tensor | None]) -> Tensor:
    """Return the loss alone, of logits (C,) that were computed as one row."""
    loss = first(results)
    return loss.squeeze(0) if loss.ndim else loss


Deferred = Any
"""The type of a checked call, a `Prepared`, where a definition returns it in place of its result: the entry point computes it."""


class Prepared(NamedTuple):
    """A checked call, to be computed.

    Attributes:
        call: its record.
        options: when and where the gradient is written: `gradient` and `inplace`.
        finish: from the results, None for what was not asked for, to what the public function returns.
    """

    call: Any
    options: Mapping[str, Any]
    finish: Callable[[Sequence[Tensor | None]], Any] = first


def prepared(call: Any, options: Mapping[str, Any], finish: Callable[[Sequence[Tensor | None]], Any] = first) -> Deferred:
    """Return a checked call to be computed: see `Prepared`."""
    return Prepared(call, options, finish)
