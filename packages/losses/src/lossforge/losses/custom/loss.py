"""Losses of one's own: a formula becomes a function and a module that keep every promise of the losses here."""

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, get_args, overload

from torch import Tensor, nn

from lossforge import kernels
from lossforge.kernels.call import BoxCall, ElementCall, Formulas
from lossforge.losses import checks
from lossforge.losses.custom.error import FormulaError
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.formulas import formula as enter_formula
from lossforge.losses.registry import Loss
from lossforge.losses.repeat import repeated
from lossforge.losses.templates.box import box_loss
from lossforge.losses.templates.element import elementwise_loss
from lossforge.losses.templates.module import BoxModule, ElementModule, LossModule, Module, RowModule, constructor_of, shown
from lossforge.losses.templates.options import CornerOptions, ElementwiseOptions
from lossforge.losses.templates.row import ClassOptions, class_loss
from lossforge.losses.types import Reduction

if TYPE_CHECKING:
    from lossforge.losses.custom.source import Source

Reference = Callable[..., Tensor]
Domain = Literal["logits", "probabilities"]
CORNERS = ("x1", "y1", "x2", "y2", "u1", "v1", "u2", "v2")


class CustomLoss:
    """A loss made of a formula: call it as a function, or take `module(...)`.

    Attributes:
        loss: what the registry holds of the losses here.
        gradient: "given" by the formula, or "derived" from it.
        hyper: the hyper-parameters and their defaults.
    """

    __name__: str

    def __init__(self, loss: Loss, gradient: str, base: type[LossModule]) -> None:
        self.loss, self.gradient, self.hyper, self.function = loss, gradient, dict(loss.hyper), loss.function
        functools.update_wrapper(self, loss.function, updated=())
        self.__module__ = loss.name.rpartition(":")[0]
        self.constructor, self.shared = constructor_of(loss.function, base, Module(self.__name__, "", kept=(*self.hyper,)))

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
        self.function, self.signature, self.shared = loss, loss.constructor, loss.shared
        super().__init__(reduction=reduction, **options)

    if TYPE_CHECKING:  # hyper-parameters have the names that the formula gives them

        def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def _of_elements(
    formula: str,
    hyper: dict[str, Any],
    input: Tensor,
    target: Tensor,
    *,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    names = list(hyper)
    parameter = hyper.pop(names[-1]) if names and isinstance(hyper[names[-1]], Tensor) else None
    call = ElementCall(formula, input, target, weight=weight, parameter=parameter, hyper=_numbers(hyper), reduction=reduction)
    return elementwise_loss(call, options)


def _of_rows(
    formula: str,
    hyper: dict[str, Any],
    input: Tensor,
    target: Tensor,
    *,
    reduction: Reduction = "mean",
    **options: Unpack[ClassOptions],
) -> Tensor:
    return class_loss(formula, input, target, _numbers(hyper), reduction, options)


def _of_boxes(
    formula: str,
    hyper: dict[str, Any],
    boxes1: Tensor,
    boxes2: Tensor,
    *,
    reduction: Reduction = "mean",
    **options: Unpack[CornerOptions],
) -> Tensor:
    return box_loss(BoxCall(formula, boxes1, boxes2, hyper=_numbers(hyper), reduction=reduction), options)


def _numbers(hyper: dict[str, Any]) -> list[float]:
    return [checks.number(name, value) for name, value in hyper.items()]


class Template(NamedTuple):
    """A template, as formulas enter it.

    compute: (formula, hyper-parameters, the two tensors, options). leading: the formula's arguments before the hyper-parameters, of which
    the first `variables` are differentiated.
    """

    name: str
    compute: Callable[..., Tensor]
    leading: tuple[str, ...]
    variables: int
    base: type[LossModule]
    without: tuple[str, ...] = ()


ELEMENTS = Template("elementwise", _of_elements, ("x", "y"), 1, ElementModule)
ROWS = Template("rowwise", _of_rows, ("z",), 1, RowModule, ("probabilities", "label_smoothing"))
BOXES = Template("boxes", _of_boxes, CORNERS, len(CORNERS), BoxModule)


@overload
def elementwise(
    *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None, domain: Domain = "logits"
) -> Callable[[Any], CustomLoss]: ...
@overload
def elementwise(
    formula: Any, /, *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None, domain: Domain = "logits"
) -> CustomLoss: ...
def elementwise(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None, domain: Domain = "logits"
) -> CustomLoss | Callable[[Any], CustomLoss]:
    """Make a loss of a formula over elements, for use as a decorator above @triton.jit.

    The formula takes (x, y, *hyper), float32 elements of input and target and the hyper-parameters by position, and returns the value
    or (value, dvalue/dx). It is straight-line mathematics: assignments, arithmetic, triton.language's functions of elements, those of
    lossforge.kernels.math, other such @triton.jit functions, and tl.where in place of branches. tl.tanh and the powers x ** 2, x ** 3 and
    x ** 4, which Triton lacks, are written out. Constants from outside are tl.constexpr. Without a gradient, one is derived and compiled
    into the same kernel.

    Args:
        formula: the @triton.jit function; None where the decorator has arguments.
        hyper: the hyper-parameters' names and defaults, in the formula's order. They are keyword arguments of the loss, numbers; the
            last may also be a tensor that broadcasts to the input. Changing one compiles nothing.
        reference: the value in plain torch, (x, y, *hyper) → element-wise values, for CPU tensors, float64, derivatives of the
            target and of second order. By default the formula's operations translated.
        domain: "logits", or "probabilities" where input lies in [0, 1]: what lossforge.losses.check tries.

    Returns:
        a CustomLoss: loss(input, target, *, reduction="mean", weight=None, **options), with the options of lossforge.losses.l1_loss: class
        indices and mixup pairs in place of a dense target, normalizer, gradient, inplace and so on.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, what the formula lacks, or what CUDA's compiler would refuse.

    Examples:
        In a file of its own, of which the source is read (docs/learn/write_your_own_loss.md):

        >>> @elementwise(hyper={"delta": 1.0})
        ... @triton.jit
        ... def charbonnier(x, y, delta):
        ...     return tl.sqrt((x - y) * (x - y) + delta * delta) - delta
        >>> charbonnier(logits, target, delta=0.5).backward()
    """
    if formula is None:
        return lambda formula: elementwise(formula, hyper=hyper, reference=reference, domain=domain)
    checks.one_of("domain", domain, get_args(Domain))
    return _made(ELEMENTS, formula, dict(hyper or {}), reference, domain)


@overload
def rowwise(*, hyper: Mapping[str, float] | None = None, reference: Reference | None = None) -> Callable[[Any], CustomLoss]: ...
@overload
def rowwise(formula: Any, /, *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None) -> CustomLoss: ...
def rowwise(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None
) -> CustomLoss | Callable[[Any], CustomLoss]:
    """Make a loss of a formula over rows under a softmax, for use as a decorator above @triton.jit.

    The formula takes (z, *hyper), z = -ln p of the target's class under the softmax of a row, and returns φ(z) or (φ, φ′); L = w_t φ(z).
    Otherwise as `elementwise`: what it may hold, what is derived, hyper, reference: (z, *hyper) → φ.

    Args:
        formula: the @triton.jit function; None where the decorator has arguments.
        hyper: as for `elementwise`.
        reference: the value in plain torch, (z, *hyper) → φ. By default the formula's operations translated.

    Returns:
        a CustomLoss: loss(input, target, *, reduction="mean", weight=None, ignore_index=-100, **options), as cross_entropy: class
        indices or a mixup pair of them, class weights, scale, softcap, z_loss, normalizer, gradient, inplace and so on.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, what the formula lacks, or what CUDA's compiler would refuse.

    Examples:
        In a file of its own, of which the source is read (docs/learn/write_your_own_loss.md):

        >>> @rowwise(hyper={"q": 0.7})
        ... @triton.jit
        ... def generalized(z, q):
        ...     return (1.0 - tl.exp(-q * z)) / q
        >>> generalized(logits, classes, q=0.5).backward()
    """
    if formula is None:
        return lambda formula: rowwise(formula, hyper=hyper, reference=reference)
    return _made(ROWS, formula, dict(hyper or {}), reference)


@overload
def boxes(*, hyper: Mapping[str, float] | None = None, reference: Reference | None = None) -> Callable[[Any], CustomLoss]: ...
@overload
def boxes(formula: Any, /, *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None) -> CustomLoss: ...
def boxes(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Reference | None = None
) -> CustomLoss | Callable[[Any], CustomLoss]:
    """Make a loss of a formula over pairs of boxes, for use as a decorator above @triton.jit.

    The formula takes the corners of both, (x1, y1, x2, y2, u1, v1, u2, v2, *hyper), and returns the value of the pair, or that and its
    eight derivatives. Otherwise as `elementwise`; reference: (boxes1, boxes2, *hyper), boxes (..., 4), → (...).

    Args:
        formula: the @triton.jit function; None where the decorator has arguments.
        hyper: as for `elementwise`.
        reference: the value in plain torch, (boxes1, boxes2, *hyper), boxes (..., 4), → (...). By default the formula's operations
            translated.

    Returns:
        a CustomLoss: loss(boxes1, boxes2, *, reduction="mean", weight=None, format="xyxy", **options), as box_iou_loss.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, what the formula lacks, or what CUDA's compiler would refuse.

    Examples:
        In a file of its own, of which the source is read (docs/learn/write_your_own_loss.md):

        >>> @boxes
        ... @triton.jit
        ... def corners(x1, y1, x2, y2, u1, v1, u2, v2):
        ...     return tl.abs(x1 - u1) + tl.abs(y1 - v1) + tl.abs(x2 - u2) + tl.abs(y2 - v2)
        >>> corners(boxes1, boxes2).backward()
    """
    if formula is None:
        return lambda formula: boxes(formula, hyper=hyper, reference=reference)
    return _made(BOXES, formula, dict(hyper or {}), reference)


def _made(template: Template, formula: Any, hyper: dict[str, float], reference: Reference | None, domain: str = "logits") -> CustomLoss:
    kernels.load("math")
    from lossforge.losses.custom.derive import differentiated
    from lossforge.losses.custom.source import read, results

    source = read(formula)
    *first, rest = list(inspect.signature(template.compute).parameters.values())[2:]
    _check_arguments(source, template, hyper, {*(p.name for p in first), *get_args(rest.annotation)[0].__annotations__})
    kernel, given = differentiated(formula, template.variables), results(source) > 1
    if given and template is ROWS:
        source.without("zeros_like", "the kernel of long rows has none; write tl.where(z == z, 0.0, 0.0)")
    name = _new_name(formula)
    enter_formula(name, lambda of: Formulas(kernel, heavy=True))(reference or _translated(formula, given, template is BOXES))

    accepted = [*hyper, *(p.name for p in first[2:]), *get_args(rest.annotation)[0].__annotations__]

    known = (*accepted, *(p.name for p in first), "linear")

    def loss(*tensors: Tensor, **options: Any) -> Tensor:
        for each in options:
            if each not in known:
                raise checks.unexpected(source.name, each, accepted)
        numbers = {each: options.pop(each, default) for each, default in hyper.items()}
        return template.compute(name, numbers, *tensors, **options)

    loss.__name__ = loss.__qualname__ = source.name
    loss.__doc__ = ast.get_docstring(source.definition)
    own = [Parameter(each, Parameter.KEYWORD_ONLY, default=default, annotation=float) for each, default in hyper.items()]
    public = repeated(loss)
    public.__signature__ = Signature([*first, *own, rest], return_annotation=Tensor)  # type: ignore[attr-defined]  # inspect reads it
    shown(template.base.settings)(public)
    entry = Loss(name, template.name, name, public, CustomModule, hyper, domain=domain, without=template.without)
    return CustomLoss(entry, "given" if given else "derived", template.base)


def _check_arguments(source: "Source", template: Template, hyper: Mapping[str, float], taken: set[str]) -> None:
    """taken: names that the loss has itself."""
    for name, value in hyper.items():
        checks.number(f"hyper[{name!r}]", value)
    leading = template.leading
    if len(source.arguments) < len(leading) or source.arguments[len(leading) :] != [*hyper]:
        raise FormulaError(
            f"{source.name}: its arguments must be {', '.join(leading)} (under any name), then those of hyper in its order"
            f"{': ' if hyper else ', and hyper is empty'}{', '.join(hyper)}; got ({', '.join(source.arguments)})"
        )
    if both := {*hyper} & {*taken, "input", "target", "boxes1", "boxes2"}:
        raise FormulaError(f"{source.name}: {', '.join(sorted(both))} is the name of an option that every loss has; call it differently")


def _translated(formula: Any, several: bool, of_boxes: bool) -> Reference:
    """The value in plain torch: of elements, of rows, or of boxes (..., 4)."""
    from lossforge.losses.custom.twin import torch_of

    try:
        translated = torch_of(formula)
    except FormulaError as problem:
        message = str(problem)

        def refuse(*args: Any) -> Tensor:
            raise FormulaError(message)

        return refuse

    def translated_reference(*args: Any) -> Any:
        if of_boxes:
            args = (*args[0].unbind(-1), *args[1].unbind(-1), *args[2:])
        found = translated(*args)
        return found[0] if several else found

    return translated_reference


def _new_name(formula: Any) -> str:
    """The name under which operators find the formula: a new one where a formula of this name exists."""
    base = name = f"{formula.fn.__module__}:{formula.fn.__qualname__}"
    again = 1
    while name in FORMULAS:
        again += 1
        name = f"{base}#{again}"
    return name
