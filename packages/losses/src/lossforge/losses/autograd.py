"""How a checked call is computed: by the kernels, through the operators or without them, or by the plain-torch reference.

The one autograd.Function differentiates calls on plain tensors: the gradient is written in forward or in backward, in new memory or in
that of the logits. The operators differentiate all others by the same functions (operators.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Call, Formulas, Head
from lossforge.kernels.plans import call_key, layout
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses.base.record import C, FusedTemplate, Prepared, Several, Template
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.engine import FUSED
from lossforge.losses.namespace import OPERATORS
from lossforge.losses.state import backend, gradient_in_forward, kernels_apply, plain
from lossforge.losses.templates import TEMPLATES, reference

ONE = (True,)
"""That a call has one result."""
ABSENT = math.nan
"""What stands in the place of a number that is in the operator's vector of numbers."""


def template_of(call: C) -> Template[C]:
    """Return the template of a call."""
    return FUSED[type(call)] if isinstance(getattr(call, "x", None), Head) else TEMPLATES[type(call)]


class ExecutionSpec(Generic[C]):
    """How a call is computed: all but its tensors.

    Attributes:
        template: of the call.
        formula: the name of its formula.
        numbers: the fields of the call that are no tensors.
        in_forward: whether forward writes the gradients.
        inplace: whether the gradient takes the memory of the logits.
        key: what the plans of its launches follow from, but what backward takes beside the call's tensors. A spec that is kept for equal
            calls is its own key.
        planned: launches by a plan under a key; for the engine of fused losses, whose chunks have plans of their own, without one.
    """

    __slots__ = ("formula", "in_forward", "inplace", "keeps", "key", "numbers", "planned", "template")

    def __init__(
        self, template: Template[C], formula: str, numbers: tuple[Any, ...], in_forward: bool = False, inplace: bool = False
    ) -> None:
        self.template, self.formula, self.numbers = template, formula, numbers
        self.in_forward, self.inplace = in_forward, inplace
        self.key: Any = None
        self.planned: Callable[..., Any] = unplanned if self.chunked else kernels.planned
        # backward needs what forward keeps where the gradient is written there, or other results may be differentiated too
        self.keeps = not in_forward or (template.graded > 1 and any(numbers[-1][: template.graded - 1]))

    def call(self, tensors: Several) -> C:
        return self.template.of(self.formula, tensors, self.numbers)

    def keyed(self, tensors: Several) -> Any:
        """Return its key."""
        if self.key is None:
            self.key = call_key(self.template.name, self.formula, tensors, self.numbers)
        return self.key

    @property
    def formulas(self) -> Formulas | None:
        formula = FORMULAS.get(self.formula)
        return None if formula is None or self.chunked else formula.kernels

    @property
    def chunked(self) -> bool:
        """Whether the engine of fused losses computes it, whose chunks have plans of their own."""
        return isinstance(self.template, FusedTemplate)

    def split(self, found: Several) -> tuple[Several, Several]:
        """Return (results, what is kept for backward) of what forward found."""
        template = self.template
        count = len(template.results)
        results, kept = found[:count], found[count:]
        return results, (*kept, *[results[template.results.index(name)] for name in template.saved]) if template.saved else kept

    def forward(self, tensors: Several, written: Sequence[Tensor | None], keep: bool, alone: bool = True) -> tuple[Any, ...]:
        """Return what launches forward, followed by its arguments; see the templates' `forward`."""
        return self.template.launches.forward, self.call(tensors), self.formulas, written, keep and self.keeps, alone

    def backward(
        self, tensors: Several, kept: Several, grads: Sequence[Tensor | None], written: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        """Return what launches backward, followed by its arguments: the gradients for those of the results are written."""
        return self.template.launches.backward, self.call(tensors), self.formulas, kept, grads, written

    def results(self, tensors: Several) -> list[Tensor]:
        """Launch without a gradient; return the results that were asked for."""
        none = [None] * len(self.template.differentiable)
        found = self.planned((self.keyed(tensors), "results"), tensors, self.forward, tensors, none, False)
        return [t for t in self.split(found)[0] if t is not None]


def unplanned(key: Any, tensors: Several, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call what a function returns, which is followed by its arguments. key, tensors: as `kernels.planned` takes them."""
    start, *given = function(*arguments)
    return start(*given)


def with_values(tensors: Several) -> Several:
    """Return the tensors with lazy negative views written out, because kernels read memory; a graph's operators do so anyway.

    No other lazy view gets here: conjugates are complex.
    """
    if torch.compiler.is_compiling() or not any(t is not None and t.is_neg() for t in tensors):
        return tensors
    return tuple([None if t is None else t.resolve_neg() for t in tensors])


def results_of(prepared: Prepared) -> Several:
    """Compute a checked call and return its results, None for what was not asked for."""
    spec, tensors, wanted = execution(prepared)
    if spec is None:
        return otherwise(prepared, tensors, wanted)
    found = LossFunction.apply(spec, tensors, *tensors[: len(wanted)]) if any(wanted) else spec.results(tensors)
    return in_places(asked(prepared.call), found)


def compute(prepared: Any) -> Any:
    """Compute a checked call, unless it is computed already, and return what its public function returns."""
    return prepared.finish(results_of(prepared)) if isinstance(prepared, Prepared) else prepared


def asked(call: Any) -> tuple[bool, ...]:
    """Return whether each result was asked for."""
    return True, *getattr(call, "outputs", ())


def in_places(present: Sequence[bool], found: Sequence[Tensor]) -> Several:
    """Return the results that were asked for in their places, None in those of the others."""
    given = iter(found)
    return tuple([next(given) if one else None for one in present])


def execution(prepared: Prepared) -> tuple[ExecutionSpec[Any] | None, Several, list[bool]]:
    """Return how a call is computed without the dispatcher, its tensors, and which of the first are differentiated.

    None where it takes the dispatcher's operators, or the plain-torch reference.
    """
    call, options = prepared.call, prepared.options
    template = template_of(call)
    tensors, numbers = template.flat(call)
    tensors = with_values(tensors)
    differentiable = tensors[: len(template.differentiable)]
    wanted = [t is not None and torch.is_grad_enabled() and t.requires_grad for t in differentiable]
    if not by_kernels(template, call, tensors):
        return None, tensors, []
    inplace = options.get("inplace", False) and any(wanted) and not torch.compiler.is_compiling()
    if not (inplace or plain(*tensors)):
        return None, tensors, wanted
    spec = ExecutionSpec(template, call.loss, numbers, _in_forward(prepared, differentiable, wanted), inplace)
    return spec, tensors, wanted


def _in_forward(prepared: Prepared, differentiable: Several, wanted: Sequence[bool]) -> bool:
    x: Any = differentiable[wanted.index(True) if any(wanted) else 0]
    return gradient_in_forward(prepared.options.get("gradient"), x, prepared.call.reduction)


def by_kernels(template: Template[Any], call: Any, tensors: Several) -> bool:
    """Return whether the kernels compute a call, or the engine of fused losses: else its plain-torch reference does."""
    x: Any = tensors[0]
    # without a kernel the chunks are differentiated by autograd, which an operator cannot do within itself: then only on plain tensors
    by_chunks = isinstance(template, FusedTemplate) and plain(*tensors)
    return template.launchable(call) and kernels_apply(x, *tensors[len(template.differentiable) :], fused=by_chunks)


def otherwise(prepared: Prepared, tensors: Several, wanted: Sequence[bool]) -> Several:
    """Compute by the dispatcher's operators; where `wanted` is empty by the plain-torch reference."""
    call = prepared.call
    template = template_of(call)
    if not wanted:
        return tuple(reference(template.of(call.loss, tensors, template.flat(call)[1])))
    present = asked(call)
    in_forward = _in_forward(prepared, tensors[: len(wanted)], wanted)
    keep = any(wanted) and (not in_forward or any(present[1:4]))
    numbers: list[Tensor] = []

    def place(v: Any) -> Any:
        if isinstance(v, list):
            return [place(each) for each in v]
        if isinstance(v, Tensor):
            numbers.append(v)
            return ABSENT
        return v

    others = [place(v) for v in template.flat(call)[1]]
    arguments = (call.loss, *tensors, *others, *[in_forward and want for want in wanted], keep)
    found = getattr(OPERATORS, template.name)(torch.stack(numbers) if numbers else None, *arguments)
    return in_places(present, [t for t, one in zip(found[: len(present)], present, strict=True) if one])


class PrecomputedGrad:
    """A gradient written in forward, to be handed out once: whoever gets it may change it."""

    __slots__ = ("__weakref__", "gradient")

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient

    def take(self) -> Tensor | None:
        """Return the gradient, None the second time."""
        gradient, self.gradient = self.gradient, None
        return gradient


def remember(
    ctx: Any, spec: ExecutionSpec[Any], tensors: Several, present: Sequence[bool], kept: Several, written: Sequence[Tensor | None]
) -> None:
    """Keep a call for backward, tensors as autograd saves them.

    Args:
        present: whether each result was asked for.
        written: gradients that forward wrote.
    """
    ctx.spec, ctx.present, ctx.numbers = spec, present, None
    ctx.precomputed = [None if g is None else PrecomputedGrad(g) for g in written]
    ctx.save_for_backward(*kept, *tensors)
    ctx.set_materialize_grads(False)


def recalled(ctx: Any) -> tuple[Several, Several]:
    """Return the call's tensors that `remember` kept, and what its forward kept for backward."""
    template, saved = ctx.spec.template, ctx.saved_tensors
    count = len(template.kept) + len(template.saved)
    return saved[count:], tuple([None if t is None or t.numel() == 0 else t for t in saved[:count]])


def gradients(ctx: Any, grad_outputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the differentiable tensors for those of the results."""
    spec = ctx.spec
    grads = [t if present else None for t, present in zip(grad_outputs[: spec.template.graded], ctx.present, strict=False)]
    found: list[Tensor | None] = [None] * len(wanted)
    grad_output = grads[0]
    if all(t is None for t in grads):
        return found
    missing = [*wanted]
    written = ctx.precomputed.count(None) < len(wanted)
    if written and grad_output is not None and not torch.is_grad_enabled() and all(t is None for t in grads[1:]):
        first = [one.take() if one is not None and want else None for one, want in zip(ctx.precomputed, wanted, strict=True)]
        if any(want and g is None and one is not None for g, want, one in zip(first, wanted, ctx.precomputed, strict=True)):
            first = _written_again(ctx, [one is not None for one in ctx.precomputed], wanted)
        for i, gradient in enumerate(first):
            if gradient is None:
                continue
            found[i], missing[i] = gradient, False
            how = scaling(spec, gradient, grad_output)
            if how is None:
                found[i] = times(gradient, grad_output)
            else:
                kernels.planned(*how)
    if not any(missing):
        return found
    tensors, kept = recalled(ctx)
    if torch.is_grad_enabled():
        count = len(missing)  # views, because one of the tensors may be another, or computed from it
        tensors = (*[None if t is None else t.view_as(t) for t in tensors[:count]], *tensors[count:])
        anew = _second_order(spec.call(tensors), tensors, grads, missing)
    elif plain(*tensors, *grads):
        anew = [torch.empty_like(t) if want and t is not None else None for t, want in zip(tensors, missing, strict=False)]
        key = (spec.keyed(tensors), "backward", *map(layout, grads), *missing, *[t is None for t in kept])
        spec.planned(key, (*tensors, *kept, *grads, *anew), spec.backward, tensors, kept, grads, anew)
    else:
        arguments = (ctx.numbers, spec.formula, *tensors, *spec.numbers, *kept, *grads, *missing)
        results = getattr(OPERATORS, f"{spec.template.name}_backward")(*arguments)
        anew = [g if want else None for g, want in zip((results,) if isinstance(results, Tensor) else results, missing, strict=True)]
    return [g if new is None else new for g, new in zip(found, anew, strict=True)]


def scaling(spec: ExecutionSpec[Any], gradient: Tensor, grad_output: Tensor) -> tuple[Any, ...] | None:
    """Return what multiplies a gradient in its own memory by a kernel; None where it is traced, because then nothing may change."""
    if (spec.chunked and backend(gradient) == "torch") or not (ordinary(gradient) and ordinary(grad_output)):
        return None
    where = gradient.get_device(), gradient.data_ptr() & 15, grad_output.data_ptr() & 15
    key = "scale", gradient.numel(), gradient.dtype, *where, grad_output.dtype, grad_output.shape, grad_output.get_device()
    return key, (gradient, grad_output), _scaling, gradient, grad_output


def _scaling(gradient: Tensor, grad_output: Tensor) -> tuple[Any, ...]:
    return kernels.scale_, gradient, grad_output


def times(gradient: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient times `grad_output` in new memory."""
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * grad_output).to(gradient.dtype)


def _second_order(call: Call, tensors: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return gradients that can be differentiated again, from the plain-torch reference."""
    pairs = [(r, g) for r, g in zip(reference(call), grads, strict=False) if r is not None and g is not None]
    inputs = [t for t, want in zip(tensors, wanted, strict=False) if want and t is not None]
    found = iter(torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], create_graph=True))
    return [next(found) if want else None for want in wanted]


def _written_again(ctx: Any, which: Sequence[bool], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that were written in forward, by the launches that wrote them, so that they have the same bits."""
    spec = ctx.spec
    tensors, _ = recalled(ctx)
    if plain(*tensors):
        written = [torch.empty_like(t) if one and t is not None else None for t, one in zip(tensors, which, strict=False)]
        unplanned(None, tensors, spec.forward, tensors, written, True)
    else:
        results = getattr(OPERATORS, spec.template.name)(ctx.numbers, spec.formula, *tensors, *spec.numbers, *which, False)
        written = results[-len(which) :]
    return [g if one and want else None for g, one, want in zip(written, which, wanted, strict=True)]


class LossFunction(torch.autograd.Function):
    """A call on plain tensors, differentiated: the results that were asked for. inputs: those of its tensors that are differentiated."""

    @staticmethod
    def forward(ctx: Any, spec: ExecutionSpec[Any], tensors: Several, *inputs: Tensor) -> Any:
        ctx.inplace = None
        written: list[Tensor | None]
        if spec.inplace:
            ctx.inplace = InPlace(inputs[0], spec.in_forward)
            tensors = (ctx.inplace.memory, *tensors[1:])
            written = [ctx.inplace.memory if spec.in_forward else None]
        elif spec.in_forward:
            written = [torch.empty_like(t) if want else None for t, want in zip(inputs, ctx.needs_input_grad[2:], strict=True)]
        else:
            written = [None] * len(inputs)
        key = spec.keyed(tensors), "forward", spec.inplace, spec.in_forward, ctx.needs_input_grad
        given = tensors if spec.inplace else (*tensors, *written)  # in place the gradient's memory is the logits'
        found = spec.planned(key, given, spec.forward, tensors, written, True)
        results, kept = spec.split(found)
        if spec.inplace and spec.in_forward:  # backward takes nothing but the gradient
            tensors, kept = (), ()
        if len(results) == 1:
            remember(ctx, spec, tensors, ONE, kept, written)
            return results
        remember(ctx, spec, tensors, [t is not None for t in results], kept, written)
        constant = [t for t in results[spec.template.graded :] if t is not None]
        if constant:
            ctx.mark_non_differentiable(*constant)
        return tuple([t for t in results if t is not None])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        precomputed, grad_output = ctx.precomputed[0], grad_outputs[0]
        one = len(grad_outputs) == len(ctx.precomputed) == 1 and ctx.inplace is None
        if one and precomputed is not None and grad_output is not None and not torch.is_grad_enabled():
            gradient = precomputed.take()  # the commonest case, where the host's time counts
            how = None if gradient is None else scaling(ctx.spec, gradient, grad_output)
            if how is not None:
                kernels.planned(*how)
                return None, None, gradient
            ctx.precomputed[0].gradient = gradient
        given = iter(grad_outputs)
        grads = [next(given) if present else None for present in ctx.present]
        if ctx.inplace is not None:
            return None, None, ctx.inplace.gradient(ctx, grads)
        return None, None, *gradients(ctx, grads, ctx.needs_input_grad[2:])


class Overwritten(torch.autograd.Function):
    """Tell autograd that the logits were overwritten: what is computed from them from now on cannot be differentiated.

    The loss hands its gradient to what the logits came from; only a later use of them sends one here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> None:
        if grad_output is not None:
            raise _refused(
                "what was computed from the logits after the loss cannot be differentiated, for they no longer held their values"
            )


def _refused(why: str) -> RuntimeError:
    return RuntimeError(f"inplace=True: the gradient took the memory of the logits; {why}. Call the loss with inplace=False.")


def _spend(x: Tensor) -> None:
    """Make later differentiable uses of x, of its base and of other views raise, as well as earlier uses that saved it."""
    with torch.enable_grad():
        Overwritten.apply(x)


class InPlace:
    """The logits' memory, which their gradient takes in forward or in backward."""

    def __init__(self, x: Tensor, in_forward: bool) -> None:
        self.memory, self.in_forward = x.detach(), in_forward
        self.x: Tensor | None = None if in_forward else x
        if in_forward:
            try:
                _spend(x)  # within forward, whose graph already leads to what x came from; before the launch, since autograd can refuse
            except RuntimeError as refused:
                raise ValueError(f"inplace=True needs logits that autograd allows to be overwritten: {refused}") from None

    def gradient(self, ctx: Any, grad_outputs: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of the logits for those of the results."""
        spec = ctx.spec
        first, *others = [None if t is None else t.resolve_neg() for t in grad_outputs[: spec.template.graded]]
        if first is None and all(t is None for t in others):
            return None
        if self.in_forward and any(t is not None for t in others):
            raise _refused('z_loss, lse and entropy can then be differentiated only with gradient="backward"')
        if torch.is_grad_enabled():
            raise _refused("it cannot be differentiated again")
        if self.in_forward:
            assert first is not None
            gradient = ctx.precomputed[0].take()
            if gradient is None:
                raise _refused("backward can run only once")
            how = scaling(spec, gradient, first)
            if how is None:
                return times(gradient, first)
            kernels.planned(*how)
            return gradient
        tensors, kept = recalled(ctx)  # raises where the logits have been overwritten since forward
        x, self.x = self.x, None
        assert x is not None
        try:
            _spend(x)
        except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
            torch.autograd.graph.increment_version(x)
        tensors, grads = (self.memory, *tensors[1:]), [first, *others]
        key = (spec.keyed(tensors), "backward in place", *map(layout, grads), *[t is None for t in kept])
        kernels.planned(key, (*tensors, *kept, *grads), spec.backward, tensors, kept, grads, [self.memory])
        return self.memory
