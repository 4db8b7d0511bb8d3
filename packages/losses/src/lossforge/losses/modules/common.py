"""What the modules share."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from lossforge.losses import checks
from lossforge.losses.functional.common import ElementwiseSettings


class LossModule(nn.Module):
    """A function, its options, and its tensors as buffers."""

    function: Callable[..., Any]
    accepted: type = ElementwiseSettings
    reductions: ClassVar[tuple[str, ...]] = checks.REDUCTIONS

    def __init__(self, reduction: str, buffers: dict[str, Tensor | None], settings: dict[str, Any], options: Any) -> None:
        super().__init__()
        checks.one_of("reduction", reduction, self.reductions)
        for name in options:
            if name not in self.accepted.__annotations__:
                raise checks.unexpected(type(self).__name__, name, checks.keywords(type(self).__init__, self.accepted))
        for name, t in buffers.items():
            self.register_buffer(name, t)
        self.reduction = reduction
        self.buffers_given = tuple(buffers)
        self.settings = {**settings, **options}

    def forward(self, input: Tensor, target: Tensor | None, **per_call: Any) -> Any:
        tensors = {name: t for name in self.buffers_given if (t := getattr(self, name)) is not None}
        return self.function(input, target, reduction=self.reduction, **{**self.settings, **tensors, **per_call})

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in {"reduction": self.reduction, **self.settings}.items())
