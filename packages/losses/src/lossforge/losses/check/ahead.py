"""Compile a formula ahead of time for a GPU that need not be there, because the interpreter accepts much that CUDA's compiler refuses.

The formula is sent as text to another process, in which Triton compiles. In this process Triton may interpret, and it cannot do both.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import triton.language as tl

from lossforge import kernels
from lossforge.losses.check.report import Report
from lossforge.losses.custom.load import load
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.formulas.error import FormulaError
from lossforge.losses.formulas.source import Source, is_device_function, jit, parsed
from lossforge.losses.registry import Loss

SECTION, NAME = "compiled ahead of time", "for sm_90, without a GPU"
REFUSED = 3
"""Exit status of the process if the compiler refuses the formula."""


def check_ahead(loss: Loss, report: Report) -> None:
    formula = FORMULAS[loss.formula].kernels.formula
    tensors, results = len(loss.template.variables), 1 + loss.template.slopes
    sent = {"functions": pack(formula), "tensors": tensors, "numbers": len(parsed(formula).arguments) - tensors, "results": results}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = [sys.executable, "-m", f"{__package__}.ahead"]
    done = subprocess.run(argv, input=json.dumps(sent), env=environment, capture_output=True, text=True)
    if done.returncode in (0, REFUSED):
        report.add(SECTION, NAME, done.returncode == 0, done.stdout.strip())
    else:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        report.add(SECTION, NAME, None, f"Triton could not compile here: {reason}")


def pack(function: Any) -> list[dict[str, Any]]:
    """Pack a device function and those that it calls, each after what it calls, as text and the meaning of each name in it."""
    packed: dict[int, tuple[int, dict[str, Any]]] = {}

    def place(one: Any) -> int:
        if id(one) not in packed:
            source = parsed(one)
            names = {name: stands_for(source.names[name]) for name in used(source)}
            text = ast.unparse(ast.fix_missing_locations(source.definition))
            packed[id(one)] = len(packed), {"name": source.name, "text": text, "names": names}
        return packed[id(one)][0]

    def stands_for(value: Any) -> dict[str, Any]:
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, tl.constexpr):
            return {"constant": value.value}
        if isinstance(value, tl.dtype):
            return {"of": ["triton.language", value.name]}
        if is_device_function(value) and value.fn.__module__.startswith(kernels.__name__):
            return {"of": [value.fn.__module__, value.fn.__name__]}
        if is_device_function(value):
            return {"function": place(value)}
        return {"of": [value.__module__, value.__name__]}

    place(function)
    return [entry for _, entry in sorted(packed.values(), key=lambda numbered: numbered[0])]


def used(source: Source) -> list[str]:
    """Return the names from outside that a function reads."""
    return sorted({node.id for node in ast.walk(source.definition) if isinstance(node, ast.Name) and node.id in source.names})


def unpack(packed: list[dict[str, Any]]) -> Any:
    """Return the device function that `pack` was given, ready to be compiled."""
    made: list[Any] = []

    def value(meaning: dict[str, Any]) -> Any:
        if "module" in meaning:
            return importlib.import_module(meaning["module"])
        if "constant" in meaning:
            return tl.constexpr(meaning["constant"])
        if "function" in meaning:
            return made[meaning["function"]]
        module, name = meaning["of"]
        return getattr(importlib.import_module(module), name)

    for entry in packed:
        names = {"tl": tl, **{name: value(meaning) for name, meaning in entry["names"].items()}}
        definition = ast.parse(entry["text"]).body[0]
        assert isinstance(definition, ast.FunctionDef)
        made.append(jit(definition, names, entry["name"], f"packed_{len(made)}"))
    return made[-1]


def main() -> int:
    sent = json.load(sys.stdin)
    try:
        load(unpack(sent["functions"]), sent["tensors"], sent["numbers"], sent["results"])
    except FormulaError as problem:
        print(problem)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
