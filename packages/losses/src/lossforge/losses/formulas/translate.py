"""Translate a formula to plain torch, operation by operation."""

import ast
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from lossforge.losses.formulas.source import Source, compiled, read
from lossforge.losses.templates.plain_forms import one_minus_exp

TINY = 1.1754943508222875e-38


def _tensor(like: Tensor, value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=like.dtype, device=like.device)


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes tensors of numbers, with the dtype and device of its first argument."""
    return lambda like, *values: function(*[_tensor(like, value) for value in values])


def _where(like: Tensor, condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    return torch.where(condition, _tensor(like, a), _tensor(like, b))


def _sqrt(x: Tensor) -> Tensor:
    """Return √x with a finite derivative at 0, as the kernels have it."""
    zero = x == 0
    return torch.where(zero, x * (0.5 / TINY), torch.where(zero, 1.0, x).sqrt())


NAMES = ("exp", "exp2", "log", "log2", "rsqrt", "sin", "cos", "abs", "erf", "sigmoid", "floor", "ceil", "zeros_like")
LANGUAGE: dict[str, Callable[..., Any]] = {
    **{name: _of_tensors(getattr(torch, name)) for name in (*NAMES, "maximum", "minimum", "clamp")},
    **dict.fromkeys(("sqrt", "sqrt_rn"), _of_tensors(_sqrt)),
    **dict.fromkeys(("fdiv", "div_rn"), _of_tensors(torch.div)),
    "where": _where,
    "fma": lambda like, a, b, c: a * b + c,
    "cast": lambda like, x, dtype: _tensor(like, x),
}
"""torch's counterparts of triton.language's functions. The first argument of each is a tensor with the dtype and device to compute in."""


def _powers(like: Tensor, q: Any, gamma: Any) -> tuple[Tensor, Tensor]:
    """Return q^γ and q^(γ-1). At q = 0 their derivatives are limits, because the lower bound of q has no derivative."""
    q = _tensor(like, q)
    base = q + (q.clamp(min=TINY) - q).detach()
    return base**gamma, base ** (gamma - 1.0)


def _atan_ratio(y: Tensor, x: Tensor) -> Tensor:
    return torch.where((y == 0) & (x == 0), 0.0, torch.atan(y / torch.where(x == 0, TINY, x)))


SHARED: dict[str, Callable[..., Any]] = {
    **{name: _of_tensors(getattr(torch, name)) for name in ("exp", "exp2", "log", "log2", "tanh", "reciprocal")},
    "log2_subnormal": _of_tensors(torch.log2),
    "log1p_unit": _of_tensors(torch.log1p),
    "log1p_ratio": _of_tensors(lambda e, v: torch.log1p(e)),
    "logistic": _of_tensors(lambda x: (x.sigmoid(), (-x).sigmoid(), F.softplus(-x.abs()))),
    "power": lambda like, q, gamma: _powers(like, q, gamma)[0],
    "powers": _powers,
    "product": lambda like, a, b: a * b,
    "atan_ratio": _of_tensors(_atan_ratio),
    "complement": _of_tensors(lambda t: (one_minus_exp(t), torch.exp(-t))),
}
"""torch's counterparts of the functions of lossforge.kernels.math."""


LIKE = ast.Name("like_", ast.Load())


def _hold(like: Tensor, x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


class _Translate(ast.NodeTransformer):
    def __init__(self, source: Source, names: dict[str, Any], hold: Callable[..., Any]) -> None:
        self.source, self.names, self.hold = source, names, hold

    def visit_Call(self, node: ast.Call) -> Any:
        node.keywords = [word for word in node.keywords if word.arg != "propagate_nan"]  # torch's functions always do
        self.generic_visit(node)
        kind, found = self.source.operation(node)
        if kind == "number":
            return node
        if kind == "method":
            if found == "to" and isinstance(node.func, ast.Attribute):
                return node.func.value  # the reference computes in one dtype
            raise self.source.fault(node, f"the method .{found} has no plain-torch counterpart; give reference=")
        if kind == "function":
            return ast.Call(self._name(_translated(found, self.hold), found.__name__), [LIKE, *node.args], node.keywords)
        if (kind, found) == ("shared", "hold"):
            return ast.Call(self._name(self.hold, found), [LIKE, *node.args], node.keywords)
        table = LANGUAGE if kind == "language" else SHARED
        if found not in table:
            raise self.source.fault(node, f"{ast.unparse(node.func)} has no plain-torch counterpart; give reference=")
        return ast.Call(self._name(table[found], f"{kind}_{found}"), [LIKE, *node.args], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        value = self.source.resolve(node)
        return self.generic_visit(node) if value is None else self._constant(node, value)

    def visit_Name(self, node: ast.Name) -> Any:
        if not isinstance(node.ctx, ast.Load) or node.id not in self.source.names:
            return node
        return self._constant(node, self.source.names[node.id])

    def _constant(self, node: ast.expr, value: Any) -> Any:
        value = value.value if isinstance(value, tl.constexpr) else value
        if isinstance(value, (int, float)) and math.isfinite(value):
            return ast.Constant(value)
        return node

    def _name(self, value: Any, name: str) -> ast.Name:
        name = f"{name}_torch"
        while self.names.setdefault(name, value) is not value:
            name += "_"
        return ast.Name(name, ast.Load())


def _translated(function: Any, hold: Callable[..., Any]) -> Callable[..., Any]:
    """Translate a device function. The result's first argument is a tensor with the dtype and device to compute in."""
    source = read(function)
    names: dict[str, Any] = {"float": float}
    translate = _Translate(source, names, hold)
    body = [translate.visit(statement) for statement in source.statements]
    given = source.definition.args
    arguments = ast.arguments([], [ast.arg("like_"), *(ast.arg(a) for a in source.arguments)], None, [], [], None, given.defaults)
    return compiled(ast.FunctionDef(source.name, arguments, body, []), names, f"{source.name} in torch")


def torch_of(function: Any, hold: Callable[[Tensor, Any], Any] = _hold) -> Callable[..., Any]:
    """Return what a @triton.jit formula computes as a function in plain torch, for any floating dtype, and differentiable.

    hold: torch's counterpart of lossforge.kernels.math.hold. Its first argument is a tensor with the dtype and device to compute in.

    Raises:
        FormulaError: an operation has no counterpart; the message names it.
    """
    translated = _translated(function, hold)

    def reference(x: Tensor, *others: Any) -> Any:
        return translated(x, x, *others)

    return reference
