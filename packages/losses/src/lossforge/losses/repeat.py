"""The hot path: a call like one before finds its launches under its key and makes them again; only a new one is checked and planned.

Everything that checks and plans depend on is in the key: layouts and devices of the tensors, whether they require grad and are leaves,
the values of all other arguments, and the state of torch (grad mode, modes, transforms, tracing). Calls are kept whose tensors are the
arguments themselves and whose results are returned as they are, without the dispatcher (state.plain).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import KINDS
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses import checks
from lossforge.losses.autograd import Loss, Run, Several, noted
from lossforge.losses.state import state

P = ParamSpec("P")
R = TypeVar("R")

KEPT = 1024
"""How many calls are kept: shapes may vary without end."""
SIMPLE = (int, float, bool, str, type(None))

_calls: dict[Any, "Kept"] = {}


def repeated(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, a loss, with its calls kept and its keywords checked."""
    owner, accepted = function.__qualname__, checks.keywords(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if accepted is not None and name not in accepted:
                raise checks.unexpected(owner, name, accepted)
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
        calls: list[Any] = []
        before, noted.calls = noted.calls, calls
        try:
            result = function(*args, **kwargs)
        finally:
            noted.calls = before  # they hold the call's tensors
        if len(calls) == 1:
            _keep(found, values, result, *calls[0])
        return result

    return call


def _keep(key: Any, values: Sequence[Any], result: Any, how: Run, tensors: Several, with_gradient: bool, results: Sequence[Tensor]) -> None:
    places: list[int | None] = []
    for t in tensors:
        found = [i for i, v in enumerate(values) if v is t and t is not None]
        if t is not None and (len(found) != 1 or (t.device.type == "cpu" and not t.is_floating_point())):
            return  # made from the arguments, or one of two that are the same; or indices that are checked each time
        places.append(found[0] if found else None)
    returned = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple) else []
    origins: list[int | None] = []
    for t in returned:
        of = [i for i, r in enumerate(results) if r is t]
        if t is not None and not of:
            return  # made from the results
        origins.append(of[0] if of else None)
    if not returned:
        return
    if len(_calls) >= KEPT:
        _calls.clear()
    make = None if isinstance(result, Tensor) else type(result)
    _calls[key] = Kept(how._replace(launches={}), len(KINDS[how.type].differentiable) if with_gradient else 0, places, origins, make)


class Kept(NamedTuple):
    """A call to repeat: from the values of its arguments to what its function returns. The second time records the launches.

    leaves: how many of its first tensors are differentiated. places: of the record's tensors among the values. origins: of what is
    returned among the results. make: the named tuple of these.
    """

    how: Run
    leaves: int
    places: Sequence[int | None]
    origins: Sequence[int | None]
    make: Callable[..., Any] | None

    def __call__(self, values: Sequence[Any]) -> Any:
        how = self.how._replace(launches=None) if kernels.trials() else self.how
        tensors = tuple([None if place is None else values[place] for place in self.places])
        results = Loss.apply(how, tensors, *tensors[: self.leaves]) if self.leaves else how.results(tensors)
        if self.make is None:
            return results[self.origins[0] or 0]  # a Tensor that is returned has an origin
        return self.make(*[None if i is None else results[i] for i in self.origins])
