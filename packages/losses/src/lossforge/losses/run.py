"""The path of a public function: a call is checked and planned once, and then found under its key.

Everything that checks and plans depend on is in the key: layouts and devices of the tensors, whether they require grad and are leaves,
the values of all other arguments, and the state of torch (grad mode, modes, transforms, tracing). Calls are kept whose tensors are the
arguments themselves, perhaps in another shape, without the dispatcher (state.plain).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from lossforge.kernels.plans import PLANS, remember
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses import checks
from lossforge.losses.autograd import ExecutionSpec, LossFunction, asked, execution, in_places, otherwise
from lossforge.losses.base.record import Prepared, Several
from lossforge.losses.state import autocast_dtype, state

P = ParamSpec("P")
R = TypeVar("R")

SIMPLE = frozenset((int, float, bool, str, type(None)))


class Known(NamedTuple):
    """A public call that was checked.

    Attributes:
        spec: how it is computed.
        differentiated: how many of its first tensors are differentiated.
        places: of the tensors among the arguments, each with the shape that it is viewed in, if any.
        present: whether each result was asked for.
        finish: from the results to what the public function returns.
    """

    spec: ExecutionSpec[Any]
    differentiated: int
    places: Sequence[tuple[int | None, torch.Size | None]]
    present: Sequence[bool]
    finish: Callable[[Sequence[Tensor | None]], Any]

    def tensors(self, values: Sequence[Any]) -> Several:
        """Return the call's tensors from the values of its arguments."""
        return tuple([None if at is None else values[at] if shape is None else values[at].view(shape) for at, shape in self.places])


def entry_point(function: Callable[P, R], autocast: bool = False) -> Callable[P, R]:
    """Make a public loss of a function that checks a call: check keywords and flags, compute what it prepares, and keep the call.

    Args:
        autocast: whether the function follows autocast.
    """
    owner, accepted, flags = function.__qualname__, checks.keywords(function), checks.flags_of(inspect.signature(function))
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        for name in kwargs:
            if accepted is not None and name not in accepted:
                raise checks.unexpected(owner, name, accepted)
        validate = kwargs.get("validate")
        key = _key(function, args, kwargs) if (validate is None or validate is False) and not checks.VALIDATE else None
        if autocast and key is not None:
            key = (*key, *map(autocast_dtype, ("cuda", "cpu")))
        known = None if key is None else PLANS.get(key)
        if known is not None:
            spec, tensors = known.spec, known.tensors((*args, *kwargs.values()) if kwargs else args)
            if known.differentiated:
                found: Sequence[Tensor] = LossFunction.apply(spec, tensors, *tensors[: known.differentiated])
            else:
                found = spec.results(tensors)
            return known.finish(found if len(known.present) == 1 else in_places(known.present, found))
        checks.all_strided(names, args, kwargs)  # a kept call's tensors are ordinary ones
        prepared = function(*checks.with_flags(flags, args, kwargs), **kwargs)
        if not isinstance(prepared, Prepared):
            return prepared
        spec, tensors, wanted = execution(prepared)
        if spec is None:
            return prepared.finish(otherwise(prepared, tensors, wanted))
        if key is not None:
            _keep(key, (*args, *kwargs.values()), prepared, spec, tensors, wanted)
        found = LossFunction.apply(spec, tensors, *tensors[: len(wanted)]) if any(wanted) else spec.results(tensors)
        return prepared.finish(in_places(asked(prepared.call), found))

    # code of its own, because torch.compile counts the graphs of a code object, and stops at eight
    call.__code__ = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    call.entry = call  # type: ignore[attr-defined]  # not so of a wrapper, which takes over the attributes
    return call


entry_point_of_layer = functools.partial(entry_point, autocast=True)
"""The same for a loss of a linear layer's output, which follows autocast."""


def _key(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a call's checks and plans depend on; None where it is more than plain tensors and simple values.

    Nor is there any while torch.compile traces this function, be it alone, after it has given up on the call around it.
    """
    if torch.compiler.is_compiling():
        return None
    key = [function, *state(), *kwargs]
    for v in (*args, *kwargs.values()) if kwargs else args:
        kind = type(v)
        if kind in SIMPLE:
            key += kind, v
        elif ordinary(v):
            device, shape = v.get_device(), v.shape
            key += shape, v.stride(), v.dtype, device, v.data_ptr() & 15, v.requires_grad, v.is_leaf
            if device < 0 and not shape:
                key.append(v.item())  # a number of the host
        else:
            return None
    return tuple(key)


def _keep(key: Any, values: Sequence[Any], prepared: Prepared, spec: ExecutionSpec[Any], tensors: Several, wanted: Sequence[bool]) -> None:
    """Keep a checked call, where a later one needs no more than its arguments."""
    places = _places(values, tensors)
    if places is not None:
        spec.key = spec
        remember(key, Known(spec, len(wanted) if any(wanted) else 0, places, asked(prepared.call), prepared.finish))


def _places(values: Sequence[Any], tensors: Several) -> list[tuple[int | None, torch.Size | None]] | None:
    """Return where a call's tensors are among the arguments; None where one is made from them, or has its values checked each time."""
    places: list[tuple[int | None, torch.Size | None]] = []
    for t in tensors:
        if t is None:
            places.append((None, None))
            continue
        found = [i for i, v in enumerate(values) if isinstance(v, Tensor) and (v is t or _is_view(t, v))]
        if len(found) != 1 or (t.device.type == "cpu" and not t.is_floating_point()):
            return None
        places.append((found[0], None if values[found[0]] is t else t.shape))
    return places


def _is_view(t: Tensor, v: Tensor) -> bool:
    """Return whether t is v in another shape."""
    same = t.data_ptr() == v.data_ptr() and t.numel() == v.numel() and t.dtype == v.dtype and t.requires_grad == v.requires_grad
    return same and t.is_contiguous() and v.is_contiguous()
