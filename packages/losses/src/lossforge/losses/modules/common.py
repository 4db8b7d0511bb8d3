"""What the modules share."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from lossforge.losses import checks
from lossforge.losses.functional.common import ElementwiseSettings
from lossforge.losses.types import BatchReduction, Empty, Gradient


class LossModule(nn.Module):
    """A function whose options are attributes, which each call reads. An option that holds a tensor is a buffer.

    A subclass declares the types of its options and passes them on from its constructor, whose signature editors and type checkers show.

    shared: options that the constructor takes as further keywords, and their defaults.
    """

    function: Callable[..., Any]
    reduction: BatchReduction
    shared: Mapping[str, Any] = {}
    option_names: tuple[str, ...] = ()
    reductions: ClassVar[tuple[str, ...]] = checks.REDUCTIONS

    def __init__(self, further: Mapping[str, Any], *, reduction: str, **named: Any) -> None:
        """named: the options in the constructor's signature; further: those of its keywords that `shared` has."""
        super().__init__()
        checks.one_of("reduction", reduction, self.reductions)
        options = {"reduction": reduction, **self.shared, **named}
        for name in further:
            if name not in self.shared:
                raise checks.unexpected(type(self).__name__, name, self.keywords(options))
        self.option_names = tuple(options)
        for name, value in {**options, **further}.items():
            setattr(self, name, value)

    def keywords(self, options: Iterable[str]) -> Iterable[str]:
        """What the constructor takes, in its order; options: what the module keeps of it."""
        return checks.keywords(type(self).__init__)

    if not TYPE_CHECKING:  # a checker then knows the attributes that are declared, and no others

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__dict__.get("option_names", ()):
                for held in (self.__dict__, self._buffers, self._parameters):
                    held.pop(name, None)
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.register_buffer(name, value)
                    return
            super().__setattr__(name, value)

    def compute(self, *inputs: Any, **per_call: Any) -> Any:
        """Call the function with the options, of which a call may replace some."""
        return self.function(*inputs, **{**{name: getattr(self, name) for name in self.option_names}, **per_call})

    def extra_repr(self) -> str:
        shown = []
        for name in self.option_names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=<{'x'.join(map(str, value.shape)) or 'scalar'} tensor>")
            elif name not in self.shared or value != self.shared[name]:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


class LogitsModule(LossModule):
    """A loss whose gradient may be written in forward or backward, in new memory or in that of the logits."""

    shared: Mapping[str, Any] = {"empty": "nan", "gradient": None, "inplace": False, "validate": None}
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor:
        return self.compute(input, target, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...


class WeightedSettings(ElementwiseSettings, total=False):
    weight: Tensor | None


class ElementwiseModule(LogitsModule):
    shared: Mapping[str, Any] = {**LogitsModule.shared, "dim": -1, "weight": None}
    dim: int
    weight: Tensor | None


class RowModule(LogitsModule):
    shared: Mapping[str, Any] = {**LogitsModule.shared, "scale": 1.0, "softcap": None, "z_loss": 0.0}
    scale: float
    softcap: float | None
    z_loss: float
    weight: Tensor | None
    ignore_index: int


class BoxModule(LossModule):
    shared: Mapping[str, Any] = {"empty": "zero", "gradient": None}
    empty: Empty
    gradient: Gradient | None

    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor:
        return self.compute(boxes1, boxes2, **per_call)

    if TYPE_CHECKING:

        def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
