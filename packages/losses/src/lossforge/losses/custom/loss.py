"""Custom losses: a formula becomes a function and a module with everything that the library's losses offer."""

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

import torch
from torch import Tensor, nn

from lossforge import kernels
from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, constructor_of, whole_signature
from lossforge.losses.base.module import LossModule, OfFunction
from lossforge.losses.base.option_types import Reduction
from lossforge.losses.base.options import CornerOptions, WeightedElementwiseOptions
from lossforge.losses.base.record import CheckedCall, Template
from lossforge.losses.custom.written import with_written_gradient
from lossforge.losses.engine.calls import entry_point
from lossforge.losses.formulas import FORMULAS, DeviceFormula
from lossforge.losses.formulas import formula as enter_formula
from lossforge.losses.formulas.error import FormulaError
from lossforge.losses.registry import Loss
from lossforge.losses.templates.boxes import BOXES, box_loss
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss, with_parameter
from lossforge.losses.templates.rowwise import OF_POWERS, ROWWISE, OwnOptions, own_loss

if TYPE_CHECKING:
    from lossforge.losses.formulas.source import Source

Hyper = Mapping[str, float] | None
Reference = Callable[..., Any]
Decorator = Callable[[Any], "CustomLoss"]
Domain = Literal["logits", "probabilities"]


class CustomLoss(OfFunction):
    """A loss made from a formula: call it as a function, or make a module with `module(...)`.

    Attributes:
        loss: its entry, as the library's losses have one in the registry.
        gradient: "given" by the formula, or "derived" from it.
        hyper: the hyper-parameters and their defaults.
    """

    __name__: str

    def __init__(self, loss: Loss, gradient: str, short: Signature) -> None:
        self.loss, self.gradient, self.hyper, self.function = loss, gradient, dict(loss.hyper), loss.function
        functools.update_wrapper(self, loss.function, updated=())
        self.__module__ = loss.name.rpartition(":")[0]
        how = Module(self.__name__, "", kept=(*self.hyper,))
        self.constructor, self.shared = constructor_of(short, loss.template.docs.keeping, how)

    def __call__(self, input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.function(input, target, **options)

    def module(self, *, reduction: Reduction = "mean", **options: Any) -> "CustomModule":
        """Make a module that keeps these options: hyper-parameters, and the options that every loss has."""
        return CustomModule(self, reduction, options)

    def reference(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss in plain torch, on any device."""
        return self.loss.reference(*args, **kwargs)

    def __repr__(self) -> str:
        hyper = ", ".join(f"{k}={v}" for k, v in self.hyper.items())
        return f"<{self.loss.template.name} loss {self.loss.name}({hyper}), its gradient {self.gradient}>"

    def __reduce__(self) -> str:
        return self.__name__


class CustomModule(LossModule):
    """A custom loss as a module."""

    function: CustomLoss

    def __init__(self, loss: CustomLoss, reduction: Reduction, options: dict[str, Any]) -> None:
        if taken := [name for name in loss.hyper if hasattr(CustomModule, name) or name in vars(nn.Module())]:
            raise TypeError(f"{loss.__name__}: a module has an attribute {taken[0]!r} already; call this hyper-parameter differently")
        accepted = loss.constructor.parameters
        checks.only(accepted, options, type(self).__name__)
        self.function, self.shared = loss, loss.shared
        given = {"reduction": reduction, **options}
        names = dict.fromkeys(("reduction", *loss.shared, *accepted))
        super().__init__(**{name: given.get(name, accepted[name].default) for name in names})

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Any:
        return self.compute(input, target, **per_call)

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
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    last = hyper.popitem() if hyper else None
    numbers = _numbers(hyper)
    numbers, parameter = (numbers, None) if last is None else with_parameter(numbers, *last, input)
    call = ElementwiseCall(formula, input, target, parameter=parameter, hyper=numbers, reduction=reduction)
    return elementwise_loss(call, options)


def _of_rows(
    power: str | None,
    formula: str,
    hyper: dict[str, Any],
    input: Tensor,
    target: Tensor,
    *,
    reduction: Reduction = "mean",
    **options: Unpack[OwnOptions],
) -> CheckedCall[RowwiseCall]:
    return own_loss(RowwiseCall(formula, input, target, reduction=reduction), hyper, power, options)


def _of_boxes(
    formula: str,
    hyper: dict[str, Any],
    boxes1: Tensor,
    boxes2: Tensor,
    *,
    reduction: Reduction = "mean",
    **options: Unpack[CornerOptions],
) -> CheckedCall[BoxesCall]:
    return box_loss(BoxesCall(formula, boxes1, boxes2, hyper=_numbers(hyper), reduction=reduction), options)


def _numbers(hyper: dict[str, Any]) -> list[float]:
    return [checks.number(name, value) for name, value in hyper.items()]


Definition = Callable[..., CheckedCall[Any]]
"""(formula, hyper-parameters, the two tensors, options) → a checked call."""


@overload
def elementwise(*, hyper: Hyper = None, reference: Reference | None = None, domain: Domain = "logits") -> Decorator: ...
@overload
def elementwise(formula: Any, /, *, hyper: Hyper = None, reference: Reference | None = None, domain: Domain = "logits") -> CustomLoss: ...
def elementwise(
    formula: Any = None, /, *, hyper: Hyper = None, reference: Reference | None = None, domain: Domain = "logits"
) -> CustomLoss | Decorator:
    """Make a loss of a formula over elements, for use as a decorator above @triton.jit.

    The formula takes float32 elements of input and target and the hyper-parameters, all by position: (x, y, *hyper). It returns the value
    or (value, dvalue/dx). It is straight-line mathematics: assignments, arithmetic, triton.language's functions of elements, functions of
    lossforge.kernels.math, other such @triton.jit functions, and tl.where in place of branches. tl.tanh and the powers x ** 2, x ** 3 and
    x ** 4, which Triton lacks, are written out. Constants from outside must be tl.constexpr. If the formula returns no gradient, one is
    derived and compiled into the same kernel; it takes lossforge.kernels.math.hold(factor) for a constant. A gradient that the formula
    returns is the loss's everywhere: on any device, in any dtype, compiled, under torch.func. It has no second derivative.

    Args:
        formula: the @triton.jit function; None if the decorator has arguments.
        hyper: names and defaults of the hyper-parameters, in the formula's order. They become keyword arguments of the
            loss. They are numbers; the last one may also be a tensor that broadcasts to the input. Changing one compiles nothing anew.
        reference: the value in plain torch, (x, y, *hyper) → element-wise values, for CPU tensors, float64, derivatives of the
            target and second-order derivatives. By default the formula is translated, operation by operation. The gradient that a formula
            returns holds there, too: where it cannot be translated, return (value, gradient).
        domain: "logits", or "probabilities" if the input lies in [0, 1]: lossforge.losses.check tries inputs of this domain.

    Returns:
        a CustomLoss: loss(input, target, *, reduction="mean", weight=None, **options), with the options of lossforge.losses.l1_loss: class
        indices and mixup pairs in place of a dense target, normalizer, gradient, inplace and so on.

    Raises:
        FormulaError: a TypeError that names an operation without a derivative, or one that a formula or CUDA's compiler does not allow.

    Examples:
        In a file, because the source is read (docs/learn/write_your_own_loss.md):

        >>> @elementwise(hyper={"delta": 1.0})
        ... @triton.jit
        ... def charbonnier(x, y, delta):
        ...     return tl.sqrt((x - y) * (x - y) + delta * delta) - delta
        >>> charbonnier(logits, target, delta=0.5).backward()
    """
    if formula is None:
        return lambda formula: elementwise(formula, hyper=hyper, reference=reference, domain=domain)
    checks.one_of("domain", domain, get_args(Domain))
    return _made(ELEMENTWISE, _of_elements, formula, hyper, reference, domain)


@overload
def rowwise(*, hyper: Hyper = None, power: str | None = None, reference: Reference | None = None) -> Decorator: ...
@overload
def rowwise(formula: Any, /, *, hyper: Hyper = None, power: str | None = None, reference: Reference | None = None) -> CustomLoss: ...
def rowwise(
    formula: Any = None, /, *, hyper: Hyper = None, power: str | None = None, reference: Reference | None = None
) -> CustomLoss | Decorator:
    """Make a loss of a formula over rows under a softmax, for use as a decorator above @triton.jit.

    The formula takes (z, *hyper), where z = -ln p of the target's class under the softmax of a row. It returns φ(z) or (φ, φ′), and
    L = w_t φ(z). With a power k it takes (z, s, *hyper), where s = Σⱼ pⱼ^k over the classes of the row, and returns φ(z, s) or
    (φ, ∂φ/∂z, ∂φ/∂s). What it may hold and how a gradient is derived is described in `elementwise`.

    Args:
        formula: the @triton.jit function; None if the decorator has arguments.
        hyper: names and defaults of the hyper-parameters, in the formula's order, which are numbers. The last one may also be a tensor
            (C,), one number a class: the formula then takes that of the row's class.
        power: the name of the hyper-parameter that is k, a number above 0; None for a formula that takes z alone.
        reference: the value in plain torch, (z, *hyper) → φ, or (φ, φ′), as for `elementwise`. By default the formula is translated.

    Returns:
        a CustomLoss: loss(input, target, *, reduction="mean", weight=None, ignore_index=-100, **options), as cross_entropy: class
        indices or a mixup pair of them, class weights, scale, softcap, z_loss, normalizer, gradient, inplace and so on. Two more
        options change the logits: class_bias (C,), which excludes softcap, is added to the scaled logits of every row;
        class_margin (C,), which excludes target_b, gives a number of the row's class, which is subtracted from the target's logit before
        the scale. Where such a tensor of classes requires grad, plain torch computes the loss and its gradients.

    Raises:
        FormulaError: a TypeError that names an operation without a derivative, or one that a formula or CUDA's compiler does not allow.
        ValueError: power is not a name in hyper.

    Examples:
        In a file, because the source is read (docs/learn/write_your_own_loss.md):

        >>> @rowwise(hyper={"q": 0.7})
        ... @triton.jit
        ... def generalized(z, q):
        ...     return (1.0 - tl.exp(-q * z)) / q
        >>> generalized(logits, classes, q=0.5).backward()
    """
    if formula is None:
        return lambda formula: rowwise(formula, hyper=hyper, power=power, reference=reference)
    if power is not None and power not in (hyper or {}):
        raise ValueError(f"power must be the name of a hyper-parameter, one of {', '.join(hyper or ()) or 'none'}, got {power!r}")
    return _made(ROWWISE if power is None else OF_POWERS, functools.partial(_of_rows, power), formula, hyper, reference)


@overload
def boxes(*, hyper: Hyper = None, reference: Reference | None = None) -> Decorator: ...
@overload
def boxes(formula: Any, /, *, hyper: Hyper = None, reference: Reference | None = None) -> CustomLoss: ...
def boxes(formula: Any = None, /, *, hyper: Hyper = None, reference: Reference | None = None) -> CustomLoss | Decorator:
    """Make a loss of a formula over pairs of boxes, for use as a decorator above @triton.jit.

    The formula takes the corners of both boxes, (x1, y1, x2, y2, u1, v1, u2, v2, *hyper). It returns the value of the pair, or the value
    and its eight derivatives. What it may hold and how a gradient is derived is described in `elementwise`.

    Args:
        formula: the @triton.jit function; None if the decorator has arguments.
        hyper: as for `elementwise`.
        reference: the value in plain torch, (boxes1, boxes2, *hyper) with boxes (..., 4), → (...); or it and the gradients by boxes1 and
            boxes2, as for `elementwise`. By default the formula is translated.

    Returns:
        a CustomLoss: loss(boxes1, boxes2, *, reduction="mean", weight=None, format="xyxy", **options), as box_iou_loss.

    Raises:
        FormulaError: a TypeError that names an operation without a derivative, or one that a formula or CUDA's compiler does not allow.

    Examples:
        In a file, because the source is read (docs/learn/write_your_own_loss.md):

        >>> @boxes
        ... @triton.jit
        ... def corners(x1, y1, x2, y2, u1, v1, u2, v2):
        ...     return tl.abs(x1 - u1) + tl.abs(y1 - v1) + tl.abs(x2 - u2) + tl.abs(y2 - v2)
        >>> corners(boxes1, boxes2).backward()
    """
    if formula is None:
        return lambda formula: boxes(formula, hyper=hyper, reference=reference)
    return _made(BOXES, _of_boxes, formula, hyper, reference)


def _made(
    template: Template[Any],
    definition: Definition,
    formula: Any,
    given_hyper: Hyper,
    reference: Reference | None,
    domain: str = "logits",
) -> CustomLoss:
    if not isinstance(given_hyper, Mapping | None):
        raise TypeError(f"hyper must map the names of hyper-parameters to their defaults, got {type(given_hyper).__name__}")
    hyper = dict(given_hyper or {})
    kernels.load("math")
    from lossforge.losses.custom.load import load
    from lossforge.losses.formulas.derive import differentiated
    from lossforge.losses.formulas.source import read, results

    source = read(formula)
    *first, rest = list(inspect.signature(definition).parameters.values())[2:]
    _check_arguments(source, template, hyper, {*(p.name for p in first), *get_args(rest.annotation)[0].__annotations__})
    kernel, given = differentiated(formula, template.slopes), results(source) > 1
    if given and template is ROWWISE:
        source.without("zeros_like", "the kernel of long rows has none; write tl.where(z == z, 0.0, 0.0)")
    load(kernel, len(template.variables), len(hyper), 1 + template.slopes)
    name = _new_name(formula)
    enter_formula(name, DeviceFormula(kernel, heavy=True))(_in_torch(source, formula, given, template, reference))

    def definition_of(*tensors: Tensor, **options: Any) -> CheckedCall[Any]:
        numbers = {each: options.pop(each, default) for each, default in hyper.items()}
        return definition(name, numbers, *tensors, **options)

    definition_of.__name__ = definition_of.__qualname__ = source.name
    definition_of.__doc__ = ast.get_docstring(source.definition)
    own = [Parameter(each, Parameter.KEYWORD_ONLY, default=default, annotation=float) for each, default in hyper.items()]
    short = Signature([*first, *own, rest], return_annotation=Tensor)
    public = entry_point(definition_of, whole_signature(short, template.docs.keeping.settings))
    entry = Loss(name, template, name, public, CustomModule, hyper, domain=domain, without=template.without)
    return CustomLoss(entry, "given" if given else "derived", short)


def _check_arguments(source: "Source", template: Template[Any], hyper: Mapping[str, float], taken: set[str]) -> None:
    """Refuse hyper-parameters that do not fit the formula's arguments, or whose name is in `taken`, the options of every loss."""
    for name, value in hyper.items():
        checks.number(f"hyper[{name!r}]", value)
    leading = template.variables
    if len(source.arguments) < len(leading) or source.arguments[len(leading) :] != [*hyper]:
        raise FormulaError(
            f"{source.name}: its arguments must be {', '.join(leading)} (under any name), then those of hyper in its order"
            f"{': ' if hyper else ', and hyper is empty'}{', '.join(hyper)}; got ({', '.join(source.arguments)})"
        )
    used = {n.id for s in source.statements for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    if not used & {*source.arguments[: len(leading)]}:
        raise FormulaError(f"{source.name}: its value must depend on {' or '.join(source.arguments[: len(leading)])}")
    if both := {*hyper} & {*taken, "input", "target", "boxes1", "boxes2"}:
        raise FormulaError(f"{source.name}: {', '.join(sorted(both))} is the name of an option that every loss has; call it differently")


def _in_torch(source: "Source", formula: Any, given: bool, template: Template[Any], reference: Reference | None) -> Reference:
    """Return the formula in plain torch: a function of elements, of rows, or of boxes (..., 4).

    given: whether the formula writes its gradient, which is then the function's, whoever wrote that.
    """
    from lossforge.losses.formulas.translate import torch_of

    of_boxes = template is BOXES
    try:
        translated = torch_of(formula)
    except FormulaError as problem:
        message = str(problem)

        def translated(*args: Any) -> Any:
            raise FormulaError(message)

    if given:
        return _as_written(source.name, translated, of_boxes, template.variables[: template.slopes], reference)
    if reference is not None:
        return _value_alone(source.name, reference)

    def translated_reference(*args: Any) -> Tensor:
        value = _value(source.name, translated(*(_corners(*args) if of_boxes else args)), args[0])
        for t in args:  # where a formula is a step of it, or holds it, the gradient is 0, as in the kernel; autograd would find none
            if isinstance(t, Tensor) and t.requires_grad:
                value = torch.where(torch.ones_like(value, dtype=torch.bool), value, t[..., 0] if of_boxes else t)
        return value

    return translated_reference


def _value_alone(name: str, reference: Reference) -> Reference:
    """Return the reference, which must return a tensor."""

    def checked(*args: Any) -> Tensor:
        found = reference(*args)
        if not isinstance(found, Tensor):
            raise FormulaError(f"{name}: reference= must return the value, a tensor, for the gradient is derived; got {_kind(found)}")
        return found

    return checked


def _kind(found: Any) -> str:
    return f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__


def _as_written(
    name: str, translated: Callable[..., Any], of_boxes: bool, variables: tuple[str, ...], reference: Reference | None
) -> Reference:
    """Return the formula in plain torch, with the gradient that it writes.

    variables: by which there is a derivative. reference: gives the value in place of the translation, and perhaps the gradient.
    """

    def computed(*args: Any) -> tuple[Tensor, ...]:
        """Return value and derivatives, of elements, rows or corners."""
        if reference is None:
            value, *slopes = translated(*args)
            return _value(name, value, args[0]), *slopes
        boxes = (torch.stack(args[:4], -1), torch.stack(args[4:8], -1), *args[8:]) if of_boxes else args
        by = ("boxes1", "boxes2") if of_boxes else variables if len(variables) > 1 else ()
        found, returned = reference(*boxes), f"(value, {', '.join(f'gradient by {each}' for each in by) or 'gradient'})"
        if isinstance(found, tuple) and len(found) == 1 + (len(by) or 1):
            value, *gradients = found
            return value, *([each for of_box in gradients for each in of_box.unbind(-1)] if of_boxes else gradients)
        if not isinstance(found, Tensor):
            raise FormulaError(f"{name}: reference= must return the value or {returned}, got {_kind(found)}")
        try:
            _, *slopes = translated(*args)
        except FormulaError as problem:
            message = f"{name}: reference= must return {returned}, because the gradient cannot be translated to plain torch"
            raise FormulaError(f"{message} ({problem})") from None
        return found, *slopes

    def as_written(*args: Any) -> Tensor:
        args = _corners(*args) if of_boxes else args
        return with_written_gradient(name, computed, args[: len(variables)], args[len(variables) :])

    return as_written


def _corners(boxes1: Tensor, boxes2: Tensor, *hyper: Any) -> tuple[Any, ...]:
    return *boxes1.unbind(-1), *boxes2.unbind(-1), *hyper


def _value(name: str, value: Any, like: Tensor) -> Tensor:
    """Return the value of a translated formula in the dtype of its arguments; a comparison is one, too."""
    if not isinstance(value, Tensor):
        raise FormulaError(f"{name}: its value must depend on its arguments, got {value!r}")
    return value if value.is_floating_point() else value.to(like.dtype)


def _new_name(formula: Any) -> str:
    """Return a new name for the formula, under which operators find it."""
    base = name = f"{formula.fn.__module__}:{formula.fn.__qualname__}"
    again = 1
    while name in FORMULAS:
        again += 1
        name = f"{base}#{again}"
    return name
