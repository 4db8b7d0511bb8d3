"""Starting a kernel: planned once a layout, on the tensors' device, counted, and with a warning where the interpreter would run it."""

import contextlib
import functools
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.torch_internals import current_device, current_stream, start, starts_directly, unobserved

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process run in Triton's interpreter: TRITON_INTERPRET was set when they were defined."""

PLANS = 1024
"""How many plans of a kernel are kept, the last used: shapes may vary without end."""

_launches: Counter[str] = Counter()


def launch_counts() -> dict[str, int]:
    """Launches so far in this process, by kernel."""
    return dict(_launches)


def chip(device: int) -> tuple[int, int] | None:
    """(multiprocessors, bytes of shared memory a program may have) of the GPU that runs compiled kernels; None without one."""
    if device < 0 or INTERPRETED or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0)  # torch's type stubs lack it


Layout = tuple[Sequence[int], Sequence[int], torch.dtype, int, bool]
"""All of a tensor that a plan may depend on: shape, strides, dtype, device index (-1 on CPU), whether it begins at 16 bytes' multiple."""


def layout(t: Tensor | None) -> Layout | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16 == 0)


class Slot:
    """Stands in a plan's arguments for a tensor or float that each launch brings: the place-th of its values."""

    def __init__(self, place: int) -> None:
        self.place = place


def slots(of: Any, present: Sequence[bool], start: int = 0) -> Any:
    """A named tuple `of` Slots numbered from `start`, None where the value is absent."""
    places = itertools.count(start)
    return of(*(Slot(next(places)) if p else None for p in present))


class Plan:
    """A kernel, its grid and its arguments, with Slots in place of what differs from launch to launch: tensors, then floats.

    A plan is made from the layouts of its tensors and from its other arguments alone, and kept by these (functools.lru_cache), so a
    plan's launches differ in addresses and floats. Triton specialises on neither but for which addresses are multiples of 16. So
    after Triton has chosen and started a kernel once for an alignment, the same kernel is started directly.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...], **meta: Any) -> None:
        self.kernel, self.device, self.arguments, self.meta = kernel, device, arguments, meta
        self.grid = (*grid, 1, 1)[:3]
        self.name = kernel.fn.__name__
        self.direct = device >= 0 and not INTERPRETED and torch.version.hip is None
        self.compiled: dict[Any, Any] = {}  # Triton's compiled kernel by alignment

    def launch(self, tensors: Iterable[Tensor | None], floats: Sequence[float] = ()) -> None:
        """Launch on the tensors that are not None, in the order of their Slots."""
        _launches[self.name] += 1
        present = [t for t in tensors if t is not None]
        if self.compiled and self.device == current_device() and unobserved(self.kernel):
            pointers = [t.data_ptr() for t in present]
            compiled = self.compiled.get(_aligned(pointers))
            if compiled is not None:
                start(compiled, self.grid, self.device, self.fill((*pointers, *floats)))
                return
        if self.device >= 0 and INTERPRETED:
            _warn_interpreted()
        elsewhere = self.direct and self.device != torch.cuda.current_device()
        with torch.cuda.device(self.device) if elsewhere else contextlib.nullcontext():
            compiled = self._by_triton(present, floats)
        if self.direct and starts_directly(compiled):
            self.compiled[_aligned([t.data_ptr() for t in present])] = compiled

    def _by_triton(self, tensors: Sequence[Tensor], floats: Sequence[float]) -> Any:
        """Launch through Triton, which compiles what it has not compiled yet; the compiled kernel."""
        values = (*tensors, *map(float, floats))
        return self.kernel[self.grid](*(_filled(a, values) for a in self.arguments), **self.meta)

    @functools.cached_property
    def fill(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """From a launch's values, addresses for tensors, to all the kernel's parameters in order, as a compiled kernel takes them."""
        constants = {name: value for name, value in self.meta.items() if name in self.kernel.arg_names}
        bound = self.kernel.signature.bind(*self.arguments, **constants)
        bound.apply_defaults()
        return filler(tuple(bound.arguments.values()))


def _aligned(pointers: Sequence[int]) -> bool | tuple[bool, ...]:
    """True where all addresses are multiples of 16, else which are."""
    return functools.reduce(operator.or_, pointers) % 16 == 0 or tuple([p % 16 == 0 for p in pointers])


def _filled(node: Any, values: Sequence[Any]) -> Any:
    if type(node) is Slot:
        return values[node.place]
    if not isinstance(node, tuple):
        return node
    filled = [_filled(n, values) for n in node]
    return type(node)(*filled) if hasattr(node, "_fields") else tuple(filled)


def filler(arguments: tuple[Any, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The function from a launch's values to `arguments` with the Slots filled.

    Written out as one expression, as the standard library writes named tuples: walking the arguments takes longer than a launch.
    """
    fixed: list[Any] = []

    def expression(node: Any) -> str:
        if type(node) is Slot:
            return f"values[{node.place}]"
        if isinstance(node, tuple):
            return "(" + "".join(expression(n) + "," for n in node) + ")"
        if node is None or type(node) is int:
            return repr(node)
        fixed.append(node)
        return f"fixed[{len(fixed) - 1}]"

    return eval(f"lambda values: {expression(arguments)}", {"fixed": tuple(fixed)})


class Workspace(NamedTuple):
    """Memory that one launch uses at a time: zeroed int32 on which its programs count themselves, one for all and one a group, set
    back by the last to finish; and one float32 a program and group."""

    ticket: Tensor
    parts: Tensor
    one: Tensor  # 0-d float32, to allocate others like it, which is the fastest way


PROGRAMS_A_GROUP = 64
_KEPT = 2**14  # programs: 65 KiB a stream
_workspaces: dict[tuple[int, int, bool], Workspace] = {}


def workspace(programs: int, device: torch.device, second: bool = False) -> Workspace:
    """Launches of one stream follow each other, so they share theirs; `second`: beside another of the same launch.

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
    """What is kept must not come from a pool that a thread allocates from for a while, as torch.compile does to warm up a CUDA graph.

    A new thread allocates as usual, on the default stream.
    """
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
