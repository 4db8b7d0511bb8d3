"""Compile every kernel variant that the losses launch, for GPUs that need not be there. Run by test_ahead_of_time.py in a process of its own.

The interpreter accepts much that the compiler refuses. Here the kernels are real: the host code runs on CPU tensors as far as
each launch, which is recorded with the specialisation that Triton's own launcher would choose, and compiled instead of started.
"""

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lossforge import kernels
from lossforge.kernels import targets
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.operators import library
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.testing import samples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER, AMPERE = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Variant(NamedTuple):
    """A kernel with all that it is specialised on."""

    kernel: JITFunction
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def source(self) -> ASTSource:
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)


class Recorder:
    """Takes the place of Triton's launcher: keeps each variant once, and who launched it first."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}
        self.cases: dict[str, str] = {}
        self.case = ""
        self.backend = make_backend(HOPPER)

    def __call__(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs[name] for name in kwargs if name not in kernel.arg_names}
        bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, _ = bind(*args, **kwargs, debug=False)
        _, signature, constants, attributes = kernel._pack_args(self.backend, {**kwargs, "debug": False}, bound, specialization, options)
        variant = Variant(kernel, signature, constants, attributes, options)
        key = f"{variant.source().hash()} {options}"
        self.variants.setdefault(key, variant)
        self.cases.setdefault(key, self.case)
