"""The one table of plans, each under all that it follows from. Needs neither Triton nor a GPU.

`by_plan` records the launches of a call while they are made, and makes them again for an equal call by their plan. The plans of public
calls, which say what of a call was checked, are kept here, too: lossforge.losses.engine.calls makes them.
"""

import functools
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

Key = tuple[Any, ...]
"""All that a plan follows from: hashable values."""
MOST_PLANS = 4096
"""How many plans a table keeps: shapes and hyper-parameters may vary without end."""


class Table(dict[Key, Any]):
    """Plans by their keys. Where there are too many, the first made go first."""

    def keep(self, key: Key, plan: Any) -> None:
        """Keep a plan under its key."""
        if len(self) >= MOST_PLANS:
            self.pop(next(iter(self)), None)
        self[key] = plan


def layouts(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Return what a plan depends on of each tensor."""
    return [None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in tensors]


def call_key(name: str, formula: str, tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> Key:
    """Return all that the launches of a template's call follow from but the addresses of its tensors."""
    return name, formula, *layouts(tensors), *[tuple(v) if type(v) is list else v for v in numbers]


class Step(Protocol):
    """What a plan does again."""

    def start(self, pool: list[Any], device: int) -> None:
        """Start on tensors of the plan, to which new ones are added."""


class Computed(NamedTuple):
    """A tensor of a plan that torch computes or allocates: the function, and the places of its arguments."""

    function: Callable[..., Tensor]
    places: Sequence[int]

    def start(self, pool: list[Any], device: int) -> None:
        """Add the tensor to the plan's."""
        pool.append(self.function(*[pool[place] for place in self.places]))


class Applied(NamedTuple):
    """A function of torch that writes into tensors of a plan, and the places of its arguments."""

    function: Callable[..., Any]
    places: Sequence[int]

    def start(self, pool: list[Any], device: int) -> None:
        """Write."""
        self.function(*[pool[place] for place in self.places])


class Freed(NamedTuple):
    """Tensors of a plan that no later step takes."""

    places: Sequence[int]

    def start(self, pool: list[Any], device: int) -> None:
        """Forget them."""
        for place in self.places:
            pool[place] = None


class Plan:
    """The launches of a call, to be made again for equal calls.

    results: places. A place counts what the call brings, then what its steps add: a tensor, or the totals of a launch.
    """

    def __init__(self, steps: Sequence[Step], results: Sequence[int | None]) -> None:
        self.steps, self.results = steps, results

    def __call__(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        pool: list[Any] = list(given)
        device = pool[0].get_device()
        for step in self.steps:
            step.start(pool, device)
        return tuple([None if place is None else pool[place] for place in self.results])


PLANS = Table()
"""The plans of all launches that were recorded, and of public calls. None of launches that do more than their steps."""


class Done(NamedTuple):
    """A step that was made: how it is made again on tensors of a plan, the tensors that it took and those that it added.

    again: from the places of the tensors that it took; None where it cannot be made again.
    """

    again: Callable[[Sequence[int]], Step] | None
    taken: Sequence[Tensor]
    added: Sequence[Tensor]


class _Current(threading.local):
    recording: list[Done] | None = None


_current = _Current()


def note(again: Callable[[Sequence[int]], Step] | None, taken: Sequence[Tensor], added: Sequence[Tensor]) -> None:
    """Enter a step into the recording that is open, if one is."""
    if _current.recording is not None:
        _current.recording.append(Done(again, taken, added))


def computed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return what a function of torch makes of tensors, as a step of the plan that is recorded: a new tensor, or a view of one."""
    found = function(*tensors)
    note(functools.partial(Computed, function), tensors, [found])
    return found


def applied(function: Callable[..., Any], *tensors: Tensor) -> None:
    """Call a function of torch that writes into some of the tensors, as a step of the plan that is recorded."""
    function(*tensors)
    note(functools.partial(Applied, function), tensors, ())


def narrowed(t: Tensor, axis: int, start: int, end: int) -> Tensor:
    """Return the part of a tensor from start to end, as a step of the plan that is recorded; the tensor itself where that is all of it."""
    return t if end - start == t.shape[axis] else computed(functools.partial(_narrowed, axis, start, end), t)


def _narrowed(axis: int, start: int, end: int, t: Tensor) -> Tensor:
    return t.narrow(axis, start, end - start)


Optional = TypeVar("Optional", Tensor, Tensor | None)


def in_order(t: Optional) -> Optional:
    """Return a contiguous tensor, the same where it is."""
    return t if t is None or t.is_contiguous() else computed(Tensor.contiguous, t)


def by_plan(key: Key | None, given: Sequence[Tensor | None], function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> Any:
    """Return what a function gives that launches: by the plan of its key, else by a call of it, whose launches are recorded.

    Launches within those of another key are a part of that plan. Launches that do more than their steps get none. Steps are launches and
    what torch does by `computed` and `applied`. The function must read and write no tensor otherwise.

    Args:
        key: all that the launches follow from but the addresses of the tensors; None where they are not to be recorded as one.
        given: the call's tensors, and those that it writes.
        function: gives new tensors, some of those given, or None.
        arguments: returns the function's.
    """
    if key is None or _current.recording is not None:
        return function(*arguments())
    plan = PLANS.get(key, UNKNOWN)
    if plan is None:
        return function(*arguments())
    if plan is not UNKNOWN:
        return plan(given)
    done: list[Done] = []
    _current.recording = done
    try:
        results = function(*arguments())
    finally:
        _current.recording = None
    if _all_differ(given):
        PLANS.keep(key, _plan(done, given, results))
    return results


UNKNOWN = object()


def _all_differ(given: Sequence[Tensor | None]) -> bool:
    """Return whether no tensor is given twice: a plan tells them apart."""
    present = [id(t) for t in given if t is not None]
    return len({*present}) == len(present)


def _plan(done: Sequence[Done], given: Sequence[Tensor | None], results: Sequence[Tensor | None] | None) -> Plan | None:
    """Return the plan of launches; None where they are more than their steps."""
    places = {id(t): i for i, t in enumerate(given) if t is not None}
    count = len(given)
    steps: list[Step] = []
    taken_by: list[list[int]] = []
    try:
        for again, taken, added in done:
            if again is None:
                return None
            taken_by.append([places[id(t)] for t in taken])
            steps.append(again(taken_by[-1]))
            places |= {id(t): count + i for i, t in enumerate(added)}
            count += len(added)
        found = [None if t is None else places[id(t)] for t in results or ()]
    except KeyError:  # a tensor that is neither given nor of a step
        return None
    return Plan(_freeing(steps, taken_by, {*range(len(given)), *found}), found)


def _freeing(steps: Sequence[Step], taken: Sequence[Sequence[int]], kept: Container[int | None]) -> list[Step]:
    """Return the steps with what forgets a tensor after the last that takes it, so that a plan holds no more memory than its launches did.

    taken: the places that each step takes. kept: places that are not forgotten.
    """
    last = {place: i for i, places in enumerate(taken) for place in places if place not in kept}
    free: dict[int, list[int]] = {}
    for place, i in last.items():
        free.setdefault(i, []).append(place)
    found: list[Step] = []
    for i, step in enumerate(steps):
        found.append(step)
        if i in free and i < len(steps) - 1:
            found.append(Freed(free[i]))
    return found
