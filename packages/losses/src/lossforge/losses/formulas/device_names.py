"""What formulas beside their torch references are written with: `tl`, and the functions of lossforge.kernels.math and of formulas/box.py
and formulas/rotated.py.

Their files must not import Triton. So a name is a placeholder here, which `formulas.source.device` fills as a kernel needs the formula.
"""

# ruff: noqa: F403
import importlib
from typing import TYPE_CHECKING, Any

from lossforge import kernels

if TYPE_CHECKING:
    import triton.language as tl

    from lossforge.kernels.formulas.box import hull, jaccard_distance, larger, length, overlap, smaller, turned
    from lossforge.kernels.formulas.rotated import bhattacharyya, log1p, offset, root, sides, spread, surplus
    from lossforge.kernels.math import *

    __all__ = ["hull", "jaccard_distance", "larger", "length", "overlap", "smaller", "tl", "turned"]
    __all__ += ["bhattacharyya", "log1p", "offset", "root", "sides", "spread", "surplus"]


class Placeholder:
    """A name of Triton's language or of the kernels."""

    def __init__(self, name: str) -> None:
        self.name = name

    def filled(self) -> Any:
        """Return what the name stands for.

        Raises:
            AttributeError: it stands for nothing.
        """
        if self.name == "tl":
            return importlib.import_module("triton.language")
        modules = [importlib.import_module(f".{file}", kernels.__name__) for file in ("math", "formulas.box", "formulas.rotated")]
        found = next((module for module in modules if hasattr(module, self.name)), modules[0])
        return getattr(found, self.name)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Placeholder(name)
