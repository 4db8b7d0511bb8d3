"""What a formula is."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lossforge.kernels.call import Formulas


class Formula:
    """A formula twice: twin: in plain torch. load: gives it as device functions, which need Triton, and is called when a kernel does."""

    def __init__(self, twin: Callable[..., Tensor], load: Callable[[], Formulas]) -> None:
        self.twin, self.load = twin, load

    @functools.cached_property
    def kernels(self) -> Formulas:
        return self.load()


def family(twins: Mapping[str, Any], load: Callable[[], Mapping[str, Formulas]]) -> dict[str, Formula]:
    """Formulas of one file. load: gives the device functions of the same names."""

    def one(name: str) -> Formulas:
        return load()[name]

    return {name: Formula(twin, functools.partial(one, name)) for name, twin in twins.items()}
