"""What the modules of all losses share: options are attributes, which each call reads."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from lossforge.losses import checks
from lossforge.losses.option_types import Empty

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
            cls.forward = checks.with_own_code(own, own.__qualname__)

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
        tensors = {name: t for held in (self._buffers, self._parameters) for name, t in held.items() if name in self.option_names}
        return self.function(*inputs, **{**self.changed, **tensors, **per_call})

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
    """A module whose call takes an input and its target."""

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor:
        return self.compute(input, target, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...


class PairModule(LossModule):
    """A module whose call takes two inputs and which way they differ."""

    def forward(self, input1: Tensor, input2: Tensor, target: Tensor, **per_call: Any) -> Tensor:
        return self.compute(input1, input2, target, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input1: Tensor, input2: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...


class BoxModule(LossModule):
    """A module whose call takes two sets of boxes."""

    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor:
        return self.compute(boxes1, boxes2, **per_call)

    if TYPE_CHECKING:

        def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...


class PreferenceModule(LossModule):
    """A module whose call takes log-probabilities of completions."""

    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor:
        return self.compute(*logps, **per_call)

    if TYPE_CHECKING:

        def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...


class LinearModule(LossModule):
    """A module whose call takes a linear layer's input, weight and bias in place of its output."""

    def forward(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor:
        return self.compute(input, weight, target, bias, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...


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
