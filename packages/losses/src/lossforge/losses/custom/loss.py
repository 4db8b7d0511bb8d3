"""Losses of one's own: a formula becomes a function and a module that keep every promise of the losses here."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lossforge import kernels  # noqa: F401  # its warning about interpreted kernels comes first
from lossforge.losses import checks
from lossforge.losses.custom.derive import with_gradient
from lossforge.losses.custom.source import FormulaError, Source, read, results
from lossforge.losses.custom.twin import torch_of
from lossforge.losses.formulas import FORMULAS, Formula
from lossforge.losses.functional.common import ElementwiseOptions
from lossforge.losses.functional.elementwise import elementwise_loss
from lossforge.losses.modules.common import LossModule
from lossforge.losses.registry import Loss
from lossforge.losses.repeat import repeated

Twin = Callable[..., Tensor]


class CustomLoss:
    """A loss made of a formula: call it as a function, or take `module(...)`.

    loss: what the registry holds of the losses here. gradient: "given" by the formula, or "derived" from it. hyper: the
    hyper-parameters and their defaults.
    """

    def __init__(self, source: Source, loss: Loss, gradient: str) -> None:
        self.loss, self.gradient, self.hyper = loss, gradient, dict(loss.hyper)
        self.__name__, self.__qualname__ = source.name, source.name
        self.__module__, self.__doc__ = loss.name.rpartition(":")[0], inspect.getdoc(loss.function)
        self.function = loss.function

    def __call__(self, input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.function(input, target, **options)

    def module(self, *, reduction: str = "mean", **options: Any) -> nn.Module:
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

    def __init__(self, loss: CustomLoss, reduction: str, options: dict[str, Any]) -> None:
        hyper = {name: options.pop(name) for name in loss.hyper if name in options}
        buffers: dict[str, Tensor | None] = {name: value for name, value in hyper.items() if isinstance(value, Tensor)}
        settings = {name: value for name, value in hyper.items() if name not in buffers}
        super().__init__(reduction, buffers, settings, options)
        self.function = loss


def elementwise(
    formula: Any = None, /, *, hyper: Mapping[str, float] | None = None, reference: Twin | None = None, domain: str = "logits"
) -> Any:
    """Make a loss of a formula over elements, for use as a decorator above @triton.jit.

    The formula takes (x, y, *hyper), float32 elements of input and target and the hyper-parameters by position, and returns the value
    or (value, dvalue/dx). It is straight-line mathematics: assignments, arithmetic, triton.language's functions of elements, those of
    lossforge.kernels.math, other such @triton.jit functions, and tl.where in place of branches. Without a gradient, one is derived and
    compiled into the same kernel.

    Args:
        hyper: the hyper-parameters' names and defaults, in the formula's order. They are keyword arguments of the loss, numbers; the
            last may also be a tensor that broadcasts to the input. Changing one compiles nothing.
        reference: the value in plain torch, (x, y, *hyper) → element-wise values, for CPU tensors, float64, derivatives of the
            target and of second order. By default the formula's operations translated.
        domain: "logits", or "probabilities" where input lies in [0, 1]: what lossforge.losses.check tries.

    Returns: a CustomLoss: loss(input, target, *, reduction="mean", weight=None, **options), with the options of
        lossforge.losses.functional: class indices and mixup pairs in place of a dense target, normalizer, gradient, inplace and so on.

    Raises:
        FormulaError: a TypeError that names the operation with no derivative, or what the formula lacks.
    """
    if formula is None:
        return lambda formula: elementwise(formula, hyper=hyper, reference=reference, domain=domain)
    checks.one_of("domain", domain, ("logits", "probabilities"))
    source, kernel, twin, gradient = _prepare(formula, ("x", "y"), dict(hyper or {}), reference)
    names = list(hyper or {})

    def loss(input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None, **options: Any) -> Tensor:
        values, parameter = _values(names, defaults, options)
        given: ElementwiseOptions = options  # type: ignore[assignment]  # checked by name below
        return elementwise_loss(name, input, target, values, reduction, given, weight=weight, parameter=parameter)

    defaults = dict(hyper or {})
    name = _register(source, formula, Formula(kernel, twin))
    loss.__name__, loss.__doc__ = source.name, formula.fn.__doc__
    return _finish(source, name, "elementwise", repeated(loss), defaults, domain, gradient)


def _prepare(formula: Any, leading: tuple[str, ...], hyper: dict[str, float], reference: Twin | None) -> tuple[Source, Any, Twin, str]:
    """(source, device function that returns value and gradient, plain-torch value, where the gradient is from)"""
    source = read(formula)
    for name, value in hyper.items():
        checks.number(f"hyper[{name!r}]", value)
    wanted = [*source.arguments[: len(leading)], *hyper]
    if len(source.arguments) < len(leading) or source.arguments != wanted:
        raise FormulaError(
            f"{source.name}: its arguments must be {', '.join(leading)} (under any name), then those of hyper in its order"
            f"{': ' if hyper else ', and hyper is empty'}{', '.join(hyper)}; got ({', '.join(source.arguments)})"
        )
    taken = set(hyper) & {"input", "target", "reduction", "weight", *ElementwiseOptions.__annotations__}
    if taken:
        raise FormulaError(f"{source.name}: {', '.join(sorted(taken))} is the name of an option that every loss has; call it differently")
    count = results(source)
    if count > 2:
        raise FormulaError(f"{source.name}: returns {count} values; a formula returns its value, or (value, gradient)")
    kernel = formula if count == 2 else with_gradient(formula)
    return source, kernel, reference or _twin(formula, count), "given" if count == 2 else "derived"


def _twin(formula: Any, count: int) -> Twin:
    try:
        twin = torch_of(formula)
    except FormulaError as problem:
        message = str(problem)

        def refuse(*args: Any) -> Tensor:
            raise FormulaError(message)

        return refuse
    return (lambda *args: twin(*args)[0]) if count == 2 else twin


def _register(source: Source, formula: Any, made: Formula) -> str:
    """The name under which operators find the formula: a new one where a formula of this name exists."""
    base = name = f"{formula.fn.__module__}:{formula.fn.__qualname__}"
    again = 1
    while name in FORMULAS:
        again += 1
        name = f"{base}#{again}"
    FORMULAS[name] = made
    return name


def _values(names: list[str], defaults: dict[str, float], options: dict[str, Any]) -> tuple[list[float], Tensor | None]:
    """Hyper-parameters taken out of the options: numbers, and the last where it is a tensor."""
    for given in options:
        if given not in defaults and given not in ElementwiseOptions.__annotations__:
            raise TypeError(
                f"unexpected keyword argument {given!r}; the options are {', '.join((*names, *ElementwiseOptions.__annotations__))}"
            )
    values = [options.pop(name, defaults[name]) for name in names]
    parameter = values.pop() if values and isinstance(values[-1], Tensor) else None
    for name, value in zip(names, values, strict=False):
        checks.number(name, value)
    return values, parameter


def _finish(
    source: Source, name: str, template: str, function: Callable[..., Tensor], hyper: dict[str, float], domain: str, gradient: str
) -> CustomLoss:
    loss = Loss(name, template, name, function, CustomModule, hyper=dict(hyper), domain=domain)
    return CustomLoss(source, loss, gradient)
