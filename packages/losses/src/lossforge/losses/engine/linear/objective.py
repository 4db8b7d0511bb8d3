"""A scalar of the results of rows, such as a policy's loss, with its gradient in three matrix products.

A chunk's rows are computed first, then the scalar's slopes at their results, in plain torch, and with these the gradient of the chunk's
logits, while they are in memory. The slopes of a chunk must depend on its own rows alone: of the rows not yet computed the scalar sees 0.
The last chunk completes the rows. There the slopes of all are compared with those that were used, and where they differ the scalar and its
gradients are nan. In a graph, where autograd computes the slopes, exponentials.py has the way.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.losses.base import checks
from lossforge.losses.base.record import CheckedCall, Several
from lossforge.losses.base.state import gradient_in_forward, kernels_apply, plain
from lossforge.losses.engine import by_operators
from lossforge.losses.engine.calls import compute, planned
from lossforge.losses.engine.gradients import new_gradients, scaled
from lossforge.losses.engine.linear.engine import forward, goes_by_exponentials, is_wide, rows_of_chunks

INDEPENDENT = ("tokens", "sequences", "pairs")
ENTROPY = 3
"""The place of the entropies among the results of rows."""


class Objective(NamedTuple):
    """A scalar of what a call returns.

    Attributes:
        of: from what the call returns to the scalar.
        together: how many rows after one another decide each other's slopes; None for all.
        of_entropy: whether the entropies are differentiated, too.
        gradient: the option of this name.
    """

    of: Callable[[Any], Tensor]
    together: int | None
    of_entropy: bool
    gradient: str | None


def by_objective(objective: Objective, checked: CheckedCall[Any, Any]) -> Tensor:
    """Return the scalar of a checked call: its gradient is written in forward, or flows through the rows' results."""
    call = checked.call
    if not _in_three_products(call, objective):
        return _scalar(objective.of(compute(checked)))
    if torch.compiler.is_compiling():
        return _scalar(objective.of(_in_graph(checked)))
    found: Tensor = _Written.apply(_Computation(checked, objective), *call.x.parts)
    return found


def _in_three_products(call: Any, objective: Objective) -> bool:
    """Return whether no more are taken: in a graph where one chunk of exponentials has all rows, else where no chunk parts what belongs
    together."""
    layer: Head = call.x
    if not (layer.requires_grad and torch.is_grad_enabled() and layer.input.shape[0]):
        return False
    in_graph = torch.compiler.is_compiling()
    if not ((in_graph or plain(*layer.tensors, call.target)) and kernels_apply(layer.input, call.target, fused=True)):
        return False
    if not gradient_in_forward(objective.gradient, layer, "sum", True):  # type: ignore[arg-type]  # a layer says what it asks of a tensor
        return False
    exponentials = goes_by_exponentials(call, objective)
    if in_graph and not exponentials:
        return False
    of_weight = layer.weight if layer.weight.requires_grad else None
    rows = rows_of_chunks(call, of_weight, is_wide(layer) and not exponentials, _together(call, objective), exponentials).chunk
    return rows >= layer.input.shape[0] if in_graph else rows > 0


def _in_graph(checked: CheckedCall[Any, Any]) -> Any:
    """Return what a call returns, with exponentials kept for backward."""
    plan, tensors = planned(checked)
    return plan.finish((by_operators.losses(plan.spec, tensors), *[None] * len(checked.call.outputs)))


def _together(call: Any, objective: Objective) -> int:
    rows: int = call.x.input.shape[0]
    return rows if objective.together is None else min(objective.together, rows)


class _Slopes:
    """The slopes of an objective at the results of rows, a chunk after another.

    seen: results of all rows by their places, 0 where they are not computed yet. used: the slopes that the chunks were given. done: all
    rows are known; from then on the slopes are those of the first time. sound: 1, or nan where the chunks were given other slopes than
    those of all rows; value and gradients are multiplied by it. None where one chunk has all rows.
    """

    def __init__(self, checked: CheckedCall[Any, Any], objective: Objective) -> None:
        self.checked, self.objective = checked, objective
        self.together, self.of_entropy = _together(checked.call, objective), objective.of_entropy
        self.places = (0, ENTROPY) if objective.of_entropy else (0,)
        self.seen: dict[int, Tensor] = {}
        self.used: dict[int, Tensor] = {}
        self.done = False
        self.sound: Tensor | None = None

    def of_rows(self, start: int, end: int, results: Several) -> Sequence[Tensor | None]:
        """Return the gradients that arrive at the results of a chunk, which is the rows from start to end."""
        if not self.done:
            self.value = self._evaluated(start, end, results)
        return [self.used[i][start:end] if i in self.used else None for i in range(ENTROPY + 1)]

    def take(self) -> Tensor:
        """Return the objective, and forget it: the node of the graph that returns it must not hold it."""
        value = self.value
        del self.value
        return value

    def _evaluated(self, start: int, end: int, results: Several) -> Tensor:
        """Return the objective of the results that are known, and enter its slopes."""
        count = self.checked.call.x.input.shape[0]
        for i, each in enumerate(results[: ENTROPY + 1]):
            if each is not None:
                self.seen.setdefault(i, each.new_zeros(count))[start:end] = each
        with torch.enable_grad():
            leaves = {i: t.detach().requires_grad_(i in self.places) for i, t in self.seen.items()}
            known = [leaves.get(i) for i in range(len(self.checked.call.outputs) + 1)]
            value = _scalar(self.objective.of(self.checked.finish(known)))
        _check_graph(value, list(leaves.values()))
        slopes = torch.autograd.grad(value, [leaves[i] for i in self.places], allow_unused=True, materialize_grads=True)
        for i, slope in zip(self.places, slopes, strict=True):
            used = self.used.setdefault(i, slope.clone(memory_format=torch.contiguous_format))
            used[start:end] = slope[start:end]
        value = value.detach()
        self.done = end == count
        if not self.done:
            return value
        self.seen.clear()
        if not start:
            return value
        self.sound = torch.where(self._same(slopes), 1.0, torch.nan).to(value.dtype)
        return value * self.sound

    def _same(self, slopes: Sequence[Tensor]) -> Tensor:
        """Return whether the chunks were given the slopes of all rows."""
        pairs = zip(self.used.values(), slopes, strict=True)
        return torch.stack([((a == b) | (a.isnan() & b.isnan())).all() for a, b in pairs]).all()


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"objective must return a 0-d floating tensor, got {type(value).__name__}")
    if value.ndim or not value.is_floating_point():
        raise ValueError(f"objective must return a 0-d floating tensor, got {value.dtype} of shape {tuple(value.shape)}")
    return value


def _check_graph(value: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise unless an objective is differentiable by its leaves, and by nothing else."""
    if value.grad_fn is None:
        raise ValueError("objective must be computed from the log-probabilities, got a result that does not require grad")
    todo, met = [value.grad_fn], {value.grad_fn}
    while todo:
        node: Any = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is each for each in leaves):
            raise ValueError(
                f"objective must be differentiable by what it is given alone, got one that depends on another tensor, of shape "
                f'{tuple(leaf.shape)}, that requires grad: detach it, or give gradient="backward"'
            )
        following = {each for each, _ in node.next_functions if each is not None} - met
        met |= following
        todo += following


def _with_tensors(layer: Head, made: Callable[[Tensor], Tensor]) -> Head:
    """Return a layer whose input, weight and bias are made of its own."""
    bias = None if layer.bias is None else made(layer.bias)
    return Head(made(layer.input), made(layer.weight), bias, *layer.numbers)


class _Computation:
    """The gradients of a layer by an objective."""

    def __init__(self, checked: CheckedCall[Any, Any], objective: Objective) -> None:
        self.checked, self.objective, self.slopes = checked, objective, _Slopes(checked, objective)

    def gradients(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of input, weight and bias that are wanted."""
        call = self.checked.call
        layer = _with_tensors(call.x, Tensor.detach)
        written = new_gradients(layer.parts, wanted)
        forward(call._replace(x=layer), None, written, False, slopes=self.slopes)
        return written

    def differentiable(self, wanted: Sequence[bool], grad_output: Tensor) -> list[Tensor | None]:
        """Return the gradients for that of the value, to be differentiated again."""
        call = self.checked.call
        layer = _with_tensors(call.x, lambda t: t.view_as(t))
        value = self.objective.of(compute(self.checked._replace(call=call._replace(x=layer))))
        inputs = [t for t, want in zip(layer.parts, wanted, strict=True) if want and t is not None]
        found = iter(torch.autograd.grad(value, inputs, grad_output, create_graph=True))
        return [next(found) if want else None for want in wanted]


class _Written(torch.autograd.Function):
    """An objective whose gradients are written in forward, and handed out once. A second backward computes them again."""

    @staticmethod
    def forward(ctx: Any, computation: _Computation, *tensors: Tensor | None) -> Tensor:
        ctx.computation, ctx.wanted = computation, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*tensors)
        ctx.written = computation.gradients(ctx.wanted)
        return computation.slopes.take()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors  # raises where one has been changed since
        sound = ctx.computation.slopes.sound
        grad_output = grads[0] if sound is None else grads[0] * sound
        if torch.is_grad_enabled():
            return None, *ctx.computation.differentiable(ctx.wanted, grad_output)
        written, ctx.written = ctx.written or ctx.computation.gradients(ctx.wanted), None
        return None, *scaled(True, written, grad_output)


def of_tokens(
    objective: Callable[..., Tensor], head: Head, index: Tensor, independent: str | None, entropy: bool, gradient: str | None, linear: Any
) -> tuple[Head, Tensor, Objective]:
    """Check an objective of tokens' log-probabilities; return the layer and the tokens in the order of its chunks, and the objective.

    Pairs stand after one another: in place of (2N, …), input and index are (N, 2, …), the entries of the first half with those of the
    second. objective takes log-probabilities, and with `entropy` entropies, in the order that the public function has them. linear: the
    options of the layer.
    """
    checks.one_of("independent", independent, (None, *INDEPENDENT))
    checks.one_of("gradient", gradient, checks.MODES)
    if not callable(objective):
        raise TypeError(f"objective must be a function of log-probabilities, got {type(objective).__name__}")
    checks.integer("index", index)
    lead = head.input.shape[:-1]
    checks.fits("index", index, index.shape == lead, "have shape {}", lead)
    together = {None: None, "tokens": 1}.get(independent, math.prod(lead[1:]))
    if independent == "pairs":
        checks.fits("input", head.input, len(lead) > 0 and lead[0] % 2 == 0, "have an even dimension 0 for pairs, one half chosen")
        sequences = len(lead) > 1 or linear.get("shift", 0) == 0
        checks.fits("index", index, sequences, 'have shape (2N, T), a sequence each, where independent="pairs" and shift is not 0')
        head, index, together = head.with_input(in_pairs(head.input)), in_pairs(index), 2 * math.prod(lead[1:])
    if together != 1 and (linear.get("skip_ignored") or linear.get("valid") is not None):
        together = None  # rows are left out

    def of(found: Any) -> Tensor:
        tensors = found[:2] if isinstance(found, tuple) else (found,)
        return objective(*[_in_halves(t) if independent == "pairs" and t is not None else t for t in tensors])

    return head, index, Objective(of, together, entropy, gradient)


def in_pairs(t: Tensor) -> Tensor:
    """Return a tensor (2N, …) as (N, 2, …): the entries of its first half, each with that of the second."""
    return t.reshape(2, t.shape[0] // 2, *t.shape[1:]).transpose(0, 1)


def _in_halves(t: Tensor) -> Tensor:
    return t.transpose(0, 1).flatten(0, 1)
