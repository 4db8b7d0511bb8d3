"""Starting a kernel: on the tensor's device, counted, and with a warning where the interpreter would run it."""

import contextlib
import warnings
from collections import Counter
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process run in Triton's interpreter: TRITON_INTERPRET was set when they were defined."""

_launches: Counter[str] = Counter()
_tickets: dict[tuple[int, int], Tensor] = {}


def launch_counts() -> dict[str, int]:
    """Launches so far in this process, by kernel."""
    return dict(_launches)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Run `kernel` over `grid` on `device`, whichever device is current."""
    _launches[kernel.fn.__name__] += 1
    if device.type != "cuda":
        kernel[grid](*args, **meta)
        return
    if INTERPRETED:
        _warn_interpreted()
    with contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        kernel[grid](*args, **meta)


def ticket(device: torch.device) -> Tensor:
    """A zeroed int32 on which the programs of one launch count themselves; the last to finish sets it back to zero.

    Launches of one stream follow each other, so they share one. A captured graph may be replayed on any stream beside
    others and gets its own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _tickets:
        _tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _tickets[key]


_warned = False


def _warn_interpreted() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "lossforge: CUDA tensors are computed by Triton's INTERPRETER, about a thousand times slower than the compiled kernels. "
            "TRITON_INTERPRET is set in the environment: unset it before Python starts.",
            RuntimeWarning,
            stacklevel=3,
        )
