"""The hot path: a call like one before finds its plans under its key and launches; only a new one is checked and planned.

Everything that checks and plans depend on is in the key: layouts and devices of the tensors, whether they require grad and are leaves,
the values of all other arguments, and the state of torch (grad mode, modes, transforms, tracing). Calls are kept whose tensors are the
arguments themselves and whose results are returned as they are, without the dispatcher (state.plain).
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses import checks
from lossforge.losses.autograd import Run, Several, last_tensor, run
from lossforge.losses.state import state

P = ParamSpec("P")
R = TypeVar("R")

KEPT = 1024
"""How many calls are kept: shapes may vary without end."""
SIMPLE = (int, float, bool, str, type(None))

_calls: dict[Any, "Kept"] = {}
_noted = threading.local()


def repeated(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, a loss, with its calls kept and its keywords checked."""
    function = checks.named(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or checks.VALIDATE or kwargs.get("validate"):
            return function(*args, **kwargs)
        values: tuple[Any, ...] = (*args, *kwargs.values())
        key = [function, state(), *kwargs]
        for v in values:
            if ordinary(v):
                key += v.shape, v.stride(), v.dtype, v.get_device(), v.data_ptr() & 15, v.requires_grad, v.is_leaf
                if not v.shape and v.get_device() < 0:
                    key.append(v.item())  # a number of the host
            elif type(v) in SIMPLE:
                key += type(v), v
            else:
                return function(*args, **kwargs)
        found = tuple(key)
        known = _calls.get(found)
        if known is not None:
            return known(values)
        _noted.call = None
        try:
            result = function(*args, **kwargs)
        finally:
            noted, _noted.call = _noted.call, None  # it holds the call's tensors
        if noted is not None:
            _keep(found, values, result, *noted)
        return result

    return call


def note(how: Run, differentiated: bool, results: Several) -> None:
    """Say how the call being made was computed, without the dispatcher."""
    _noted.call = how, differentiated, results


def _keep(key: Any, values: Sequence[Any], result: Any, how: Run, differentiated: bool, results: Several) -> None:
    places: list[int | None] = []
    for t in how.call[1 : last_tensor(how.call)]:
        found = [i for i, v in enumerate(values) if v is t and t is not None]
        if t is not None and (len(found) != 1 or (t.device.type == "cpu" and not t.is_floating_point())):
            return  # made from the arguments, or one of two that are the same; or indices that are checked each time
        places.append(found[0] if found else None)
    returned = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple) else []
    origins: list[int | None] = []
    for t in returned:
        of = [i for i, r in enumerate(results) if r is t and t is not None]
        if t is not None and not of:
            return  # made from the results
        origins.append(of[0] if of else None)
    if not returned:
        return
    if len(_calls) >= KEPT:
        _calls.clear()
    kind = None if isinstance(result, Tensor) else type(result)
    _calls[key] = Kept(how, differentiated, places, origins, kind)


class Kept:
    """A call to repeat: from the values of its arguments to what its function returns.

    places: of the record's tensors among the values. origins: of what is returned among the results. kind: the named tuple of these.
    """

    def __init__(
        self, how: Run, differentiated: bool, places: Sequence[int | None], origins: Sequence[int | None], kind: Callable[..., Any] | None
    ) -> None:
        call = how.call
        self.name, self.others, self.make = call.loss, call[last_tensor(call) :], type(call)
        self.in_forward, self.inplace, self.differentiated = how.in_forward, how.inplace, differentiated
        self.places, self.origins, self.kind = places, origins, kind
        self.plans: tuple[Any, ...] | None = None

    def __call__(self, values: Sequence[Any]) -> Any:
        turn = kernels.Turn(self.plans)
        call = self.make(self.name, *[None if p is None else values[p] for p in self.places], *self.others)
        results = run(Run(call, self.in_forward, self.inplace, turn), self.differentiated)
        if self.plans is None and None not in turn.found:
            self.plans = tuple(turn.found)
        if self.kind is None:
            return results[self.origins[0]]  # type: ignore[index]
        return self.kind(*[None if i is None else results[i] for i in self.origins])
