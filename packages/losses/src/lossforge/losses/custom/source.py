"""A formula's source: straight-line mathematics over elements, as a syntax tree whose calls are resolved."""

import ast
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from lossforge.kernels import math
from lossforge.losses.custom.error import FormulaError


def is_device_function(value: Any) -> bool:
    """Whether `value` is what @triton.jit makes. Its interpreter needs numpy: who has not imported it has nothing of it."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return isinstance(value, JITFunction) or (interpreter is not None and isinstance(value, interpreter.InterpretedFunction))


LANGUAGE = (tl, tl.math, tl.core)
SHARED = {id(value): name for name, value in vars(math).items() if is_device_function(value)}
"""The device functions of lossforge.kernels.math, whose derivatives and torch counterparts are known."""
SEVERAL = {"logistic": 3, "powers": 2, "complement": 2}
"""How many values those return that return more than one."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Source:
    """A device function: its parsed definition, without decorators, and the names that it sees beside its own variables."""

    name: str
    definition: ast.FunctionDef
    names: dict[str, Any]
    file: str
    first_line: int

    @property
    def arguments(self) -> list[str]:
        return [a.arg for a in self.definition.args.args]

    @property
    def statements(self) -> list[ast.stmt]:
        """Without the docstring."""
        body = self.definition.body
        documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        return body[1:] if documented else body

    def fault(self, node: ast.AST, problem: str) -> FormulaError:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        return FormulaError(f"{self.name}: {problem}, in `{ast.unparse(node).splitlines()[0]}` ({self.file}:{line})")

    def resolve(self, node: ast.expr) -> Any:
        """What a name or dotted name stands for; None where it is a variable of the function."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return None if base is None else getattr(base, node.attr, None)
        return None

    def operation(self, call: ast.Call) -> "tuple[str, Any]":
        """("language", name in triton.language), ("shared", name in lossforge.kernels.math), ("function", device function),
        ("method", name) of a variable, or ("number", "float") of a text such as "-inf"."""
        function = call.func
        if isinstance(function, ast.Name) and function.id == "float" and all(isinstance(given, ast.Constant) for given in call.args):
            return "number", "float"
        if isinstance(function, ast.Attribute):
            base = self.resolve(function.value)
            if any(base is module for module in LANGUAGE):
                return "language", function.attr
            if base is None:
                return "method", function.attr
        found = self.resolve(function)
        if id(found) in SHARED:
            return "shared", SHARED[id(found)]
        if is_device_function(found):
            return "function", found
        raise self.fault(call, f"calls {ast.unparse(function)}, which is neither of triton.language nor a @triton.jit function")

    def without(self, name: str, reason: str) -> None:
        """
        Raises:
            FormulaError: the formula calls triton.language's `name`.
        """
        for call in (node for node in ast.walk(self.definition) if isinstance(node, ast.Call)):
            called = call.func
            if isinstance(called, ast.Attribute) and called.attr == name and any(self.resolve(called.value) is m for m in LANGUAGE):
                raise self.fault(call, f"{name} cannot stand here: {reason}")


def read(function: Any) -> Source:
    """The source of a @triton.jit function.

    Raises:
        FormulaError: it is none, its source cannot be found, or it branches or loops.
    """
    if not is_device_function(function):
        raise FormulaError(f"a formula is a @triton.jit function, got {type(function).__name__}")
    plain = function.fn
    try:
        lines, first = inspect.getsourcelines(plain)
    except OSError as e:
        raise FormulaError(f"{plain.__name__}: its source cannot be read ({e}); define it in a file") from None
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    outer = {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}
    local = {a.arg for a in definition.args.args}
    local |= {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    seen = {name: value for name, value in outer.items() if name not in local}
    source = Source(plain.__name__, definition, seen, inspect.getfile(plain), first)
    if not any(value is tl for value in seen.values()):
        raise FormulaError(
            f"{source.name}: Triton wants its language as a name in the formula's file: import triton.language as tl ({source.file})"
        )
    for statement in source.statements:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)):
            raise source.fault(
                statement, f"{type(statement).__name__.lower()} is no formula: one is assignments and a return; choose by tl.where"
            )
    if not isinstance(source.statements[-1], ast.Return) or source.statements[-1].value is None:
        raise source.fault(source.statements[-1], "a formula ends by returning its value")
    if any(isinstance(statement, ast.Return) for statement in source.statements[:-1]):
        raise source.fault(definition, "a formula returns once, at its end")
    return source


def results(source: Source) -> int:
    """How many values a formula returns: one, or as many as the tuple at its end, or as the function that it ends with."""
    last = source.statements[-1]
    assert isinstance(last, ast.Return)
    assert last.value is not None
    if isinstance(last.value, ast.Tuple):
        return len(last.value.elts)
    if isinstance(last.value, ast.Call):
        kind, found = source.operation(last.value)
        if kind == "function":
            return results(read(found))
        if kind == "shared":
            return SEVERAL.get(found, 1)
    return 1


def compiled(definition: ast.FunctionDef, names: dict[str, Any], origin: str) -> tuple[Callable[..., Any], str]:
    """The function that a definition defines among these names, and its source, which inspect finds again, as Triton wants it."""
    text = ast.unparse(ast.fix_missing_locations(definition)) + "\n"
    file = f"<lossforge {next(_numbers)}: {origin}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = dict(names)
    exec(compile(text, file, "exec"), made)  # our own translation of a formula
    return made[definition.name], text


def jit(definition: ast.FunctionDef, names: dict[str, Any], origin: str) -> Any:
    return triton.jit(compiled(definition, names, origin)[0])
