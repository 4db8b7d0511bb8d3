"""Gluon for the resident kernels. Only this file knows how Gluon's interface differs between versions of Triton.

Gluon is experimental: its names change with a minor version. The resident kernels take its names from here, and are imported when they
are launched. If the interface is not known, importing this module raises an ImportError, and the launch uses the Triton kernel instead.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lossforge.kernels.torch_internals import triton_internals

__all__ = ["async_load", "barrier", "commit_group", "gl", "gluon", "wait_group"]


def _named(module: Any, *names: str) -> Any:
    """Return the module's attribute under the first of `names` that exists. The newest comes first, because an old one may only raise."""
    found = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if not triton_internals().known or found is None:
        raise ImportError(f"lossforge does not know the Gluon of triton {triton.__version__}: looked for {' or '.join(names)}")
    return found


async_load = _named(async_copy, "async_load", "async_copy_global_to_shared")
commit_group = _named(async_copy, "commit_group")
wait_group = _named(async_copy, "wait_group")
barrier = _named(gl, "barrier", "thread_barrier")
