"""Losses of one's own: a formula becomes a function and a module that keep every promise of the losses here."""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from torch import Tensor, nn

from lossforge import kernels
from lossforge.kernels.call import Formulas
from lossforge.losses import checks
from lossforge.losses.custom.error import FormulaError
from lossforge.losses.formulas import FORMULAS, Formula
from lossforge.losses.functional.box import box_loss
from lossforge.losses.functional.common import BoxOptions, ElementwiseOptions
from lossforge.losses.functional.elementwise import elementwise_loss
from lossforge.losses.functional.rowwise import RowOptions, rowwise_loss, total
from lossforge.losses.modules.common import BoxModule, ElementwiseModule, LossModule, RowModule
from lossforge.losses.registry import Loss
from lossforge.losses.repeat import repeated
from lossforge.losses.types import Reduction

if TYPE_CHECKING:
    from lossforge.losses.custom.source import Source

Twin = Callable[..., Tensor]


class CustomLoss:
    """A loss made of a formula: call it as a function, or take `module(...)`.

    loss: what the registry holds of the losses here. gradient: "given" by the formula, or "derived" from it. hyper: the
    hyper-parameters and their defaults.
    """

    def __init__(self, source: "Source", loss: Loss, gradient: str) -> None:
        self.loss, self.gradient, self.hyper = loss, gradient, dict(loss.hyper)
        self.__name__, self.__qualname__ = source.name, source.name
        self.__module__, self.__doc__ = loss.name.rpartition(":")[0], inspect.getdoc(loss.function)
        self.function = loss.function

    def __call__(self, input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.function(input, target, **options)

    def module(self, *, reduction: Reduction = "mean", **options: Any) -> "CustomModule":
        """The loss as a module that keeps these options: hyper-parameters and those that every loss has."""
        return CustomModule(self, reduction, options)

    def reference(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss in plain torch, on any device."""
        return self.loss.reference(*args, **kwargs)

    def __repr__(self) -> str:
        hyper = ", ".join(f"{k}={v}" for k, v in self.hyper.items())
        return f"<{self.loss.template} loss {self.loss.name}({hyper}), its gradient {self.gradient}>"

    def __reduce__(self) -> str:
        return self.__name__


class CustomModule(LossModule):
    """A loss of one's own as a module."""

    function: CustomLoss

    def __init__(self, loss: CustomLoss, reduction: Reduction, options: dict[str, Any]) -> None:
        if taken := [name for name in loss.hyper if hasattr(CustomModule, name) or name in vars(nn.Module())]:
            raise TypeError(f"{loss.__name__}: a module has an attribute {taken[0]!r} already; call this hyper-parameter differently")
        self.shared = MODULE_OPTIONS[loss.loss.template]
        hyper = {name: options.pop(name, default) for name, default in loss.hyper.items()}
        super().__init__(options, **hyper, reduction=reduction)
        self.function = loss

    def keywords(self, options: Iterable[str]) -> Iterable[str]:
        return options

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor:
        return self.compute(input, target, **per_call)

    if TYPE_CHECKING:  # hyper-parameters have the names that the formula gives them

        def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


MODULE_OPTIONS = {
    "elementwise": ElementwiseModule.shared,
    "rowwise": {**RowModule.shared, "weight": None, "ignore_index": -100},
    "boxes": {**BoxModule.shared, "format": "xyxy"},
}
Domain = Literal["logits", "probabilities"]


@overload
def elementwise(
    *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None, domain: Domain = "logits"
) -> Callable[[Any], CustomLoss]: ...
@overload
def elementwise(
    formula: Any, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None, domain: Domain = "logits"
) -> CustomLoss: ...
def elementwise(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None, domain: Domain = "logits"
) -> CustomLoss | Callable[[Any], CustomLoss]:
    """Make a loss of a formula over elements, for use as a decorator above @triton.jit.

    The formula takes (x, y, *hyper), float32 elements of input and target and the hyper-parameters by position, and returns the value
    or (value, dvalue/dx). It is straight-line mathematics: assignments, arithmetic, triton.language's functions of elements, those of
    lossforge.kernels.math, other such @triton.jit functions, and tl.where in place of branches. tl.tanh and the powers x ** 2, x ** 3 and
    x ** 4, which Triton lacks, are written out. Constants from outside are tl.constexpr. Without a gradient, one is derived and compiled
    into the same kernel.

    Args:
        hyper: the hyper-parameters' names and defaults, in the formula's order. They are keyword arguments of the loss, numbers; the
            last may also be a tensor that broadcasts to the input. Changing one compiles nothing.
        reference: the value in plain torch, (x, y, *hyper) → element-wise values, for CPU tensors, float64, derivatives of the
            target and of second order. By default the formula's operations translated.
        domain: "logits", or "probabilities" where input lies in [0, 1]: what lossforge.losses.check tries.

    Returns: a CustomLoss: loss(input, target, *, reduction="mean", weight=None, **options), with the options of
        lossforge.losses.functional: class indices and mixup pairs in place of a dense target, normalizer, gradient, inplace and so on.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, what the formula lacks, or what CUDA's compiler would refuse.
    """
    if formula is None:
        return lambda formula: elementwise(formula, hyper=hyper, reference=reference, domain=domain)
    checks.one_of("domain", domain, ("logits", "probabilities"))
    made = Made.of(formula, ("x", "y"), 1, hyper, reference, ElementwiseOptions)

    def loss(input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None, **options: Any) -> Tensor:
        values = made.values(options)
        parameter = values.pop() if values and isinstance(values[-1], Tensor) else None
        made.check(values)
        given = cast(ElementwiseOptions, options)  # their names were checked by made.values
        return elementwise_loss(made.name, input, target, values, reduction, given, weight=weight, parameter=parameter)

    return made.finish("elementwise", loss, domain)


@overload
def rowwise(*, hyper: Mapping[str, float] | None = None, reference: Twin | None = None) -> Callable[[Any], CustomLoss]: ...
@overload
def rowwise(formula: Any, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None) -> CustomLoss: ...
def rowwise(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None
) -> CustomLoss | Callable[[Any], CustomLoss]:
    """Make a loss of a formula over rows under a softmax, for use as a decorator above @triton.jit.

    The formula takes (z, *hyper), z = -ln p of the target's class under the softmax of a row, and returns φ(z) or (φ, φ′); L = w_t φ(z).
    Otherwise as `elementwise`: what it may hold, what is derived, hyper, reference: (z, *hyper) → φ.

    Returns: a CustomLoss: loss(input, target, *, reduction="mean", weight=None, ignore_index=-100, **options), as cross_entropy: class
        indices or a mixup pair of them, class weights, scale, softcap, z_loss, normalizer, gradient, inplace and so on.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, what the formula lacks, or what CUDA's compiler would refuse.
    """
    if formula is None:
        return lambda formula: rowwise(formula, hyper=hyper, reference=reference)
    made = Made.of(formula, ("z",), 1, hyper, reference, RowOptions, ("ignore_index",))
    if made.gradient == "given":
        made.source.without("zeros_like", "the kernel of long rows has none; write tl.where(z == z, 0.0, 0.0)")

    def loss(
        input: Tensor,
        target: Tensor,
        *,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **options: Any,
    ) -> Tensor:
        values = made.values(options)
        made.check(values)
        given: RowOptions = options  # type: ignore[assignment]  # their names were checked
        return total(
            rowwise_loss(made.name, input, target, values, reduction, given, weight=weight, ignore_index=ignore_index, probabilities=False)
        )

    return made.finish("rowwise", loss, without=("probabilities", "label_smoothing"))


@overload
def boxes(*, hyper: Mapping[str, float] | None = None, reference: Twin | None = None) -> Callable[[Any], CustomLoss]: ...
@overload
def boxes(formula: Any, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None) -> CustomLoss: ...
def boxes(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None
) -> CustomLoss | Callable[[Any], CustomLoss]:
    """Make a loss of a formula over pairs of boxes, for use as a decorator above @triton.jit.

    The formula takes the corners of both, (x1, y1, x2, y2, u1, v1, u2, v2, *hyper), and returns the value of the pair, or that and its
    eight derivatives. Otherwise as `elementwise`; reference: (boxes1, boxes2, *hyper), boxes (..., 4), → (...).

    Returns: a CustomLoss: loss(boxes1, boxes2, *, reduction="mean", weight=None, format="xyxy", **options), as box_iou_loss.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, what the formula lacks, or what CUDA's compiler would refuse.
    """
    if formula is None:
        return lambda formula: boxes(formula, hyper=hyper, reference=reference)
    made = Made.of(formula, CORNERS, len(CORNERS), hyper, reference, BoxOptions, ("format",))

    def loss(
        boxes1: Tensor, boxes2: Tensor, *, reduction: str = "mean", weight: Tensor | None = None, format: str = "xyxy", **options: Any
    ) -> Tensor:
        values = made.values(options)
        made.check(values)
        given: BoxOptions = options  # type: ignore[assignment]  # their names were checked
        return box_loss(made.name, boxes1, boxes2, values, reduction, weight, format, given)

    return made.finish("boxes", loss)


CORNERS = ("x1", "y1", "x2", "y2", "u1", "v1", "u2", "v2")


@dataclass(frozen=True)
class Made:
    """A formula that operators find by its name, its hyper-parameters, the options that its loss takes, and where its gradient is from."""

    source: "Source"
    name: str
    hyper: dict[str, float]
    options: tuple[str, ...]
    gradient: str

    @staticmethod
    def of(
        formula: Any,
        leading: tuple[str, ...],
        variables: int,
        hyper: Mapping[str, float] | None,
        reference: Twin | None,
        options: type,
        further: tuple[str, ...] = (),
    ) -> "Made":
        """leading: the arguments before the hyper-parameters, of which the first `variables` are differentiated."""
        kernels.load("math")
        from lossforge.losses.custom.derive import with_gradients
        from lossforge.losses.custom.source import read, results, written_out

        source, names = read(formula), tuple(hyper or ())
        for name, value in (hyper or {}).items():
            checks.number(f"hyper[{name!r}]", value)
        if len(source.arguments) < len(leading) or source.arguments != [*source.arguments[: len(leading)], *names]:
            raise FormulaError(
                f"{source.name}: its arguments must be {', '.join(leading)} (under any name), then those of hyper in its order"
                f"{': ' if hyper else ', and hyper is empty'}{', '.join(names)}; got ({', '.join(source.arguments)})"
            )
        taken = set(names) & {"input", "target", "boxes1", "boxes2", "reduction", "weight", *options.__annotations__, *further}
        if taken:
            raise FormulaError(
                f"{source.name}: {', '.join(sorted(taken))} is the name of an option that every loss has; call it differently"
            )
        count = results(source)
        if count not in (1, 1 + variables):
            gradient = "gradient" if variables == 1 else f"{variables} derivatives"
            raise FormulaError(f"{source.name}: returns {count} values; a formula returns its value, or (value, {gradient})")
        kernel = written_out(formula) if count > 1 else with_gradients(formula, variables)
        twin = reference or _twin(formula, count > 1, len(leading))
        name = _register(formula, Formula(twin, lambda: Formulas(kernel, heavy=True)))
        return Made(source, name, dict(hyper or {}), tuple(options.__annotations__), "given" if count > 1 else "derived")

    def values(self, options: dict[str, Any]) -> list[Any]:
        """Hyper-parameters taken out of the options."""
        for name in options:
            if name not in self.hyper and name not in self.options:
                raise checks.unexpected(self.source.name, name, (*self.hyper, *self.options))
        return [options.pop(name, default) for name, default in self.hyper.items()]

    def check(self, values: list[Any]) -> None:
        for i, (name, value) in enumerate(zip(self.hyper, values, strict=False)):
            values[i] = checks.number(name, value)

    def finish(self, template: str, function: Callable[..., Tensor], domain: str = "logits", without: tuple[str, ...] = ()) -> CustomLoss:
        function.__name__, function.__doc__ = self.source.name, ast.get_docstring(self.source.definition)
        entry = Loss(
            self.name, template, self.name, repeated(function), CustomModule, hyper=dict(self.hyper), domain=domain, without=without
        )
        return CustomLoss(self.source, entry, self.gradient)


def _twin(formula: Any, several: bool, leading: int) -> Twin:
    """The value in plain torch: of elements, of rows, or of boxes (..., 4)."""
    from lossforge.losses.custom.twin import torch_of

    try:
        translated = torch_of(formula)
    except FormulaError as problem:
        message = str(problem)

        def refuse(*args: Any) -> Tensor:
            raise FormulaError(message)

        return refuse

    def twin(*args: Any) -> Any:
        if leading == len(CORNERS):
            args = (*args[0].unbind(-1), *args[1].unbind(-1), *args[2:])
        found = translated(*args)
        return found[0] if several else found

    return twin


def _register(formula: Any, made: Formula) -> str:
    """The name under which operators find the formula: a new one where a formula of this name exists."""
    base = name = f"{formula.fn.__module__}:{formula.fn.__qualname__}"
    again = 1
    while name in FORMULAS:
        again += 1
        name = f"{base}#{again}"
    FORMULAS[name] = made
    return name
