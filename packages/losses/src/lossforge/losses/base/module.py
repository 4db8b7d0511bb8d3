"""The modules of losses, made from their definitions: options are attributes, which each call reads."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from torch import Tensor, nn

from lossforge.losses.base import checks
from lossforge.losses.base.declare import Converted, Declared, constructor_of
from lossforge.losses.base.option_types import Empty
from lossforge.losses.base.text import module_docstring

F = TypeVar("F", bound=Callable[..., Any])


class OfFunction:
    """What computes a function: a module, or a loss that a user wrote.

    Attributes:
        function: what a call computes.
    """

    function: Callable[..., Any]


class LossModule(OfFunction, nn.Module):
    """A function whose options are attributes, which each call reads. An option that holds a tensor is a buffer.

    Attributes:
        shared: options, with their defaults, that are shown only where they have other values.
        reductions: what the option `reduction` may be.
        option_names: the names of the options.
        changed: the options with other values than the function's defaults, but for tensors: what a call hands on.
        empty: an option of most modules, what a mean over nothing gives.
    """

    empty: Empty
    shared: Mapping[str, Any] = {}
    reductions: ClassVar[tuple[str, ...]] = checks.REDUCTIONS
    _inputs: ClassVar[tuple[str, ...]] = ()
    """The names of the tensors of a call; empty for any number."""
    option_names: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Give each class a `forward` with a code object of its own: see checks.with_own_code."""
        super().__init_subclass__(**options)
        shared = cls.forward
        if "forward" not in vars(cls) and isinstance(shared, FunctionType):
            own = FunctionType(shared.__code__, shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)
            own.__kwdefaults__, own.__annotations__, own.__doc__ = shared.__kwdefaults__, shared.__annotations__, shared.__doc__
            own.__module__, own.__qualname__ = shared.__module__, f"{cls.__qualname__}.forward"
            own.__dict__.update(shared.__dict__)  # what a decorator of a custom class's forward noted
            cls.forward = checks.with_own_code(own, own.__qualname__)  # type: ignore[method-assign]  # meant

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, choices in (("reduction", self.reductions), ("empty", checks.EMPTY)):
            if name in options:
                checks.one_of(name, options[name], choices)
        self.option_names = tuple(options)
        self.changed: dict[str, Any] = {}
        for name, value in options.items():
            setattr(self, name, value)

    if not TYPE_CHECKING:  # a checker then knows the attributes that are declared, and no others

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__dict__.get("option_names", ()):
                for held in (self.__dict__, self._buffers, self._parameters, self.changed):
                    held.pop(name, None)
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.register_buffer(name, value)
                    return
                default = _defaults(self.function).get(name, inspect.Parameter.empty)
                if not (isinstance(value, Tensor) or (type(value) is type(default) and value == default)):
                    self.changed[name] = value
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["changed"] = dict(self.changed)  # copy.copy hands on the dictionary itself

    def compute(self, *inputs: Any, **per_call: Any) -> Any:
        """Call the function with the options, of which a call may replace some."""
        given = {**self.changed, **per_call}
        for held in (self._buffers, self._parameters):
            for name, t in held.items():
                if name in self.option_names:
                    given.setdefault(name, t)
        return self.function(*inputs, **given)

    def forward(self, *inputs: Any, **per_call: Any) -> Any:
        """Compute the loss. An option that is given here holds for this call alone."""
        if self._inputs and len(inputs) > len(self._inputs):
            raise TypeError(f"{type(self).__name__}() takes {', '.join(self._inputs)} by position, the rest by name, got {len(inputs)}")
        for name in self._inputs[len(inputs) :]:  # by position, because some functions call them differently, as torchvision does
            if name not in per_call:
                break
            inputs = (*inputs, per_call.pop(name))
        return self.compute(*inputs, **per_call)

    def extra_repr(self) -> str:
        shown = []
        for name in self.option_names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=<{'x'.join(map(str, value.shape)) or 'scalar'} tensor>")
            elif name not in self.shared or value != self.shared[name]:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


class TargetModule(LossModule):
    """A module written by hand whose call takes an input and its target."""

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor:
        return self.compute(input, target, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...


def module_of(each: Declared, function: Callable[..., Any], place: str) -> type[LossModule]:
    """Make the module of a public function. place: the Python module that has it."""
    how, keeping = each.module, each.docs.keeping
    assert how is not None
    kept, shared = constructor_of(each.signature, keeping, how)
    names = dict.fromkeys(name for name in ("reduction", *shared, *kept.parameters) if name in kept.parameters)
    converted = {name: each for name, each in how.converted.items() if name in names}
    parameters = [_taken(p, converted.get(p.name)) for p in kept.parameters.values()]
    inputs = [part.partition(":")[0] for part in (how.forward or keeping.forward).split(", ")]
    own: dict[str, Any] = {
        "__module__": place,
        "__doc__": module_docstring(each, how, [p.name for p in parameters]),
        "__init__": _constructor(f"{how.name}.__init__", place, parameters, [n for n in names if n not in LEGACY], converted),
        "function": staticmethod(function),
        "_inputs": () if "*" in "".join(inputs) else tuple(inputs),
    }
    if shared:
        own["shared"] = shared
    if "reduction" in names and (reductions := get_args(kept.parameters["reduction"].annotation)) != checks.REDUCTIONS:
        own["reductions"] = reductions
    if each.has_outputs:
        own["__class_getitem__"] = classmethod(types.GenericAlias)  # for annotations with what a call returns
    made: Any = type(how.name, (LossModule,), own)
    made.forward.__signature__ = _of_call(inputs, each.whole_signature)
    return made


LEGACY = ("size_average", "reduce")
"""torch's deprecated arguments, which no module keeps."""


def _taken(option: Parameter, how: Converted | None) -> Parameter:
    """Return what the constructor takes for an option."""
    if how is None:
        return option
    by = next(iter(inspect.signature(how.by).parameters.values()))
    return option.replace(name=how.name, annotation=by.annotation)


def _of_call(inputs: Sequence[str], function: Signature) -> Signature:
    """Return the signature of `forward`. inputs: the names of a call's tensors, in the function's order; one with a * is any number."""
    taken = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for name, p in zip(inputs, function.parameters.values(), strict=False):
        if name.startswith("*"):
            taken.append(Parameter(name[1:], Parameter.VAR_POSITIONAL, annotation=Tensor | None))
        else:
            taken.append(p.replace(name=name, kind=Parameter.POSITIONAL_OR_KEYWORD))
    return function.replace(parameters=[*taken, Parameter("per_call", Parameter.VAR_KEYWORD, annotation=Any)])


def _constructor(
    qualname: str, place: str, parameters: Sequence[Parameter], names: Sequence[str], converted: Mapping[str, Converted]
) -> Callable[..., None]:
    """Return `__init__` of a module. names: of the options that it keeps, in the order in which they are shown."""
    accepted = tuple([p.name for p in parameters])
    by_position = tuple([p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD])
    needed = tuple([p.name for p in parameters if p.default is p.empty])
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    is_legacy = "reduce" in accepted

    def __init__(self: LossModule, *args: Any, **options: Any) -> None:  # noqa: N807  # of each class
        given = {**defaults, **checks.bound(type(self).__name__, by_position, accepted, needed, args, options)}
        if is_legacy:
            given["reduction"] = checks.legacy_reduction(given["size_average"], given["reduce"], given["reduction"], frames=3)
        for name, how in converted.items():
            given[name] = how.by(given[how.name])
        LossModule.__init__(self, **{name: given[name] for name in names})

    made: Any = __init__
    made.__qualname__, made.__module__ = qualname, place
    made.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters], return_annotation=None)
    return __init__


@functools.cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}


def constructor(init: F) -> F:
    """Answer a keyword that `__init__` does not take with all those that it takes."""
    accepted = checks.names(init)[1:]

    @functools.wraps(init)
    def construct(self: LossModule, *args: Any, **options: Any) -> None:
        checks.only(accepted, options, type(self).__name__)
        init(self, *args, **options)

    return construct  # type: ignore[return-value]  # of the same signature
