"""The one autograd.Function: a call's gradient written in forward or in backward, in new memory or in that of the logits.

Calls on plain tensors are differentiated by `Loss`; the operators, for all others, by the same functions (operators.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import KINDS, Formulas
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.reference import reference
from lossforge.losses.state import plain

Several = tuple[Tensor | None, ...]


def last_tensor(call: Any) -> int:
    """Return where a call's tensors end: the normalizer is the last."""
    return call._fields.index("normalizer") + 1


def leaves(call: Any) -> list[Tensor]:
    """Return the tensors that the kernels differentiate."""
    return [getattr(call, name) for name in KINDS[type(call)].differentiable]


def forward(call: Any, gradients: Sequence[Tensor | None], keep: bool, alone: bool = False, turn: Any = None) -> tuple[Several, Several]:
    """Launch: (results, what is kept for backward), with the gradients in `gradients`; see the templates' `forward`."""
    kind = KINDS[type(call)]
    found = kernels.of_folder(kind.folder).forward(call, _formulas(call), gradients, keep, alone, turn)
    results, kept = found[: len(kind.results)], found[len(kind.results) :]
    return results, (*kept, *[results[kind.results.index(name)] for name in kind.saved])


def backward(call: Any, kept: Several, arriving: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Launch: write the gradients for what arrives at the results."""
    kernels.of_folder(KINDS[type(call)].folder).backward(call, _formulas(call), kept, arriving, gradients)


def _formulas(call: Any) -> Formulas | None:
    formula = FORMULAS.get(call.loss)
    return None if formula is None else formula.kernels


class Once:
    """A gradient written in forward, to be handed out once: whoever gets it may change it."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient: Tensor | None = gradient

    def take(self, grad_output: Tensor) -> Tensor | None:
        """The gradient times `grad_output`, in its own memory; None the second time."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return None
        if not (ordinary(gradient) and ordinary(grad_output)):  # traced, where nothing may be overwritten, or many of them at once
            return (gradient.float() * grad_output).to(gradient.dtype)
        kernels.scale_(gradient, grad_output)
        return gradient


def remember(ctx: Any, call: Any, results: Several, kept: Several, gradients: Sequence[Tensor | None]) -> None:
    """Keep a call for backward, tensors as autograd saves them."""
    end = last_tensor(call)
    ctx.once = [None if g is None else Once(g) for g in gradients]
    ctx.type, ctx.name, ctx.others, ctx.results = type(call), call.loss, call[end:], [t is not None for t in results]
    ctx.save_for_backward(*kept, *call[1:end])
    ctx.set_materialize_grads(False)


def recalled(ctx: Any) -> tuple[Any, Several]:
    """Return (call, kept)."""
    kind = KINDS[ctx.type]
    count = len(kind.kept) + len(kind.saved)
    saved = ctx.saved_tensors
    kept = tuple([None if t is None or t.numel() == 0 else t for t in saved[:count]])
    return ctx.type(ctx.name, *saved[count:], *ctx.others), kept


def gradients(ctx: Any, arriving: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the differentiable tensors for what arrives at the results."""
    arriving = [t if there else None for t, there in zip(arriving[: KINDS[ctx.type].arriving], ctx.results, strict=False)]
    found: list[Tensor | None] = [None] * len(wanted)
    if all(t is None for t in arriving):
        return found
    first, *others = arriving
    if first is not None and all(t is None for t in others) and not torch.is_grad_enabled():
        found = [once.take(first) if once is not None and want else None for once, want in zip(ctx.once, wanted, strict=True)]
    missing = [want and g is None for g, want in zip(found, wanted, strict=True)]
    if any(missing):
        found = [g if new is None else new for g, new in zip(found, _anew(ctx, arriving, missing), strict=True)]
    return found


def _anew(ctx: Any, arriving: Sequence[Tensor | None], wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    call, kept = recalled(ctx)
    if torch.is_grad_enabled():
        pairs = [(r, g) for r, g in zip(reference(call), arriving, strict=False) if r is not None and g is not None]
        inputs = [t for t, want in zip(leaves(call), wanted, strict=True) if want]
        found = iter(torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], create_graph=True))
        return [next(found) if want else None for want in wanted]
    if plain(*leaves(call), *arriving):
        written = [torch.empty_like(t) if want else None for t, want in zip(leaves(call), wanted, strict=True)]
        backward(call, kept, arriving, written)
        return written
    operator, numbers = f"{KINDS[type(call)].operator}_backward", getattr(ctx, "numbers", None)
    if numbers is None:
        results = getattr(torch.ops.lossforge, operator)(*call, *kept, *arriving, *wanted)
    else:
        results = getattr(torch.ops.lossforge, f"{operator}_scheduled")(numbers, *call, *kept, *arriving, *wanted)
    several = (results,) if isinstance(results, Tensor) else results
    return [g if want else None for g, want in zip(several, wanted, strict=True)]


class Run(NamedTuple):
    """How a call on plain tensors is computed. turn: of a call that repeats (repeat.py)."""

    call: Any
    in_forward: bool
    inplace: bool = False
    turn: Any = None


class Loss(torch.autograd.Function):
    """A call on plain tensors, differentiated."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> Any:
        call, keep = run.call, not run.in_forward or getattr(run.call, "keeps", False)
        ctx.inplace = None
        if run.inplace:
            ctx.inplace = InPlace(ctx, inputs[0], run.in_forward)
            call = call._replace(x=ctx.inplace.memory)
            written: list[Tensor | None] = [call.x if run.in_forward else None]
        else:
            written = [torch.empty_like(t) if run.in_forward and w else None for t, w in zip(inputs, ctx.needs_input_grad[1:], strict=True)]
        results, kept = forward(call, written, keep, True, run.turn)
        if not run.inplace:
            remember(ctx, call, results, kept, written)
        else:
            remember(ctx, run.call, results, kept, written) if not run.in_forward else ctx.inplace.spent(ctx, call, results, written)
        for t in results[KINDS[type(call)].arriving :]:
            if t is not None:
                ctx.mark_non_differentiable(t)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.inplace is not None:
            return None, ctx.inplace.gradient(ctx, arriving)
        return None, *gradients(ctx, arriving, ctx.needs_input_grad[1:])


def run(how: Run, differentiated: bool) -> Several:
    """Compute a call on plain tensors; its results."""
    if not differentiated:
        return forward(how.call, [None] * len(leaves(how.call)), False, True, how.turn)[0]
    results = Loss.apply(how, *leaves(how.call))
    return (results,) if isinstance(results, Tensor) else results


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

    def __init__(self, ctx: Any, x: Tensor, in_forward: bool) -> None:
        self.memory, self.x, self.in_forward = x.detach(), x, in_forward
        if in_forward:
            self.x = None  # type: ignore[assignment]
            try:
                _spend(x)  # within forward, whose graph already leads to what x came from; before the launch, since autograd can refuse
            except RuntimeError as refused:
                raise ValueError(f"inplace=True needs logits that autograd allows to be overwritten: {refused}") from None

    def spent(self, ctx: Any, call: Any, results: Several, written: Sequence[Tensor | None]) -> None:
        """Keep what backward needs of a gradient that is written: nothing else."""
        ctx.once, ctx.type = [Once(g) for g in written if g is not None], type(call)
        ctx.set_materialize_grads(False)

    def gradient(self, ctx: Any, arriving: Sequence[Tensor | None]) -> Tensor | None:
        first, *others = arriving[: KINDS[ctx.type].arriving]
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
        call, kept = recalled(ctx)  # raises where the logits have been overwritten since forward
        x, self.x = self.x, None  # type: ignore[assignment]
        try:
            _spend(x)
        except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
            torch.autograd.graph.increment_version(x)
        backward(call._replace(x=self.memory), kept, arriving[: KINDS[type(call)].arriving], [self.memory])
        return self.memory
