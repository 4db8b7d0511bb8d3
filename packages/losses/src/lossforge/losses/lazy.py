"""lossforge.kernels, imported when a kernel is first needed: Triton takes as long to import as all else here, and need not be installed."""

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed. Without it every loss is computed by its plain-torch reference."""


def _interpreted() -> bool:
    """Whether Triton will interpret the kernels. Its own word, for which it is imported only where the answer may be yes."""
    if not TRITON or not ("triton" in sys.modules or os.environ.get("TRITON_INTERPRET")):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


INTERPRETED = _interpreted()


def load() -> ModuleType:
    """lossforge.kernels.

    Raises:
        ModuleNotFoundError: Triton is not installed; says how to install it.
    """
    return importlib.import_module("lossforge.kernels")


class _Kernels:
    """The package's names, each kept once it was asked for, so that a launch pays nothing for the wait."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(load(), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    from lossforge import kernels as kernels
else:
    kernels = _Kernels()
