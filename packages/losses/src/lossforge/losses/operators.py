"""The templates as PyTorch operators, generated from the fields of their call records: `torch.ops.lossforge.rowwise` and its kin.

Each has a backward operator, and both a second form for hyper-parameters that are 0-d tensors under torch.compile: they are read when
the graph runs, so that another value compiles nothing. Operators take them as Python numbers; `<name>_scheduled` has as its first
argument a vector of those numbers that were tensors, and nan in their own places.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.call import KINDS, end_of_tensors
from lossforge.kernels.torch_internals import register_autograd
from lossforge.losses import checks
from lossforge.losses.autograd import Run, gradients, leaves, remember
from lossforge.losses.state import plain

LIBRARY = torch.library.Library("lossforge", "DEF")
DEVICES = ("CUDA", "CPU")  # on CPU the operators are reached only where the kernels are interpreted
_TYPES = {
    str: "str",
    str | None: "str?",
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    bool: "bool",
    list[float]: "float[]",
    list[bool]: "bool[]",
}


def schemas(record: Any) -> tuple[str, str]:
    """Return the schemas of a record's operator and of its backward, from the parenthesis on."""
    kind = KINDS[record]
    types = [(name, "SymInt" if name == "offset" else _TYPES[t]) for name, t in record.__annotations__.items()]
    fields = ", ".join(f"{t} {name}" for name, t in types)
    results = ", ".join(f"Tensor out_{name}" for name in (*kind.results, *kind.kept))
    grads = ", ".join(f"Tensor grad_{name}" for name in kind.differentiable)
    given = [f"Tensor? kept_{name}" for name in (*kind.kept, *kind.saved)]
    given += [f"Tensor? grad_{name}" for name in kind.results[: kind.arriving]]
    wanted = ", ".join(f"bool want_{name}" for name in kind.differentiable)  # no list, which torch.jit.trace cannot trace
    return f"({fields}, {wanted}, bool keep) -> ({results}, {grads})", f"({fields}, {', '.join(given)}, {wanted}) -> ({grads})"


def _placeholders(x: Tensor, results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return results as operators must: an empty tensor where there is none."""
    return tuple([x.new_empty(0) if t is None else t for t in results])


def _new(call: Any, wanted: Sequence[bool]) -> list[Tensor | None]:
    return [torch.empty_like(t) if want else None for t, want in zip(leaves(call), wanted, strict=True)]


def _register(record: Any) -> None:
    """Define the operator of a record, its backward, and the second form of both."""
    kind = KINDS[record]
    name, count = kind.operator, len(record._fields)
    kept, several = len(kind.kept) + len(kind.saved), len(kind.differentiable)

    def forwards(*args: Any) -> tuple[Tensor, ...]:
        call = record(*args[:count])
        written = _new(call, args[count:-1])
        results, others = Run.of(call).forward(args[1 : end_of_tensors(call)], written, args[-1], alone=False)
        return _placeholders(call[1], (*results, *others[: len(kind.kept)], *written))

    def backwards(*args: Any) -> Any:
        call, given = record(*args[:count]), [None if t is None or t.numel() == 0 else t for t in args[count : count + kept]]
        written = _new(call, args[-several:])
        Run.of(call).backward(args[1 : end_of_tensors(call)], tuple(given), args[count + kept : -several], written)
        return _one_or_several(call, written)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        call = record(*args[:count])
        x = call[1]
        shapes = call.shapes(args[-1])
        results = [torch.empty_like(s) if isinstance(s, Tensor) else None if s is None else x.new_empty(s[0], dtype=s[1]) for s in shapes]
        return _placeholders(x, (*results, *_new(call, args[count:-1])))

    def fake_backward(*args: Any) -> Any:
        call = record(*args[:count])
        return _one_or_several(call, _new(call, args[-several:]))

    def setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        call, end = record(*inputs[:count]), len(kind.results)
        shapes = call.shapes(inputs[-1])
        there = [s is not None for s in shapes[:end]]
        saved = [output[i] if there[i] else None for i in map(kind.results.index, kind.saved)]
        others = tuple([None if t is None else t.detach() for t in (*output[end : end + len(kind.kept)], *saved)])
        written = [g.detach() if want else None for g, want in zip(output[end + len(kind.kept) :], inputs[count:-1], strict=True)]
        remember(ctx, Run.of(call), call[1 : end_of_tensors(call)], there, others, written)

    def differentiate(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        first = len(ctx.needs_input_grad) - count - several  # before it the dispatcher's keys, perhaps numbers, and the formula's name
        found = gradients(ctx, arriving, ctx.needs_input_grad[first : first + several])
        return None, *found, *(None,) * count

    def setup_scheduled(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        numbers, *args = inputs
        known = plain(numbers)
        ctx.numbers = None if known else numbers
        setup(ctx, filled(numbers, args) if known else args, output)

    for suffix, schema, real, traced in zip(("", "_backward"), schemas(record), (forwards, backwards), (fake, fake_backward), strict=True):
        _define(f"{name}{suffix}", schema, real, traced)
        _define(f"{name}{suffix}_scheduled", f"(Tensor numbers, {schema[1:]}", _filling(real), _skipping(traced))
    register_autograd(LIBRARY, name, setup, differentiate)
    register_autograd(LIBRARY, f"{name}_scheduled", setup_scheduled, lambda ctx, *arriving: (None, *differentiate(ctx, *arriving)))
    _no_double_backward(f"{name}_backward")
    _no_double_backward(f"{name}_backward_scheduled")


def _one_or_several(call: Any, written: Sequence[Tensor | None]) -> Any:
    found = _placeholders(call[1], written)
    return found if len(found) > 1 else found[0]


def _filling(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda numbers, *args: function(*filled(numbers, args))


def _skipping(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args: function(*args)


def _define(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    LIBRARY.define(f"{name}{schema}", tags=[torch.Tag.pt2_compliant_tag])
    for device in DEVICES:
        LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"lossforge::{name}", fake, lib=LIBRARY)


def _no_double_backward(name: str) -> None:
    """Make the backward operator refuse differentiation, rather than give a gradient without a graph in silence."""

    def refuse(ctx: Any, *arriving: Tensor | None) -> None:
        raise RuntimeError(
            f"lossforge::{name} cannot be differentiated. Differentiate the loss twice with torch.autograd.grad(..., create_graph=True) "
            "outside of torch.compile, or call the loss under lossforge.losses.plain_torch()."
        )

    torch.library.register_autograd(f"lossforge::{name}", refuse, lib=LIBRARY)


def filled(numbers: Tensor, arguments: Sequence[Any]) -> list[Any]:
    """Return an operator's arguments with the numbers in their places."""
    given = iter(numbers.tolist())

    def value(v: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return [value(each) for each in v]
        return next(given) if isinstance(v, float) and math.isnan(v) else v

    return [value(v) for v in arguments]


def _checked_number(value: Tensor, name: str, low: float, high: float, exclusive: bool) -> Tensor:
    """Do what checks.number does, when the graph runs."""
    return torch.tensor(checks.number(name, value.item(), low, high, exclusive), dtype=torch.float64)


LIBRARY.define("number(Tensor value, str name, float low, float high, bool exclusive) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
LIBRARY.impl("number", _checked_number, "CPU")
torch.library.register_fake("lossforge::number", lambda value, *_: value.new_empty((), dtype=torch.float64), lib=LIBRARY)
for _record in KINDS:
    _register(_record)
