"""Whether Triton is installed, and whether it interprets the kernels. Imports Triton only where the answer needs it."""

import importlib.util
import os
import sys

TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed."""


def _interpreted() -> bool:
    """Return what Triton itself says. It is imported for that only where it may say yes."""
    if not TRITON or not ("triton" in sys.modules or os.environ.get("TRITON_INTERPRET")):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


INTERPRETED = _interpreted()
"""Whether the kernels of this process run in Triton's interpreter: TRITON_INTERPRET was set when they were defined."""


def missing_triton() -> ModuleNotFoundError:
    """Return the error that says how to install Triton."""
    return ModuleNotFoundError(
        "kernels and custom formulas need Triton, which is not installed. Install it on Linux: pip install triton. "
        "Without it lossforge.losses computes its own losses in plain PyTorch.",
        name="triton",
    )
