"""What a template is: all that the rest of the package, its tests and tools need to know of one, in a record.

It says what its losses' docstrings share, which tools/generate.py puts into the public functions, and makes samples of calls.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

from lossforge import kernels
from lossforge.kernels.call import Call, Head, Shape, end_of_tensors
from lossforge.losses.base.state import KERNEL_DTYPES, backend
from lossforge.losses.formulas import has_kernel

C = TypeVar("C", bound=Call)
R = TypeVar("R", default=Tensor)
"""What a public function returns."""
Several = tuple[Tensor | None, ...]
Results = Tensor | tuple[Tensor | None, ...]


SCALAR = "a scalar, in float32 (float64 for float64)"


SETTINGS = {"empty": "nan", "gradient": None, "inplace": False, "validate": None, "dim": -1, "scale": 1.0, "softcap": None, "z_loss": 0.0}
"""Options that functions take as further keywords and modules keep, with their defaults."""


class Keeping(NamedTuple):
    """Which options the modules of a template keep.

    settings: options of the template, with their defaults. per_call: names of the function's own parameters that belong to a call.
    quiet: those that are shown only where they have other values. forward: the tensors of a call.
    """

    settings: Mapping[str, Any] = SETTINGS
    per_call: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    forward: str = "input: Tensor, target: Tensor"


KEPT = Keeping()
"""What modules keep by default."""


@dataclass(frozen=True)
class TemplateDocs:
    """What the losses of a template say, and what their modules keep.

    Attributes:
        arguments: the meaning of each argument that they share.
        returns: what they return.
        example: what an example makes, and the arguments of the call that follows; None where each loss has one.
        targets: what they take as targets, in the README's words.
        keeping: which options their modules keep.
        autocast: whether their functions follow autocast, as a product does.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    returns: str = ""
    example: tuple[str, str] | None = None
    targets: str = ""
    keeping: Keeping = KEPT
    autocast: bool = False


@dataclass(frozen=True)
class Sample:
    """One call of a loss: function(x, target, **kwargs)."""

    name: str
    x: Tensor
    target: Tensor | None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        """Return the same call with every floating tensor but x changed."""

        def changed(v: Any) -> Any:
            return change(v) if isinstance(v, Tensor) and v.is_floating_point() else v

        return Sample(self.name, self.x, changed(self.target), {k: changed(v) for k, v in self.kwargs.items()})


def cosines(x: Tensor) -> Tensor:
    """Return numbers as small as the cosines of random features."""
    return torch.tanh(x / 20)


DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "probabilities": torch.sigmoid,
    "log-probabilities": torch.nn.functional.logsigmoid,
    "cosines": cosines,
    "rates": torch.nn.functional.softplus,
}
"""From numbers of any size to those of a domain."""


class Make:
    """Random tensors on a device, always the same. third: the name of a loss's third tensor, where it must have one."""

    def __init__(self, device: str, dtype: torch.dtype, domain: str = "logits", seed: int = 0, third: str = "") -> None:
        self.device, self.dtype, self.domain, self.third = device, dtype, domain, third
        self.generator = torch.Generator().manual_seed(seed)

    def logits(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator) * 2
        of_domain = DOMAINS.get(self.domain)
        return (x if of_domain is None else of_domain(x)).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device, self.dtype)

    def boxes(self, *shape: int) -> Tensor:
        """Corners of valid boxes, of which many overlap; as (cx, cy, w, h) they are valid too."""
        low, sides = (torch.rand((*shape, 2), generator=self.generator) for _ in range(2))
        return torch.cat([low * 100, low * 100 + sides * 60 + 1], -1).to(self.device, self.dtype)

    def tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def index(self, low: int, classes: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, classes, shape, generator=self.generator).to(self.device, dtype)


def no_samples(make: Make) -> Iterator[Sample]:
    """Yield nothing: the template has no loss in the registry."""
    yield from ()


@dataclass(frozen=True)
class Fusing(Generic[C]):
    """How calls of a template are computed whose logits a linear layer gives, by chunks of rows or classes.

    Attributes:
        divisor: from a call with a mean to what that divides by: a tensor where the device counts it.
        rows: the tensors of a call with an entry a row, in dimension 0.
        elements: the tensors that broadcast to the logits.
        classes: the tensors with an entry a class.
        teacher: whether a layer may give `target` too.
        by_classes: whether backward may go by classes, once it knows the statistics of the rows.
        product: whether lossforge.kernels.linear computes these losses inside its product; backward by classes then takes `columns`.
        factor: from a call with a mean to what its sum is multiplied by before it is divided.
    """

    divisor: Callable[[C], Tensor | int]
    rows: tuple[str, ...]
    elements: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    teacher: bool = False
    by_classes: bool = True
    product: bool = False
    factor: Callable[[C], float] = operator.attrgetter("loss_scale")


@dataclass(frozen=True, eq=False)
class Template(Generic[C]):
    """A way to read memory that losses share.

    Attributes:
        name: of its operator, torch.ops.lossforge.<name>.
        module: of lossforge.kernels, which has `forward` and `backward`.
        call: the record of a call.
        reference: from a call to its results, in plain torch: for any device and floating dtype, as often differentiable as needed.
        docs: what its losses say of their arguments, and what their modules keep.
        samples: calls that together touch every target, weight, option and layout.
        results: what a call returns, None for what was not asked for.
        graded: how many of the first results may be differentiated.
        kept: what forward keeps for backward.
        saved: results that backward takes too.
        differentiable: the first tensors of a call, which the kernels differentiate. A gradient has the strides of its tensor.
        typed: the tensors beside the first whose dtypes, too, must be the kernels'.
        filled: the tensors beside the first without whose elements there is nothing to launch.
        fusing: how a linear layer gives its logits, where one may.
        by_rows: whether each row or element is a loss with a target that may be a class index, with the options that follow from that.
        ignored: the class index of a row that does not count, where the loss has no option for it.
        without: what its losses lack unless they say otherwise; see registry.Loss.
        variables: what a formula takes before its hyper-parameters.
        slopes: by how many of these, from the first on, it is differentiated.
    """

    name: str
    module: str
    call: type[C]
    reference: Callable[[C], Results] = field(kw_only=True)
    docs: TemplateDocs = field(kw_only=True)
    samples: Callable[[Make], Iterator[Sample]] = no_samples
    results: tuple[str, ...] = ("loss",)
    graded: int = 1
    kept: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ("x",)
    typed: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    fusing: Fusing[C] | None = None
    by_rows: bool = False
    ignored: int = -100
    without: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    slopes: int = 1

    @functools.cached_property
    def launches(self) -> Any:
        """What launches its kernels: `forward` and `backward`. Triton is imported when they are first needed."""
        return kernels.load(self.module)

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
        end = self.end
        return values[:end], values[end:]

    def of(self, formula: str, tensors: Several, numbers: Sequence[Any]) -> C:
        """Return the call of these tensors and numbers."""
        make: Callable[..., C] = self.call
        return make(formula, *tensors, *numbers)

    def shapes(self, call: C, keep: bool) -> tuple[Shape, ...]:
        """Return shape and dtype of the results and of what forward keeps, None where there is none."""
        return call.shapes(keep)

    def launchable(self, call: C) -> bool:
        """Return whether the kernels take the tensors of a call beside its first, by their dtypes and sizes."""
        for name in self.typed:
            if getattr(call, name).dtype not in KERNEL_DTYPES:
                return False
        for name in self.filled:  # noqa: SIM110  # see state.plain
            if getattr(call, name).numel() == 0:
                return False
        return True


TEACHER = ("teacher", "teacher_weight", "teacher_bias")


@dataclass(frozen=True, eq=False)
class FusedTemplate(Template[C]):
    """A template whose logits a linear layer gives, and perhaps a teacher's: the layers' tensors take the place of the logits.

    Attributes:
        fusing: of the template.
        unfused: the template of the same loss on logits.
        engine: what computes it: `forward` and `backward`.
    """

    fusing: Fusing[C] = field(kw_only=True)
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
        return own | (dict.fromkeys(TEACHER, Tensor | None) if self.fusing.teacher else {})

    def fields(self) -> dict[str, Any]:
        types = super().fields()
        names, end = list(types), end_of_tensors(self.call) - 1
        tensors = {name: types[name] for name in names[1:end]}
        if self.fusing.teacher:
            tensors["target"] = Tensor | None
        return {**self.layers, **tensors, "chunk": int, "accumulate": int, "logits": int, **{name: types[name] for name in names[end:]}}

    @property
    def end(self) -> int:
        return end_of_tensors(self.call) - 2 + len(self.layers)

    def flat(self, call: C) -> tuple[Several, tuple[Any, ...]]:
        values: tuple[Any, ...] = call[1:]
        end = end_of_tensors(call) - 1
        head, numbers = values[0], values[end:]
        others = list(values[1:end])
        tensors: list[Tensor | None] = [*head.parts]
        if self.fusing.teacher:
            teacher = others[0]
            tensors += teacher.parts if isinstance(teacher, Head) else [None] * 3
            others[0] = None if isinstance(teacher, Head) else teacher
        return (*tensors, *others), (*head.numbers, *numbers)

    def of(self, formula: str, tensors: Several, numbers: Sequence[Any]) -> C:
        (input, weight, bias), (chunk, accumulate, logits, *rest) = tensors[:3], numbers
        others: list[Any] = [*tensors[3:]]
        assert input is not None
        assert weight is not None
        if self.fusing.teacher:
            teacher, teacher_weight, teacher_bias = others[:3]
            others = others[3:]
            if teacher is not None and teacher_weight is not None:
                others[0] = Head(teacher, teacher_weight, teacher_bias)
        make: Callable[..., C] = self.call
        return make(formula, Head(input, weight, bias, chunk, accumulate, logits), *others, *rest)

    def shapes(self, call: C, keep: bool) -> tuple[Shape, ...]:
        known = self.unfused
        shapes = known.shapes(call, keep)
        if torch.float64 in self.dtypes(call):
            shapes = tuple([(s[0], torch.float64) if isinstance(s, tuple) and s[1] == torch.float32 else s for s in shapes])
        named = dict(zip((*known.results, *known.kept), shapes, strict=True))
        by_kernel = self.computed_by_kernel(call)
        return *[named[name] for name in self.results], *[named[name] if by_kernel else None for name in self.kept]

    def dtypes(self, call: Any) -> set[torch.dtype]:
        """Return the dtype of the logits and, where there is one, of the teacher's."""
        return {call.x.dtype, *[getattr(call, name).dtype for name in self.typed]}

    def computed_by_kernel(self, call: Any) -> bool:
        """Return whether the loss's kernel goes over the logits of a call, not its plain-torch reference."""
        return self.dtypes(call).issubset(KERNEL_DTYPES) and backend(call.x.input) != "torch" and has_kernel(call.loss)


def first(results: Sequence[Tensor | None]) -> Tensor:
    """Return the loss alone."""
    loss = results[0]
    assert loss is not None
    return loss


def of_single_row(finish: Callable[[Sequence[Tensor | None]], R], results: Sequence[Tensor | None]) -> R:
    """Return what `finish` makes of the results of logits (C,) that were computed as one row."""
    return finish([t if t is None or t.ndim == 0 else t.squeeze(0) for t in results])


def of_one_row(results: Sequence[Tensor | None]) -> Tensor:
    """Return the loss alone, of logits (C,) that were computed as one row."""
    loss = first(results)
    return loss.squeeze(0) if loss.ndim else loss


def rebuilt(call: C) -> C:
    """Return an equal record, without `_replace`: torch.compile cannot carry what that makes over a graph break."""
    made: Callable[..., C] = type(call)
    return made(*call[:])


Finish = Callable[[Sequence[Tensor | None]], R]
"""From the results, None for what was not asked for, to what a public function returns."""


class CheckedCall(NamedTuple, Generic[C, R]):
    """A checked call, to be computed: what a definition returns.

    Attributes:
        call: its record.
        options: when and where the gradient is written: `gradient` and `inplace`.
        finish: from the results, None for what was not asked for, to what the public function returns: by default the loss alone.
    """

    call: C
    options: Mapping[str, Any]
    finish: Callable[[Sequence[Tensor | None]], R]

    def returning(self, finish: Callable[[Sequence[Tensor | None]], Any]) -> "CheckedCall[C, Any]":
        """Return the call with another `finish`, which gets one row's results as those of logits (C,) where that is what they are."""
        one_row = self.finish is of_one_row
        return CheckedCall(self.call, self.options, functools.partial(of_single_row, finish) if one_row else finish)
