"""Derive a formula by its first argument in forward mode. The result is written out as another device function.

The derivative of each operation follows its value, by the rules below. What does not depend on the argument has no derivative and costs
nothing. The compiler shares what value and derivative have in common.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl

from lossforge.kernels import math
from lossforge.losses.formulas.error import FormulaError
from lossforge.losses.formulas.source import Source, jit, read, results, written_out

TINY = math.TINY.value
ZERO_SLOPE = ("floor", "ceil", "zeros_like", "hold")
ZEROS = "tl.where({0} == {0}, 0.0, 0.0)"
"""zeros_like, written out because Gluon, the language of the kernel for long rows, lacks it."""
Rule = Callable[..., str]
"""(value, arguments, derivatives of the arguments, None for one that does not depend on the variable) → source of the derivative."""


def _scaled(factor: str) -> Rule:
    return lambda v, a, d: f"{factor.format(v=v, a=a[0])} * {d[0]}"


LANGUAGE: dict[str, Rule] = {
    "exp": _scaled("{v}"),
    "exp2": _scaled("0.6931471805599453 * {v}"),
    "log": lambda v, a, d: f"{d[0]} / {a[0]}",
    "log2": lambda v, a, d: f"{d[0]} / (0.6931471805599453 * {a[0]})",
    "sqrt": lambda v, a, d: _over_root(v, d),
    "sqrt_rn": lambda v, a, d: _over_root(v, d),
    "rsqrt": lambda v, a, d: f"-0.5 * {v} * {d[0]} * {v} * {v}",  # one after the other, because a power of v may underflow
    "sin": _scaled("tl.cos({a})"),
    "cos": _scaled("(0.0 - tl.sin({a}))"),
    "sigmoid": _scaled("({v} * (1.0 - {v}))"),
    "erf": _scaled("(1.1283791670955126 * tl.exp(0.0 - {a} * {a}))"),
    "abs": _scaled("tl.where({a} > 0, 1.0, tl.where({a} < 0, -1.0, 0.0))"),
    "fdiv": lambda v, a, d: _quotient(v, a, d),
    "div_rn": lambda v, a, d: _quotient(v, a, d),
    "maximum": lambda v, a, d: _choice(a, d, ">"),
    "minimum": lambda v, a, d: _choice(a, d, "<"),
    "where": lambda v, a, d: f"tl.where({a[0]}, {d[1] or 0.0}, {d[2] or 0.0})",
    "clamp": lambda v, a, d: f"tl.where(({a[0]} >= {a[1]}) & ({a[0]} <= {a[2]}), {d[0]}, 0.0)",
    "fma": lambda v, a, d: _sum(_product(a[:2], d[:2]), d[2]),
    "cast": lambda v, a, d: str(d[0]),
}
SHARED: dict[str, Rule] = {
    **{name: LANGUAGE[name] for name in ("exp", "exp2", "log", "log2")},
    "log2_subnormal": LANGUAGE["log2"],
    "reciprocal": lambda v, a, d: f"(0.0 - {v}) * {d[0]} * {v}",
    "tanh": _scaled("(1.0 - {v} * {v})"),
    "product": lambda v, a, d: str(_product(a, d)),
    "log1p_unit": lambda v, a, d: f"{d[0]} / (1.0 + {a[0]})",
    "log1p_ratio": lambda v, a, d: f"{d[0]} / (1.0 + {a[0]})",
}
SHARED_TUPLES: dict[str, Callable[..., list[str]]] = {
    "logistic": lambda v, a, d: [
        f"{v[0]} * {v[1]} * {d[0]}",
        f"(0.0 - {v[0]} * {v[1]}) * {d[0]}",
        f"tl.where({a[0]} > 0, 0.0 - {v[1]}, tl.where({a[0]} < 0, {v[0]}, 0.0)) * {d[0]}",
    ],
    "complement": lambda v, a, d: [f"{v[1]} * {d[0]}", f"(0.0 - {v[1]}) * {d[0]}"],
}
POWERS = {"power": ("{0}",), "powers": ("{0}", "({0} - 1.0)")}
"""Powers, by their exponents in terms of the argument γ. q^γ has the slope γ q^(γ-1), for which `powers` returns the limit at q = 0."""
CONSTANT: dict[str, tuple[int, ...]] = {"clamp": (1, 2), "where": (0,), "power": (1,), "powers": (1,)}
"""Arguments that must not depend on the variable."""


def _over_root(v: str, d: list[str | None]) -> str:
    """Return d / 2√a, finite at a = 0, so that its product with 0 is 0, not nan: the derivatives of √(x²) and x √x need that."""
    return f"0.5 * {d[0]} / tl.maximum({v}, {TINY}, propagate_nan=tl.PropagateNan.ALL)"


def _sum(a: str | None, b: str | None) -> str:
    return f"{a} + {b}" if a and b else str(a or b)


def _product(a: list[str], d: list[str | None]) -> str | None:
    terms = [f"{slope} * {other}" for slope, other in zip(d, reversed(a), strict=True) if slope]
    return " + ".join(terms) or None


def _quotient(v: str, a: list[str], d: list[str | None]) -> str:
    if not d[1]:
        return f"{d[0]} / {a[1]}"
    return f"({d[0]} - {v} * {d[1]}) / {a[1]}" if d[0] else f"(0.0 - {v} * {d[1]}) / {a[1]}"


def _choice(a: list[str], d: list[str | None], better: str) -> str:
    """Choose the derivative of the better argument, and half of each for a tie, as torch does."""
    first, second = d[0] or "0.0", d[1] or "0.0"
    worse = "<" if better == ">" else ">"  # not b > a, because Triton 3.9's interpreter compares no constant with a tensor
    return f"tl.where({a[0]} {better} {a[1]}, {first}, tl.where({a[0]} {worse} {a[1]}, {second}, 0.5 * ({first}) + 0.5 * ({second})))"


BINARY: dict[type[ast.operator], Callable[[str, list[str], list[str | None]], str]] = {
    ast.Add: lambda v, a, d: _sum(d[0], d[1]),
    ast.Sub: lambda v, a, d: f"{d[0]} - {d[1]}" if d[0] and d[1] else str(d[0] or f"0.0 - {d[1]}"),
    ast.Mult: lambda v, a, d: str(_product(a, d)),
    ast.Div: _quotient,
}


@dataclass
class _Forward:
    """Writes a function's statements anew, each followed by the derivatives of what it assigned. known: as in `_derived`."""

    source: Source
    names: dict[str, Any]
    known: dict[Any, Any]
    slopes: dict[str, str | None] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def assign(self, expression: str, slope: bool = False) -> str:
        name = self.source.unused(f"{'slope' if slope else 'term'}_{len(self.lines)}")
        self.lines.append(f"{name} = {expression}")
        return name

    def expression(self, node: ast.expr) -> tuple[str, str | None]:
        """Return (source of the value, source of its derivative or None). Each is a name or constant, which can be repeated at no cost."""
        if isinstance(node, ast.Name):
            return node.id, self.slopes.get(node.id)
        if isinstance(node, (ast.Constant, ast.Attribute)):
            return ast.unparse(node), None
        if isinstance(node, ast.Call):
            (value,), (slope,) = self.call(node)
            return value, slope
        if isinstance(node, ast.UnaryOp):
            value, slope = self.expression(node.operand)
            sign = {ast.USub: "-", ast.UAdd: "+", ast.Not: "not ", ast.Invert: "~"}[type(node.op)]
            if slope is not None and isinstance(node.op, (ast.Not, ast.Invert)):
                raise self.fault(node)
            return self.assign(f"{sign}{value}"), None if slope is None else self.assign(f"{sign}{slope}", True)
        if isinstance(node, ast.BinOp):
            (a, da), (b, db) = self.expression(node.left), self.expression(node.right)
            value = self.assign(ast.unparse(ast.BinOp(ast.Name(a), node.op, ast.Name(b))))
            if da is None and db is None:
                return value, None
            rule = BINARY.get(type(node.op))
            if rule is None:
                raise self.fault(node)
            return value, self.assign(rule(value, [a, b], [da, db]), True)
        if isinstance(node, ast.Compare):
            parts = [self.expression(part)[0] for part in (node.left, *node.comparators)]
            left, *right = parts
            return self.assign(ast.unparse(ast.Compare(ast.Name(left), node.ops, [ast.Name(part) for part in right]))), None
        if isinstance(node, ast.BoolOp):
            values = [self.expression(part) for part in node.values]
            if any(slope is not None for _, slope in values):
                raise self.fault(node)
            return self.assign(ast.unparse(ast.BoolOp(node.op, [ast.Name(value) for value, _ in values]))), None
        raise self.fault(node)

    def call(self, node: ast.Call) -> tuple[list[str], list[str | None]]:
        """Return values and derivatives of the results of a call."""
        kind, found = self.source.operation(node)
        if kind == "number":
            return [ast.unparse(node)], [None]
        if kind == "method":
            assert isinstance(node.func, ast.Attribute)
            value, slope = self.expression(node.func.value)
            if found != "to" and slope is not None:
                raise self.fault(node)
            converted = ast.Call(ast.Attribute(ast.Name(value), found), node.args, node.keywords)
            return [self.assign(ast.unparse(converted))], [slope]
        given = [self.expression(argument) for argument in node.args]
        named = {word.arg: self.expression(word.value) for word in node.keywords}
        values, slopes = [value for value, _ in given], [slope for _, slope in given]
        depends = any(slope is not None for slope in slopes)
        if any(slope is not None for _, slope in named.values()):
            raise self.fault(node, "give what depends on the variable by position")
        keywords = [ast.keyword(name, ast.Name(value)) for name, (value, _) in named.items()]
        text = ast.unparse(ast.Call(node.func, [ast.Name(value) for value in values], keywords))
        if kind == "function":
            return self.inner(node, found, values, slopes, keywords, text)
        if depends and any(slopes[i] is not None for i in CONSTANT.get(found, ()) if i < len(slopes)):
            raise self.fault(node, "an argument that must be constant depends on the variable")
        if kind == "shared" and found in POWERS:
            return self.powers(POWERS[found], text, [*values, *(value for value, _ in named.values())], slopes[0])
        if kind == "shared" and found in SHARED_TUPLES:
            count = len(SHARED_TUPLES[found](["v"] * 3, ["a"] * 3, ["d"] * 3))
            made = self.unpack(text, count)
            if not depends:
                return made, [None] * count
            return made, [self.assign(slope, True) for slope in SHARED_TUPLES[found](made, values, slopes)]
        value = self.assign(ZEROS.format(values[0]) if (kind, found) == ("language", "zeros_like") else text)
        if not depends or found in ZERO_SLOPE:
            return [value], [None]
        rule = (LANGUAGE if kind == "language" else SHARED).get(found)
        if rule is None:
            raise self.fault(node)
        return [value], [self.assign(rule(value, values, slopes), True)]

    def powers(self, exponents: Sequence[str], text: str, values: list[str], slope: str | None) -> tuple[list[str], list[str | None]]:
        """Return values and derivatives of q to the power of each exponent."""
        made = self.unpack(text, len(exponents))
        if slope is None:
            return made, [None] * len(made)
        base, gamma = values
        name = self.source.unused(f"powers_{len(self.lines)}")
        self.names[name] = math.powers
        slopes: list[str | None] = []
        for exponent in (each.format(gamma) for each in exponents):
            _, lower = self.unpack(f"{name}({base}, {exponent})", 2)
            slopes.append(self.assign(f"{exponent} * {lower} * {slope}", True))
        return made, slopes

    def inner(
        self, node: ast.Call, function: Any, values: list[str], slopes: list[str | None], keywords: list[ast.keyword], text: str
    ) -> tuple[list[str], list[str | None]]:
        if id(function) not in self.known:
            self.known[id(function)] = results(read(function))
        count = self.known[id(function)]
        depends = tuple(slope is not None for slope in slopes)
        if not any(depends):
            return self.unpack(text, count), [None] * count
        derived, varies = _derived(function, depends, self.known)
        name = self.source.unused(f"{function.__name__}_derived_{len(self.lines)}")
        self.names[name] = derived
        arguments: list[ast.expr] = [ast.Name(v) for v in (*(slope for slope in slopes if slope is not None), *values)]
        made = self.unpack(ast.unparse(ast.Call(ast.Name(name), arguments, keywords)), count + sum(varies))
        gradients = iter(made[count:])
        return made[:count], [next(gradients) if one else None for one in varies]

    def unpack(self, text: str, count: int) -> list[str]:
        if count == 1:
            return [self.assign(text)]
        start = len(self.lines)
        made = [self.source.unused(f"part_{start}_{i}") for i in range(count)]
        self.lines.append(f"{', '.join(made)} = {text}")
        return made

    def several(self, node: ast.expr) -> tuple[list[str], list[str | None]]:
        if isinstance(node, ast.Tuple):
            pairs = [self.expression(part) for part in node.elts]
            return [value for value, _ in pairs], [slope for _, slope in pairs]
        if isinstance(node, ast.Call):
            return self.call(node)
        value, slope = self.expression(node)
        return [value], [slope]

    def statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.AnnAssign):
            assert statement.value is not None
            targets: list[ast.expr] = [statement.target]
            value = statement.value
        else:
            assert isinstance(statement, ast.Assign)
            targets, value = statement.targets, statement.value
        values, slopes = self.several(value)
        names = targets[0].elts if isinstance(targets[0], ast.Tuple) else targets
        if len(targets) != 1 or len(names) != len(values) or not all(isinstance(name, ast.Name) for name in names):
            raise self.fault(statement, "assign to one name, or to as many as there are values")
        held = [(self.assign(v), s if s is None else self.assign(s, True)) for v, s in zip(values, slopes, strict=True)]
        for name, (v, s) in zip(names, held, strict=True):
            self.lines.append(f"{ast.unparse(name)} = {v}")
            self.slopes[ast.unparse(name)] = s

    def fault(self, node: ast.AST, problem: str = "has no derivative here; return the gradient beside the value") -> Exception:
        return self.source.fault(node, problem)


def _derived(function: Any, depends: tuple[bool, ...], known: dict[Any, Any]) -> tuple[Any, list[bool]]:
    """Derive a device function by the arguments that `depends` marks, once. known: what was derived so far, and counts of results."""
    key = id(function), depends
    if key not in known:
        known[key] = _derive(function, depends, known)
    found: tuple[Any, list[bool]] = known[key]
    return found


def _derive(function: Any, depends: tuple[bool, ...], known: dict[Any, Any]) -> tuple[Any, list[bool]]:
    """Derive a device function.

    The result is a device function (derivatives of these arguments, arguments) → (values, derivatives of the values that depend on
    them), and a list that says which values do. The function's name says which arguments, because in one kernel Triton distinguishes
    functions with equal arguments only by name.
    """
    source = read(function)
    names = {**source.names, "tl": tl}
    slopes: dict[str, str | None] = {
        name: source.unused(f"slope_of_{name}") for name, one in zip(source.arguments, depends, strict=False) if one
    }
    forward = _Forward(source, names, known, dict(slopes))
    *body, last = source.statements
    for statement in body:
        forward.statement(statement)
    assert isinstance(last, ast.Return)
    assert last.value is not None
    values, gradients = forward.several(last.value)
    returned = ", ".join((*values, *(g for g in gradients if g is not None)))
    definition = _definition(
        source,
        f"{source.name}_derived_{''.join(str(int(one)) for one in depends)}",
        [*map(str, slopes.values()), *source.arguments],
        [*forward.lines, f"return {returned}"],
    )
    return jit(definition, names, f"{source.name}, derived", source.space), [g is not None for g in gradients]


def _definition(source: Source, name: str, arguments: list[str], lines: list[str]) -> ast.FunctionDef:
    text = f"def {name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.args.defaults = source.definition.args.defaults
    return definition


def differentiated(function: Any, variables: int = 1) -> Any:
    """Return a formula for a kernel to inline, → (value, derivatives). The derivatives are derived unless it returns them.

    Raises:
        FormulaError: it returns another number of values, or holds something that Triton lacks or that has no derivative.
    """
    source = read(function)
    count = results(source)
    if count not in (1, 1 + variables):
        gradient = "gradient" if variables == 1 else f"{variables} derivatives"
        raise FormulaError(f"{source.name}: returns {count} values; a formula returns its value, or (value, {gradient})")
    return written_out(function) if count > 1 else with_gradients(function, variables)


def with_gradients(function: Any, variables: int = 1) -> Any:
    """Return the device function → (value, its derivatives by the first `variables` arguments), for a formula → value.

    Raises:
        FormulaError: an operation has no derivative; the message names it.
    """
    source = read(function)
    names, given = source.arguments, ", ".join(source.arguments)
    seen: dict[str, Any] = {**source.names, "tl": tl}
    nothing, value = source.unused("nothing"), source.unused("value")
    known: dict[Any, Any] = {}  # helpers are derived once for all variables
    lines, slopes = [f"{nothing} = {ZEROS.format(names[0])}"], []
    for i in range(variables):
        name, slope = source.unused(f"derived_{i}"), source.unused(f"slope_{i}")
        seen[name], (varies,) = _derived(function, tuple(i == k for k in range(len(names))), known)
        slopes.append(slope if varies else nothing)
        lines.append(f"{f'{value}, {slope}' if varies else value} = {name}({nothing} + 1.0, {given})")
    definition = _definition(source, source.name, names, [*lines, f"return {value} + {nothing}, {', '.join(slopes)}"])
    return jit(definition, seen, f"{source.name} with its gradient", source.space)
