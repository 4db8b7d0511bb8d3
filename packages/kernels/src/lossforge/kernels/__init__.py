"""Fused loss kernels in Triton: templates, the formulas they carry, and their launches on tensors.

Triton is imported when a kernel is first needed: it takes as long to import as all else, and need not be installed to compute in plain
PyTorch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lossforge.kernels.availability import INTERPRETED as INTERPRETED
from lossforge.kernels.availability import TRITON as TRITON
from lossforge.kernels.availability import missing_triton as missing_triton
from lossforge.kernels.torch_internals import constant_in_graphs, triton_internals

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lossforge.kernels.engine.launch import launch_counts as launch_counts
    from lossforge.kernels.engine.reduce import scale_ as scale_
    from lossforge.kernels.tiles import trial as trial
    from lossforge.kernels.tiles import trials as trials


_LAZY = {
    "launch_counts": "engine.launch",
    "scale_": "engine.reduce",
    "trial": "tiles",
    "trials": "tiles",
}
__all__ = ["INTERPRETED", "TRITON", "launch_counts", "load", "missing_triton", "scale_", "trial", "trials"]


def load(name: str) -> ModuleType:
    """Import a module of the kernels; of a template, the one that launches it: "boxes.rotated", or "classes.rowwise.launch".

    Raises:
        ModuleNotFoundError: Triton is not installed; says how to install it.
        ImportError: Triton is too old.
    """
    module = f"{__name__}.{name}"
    if module not in sys.modules:
        _import(module)
    return sys.modules[module]


@constant_in_graphs
def _import(module: str) -> None:
    if not TRITON:
        raise missing_triton()
    triton_internals()
    importlib.import_module(module)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(load(_LAZY[name]), name)
    return value
