"""The three ways to compute a call: by the kernels, by the dispatcher's operators, or by the plain-torch reference.

The one autograd.Function differentiates calls on plain tensors: the gradient is written in forward or in backward, in new memory or in
that of the logits. The operators differentiate all others by the same functions (operators.py).
"""

import math
from collections.abc import Sequence
from typing import Any, Generic

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Formulas, Head
from lossforge.kernels.plans import PLANS, Key, call_key, layouts, recorded
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses.base.record import C, FusedTemplate, Several, Template
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.engine import FUSED
from lossforge.losses.namespace import OPERATORS
from lossforge.losses.state import backend, plain
from lossforge.losses.templates import TEMPLATES, reference

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
        wanted: which of the first tensors are differentiated.
        in_forward: whether forward writes the gradients.
        inplace: whether the gradient takes the memory of the logits.
        key: what forward's launches follow from: the call, or the spec itself once it is kept for equal calls. None until it is asked for.
        vector: of an operator, the numbers that were tensors: see operators.py.
        present: whether each result was asked for.
        keeps: whether forward keeps what backward needs.
        chunked: whether the engine of fused losses computes it, whose chunks have plans of their own.
    """

    __slots__ = ("chunked", "formula", "in_forward", "inplace", "keeps", "key", "numbers", "present", "template", "vector", "wanted")

    def __init__(
        self,
        template: Template[C],
        formula: str,
        numbers: tuple[Any, ...],
        wanted: Sequence[bool] = (),
        in_forward: bool = False,
        inplace: bool = False,
    ) -> None:
        self.template, self.formula, self.numbers, self.wanted = template, formula, numbers, wanted
        self.in_forward, self.inplace, self.chunked = in_forward, inplace, isinstance(template, FusedTemplate)
        self.key: Key | None = None
        self.vector: Tensor | None = None
        self.present: tuple[bool, ...] = (True, *numbers[-1]) if len(template.results) > 1 else (True,)
        # backward needs what forward keeps where the gradient is written there, or other results may be differentiated too
        self.keeps = not in_forward or any(self.present[1 : template.graded])

    def call(self, tensors: Several) -> C:
        return self.template.of(self.formula, tensors, self.numbers)

    def key_of(self, tensors: Several) -> Key:
        """Return the key, made of the call's tensors where it is not known."""
        if self.key is None:
            of_call = call_key(self.template.name, self.formula, tensors, self.numbers)
            self.key = (*of_call, self.inplace, self.in_forward, *self.wanted)
        return self.key

    def keep(self) -> None:
        """Make the spec its own key, which takes no time to make and to hash, and enter the plan of its forward under that, too.

        A spec that is not kept must not be its own key: every call has another, and would record its launches anew.
        """
        plan = None if self.key is None else PLANS.get(self.key)
        self.key = (self,)
        if plan is not None:
            PLANS.keep(self.key, plan)

    @property
    def formulas(self) -> Formulas | None:
        formula = FORMULAS.get(self.formula)
        return None if formula is None or self.chunked else formula.kernels

    def split(self, found: Several) -> tuple[Several, Several]:
        """Return (results, what is kept for backward) of what forward found."""
        template = self.template
        count = len(template.results)
        results, kept = found[:count], found[count:]
        return results, (*kept, *[results[template.results.index(name)] for name in template.saved]) if template.saved else kept

    def forward(self, key: Any, given: Several, tensors: Several, written: Sequence[Tensor | None], keep: bool, alone: bool = True) -> Any:
        """Launch forward, and record it under the key with the tensors given: see the templates' `forward`."""
        launch, arguments = self.template.launches.forward, (self.call(tensors), self.formulas, written, keep and self.keeps, alone)
        if self.chunked:
            return launch(*arguments)
        with recorded(key, given) as made:
            made.results = launch(*arguments)
        return made.results

    def backward(
        self, key: Any, given: Several, tensors: Several, kept: Several, grads: Sequence[Tensor | None], written: Sequence[Tensor | None]
    ) -> None:
        """Launch backward, which writes the gradients for those of the results, and record it under the key with the tensors given."""
        launch, arguments = self.template.launches.backward, (self.call(tensors), self.formulas, kept, grads, written)
        if self.chunked:
            launch(*arguments)
            return
        with recorded(key, given):
            launch(*arguments)


class Executor:
    """A way to compute calls."""

    def __init__(self, spec: ExecutionSpec[Any]) -> None:
        self.spec = spec

    def results(self, tensors: Several) -> Several:
        """Return the results, None for what was not asked for."""
        raise NotImplementedError

    def gradients(self, tensors: Several, kept: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the first tensors for those of the results. kept: what forward kept for backward, perhaps None."""
        raise NotImplementedError


class Kernels(Executor):
    """The kernels, or the engine of fused losses, on plain tensors."""

    def results(self, tensors: Several) -> Several:
        spec = self.spec
        if True in spec.wanted:
            found: Several = LossFunction.apply(spec, tensors, *tensors[: len(spec.wanted)])
            return found
        key = spec.key or spec.key_of(tensors)
        plan = PLANS.get(key)
        none = [None] * len(spec.template.differentiable)
        return spec.split(spec.forward(key, tensors, tensors, none, False) if plan is None else plan(tensors))[0]

    def gradients(self, tensors: Several, kept: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        spec = self.spec
        written = [torch.empty_like(t) if want and t is not None else None for t, want in zip(tensors, wanted, strict=False)]
        taken = (*tensors, *kept, *grads)  # what autograd saved may have another layout, by hooks such as save_on_cpu
        key, given = (*spec.key_of(tensors), "backward", *layouts(taken), *wanted), (*taken, *written)
        plan = PLANS.get(key)
        if plan is None:
            spec.backward(key, given, tensors, kept, grads, written)
        else:
            plan(given)
        return written

    def written(self, tensors: Several, which: Sequence[bool]) -> Sequence[Tensor | None]:
        """Return the gradients that forward writes, by the launches that write them, so that they have the same bits."""
        written = [torch.empty_like(t) if one and t is not None else None for t, one in zip(tensors, which, strict=False)]
        key, given = (*self.spec.key_of(tensors), "written again", *layouts(tensors), *which), (*tensors, *written)
        plan = PLANS.get(key)
        if plan is None:
            self.spec.forward(key, given, tensors, written, True)
        else:
            plan(given)
        return written


class Operators(Executor):
    """The dispatcher's operators: under torch.compile, transforms and modes, and for subclasses of tensors."""

    def results(self, tensors: Several) -> Several:
        spec = self.spec
        numbers: list[Tensor] = []

        def place(v: Any) -> Any:
            if isinstance(v, list):
                return [place(each) for each in v]
            if isinstance(v, Tensor):
                numbers.append(v)
                return ABSENT
            return v

        others = [place(v) for v in spec.numbers]
        written = [spec.in_forward and want for want in spec.wanted]
        keep = True in spec.wanted and spec.keeps
        operator = getattr(OPERATORS, spec.template.name)
        found = operator(torch.stack(numbers) if numbers else None, spec.formula, *tensors, *others, *written, keep)
        return tuple([t if one else None for t, one in zip(found[: len(spec.present)], spec.present, strict=True)])

    def gradients(self, tensors: Several, kept: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        spec = self.spec
        operator = getattr(OPERATORS, f"{spec.template.name}_backward")
        found = operator(spec.vector, spec.formula, *tensors, *spec.numbers, *kept, *grads, *wanted)
        return [g if want else None for g, want in zip((found,) if isinstance(found, Tensor) else found, wanted, strict=True)]

    def written(self, tensors: Several, which: Sequence[bool]) -> Sequence[Tensor | None]:
        """Return the gradients that forward writes."""
        spec = self.spec
        found = getattr(OPERATORS, spec.template.name)(spec.vector, spec.formula, *tensors, *spec.numbers, *which, False)
        return found[-len(which) :]


class Reference(Executor):
    """The plain-torch reference of the template, which autograd differentiates as often as it is asked to."""

    def results(self, tensors: Several) -> Several:
        return reference(self.spec.call(tensors))

    def gradients(self, tensors: Several, kept: Several, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        count = len(wanted)  # views, because one of the tensors may be another, or computed from it
        tensors = (*[None if t is None else t.view_as(t) for t in tensors[:count]], *tensors[count:])
        pairs = [(r, g) for r, g in zip(self.results(tensors), grads, strict=False) if r is not None and g is not None]
        inputs = [t for t, want in zip(tensors, wanted, strict=False) if want and t is not None]
        found = iter(torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], create_graph=True))
        return [next(found) if want else None for want in wanted]


class PrecomputedGrad:
    """A gradient written in forward, to be handed out once: whoever gets it may change it."""

    __slots__ = ("__weakref__", "gradient")

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient

    def take(self) -> Tensor | None:
        """Return the gradient, None the second time."""
        gradient, self.gradient = self.gradient, None
        return gradient


def remember(ctx: Any, spec: ExecutionSpec[Any], tensors: Several, kept: Several, written: Sequence[Tensor | None]) -> None:
    """Keep a call for backward, tensors as autograd saves them. written: gradients that forward wrote."""
    ctx.spec = spec
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
    grads = [t if present else None for t, present in zip(grad_outputs[: spec.template.graded], spec.present, strict=False)]
    found: list[Tensor | None] = [None] * len(wanted)
    grad_output, arrived = grads[0], [t for t in grads if t is not None]
    if not arrived:
        return found
    missing = [*wanted]
    written = ctx.precomputed.count(None) < len(wanted)
    if written and grad_output is not None and len(arrived) == 1 and not torch.is_grad_enabled():
        first = [one.take() if one is not None and want else None for one, want in zip(ctx.precomputed, wanted, strict=True)]
        if any(want and g is None and one is not None for g, want, one in zip(first, wanted, ctx.precomputed, strict=True)):
            first = _written_again(ctx, [one is not None for one in ctx.precomputed], wanted)
        for i, gradient in enumerate(first):
            if gradient is None:
                continue
            found[i], missing[i] = scaled(spec.chunked, gradient, grad_output), False
    if not any(missing):
        return found
    tensors, kept = recalled(ctx)
    way = Reference if torch.is_grad_enabled() else Kernels if plain(*tensors, *grads) else Operators
    anew = way(spec).gradients(tensors, kept, grads, missing)
    return [g if new is None else new for g, new in zip(found, anew, strict=True)]


def scaled(chunked: bool, gradient: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient times `grad_output`: in its own memory by a kernel; in new memory where it is traced, because then nothing may
    change, and where no kernel runs."""
    if (chunked and backend(gradient) == "torch") or not (ordinary(gradient) and ordinary(grad_output)):
        return times(gradient, grad_output)
    where = gradient.get_device(), gradient.data_ptr() & 15, grad_output.data_ptr() & 15
    key = "scale", gradient.numel(), gradient.dtype, *where, grad_output.dtype, grad_output.shape, grad_output.get_device()
    plan = PLANS.get(key)
    if plan is not None:
        plan((gradient, grad_output))
        return gradient
    with recorded(key, (gradient, grad_output)):
        kernels.scale_(gradient, grad_output)
    return gradient


def times(gradient: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient times `grad_output` in new memory."""
    return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * grad_output).to(gradient.dtype)


def _written_again(ctx: Any, which: Sequence[bool], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that were written in forward."""
    tensors, _ = recalled(ctx)
    written = (Kernels if plain(*tensors) else Operators)(ctx.spec).written(tensors, which)
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
        key = spec.key or spec.key_of(tensors)
        given = tensors if spec.inplace else (*tensors, *written)  # in place the gradient's memory is the logits'
        plan = PLANS.get(key)
        results, kept = spec.split(spec.forward(key, given, tensors, written, True) if plan is None else plan(given))
        if spec.inplace and spec.in_forward:  # backward takes nothing but the gradient
            tensors, kept = (), ()
        remember(ctx, spec, tensors, kept, written)
        if len(results) > 1:
            ctx.mark_non_differentiable(*[t for t in results[spec.template.graded :] if t is not None])
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        precomputed, grad_output, others = ctx.precomputed[0], grad_outputs[0], [t for t in grad_outputs[1:] if t is not None]
        one = len(ctx.precomputed) == 1 and ctx.inplace is None and not others
        if one and precomputed is not None and grad_output is not None and not torch.is_grad_enabled():
            gradient = precomputed.take()  # the commonest case, where the host's time counts
            if gradient is not None:
                return None, None, scaled(ctx.spec.chunked, gradient, grad_output)
        if ctx.inplace is not None:
            return None, None, ctx.inplace.gradient(ctx, grad_outputs)
        return None, None, *gradients(ctx, grad_outputs, ctx.needs_input_grad[2:])


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
            return scaled(spec.chunked, gradient, first)
        tensors, kept = recalled(ctx)  # raises where the logits have been overwritten since forward
        x, self.x = self.x, None
        assert x is not None
        try:
            _spend(x)
        except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
            torch.autograd.graph.increment_version(x)
        tensors, grads = (self.memory, *tensors[1:]), [first, *others]
        given = (*tensors, *kept, *grads)
        key = (*spec.key_of(tensors), "backward in place", *layouts(given))
        plan = PLANS.get(key)
        if plan is None:
            spec.backward(key, given, tensors, kept, grads, [self.memory])
        else:
            plan(given)
        return self.memory
