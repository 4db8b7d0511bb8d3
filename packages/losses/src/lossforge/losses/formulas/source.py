"""Read a formula's source: straight-line mathematics over elements, as a syntax tree in which each call is resolved."""

import ast
import difflib
import functools
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl

from lossforge.kernels import math
from lossforge.losses.formulas import powers
from lossforge.losses.formulas.device_names import Placeholder
from lossforge.losses.formulas.error import FormulaError

DEVICE_FUNCTIONS = (triton.JITFunction, type(math.exp2))
"""Types that @triton.jit returns; the second is the interpreter's."""


def is_device_function(value: Any) -> bool:
    """Return whether @triton.jit made `value`."""
    return isinstance(value, DEVICE_FUNCTIONS)


def of_language(value: Any) -> bool:
    """Return whether `value` is a function or type of triton.language."""
    return str(getattr(getattr(value, "fn", value), "__module__", "")).startswith("triton.language")


LANGUAGE = (tl, tl.math, tl.core)
SHARED = {id(value): name for name, value in vars(math).items() if is_device_function(value)}
"""The device functions of lossforge.kernels.math, whose derivatives and torch counterparts are known."""
LANGUAGE_NAMES = {*(name for name in dir(tl) if not name.startswith("_") and callable(getattr(tl, name))), "tanh"}
"""Names that a formula may call as tl.name: triton.language's functions, and tanh, which it lacks."""
PYTHON = {"min": "minimum", "max": "maximum", "absolute": "abs", "fabs": "abs"}
"""triton.language's names for functions that have another name elsewhere."""
ACROSS = ("sum", "max", "min", "argmax", "argmin", "xor_sum", "reduce", "cumsum", "cumprod", "associative_scan", "sort", "softmax", "dot")
"""Functions of triton.language over several elements. They would run over a tile, which is not a row."""
STRAIGHT = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
SEVERAL = {"logistic": 3, "powers": 2, "complement": 2}
"""Number of results of functions with more than one."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Source:
    """A device function: its definition as a syntax tree without decorators, and the names from outside that it uses."""

    name: str
    definition: ast.FunctionDef
    names: dict[str, Any]
    file: str
    first_line: int
    module: str

    @property
    def arguments(self) -> list[str]:
        return [a.arg for a in self.definition.args.args]

    @property
    def statements(self) -> list[ast.stmt]:
        """Return the statements without the docstring."""
        body = self.definition.body
        documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        return body[1:] if documented else body

    @functools.cached_property
    def locals(self) -> set[str]:
        """Return the names of its arguments and variables."""
        stored = {n.id for n in ast.walk(self.definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return {*self.arguments} | stored

    def unused(self, name: str) -> str:
        """Return the name, with underscores behind it where the function uses it."""
        while name in self.locals or name in self.names:
            name += "_"
        return name

    @property
    def space(self) -> str:
        """Return the module of functions made from this one. It differs for two of one name, whose results Triton would confuse."""
        return f"made_from_{self.module}_{self.first_line}"

    def fault(self, node: ast.AST, problem: str) -> FormulaError:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        return FormulaError(f"{self.name}: {problem}, in `{ast.unparse(node).splitlines()[0]}` ({self.file}:{line})")

    def resolve(self, node: ast.expr) -> Any:
        """Return the value of a name or dotted name; None for a variable of the function."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return None if base is None else getattr(base, node.attr, None)
        return None

    def operation(self, call: ast.Call) -> "tuple[str, Any]":
        """Return the kind of a call, and what it calls.

        One of ("language", name in triton.language), ("shared", name in lossforge.kernels.math), ("function", device function),
        ("method", name), called on a variable, or ("number", "float") of a string such as "-inf".
        """
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
        if of_language(found) and isinstance(function, ast.Name):
            raise self.fault(call, f"{function.id} is called without its module; write tl.{found.__name__}")
        if is_device_function(found):
            return "function", found
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        said = f"calls {ast.unparse(function)}, which is neither of triton.language nor a @triton.jit function"
        raise self.fault(call, said + nearest(name, LANGUAGE_NAMES, "tl."))

    def without(self, name: str, reason: str) -> None:
        """Refuse triton.language's function `name`.

        Raises:
            FormulaError: the formula calls it.
        """
        for call in (node for node in ast.walk(self.definition) if isinstance(node, ast.Call)):
            called = call.func
            if isinstance(called, ast.Attribute) and called.attr == name and any(self.resolve(called.value) is m for m in LANGUAGE):
                raise self.fault(call, f"{name} cannot stand here: {reason}")


def nearest(name: str, names: Iterable[str], prefix: str) -> str:
    """Return a suggestion for an unknown name, to append to a message; empty if no name is similar."""
    found = [PYTHON[name]] if name in PYTHON else difflib.get_close_matches(name, names, 1)
    return f"; write {prefix}{found[0]}" if found else ""


def parsed(function: Any) -> Source:
    """Read the source of a @triton.jit function.

    Raises:
        FormulaError: it is another object, or its source cannot be found.
    """
    if not is_device_function(function):
        raise FormulaError(f"a formula is a @triton.jit function, got {type(function).__name__}")
    plain = function.fn
    if plain.__name__ == "<lambda>":
        raise FormulaError("a formula is a function written with def, got a lambda, which Triton does not compile")
    try:
        lines, first = inspect.getsourcelines(plain)
    except OSError as e:
        raise FormulaError(f"{plain.__name__}: its source cannot be read ({e}); define it in a file") from None
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    outer = {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}
    source = Source(plain.__name__, definition, outer, inspect.getfile(plain), first, str(plain.__module__))
    for name in source.locals & {*outer}:
        del outer[name]
    if not any(value is tl for value in outer.values()):
        raise FormulaError(
            f"{source.name}: Triton wants its language as a name in the formula's file: import triton.language as tl ({source.file})"
        )
    return source


def read(function: Any) -> Source:
    """Read the source of a formula, and write out the operations that Triton lacks: small integer powers and tl.tanh.

    Raises:
        FormulaError: it was not made by @triton.jit, its source cannot be found, it branches or loops, or CUDA's compiler would refuse it.
    """
    source = parsed(function)
    _check_and_write_out(source)
    return source


def _check_and_write_out(source: Source) -> bool:
    """Check the formula, write out what Triton lacks, and return whether anything was."""
    _check_statements(source)
    _check_expressions(source)
    write = _WriteOut(source)
    write.visit(source.definition)
    return write.changed


def _check_statements(source: Source) -> None:
    given = source.definition.args
    if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg:
        raise source.fault(source.definition, "a formula has plain arguments, without / and *")
    for statement in source.statements:
        if not isinstance(statement, STRAIGHT):
            kind = type(statement).__name__.lower()
            raise source.fault(statement, f"{kind} is not allowed in a formula, which is assignments and a return; choose by tl.where")
    if not isinstance(source.statements[-1], ast.Return) or source.statements[-1].value is None:
        raise source.fault(source.statements[-1], "a formula ends by returning its value")
    if any(isinstance(statement, ast.Return) for statement in source.statements[:-1]):
        raise source.fault(source.definition, "a formula returns once, at its end")


def _check_expressions(source: Source) -> None:
    """Refuse what the interpreter may accept but CUDA's compiler does not, because without a GPU only the interpreter runs."""
    known = set(source.arguments)
    for statement in source.statements:
        assert isinstance(statement, STRAIGHT)
        if statement.value is not None:
            for node in ast.walk(statement.value):
                _check_expression(source, node, known)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name) and statement.target.id not in known:
            raise source.fault(statement, f"{statement.target.id} is not defined yet")
        known |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _check_expression(source: Source, node: ast.AST, known: set[str]) -> None:
    if isinstance(node, ast.BoolOp):
        word, sign = ("and", "&") if isinstance(node.op, ast.And) else ("or", "|")
        raise source.fault(node, f"`{word}` takes one truth value, and elements have one each; write (a) {sign} (b)")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        raise source.fault(node, "`not` takes one truth value, and elements have one each; write tl.where(a, b, c) with b and c exchanged")
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        raise source.fault(node, "Triton takes no chained comparison; write (a < b) & (b < c)")
    if isinstance(node, ast.IfExp):
        raise source.fault(node, "`if` takes one truth value, and elements have one each; write tl.where(a, b, c)")
    if isinstance(node, ast.Call):
        _check_call(source, node)
    if isinstance(node, ast.Name) and node.id not in known:
        _check_global(source, node)


def _check_call(source: Source, call: ast.Call) -> None:
    kind, found = source.operation(call)
    if kind == "language" and found not in LANGUAGE_NAMES:
        raise source.fault(call, f"triton.language has no function {found}{nearest(found, LANGUAGE_NAMES, 'tl.')}")
    if kind in ("language", "method") and found in ACROSS:
        instead = f"; write tl.{PYTHON[found]}(a, b) for one of two" if found in PYTHON else ""
        raise source.fault(call, f"{found} is over a tile of elements, and a formula sees one element{instead}")
    if kind == "method" and not hasattr(tl.tensor, found):
        raise source.fault(call, f"elements have no method {found}{nearest(found, LANGUAGE_NAMES, 'tl.')}")
    function = found if kind == "function" else getattr(math, found) if kind == "shared" else None
    if function is not None and not any(isinstance(given, ast.Starred) for given in call.args):
        taken = inspect.signature(function.fn)
        try:
            taken.bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
        except TypeError as problem:
            raise source.fault(call, f"{function.__name__} takes {taken}: {problem}") from None


def _check_global(source: Source, node: ast.Name) -> None:
    if node.id not in source.names:
        if node.id != "float":
            raise source.fault(node, f"{node.id} is not defined{nearest(node.id, [*source.arguments, *source.names], '')}")
        return
    value = source.names[node.id]
    if isinstance(value, (ModuleType, tl.constexpr, tl.dtype)) or is_device_function(value) or of_language(value):
        return
    if isinstance(value, (int, float)):
        instead = f"write {node.id} = tl.constexpr({value!r}), or make it a hyper-parameter: hyper={{{node.id!r}: {value!r}}}"
    else:
        instead = "give it as a number, tl.constexpr(...), or as a hyper-parameter"
    said = f"{node.id} is a {type(value).__name__} from outside of the function, which Triton does not compile"
    raise source.fault(node, f"{said}; {instead}")


class _WriteOut(ast.NodeTransformer):
    """Replaces operations that Triton lacks by device functions, in a formula and in those that it calls."""

    def __init__(self, source: Source) -> None:
        self.source, self.changed = source, False

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Write x += y as x = x + y: in plain torch, x += y would write to the tensor that x names, perhaps the caller's."""
        self.changed = True
        value = ast.copy_location(ast.BinOp(ast.Name(ast.unparse(node.target), ast.Load()), node.op, node.value), node)
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Pow):
            return node
        base, exponent = self._number(node.left), self._number(node.right)
        if base is not None and exponent is not None:  # a variable of -2.0 is a tensor to Triton, and tensors have no operator **
            self.changed = True
            return ast.copy_location(ast.Constant(self._constant_power(node, base, exponent)), node)
        if exponent is None or exponent not in powers.WHOLE:
            taken = ", ".join(map(str, powers.WHOLE))
            instead = "write tl.sqrt(a) for a ** 0.5, 1 / a for a ** -1, tl.exp2(b * tl.log2(a)) for a ** b with a above 0"
            raise self.source.fault(node, f"an exponent must be one of {taken}, as a constant; {instead}")
        return self._call(powers.WHOLE[int(exponent)], node, [node.left])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        kind, found = self.source.operation(node)
        self.generic_visit(node)
        if (kind, found) == ("language", "tanh"):
            return self._call(math.tanh, node, node.args, node.keywords)
        if kind == "function" and written_out(found) is not found:
            return self._call(written_out(found), node, node.args, node.keywords)
        return node

    def _constant_power(self, node: ast.expr, base: float, exponent: float) -> float:
        try:
            value = base**exponent
        except ArithmeticError as problem:
            raise self.source.fault(node, f"{problem}") from None
        if not isinstance(value, (int, float)):
            raise self.source.fault(node, "a power must be a real number")
        return value

    def _number(self, node: ast.expr) -> float | None:
        """Return the value of a constant; None if the expression depends on arguments."""
        try:
            value = ast.literal_eval(node)
        except ValueError:
            value = self.source.resolve(node)
        value = value.value if isinstance(value, tl.constexpr) else value
        return value if isinstance(value, (int, float)) else None

    def _call(self, function: Any, node: ast.expr, args: list[ast.expr], keywords: Sequence[ast.keyword] = ()) -> ast.expr:
        name = f"lossforge_{function.fn.__name__}"
        while self.source.names.setdefault(name, function) is not function:
            name += "_"
        self.changed = True
        return ast.copy_location(ast.Call(ast.copy_location(ast.Name(name, ast.Load()), node), args, list(keywords)), node)


@functools.cache
def device(function: FunctionType) -> Any:
    """Make a device function from a copy of a plain function, with the names of device_names filled in, and numbers as constants.

    Plain functions that it calls become device functions, too.
    """
    seen: dict[str, Any] = {"__name__": function.__module__, "tl": tl}
    for name in {*function.__code__.co_names} & {*function.__globals__}:
        value = function.__globals__[name]
        if isinstance(value, FunctionType):
            value = device(value)
        elif isinstance(value, Placeholder):
            value = value.filled()
        seen[name] = tl.constexpr(value) if isinstance(value, (int, float)) else value
    made = FunctionType(function.__code__, seen, function.__name__, function.__defaults__)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(made)


_written: dict[int, tuple[Any, Any]] = {}


def written_out(function: Any) -> Any:
    """Return the device function with what Triton lacks written out; the same function if that is nothing, or if it branches or loops."""
    known = _written.get(id(function))
    if known is None:
        source, changed = parsed(function), False
        if all(isinstance(statement, STRAIGHT) for statement in source.statements):
            changed = _check_and_write_out(source)
        made = jit(source.definition, {**source.names, "tl": tl}, source.name, source.space) if changed else function
        known = _written[id(function)] = function, made
    return known[1]


def results(source: Source) -> int:
    """Return how many values a formula returns: one, the length of the tuple at its end, or as many as the function at its end."""
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


def compiled(definition: ast.FunctionDef, names: dict[str, Any], origin: str) -> Callable[..., Any]:
    """Compile a definition with these names. inspect finds the function's source, because Triton needs it."""
    text = ast.unparse(ast.fix_missing_locations(definition)) + "\n"
    file = f"<lossforge {next(_numbers)}: {origin}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = dict(names)
    exec(compile(text, file, "exec"), made)  # our own translation of a formula
    function: Callable[..., Any] = made[definition.name]
    return function


def jit(definition: ast.FunctionDef, names: dict[str, Any], origin: str, module: str) -> Any:
    """Make a device function of `module`; Triton takes functions of one module and name for one."""
    return triton.jit(compiled(definition, {**names, "__name__": module}, origin))
