"""What a formula is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lossforge import kernels


class Formula(NamedTuple):
    """special: a quicker kernel formula for the hyper-parameters of which `applies`, a device function, is true.

    hard: kernel and special for targets of 0 and 1. heavy: as of kernels.tiles.element_tiles.
    """

    kernel: Any
    twin: Callable[..., Tensor]
    special: Any = None
    applies: Any = None
    hard: tuple[Any, Any] | None = None
    heavy: bool = False

    @property
    def kernels(self) -> kernels.Formulas:
        hard = None if self.hard is None else kernels.Formulas(*self.hard, self.applies)
        return kernels.Formulas(self.kernel, self.special, self.applies, hard, self.heavy)
