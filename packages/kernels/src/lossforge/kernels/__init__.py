"""Fused loss kernels in Triton: templates, the formulas they carry, and their launches on tensors.

Triton is imported when a kernel is first needed: it takes as long to import as all else, and need not be installed to compute in plain
PyTorch.
"""

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lossforge.kernels.torch_internals import triton_internals

__version__ = "0.1.0"

TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed."""

if TYPE_CHECKING:
    from lossforge.kernels.engine.launch import launch_counts as launch_counts
    from lossforge.kernels.engine.launch import planned as planned
    from lossforge.kernels.engine.launch import trial as trial
    from lossforge.kernels.engine.launch import trials as trials
    from lossforge.kernels.engine.reduce import scale_ as scale_


def _interpreted() -> bool:
    """Whether Triton will interpret the kernels. Its own word, for which it is imported only where the answer may be yes."""
    if not TRITON or not ("triton" in sys.modules or os.environ.get("TRITON_INTERPRET")):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


INTERPRETED = _interpreted()
"""Whether the kernels of this process run in Triton's interpreter: TRITON_INTERPRET was set when they were defined."""

_LAZY = {**dict.fromkeys(("launch_counts", "planned", "trial", "trials"), "engine.launch"), "scale_": "engine.reduce"}
__all__ = ["INTERPRETED", "TRITON", "launch_counts", "load", "missing_triton", "of_folder", "planned", "scale_", "trial", "trials"]


def missing_triton() -> ModuleNotFoundError:
    """Return the error that says how to install Triton."""
    return ModuleNotFoundError(
        "kernels and custom formulas need Triton, which is not installed. Install it on Linux: pip install triton. "
        "Without it lossforge.losses computes its own losses in plain PyTorch.",
        name="triton",
    )


def load(name: str) -> ModuleType:
    """Import a module of the kernels.

    Raises:
        ModuleNotFoundError: Triton is not installed; says how to install it.
        ImportError: Triton is too old.
    """
    if not TRITON:
        raise missing_triton()
    triton_internals()
    return importlib.import_module(f"{__name__}.{name}")


def of_folder(name: str) -> ModuleType:
    """Return what launches a template: the launch.py of its folder, with `forward` and `backward`."""
    return sys.modules.get(f"{__name__}.{name}.launch") or load(f"{name}.launch")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(load(_LAZY[name]), name)
    return value
