"""The one table of plans, each under all that it follows from. Needs neither Triton nor a GPU.

`by_plan` records the launches of a call while they are made, and makes them again for an equal call by their plan. The plans of public
calls, which say what of a call was checked, are kept here, too: lossforge.losses.engine.calls makes them.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

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
"""The plans of all launches that were recorded, and of public calls."""


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


def by_plan(key: Key | None, given: Sequence[Tensor | None], function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> Any:
    """Return what a function gives that launches: by the plan of its key, else by a call of it, whose launches are recorded.

    Launches within those of another key are a part of that plan. Launches that do more than their steps get none.

    Args:
        key: all that the launches follow from but the addresses of the tensors; None where they are not to be recorded as one.
        given: the call's tensors, and those that it writes.
        function: gives new tensors, some of those given, or None.
        arguments: returns the function's.
    """
    if key is None or _current.recording is not None:
        return function(*arguments())
    plan = PLANS.get(key)
    if plan is not None:
        return plan(given)
    done: list[Done] = []
    _current.recording = done
    try:
        results = function(*arguments())
    finally:
        _current.recording = None
    plan = _plan(done, given, results)
    if plan is not None:
        PLANS.keep(key, plan)
    return results


def _plan(done: Sequence[Done], given: Sequence[Tensor | None], results: Sequence[Tensor | None] | None) -> Plan | None:
    """Return the plan of launches; None where they are more than their steps, or where two of the tensors given are one."""
    present = [t for t in given if t is not None]
    if len({*map(id, present)}) < len(present):
        return None
    places = {id(t): i for i, t in enumerate(given) if t is not None}
    count = len(given)
    steps: list[Step] = []
    try:
        for again, taken, added in done:
            if again is None:
                return None
            steps.append(again([places[id(t)] for t in taken]))
            places |= {id(t): count + i for i, t in enumerate(added)}
            count += len(added)
        return Plan(steps, [None if t is None else places[id(t)] for t in results or ()])
    except KeyError:  # a tensor that is neither given nor of a step
        return None
