"""Private names of torch and triton that the launches use, each behind a guard: a faster way where it is there, else the public one."""

from typing import Any

import torch
import triton

NEEDED, UNKNOWN = (3, 5), (3, 10)
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
if RELEASE < NEEDED:
    raise ImportError(
        f"lossforge needs triton>=3.5,<3.10, found triton {triton.__version__}. Install torch>=2.9,<2.16, which brings the triton it needs."
    )
KNOWN = RELEASE < UNKNOWN
"""Whether Triton's private interfaces are those that the tests see. What has no name to be looked for (the order of arguments, Gluon's
meaning) is only used of such a version."""


def _private(module: Any, name: str) -> Any:
    """What the module calls `name`; None where it no longer has it."""
    return getattr(module, name, None)


_get_device = _private(torch._C, "_cuda_getDevice")
_get_raw_stream = _private(torch._C, "_cuda_getCurrentRawStream")
_triton_run = _private(triton.JITFunction, "run")


def current_device() -> int:
    return torch.cuda.current_device() if _get_device is None else _get_device()


def current_stream(device: int) -> int:
    """The device's current stream, as CUDA knows it."""
    return torch.cuda.current_stream(device).cuda_stream if _get_raw_stream is None else _get_raw_stream(device)


def starts_directly(compiled: Any) -> bool:
    """Whether `start` knows how to start what Triton compiled."""
    whole = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
    return KNOWN and whole and _triton_run is not None and _private(triton.JITFunction, "run") is _triton_run


def start(compiled: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
    """Start a kernel as Triton does, on the current stream, without a look at its arguments."""
    compiled.run(*grid, current_stream(device), compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def unobserved(kernel: Any) -> bool:
    """Whether nobody asked Triton to be told of launches, or to compile otherwise than before."""
    try:
        runtime = triton.knobs.runtime
        observed = kernel.pre_run_hooks or runtime.debug or _hooked(runtime.launch_enter_hook) or _hooked(runtime.launch_exit_hook)
    except AttributeError:
        return False
    return not observed and _private(triton.JITFunction, "run") is _triton_run


def _hooked(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
