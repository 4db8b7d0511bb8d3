"""The one autograd.Function: a call's gradient written in forward or in backward, in new memory or in that of the logits.

Calls on plain tensors are differentiated by `Loss`; the operators, for all others, by the same functions (operators.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import KINDS, Formulas, Kind, RowCall
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


def forward(
    call: Any, gradients: Sequence[Tensor | None], keep: bool, alone: bool = False, recording: Any = None
) -> tuple[Several, Several]:
    """Launch: (results, what is kept for backward), with the gradients in `gradients`; see the templates' `forward`."""
    found = kernels.of_folder(KINDS[type(call)].folder).forward(call, _formulas(call), gradients, keep, alone, recording)
    if recording is not None:
        recording.end((*call[1 : last_tensor(call)], *gradients), found)
    return _parted(KINDS[type(call)], found)


def _parted(kind: Kind, found: Several) -> tuple[Several, Several]:
    """Return results, and what is kept with the results that backward takes too."""
    end = len(kind.results)
    return found[:end], (*found[end:], *[found[kind.results.index(name)] for name in kind.saved])


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


class Run(NamedTuple):
    """How a call is computed: its record in parts, and of one that repeats (repeat.py) the recording or the replay of its launches."""

    type: Any
    name: str
    tensors: Several
    others: tuple[Any, ...]
    in_forward: bool = False
    inplace: bool = False
    recording: Any = None
    replay: Any = None

    @staticmethod
    def of(call: Any, in_forward: bool = False, inplace: bool = False) -> "Run":
        end = last_tensor(call)
        return Run(type(call), call.loss, call[1:end], call[end:], in_forward, inplace)

    @property
    def keeps(self) -> bool:
        """Whether backward needs what forward keeps although the gradient was written in forward."""
        return self.type is RowCall and any(self.others[-1][: KINDS[RowCall].arriving - 1])

    @property
    def call(self) -> Any:
        return self.type(self.name, *self.tensors, *self.others)

    def forward(self, gradients: Sequence[Tensor | None], keep: bool) -> tuple[Several, Several]:
        """Launch what the call needs, one launch doing all where it can."""
        if self.replay is not None:
            return _parted(KINDS[self.type], self.replay((*self.tensors, *gradients)))
        return forward(self.call, gradients, keep, True, self.recording)


def remember(ctx: Any, how: Run, results: Several, kept: Several, gradients: Sequence[Tensor | None]) -> None:
    """Keep a call for backward, tensors as autograd saves them."""
    ctx.once = [None if g is None else Once(g) for g in gradients]
    ctx.type, ctx.name, ctx.others, ctx.results = how.type, how.name, how.others, [t is not None for t in results]
    ctx.save_for_backward(*kept, *how.tensors)
    ctx.set_materialize_grads(False)


def recalled(ctx: Any) -> tuple[Any, Several]:
    """Return the call that `remember` kept, and what its forward kept for backward."""
    kind = KINDS[ctx.type]
    count = len(kind.kept) + len(kind.saved)
    saved = ctx.saved_tensors
    kept = tuple([None if t is None or t.numel() == 0 else t for t in saved[:count]])
    return ctx.type(ctx.name, *saved[count:], *ctx.others), kept


def gradients(ctx: Any, arriving: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the differentiable tensors for what arrives at the results."""
    if len(ctx.results) == len(ctx.once) == 1 and ctx.once[0] is not None and arriving[0] is not None and not torch.is_grad_enabled():
        gradient = ctx.once[0].take(arriving[0])  # the commonest case, where the host's time counts
        if gradient is not None:
            return [gradient]
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


class Loss(torch.autograd.Function):
    """A call on plain tensors, differentiated."""

    @staticmethod
    def forward(ctx: Any, how: Run, *inputs: Tensor) -> Any:
        ctx.inplace, given = None, how
        if how.inplace:
            ctx.inplace = InPlace(inputs[0], how.in_forward)
            given = how._replace(tensors=(ctx.inplace.memory, *how.tensors[1:]))
            written: list[Tensor | None] = [ctx.inplace.memory if how.in_forward else None]
        else:
            written = [torch.empty_like(t) if how.in_forward and w else None for t, w in zip(inputs, ctx.needs_input_grad[1:], strict=True)]
        results, kept = given.forward(written, not how.in_forward or how.keeps)
        if how.inplace and how.in_forward:
            how = how._replace(tensors=())  # backward takes nothing but the gradient
            kept = ()
        remember(ctx, how, results, kept, written)
        if len(results) == 1:
            return results[0]
        ctx.mark_non_differentiable(*[t for t in results[KINDS[how.type].arriving :] if t is not None])
        return results

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.inplace is not None:
            return None, ctx.inplace.gradient(ctx, arriving)
        return None, *gradients(ctx, arriving, ctx.needs_input_grad[1:])


def differentiated(how: Run) -> Several:
    """Compute a call on plain tensors for autograd; its results."""
    results = Loss.apply(how, *how.tensors[: len(KINDS[how.type].differentiable)])
    return (results,) if isinstance(results, Tensor) else results


def run(how: Run, with_gradient: bool) -> Several:
    """Compute a call on plain tensors; its results."""
    if with_gradient:
        return differentiated(how)
    return how.forward([None] * len(KINDS[how.type].differentiable), False)[0]


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
        x, self.x = self.x, None
        assert x is not None
        try:
            _spend(x)
        except RuntimeError:  # one of several views that one function returned: autograd has no node to put in their place
            torch.autograd.graph.increment_version(x)
        backward(call._replace(x=self.memory), kept, arriving[: KINDS[type(call)].arriving], [self.memory])
        return self.memory
