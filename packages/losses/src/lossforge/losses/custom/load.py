"""Load a device formula when it is made, so that what Triton refuses is an error there, not at a launch."""

import ast
import warnings
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lossforge.kernels import INTERPRETED
from lossforge.losses.formulas.error import FormulaError
from lossforge.losses.formulas.source import jit

TARGET = GPUTarget("cuda", 90, 32)
"""The GPU to compile for, which need not be there."""


def load(formula: Any, tensors: int, numbers: int, results: int) -> None:
    """Compile a kernel that loads a formula's tensors, inlines the formula and stores its results. Triton keeps what it compiled.

    In Triton's interpreter the kernel runs, once.

    Raises:
        FormulaError: Triton refuses the formula.
    """
    inputs, scalars = [f"x{i}_ptr" for i in range(tensors)], [f"h{i}" for i in range(numbers)]
    loads = [f"tl.load({pointer} + at)" for pointer in inputs]
    values = [f"value{i}" for i in range(results)]
    lines = [
        "at = tl.arange(0, 128)",
        f"{', '.join(values)} = formula({', '.join([*loads, *scalars])})",
        *(f"tl.store(out_ptr + {i} * 128 + at, {value} + tl.zeros((128,), tl.float32))" for i, value in enumerate(values)),
    ]
    text = f"def kernel({', '.join([*inputs, 'out_ptr', *scalars])}):\n" + "".join(f"    {line}\n" for line in lines)
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    kernel = jit(definition, {"tl": tl, "formula": formula}, "kernel of a formula", __name__)
    try:
        if INTERPRETED:
            memory = torch.full(((tensors + results) * 128,), 0.5, dtype=torch.float32, device="cpu").split(128)
            with warnings.catch_warnings(action="ignore"):  # numpy's, of 0 / 0
                kernel[(1,)](*memory[:tensors], memory[tensors], *[0.5] * numbers)
        else:
            signature = {**dict.fromkeys([*inputs, "out_ptr"], "*fp32"), **dict.fromkeys(scalars, "fp32")}
            triton.compile(ASTSource(kernel, signature, {}), target=TARGET)
    except triton.TritonError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise FormulaError(f"{formula.__name__}: Triton refuses it: {' '.join(str(cause).split())}") from None
