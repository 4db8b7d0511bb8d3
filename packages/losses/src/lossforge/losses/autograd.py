"""How a checked call is computed: by the kernels, through the operators or without them, or by the plain-torch reference.

The one autograd.Function differentiates calls on plain tensors: the gradient is written in forward or in backward, in new memory or in
that of the logits. The operators differentiate all others by the same functions (operators.py).
"""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import KINDS, DivergenceCall, Formulas, TopKCall, end_of_tensors
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear import engine
from lossforge.losses.linear.call import Fused, fused
from lossforge.losses.reference import reference
from lossforge.losses.state import KERNEL_DTYPES, backend, gradient_in_forward, kernels_apply, plain

Several = tuple[Tensor | None, ...]
ABSENT = math.nan
"""Where an operator's number is among those that are tensors."""


class Noted(threading.local):
    """calls: of the loss that this thread computes, if it shall be kept: how they were computed without the dispatcher, their tensors,
    whether with a gradient, and their results."""

    calls: list[tuple["Run", Several, bool, Sequence[Tensor]]] | None = None


noted = Noted()


def leaves(call: Any) -> Sequence[Tensor]:
    """Return the tensors that the kernels differentiate: the first."""
    return call[1 : 1 + len(KINDS[type(call)].differentiable)]


def resolved(call: Any) -> Any:
    """Return the call with the values of lazy negative views written out, because kernels read memory; a graph's operators do so anyway.

    No other lazy view gets here: conjugates are complex.
    """
    end = end_of_tensors(call)
    if torch.compiler.is_compiling() or not any(t is not None and t.is_neg() for t in call[1:end]):
        return call
    return type(call)(call[0], *[None if t is None else t.resolve_neg() for t in call[1:end]], *call[end:])


def compute(call: Any, options: Mapping[str, Any]) -> Several:
    """Return the results of a checked call, None where not asked for; its options say when and where the gradient is written."""
    linear = options.get("linear")
    if linear is not None:
        call = fused(call, *linear)
    call = resolved(call)
    tensors, differentiable = call[1 : end_of_tensors(call)], leaves(call)
    others = tensors[len(differentiable) :]
    narrow = not isinstance(call, (DivergenceCall, TopKCall)) or call.target.dtype in KERNEL_DTYPES
    # without a kernel the chunks are differentiated by autograd, which an operator cannot do within itself: then only on plain tensors
    by_chunks = linear is not None and plain(*tensors)
    if not (narrow and kernels_apply(differentiable[0], *others, fused=by_chunks)):
        return tuple(reference(call))
    wanted = [t is not None and torch.is_grad_enabled() and t.requires_grad for t in differentiable]
    mode, x = options.get("gradient"), differentiable[wanted.index(True) if any(wanted) else 0]
    in_forward = gradient_in_forward(mode, x, call.reduction)
    inplace = options.get("inplace", False) and any(wanted) and not torch.compiler.is_compiling()
    asked = (True, *getattr(call, "outputs", ()))
    if inplace or plain(*tensors):
        how = Run.of(call, in_forward, inplace)
        found: Sequence[Tensor] = Loss.apply(how, tensors, *differentiable) if any(wanted) else how.results(tensors)
        if noted.calls is not None:
            noted.calls.append((how, tensors, any(wanted), found))
    else:
        keep = any(wanted) and (not in_forward or any(asked[1:4]))
        found = _by_operator(call, [in_forward and want for want in wanted], keep, asked)
    given = iter(found)
    return tuple([next(given) if one else None for one in asked])


def value(call: Any, options: Mapping[str, Any]) -> Tensor:
    """Compute a call that has one result."""
    (result,) = compute(call, options)
    assert result is not None
    return result


def _by_operator(call: Any, gradients: Sequence[bool], keep: bool, asked: Sequence[bool]) -> list[Tensor]:
    """Compute by the call's operator, or where numbers among its fields are tensors, by its other form; the results asked for."""
    numbers: list[Tensor] = []

    def place(v: Any) -> Any:
        if isinstance(v, list):
            return [place(each) for each in v]
        if isinstance(v, Tensor):
            numbers.append(v)
            return ABSENT
        return v

    name, end = KINDS[type(call)].operator, end_of_tensors(call)
    others = [place(v) for v in call[end:]]
    if numbers:
        found = getattr(torch.ops.lossforge, f"{name}_scheduled")(torch.stack(numbers), *call[:end], *others, *gradients, keep)
    else:
        found = getattr(torch.ops.lossforge, name)(*call, *gradients, keep)
    return [t for t, one in zip(found[: len(asked)], asked, strict=True) if one]


class Run(NamedTuple):
    """How a call is computed, all but its tensors. launches: of one that repeats (repeat.py), to be recorded, and made again."""

    type: Any
    name: str
    others: tuple[Any, ...]
    in_forward: bool = False
    inplace: bool = False
    launches: dict[Any, Any] | None = None

    @staticmethod
    def of(call: Any, in_forward: bool = False, inplace: bool = False) -> "Run":
        return Run(type(call), call.loss, call[end_of_tensors(call) :], in_forward, inplace)

    def call(self, tensors: Several) -> Any:
        return self.type(self.name, *tensors, *self.others)

    @property
    def keeps(self) -> bool:
        """Whether backward needs what forward keeps: the gradient is written there, or other results may be differentiated too."""
        arriving = KINDS[self.type].arriving
        return not self.in_forward or (arriving > 1 and any(self.others[-1][: arriving - 1]))

    def forward(self, tensors: Several, gradients: Sequence[Tensor | None], keep: bool, alone: bool = True) -> tuple[Several, Several]:
        """Launch: (results, what is kept for backward), with the gradients in `gradients`. keep, alone: see the templates' `forward`."""
        kind = KINDS[self.type]

        def launch() -> Several:
            found = self.template.forward(self.call(tensors), self.formulas, gradients, keep and self.keeps, alone)
            return (*found, *[found[kind.results.index(name)] for name in kind.saved])

        # a call that does not repeat may have no kernel, and then needs no Triton
        found = launch() if self.launches is None else kernels.repeated(self.launches, "forward", (*tensors, *gradients), launch)
        end = len(kind.results)
        return found[:end], found[end:]

    def results(self, tensors: Several) -> list[Tensor]:
        """Launch without a gradient; the results that were asked for."""
        return [t for t in self.forward(tensors, [None] * len(KINDS[self.type].differentiable), False)[0] if t is not None]

    def backward(self, tensors: Several, kept: Several, arriving: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """Launch: write the gradients for what arrives at the results."""

        def launch() -> None:
            self.template.backward(self.call(tensors), self.formulas, kept, arriving, gradients)

        if self.launches is None:
            launch()
            return
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in arriving]
        key = (*layouts, *[g is None for g in gradients])
        kernels.repeated(self.launches, key, (*tensors, *kept, *arriving, *gradients), launch)

    @property
    def template(self) -> Any:
        return engine if issubclass(self.type, Fused) else kernels.of_folder(KINDS[self.type].folder)

    @property
    def formulas(self) -> Formulas | None:
        formula = FORMULAS.get(self.name)
        return None if formula is None or issubclass(self.type, Fused) else formula.kernels


class Once:
    """A gradient written in forward, to be handed out once: whoever gets it may change it."""

    def __init__(self, gradient: Tensor, launches: dict[Any, Any] | None) -> None:
        self.gradient: Tensor | None = gradient
        self.launches = launches

    def take(self, grad_output: Tensor) -> Tensor | None:
        """The gradient times `grad_output`, in its own memory; None the second time."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return None
        by_kernel = self.launches is not None or backend(gradient) != "torch"
        if not (by_kernel and ordinary(gradient) and ordinary(grad_output)):  # traced, where nothing may be overwritten, or many at once
            return (gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * grad_output).to(gradient.dtype)
        given = gradient, grad_output
        kernels.repeated(self.launches, (gradient.numel(), gradient.dtype), given, lambda: kernels.scale_(*given))
        return gradient


def remember(ctx: Any, how: Run, tensors: Several, there: Sequence[bool], kept: Several, written: Sequence[Tensor | None]) -> None:
    """Keep a call for backward, tensors as autograd saves them. there: which results there are. written: gradients, in forward."""
    ctx.how, ctx.there = how, there
    ctx.once = [None if g is None else Once(g, how.launches) for g in written]
    ctx.save_for_backward(*kept, *tensors)
    ctx.set_materialize_grads(False)


def recalled(ctx: Any) -> tuple[Several, Several]:
    """Return the call's tensors that `remember` kept, and what its forward kept for backward."""
    kind = KINDS[ctx.how.type]
    count, saved = len(kind.kept) + len(kind.saved), ctx.saved_tensors
    return saved[count:], tuple([None if t is None or t.numel() == 0 else t for t in saved[:count]])


def gradients(ctx: Any, arriving: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the differentiable tensors for what arrives at the results."""
    arriving = [t if there else None for t, there in zip(arriving[: KINDS[ctx.how.type].arriving], ctx.there, strict=False)]
    found: list[Tensor | None] = [None] * len(wanted)
    if all(t is None for t in arriving):
        return found
    first, *others = arriving
    if first is not None and all(t is None for t in others) and not torch.is_grad_enabled():
        found = [one.take(first) if one is not None and want else None for one, want in zip(ctx.once, wanted, strict=True)]
        if any(want and g is None and one is not None for g, want, one in zip(found, wanted, ctx.once, strict=True)):
            again = _written_again(ctx, [one is not None for one in ctx.once])
            found = [
                Once(g, ctx.how.launches).take(first) if want and g is not None else None for g, want in zip(again, wanted, strict=True)
            ]
    missing = [want and g is None for g, want in zip(found, wanted, strict=True)]
    if any(missing):
        found = [g if new is None else new for g, new in zip(found, _anew(ctx, arriving, missing), strict=True)]
    return found


def _written_again(ctx: Any, which: Sequence[bool]) -> Sequence[Tensor | None]:
    """Return the gradients that were written in forward, by the launches that wrote them, so that they have the same bits."""
    how, numbers = ctx.how, getattr(ctx, "numbers", None)
    tensors, _ = recalled(ctx)
    if plain(*tensors):
        written = [torch.empty_like(t) if one and t is not None else None for t, one in zip(tensors, which, strict=False)]
        how.forward(tensors, written, True)
        return written
    operator, call = KINDS[how.type].operator, how.call(tensors)
    if numbers is None:
        results = getattr(torch.ops.lossforge, operator)(*call, *which, False)
    else:
        results = getattr(torch.ops.lossforge, f"{operator}_scheduled")(numbers, *call, *which, False)
    return [g if one else None for g, one in zip(results[-len(which) :], which, strict=True)]


def _anew(ctx: Any, arriving: Sequence[Tensor | None], wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    how = ctx.how
    tensors, kept = recalled(ctx)
    differentiable = tensors[: len(wanted)]
    if torch.is_grad_enabled():
        pairs = [(r, g) for r, g in zip(reference(how.call(tensors)), arriving, strict=False) if r is not None and g is not None]
        inputs = [t for t, want in zip(differentiable, wanted, strict=True) if want and t is not None]
        found = iter(torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], create_graph=True))
        return [next(found) if want else None for want in wanted]
    if plain(*tensors, *arriving):
        written = [torch.empty_like(t) if want and t is not None else None for t, want in zip(differentiable, wanted, strict=True)]
        how.backward(tensors, kept, arriving, written)
        return written
    operator, numbers = f"{KINDS[how.type].operator}_backward", getattr(ctx, "numbers", None)
    if numbers is None:
        results = getattr(torch.ops.lossforge, operator)(*how.call(tensors), *kept, *arriving, *wanted)
    else:
        results = getattr(torch.ops.lossforge, f"{operator}_scheduled")(numbers, *how.call(tensors), *kept, *arriving, *wanted)
    several = (results,) if isinstance(results, Tensor) else results
    return [g if want else None for g, want in zip(several, wanted, strict=True)]


class Loss(torch.autograd.Function):
    """A call on plain tensors, differentiated: the results that were asked for. inputs: those of its tensors that are differentiated."""

    @staticmethod
    def forward(ctx: Any, how: Run, tensors: Several, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inplace = None
        if how.inplace:
            ctx.inplace = InPlace(inputs[0], how.in_forward)
            tensors = (ctx.inplace.memory, *tensors[1:])
            written: list[Tensor | None] = [ctx.inplace.memory if how.in_forward else None]
        else:
            written = [torch.empty_like(t) if how.in_forward and w else None for t, w in zip(inputs, ctx.needs_input_grad[2:], strict=True)]
        results, kept = how.forward(tensors, written, True)
        if how.inplace and how.in_forward:  # backward takes nothing but the gradient
            tensors, kept = (), ()
        remember(ctx, how, tensors, [t is not None for t in results], kept, written)
        apart = [t for t in results[KINDS[how.type].arriving :] if t is not None]
        if apart:
            ctx.mark_non_differentiable(*apart)
        return tuple([t for t in results if t is not None])

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        once, first = ctx.once[0], arriving[0]
        alone = len(arriving) == len(ctx.once) == 1 and ctx.inplace is None
        if alone and once is not None and first is not None and not torch.is_grad_enabled():
            gradient = once.take(first)  # the commonest case, where the host's time counts
            if gradient is not None:
                return None, None, gradient
        given = iter(arriving)
        everywhere = [next(given) if there else None for there in ctx.there]
        if ctx.inplace is not None:
            return None, None, ctx.inplace.gradient(ctx, everywhere)
        return None, None, *gradients(ctx, everywhere, ctx.needs_input_grad[2:])


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

    def gradient(self, ctx: Any, arriving: Sequence[Tensor | None]) -> Tensor | None:
        first, *others = [None if t is None else t.resolve_neg() for t in arriving[: KINDS[ctx.how.type].arriving]]
        if first is None and all(t is None for t in others):
            return None
        if self.in_forward and any(t is not None for t in others):
            raise _refused('z_loss, lse and entropy can then be differentiated only with gradient="backward"')
        if torch.is_grad_enabled():
            raise _refused("it cannot be differentiated again")
        if self.in_forward:
            assert first is not None
            gradient = ctx.once[0].take(first)
            if gradient is None:
                raise _refused("backward can run only once")
            return gradient
        tensors, kept = recalled(ctx)  # raises where the logits have been overwritten since forward
        x, self.x = self.x, None
        assert x is not None
        try:
            _spend(x)
        except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
            torch.autograd.graph.increment_version(x)
        ctx.how.backward((self.memory, *tensors[1:]), kept, [first, *others], [self.memory])
        return self.memory
