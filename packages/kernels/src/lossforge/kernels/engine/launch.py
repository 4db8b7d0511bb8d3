"""The one way to a kernel: a launch is planned once for all calls alike, and started on the tensors' device.

A template gives `make`, which plans its launch from records in which operands stand for tensors and slots for floats: the kernel, the
grid, the kernel's arguments, the constants. What differs between calls alike are addresses and floats alone, so that the plan is kept
under everything else, and a further launch fills these in.
"""

import contextlib
import functools
import itertools
import math
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.torch_internals import current_device, current_stream, triton_internals

INTERNALS = triton_internals()
INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process run in Triton's interpreter: TRITON_INTERPRET was set when they were defined."""

PLANS = 4096
"""How many plans are kept, the first made go first: shapes may vary without end."""

_launches: Counter[str] = Counter()
_tried: dict[type, Any] = {}


def launch_counts() -> dict[str, int]:
    """Return the launches so far in this process, by kernel."""
    return dict(_launches)


def chip(device: int) -> tuple[int, int] | None:
    """Return (multiprocessors, bytes of shared memory a program may have) of the GPU that runs compiled kernels; None without one."""
    if device < 0 or INTERPRETED or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0)  # torch's type stubs lack it


class Slot:
    """Stands for a number or tensor that each launch brings: its place among the launch's values, from the end where negative."""

    def __init__(self, place: int) -> None:
        self.place = place


class Operand(Slot):
    """Stands for a tensor, with all of it that a plan may depend on, named as a tensor's."""

    def __init__(self, place: int, layout: "Layout") -> None:
        super().__init__(place)
        self.shape, self._stride, self.dtype, self._device, self.aligned = layout
        self.ndim, self.itemsize = len(self.shape), self.dtype.itemsize

    def stride(self) -> Sequence[int]:
        return self._stride

    def get_device(self) -> int:
        return self._device

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def aligned(t: Any) -> bool:
    """Return whether an operand begins at a multiple of 16 bytes."""
    return t.aligned


Layout = tuple[Sequence[int], Sequence[int], torch.dtype, int, bool]


class Sum(NamedTuple):
    """Where a launch adds up: one float32 part a program and group of programs, the counts of finished ones, and the 0-d total."""

    parts: Any
    ticket: Any
    total: Any


def sum_slots(number: int = 0, of: int = 1) -> Sum:
    """Return the slots of a plan's sum, which each launch brings after its other values."""
    first = 3 * (number - of)
    return Sum(Slot(first), Slot(first + 1), Slot(first + 2))


class Plan:
    """A kernel, its grid and its arguments, with slots for what differs from launch to launch: tensors, then floats, then sums.

    Triton specialises on neither addresses nor floats but for which addresses are multiples of 16. So after Triton has chosen and
    started a kernel once for an alignment, the same kernel is started directly.

    totals: how many sums the launch adds up. counting: programs that count themselves there, those of the grid unless given.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], totals: int = 0, counting: int = 0, **meta: Any
    ) -> None:
        self.kernel, self.arguments, self.meta = kernel, arguments, meta
        self.totals, self.counting = totals, counting or grid[0]
        self.grid = (*grid, 1, 1)[:3]
        self.name = kernel.fn.__name__
        self.direct = not INTERPRETED and torch.version.hip is None
        self.compiled: dict[Any, Any] = {}  # Triton's compiled kernel by alignment

    def launch(self, tensors: Sequence[Tensor], floats: Sequence[float] = ()) -> tuple[Tensor, ...]:
        """Launch on the tensors of the slots, in their order; the totals of the sums."""
        _launches[self.name] += 1
        first = tensors[0]
        device = first.get_device()
        sums: list[Tensor] = []
        for number in range(self.totals):
            sums += new_sum(self.counting, first.device, number > 0)
        if self.compiled and device == current_device() and INTERNALS.unobserved(self.kernel):
            pointers = [t.data_ptr() for t in (*tensors, *sums)]
            compiled = self.compiled.get(_aligned(pointers))
            if compiled is not None:
                count = len(tensors)
                INTERNALS.start(compiled, self.grid, device, self.fill((*pointers[:count], *floats, *pointers[count:])))
                return tuple(sums[2::3])
        if device >= 0 and INTERPRETED:
            _warn_interpreted()
        elsewhere = self.direct and device >= 0 and device != torch.cuda.current_device()
        with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
            compiled = self._by_triton((*tensors, *map(float, floats), *sums))
        if self.direct and device >= 0 and INTERNALS.starts_directly(compiled):
            self.compiled[_aligned([t.data_ptr() for t in (*tensors, *sums)])] = compiled
        return tuple(sums[2::3])

    def _by_triton(self, values: Sequence[Any]) -> Any:
        """Launch through Triton, which compiles what it has not compiled yet; the compiled kernel."""
        return self.kernel[self.grid](*(_filled(a, values) for a in self.arguments), **self.meta)

    @functools.cached_property
    def fill(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """From a launch's values, addresses for tensors, to all the kernel's parameters in order, as a compiled kernel takes them."""
        constants = {name: value for name, value in self.meta.items() if name in self.kernel.arg_names}
        bound = self.kernel.signature.bind(*self.arguments, **constants)
        bound.apply_defaults()
        return filler(tuple(bound.arguments.values()))


def _aligned(pointers: Sequence[int]) -> bool | tuple[bool, ...]:
    """Return True where all addresses are multiples of 16, else which are."""
    return functools.reduce(operator.or_, pointers) % 16 == 0 or tuple([p % 16 == 0 for p in pointers])


def _filled(node: Any, values: Sequence[Any]) -> Any:
    if isinstance(node, Slot):
        return values[node.place]
    if not isinstance(node, tuple):
        return node
    filled = [_filled(n, values) for n in node]
    return type(node)(*filled) if hasattr(node, "_fields") else tuple(filled)


def filler(arguments: tuple[Any, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function from a launch's values to `arguments` with the slots filled.

    Written out as one expression, as the standard library writes named tuples, because walking the arguments takes longer than a launch.
    """
    fixed: list[Any] = []

    def expression(node: Any) -> str:
        if isinstance(node, Slot):
            return f"values[{node.place}]"
        if isinstance(node, tuple):
            return "(" + "".join(expression(n) + "," for n in node) + ")"
        if node is None or type(node) is int:
            return repr(node)
        fixed.append(node)
        return f"fixed[{len(fixed) - 1}]"

    return eval(f"lambda values: {expression(arguments)}", {"fixed": tuple(fixed)})


class Template(NamedTuple):
    """A kernel as `launch` takes it.

    plan: from records with operands and slots to the plan, None where the layouts cannot be addressed. Then the launch is on contiguous
    copies: of what `writes` names new tensors, copied back; of what `expands` names, expanded to the shape that it finds in the call.
    """

    plan: Callable[..., Plan | None]
    writes: tuple[str, ...] = ()
    expands: Mapping[str, Callable[[Any], Sequence[int]]] = {}


class Replay:
    """The launches of a call, to be made again for calls alike without a look at what they are.

    makers: of new tensors, from the call's first. steps: plan, places of its tensors, floats. results: places. A place counts what the
    call brings, then what is made, then the totals in their order.
    """

    def __init__(self, makers: Sequence[Any], steps: Sequence[Any], results: Sequence[int | None]) -> None:
        self.makers, self.steps, self.results = makers, steps, results

    def __call__(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        pool: list[Any] = [*given, *[make(given[0]) for make in self.makers]]
        for plan, places, floats in self.steps:
            pool += plan.launch([pool[place] for place in places], floats)
        return tuple([None if place is None else pool[place] for place in self.results])


class _Current(threading.local):
    recording: "Recording | None" = None


_current = _Current()


class Recording:
    """The launches of a call as they are made within `with`, kept under a key to be made again; None where the call is more than they
    and new tensors.

    known: what is kept; without it, or where it has the key, nothing is recorded. given: the call's tensors and its gradients. results: to
    be set within.
    """

    def __init__(self, known: dict[Any, Replay | None] | None, key: Any, given: Sequence[Tensor | None]) -> None:
        self.known = None if known is not None and key in known else known
        self.key, self.given = key, given
        self.results: Sequence[Tensor | None] = ()
        self.made: list[tuple[Tensor, Any]] = []
        self.steps: list[tuple[Plan, list[Tensor], list[float], tuple[Tensor, ...]]] = []
        self.on_copies = False

    def __enter__(self) -> "Recording":
        if self.known is not None:
            _current.recording = self
        return self

    def __exit__(self, problem: Any, *_: Any) -> None:
        if self.known is not None:
            _current.recording = None
            if problem is None:
                self.known[self.key] = None if self.on_copies or _tried else self._replay()

    def _replay(self) -> Replay | None:
        places: dict[int, int] = {}
        for i, one in enumerate((*self.given, *[t for t, _ in self.made], *itertools.chain(*[totals for *_, totals in self.steps]))):
            places.setdefault(id(one), i)
        try:
            steps = [(plan, [places[id(t)] for t in each], floats) for plan, each, floats, _ in self.steps]
            return Replay([make for _, make in self.made], steps, [None if t is None else places[id(t)] for t in self.results])
        except KeyError:  # a copy, or computed by torch
            return None


def repeated(known: dict[Any, Replay | None] | None, key: Any, given: Sequence[Tensor | None], make: Callable[[], Any]) -> Any:
    """Return the results of the launches that are known under a key, made again on the tensors given; else those of `make`, recorded."""
    replay = known.get(key) if known else None
    if replay is not None:
        return replay(given)
    with Recording(known, key, given) as recording:
        found = make()
        recording.results = found or ()
    return found


def new(x: Tensor, make: Any) -> Tensor:
    """Return make(x), a new tensor that a launch writes whole."""
    found = make(x)
    if _current.recording is not None:
        _current.recording.made.append((found, make))
    return found


def new_like(x: Tensor, shape: Any) -> Tensor | None:
    """Return a new tensor of a shape and dtype on the device of x, or like x; None where there is no shape."""
    if shape is None:
        return None
    return new(x, torch.empty_like if isinstance(shape, Tensor) else functools.partial(_empty, shape))


def _empty(shape: tuple[Sequence[int], torch.dtype], x: Tensor) -> Tensor:
    return torch.empty(shape[0], dtype=shape[1], device=x.device)


_plans: dict[Any, Plan | None] = {}


def launch(template: Template, *records: Any) -> tuple[Tensor, ...]:
    """Launch on the tensors and floats of the records (named tuples); the totals of the sums."""
    values = [v for record in records for v in record]
    tensors = [v for v in values if isinstance(v, Tensor)]
    floats: list[float] = []
    for v in values:
        if isinstance(v, float):
            floats.append(v)
        elif type(v) is list and v and isinstance(v[0], float):
            floats += v
    plan, recording = planned(template, records, values), _current.recording
    if plan is None:
        if recording is not None:
            recording.on_copies = True
        return _on_copies(template, records)
    totals = plan.launch(tensors, floats)
    if recording is not None:
        recording.steps.append((plan, tensors, floats, totals))
    return totals


def planned(template: Template, records: Sequence[Any], values: Sequence[Any]) -> Plan | None:
    """Return the plan kept for calls like this one, or make it."""
    key = (template.plan, trials(), *[_kind(v) for v in values])
    try:
        return _plans[key]
    except KeyError:
        pass
    if len(_plans) >= PLANS:
        _plans.pop(next(iter(_plans)), None)
    plan = _plans[key] = template.plan(*_abstract(records))
    return plan


def _kind(v: Any) -> Any:
    """Return what a plan may depend on of a record's value."""
    if isinstance(v, Tensor):
        return layout(v)
    if isinstance(v, float):
        return float
    if type(v) is list:
        return len(v) if v and isinstance(v[0], float) else tuple(v)
    return v


def layout(t: Tensor) -> Layout:
    return t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16 == 0


def _abstract(records: Sequence[Any]) -> list[Any]:
    """Return the records with an operand for each tensor and a slot for each float, numbered as `launch` brings the values."""
    tensors = 0
    floats = sum(isinstance(v, Tensor) for record in records for v in record)
    found = []
    for record in records:
        fields: list[Any] = []
        for v in record:
            if isinstance(v, Tensor):
                fields.append(Operand(tensors, layout(v)))
                tensors += 1
            elif isinstance(v, float):
                fields.append(Slot(floats))
                floats += 1
            elif type(v) is list and v and isinstance(v[0], float):
                fields.append(tuple([Slot(floats + i) for i in range(len(v))]))
                floats += len(v)
            else:
                fields.append(tuple(v) if type(v) is list else v)
        found.append(type(record)(*fields))
    return found


def _on_copies(template: Template, records: Sequence[Any]) -> tuple[Tensor, ...]:
    """Launch on contiguous copies, which can always be addressed, and copy back what was written."""
    fresh: list[tuple[Tensor, Tensor]] = []

    def copied(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if name in template.writes:
            fresh.append((t, torch.empty(t.shape, dtype=t.dtype, device=t.device)))
            return fresh[-1][1]
        shape = template.expands[name](records[0]) if name in template.expands else t.shape
        return t.expand(shape).contiguous()

    copies = [type(r)(*[copied(name, t) for name, t in zip(r._fields, r, strict=True)]) for r in records]
    totals = launch(template, *copies)
    for t, new in fresh:
        t.copy_(new)
    return totals


@contextlib.contextmanager
def trial(tiles: Any) -> Iterator[None]:
    """Launch with these tiles wherever tiles of their type are chosen: for finding better ones."""
    _tried[type(tiles)] = tiles
    try:
        yield
    finally:
        del _tried[type(tiles)]


def trials() -> tuple[Any, ...]:
    """Return the tiles on trial, which are part of the key of a plan."""
    return tuple(_tried.values())


def on_trial(kind: type) -> Any:
    return _tried.get(kind)


class Workspace(NamedTuple):
    """Memory that one launch uses at a time: zeroed int32 on which its programs count themselves, one for all and one a group, set
    back by the last to finish; and one float32 a program and group."""

    ticket: Tensor
    parts: Tensor
    one: Tensor  # 0-d float32, to allocate others like it, which is the fastest way


PROGRAMS_A_GROUP = 64
_KEPT = 2**14  # programs: 65 KiB a stream
_workspaces: dict[tuple[int, int, bool], Workspace] = {}


def new_sum(programs: int, device: torch.device, second: bool = False) -> Sum:
    """Return where a launch may add up; second: beside another sum of the same launch."""
    ticket, parts, one = workspace(programs, device, second)
    return Sum(parts, ticket, torch.empty_like(one))


def workspace(programs: int, device: torch.device, second: bool = False) -> Workspace:
    """Return the memory of the stream's launches, which follow each other and so share it; second: beside another of the same launch.

    A captured graph may be replayed on any stream beside others and gets its own.
    """
    index = device.index
    if index is None or programs > _KEPT or torch.cuda.is_current_stream_capturing():
        return _new_workspace(programs, device)
    key = (index, current_stream(index), second)
    kept = _workspaces.get(key)
    if kept is None:
        kept = _workspaces[key] = _in_own_thread(lambda: _new_workspace(_KEPT, device))
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return kept


def _in_own_thread(make: Callable[[], Workspace]) -> Workspace:
    """Allocate in a new thread, on the default stream, because what is kept must not come from a pool that a thread allocates from for
    a while, as torch.compile does to warm up a CUDA graph."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _new_workspace(programs: int, device: torch.device) -> Workspace:
    groups = -(-programs // PROGRAMS_A_GROUP)
    return Workspace(
        torch.zeros(1 + groups, dtype=torch.int32, device=device),
        torch.empty(programs + groups, dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


_warned = False


def _warn_interpreted() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "lossforge: CUDA tensors are computed by Triton's INTERPRETER, about a thousand times slower than the compiled kernels. "
            "TRITON_INTERPRET is set in the environment: unset it before Python starts.",
            RuntimeWarning,
            stacklevel=3,
        )
