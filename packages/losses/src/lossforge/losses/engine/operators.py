"""The templates as PyTorch operators, generated from the fields of their call records: such as `torch.ops.lossforge.rowwise`.

Each has a backward operator. Hyper-parameters are Python numbers, constants of a compiled graph. Those that were 0-d tensors under
torch.compile stand in the first argument, the vector `numbers`, with nan in their own places: one graph then serves all their values.
SymFloats would compile at every value or break the graph; docs/know/how_it_works.md has the measurements.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Head
from lossforge.kernels.plans import by_plan, layouts
from lossforge.kernels.torch_internals import register_autograd
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import NAMESPACE, OPERATORS
from lossforge.losses.base.record import FusedTemplate, Several, Template
from lossforge.losses.base.state import plain
from lossforge.losses.engine.gradients import gradients, new_gradients, of_reference, remember
from lossforge.losses.engine.linear.engine import FUSED
from lossforge.losses.engine.linear.exponentials import exponentials, new_exponentials, of_exponentials
from lossforge.losses.engine.spec import ExecutionSpec
from lossforge.losses.templates import TEMPLATES

LIBRARY = torch.library.Library(NAMESPACE, "DEF")
DEVICES = ("CUDA", "CPU")  # on CPU the operators are reached only where the kernels are interpreted
ANY_DEVICE = ("CompositeExplicitAutograd",)
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


def _fields(template: Template[Any]) -> str:
    types = {name: "SymInt" if name == "offset" else _TYPES[t] for name, t in template.fields().items()}
    return ", ".join(f"{t} {name}" for name, t in {"numbers": "Tensor?", "loss": "str", **types}.items())


def schemas(template: Template[Any]) -> tuple[str, str]:
    """Return the schemas of a template's operator and of its backward, from the parenthesis on."""
    fields = _fields(template)
    results = ", ".join(f"Tensor out_{name}" for name in (*template.results, *template.kept))
    grads = ", ".join(f"Tensor grad_{name}" for name in template.differentiable)
    given = [f"Tensor? kept_{name}" for name in (*template.kept, *template.saved)]
    given += [f"Tensor? grad_{name}" for name in template.results[: template.graded]]
    wanted = ", ".join(f"bool want_{name}" for name in template.differentiable)  # no list, which torch.jit.trace cannot trace
    return f"({fields}, {wanted}, bool keep) -> ({results}, {grads})", f"({fields}, {', '.join(given)}, {wanted}) -> ({grads})"


def _placeholders(x: Tensor, results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return results as operators must: an empty tensor where there is none."""
    return tuple([x.new_empty(0) if t is None else t for t in results])


def _register(template: Template[Any]) -> None:
    """Define the operator of a template and its backward."""
    name, count, end = template.name, 1 + len(template.fields()), 1 + template.end
    kept, several, results = len(template.kept) + len(template.saved), len(template.differentiable), len(template.results)

    def spec_of(args: Sequence[Any]) -> ExecutionSpec[Any]:
        return ExecutionSpec(template, args[0], tuple(args[end:count]))

    def forwards(*args: Any) -> tuple[Tensor, ...]:
        spec, tensors, keep = spec_of(args), args[1:end], args[-1]
        written = new_gradients(tensors, args[count:-1])
        key, forward = spec.key_of(tensors, "operator", keep, *args[count:-1]), template.launches.forward
        arguments = spec.formulas, written, keep and spec.keeps, False
        found = by_plan(key, (*tensors, *written), forward, lambda: (spec.call(tensors), *arguments))
        return _placeholders(args[1], (*found, *written))

    def backwards(*args: Any) -> Any:
        spec, tensors = spec_of(args), args[1:end]
        given: Several = tuple([None if t is None or t.numel() == 0 else t for t in args[count : count + kept]])
        grads, written = args[count + kept : -several], new_gradients(tensors, args[-several:])
        key, backward = spec.key_of(tensors, "operator", *layouts((*given, *grads)), *args[-several:]), template.launches.backward
        every = (*tensors, *given, *grads, *written)
        by_plan(key, every, backward, lambda: (spec.call(tensors), spec.formulas, given, grads, written))
        return _one_or_several(args[1], written)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        x = args[1]
        shapes = template.shapes(template.of(args[0], args[1:end], args[end:count]), args[-1])
        made = [torch.empty_like(s) if isinstance(s, Tensor) else None if s is None else x.new_empty(s[0], dtype=s[1]) for s in shapes]
        return _placeholders(x, (*made, *new_gradients(args[1:end], args[count:-1])))

    def fake_backward(*args: Any) -> Any:
        return _one_or_several(args[1], new_gradients(args[1:end], args[-several:]))

    def setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        numbers, inputs = inputs[0], inputs[1:]
        if numbers is not None and plain(numbers):
            numbers, inputs = None, filled(numbers, inputs)
        spec, tensors = spec_of(inputs), tuple(inputs[1:end])
        saved = [output[i] if spec.present[i] else None for i in map(template.results.index, template.saved)]
        others = tuple([None if t is None else t.detach() for t in (*output[results : results + len(template.kept)], *saved)])
        written = [g.detach() if want else None for g, want in zip(output[results + len(template.kept) :], inputs[count:-1], strict=True)]
        spec.vector = numbers
        remember(ctx, spec, tensors, others, written)

    def differentiate(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        first = len(ctx.needs_input_grad) - count - several  # before it the dispatcher's keys, the numbers and the formula's name
        found = gradients(ctx, grad_outputs, ctx.needs_input_grad[first : first + several])
        return None, None, *found, *(None,) * count

    schema, backward_schema = schemas(template)
    _define(f"{name}{schema}", forwards, fake)
    _define(f"{name}_backward{backward_schema}", backwards, fake_backward)
    register_autograd(LIBRARY, name, setup, differentiate)
    no_double_backward(f"{name}_backward")


def _register_exponentials(template: FusedTemplate[Any]) -> None:
    """Define the operator that gives the loss of each row, with what its gradient is made of, and the operator that makes it."""
    name, fields = f"{template.name}_exponentials", len(template.fields())
    end = 1 + template.end

    def forwards(*args: Any) -> tuple[Tensor, ...]:
        return exponentials(template.of(args[0], args[1:end], args[end:]))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        return new_exponentials(Head(*args[1:4]))

    def backwards(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        return _placeholders(input, of_exponentials(Head(input, weight, bias), args[:2], args[2], args[3:]))

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        return _placeholders(args[0], new_gradients(args[:3], args[-3:]))

    def setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        numbers, inputs = inputs[0], inputs[1:]
        if numbers is not None and plain(numbers):
            inputs = filled(numbers, inputs)
        ctx.spec = ExecutionSpec(template, inputs[0], tuple(inputs[end:]))
        ctx.save_for_backward(*inputs[1:end], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, slopes: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *tensors, kept, factors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[-fields:][:3]
        found: Sequence[Tensor | None] = [None] * 3
        if slopes is not None and torch.is_grad_enabled():
            found = of_reference(ctx.spec, tuple(tensors), [slopes], wanted)
        elif slopes is not None:
            made = getattr(OPERATORS, f"{name}_backward")(*tensors[:3], kept, factors, slopes, *wanted)
            found = [g if want else None for g, want in zip(made, wanted, strict=True)]
        return None, None, *found, *(None,) * (fields - 3)

    _define(f"{name}({_fields(template)}) -> (Tensor out_loss, Tensor exponentials, Tensor factors)", forwards, fake)
    given = "Tensor input, Tensor head, Tensor? head_bias, Tensor exponentials, Tensor factors, Tensor grad_loss"
    wants = ", ".join(f"bool want_{each}" for each in template.differentiable)
    grads = ", ".join(f"Tensor grad_{each}" for each in template.differentiable)
    define(f"{name}_backward({given}, {wants}) -> ({grads})", backwards, fake_backward)
    register_autograd(LIBRARY, name, setup, differentiate)
    no_double_backward(f"{name}_backward")


def _one_or_several(x: Tensor, written: Sequence[Tensor | None]) -> Any:
    found = _placeholders(x, written)
    return found if len(found) > 1 else found[0]


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator by functions of all its arguments but `numbers`."""
    define(schema, lambda numbers, *args: implementation(*filled(numbers, args)), lambda _, *args: fake(*args))


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], keys: Sequence[str] = DEVICES) -> None:
    """Define an operator by a function, and by one that only makes its results. keys: ANY_DEVICE where plain torch runs within it."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    for key in keys:
        LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def launched(module: str, function: str, tensors: tuple[Tensor | None, ...], *others: Any) -> Any:
    """Launch a function of a module of the kernels by its plan, on tensors followed by other arguments."""
    key = module, function, *layouts(tensors), *others
    return by_plan(key, tensors, getattr(kernels.load(module), function), lambda: (*tensors, *others))


def define_differentiable(
    name: str,
    arguments: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., None],
    reference: Callable[..., Tensor],
    inputs: int = 1,
    keeps: bool = True,
) -> None:
    """Define an operator with one result, whose gradient is an operator too, and differentiable again by its reference.

    Args:
        name: of the operator.
        arguments: their schema.
        forward: computes the result from all arguments.
        fake: only makes the result.
        backward: (grad, result, *arguments, *gradients): writes the gradients that are not None.
        reference: computes the result in plain torch.
        inputs: how many of the first arguments are differentiated.
        keeps: whether the result is kept for backward, which otherwise gets None.
    """

    def written(given: Sequence[Any]) -> list[Tensor | None]:
        return [torch.empty_like(t) if want else None for t, want in zip(given, given[-inputs:], strict=False)]

    def backwards(grad: Tensor, result: Tensor | None, *given: Any) -> Any:
        gradients = written(given)
        backward(grad, result, *given[:-inputs], *gradients)
        return _one_or_several(grad, gradients)

    def setup(ctx: Any, given: tuple[Any, ...], result: Tensor) -> None:
        ctx.save_for_backward(result.detach() if keeps else None, *[t if isinstance(t, Tensor) else None for t in given])
        ctx.others = [None if isinstance(v, Tensor) else v for v in given]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, *saved = ctx.saved_tensors
        given = [v if t is None else t for t, v in zip(saved, ctx.others, strict=True)]
        wanted = [t.requires_grad for t in given[:inputs]]
        if torch.is_grad_enabled():
            found = torch.autograd.grad(
                reference(*given), [t for t, want in zip(given, wanted, strict=False) if want], grad, create_graph=True
            )
            each = iter(found)
            gradients = [next(each) if want else None for want in wanted]
        else:
            made = getattr(OPERATORS, f"{name}_backward")(grad, result, *given, *wanted)
            gradients = [g if want else None for g, want in zip(made if inputs > 1 else (made,), wanted, strict=True)]
        return *gradients, *(None,) * (len(given) - inputs)

    wants = "".join(f", bool want{i}" for i in range(inputs))
    results = ", ".join(["Tensor"] * inputs)
    define(f"{name}({arguments}) -> Tensor", forward, fake)
    define(
        f"{name}_backward(Tensor grad, Tensor{'' if keeps else '?'} result, {arguments}{wants}) -> ({results})",
        backwards,
        lambda grad, _, *given: _one_or_several(grad, written(given)),
    )
    register_autograd(LIBRARY, name, setup, differentiate)
    no_double_backward(f"{name}_backward")


def no_double_backward(name: str) -> None:
    """Make the backward operator refuse differentiation, rather than give a gradient without a graph in silence."""

    def refuse(ctx: Any, *grad_outputs: Tensor | None) -> None:
        raise RuntimeError(
            f"{NAMESPACE}::{name} cannot be differentiated. Differentiate the loss twice with torch.autograd.grad(..., create_graph=True) "
            "outside of torch.compile, or call the loss under lossforge.losses.plain_torch()."
        )

    torch.library.register_autograd(f"{NAMESPACE}::{name}", refuse, lib=LIBRARY)


def filled(numbers: Tensor | None, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return an operator's other arguments with the numbers in their places."""
    if numbers is None:
        return arguments
    given = iter(numbers.tolist())

    def value(v: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return [value(each) for each in v]
        return next(given) if isinstance(v, float) and math.isnan(v) else v

    return [value(v) for v in arguments]


def _checked_number(value: Tensor, name: str, low: float, high: float, exclusive: bool, below: bool) -> Tensor:
    """Do what checks.number does, when the graph runs."""
    return torch.tensor(checks.number(name, value.item(), low, high, exclusive, below), dtype=torch.float64)


LIBRARY.define(
    "number(Tensor value, str name, float low, float high, bool exclusive, bool below) -> Tensor", tags=[torch.Tag.pt2_compliant_tag]
)
LIBRARY.impl("number", _checked_number, "CPU")
torch.library.register_fake(f"{NAMESPACE}::number", lambda value, *_: value.new_empty((), dtype=torch.float64), lib=LIBRARY)
for _template in (*TEMPLATES.values(), *FUSED.values()):
    _register(_template)
    if isinstance(_template, FusedTemplate) and _template.fusing.product:
        _register_exponentials(_template)
