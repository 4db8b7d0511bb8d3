"""What a formula is."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lossforge.losses.lazy import kernels


class Inlined(NamedTuple):
    """A formula as the kernels inline it: device functions.

    special: a quicker kernel formula for the hyper-parameters of which `applies`, a device function, is true.
    hard: kernel and special for targets of 0 and 1. heavy: as of kernels.tiles.element_tiles.
    """

    kernel: Any
    special: Any = None
    applies: Any = None
    hard: tuple[Any, Any] | None = None
    heavy: bool = False


class Formula:
    """A formula twice: twin: in plain torch. load: gives it as device functions, which need Triton, and is called when a kernel does."""

    def __init__(self, twin: Callable[..., Tensor], load: Callable[[], Inlined]) -> None:
        self.twin, self.load = twin, load

    @functools.cached_property
    def kernels(self) -> "kernels.Formulas":
        inlined = self.load()
        hard = None if inlined.hard is None else kernels.Formulas(*inlined.hard, inlined.applies)
        return kernels.Formulas(inlined.kernel, inlined.special, inlined.applies, hard, inlined.heavy)

    @functools.cached_property
    def kernel(self) -> Any:
        return self.load().kernel


def family(twins: Mapping[str, Any], load: Callable[[], Mapping[str, Inlined]]) -> dict[str, Formula]:
    """Formulas of one file. load: gives the device functions of the same names."""

    def one(name: str) -> Inlined:
        return load()[name]

    return {name: Formula(twin, functools.partial(one, name)) for name, twin in twins.items()}
