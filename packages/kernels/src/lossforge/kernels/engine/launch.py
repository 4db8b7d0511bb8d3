"""The one way to a kernel: a template lays out a launch and starts it; the launches of a call are recorded, and made again for equal calls.

A `Launch` has the kernel, the grid, the arguments and the constants. To make one takes longer than a small kernel runs. So the launches of
a call are kept (plans.py) under a key that says all that they follow from: layouts of the tensors and values of everything else. An equal
call only fills in the addresses.
"""

import contextlib
import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lossforge.kernels.availability import INTERPRETED
from lossforge.kernels.plans import computed, note
from lossforge.kernels.torch_internals import current_device, current_stream, triton_internals

INTERNALS = triton_internals()
DIRECT = not INTERPRETED and torch.version.hip is None
"""Whether a compiled kernel may be started without Triton's launcher."""

_launches: Counter[str] = Counter()


def launch_counts() -> dict[str, int]:
    """Return the launches so far in this process, by kernel."""
    return dict(_launches)


def chip(device: int) -> tuple[int, int] | None:
    """Return (multiprocessors, bytes of shared memory a program may have) of the GPU that runs compiled kernels; None without one."""
    if device < 0 or INTERPRETED or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0)  # torch's type stubs lack it


def aligned(t: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 16 bytes."""
    return t.data_ptr() % 16 == 0


@dataclass(frozen=True)
class Slot:
    """Stands for memory of a sum among the arguments of a launch, which each start allocates."""

    place: int


class Sum(NamedTuple):
    """Where a launch adds up: one float32 part a program and group of programs, the counts of finished ones, and the 0-d total."""

    parts: Any
    ticket: Any
    total: Any


def sum_slots(number: int = 0) -> Sum:
    """Return the slots of a launch's sum. number: of several, which."""
    return Sum(Slot(3 * number), Slot(3 * number + 1), Slot(3 * number + 2))


@dataclass(frozen=True)
class Described:
    """Stands for the descriptor of a tensor: its slot, and the descriptor's own shape, strides and block."""

    slot: Slot
    layout: Sequence[Sequence[int]]


class Launch:
    """A kernel, its grid and its arguments, ready to start.

    totals: how many sums the launch adds up. counting: programs that count themselves there, those of the grid unless given.
    copies: tensors to be written, each with the contiguous copy that the kernel writes in its place.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], totals: int = 0, counting: int = 0, **meta: Any
    ) -> None:
        self.kernel, self.totals, self.counting = kernel, totals, counting or grid[0]
        self.grid = (*grid, 1, 1)[:3]
        self.name = kernel.fn.__name__
        constants = {name: value for name, value in meta.items() if name in kernel.arg_names}
        bound = _signature(kernel.fn).bind(*arguments, **constants)
        bound.apply_defaults()
        self.arguments = tuple(bound.arguments.values())
        self.options = {name: value for name, value in meta.items() if name not in constants}
        self.tensors = _tensors(self.arguments)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def start(self) -> tuple[Tensor, ...]:
        """Start through Triton, which compiles what it has not compiled yet, and return the totals of the sums."""
        _launches[self.name] += 1
        device = self.tensors[0].get_device()
        sums = new_sums(self.totals, self.counting, self.tensors[0].device)
        if device >= 0 and INTERPRETED:
            _warn_interpreted()
        with _on(device):
            filled = mapped(self.arguments, lambda a: sums[a.place] if type(a) is Slot else a)
            compiled = self.kernel[self.grid](*filled, **self.options)
        for t, copy in self.copies:
            t.copy_(copy)
        note(None if self.copies else functools.partial(Step, self, compiled), self.tensors, sums[2::3])
        return tuple(sums[2::3])


_signature = functools.cache(inspect.signature)


def _on(device: int) -> Any:
    """Return a context in which Triton starts kernels on this device."""
    elsewhere = DIRECT and device >= 0 and device != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def _tensors(node: Any) -> list[Tensor]:
    if isinstance(node, (Tensor, TensorDescriptor)):
        return [node if isinstance(node, Tensor) else node.base]
    return [t for each in node for t in _tensors(each)] if isinstance(node, tuple) else []


def mapped(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the arguments with `leaf` of all that is not a tuple; records stay records."""
    if not isinstance(node, tuple):
        return leaf(node)
    each = [mapped(n, leaf) for n in node]
    return type(node)(*each) if hasattr(node, "_fields") else tuple(each)


def filler(arguments: Any, named: bool) -> Callable[[Sequence[Any]], Any]:
    """Return the function from a launch's values to `arguments` with these values in the slots.

    Written out as one expression, as the standard library writes named tuples, because walking the arguments takes longer than a launch.

    Args:
        named: whether records stay named tuples, as Triton's launcher needs them.
    """
    fixed: list[Any] = []

    def constant(value: Any) -> str:
        fixed.append(value)
        return f"fixed[{len(fixed) - 1}]"

    def expression(node: Any) -> str:
        if type(node) is Slot:
            return f"values[{node.place}]"
        if type(node) is Described:
            return f"{constant(TensorDescriptor)}({expression(node.slot)}, {', '.join(map(constant, node.layout))})"
        if isinstance(node, tuple):
            make = constant(type(node)) if named and hasattr(node, "_fields") else ""
            inner = ", ".join(map(expression, node))
            return f"{make}({inner})" if make else f"({inner},)" if node else "()"
        return repr(node) if node is None or type(node) is int else constant(node)

    return eval(f"lambda values: {expression(arguments)}", {"fixed": tuple(fixed)})


WRITTEN = ("out", "gradient", "gradients")
"""Fields of a record that are written: a tensor or several."""


def addressed(make: Callable[..., Launch | None], *records: Any, expands: Mapping[str, Sequence[int]] | None = None) -> Launch:
    """Return the launch that `make` makes of records (named tuples) of tensors and numbers, or None where it cannot address the layouts.

    Then the launch is on contiguous copies: of what is WRITTEN new tensors, copied back; of what `expands` names, expanded to a shape.
    """
    launch = make(*records)
    if launch is not None:
        return launch
    written: list[tuple[Tensor, Tensor]] = []

    def copied(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if name in WRITTEN:
            written.append((t, torch.empty(t.shape, dtype=t.dtype, device=t.device)))
            return written[-1][1]
        return t.expand((expands or {}).get(name, t.shape)).contiguous()

    launch = make(*[type(r)(*[mapped(v, functools.partial(copied, name)) for name, v in r._asdict().items()]) for r in records])
    assert launch is not None
    launch.copies = written
    return launch


class Step:
    """A launch of a plan, with places among the plan's tensors for its own.

    Triton specialises on neither addresses nor floats, but for which addresses are multiples of 16, and that the plan's key says. So the
    kernel that Triton compiled is started directly, where Triton's private names are as they were.
    """

    def __init__(self, launch: Launch, compiled: Any, places: Sequence[int]) -> None:
        self.kernel, self.grid, self.options, self.name = launch.kernel, launch.grid, launch.options, launch.name
        self.totals, self.counting = launch.totals, launch.counting
        self.compiled = compiled if DIRECT and INTERNALS.starts_directly(compiled) else None
        self.places = places
        self.described = any(isinstance(a, TensorDescriptor) for a in launch.arguments)
        values = iter(range(len(places)))

        def slot(argument: Any) -> Any:
            if type(argument) is Slot:
                return Slot(len(places) + argument.place)
            if isinstance(argument, Tensor):
                return Slot(next(values))
            if isinstance(argument, TensorDescriptor):
                return Described(Slot(next(values)), (argument.shape, argument.strides, argument.block_shape))
            return argument

        self.arguments = mapped(launch.arguments, slot)

    @functools.cached_property
    def addressed(self) -> Callable[[Sequence[Any]], Any]:
        """All the kernel's parameters in order, as a compiled kernel takes them, from addresses; from tensors where one is described."""
        return filler(self.arguments, named=False)

    @functools.cached_property
    def filled(self) -> Callable[[Sequence[Tensor]], Any]:
        """The same as Triton's launcher takes them, from tensors."""
        return filler(self.arguments, named=True)

    def start(self, pool: list[Any], device: int) -> None:
        """Start on the plan's tensors, to which the totals of the sums are added."""
        _launches[self.name] += 1
        tensors = [pool[place] for place in self.places]
        sums = new_sums(self.totals, self.counting, tensors[0].device) if self.totals else []
        tensors += sums
        if self.compiled is not None and device == current_device() and INTERNALS.unobserved(self.kernel):
            INTERNALS.start(
                self.compiled, self.grid, device, self.addressed(tensors if self.described else [t.data_ptr() for t in tensors])
            )
        else:
            with _on(device):
                self.kernel[self.grid](*self.filled(tensors), **self.options)
        pool += sums[2::3]


New = tuple[Sequence[int], torch.dtype] | Tensor
"""Shape and dtype of a new tensor, or one that it is like."""


@overload
def new_like(x: Tensor, shape: New) -> Tensor: ...
@overload
def new_like(x: Tensor, shape: New | None) -> Tensor | None: ...
def new_like(x: Tensor, shape: New | None) -> Tensor | None:
    """Return a new tensor of a shape and dtype on the device of x, or like x; None without a shape."""
    if shape is None:
        return None
    return computed(torch.empty_like if isinstance(shape, Tensor) else functools.partial(_empty, shape), x)


def _empty(shape: tuple[Sequence[int], torch.dtype], x: Tensor) -> Tensor:
    return torch.empty(shape[0], dtype=shape[1], device=x.device)


class Workspace(NamedTuple):
    """Memory that one launch uses at a time: zeroed int32 on which its programs count themselves, one for all and one a group, set
    back by the last to finish; and one float32 a program and group."""

    ticket: Tensor
    parts: Tensor
    one: Tensor  # 0-d float32, to allocate others like it, which is the fastest way


PROGRAMS_A_GROUP = 64
_KEPT = 2**14  # programs: 65 KiB a stream
_workspaces: dict[tuple[int, int, bool], Workspace] = {}


def new_sums(totals: int, programs: int, device: torch.device) -> list[Tensor]:
    """Return the memory of a launch's sums, one after the other, in the order of `Sum`."""
    sums: list[Tensor] = []
    for number in range(totals):
        ticket, parts, one = workspace(programs, device, number > 0)
        sums += parts, ticket, torch.empty_like(one)
    return sums


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


@functools.cache
def _warn_interpreted() -> None:
    warnings.warn(
        "lossforge: CUDA tensors are computed by Triton's INTERPRETER, about a thousand times slower than the compiled kernels. "
        "TRITON_INTERPRET is set in the environment: unset it before Python starts.",
        RuntimeWarning,
        stacklevel=3,
    )
